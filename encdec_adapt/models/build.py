"""Builds a model from its config, for training and inference."""

from encdec_adapt.models import (
  decoder_only,
  encoder_decoder,
  execution,
  model_config,
)

Model = decoder_only.DecoderOnly | encoder_decoder.EncoderDecoder


def build(
  config: model_config.ModelConfig,
  compute: execution.ComputeConfig = execution.ComputeConfig(),
) -> Model:
  """Makes a model: a hashable value with functions of parameters.

  Args:
    config: shape of the model.
    compute: how it is computed; by default in float32, without
      rematerialisation.
  """
  if isinstance(config, model_config.EncoderDecoderConfig):
    return encoder_decoder.EncoderDecoder(config, compute)
  return decoder_only.DecoderOnly(config, compute)
