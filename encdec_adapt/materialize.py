r"""Makes vocabulary and records from text, ahead of training.

    python -m encdec_adapt.materialize --config=configs/quickstart.py \
      --workdir=runs/quickstart [--passes=3] [--only=train] \
      [--config.data.workers=4]

A record set (`data/records.py`) is made shard by shard. A shard holds the
documents whose index is its own modulo the number of shards, and everything
drawn for it is keyed by what it is, so its bytes do not depend on the number
of workers or on restarts: what is finished is kept, the rest is made again.

Tokenising, objectives and SeqIO (so TensorFlow) are imported where a shard is
made, not by a process that imports this module to open records.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import contextlib
import dataclasses
import heapq
import os
import pathlib
import time
from typing import Any, NamedTuple

from absl import flags
import numpy as np

from encdec_adapt.cli import command, errors
from encdec_adapt.cluster import lock
from encdec_adapt.data import (
  batch,
  mixtures,
  packing,
  randomness,
  record_copy,
  records,
  workers,
)
from encdec_adapt.files import paths
from encdec_adapt.telemetry import progress
from encdec_adapt.tokenizers import vocabularies, vocabulary_training

PARTS = ('all', 'vocabulary', 'train', 'eval')
_LINE_SECONDS = 10.0  # between progress lines


def say_line(line: str) -> None:
  """Prints at once, also into a pipe."""
  print(line, flush=True)


class Example(NamedTuple):
  """One example: a pair, and its sentinel spans that share an id."""

  pair: batch.Pair
  shared_spans: int


@dataclasses.dataclass(frozen=True)
class ShardJob:
  """One shard to make.

  Attributes:
    folder: of its record set.
    spec: of its record set, fingerprints filled in.
    choice: of vocabularies.
    pass_index: 0 to spec.passes - 1.
    shard: 0 to spec.shards - 1.
    read: gives the shard's examples; importable by name.
  """

  folder: str
  spec: records.RecordSpec
  choice: vocabularies.Choice
  pass_index: int
  shard: int
  read: Callable[['ShardJob'], Iterable[Example]]

  def __str__(self) -> str:
    return (
      f'shard {self.shard} of {self.spec.shards}, pass {self.pass_index},'
      f' {self.spec.split} records in {self.folder}'
    )


# -- One shard ---------------------------------------------------------------


def read_examples(job: ShardJob) -> Iterable[Example]:
  """The examples of a shard, by SeqIO. Imports TensorFlow."""
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')  # Only real warnings.
  # Ten seconds; see above.
  from encdec_adapt.data import objectives, tasks, text_split

  spec, opened = job.spec, job.choice.open()
  objective = objectives.make_objective(
    spec.objective,
    spec.lengths,
    opened.decoder,
    sentinel_policy=spec.sentinels,
  )
  if opened.differ and spec.encoder_length:
    objective = text_split.TextSplit(objective, opened)
  mixture = tasks.make_mixture(
    open_parts(spec), draw_of(spec, job.pass_index), opened, objective
  )
  for example in tasks.examples(mixture, job.shard, spec.shards):
    yield Example(example.pair, example.shared_spans)


def write_shard(job: ShardJob, report: workers.Report) -> dict[str, Any]:
  """Makes one shard.

  Args:
    job: what to make.
    report: told of rows and tokens as they are made.

  Returns:
    Its entry in the manifest.
  """
  spec = job.spec
  examples = shared_spans = 0

  def pairs():
    nonlocal examples, shared_spans
    for example in job.read(job):
      examples += 1
      shared_spans += example.shared_spans
      yield example.pair

  rows = (
    packing.pack_pairs(pairs(), spec.lengths, _generator(job, 'packing'))
    if spec.pack
    else packing.single_pairs(pairs(), spec.lengths)
  )
  if spec.max_rows:
    # The shards' shares differ by at most one row and sum to max_rows.
    first, stop = (
      spec.max_rows * i // spec.shards for i in (job.shard, job.shard + 1)
    )
    rows = keep_rows(rows, stop - first, _generator(job, 'rows'))
  with records.ShardWriter(
    job.folder, spec, job.pass_index, job.shard
  ) as writer:
    for row in rows:
      writer.write(row)
      tokens = sum(len(pair.inputs) + len(pair.targets) for pair in row)
      report({'rows': 1, 'tokens': tokens})
    return writer.finish(examples=examples, shared_sentinel_spans=shared_spans)


def _generator(job: ShardJob, purpose: str) -> np.random.Generator:
  """What a shard draws for itself, rather than for an example."""
  spec = job.spec
  return randomness.generator(
    spec.seed,
    job.pass_index,
    spec.source,
    f'{purpose} of {spec.split} shard {job.shard} of {spec.shards}',
  )


def keep_rows(
  rows: Iterable[Sequence[batch.Pair]],
  count: int,
  rng: np.random.Generator,
) -> list[Sequence[batch.Pair]]:
  """A random `count` of the rows, in their order; all if they are fewer."""
  keyed = ((rng.random(), i, row) for i, row in enumerate(rows))
  # Indices differ, so rows themselves are never compared.
  kept = heapq.nsmallest(count, keyed, key=lambda entry: entry[:2])
  return [row for _, _, row in sorted(kept, key=lambda entry: entry[1])]


# -- Record sets -------------------------------------------------------------


def open_parts(spec: records.RecordSpec) -> list[mixtures.Part]:
  """The sources that a spec names."""
  return mixtures.open_parts(
    spec.source,
    max_documents=spec.max_documents,
    max_bytes=spec.max_bytes,
  )


def draw_of(spec: records.RecordSpec, pass_index: int) -> mixtures.Draw:
  """Which of their documents a pass draws."""
  return mixtures.Draw(spec.split, spec.eval_fraction, spec.seed, pass_index)


def materialize_sets(
  sets: Sequence[tuple[records.RecordSpec, str | os.PathLike]],
  choice: vocabularies.Choice,
  *,
  workers: int = 1,
  say: Callable[[str], None] = say_line,
  read: Callable[[ShardJob], Iterable[Example]] = read_examples,
) -> list[dict[str, Any]]:
  """Makes record sets, or what is missing of them.

  Args:
    sets: specs and folders. Fingerprints in a spec are filled in, or, where
      they are given, have to be right.
    choice: of vocabularies.
    workers: processes; 1 works in this one.
    say: takes lines of progress.
    read: gives a shard's examples; importable by name.

  Returns:
    The manifests.

  Raises:
    UserError: the source is missing or gives no rows, a folder has records
      of another spec, or is being written by another job.
  """
  if workers < 1:
    raise errors.UserError(f'data: workers={workers} must be at least 1')
  opened = choice.open()
  sets = [(fill_in(spec, opened), paths.at(folder)) for spec, folder in sets]
  with contextlib.ExitStack() as stack:
    for _, folder in sets:
      stack.enter_context(lock.hold(folder))
    entries = {}
    jobs = []
    for spec, folder in sets:
      place = _place_of_shards(folder, spec)
      for leftover in place.glob('pass-*/*.tmp'):  # Of killed workers.
        leftover.unlink()
      for pass_index in range(spec.passes):
        for shard in range(spec.shards):
          done = records.finished_shard(place, spec, pass_index, shard)
          entries[place, pass_index, shard] = done
          if done is None:
            jobs.append(
              ShardJob(str(place), spec, choice, pass_index, shard, read)
            )
    for job, entry in _make_shards(jobs, len(entries), workers, say):
      key = pathlib.Path(job.folder), job.pass_index, job.shard
      entries[key] = entry
    return [_finish(*one, entries, opened, say) for one in sets]


def fill_in(
  spec: records.RecordSpec, opened: vocabularies.Opened
) -> records.RecordSpec:
  """The spec with its fingerprints.

  Raises:
    UserError: it has others already.
  """
  found = {
    'source_fingerprint': mixtures.fingerprint(open_parts(spec)),
    **opened.fingerprints,
  }
  for field, value in found.items():
    wanted = getattr(spec, field)
    if wanted not in ('', value):
      raise errors.UserError(
        f'data: {field} is to be {wanted!r} but is {value!r} (source'
        f' {spec.source!r}, vocabularies {opened.decoder.path!r} and'
        f' {opened.encoder.path!r})'
      )
  return dataclasses.replace(spec, **found)


def _place_of_shards(
  folder: paths.Path, spec: records.RecordSpec
) -> pathlib.Path:
  """Where shards are made: in the folder, or on this machine for a bucket.

  Raises:
    UserError: the folder has a finished set of another spec.
  """
  manifest = records.read_manifest(folder)
  if manifest is not None:
    # More or fewer passes leave every shard as it is.
    passes = manifest['spec'].get('passes')
    records.check_spec(
      folder, manifest, dataclasses.replace(spec, passes=passes)
    )
    if paths.is_bucket(folder):
      return record_copy.fetch(folder, records.shards(manifest))
  return record_copy.place(folder)


def _make_shards(
  jobs: Sequence[ShardJob],
  total: int,
  count: int,
  say: Callable[[str], None],
) -> list[tuple[ShardJob, dict[str, Any]]]:
  """Makes shards, telling how far it is."""
  if not jobs:
    return []
  say(
    f'records: {len(jobs)} of {total} shards to make, {min(count, len(jobs))}'
    ' at a time'
  )
  results = []
  start = shown = time.monotonic()
  totals = {'rows': 0, 'tokens': 0}

  def show():
    nonlocal shown
    shown = time.monotonic()
    seconds = max(shown - start, 1e-3)
    line = (
      f'records: {len(results)}/{len(jobs)} shards, {totals["rows"]:,} rows,'
      f' {totals["tokens"] / seconds:,.0f} tokens/s'
    )
    if results:
      left = seconds / len(results) * (len(jobs) - len(results))
      line += f', {progress.format_seconds(left)} left'
    say(line)

  def on_report(counts: Mapping[str, int]):
    for key, value in counts.items():
      totals[key] += value
    if time.monotonic() - shown >= _LINE_SECONDS:
      show()

  def on_result(job, entry):
    results.append((job, entry))

  workers.run_jobs(
    write_shard, jobs, count, on_report=on_report, on_result=on_result
  )
  show()
  return results


def _finish(spec, folder, entries, opened, say) -> dict[str, Any]:
  """Writes the manifest and sums up."""
  place = record_copy.place(folder)
  own = {key[1:]: value for key, value in entries.items() if key[0] == place}
  if not any(entry['rows'] for entry in own.values()):
    raise errors.UserError(
      f'data: source {spec.source!r} gives no rows for split {spec.split!r}'
      f' with eval_fraction={spec.eval_fraction} and max_rows={spec.max_rows};'
      ' use more text, or another fraction'
    )
  manifest = records.write_manifest(place, spec, own, opened.describe())
  if paths.is_bucket(folder):
    say(f'{folder}: copying the records there')
    paths.upload(place, folder, records.MANIFEST)
  say(f'{folder}: {summary(manifest)}')
  return manifest


def summary(manifest: Mapping[str, Any]) -> str:
  """One line on a record set: counts and how full its rows are."""
  spec, totals, fill = (manifest[key] for key in ('spec', 'totals', 'fill'))
  sides = f'decoder {fill["decoder"]:.1%} full'
  if spec['encoder_length']:
    sides = f'encoder {fill["encoder"]:.1%}, {sides}'
  line = (
    f'{totals["rows"]:,} rows in {len(manifest["passes"])} passes,'
    f' {totals["pairs"]:,} examples, {totals["target_tokens"]:,} target'
    f' tokens, {sides}'
  )
  if totals['shared_sentinel_spans']:
    line += (
      f'; {totals["shared_sentinel_spans"]:,} spans share their sentinel with'
      f' another (sentinels={spec["sentinels"]})'
    )
  return line


# -- What a config names -----------------------------------------------------


def set_folders(
  data: Any,
) -> dict[str, tuple[records.RecordSpec, paths.Path]]:
  """Specs and folders of a `config.DataConfig`, by part."""
  folder = paths.at(data.folder)
  return {
    'train': (data.train, folder / 'train'),
    'eval': (data.evaluation, folder / 'eval'),
  }


def missing(data: Any) -> bool:
  """Whether something of a `config.DataConfig` has yet to be made.

  Records of another spec are not missing; `open_sets` says what is wrong with
  them. But passes can be added to a set.
  """
  for spec, folder in set_folders(data).values():
    manifest = records.read_manifest(folder)
    if manifest is None or manifest['spec']['passes'] != spec.passes:
      return True
  return False


def open_sets(
  data: Any, opened: vocabularies.Opened
) -> tuple[records.RecordSet, records.RecordSet]:
  """Opens training and held-out records of a `config.DataConfig`.

  Args:
    data: the data section of the settings.
    opened: its vocabularies.

  Raises:
    UserError: they are missing, damaged, or not what the config says; their
      vocabularies included.
  """
  train, evaluation = (
    records.RecordSet.open(
      folder, dataclasses.replace(spec, **opened.fingerprints)
    )
    for spec, folder in set_folders(data).values()
  )
  return train, evaluation


def open_vocabularies(
  data: Any, say: Callable[[str], None] = say_line
) -> vocabularies.Opened:
  """Opens the vocabularies of a `config.DataConfig`, training it if need be.

  One is trained on the documents of the training split.

  Raises:
    UserError: one is missing and not to be trained, or has more tokens than
      the model's table has rows.
  """
  choice = data.vocabularies
  if data.train_vocabulary and not vocabularies.exists(choice.decoder):
    path = paths.at(choice.decoder)
    # Our own have mode tokens, so that sentinels are all that is added.
    size = data.table_sizes['decoder'] - choice.added_sentinels
    say(
      f'vocabulary: {path} is not there: a new one of {size:,} ids is trained'
      ' into it. Where it should be there, stop here, and correct'
      ' config.data.vocabulary.'
    )
    spec = data.train
    documents = mixtures.documents_in_turn(open_parts(spec), draw_of(spec, 0))
    vocabulary_training.train_vocabulary(
      (document.text for document in documents), path, size
    )
  opened = choice.open()
  for side, rows in data.table_sizes.items():
    key = f'config.model.{side}.vocab_size'
    note = vocabularies.check_size(opened.sides[side], rows, side, key=key)
    if note:
      say(f'note: {note}')
  return opened


def run(
  data: Any, only: str = 'all', say: Callable[[str], None] = say_line
) -> None:
  """Makes what a `config.DataConfig` names and is not there yet.

  Args:
    data: the data section of the settings.
    only: one of `PARTS`.
    say: takes lines of progress.

  Raises:
    UserError: bad input, see `materialize_sets`.
  """
  opened = open_vocabularies(data, say)
  for vocabulary in {one.path: one for one in opened.sides.values()}.values():
    if vocabulary.note:
      say(f'note: the vocabulary {vocabulary.path} {vocabulary.note}')
  sets = set_folders(data)
  if only != 'all':
    sets = {part: value for part, value in sets.items() if part == only}
  materialize_sets(
    list(sets.values()), data.vocabularies, workers=data.workers, say=say
  )


def define_flags(values: flags.FlagValues) -> None:
  """The flags of this command."""
  command.define_config(values)
  define = dict(flag_values=values)
  flags.DEFINE_string(
    'workdir', '', 'Records go below it if config.data.folder is empty.',
    **define,
  )  # fmt: skip
  flags.DEFINE_enum('only', 'all', PARTS, 'What to make.', **define)
  define_passes(values)


def define_passes(values: flags.FlagValues) -> None:
  """Defines --passes, short for --config.data.passes."""
  text = 'Draws of the text: sets config.data.passes.'
  flags.DEFINE_integer('passes', None, text, flag_values=values)


def set_passes(values: flags.FlagValues) -> None:
  """Writes --passes, where given, into the configuration."""
  if values.passes is not None:
    values.config.data.passes = values.passes


def main(values: flags.FlagValues) -> int:
  """Runs the command."""
  from encdec_adapt import config as config_lib  # It imports much else.

  command.require(values, 'config')
  set_passes(values)
  if not values.config.data.folder:
    command.require(values, 'workdir')
  # Records are of text and vocabularies; sources and teacher come later.
  settings = config_lib.load(values.config, values.workdir, sources=False)
  run(settings.data, values.only)
  return 0


if __name__ == '__main__':
  command.main(__doc__, define_flags, main)
