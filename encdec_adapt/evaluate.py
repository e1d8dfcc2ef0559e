r"""Loss per target token of trained models on one set of held-out records.

    python -m encdec_adapt.evaluate --checkpoint=runs/adapted \
      --checkpoint=runs/scratch --records=runs/records/prefix_lm/eval

Every model is measured on the same target tokens, and again with the prefixes
of other examples: where that is not clearly worse, an encoder-decoder does not
use its encoder, and to a decoder-only model the prefix is worth little. Writes
evaluation.json into each run's folder.
"""

import dataclasses
from typing import Any

from absl import flags
import jax

from encdec_adapt import config as config_lib
from encdec_adapt import job, vocabulary_checks
from encdec_adapt.data import loader, records
from encdec_adapt.evaluation import perplexity
from encdec_adapt.models import config as model_config
from encdec_adapt.runtime import command, errors, files, storage
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import placement
from encdec_adapt.sharding import rules as rules_lib
from encdec_adapt.training import checkpoint

FILE = 'evaluation.json'


def define_flags(values: flags.FlagValues) -> None:
  """The flags of this command."""
  define = dict(flag_values=values)
  flags.DEFINE_multi_string(
    'checkpoint', [], 'Work directory of a run; may be repeated.', **define
  )
  flags.DEFINE_string(
    'records', None, 'Folder of a held-out record set.', **define
  )
  flags.DEFINE_integer('batch_size', 16, 'Rows at a time.', **define)


def main(values: flags.FlagValues) -> int:
  """Runs the command."""
  command.require(values, 'checkpoint', 'records')
  devices = jax.device_count()
  if values.batch_size < 1 or values.batch_size % devices:
    raise errors.UserError(
      f'--batch_size is {values.batch_size}; it must be a multiple of the'
      f' {devices} devices, at least 1.'
    )
  record_set = records.RecordSet.open(values.records)
  runs = {path: config_lib.load_run(path) for path in values.checkpoint}
  evaluators: dict[Any, perplexity.Evaluator] = {}
  print(f'{len(record_set):,} rows of {values.records}')
  for path, settings in runs.items():
    result = evaluate(path, settings, record_set, values.batch_size, evaluators)
    files.write_json(storage.join(path, FILE), result)
    shuffled = result['eval_loss_shuffled_prefix']
    print(
      f'{path}: {result["eval_loss"]:.4f} nats per target token'
      + ('' if shuffled is None else f', {shuffled:.4f} with other prefixes'),
      flush=True,
    )
  return 0


def evaluate(
  path: str,
  settings: config_lib.Settings,
  record_set: records.RecordSet,
  batch_size: int,
  evaluators: dict[Any, perplexity.Evaluator],
) -> dict[str, Any]:
  """Evaluates the newest sound checkpoint of a run.

  Args:
    path: the run's work directory.
    settings: its settings.
    record_set: held-out rows.
    batch_size: rows at a time.
    evaluators: those made so far, so that equal models compile once.

  Returns:
    What evaluation.json holds: `kind`, `eval_loss` and
    `eval_loss_shuffled_prefix` (None for rows that have no inputs, or several
    pairs) in nats per target token.

  Raises:
    UserError: the vocabulary of the records is not the model's, or the
      devices cannot run its attention backend.
  """
  lengths = record_set.spec.lengths
  pairs = isinstance(settings.model, model_config.EncoderDecoderConfig)
  if pairs and not lengths.encoder:
    raise errors.UserError(
      f'{path} is an encoder-decoder and {record_set.folder} holds rows'
      ' without inputs; give records of prefix_lm or ul2.'
    )
  vocabulary_checks.check_records(settings, record_set)
  # Over the devices there are, which need not be those it was trained on.
  mesh = mesh_lib.make_mesh(
    mesh_lib.in_groups(jax.device_count(), rules_lib.VOCABULARY_GROUP)
  )
  settings = job.with_attention_for(settings, mesh)
  where = job.place_model(settings, settings.model, mesh)
  key = (where, settings.loss.chunk)
  if key not in evaluators:
    evaluators[key] = perplexity.Evaluator(*key)
  evaluator = evaluators[key]
  found = checkpoint.open_latest(path)
  vocabulary_checks.check_checkpoint(found, settings.data.vocabularies.open())
  params = found.restore_params(where.abstract_params())

  def measure(**options) -> perplexity.Result:
    return evaluator(
      params,
      loader.evaluation_batches(
        record_set,
        lengths,
        batch_size,
        teacher=lengths.encoder > 0 and not pairs,
        local=placement.row_shards(mesh, where.rules).rows(batch_size),
        **options,
      ),
    )

  own = measure()
  shuffled = None
  if lengths.encoder and not record_set.spec.pack:
    # Half of the set away, so that it is not the same document's.
    shuffled = measure(prefix_offset=max(len(record_set) // 2, 1)).loss
  return {
    'kind': 'encoder_decoder' if pairs else 'decoder_only',
    'checkpoint_step': found.step,
    'records': str(record_set.folder),
    'records_spec': dataclasses.asdict(record_set.spec),
    'target_tokens': own.target_tokens,
    'accuracy': own.accuracy,
    'eval_loss': own.loss,
    'eval_loss_shuffled_prefix': shuffled,
  }


if __name__ == '__main__':
  command.main(__doc__, define_flags, main)
