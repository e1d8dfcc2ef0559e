"""What the loss of a batch is.

Losses are sums over weights; whoever calls divides by the weight of the
whole global step. The hidden states that predict a batch's targets come
from `predict`, which is the only place that knows how each architecture
reads a batch; evaluation uses it too.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from encdec_adapt.models import build, decoder_only, experts
from encdec_adapt.models import config as model_config
from encdec_adapt.ops import distillation_loss, vocabulary_loss
from encdec_adapt.runtime import errors

Batch = Mapping[str, Array]


@dataclasses.dataclass(frozen=True)
class LossConfig:
  """Weights of the parts of the loss.

  Attributes:
    distillation: share of the loss that is cross-entropy to the teacher's
      full distribution (Gemma 2 report, section 3); the rest is
      cross-entropy to the data.
    temperature: of both distributions in the distillation.
    z_loss: weight of the squared log-normaliser.
    label_smoothing: share of the target spread over the vocabulary.
    load_balance: weight of the routers' load-balancing loss, in models with
      experts (`ops.experts.RouterLosses`).
    router_z_loss: weight of their z-loss, in models with experts.
    chunk: tokens whose logits exist at a time.
  """

  distillation: float = 0.0
  temperature: float = 1.0
  z_loss: float = 0.0
  label_smoothing: float = 0.0
  load_balance: float = 0.01
  router_z_loss: float = 0.0
  chunk: int = 1024

  def __post_init__(self):
    if not 0 <= self.distillation <= 1 or not 0 <= self.label_smoothing < 1:
      raise errors.UserError(
        f'config.loss: distillation is {self.distillation}, a share in'
        f' [0, 1]; label_smoothing is {self.label_smoothing}, a share in'
        ' [0, 1).'
      )
    if self.temperature <= 0 or self.z_loss < 0 or self.chunk < 1:
      raise errors.UserError(
        f'config.loss: temperature {self.temperature} must be above 0,'
        f' z_loss {self.z_loss} at least 0 and chunk {self.chunk} at least 1.'
      )
    for name in ('load_balance', 'router_z_loss'):
      if getattr(self, name) < 0:
        raise errors.UserError(
          f'config.loss.{name} is {getattr(self, name)}; it must be at least 0.'
        )


@flax.struct.dataclass
class StepSums:
  """Sums over the weights of a batch, fp32 scalars (or their shapes).

  Attributes:
    total: what is differentiated.
    cross_entropy: -log p(target).
    distillation: Kullback-Leibler divergence from the teacher; 0 without.
    z_loss: the z-loss part of `total`.
    correct: targets that are the most likely token.
    weight: weights.
    routing: `ops.experts.RouterLosses` times the weights of the batch, whose
      tokens they are of; None of a model without experts.
  """

  total: Any
  cross_entropy: Any
  distillation: Any
  z_loss: Any
  correct: Any
  weight: Any
  routing: Any = None


def predict(
  model: build.Model,
  params: decoder_only.Params,
  batch: Batch,
  *,
  routing: decoder_only.Routing = None,
) -> Float[Array, 'B T D']:
  """Hidden states that predict `batch['targets']`.

  An encoder-decoder reads the pair. A decoder-only model reads the decoder
  fields of a causal batch, and the teacher's row of a batch of pairs, from
  which the positions that predict the targets are gathered.

  Args:
    model: the model.
    params: its parameters.
    batch: fields of `data.batch`.
    routing: see `decoder_only.Decoder.run_stack`.
  """
  if isinstance(model.config, model_config.EncoderDecoderConfig):
    encoded = model.encode(
      params,
      batch['encoder_tokens'],
      batch['encoder_segments'],
      batch['encoder_positions'],
      routing=routing,
    )
    return model.decode(
      params,
      batch['decoder_tokens'],
      batch['decoder_segments'],
      batch['decoder_positions'],
      encoded,
      batch['encoder_segments'],
      routing=routing,
    )
  if 'encoder_tokens' not in batch:
    return model.decode(
      params,
      batch['decoder_tokens'],
      batch['decoder_segments'],
      batch['decoder_positions'],
      routing=routing,
    )
  hidden = model.decode(
    params,
    batch['teacher_tokens'],
    batch['teacher_segments'],
    batch['teacher_positions'],
    routing=routing,
  )
  return jnp.take_along_axis(
    hidden, batch['teacher_index'][..., None], axis=1
  )  # [B, T, D]


def loss_sums(
  model: build.Model,
  params: decoder_only.Params,
  batch: Batch,
  config: LossConfig,
  teacher: tuple[build.Model, decoder_only.Params] | None = None,
) -> StepSums:
  """Loss of a batch as sums over its weights.

  Args:
    model: the model that is trained.
    params: its parameters.
    batch: fields of `data.batch`.
    config: weights of the parts.
    teacher: decoder-only model and parameters; needed where
      `config.distillation` is above 0. No gradient reaches it.

  Returns:
    Sums; `total` carries the gradient.
  """
  routing = []
  hidden = predict(model, params, batch, routing=routing)
  table = model.head(params)
  zero = jnp.zeros((), jnp.float32)
  total, divergence, z_loss = zero, zero, zero
  hard = 1.0 - config.distillation
  data = _from_data(model, hidden, table, batch, config)
  if hard:
    total = hard * data.total
    z_loss = hard * data.z_loss
  if config.distillation:
    soft = _from_teacher(model, hidden, table, batch, config, *teacher)
    total = total + config.distillation * soft.total
    divergence = soft.kl
    z_loss = z_loss + soft.z_loss
  routed = None
  if routing:
    # By the batch's weight, as what is summed over it.
    routed = jax.tree.map(
      lambda mean: data.weight * mean, experts.mean_losses(routing)
    )
    total = total + config.load_balance * routed.balance
    total = total + config.router_z_loss * routed.z
  return StepSums(
    total=total,
    cross_entropy=data.cross_entropy,
    distillation=divergence,
    z_loss=z_loss,
    correct=data.correct,
    weight=data.weight,
    routing=routed,
  )


def _from_data(
  model: build.Model,
  hidden: jax.Array,
  table: jax.Array,
  batch: Batch,
  config: LossConfig,
) -> vocabulary_loss.LossSums:
  """Cross-entropy to the targets; the z-loss where the data has a share."""
  stack = model.config.decoder
  hard = 1.0 - config.distillation
  # Where the data's share is 0 its cross-entropy is only reported, and the
  # one-pass loss must not compute gradients for it.
  if not hard:
    hidden, table = jax.lax.stop_gradient((hidden, table))
  return vocabulary_loss.cross_entropy(
    hidden,
    table,
    batch['targets'],
    batch['weights'],
    vocab_size=stack.vocab_size,
    softcap=stack.final_softcap,
    # The z-loss is not shared out: it is config.z_loss in full.
    z_loss=config.z_loss / hard if hard else 0.0,
    label_smoothing=config.label_smoothing,
    chunk=config.chunk,
  )


def _from_teacher(
  model: build.Model,
  hidden: jax.Array,
  table: jax.Array,
  batch: Batch,
  config: LossConfig,
  teacher: build.Model,
  teacher_params: decoder_only.Params,
) -> distillation_loss.DistillationSums:
  """Cross-entropy to the teacher; the z-loss where it has all of the loss."""
  stack = model.config.decoder
  return distillation_loss.distillation(
    hidden,
    table,
    predict(teacher, teacher_params, batch),
    teacher.head(teacher_params),
    batch['weights'],
    vocab_size=stack.vocab_size,
    softcap=stack.final_softcap,
    teacher_softcap=teacher.config.decoder.final_softcap,
    temperature=config.temperature,
    z_loss=config.z_loss if config.distillation == 1 else 0.0,
    chunk=config.chunk,
  )
