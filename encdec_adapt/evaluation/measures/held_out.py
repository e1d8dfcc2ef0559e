"""Scores of a model on held-out records: loss per target token, exact rows.

Every model is measured on the same target tokens, and again with the prefixes
of other examples: if the loss is not clearly worse, an encoder-decoder ignores
its encoder, and a decoder-only model hardly uses the prefix. From `evaluation`,
this module imports only `results`.
"""

import dataclasses
import functools

from encdec_adapt import config as config_lib
from encdec_adapt.base import errors
from encdec_adapt.data.records import record_sets
from encdec_adapt.evaluation.measures import classification, perplexity
from encdec_adapt.evaluation.results import results_store
from encdec_adapt.generation import model_in_memory
from encdec_adapt.models import heads
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
    record_sets.check_framing(records.folder, records.manifest, sides)
    for side, vocabulary in sides.items():
      if vocabulary.fingerprint != prints[side]:
        raise errors.UserError(
          f'the records {records.folder} were made with the vocabulary'
          f' {prints[side][:12]} of the {side}, the model with'
          f' {vocabulary.path} ({vocabulary.fingerprint[:12]}); make records'
          " with the model's vocabularies."
        )

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
      nor for a single row); for classifiers also `classification.scores`.
    """
    placement, record_set = model.where, self.record_set
    spec, count = record_set.spec, len(record_set)
    teacher = setup.reads_teacher_row(spec.lengths, model.config)

    def measure(**options: int) -> perplexity.Result:
      batches = setup.evaluation_batches(
        record_set, rows, placement, teacher=teacher, **options
      )
      # The evaluator requests batch i after dispatching the previous ones, so
      # about i batches are done.
      counted = (
        (report(i * rows, count), batch)[1] for i, batch in enumerate(batches)
      )
      return _evaluator(placement)(model.params, counted)

    result = measure()
    # Ratios exclude rows without targets.
    tokens, n = result.weight, result.ratios.shape[2]
    groups = record_set.groups(result.rows)
    scores = result.scores(TASK, groups)
    scores.append(results_store.Score(TASK, TARGET_TOKENS, tokens, None, n))
    if isinstance(model.config.decoder.head, heads.Labels):
      batches = setup.evaluation_batches(record_set, rows, placement)
      scores += classification.scores(TASK, placement, model.params, batches)
    # Packed rows hold several pairs: no single prefix to swap.
    has_inputs = min(spec.lengths.encoder, spec.lengths.decoder) > 0
    if has_inputs and not spec.pack and count > 1:
      # Half a set away: neighbouring rows may be pieces of the same document,
      # and its prefix would help.
      loss, *_ = measure(prefix_offset=count // 2).scores(TASK, groups)
      scores.append(dataclasses.replace(loss, metric=SHUFFLED))
    return scores


@functools.cache
def _evaluator(placement: state_lib.Placement) -> perplexity.Evaluator:
  # Compared models often have equal shapes: the cache saves a compilation.
  return perplexity.Evaluator(placement, token_metrics.TargetTokens())
