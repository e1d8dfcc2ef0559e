"""The loss of a batch, for every architecture and with a teacher.

Losses are sums over weights; the caller divides by the weight of the whole
global step. `predict` returns the hidden states that predict the targets of a
batch and is the only place that knows how each architecture reads a batch;
evaluation uses it too.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from encdec_adapt.cli import keys
from encdec_adapt.models import build, decoder_only, expert_layer, model_config
from encdec_adapt.ops import distillation_loss, vocabulary_loss

Batch = Mapping[str, Array]


@dataclasses.dataclass(frozen=True)
class LossConfig:
  """Keys of `config.loss`: weights of the parts of the loss."""

  distillation: float = keys.key(
    0.0,
    "Share of the loss that is cross-entropy to the teacher's full"
    ' distribution (Gemma 2 report, section 3: 1); the rest is cross-entropy'
    ' to the data.',
    at_least=0,
    at_most=1,
  )
  temperature: float = keys.key(
    1.0, 'Temperature of both distributions in distillation.', above=0
  )
  z_loss: float = keys.key(
    0.0, 'Weight of the squared log-normaliser.', at_least=0
  )
  label_smoothing: float = keys.key(
    0.0, 'Share of the target spread over the vocabulary.', at_least=0, below=1
  )
  on_inputs: bool = keys.key(
    False,
    'Causal decoders on pairs: predict the inputs too, not the targets only.',
  )
  load_balance: float = keys.key(
    0.01,
    'Models with experts: weight of the load-balancing loss, per layer over'
    ' the tokens of a microbatch (Switch Transformer: 0.01).',
    at_least=0,
  )
  router_z_loss: float = keys.key(
    0.0,
    "Models with experts: weight of the router's z-loss (ST-MoE: 0.001).",
    at_least=0,
  )
  chunk: int = keys.key(
    1024,
    'Tokens of a device whose logits are in memory at a time. Devices that'
    ' share a table gather theirs: 256 on each of 16 are 4096 rows of logits.',
    at_least=1,
  )

  def __post_init__(self):
    keys.check(self, 'config.loss.')


@dataclasses.dataclass(frozen=True)
class TeacherConfig:
  """Keys of `config.teacher`: a decoder-only model to distill from."""

  checkpoint: str = keys.key(
    '', "Work directory or Hugging Face folder of the teacher; '' for none."
  )
  dtype: str = keys.key(
    '',
    "Dtype in which its parameters are held: 'float32', 'bfloat16', or '' for"
    ' config.compute.dtype.',
    one_of=('', 'float32', 'bfloat16'),
  )

  def __post_init__(self):
    keys.check(self, 'config.teacher.')


def predict(
  model: build.Model,
  params: decoder_only.Params,
  batch: Batch,
  **options: Any,
) -> Float[Array, 'B T D']:
  """Computes the hidden states that predict `batch['targets']`.

  An encoder-decoder reads the pair, an encoder-only model its inputs. A
  decoder-only model reads the decoder fields of a causal batch, and the
  teacher's row of a batch of pairs, from which the positions that predict the
  targets are gathered; a prefix decoder sees the inputs there from both sides.

  Args:
    model: the model.
    params: parameters of the model.
    batch: fields of `data.batch`.
    **options: `routing` and `dropout` of `decoder_only.Decoder.run_stack`.
  """

  def side(name: str) -> list[Array]:
    return [batch[f'{name}_{x}'] for x in ('tokens', 'segments', 'positions')]

  if isinstance(model.config, model_config.EncoderDecoderConfig):
    encoder = side('encoder')
    encoded = model.encode(params, *encoder, **options)
    return model.decode(
      params, *side('decoder'), encoded, encoder[1], **options
    )
  if model.config.is_encoder:
    return model.decode(params, *side('encoder'), **options)
  if 'encoder_tokens' not in batch:
    return model.decode(params, *side('decoder'), **options)
  prefix = None
  if model.config.decoder.role == 'prefix':
    prefix = inputs_of(batch)
  hidden = model.decode(params, *side('teacher'), prefix=prefix, **options)
  return jnp.take_along_axis(
    hidden, batch['teacher_index'][..., None], axis=1
  )  # [B, T, D]


def inputs_of(batch: Batch) -> Int[Array, 'B R']:
  """Returns 1 at BOS and the inputs of pairs in the teacher's row, else 0."""
  # A target stands one after the position that predicts it.
  rows = jnp.arange(len(batch['targets']))[:, None]
  after = batch['teacher_index'] + 1
  is_target = jnp.zeros_like(batch['teacher_segments'])
  is_target = is_target.at[rows, after].max(
    jnp.int32(batch['decoder_segments'] > 0)
  )
  return jnp.int32((batch['teacher_segments'] > 0) & (is_target == 0))


def loss_sums(
  model: build.Model,
  params: decoder_only.Params,
  batch: Batch,
  config: LossConfig,
  teacher: tuple[build.Model, decoder_only.Params] | None = None,
  dropout: decoder_only.Dropout | None = None,
) -> vocabulary_loss.LossSums:
  """Computes the loss of a batch as sums over its weights.

  Args:
    model: the model that is trained.
    params: parameters of `model`.
    batch: fields of `data.batch`.
    config: weights of the parts.
    teacher: decoder-only model and parameters; needed where
      `config.distillation` is above 0. No gradient reaches it.
    dropout: dropout of the trained model; the teacher has none.

  Returns:
    Sums; `total` carries the gradient.
  """
  source = None
  if config.distillation:
    other, other_params = teacher
    source = distillation_loss.Teacher(
      predict(other, other_params, batch),
      other.head(other_params),
      softcap=other.config.decoder.final_softcap,
      share=config.distillation,
      temperature=config.temperature,
    )
  stack, routing = model.config.decoder, []
  sums = vocabulary_loss.cross_entropy(
    predict(model, params, batch, routing=routing, dropout=dropout),
    model.head(params),
    batch['targets'],
    batch['weights'],
    vocab_size=stack.outputs,
    softcap=stack.final_softcap,
    z_loss=config.z_loss,
    label_smoothing=config.label_smoothing,
    chunk=config.chunk,
    teacher=source,
  )
  if not routing:
    return sums
  # Router losses are means; scaled by the weight they add up like the sums.
  routed = jax.tree.map(
    lambda mean: sums.weight * mean, expert_layer.mean_losses(routing)
  )
  total = sums.total + config.load_balance * routed.balance
  total = total + config.router_z_loss * routed.z
  return sums.replace(total=total, routing=routed)
