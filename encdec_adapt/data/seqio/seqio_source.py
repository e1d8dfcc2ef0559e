"""Registered SeqIO tasks as sources.

`seqio:NAME[:SPLIT]` (default split: train) reads a task. A mixture is read task
by task (`rates`): each task is a part of the records, at the mixture's rate.
The text of an example is its feature `text`, or `inputs` and `targets` for the
objective `pairs`. Encoded features are decoded with the task's vocabulary and
re-encoded with the model's.

A task is read file by file, as SeqIO shards, one per file of its source. Our
shard i of n reads every file whose number is i modulo n or, if there are fewer
files than shards, its share of one file's examples. Example names are
TASK:SPLIT:FILE:ID, with the file number and the feature `id` or else the
position in the file, so they are unique and independent of the number of our
shards. Random preprocessors use SeqIO's seeds, which depend on the position in
the file; preprocessors that join examples do so within a file.

This module imports SeqIO and TensorFlow; opening such a source imports it. The
modules of `config.data.seqio_modules`, which register tasks, are imported
before the task is looked up.
"""

from collections.abc import Iterator
import difflib
import functools
import itertools
import json
from typing import Any

import seqio

from encdec_adapt.base import errors
from encdec_adapt.data.seqio import seqio_tasks  # noqa: F401  Registers tasks.
from encdec_adapt.data.sources import document_source

# Otherwise SeqIO draws a preprocessor seed per process.
_SEED = 0


class SeqioSource(document_source.Source):
  """A registered task; its documents are texts if divisible, else pairs."""

  def __init__(self, name: str, max_bytes: int, *, pairs: bool):
    """Finds the task.

    Args:
      name: 'seqio:NAME[:SPLIT]'.
      max_bytes: see `document_source.Source`.
      pairs: whether documents are pairs of texts.

    Raises:
      UserError: the task is not registered, is a mixture, or lacks the split.
    """
    # Set before the base class derives `divisible` from it.
    self.document_kind = 'pairs' if pairs else 'text'
    super().__init__(name, max_bytes)
    task, self._split = _parse(name)
    self._task = _get(task)
    if self._split not in self._task.splits:
      raise errors.UserError(
        f'source {name!r}: the task has no split {self._split!r} but'
        f' {sorted(self._task.splits)}; name it as seqio:NAME:SPLIT'
      )
    self._num_files = max(len(self._task.source.list_shards(self._split)), 1)

  def entries(
    self, shard_index: int = 0, num_shards: int = 1
  ) -> Iterator[document_source.Entry]:
    """Yields the examples of a shard: whole files if there are enough."""
    count = self._num_files
    # The cap applies to the text of all files in order, so every shard reads
    # it.
    if self.max_bytes:
      entries = itertools.chain.from_iterable(map(self._file, range(count)))
      yield from self._every(entries, shard_index, num_shards)
      return
    for file in range(shard_index % count, count, num_shards):
      # The shards of a file, including this shard, take turns.
      readers = range(file % num_shards, num_shards, count)
      turn = readers.index(shard_index)
      yield from itertools.islice(self._file(file), turn, None, len(readers))

  def _file(self, index: int) -> Iterator[document_source.Entry]:
    # Neither shuffled nor trimmed: names contain positions in the file, and
    # objectives fit documents to the row lengths.
    dataset = self._task.get_dataset(
      None,
      self._split,
      shuffle=False,
      seed=_SEED,
      shard_info=seqio.ShardInfo(index, self._num_files),
      trim_output_features=False,
    )
    for i, row in enumerate(dataset.as_numpy_iterator()):
      example = row.get('id', i)
      if isinstance(example, bytes):
        example = example.decode('utf-8', 'replace')
      # Ids may repeat across files.
      name = f'{self._task.name}:{self._split}:{index}:{example}'
      yield name.replace('::', ':_:'), functools.partial(self._read, row)

  def _read(self, row: dict[str, Any]) -> str:
    if self.divisible:
      # Language modelling tasks have the text in `targets`.
      return self._feature(row, 'text' if 'text' in row else 'targets')
    pair = [self._feature(row, name) for name in ('inputs', 'targets')]
    return json.dumps(pair, ensure_ascii=False)

  def _feature(self, row: dict[str, Any], name: str) -> str:
    if name not in row:
      raise errors.UserError(
        f'source {self.name!r}: its examples have no feature {name!r} but'
        f' {sorted(row)}; objectives of text read text or targets, pairs read'
        ' inputs and targets'
      )
    # Raw tasks do not encode.
    if isinstance(row[name], bytes):
      return document_source.decode(row[name], self.name, f'feature {name!r}')
    vocabulary = self._task.output_features[name].vocabulary
    ids = row[name].tolist()
    # EOS is not part of the text.
    if ids and ids[-1] == vocabulary.eos_id:
      ids.pop()
    return vocabulary.decode(ids)

  def _content(self) -> Iterator[object]:
    yield self._split
    yield self._num_files
    yield self._task.num_input_examples(self._split)
    # Tasks have no version or checksum. A few examples reveal most changes to
    # preprocessors; reading all would cost a pass.
    for name, read_text in itertools.islice(self.entries(), 16):
      yield name
      yield read_text()


def _parse(name: str) -> tuple[str, str]:
  _, task, *split = name.split(':')
  return task, split[0] if split else 'train'


def _get(name: str) -> Any:
  names = [*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()]
  if name not in names:
    near = difflib.get_close_matches(name, names, 3) or sorted(names)[:3]
    raise errors.UserError(
      f'no SeqIO task or mixture {name!r} is registered; did you mean'
      f' {", ".join(near) or "none"}? config.data.seqio_modules imports the'
      ' modules that register them'
    )
  return seqio.get_mixture_or_task(name)


def rates(name: str) -> dict[str, float | None]:
  """Returns the tasks of a source with their mixture rates.

  Args:
    name: 'seqio:NAME[:SPLIT]', a task or a mixture.

  Returns:
    Source name of every task with a positive rate -> rate by examples; None if
    NAME is a task.

  Raises:
    UserError: the name is not registered.
  """
  task, split = _parse(name)
  mixture = _get(task)
  if not isinstance(mixture, seqio.Mixture):
    return {name: None}
  rates_of_tasks = {
    f'seqio:{task.name}:{split}': rate
    for task in mixture.tasks
    # Like SeqIO, skips tasks without the split.
    if split in task.splits and (rate := float(mixture.get_rate(task)))
  }
  if not rates_of_tasks:
    raise errors.UserError(
      f'source {name!r}: no task of the mixture has a split {split!r} and a'
      ' rate above 0; name a split as seqio:NAME:SPLIT'
    )
  return rates_of_tasks
