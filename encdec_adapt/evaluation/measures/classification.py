"""F1 of classifiers on held-out records.

Loss and accuracy are those of `perplexity`: every labelled token is a target.
"""

from collections.abc import Iterable, Mapping

import jax
from jax import numpy as jnp
from jaxtyping import Int
import numpy as np

from encdec_adapt.evaluation.results import results_store
from encdec_adapt.models import base_model
from encdec_adapt.ops import partition
from encdec_adapt.sharding import placement
from encdec_adapt.training import losses
from encdec_adapt.training import state as state_lib
from encdec_adapt.training import step as step_lib


def scores(
  task: str,
  where: state_lib.Placement,
  params: base_model.Params,
  batches: Iterable[Mapping[str, np.ndarray]],
) -> list[results_store.Score]:
  """Returns `macro_f1`, the mean over the labels, and `f1` without the first.

  `f1` counts what has or is given another label than the first one, which is
  "no" or, for tags, "outside".

  Args:
    task: name of the task.
    where: the classifier and the placement of its parameters.
    params: its parameters.
    batches: this process's rows of every batch.
  """
  count = jax.jit(_confusion, static_argnums=0)
  table = np.zeros(2 * [where.model.config.decoder.classes], np.int64)
  for batch in batches:
    fields = {name: x for name, x in batch.items() if name != 'row'}
    fields = step_lib.place_batch(fields, where)
    table += np.asarray(count(where, params, fields), np.int64)
  macro, micro = f1(table)
  n = int(table.sum())
  return [
    results_store.Score(task, 'macro_f1', macro, None, n),
    results_store.Score(task, 'f1', micro, None, n),
  ]


def f1(table: Int[np.ndarray, 'K K']) -> tuple[float, float]:
  """Computes F1 from the counts of (right label, given label).

  Returns:
    The mean over labels that occur, and that of all but the first together.
  """
  right, both = np.diag(table), table.sum(axis=0) + table.sum(axis=1)
  occurs = both > 0
  macro = float(np.mean(2 * right[occurs] / both[occurs]))
  others = both[1:].sum()
  return macro, float(2 * right[1:].sum() / others) if others else 0.0


def _confusion(
  where: state_lib.Placement,
  params: base_model.Params,
  batch: losses.loss.Batch,
) -> jax.Array:
  """Counts the labels of a batch by right and given label, [K, K]."""
  model = where.model
  size = model.config.decoder.classes
  with partition.use(where.mesh, where.rules.as_dict()):
    hidden = model.architecture.predict(model, params, batch)
    given = jnp.argmax(model.logits(params, hidden), axis=-1)
    cell = jnp.where(batch['weights'] > 0, batch['targets'] * size + given, -1)
    counts = jnp.sum(cell[..., None] == jnp.arange(size * size), axis=(0, 1))
    total = counts.reshape(size, size)
    return jax.lax.with_sharding_constraint(
      total, placement.replicated(where.mesh)
    )
