r"""Loss per target token of trained models on one set of held-out records.

    python -m encdec_adapt.evaluate --checkpoint=runs/adapted \
      --checkpoint=runs/scratch --records=runs/records/prefix_lm/eval

Every model is measured on the same target tokens, and again with the prefixes
of other examples: where that is not clearly worse, an encoder-decoder does not
use its encoder, and a decoder-only model hardly uses the prefix. A row is exact
if greedy decoding gives its targets to the last token. Writes evaluation.json
into each run's folder.
"""

import dataclasses
import functools
from typing import Any

from absl import flags
import jax

from encdec_adapt import config as config_lib
from encdec_adapt.checkpoints import manager
from encdec_adapt.cli import command, errors
from encdec_adapt.conversion import run_artifacts, stored_model
from encdec_adapt.data import records
from encdec_adapt.evaluation import perplexity
from encdec_adapt.files import atomic, disk, paths
from encdec_adapt.models import model_section
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import rules as rules_lib
from encdec_adapt.training import losses, setup
from encdec_adapt.training import state as state_lib

define_flags = command.define(
  command.flag(
    'multi_string',
    'checkpoint',
    'Work directory of a run; may be repeated.',
    default=[],
  ),
  command.string('records', 'Folder of a held-out record set.'),
  command.integer('batch_size', 'Rows at a time.', default=16, lower_bound=1),
)


def main(values: flags.FlagValues) -> int:
  """Runs the command."""
  command.require(values, 'checkpoint', 'records')
  devices = jax.device_count()
  if values.batch_size % devices:
    raise errors.UserError(
      f'--batch_size is {values.batch_size}; it must be a multiple of the'
      f' {devices} devices.'
    )
  record_set = records.RecordSet.open(values.records)
  # Opens every run, so that bad input is refused before the first hours.
  runs = [open_run(path, record_set) for path in values.checkpoint]
  print(f'{len(record_set):,} rows of {values.records}')
  for run in runs:
    result = evaluate(run, record_set, values.batch_size)
    shuffled = result['eval_loss_shuffled_prefix']
    print(
      f'{run.path}: {result["eval_loss"]:.4f} nats per target token'
      + ('' if shuffled is None else f', {shuffled:.4f} with other prefixes')
      + f'; {result["exact_match"]:.1%} of the rows exact',
      flush=True,
    )
    atomic.write_json(paths.join(run.path, run_artifacts.EVALUATION), result)
  return 0


@dataclasses.dataclass(frozen=True)
class Run:
  """A run that was checked against the records; its parameters are not read.

  Attributes:
    path: work directory.
    loss: loss configuration.
    where: the model and the placement of its parameters.
    found: checkpoint of the run, see `stored_model.open_checkpoint`.
  """

  path: str
  loss: losses.LossConfig
  where: state_lib.Placement
  found: manager.Checkpoint


def open_run(path: str, record_set: records.RecordSet) -> Run:
  """Opens the checkpoint of a run and checks the run.

  Args:
    path: work directory of the run.
    record_set: held-out rows.

  Raises:
    UserError: the run has no checkpoint, the folder cannot be written, model
      and records have different vocabularies, or the model differs from the
      checkpoint or does not divide over the devices.
  """
  settings = config_lib.load_run(path)
  config_lib.check_kind(settings.model, record_set.spec.objective)
  disk.require_writable(path)
  found = stored_model.open_checkpoint(path, settings)
  stored_model.open_vocabularies(found, settings.data.vocabularies)
  _check_vocabularies(settings, record_set)
  # The devices may differ from those of training.
  mesh = mesh_lib.make_mesh(
    mesh_lib.in_groups(jax.device_count(), rules_lib.VOCABULARY_GROUP)
  )
  compute = setup.with_attention_for(settings.compute, mesh)
  where = setup.place_model(settings.model, compute, mesh, settings.rules)
  found.require_same({'params': where.abstract_params()}, partial=True)
  return Run(path, settings.loss, where, found)


def _check_vocabularies(
  settings: config_lib.Settings, record_set: records.RecordSet
) -> None:
  """Refuses records that were made with other vocabularies than the model's.

  Raises:
    UserError: names both.
  """
  opened = settings.data.vocabularies.open()
  spec = record_set.spec
  made = {'encoder': spec.encoder_vocabulary, 'decoder': spec.vocabulary}
  for side in settings.model.stacks:
    own = opened.sides[side]
    if own.fingerprint != made[side]:
      raise errors.UserError(
        f'the records {record_set.folder} were made with the vocabulary'
        f' {made[side][:12]} of the {side}, the model with {own.path}'
        f" ({own.fingerprint[:12]}); make records with the model's"
        ' vocabularies.'
      )


def evaluate(
  run: Run,
  record_set: records.RecordSet,
  batch_size: int,
) -> dict[str, Any]:
  """Evaluates a run.

  Args:
    run: result of `open_run`.
    record_set: the rows that the run was opened for.
    batch_size: rows of a batch.

  Returns:
    The content of evaluation.json: among others `kind`, and `eval_loss` and
    `eval_loss_shuffled_prefix` in nats per target token (the latter None for
    rows without inputs or with several pairs, and for a single row), and
    `exact_match`, a share of rows.
  """
  spec = record_set.spec
  params = run.found.restore_params(run.where.abstract_params())

  def measure(**options: int) -> perplexity.Result:
    """Evaluates the parameters on the rows."""
    batches = setup.evaluation_batches(
      record_set,
      batch_size,
      run.where,
      teacher=setup.reads_teacher_row(
        run.where.model.config, spec.lengths, 0.0
      ),
      **options,
    )
    return _evaluator(run.where, run.loss.chunk)(params, batches)

  own = measure()
  sizes = spec.lengths.encoder, spec.lengths.decoder
  shuffled = None
  if min(sizes) and not spec.pack and len(record_set) > 1:
    # Half of the set away: the prefix of another document.
    shuffled = measure(prefix_offset=len(record_set) // 2).loss
  return {
    'kind': model_section.kind_of(run.where.model.config),
    'checkpoint_step': run.found.step,
    'records': str(record_set.folder),
    'records_spec': dataclasses.asdict(record_set.spec),
    'target_tokens': own.target_tokens,
    'accuracy': own.accuracy,
    'exact_match': own.exact_match,
    'eval_loss': own.loss,
    'eval_loss_shuffled_prefix': shuffled,
  }


@functools.cache
def _evaluator(where: state_lib.Placement, chunk: int) -> perplexity.Evaluator:
  """Returns an evaluator; equal models share one, which compiles once."""
  return perplexity.Evaluator(where, chunk)


if __name__ == '__main__':
  command.main(__doc__, define_flags, main)
