"""Scores of a model on held-out records: loss per target token, exact rows.

Every model is measured on the same target tokens, and again with the prefixes
of other examples: if the loss is not clearly worse, an encoder-decoder ignores
its encoder, and a decoder-only model hardly uses the prefix. From `evaluation`,
this module imports only `measures` and `results`.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import functools

import jax
from jax import numpy as jnp
from jaxtyping import Int
import numpy as np

from encdec_adapt import config as config_lib
from encdec_adapt.base import errors
from encdec_adapt.data.records import record_sets
from encdec_adapt.evaluation.measures import perplexity
from encdec_adapt.evaluation.results import results_store
from encdec_adapt.generation import model_in_memory
from encdec_adapt.models import base_model, heads
from encdec_adapt.objectives import framing
from encdec_adapt.ops import partition
from encdec_adapt.sharding import placement as placement_lib
from encdec_adapt.stored import model_on_disk
from encdec_adapt.telemetry import progress
from encdec_adapt.training import setup
from encdec_adapt.training import state as state_lib
from encdec_adapt.training.metrics import token_metrics

TASK = 'held_out'
SHUFFLED = 'loss_shuffled_prefix'
TARGET_TOKENS = 'target_tokens'


@dataclasses.dataclass(frozen=True)
class HeldOutEvaluation:
  """Evaluates models on held-out rows.

  Attributes:
    record_set: the rows.
  """

  record_set: record_sets.RecordSet
  name = TASK

  def options(self) -> results_store.Options:
    """Returns all inputs of the scores: the rows."""
    # The folder alone is not enough: its records may be rebuilt.
    digests = ' '.join(self.record_set.digests)
    return {
      'records': str(self.record_set.folder),
      'rows': results_store.text_digest(digests),
    }

  def check(self, stored: model_on_disk.StoredModel) -> None:
    """Checks that a model can read the records.

    Raises:
      UserError: the objective does not suit the model or has rows with several
        answers, the model has no vocabularies, or the records have different
        vocabularies.
    """
    spec = self.record_set.spec
    config_lib.check_kind(stored.model, spec.objectives[0])
    config_lib.check_passages(stored.model, spec.objectives[0])
    # Cross-entropy of single rows, independent of the run's loss.
    if any(
      x.rows.answers > 1 or x.rows.content == 'texts' for x in spec.objectives
    ):
      raise errors.UserError(
        f'the records {self.record_set.folder} have several answers or texts in'
        ' a row, and the held-out loss is over single targets; leave them out.'
      )
    opened = stored.require_vocabularies()
    # Records hold token ids: another vocabulary would decode them to other
    # text, and the loss would be silently wrong.
    prints = {'encoder': spec.encoder_vocabulary, 'decoder': spec.vocabulary}
    sides = {side: opened.sides[side] for side in stored.model.stacks}
    records = self.record_set
    for side, vocabulary in sides.items():
      if vocabulary.fingerprint != prints[side]:
        raise errors.UserError(
          f'the records {records.folder} were made with the vocabulary'
          f' {prints[side][:12]} of the {side}, the model with'
          f' {vocabulary.path} ({vocabulary.fingerprint[:12]}); make records'
          " with the model's vocabularies."
        )
    record_sets.check_framing(records.folder, records.manifest, sides)
    setup.check_positions(stored.model, spec.lengths)

  def scores(
    self, model: model_in_memory.LoadedModel, rows: int, report: progress.Report
  ) -> list[results_store.Score]:
    """Measures a model.

    Args:
      model: the model.
      rows: rows at a time; divides over the model's devices.
      report: progress callback (rows done, all rows).

    Returns:
      Metrics of the task `TASK`: `loss` in nats per target token, `accuracy`
      (share of target tokens), `exact_match` (share of examples with all target
      tokens right under greedy decoding), `target_tokens`, and
      `loss_shuffled_prefix` (not for rows without inputs or with several pairs,
      nor for a single row); for classifiers also `f1` and `majority`, the share
      of the most frequent label.
    """
    placement, record_set = model.placement, self.record_set
    spec, count = record_set.spec, len(record_set)
    read = functools.partial(batches, record_set, model, rows, report)
    evaluate = functools.partial(_evaluator(placement), model.params)
    result = evaluate(read())
    # Ratios exclude rows without targets.
    tokens, n = result.weight, result.ratios.shape[2]
    groups = record_set.groups(result.rows)
    scores = result.scores(TASK, groups)
    scores.append(results_store.Score(TASK, TARGET_TOKENS, tokens, None, n))
    if isinstance(model.config.decoder.head, heads.Labels):
      scores += _label_scores(placement, model.params, read())
      scores.append(_majority(placement, read(), groups))
    # Packed rows hold several pairs: no single prefix to swap.
    has_inputs = min(spec.lengths.encoder, spec.lengths.decoder) > 0
    if has_inputs and not spec.pack and count > 1:
      # Half a set away: neighbouring rows may be pieces of the same document,
      # and its prefix would help.
      shuffled = evaluate(read(prefix_offset=count // 2))
      loss, *_ = shuffled.scores(TASK, groups)
      scores.append(dataclasses.replace(loss, metric=SHUFFLED))
    return scores


def batches(
  record_set: record_sets.RecordSet,
  model: model_in_memory.LoadedModel,
  rows: int,
  report: progress.Report,
  **options: int,
) -> Iterator[framing.Batch]:
  """Yields this process's rows of every batch, and reports the rows before it.

  Args:
    record_set: the rows.
    model: the model that reads them.
    rows: rows at a time.
    report: progress callback (rows done, all rows).
    **options: further options of `loader.evaluation_batches`.
  """
  teacher = setup.reads_teacher_row(record_set.spec.lengths, model.config)
  stream = setup.evaluation_batches(
    record_set, rows, model.placement, teacher=teacher, **options
  )
  # Batch i is requested after dispatching the previous ones, so about i batches
  # are done.
  for i, batch in enumerate(stream):
    report(i * rows, len(record_set))
    yield batch


@functools.cache
def _evaluator(placement: state_lib.Placement) -> perplexity.Evaluator:
  # Compared models often have equal shapes: the cache saves a compilation.
  return perplexity.Evaluator(placement, token_metrics.TargetTokens())


def _label_scores(
  placement: state_lib.Placement,
  params: base_model.Params,
  stream: Iterator[framing.Batch],
) -> list[results_store.Score]:
  run = functools.partial(_confusion, placement, params)
  # Counts of a batch fit int32; counts of a whole record set may not.
  table = sum(map(np.int64, perplexity.outputs(run, stream, placement)))
  macro, micro = f1(table)
  n = int(table.sum())
  return [
    results_store.Score(TASK, 'macro_f1', macro, None, n),
    results_store.Score(TASK, 'f1', micro, None, n),
  ]


def _majority(
  placement: state_lib.Placement,
  stream: Iterator[framing.Batch],
  groups: Sequence[str],
) -> results_store.Score:
  """Returns the accuracy of predicting the most frequent label everywhere."""
  run = functools.partial(_label_counts, placement)
  counts = np.concatenate([*perplexity.outputs(run, stream, placement)])
  # Filler rows of the last batch have no labels.
  counts = counts[counts.any(axis=1)].astype(np.float64)
  right = counts[:, counts.sum(axis=0).argmax()]
  return results_store.ratio_score(
    TASK, 'majority', right, counts.sum(axis=1), groups
  )


def f1(table: Int[np.ndarray, 'K K']) -> tuple[float, float]:
  """Computes F1 from the counts of (true label, predicted label).

  F1 is not a mean over examples, so it has neither intervals nor paired tests.

  Returns:
    `macro_f1`, the mean over occurring labels, and `f1`, the micro-average over
    all labels but the first ("no" or, for tags, "outside").
  """
  # F1 = 2 TP / (2 TP + FP + FN); row and column sums both include the TP.
  right, totals = np.diag(table), table.sum(axis=0) + table.sum(axis=1)
  # A label that neither occurs nor is predicted would be 0 / 0.
  occurs = totals > 0
  macro = float(np.mean(2 * right[occurs] / totals[occurs]))
  total = totals[1:].sum()
  return macro, float(2 * right[1:].sum() / total) if total else 0.0


@functools.partial(jax.jit, static_argnums=0)
def _label_counts(
  placement: state_lib.Placement, batch: framing.Batch
) -> jax.Array:
  """Counts the true labels of every row, [rows, K]."""
  labels = jnp.arange(placement.model.config.decoder.outputs)
  is_label = batch['targets'][..., None] == labels
  counts = jnp.sum(is_label & (batch['weights'] > 0)[..., None], axis=1)
  # Every process gets the counts of all rows.
  return jax.lax.with_sharding_constraint(
    counts, placement_lib.replicated(placement.mesh)
  )


@functools.partial(jax.jit, static_argnums=0)
def _confusion(
  placement: state_lib.Placement,
  params: base_model.Params,
  batch: framing.Batch,
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
