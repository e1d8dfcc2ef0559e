"""Turns text sources into record sets, and opens the sets of a job.

A record set (`data/records/record_sets.py`) is made shard by shard. A shard
reads its share of a source (`data/sources/document_source.py`) and draws from
keyed random generators (`objectives/randomness.py`), so its bytes depend
neither on the number of workers nor on restarts. Only missing or damaged shards
are made.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
import contextlib
import dataclasses
import functools
import os
from typing import Any

from encdec_adapt.base import errors
from encdec_adapt.cluster import lock
from encdec_adapt.data import data_section
from encdec_adapt.data.making import pipeline_jobs, process_pool, shard_jobs
from encdec_adapt.data.records import (
  manifest_summary,
  record_copy,
  record_sets,
  record_writing,
  row_rates,
)
from encdec_adapt.data.sources import contamination, mixtures
from encdec_adapt.files import paths
from encdec_adapt.objectives import objective_names
from encdec_adapt.telemetry import progress
from encdec_adapt.tokenizers import (
  chat_format,
  vocabulary_pair,
  vocabulary_training,
)

# Unbuffered, so that progress shows in pipes too.
_print = functools.partial(print, flush=True)


# -- Record sets -------------------------------------------------------------


@dataclasses.dataclass
class _Build:
  """A record set in progress.

  Attributes:
    spec: spec of the record set, with fingerprints.
    folder: folder for readers.
    shard_folder: folder of its shards: for a set in a bucket, a local folder,
      or the bucket itself if other machines make the shards.
    parts: source and objective of each part.
    entries: manifest entry of every shard; None for missing shards.
    manifest: None until the set is finished.
  """

  spec: record_sets.RecordSpec
  folder: paths.Path
  shard_folder: paths.Path
  parts: Sequence[record_sets.Part]
  entries: dict[record_writing.ShardKey, dict[str, Any] | None]
  manifest: dict[str, Any] | None = None

  def finish(self, vocabularies: Mapping[str, Any]) -> None:
    """Writes the manifest once all shards exist, and uploads sets in buckets.

    Args:
      vocabularies: vocabulary descriptions for the manifest.

    Raises:
      UserError: the set has no rows.
    """
    spec, folder, entries = self.spec, self.folder, self.entries
    if self.manifest is not None or None in entries.values():
      return
    # Checked before the manifest is written: an empty set stays unfinished, so
    # more text can be added.
    if not any(entry['rows'] for entry in entries.values()):
      _check_dropped(spec, entries)
      raise errors.UserError(
        f'data: source {spec.source!r} gives no rows for split {spec.split!r}'
        f' with eval_fraction={spec.eval_fraction} and'
        f' max_rows={spec.max_rows}; use more text, or another fraction'
      )
    self.manifest = record_writing.write_manifest(
      self.shard_folder, spec, self.parts, entries, vocabularies
    )
    if self.shard_folder != folder:
      _print(f'{folder}: uploading the records')
      # The manifest goes last: it marks the set as finished.
      paths.upload(self.shard_folder, folder, record_sets.MANIFEST)
    self.report()

  def report(self) -> None:
    """Prints a summary of the finished set."""
    _print(f'{self.folder}: {manifest_summary.describe(self.manifest)}')


def materialize_sets(
  sets: Sequence[tuple[record_sets.RecordSpec, str | os.PathLike]],
  choice: vocabulary_pair.Choice,
  *,
  workers: int = 1,
  beam: Sequence[str] | None = None,
  refuse_long: bool = False,
  reader: shard_jobs.Reader = shard_jobs.read_examples,
) -> list[dict[str, Any]]:
  """Makes the missing shards and the manifests of record sets.

  Args:
    sets: (spec, folder) pairs, made in this order; fingerprints are filled in.
    choice: vocabularies of the model.
    workers: number of processes; 1 uses this process.
    beam: options of an Apache Beam pipeline to make the shards with instead.
    refuse_long: see `shard_jobs.ShardJob`.
    reader: function that yields the examples of a shard; importable by name.

  Returns:
    The manifests, in the order of `sets`.

  Raises:
    UserError: the source is missing or yields no rows, a prompt is too long, or
      a folder has records of another spec or is locked by another job.
  """
  opened = choice.open()
  described = opened.describe()
  for spec, _ in sets:
    for objective in objective_names.parse(spec.objective):
      # Checks lengths and vocabularies before any text is read.
      shard_jobs.make_maker(spec, objective, opened)
  # Before the locks, which create the folders: a wrong source leaves no trace.
  fingerprints = [source_fingerprint(spec) for spec, _ in sets]
  with contextlib.ExitStack() as stack:
    for _, folder in sets:
      stack.enter_context(lock.hold(paths.at(folder)))
    builds = []
    for (spec, folder), digest in zip(sets, fingerprints, strict=True):
      spec = dataclasses.replace(
        spec, source_fingerprint=digest, **opened.fingerprints
      )
      builds.append(_open_set(spec, paths.at(folder), beam is not None))
    options = {'reader': reader, 'refuse_long': refuse_long}
    jobs = _missing_shards(builds, choice, options)
    groups = shard_jobs.group_jobs(jobs)
    if jobs:
      how = f'{min(workers, len(groups))} at a time'
      _print(
        f'records: {len(jobs)} of {sum(len(x.entries) for x in builds)}'
        f' shards to make, {how if beam is None else "on Apache Beam"}'
      )
    for build in builds:
      if build.manifest is not None:
        build.report()
    # A killed job may leave all shards but no manifest.
    for build in builds:
      build.finish(described)
    count = 0
    # Held-out shards, which come first, do not predict training shards' times.
    folders = [group.jobs[0].folder for group in groups]
    training = folders.count(folders[-1]) if groups else 0
    time_left = progress.TimeLeft(min(workers, training))
    if beam is None:
      results = process_pool.run_jobs(shard_jobs.write_shards, groups, workers)
    else:
      results = pipeline_jobs.run_jobs(groups, beam)
    for done, (group, entries) in enumerate(results, training - len(groups)):
      folder = group.jobs[0].folder
      (build,) = (x for x in builds if str(x.shard_folder) == folder)
      keys = (job.key for job in group.jobs)
      build.entries.update(zip(keys, entries, strict=True))
      count += len(entries)
      if beam is None:  # A pipeline returns all shards at its end.
        left = time_left(done + 1, training)
        _print(f'records: {count}/{len(jobs)} shards{left}')
      # At once, not after the last set: an empty held-out set, made first, ends
      # the job before training rows are made.
      build.finish(described)
    return [build.manifest for build in builds if build.manifest]


def _missing_shards(
  builds: Sequence[_Build],
  choice: vocabulary_pair.Choice,
  options: Mapping[str, Any],
) -> list[shard_jobs.ShardJob]:
  missing = [
    (build, key)
    for build in builds
    for key, entry in build.entries.items()
    if entry is None
  ]
  if not missing:
    return []
  # Here, not in the workers: each would scan all sources.
  left_out: Mapping[str, frozenset[str]] = {}
  if any(build.spec.deduplicate for build in builds):
    # Held-out rows may have fewer sources than training rows.
    sources = max((all_sources(build.spec) for build in builds), key=len)
    left_out = contamination.duplicates(sources)
    _print(
      f'data: {sum(map(len, left_out.values())):,} documents are duplicates and'
      ' are left out'
    )
  cut = {
    spec: mixtures.cut_sources(all_sources(spec), shard_jobs.make_draw(spec, 0))
    for spec in dict.fromkeys(build.spec for build, _ in missing)
  }
  return [
    shard_jobs.ShardJob(
      str(build.shard_folder),
      build.spec,
      choice,
      build.parts,
      key,
      left_out=left_out,
      cut=cut[build.spec],
      **options,
    )
    for build, key in missing
  ]


def _open_set(
  spec: record_sets.RecordSpec, folder: paths.Path, elsewhere: bool
) -> _Build:
  """Finds the finished shards of a set and removes unfinished shards.

  `elsewhere`: other machines make the shards.

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
  shard_folder = folder if elsewhere else record_copy.local_folder(folder)
  # Adding passes to a finished set needs its shards locally.
  if manifest is not None and shard_folder != folder:
    record_copy.fetch(folder, record_sets.shards(manifest))
  for leftover in shard_folder.glob('pass-*/*/*.tmp'):  # From killed workers.
    leftover.unlink()
  parts = list_parts(spec)
  keys = record_writing.shard_keys(spec, parts)
  finished = functools.partial(
    record_writing.finished_shard, shard_folder, spec
  )
  with futures.ThreadPoolExecutor(record_writing.THREADS) as pool:
    entries = dict(zip(keys, pool.map(finished, keys), strict=True))
  return _Build(spec, folder, shard_folder, parts, entries)


