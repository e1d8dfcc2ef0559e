"""The loss of a batch, for every architecture and with a teacher.

Losses are sums over weights; the caller divides by the weight of the whole
global step. `models.architecture` computes the states that predict the targets.
"""

from collections.abc import Mapping
import dataclasses

import jax
from jaxtyping import Array

from encdec_adapt.cli import keys
from encdec_adapt.models import build, decoder_only, expert_layer
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
      other.architecture.predict(other, other_params, batch),
      other.head(other_params),
      softcap=other.config.decoder.final_softcap,
      share=config.distillation,
      temperature=config.temperature,
    )
  stack, routing = model.config.decoder, []
  sums = vocabulary_loss.cross_entropy(
    model.architecture.predict(
      model, params, batch, routing=routing, dropout=dropout
    ),
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
