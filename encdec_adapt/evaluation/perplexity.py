"""Loss per target token on held-out batches.

Encoder-decoders and decoder-only models are measured on the same target tokens
of the same batches of pairs (`training.losses.predict` feeds them);
decoder-only models also on causal batches.
"""

from collections.abc import Iterable, Mapping
import dataclasses

import jax
import numpy as np

from encdec_adapt.cli import errors
from encdec_adapt.models import decoder_only
from encdec_adapt.ops import partition, vocabulary_loss
from encdec_adapt.sharding import compiler
from encdec_adapt.training import losses
from encdec_adapt.training import state as state_lib
from encdec_adapt.training import step as step_lib

_SUMS = ('cross_entropy', 'correct', 'weight', 'exact_rows', 'rows')


@dataclasses.dataclass(frozen=True)
class Result:
  """Result of an evaluation.

  Attributes:
    loss: cross-entropy to the data in nats per target token.
    accuracy: share of target tokens with the largest logit.
    target_tokens: sum of the weights.
    exact_match: share of rows whose targets greedy decoding gives; it is a
      share of answers where a row is one pair.
  """

  loss: float
  accuracy: float
  target_tokens: float
  exact_match: float


class Evaluator:
  """Evaluates one model; compiles once per shape of batch."""

  def __init__(self, where: state_lib.Placement, chunk: int = 1024):
    """Defines the evaluation.

    Args:
      where: the model and the placement of its parameters.
      chunk: number of tokens whose logits are computed at a time.
    """
    self._where = where
    stack = where.model.config.decoder

    def sums(params, batch) -> dict[str, jax.Array]:
      """Sums over the targets of a batch."""
      with partition.use(where.mesh, where.rules.as_dict()):
        loss = vocabulary_loss.cross_entropy(
          losses.predict(where.model, params, batch),
          where.model.head(params),
          batch['targets'],
          batch['weights'],
          vocab_size=stack.vocab_size,
          softcap=stack.final_softcap,
          chunk=chunk,
        )
      return {name: getattr(loss, name) for name in _SUMS}

    self.sums = jax.jit(sums, compiler_options=compiler.options(where.mesh))

  def __call__(
    self,
    params: decoder_only.Params,
    batches: Iterable[Mapping[str, np.ndarray]],
  ) -> Result:
    """Evaluates parameters on a stream of batches.

    Up to rounding, the result is independent of the batch size.

    Args:
      params: parameters of the model.
      batches: this process's rows of every batch; filler rows have weight 0.

    Raises:
      UserError: the batches have no target tokens.
    """
    totals = np.zeros(len(_SUMS), np.float64)
    running = None
    for batch in batches:
      fields = {name: x for name, x in batch.items() if name != 'row'}
      fields = step_lib.place_batch(fields, self._where)
      previous, running = running, self.sums(params, fields)
      # Read one batch late, while the next is prepared.
      totals += _read(previous)
    totals += _read(running)
    cross_entropy, correct, weight, exact, rows = map(float, totals)
    if weight == 0:
      raise errors.UserError(
        'the evaluation has no target tokens: there are no held-out rows, or'
        ' all weights are 0. Materialise an evaluation split with text in it.'
      )
    return Result(
      cross_entropy / weight, correct / weight, weight, exact / rows
    )


def _read(sums: Mapping[str, jax.Array] | None) -> np.ndarray:
  """Returns the sums of one batch as float64, zeros for None."""
  if sums is None:
    return np.zeros(len(_SUMS), np.float64)
  return np.array([float(sums[name]) for name in _SUMS], np.float64)
