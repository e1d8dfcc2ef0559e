"""Turns text sources into record sets, and opens the sets that a job reads.

A record set (`data/records/record_sets.py`) is made shard by shard. A shard
reads its share of a source (`data/sources/document_source.py`), and the key of
every random draw names what is drawn (`objectives/randomness.py`), so the bytes
of a shard depend neither on the number of workers nor on restarts. Finished
shards are kept, others made again.

`shard_jobs.read_examples` imports SeqIO (so TensorFlow) when a shard is made; a
process that only opens records never does.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
import contextlib
import dataclasses
import functools
import os
import time
from typing import Any

from encdec_adapt.base import errors
from encdec_adapt.cluster import lock
from encdec_adapt.data import data_section
from encdec_adapt.data.making import beam_jobs, process_pool, shard_jobs
from encdec_adapt.data.records import (
  record_copy,
  record_sets,
  record_writing,
  row_rates,
)
from encdec_adapt.data.sources import contamination, mixtures
from encdec_adapt.files import paths
from encdec_adapt.objectives import parsing
from encdec_adapt.telemetry import progress
from encdec_adapt.tokenizers import vocabulary_pair, vocabulary_training


def _print(line: str) -> None:
  """Prints without buffering, so that progress shows in pipes too."""
  print(line, flush=True)


# -- Record sets -------------------------------------------------------------


@dataclasses.dataclass
class _Set:
  """A record set that is being made.

  Attributes:
    spec: spec of the record set, with fingerprints.
    folder: folder where it is read.
    place: folder where its shards are made: of a set in a bucket a local one,
      or the bucket itself by workers on other machines.
    parts: source and objective of each part.
    entries: manifest entry of every shard; None for one that is to be made.
    manifest: None until the set is finished.
  """

  spec: record_sets.RecordSpec
  folder: paths.Path
  place: paths.Path
  parts: Sequence[record_sets.Part]
  entries: dict[record_writing.ShardKey, dict[str, Any] | None]
  manifest: dict[str, Any] | None = None

  def finish(self, described: Mapping[str, Any]) -> None:
    """Writes the manifest if all shards are there; an empty set is an error."""
    if self.manifest is None and None not in self.entries.values():
      self.manifest = _finish(self, described)


def materialize_sets(
  sets: Sequence[tuple[record_sets.RecordSpec, str | os.PathLike]],
  choice: vocabulary_pair.Choice,
  *,
  workers: int = 1,
  beam: Sequence[str] | None = None,
  read: Callable[
    [shard_jobs.ShardJob], Iterable[shard_jobs.Example]
  ] = shard_jobs.read_examples,
) -> list[dict[str, Any]]:
  """Makes the missing shards and the manifests of record sets.

  Args:
    sets: (spec, folder) pairs, made in this order; fingerprints of the specs
      are filled in.
    choice: vocabularies of the model.
    workers: number of processes; 1 makes the shards in this one.
    beam: options of the Apache Beam pipeline that makes the shards instead.
    read: function that yields a shard's examples; importable by name.

  Returns:
    The manifests, in the order of `sets`.

  Raises:
    UserError: the source is missing or gives no rows, a folder has records
      of another spec, or another job is writing it.
  """
  opened = choice.open()
  described = opened.describe()
  for spec, _ in sets:
    for objective in parsing.parse(spec.objective):
      # Refuses lengths and vocabularies before any text is read.
      objective.make(
        spec.lengths,
        opened.decoder,
        encoder_vocabulary=opened.encoder if opened.differ else None,
        sentinel_policy=spec.sentinels,
      )
  sets = [
    (_with_fingerprints(spec, opened), paths.at(folder))
    for spec, folder in sets
  ]
  with contextlib.ExitStack() as stack:
    for _, folder in sets:
      stack.enter_context(lock.hold(folder))
    found = [_open_set(spec, folder, beam is not None) for spec, folder in sets]
    jobs = _missing_shards(found, choice, read)
    groups = shard_jobs.group_jobs(jobs)
    if jobs:
      how = f'{min(workers, len(groups))} at a time'
      _print(
        f'records: {len(jobs)} of {sum(len(one.entries) for one in found)}'
        f' shards to make, {how if beam is None else "on Apache Beam"}'
      )
    for one in found:
      one.finish(described)
    start, count = time.monotonic(), 0
    if beam is None:
      done = process_pool.run_jobs(shard_jobs.write_shards, groups, workers)
    else:
      done = beam_jobs.run_jobs(groups, beam)
    for group, entries in done:
      (own,) = (one for one in found if str(one.place) == group.jobs[0].folder)
      own.entries.update(
        zip((job.key for job in group.jobs), entries, strict=True)
      )
      count += len(entries)
      left = (time.monotonic() - start) / count * (len(jobs) - count)
      if beam is None:  # A pipeline returns all its shards at its end.
        _print(
          f'records: {count}/{len(jobs)} shards,'
          f' {progress.format_seconds(left)} left'
        )
      own.finish(described)
    return [one.manifest for one in found if one.manifest]


def _missing_shards(
  sets: Sequence[_Set],
  choice: vocabulary_pair.Choice,
  read: Callable[[shard_jobs.ShardJob], Iterable[shard_jobs.Example]],
) -> list[shard_jobs.ShardJob]:
  """Describes the shards of sets that are to be made."""
  jobs = [
    shard_jobs.ShardJob(str(one.place), one.spec, choice, one.parts, key, read)
    for one in sets
    for key, entry in one.entries.items()
    if entry is None
  ]
  if not jobs:
    return []
  left_out = _duplicates([one.spec for one in sets])
  cut = {
    spec: mixtures.cut_sources(
      _all_sources(spec), shard_jobs.make_draw(spec, 0)
    )
    for spec in dict.fromkeys(job.spec for job in jobs)
  }
  return [
    dataclasses.replace(job, left_out=left_out, cut=cut[job.spec])
    for job in jobs
  ]


def _open_set(
  spec: record_sets.RecordSpec, folder: paths.Path, elsewhere: bool
) -> _Set:
  """Finds the finished shards of a set, and removes unfinished ones.

  Args:
    spec: spec with fingerprints.
    folder: folder of the set.
    elsewhere: whether other machines make the shards.

  Raises:
    UserError: the folder has a finished set of another spec.
  """
  manifest = record_sets.read_manifest(folder)
  if manifest is not None:
    # Shards do not depend on the number of passes.
    passes = manifest['spec'].get('passes')
    record_sets.check_spec(
      folder, manifest, dataclasses.replace(spec, passes=passes)
    )
  place = folder if elsewhere else record_copy.local_folder(folder)
  if manifest is not None and place != folder:
    record_copy.fetch(folder, record_sets.shards(manifest))
  for leftover in place.glob('pass-*/*/*.tmp'):  # From killed workers.
    leftover.unlink()
  parts = list_parts(spec)
  keys = record_writing.shard_keys(spec, parts)
  finished = functools.partial(record_writing.finished_shard, place, spec)
  with futures.ThreadPoolExecutor(record_writing.THREADS) as pool:
    entries = dict(zip(keys, pool.map(finished, keys), strict=True))
  return _Set(spec, folder, place, parts, entries)


def list_parts(spec: record_sets.RecordSpec) -> list[record_sets.Part]:
  """Returns the parts of a record set: every objective on its sources.

  Raises:
    UserError: a source is missing or has no text.
  """
  return [
    record_sets.Part(objective.text, part.source.name, part.rate)
    for objective in parsing.parse(spec.objective)
    for part in shard_jobs.open_sources(spec, objective)
  ]


def _with_fingerprints(
  spec: record_sets.RecordSpec, opened: vocabulary_pair.Opened
) -> record_sets.RecordSpec:
  source = mixtures.fingerprint(_all_sources(spec))
  return dataclasses.replace(
    spec, source_fingerprint=source, **opened.fingerprints
  )


def _duplicates(
  specs: Sequence[record_sets.RecordSpec],
) -> Mapping[str, frozenset[str]]:
  """Returns the documents to leave out of the sets of a job."""
  if not any(spec.deduplicate for spec in specs):
    return {}
  # Held-out rows may have fewer sources than training rows.
  found = contamination.duplicates(max(map(_all_sources, specs), key=len))
  _print(
    f'data: {sum(map(len, found.values())):,} documents are duplicates and'
    ' are left out'
  )
  return found


def _all_sources(spec: record_sets.RecordSpec) -> list[mixtures.Part]:
  """Opens every source of a set once."""
  found = {
    part.source.name: part
    for objective in parsing.parse(spec.objective)
    for part in shard_jobs.open_sources(spec, objective)
  }
  return list(found.values())


def _finish(made: _Set, described: Mapping[str, Any]) -> dict[str, Any]:
  """Writes the manifest, uploads the set to its bucket, prints a summary."""
  spec, folder, place = made.spec, made.folder, made.place
  entries = {key: entry for key, entry in made.entries.items() if entry}
  if not any(entry['rows'] for entry in entries.values()):
    _check_dropped(spec, entries)
    raise errors.UserError(
      f'data: source {spec.source!r} gives no rows for split {spec.split!r}'
      f' with eval_fraction={spec.eval_fraction} and max_rows={spec.max_rows};'
      ' use more text, or another fraction'
    )
  manifest = record_writing.write_manifest(
    place, spec, made.parts, entries, described
  )
  if place != folder:
    _print(f'{folder}: uploading the records')
    paths.upload(place, folder, record_sets.MANIFEST)
  _print(f'{folder}: {summary(manifest)}')
  return manifest


def _check_dropped(
  spec: record_sets.RecordSpec,
  entries: Mapping[record_writing.ShardKey, Mapping[str, Any]],
) -> None:
  """Raises UserError if a set is empty because all examples are too long."""
  # Every pass drops the same.
  shards = [entry for key, entry in entries.items() if not key.pass_index]
  dropped = sum(entry.get('dropped', 0) for entry in shards)
  if dropped and not any(entry['examples'] for entry in shards):
    raise errors.UserError(
      f'data: all {dropped:,} examples of split {spec.split!r} of'
      f' {spec.source!r} are longer than a row and were dropped; increase'
      f' config.data.encoder_length={spec.encoder_length} and'
      f' config.data.decoder_length={spec.decoder_length}, or cut examples with'
      f' the option too_long=truncate of config.data.objective='
      f'{spec.objective!r}'
    )


def summary(manifest: Mapping[str, Any]) -> str:
  """Returns the counts and fill of a record set, and a line for each part."""
  spec, totals, fill = (manifest[key] for key in ('spec', 'totals', 'fill'))

  def mean(name: str) -> float:
    return totals[name] / max(totals['pairs'], 1)

  sides = {
    'encoder': f'{mean("encoder_positions"):.0f} of %d inputs',
    'decoder': f'{mean("target_tokens"):.0f} of %d targets',
  }
  lengths = {side: spec[f'{side}_length'] for side in sides}
  filled = ', '.join(f'{x} {fill[x]:.1%}' for x in sides if lengths[x])
  means = ' and '.join(sides[x] % lengths[x] for x in sides if lengths[x])
  line = (
    f'{totals["rows"]:,} rows in {len(manifest["passes"])} passes,'
    f' {totals["pairs"]:,} examples, {totals["target_tokens"]:,} target'
    f' tokens, {filled} full; a mean example has {means}'
  )
  if totals['shared_sentinel_spans']:
    line += (
      f'; {totals["shared_sentinel_spans"]:,} spans share their sentinel with'
      f' another (sentinels={spec["sentinels"]})'
    )
  for what in ('dropped', 'truncated', 'left without a masked copy'):
    if totals.get(what):
      line += f'; {totals[what]:,} examples longer than a row were {what}'
  if totals.get('bad_documents'):
    line += f'; {totals["bad_documents"]:,} documents could not be read'
  lines = [line]
  for part in manifest['parts']:
    if len(manifest['parts']) > 1:
      lines.append(
        f'  {part["objective"]} of {part["source"]}: {part["rows"]:,} rows,'
        f' {part["pairs"]:,} examples, {part["target_tokens"]:,} target tokens'
      )
    lines += _hidden(part)
  return '\n'.join(lines)


def _hidden(part: Mapping[str, Any]) -> list[str]:
  """Compares what was hidden in a part with what its objective asks for."""
  objective = parsing.parse_one(part['objective'])
  asked = objective.hidden_shares
  windows = sum(part.get(f'{noise}: windows', 0) for noise in asked)
  lines = []
  for noise, (share, hidden) in asked.items():
    if own := part.get(f'{noise}: windows', 0):
      found = part[f'{noise}: hidden'] / part[f'{noise}: tokens']
      wanted = '' if hidden is None else f' (asked {hidden:.1%})'
      lines.append(
        f'    {noise}: {own / windows:.1%} of {windows:,} windows (asked'
        f' {share:.1%}), {found:.1%} of their tokens hidden{wanted}'
      )
  return lines


# -- The data of a job -------------------------------------------------------


def set_folders(
  data: data_section.DataConfig,
) -> dict[str, tuple[record_sets.RecordSpec, paths.Path]]:
  """Returns spec and folder of the sets 'train' and 'eval' of a DataConfig."""
  folder = paths.at(data.folder)
  return {
    'train': (data.train, folder / 'train'),
    'eval': (data.evaluation, folder / 'eval'),
  }


def is_missing(data: data_section.DataConfig) -> bool:
  """Returns whether records of a DataConfig have yet to be made.

  Records of another spec do not count as missing: `open_sets` refuses them.
  Another number of passes does, because passes can be added.
  """
  for spec, folder in set_folders(data).values():
    manifest = record_sets.read_manifest(folder)
    if manifest is None or manifest['spec']['passes'] != spec.passes:
      return True
  return False


def open_sets(
  data: data_section.DataConfig, opened: vocabulary_pair.Opened
) -> tuple[record_sets.RecordSet, record_sets.RecordSet]:
  """Opens the training and the held-out records of a DataConfig.

  Raises:
    UserError: they are missing or damaged, or were made with another
      configuration or other vocabularies.
  """
  train, evaluation = (
    record_sets.RecordSet.open(
      folder, dataclasses.replace(spec, **opened.fingerprints)
    )
    for spec, folder in set_folders(data).values()
  )
  return train, evaluation


def open_vocabularies(data: data_section.DataConfig) -> vocabulary_pair.Opened:
  """Opens the vocabularies of a DataConfig; trains the decoder's if allowed.

  It is trained on documents of the training split.

  Raises:
    UserError: a vocabulary is missing and not to be trained, or has more
      tokens than the model's table has rows.
  """
  choice = data.vocabularies
  if data.train_vocabulary and not vocabulary_pair.exists(choice.decoder):
    path = paths.at(choice.decoder)
    # Trained vocabularies have mode tokens: only sentinels are added.
    size = data.table_sizes['decoder'] - choice.added_sentinels
    _print(
      f'vocabulary: {path} does not exist, so a new one of {size:,} ids is'
      ' trained; if it should exist, stop and correct config.data.vocabulary.'
    )
    spec = data.train
    documents = mixtures.interleaved_documents(
      _all_sources(spec), shard_jobs.make_draw(spec, 0)
    )
    vocabulary_training.train_vocabulary(
      (document.text for document in documents), path, size
    )
  opened = choice.open()
  for note in opened.check_tables(data.table_sizes):
    _print(f'note: {note}')
  return opened


def contamination_report(data: data_section.DataConfig, evaluation: str) -> str:
  """Reports evaluation examples that stand in the training text.

  Args:
    data: section `data` of the configuration.
    evaluation: sources of evaluation sets, as in `config.data.source`.

  Returns:
    A line for every set; see `contamination.report`.

  Raises:
    UserError: a source is missing or has no text.
  """
  draw = shard_jobs.make_draw(data.train, 0)
  training = (
    part.source.plain(document)
    for part in _all_sources(data.train)
    for document in part.documents(draw)
  )
  sets = [part.source for part in mixtures.open_parts(evaluation)]
  return contamination.report(training, sets)


def materialize(
  data: data_section.DataConfig, beam: Sequence[str] | None = None
) -> None:
  """Makes the vocabulary and the records of a DataConfig that are missing.

  Args:
    data: section `data` of the configuration.
    beam: see `materialize_sets`.

  Raises:
    UserError: bad input, see `materialize_sets`.
  """
  opened = open_vocabularies(data)
  for vocabulary in {one.path: one for one in opened.sides.values()}.values():
    if vocabulary.note:
      _print(f'note: the vocabulary {vocabulary.path} {vocabulary.note}')
  names = [str(part) for part in list_parts(data.train)]
  for phase in row_rates.parse(data.rates):
    phase.check_parts(names)
  # Held-out records first: they are few, and show whether there are any.
  found = set_folders(data)
  sets = [found['eval'], found['train']]
  materialize_sets(sets, data.vocabularies, workers=data.workers, beam=beam)
