"""Builds a model from its config, for training and inference."""

import jax.numpy as jnp

from encdec_adapt.models import decoder_only, encoder_decoder
from encdec_adapt.models import execution as executions
from encdec_adapt.models import model_config as configs
from encdec_adapt.ops import attention

Model = decoder_only.DecoderOnly | encoder_decoder.EncoderDecoder


def build(
  config: configs.ModelConfig,
  *,
  dtype=jnp.float32,
  remat: str = 'none',
  attention_backend: str = 'chunked',
  attention_chunk: int = attention.DEFAULT_CHUNK,
  scan_unroll: int = 1,
) -> Model:
  """Makes a model: a hashable value with functions of parameters.

  Args:
    config: shape of the model.
    dtype: dtype of activations and products; parameters are float32.
    remat: name of a rematerialisation policy (`execution.REMAT_POLICIES`).
    attention_backend: name of a backend of `ops.attention`.
    attention_chunk: queries per chunk of the chunked backend.
    scan_unroll: repeats of the layer pattern unrolled per scan iteration.

  Returns:
    A DecoderOnly or EncoderDecoder.

  Raises:
    UserError: an option that does not exist.
  """
  execution = executions.Execution(
    dtype=jnp.dtype(dtype),
    remat=remat,
    attention_backend=attention_backend,
    attention_chunk=attention_chunk,
    scan_unroll=scan_unroll,
  )
  if isinstance(config, configs.EncoderDecoderConfig):
    return encoder_decoder.EncoderDecoder(config, execution)
  return decoder_only.DecoderOnly(config, execution)
