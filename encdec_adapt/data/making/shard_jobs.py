"""Makes the shards of a record set: read, tokenise, make examples, pack, write.

A job describes a shard. Jobs of the same documents (several passes, or
objectives with a common source) form a group, made by one process so that the
text is tokenised once.

Only processes that read a source `tfds:` or `seqio:` import TensorFlow.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import functools
import gc
import heapq
import os
from typing import Any

import numpy as np

from encdec_adapt.data.making import packing, token_cache
from encdec_adapt.data.records import record_sets, record_writing
from encdec_adapt.data.sources import mixtures
from encdec_adapt.files import paths
from encdec_adapt.objectives import (
  denoising,
  example_maker,
  framing,
  objective_names,
  randomness,
)
from encdec_adapt.tokenizers import vocabulary_pair

# Yields the examples of a shard; importable, because it is pickled by name. Its
# arguments are the job and the group's token cache, if any.
Reader = Callable[['ShardJob', token_cache.TokenCache | None], Iterable[Any]]


@dataclasses.dataclass(frozen=True)
class ShardJob:
  """Describes a shard to make.

  Attributes:
    folder: folder of the record set.
    spec: spec of the record set with its fingerprints.
    choice: vocabularies of the model.
    parts: parts of the record set.
    key: pass, part and number of the shard.
    reader: yields the examples of the shard.
    refuse_long: whether prompts longer than a row are an error, unless the
      objective has the option too_long.
    left_out: source name -> ids of skipped documents.
    cut: names of sources with held-out pieces; None: unknown.
    counts: documents and dropped or truncated examples, filled in by `reader`.
    first_losses: see `example_maker.ExampleMaker`; filled in likewise.
  """

  folder: str
  spec: record_sets.RecordSpec
  choice: vocabulary_pair.Choice
  parts: Sequence[record_sets.Part]
  key: record_writing.ShardKey
  reader: Reader
  refuse_long: bool = False
  left_out: Mapping[str, frozenset[str]] = dataclasses.field(
    default_factory=dict
  )
  cut: frozenset[str] | None = None
  counts: collections.Counter[str] = dataclasses.field(
    default_factory=collections.Counter
  )
  first_losses: dict[str, str] = dataclasses.field(default_factory=dict)

  @property
  def part(self) -> record_sets.Part:
    """Part of the shard."""
    return self.parts[self.key.part]

  @functools.cached_property
  def objective(self) -> example_maker.Objective:
    """Objective of the training rows of the part."""
    return objective_names.parse_one(self.part.objective)

  def __str__(self) -> str:
    return (
      f'shard {self.key.shard} of {self.spec.shards}, {self.part}, pass'
      f' {self.key.pass_index}, {self.spec.split} records in {self.folder}'
    )


@dataclasses.dataclass(frozen=True)
class ShardGroup:
  """Shards of the same documents, made in turn by one process.

  Attributes:
    jobs: jobs of the same record set, source and shard number.
  """

  jobs: Sequence[ShardJob]

  def __str__(self) -> str:
    return str(self.jobs[0])


def group_jobs(jobs: Iterable[ShardJob]) -> list[ShardGroup]:
  """Groups jobs by their documents, in order of first occurrence."""
  groups: dict[tuple[str, str, int], list[ShardJob]] = {}
  for job in jobs:
    key = job.folder, job.part.source, job.key.shard
    groups.setdefault(key, []).append(job)
  return [ShardGroup(members) for members in groups.values()]


def open_sources(
  spec: record_sets.RecordSpec,
  objective: example_maker.Objective,
  left_out: Mapping[str, frozenset[str]] | None = None,
  cut: frozenset[str] | None = None,
) -> list[mixtures.Part]:
  """Opens the sources of an objective.

  Args:
    spec: spec of the record set.
    objective: the objective.
    left_out: source name -> ids of skipped documents.
    cut: names of sources with held-out pieces; None: unknown.

  Returns:
    The sources with their weights.

  Raises:
    UserError: a source is missing or has no text.
  """
  return mixtures.open_parts(
    spec.source,
    max_bytes=spec.max_bytes,
    seqio_modules=spec.modules,
    kind=objective.maker.documents,
    skip_bad=spec.bad_documents == 'skip',
    left_out=left_out or {},
    cut=cut,
  )


def make_draw(spec: record_sets.RecordSpec, pass_index: int) -> mixtures.Draw:
  """Returns the selection of documents of a pass.

  Args:
    spec: spec of the record set.
    pass_index: 0 to spec.passes - 1.
  """
  return mixtures.Draw(spec.split, spec.eval_fraction, spec.seed, pass_index)


def make_maker(
  spec: record_sets.RecordSpec,
  objective: example_maker.Objective,
  opened: vocabulary_pair.Opened,
) -> example_maker.ExampleMaker:
  """Builds the example maker of an objective for a spec.

  Raises:
    UserError: the lengths or vocabularies do not fit the objective.
  """
  return objective.make(
    spec.lengths,
    opened.decoder,
    encoder_vocabulary=opened.encoder if opened.differ else None,
    sentinel_policy=spec.sentinels,
  )


def read_examples(
  job: ShardJob, tokens: token_cache.TokenCache | None
) -> Iterable[Any]:
  """Yields the examples of a shard; see `Reader`."""
  # Full collections would repeatedly traverse the pairs waiting to be packed: a
  # twentieth of the time on short documents.
  gc.set_threshold(100_000)
  spec, opened, objective = job.spec, job.choice.open(), job.objective
  if spec.split == 'eval':
    objective = objective_names.for_evaluation(objective)
  maker = make_maker(spec, objective, opened)
  draw = make_draw(spec, job.key.pass_index)
  (part,) = (
    part
    for part in open_sources(spec, objective, job.left_out, job.cut)
    if part.source.name == job.part.source
  )
  policy = example_maker.DocumentPolicy(
    part.source.locate,
    skips_bad=spec.bad_documents == 'skip',
    refuses_long=job.refuse_long and 'too_long' not in objective.options,
  )
  keyed = randomness.Keyed(spec.seed, job.key.pass_index, job.part.source)
  shard = job.key.shard

  def generator(name: str) -> np.random.Generator:
    # Windows of concatenated documents are numbered within the shard; windows
    # of different shards need different draws.
    if name.startswith('#'):
      name = f'shard {shard} of {spec.shards}{name}'
    return keyed(name)

  def content_of(text: str) -> str | np.ndarray:
    if maker.reads == 'text':
      return text
    if tokens is None:
      return opened.decoder.encode(text)
    return tokens.encode(text, opened.decoder.encode)

  def documents() -> Iterator[tuple[str, str | np.ndarray]]:
    unit = 'passages' if part.is_cut(draw) else 'documents'
    for document in part.documents(draw, shard, spec.shards):
      job.counts[unit] += 1
      content = content_of(document.text)
      if len(content):
        yield document.id, content
      else:  # T5's vocabularies encode whitespace as no tokens.
        job.counts['bad_documents'] += 1

  yield from maker.examples(documents(), generator, policy)
  # Source and maker count while they are read, so counts are complete now.
  job.counts.update(part.counts(draw, shard))
  job.counts.update(maker.counts)
  job.first_losses.update(maker.first_losses)


def write_shard(
  job: ShardJob, folder: str, tokens: token_cache.TokenCache | None
) -> dict[str, Any]:
  """Makes a shard in a folder and returns its entry in the manifest."""
  spec = job.spec
  # Both counts exist in every shard.
  counts = {'examples': 0, denoising.SHARED_SPANS: 0}

  def examples():
    for example in job.reader(job, tokens):
      counts['examples'] += 1
      yield example

  pack = packing.pack_pairs if spec.pack else packing.single_pairs
  rows = pack(examples(), job.objective.rows.capacity(spec.lengths))
  if spec.max_rows:
    # Differences of rounded bounds: the shards' shares differ by at most one
    # row and sum to max_rows, computed independently.
    index = job.key.part * spec.shards + job.key.shard
    first, stop = (
      spec.max_rows * i // (spec.shards * len(job.parts))
      for i in (index, index + 1)
    )
    purpose = f'rows of {spec.split} shard {job.key.shard} of {spec.shards}'
    keyed = randomness.Keyed(spec.seed, job.key.pass_index, job.part.source)
    rows = sample_rows(rows, stop - first, keyed(purpose))
  with record_writing.ShardWriter(folder, spec, job.key) as writer:
    for row in rows:
      writer.write(row)
    # Counts are final only now: rows are made while they are written.
    return writer.finish(**counts | job.counts, first_losses=job.first_losses)


def write_shards(group: ShardGroup) -> list[dict[str, Any]]:
  """Makes the shards of a group.

  Finished shards of an earlier attempt are kept.

  Returns:
    Their entries in the manifest.
  """
  folder = group.jobs[0].folder
  # Next to the records, which need space anyway: the system's temporary folder
  # may be small or in memory.
  cache_folder = None if paths.is_bucket(folder) else folder
  if cache_folder:
    os.makedirs(cache_folder, exist_ok=True)
  entries = []
  with token_cache.TokenCache(cache_folder) as cache:
    # A group of one job never reads cached tokens.
    tokens = cache if len(group.jobs) > 1 else None
    for job in group.jobs:
      # Beam retries the whole group if a worker fails.
      entry = record_writing.finished_shard(job.folder, job.spec, job.key)
      if entry is None:
        with paths.staged(job.folder) as staging:
          entry = write_shard(job, str(staging), tokens)
      entries.append(entry)
  return entries


def sample_rows(
  rows: Iterable[Sequence[framing.Pair]], count: int, rng: np.random.Generator
) -> list[Sequence[framing.Pair]]:
  """Samples rows uniformly in one pass; keeps their order.

  Args:
    rows: rows to sample from, without replacement.
    count: sample size, at least 0.
    rng: random generator; draws one number per row.

  Returns:
    `count` rows, or all if there are fewer.
  """
  # The rows with the smallest random numbers are a uniform sample, and the heap
  # never holds more than `count` rows.
  keyed = ((rng.random(), i, row) for i, row in enumerate(rows))
  # Indices are unique, so rows are never compared.
  sample = heapq.nsmallest(count, keyed, key=lambda entry: entry[:2])
  return [row for _, _, row in sorted(sample, key=lambda entry: entry[1])]
