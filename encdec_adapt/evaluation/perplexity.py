"""Loss per target token on held-out batches.

Encoder-decoders and decoder-only models are measured on the same target tokens
of the same batches of pairs (`models.architecture` feeds them); decoder-only
models also on causal batches.
"""

from collections.abc import Iterable, Mapping
import dataclasses

import jax
from jax import numpy as jnp
import numpy as np

from encdec_adapt.cli import errors
from encdec_adapt.evaluation import results
from encdec_adapt.models import build, decoder_only
from encdec_adapt.ops import partition, vocabulary_loss
from encdec_adapt.sharding import compiler, placement
from encdec_adapt.training import losses
from encdec_adapt.training import state as state_lib
from encdec_adapt.training import step as step_lib


@dataclasses.dataclass(frozen=True)
class Result:
  """Sums over the targets of every row that has any, [n] each.

  Attributes:
    cross_entropy: cross-entropy to the data in nats.
    correct: weight of the target tokens with the largest logit.
    weight: sum of the weights.
    exact: whether greedy decoding gives the targets of the row.
  """

  cross_entropy: np.ndarray
  correct: np.ndarray
  weight: np.ndarray
  exact: np.ndarray

  @property
  def target_tokens(self) -> float:
    """Sum of the weights."""
    return float(self.weight.sum())

  @property
  def loss(self) -> float:
    """Cross-entropy in nats per target token."""
    return float(self.cross_entropy.sum()) / self.target_tokens

  @property
  def accuracy(self) -> float:
    """Share of target tokens with the largest logit."""
    return float(self.correct.sum()) / self.target_tokens

  @property
  def exact_match(self) -> float:
    """Share of rows that are exact: of answers where a row is one pair."""
    return float(self.exact.mean())

  def scores(self, task: str) -> list[results.Score]:
    """Returns `loss`, `accuracy` and `exact_match` as scores of a task.

    A ratio of sums, such as the loss, has a standard error by the delta
    method: the scores of its rows are the ratio's linearisation, whose mean is
    the ratio.
    """
    return [
      _ratio(task, 'loss', self.cross_entropy, self.weight),
      _ratio(task, 'accuracy', self.correct, self.weight),
      _ratio(task, 'exact_match', self.exact, np.ones_like(self.exact)),
    ]


def _ratio(
  task: str,
  metric: str,
  above: np.ndarray,
  below: np.ndarray,
) -> results.Score:
  """Returns the score of a ratio of sums over rows."""
  value, n = float(above.sum() / below.sum()), len(above)
  scores = value + (above - value * below) / below.mean()
  stderr = float(scores.std(ddof=1)) / n**0.5 if n > 1 else None
  return results.Score(task, metric, value, stderr, n, tuple(scores.tolist()))


def row_sums(
  model: build.Model,
  params: decoder_only.Params,
  batch: losses.Batch,
  chunk: int = 1024,
) -> jax.Array:
  """Sums over the targets of every row: the fields of `Result`, [4, B].

  Args:
    model: the model.
    params: parameters of the model.
    batch: fields of `data.batch`.
    chunk: number of tokens whose logits are computed at a time.
  """
  stack = model.config.decoder
  nats, correct = vocabulary_loss.per_token(
    model.architecture.predict(model, params, batch),
    model.head(params),
    batch['targets'],
    vocab_size=stack.outputs,
    softcap=stack.final_softcap,
    chunk=chunk,
  )
  weights = batch['weights']  # [B, T]
  # A weight of zero hides any value.
  hidden = weights == 0
  exact = jnp.all((correct > 0) | hidden, axis=1)
  sums = (
    jnp.sum(jnp.where(hidden, 0.0, weights * nats), axis=1),
    jnp.sum(weights * correct, axis=1),
    jnp.sum(weights, axis=1),
    exact.astype(jnp.float32),
  )
  return jnp.stack(sums)


class Evaluator:
  """Evaluates one model; compiles once per shape of batch."""

  def __init__(self, where: state_lib.Placement, chunk: int = 1024):
    """Defines the evaluation.

    Args:
      where: the model and the placement of its parameters.
      chunk: number of tokens whose logits are computed at a time.
    """
    self._where = where

    def sums(params, batch) -> jax.Array:
      """Sums over the targets of every row of a batch."""
      with partition.use(where.mesh, where.rules.as_dict()):
        return row_sums(where.model, params, batch, chunk)

    self.sums = jax.jit(
      sums,
      out_shardings=placement.replicated(where.mesh),
      compiler_options=compiler.options(where.mesh),
    )

  def __call__(
    self,
    params: decoder_only.Params,
    batches: Iterable[Mapping[str, np.ndarray]],
  ) -> Result:
    """Evaluates parameters on a stream of batches.

    Up to rounding, the result is independent of the batch size. Rows are in
    the order of the batches, of the devices where there are several processes.

    Args:
      params: parameters of the model.
      batches: this process's rows of every batch; filler rows have weight 0.

    Raises:
      UserError: the batches have no target tokens.
    """
    found: list[np.ndarray] = []
    running = None
    for batch in batches:
      fields = {name: x for name, x in batch.items() if name != 'row'}
      fields = step_lib.place_batch(fields, self._where)
      previous, running = running, self.sums(params, fields)
      if previous is not None:  # One batch late, while the next is prepared.
        found.append(np.asarray(previous, np.float64))
    if running is not None:
      found.append(np.asarray(running, np.float64))
    sums = np.concatenate(found, axis=1) if found else np.zeros((4, 0))
    sums = sums[:, sums[2] != 0]
    if not sums.size:
      raise errors.UserError(
        'the evaluation has no target tokens: there are no held-out rows, or'
        ' all weights are 0. Materialise an evaluation split with text in it.'
      )
    return Result(*sums)