def list_parts(spec: record_sets.RecordSpec) -> list[record_sets.Part]:
  """Returns the parts of a record set: each objective on each of its sources.

  Raises:
    UserError: a source is missing or has no text.
  """
  return [
    record_sets.Part(objective.text, part.source.name, part.rate)
    for objective in objective_names.parse(spec.objective)
    for part in shard_jobs.open_sources(spec, objective)
  ]


def source_fingerprint(spec: record_sets.RecordSpec) -> str:
  """Returns a digest of the source text of a spec.

  Raises:
    UserError: a source is missing or has no text.
  """
  draw = shard_jobs.make_draw(spec, 0)
  return mixtures.fingerprint(all_sources(spec), draw)


def all_sources(spec: record_sets.RecordSpec) -> list[mixtures.Part]:
  """Opens each source of a set once."""
  sources = {
    part.source.name: part
    for objective in objective_names.parse(spec.objective)
    for part in shard_jobs.open_sources(spec, objective)
  }
  return list(sources.values())


def _check_dropped(
  spec: record_sets.RecordSpec,
  entries: Mapping[record_writing.ShardKey, Mapping[str, Any]],
) -> None:
  # Every pass drops the same examples; the error counts each once.
  shards = [entry for key, entry in entries.items() if not key.pass_index]
  dropped = sum(entry.get('dropped', 0) for entry in shards)
  if dropped and not any(entry['examples'] for entry in shards):
    lengths = dataclasses.asdict(spec.lengths).items()
    raise errors.UserError(
      f'data: all {dropped:,} examples of split {spec.split!r} of'
      f' {spec.source!r} are longer than a row and were dropped; increase '
      + ' and '.join(f'config.data.{x}_length={n}' for x, n in lengths if n)
      + ', or cut examples with the option too_long=truncate of'
      f' config.data.objective={spec.objective!r}'
    )


