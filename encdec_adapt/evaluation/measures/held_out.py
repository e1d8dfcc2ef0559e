"""Scores of a model on held-out records: loss per target token, exact rows.

Every model is measured on the same target tokens, and again with the prefixes
of other examples: where that is not clearly worse, an encoder-decoder does not
use its encoder, and a decoder-only model hardly uses the prefix.
"""

import dataclasses
import functools
import hashlib

from encdec_adapt import config as config_lib
from encdec_adapt.base import errors
from encdec_adapt.conversion import model_in_memory, model_on_disk
from encdec_adapt.data.records import record_sets
from encdec_adapt.evaluation.measures import classification, perplexity
from encdec_adapt.evaluation.results import results_store
from encdec_adapt.telemetry import progress
from encdec_adapt.training import losses, setup
from encdec_adapt.training import state as state_lib

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
    """Returns what decides the scores: the rows."""
    digest = ' '.join(self.record_set.digests).encode()
    return {
      'records': str(self.record_set.folder),
      'rows': hashlib.blake2b(digest, digest_size=8).hexdigest(),
    }

  def check(self, stored: model_on_disk.StoredModel) -> None:
    """Checks that a model can read the records.

    Raises:
      UserError: the objective is for another kind of model, the model has no
        vocabularies, or the records were made with others.
    """
    spec = self.record_set.spec
    config_lib.check_kind(stored.model, spec.objectives[0])
    opened = stored.require_vocabularies()
    made = {'encoder': spec.encoder_vocabulary, 'decoder': spec.vocabulary}
    for side in stored.model.stacks:
      own = opened.sides[side]
      if own.fingerprint != made[side]:
        raise errors.UserError(
          f'the records {self.record_set.folder} were made with the vocabulary'
          f' {made[side][:12]} of the {side}, the model with {own.path}'
          f" ({own.fingerprint[:12]}); make records with the model's"
          ' vocabularies.'
        )

  def scores(
    self,
    loaded: model_in_memory.LoadedModel,
    rows: int,
    report: progress.Report,
  ) -> list[results_store.Score]:
    """Measures a model.

    Args:
      loaded: the model.
      rows: rows at a time; divides over the model's devices.
      report: called with the number of rows done and of all.

    Returns:
      Metrics of the task `TASK`: `loss` in nats per target token, `accuracy`
      (share of target tokens), `exact_match` (share of rows that greedy
      decoding gives to the last token), `target_tokens`, and
      `loss_shuffled_prefix`, which rows without inputs or with several pairs,
      and a single row, do not have; of classifiers also
      `classification.scores`.
    """
    where, record_set = loaded.where, self.record_set
    spec, count = record_set.spec, len(record_set)
    teacher = setup.reads_teacher_row(spec.lengths, loaded.config)

    def measure(**options: int) -> perplexity.Result:
      """Evaluates the parameters on the rows."""
      batches = setup.evaluation_batches(
        record_set, rows, where, teacher=teacher, **options
      )
      # A batch is asked for when the one before it is on its way.
      counted = (
        (report(i * rows, count), batch)[1] for i, batch in enumerate(batches)
      )
      return _evaluator(where)(loaded.params, counted)

    own = measure()
    found, count_of_rows = own.scores(TASK), own.ratios.shape[2]
    found.append(
      results_store.Score(TASK, TARGET_TOKENS, own.weight, None, count_of_rows)
    )
    if loaded.config.decoder.classes:
      batches = setup.evaluation_batches(record_set, rows, where)
      found += classification.scores(TASK, where, loaded.params, batches)
    has_inputs = min(spec.lengths.encoder, spec.lengths.decoder) > 0
    if has_inputs and not spec.pack and count > 1:
      # Half of the set away: the prefix of another document.
      loss, *_ = measure(prefix_offset=count // 2).scores(TASK)
      found.append(dataclasses.replace(loss, metric=SHUFFLED))
    return found


@functools.cache
def _evaluator(where: state_lib.Placement) -> perplexity.Evaluator:
  """Returns an evaluator; equal models share one, which compiles once."""
  return perplexity.Evaluator(where, losses.cross_entropy.CrossEntropy())
