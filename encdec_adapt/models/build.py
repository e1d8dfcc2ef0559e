"""Builds a model from its config, for training and inference.

The only module here that imports all model classes.
"""

import dataclasses
from typing import Any

from encdec_adapt.models import (
  base_model,
  encoder_decoder,
  execution,
  layers_index,
  model_config,
)

Model = base_model.SingleStack | encoder_decoder.EncoderDecoder


def build(
  config: model_config.ModelConfig,
  compute: execution.ComputeConfig = execution.REFERENCE,
) -> Model:
  """Builds a model, a hashable value with functions of parameters.

  Args:
    config: shape of the model.
    compute: execution choices; by default float32 without rematerialisation.
  """
  if config.architecture.encodes_prompt:
    return encoder_decoder.EncoderDecoder(config, compute)
  return base_model.SingleStack(config, compute)


def unroll(model: Model) -> Model:
  """Returns the model with an unscanned decoder, for decoding.

  A scan would copy each layer's cache for every token.
  """
  # Only the decoder: an encoder runs once per prompt, and a scanned program
  # compiles faster.
  decoder = layers_index.unroll(model.config.decoder)
  config = dataclasses.replace(model.config, decoder=decoder)
  return dataclasses.replace(model, config=config)


def unroll_params(model: Model, params: base_model.Params) -> dict[str, Any]:
  """Converts parameters of the model to parameters of `unroll(model)`."""
  decoder = layers_index.unroll_params(model.config.decoder, params['decoder'])
  return {**params, 'decoder': decoder}