# -- The data of a job -------------------------------------------------------


def set_folders(
  data: data_section.DataConfig,
) -> dict[str, tuple[record_sets.RecordSpec, paths.Path]]:
  """Returns spec and folder of a DataConfig's sets 'train' and 'eval'."""
  folder = paths.at(data.folder)
  return {
    'train': (data.train, folder / 'train'),
    'eval': (data.evaluation, folder / 'eval'),
  }


def is_missing(data: data_section.DataConfig) -> bool:
  """Returns whether records of a DataConfig are missing.

  Records of another spec are not missing: `open_sets` rejects them. Records
  with another number of passes are, because passes can be added.
  """
  return any(
    (manifest := record_sets.read_manifest(folder)) is None
    or manifest['spec']['passes'] != spec.passes
    for spec, folder in set_folders(data).values()
  )


def open_sets(
  data: data_section.DataConfig, opened: vocabulary_pair.Opened
) -> tuple[record_sets.RecordSet, record_sets.RecordSet]:
  """Opens the training and the held-out records of a DataConfig.

  Raises:
    UserError: they are missing, damaged, made with another configuration or
      other vocabularies, or lose too many targets.
  """
  sets = set_folders(data).values()
  for _, folder in sets:
    # First, because fingerprint errors cannot name the difference.
    if manifest := record_sets.read_manifest(folder):
      record_sets.check_framing(folder, manifest, opened.sides)
  train, evaluation = (
    record_sets.RecordSet.open(
      folder, dataclasses.replace(spec, **opened.fingerprints)
    )
    for spec, folder in sets
  )
  manifest_summary.check_targets(train.manifest, data.lossy_targets)
  return train, evaluation


