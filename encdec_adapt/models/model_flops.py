"""FLOPs of a model's forward pass, by the formula of `telemetry.flops`."""

from encdec_adapt.models import model_config as configs
from encdec_adapt.telemetry import flops


def forward(
  model: configs.ModelConfig, encoder: int, decoder: int, teacher: int
) -> int:
  """FLOPs of one row.

  Args:
    model: the model.
    encoder: S, or 0 without inputs.
    decoder: T.
    teacher: length of the row in which a decoder-only model reads a pair.
  """
  total = flops.vocabulary(
    model.decoder.width, model.decoder.vocab_size, decoder
  )
  if isinstance(model, configs.EncoderDecoderConfig):
    total += flops.forward(stack_shape(model.encoder), encoder)
    return total + flops.forward(
      stack_shape(model.decoder), decoder, source_length=encoder
    )
  length = teacher if encoder else decoder
  return total + flops.forward(stack_shape(model.decoder), length)


def decoding(model: configs.ModelConfig, encoder: int, decoder: int) -> int:
  """FLOPs of one row's last step of decoding.

  Args:
    model: the model.
    encoder: S, which an encoder has read before.
    decoder: T, all of them in the cache after the step.
  """
  total = flops.vocabulary(model.decoder.width, model.decoder.vocab_size, 1)
  source = encoder if isinstance(model, configs.EncoderDecoderConfig) else 0
  return total + flops.decoding(
    stack_shape(model.decoder), decoder, source_length=source
  )


def stack_shape(stack: configs.StackConfig) -> flops.StackShape:
  """The numbers of a stack that FLOPs depend on."""
  return flops.StackShape(
    width=stack.width,
    mlp=stack.mlp_width,
    query_heads=stack.heads,
    kv_heads=stack.kv_heads,
    head_dim=stack.head_dim,
    windows=tuple(
      stack.window if stack.layer_kind(i) == 'local' else None
      for i in range(stack.layers)
    ),
    causal=stack.role == 'causal',
    window_rule=stack.window_rule,
    cross_width=stack.cross_width,
    cross_layers=sum(
      stack.reads_encoder(stack.layer_kind(i)) for i in range(stack.layers)
    ),
    cross_merged=stack.cross_merged,
    **_sparse_shape(stack),
  )


def _sparse_shape(stack: configs.StackConfig) -> dict[str, int]:
  """Fields of `flops.StackShape` of layers with experts."""
  if not stack.experts:
    return {}
  return {
    'sparse_layers': stack.layers - stack.dense_layers,
    'sparse_mlp': (
      stack.experts_per_token * stack.expert_width + stack.shared_expert_width
    ),
    'router_outputs': stack.experts + stack.shared_expert_gate,
  }
