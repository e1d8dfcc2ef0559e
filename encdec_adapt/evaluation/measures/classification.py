"""F1 of classifiers on held-out records.

Loss and accuracy come from `perplexity`: every labelled token is a target. F1
is not a mean over examples, so it has neither intervals nor paired tests. From
`evaluation`, this module imports only `results`.
"""

from collections.abc import Iterable, Mapping

import jax
from jax import numpy as jnp
from jaxtyping import Int
import numpy as np

from encdec_adapt.evaluation.results import results_store
from encdec_adapt.models import base_model
from encdec_adapt.ops import partition
from encdec_adapt.sharding import placement as placement_lib
from encdec_adapt.training import state as state_lib
from encdec_adapt.training import step as step_lib
from encdec_adapt.training.losses import loss


def scores(
  task: str,
  placement: state_lib.Placement,
  params: base_model.Params,
  batches: Iterable[Mapping[str, np.ndarray]],
) -> list[results_store.Score]:
  """Returns `macro_f1`, the mean over the labels, and `f1` without the first.

  `f1` is micro-averaged over all labels but the first ("no" or, for tags,
  "outside").

  Args:
    task: name of the task.
    placement: the classifier and the placement of its parameters.
    params: parameters of the classifier.
    batches: this process's rows of every batch.
  """
  count = jax.jit(_confusion, static_argnums=0)
  # Counts of a batch fit int32; counts of a whole record set may not.
  table = np.zeros(2 * [placement.model.config.decoder.outputs], np.int64)
  for batch in batches:
    fields = {name: x for name, x in batch.items() if name != 'row'}
    fields = step_lib.place_batch(fields, placement)
    table += np.asarray(count(placement, params, fields), np.int64)
  macro, micro = f1(table)
  n = int(table.sum())
  return [
    results_store.Score(task, 'macro_f1', macro, None, n),
    results_store.Score(task, 'f1', micro, None, n),
  ]


def f1(table: Int[np.ndarray, 'K K']) -> tuple[float, float]:
  """Computes F1 from the counts of (true label, predicted label).

  Returns:
    The mean over occurring labels, and the micro-average over all labels but
    the first.
  """
  # F1 = 2 TP / (2 TP + FP + FN); row and column sums both include the TP.
  right, totals = np.diag(table), table.sum(axis=0) + table.sum(axis=1)
  # A label that neither occurs nor is predicted would be 0 / 0.
  occurs = totals > 0
  macro = float(np.mean(2 * right[occurs] / totals[occurs]))
  total = totals[1:].sum()
  return macro, float(2 * right[1:].sum() / total) if total else 0.0


def _confusion(
  placement: state_lib.Placement,
  params: base_model.Params,
  batch: loss.Batch,
) -> jax.Array:
  """Counts the labels of a batch by true and predicted label, [K, K]."""
  model = placement.model
  size = model.config.decoder.outputs
  with partition.use(placement.mesh, placement.rules.as_dict()):
    hidden = model.architecture.predict(model, params, batch)
    label = jnp.argmax(model.logits(params, hidden), axis=-1)
    # -1 is no cell: tokens without weight are not counted.
    cell = jnp.where(batch['weights'] > 0, batch['targets'] * size + label, -1)
    counts = jnp.sum(cell[..., None] == jnp.arange(size * size), axis=(0, 1))
    # Replicated: every process gets the counts of all rows, not just its shard.
    return jax.lax.with_sharding_constraint(
      counts.reshape(size, size), placement_lib.replicated(placement.mesh)
    )