def locator(spec: record_sets.RecordSpec) -> Callable[[str], str]:
  """Returns a function from a document id to its file and line.

  It counts the lines before the document. Ids without a line, or in two
  sources, are returned unchanged, as are all ids if the text is missing.
  """
  sources = []
  with contextlib.suppress(errors.UserError):
    sources = [part.source for part in all_sources(spec)]

  def locate(name: str) -> str:
    places = {source.locate(name) for source in sources} - {name}
    return places.pop() if len(places) == 1 else name

  return locate


def is_untrained(data: data_section.DataConfig) -> bool:
  """Returns whether the decoder's vocabulary must be trained first.

  Raises:
    UserError: it is missing, and training it is not allowed.
  """
  path = data.vocabularies.decoder
  if vocabulary_pair.exists(path):
    return False
  if not data.train_vocabulary:
    # Usually the folder of the initial model has no tokenizer.
    raise errors.UserError(
      f'the vocabulary {path} does not exist, and config.data.train_vocabulary'
      " is False; set config.data.vocabulary to the model's tokenizer.json or"
      ' tokenizer.model, or put that into the folder of its weights'
    )
  return True


def open_vocabularies(data: data_section.DataConfig) -> vocabulary_pair.Opened:
  """Opens the vocabularies of a DataConfig; trains the decoder's if allowed.

  Training uses documents of the training split.

  Raises:
    UserError: a vocabulary is missing and may not be trained, lacks tokens of
      the chat format, or is larger than the model's vocabulary size.
  """
  choice = data.vocabularies
  if is_untrained(data):
    # Opened first, to report bad sources before the line below is printed.
    documents = mixtures.interleaved_documents(
      all_sources(data.train), shard_jobs.make_draw(data.train, 0)
    )
    path = paths.at(choice.decoder)
    # Trained vocabularies include mode tokens; only sentinels are added later.
    size = data.table_sizes['decoder'] - choice.added_sentinels
    _print(
      f'vocabulary: {path} does not exist, so a new one of {size:,} ids is'
      ' trained; if it should exist, stop and correct config.data.vocabulary.'
    )
    vocabulary_training.train_vocabulary(
      (document.text for document in documents),
      path,
      size,
      chat=data.chat_format,
    )
  opened = choice.open()
  chat_format.require(opened.decoder, data.chat_format)
  for note in opened.check_tables(data.table_sizes):
    _print(f'note: {note}')
  return opened


def contamination_report(data: data_section.DataConfig, evaluation: str) -> str:
  """Reports evaluation examples found in the training text.

  Args:
    data: section `data` of the configuration.
    evaluation: evaluation sources, in the form of `config.data.source`.

  Returns:
    A line for every set; see `contamination.report`.

  Raises:
    UserError: a source is missing or has no text.
  """
  draw = shard_jobs.make_draw(data.train, 0)
  # Takes all passes: with a weight below 1, each draws other documents.
  training = (
    part.source.plain(document)
    for part in all_sources(data.train)
    for document in dataclasses.replace(part, weight=1.0).documents(draw)
  )
  sets = [part.source for part in mixtures.open_parts(evaluation)]
  return contamination.report(training, sets)


def materialize(
  data: data_section.DataConfig, beam: Sequence[str] | None = None
) -> None:
  """Makes the missing vocabulary and records of a DataConfig.

  Args:
    data: section `data` of the configuration.
    beam: see `materialize_sets`.

  Raises:
    UserError: bad input, see `materialize_sets` and `open_vocabularies`.
  """
  opened = open_vocabularies(data)
  # By path: both sides may share a vocabulary.
  for vocabulary in {x.path: x for x in opened.sides.values()}.values():
    if vocabulary.note:
      _print(f'note: the vocabulary {vocabulary.path} {vocabulary.note}')
  names = [str(part) for part in list_parts(data.train)]
  for phase in row_rates.parse(data.rates):
    phase.check_parts(names)
  # Held-out records first: they are few, and may be empty.
  folders = set_folders(data)
  sets = [folders['eval'], folders['train']]
  *_, train = materialize_sets(
    sets,
    data.vocabularies,
    workers=data.workers,
    beam=beam,
    refuse_long=data.samples,
  )
  manifest_summary.check_targets(train, data.lossy_targets)
