"""Sources that are registered SeqIO tasks.

`seqio:NAME` or `seqio:NAME:SPLIT` (train) reads a task; a mixture is read task
by task (`rates`), each a part of the records with the mixture's rate. An
example gives its text: the feature `text`, or `inputs` and `targets` for the
objective `pairs`. Features that the task has encoded are decoded with the
task's vocabulary, and encoded again with the model's.

A task is read file by file, in SeqIO's shards: as many as its source has
files. Our shard i of n reads the files of numbers i modulo n, or, where files
are fewer, its share of the examples of a file. An example is named
TASK:SPLIT:FILE:ID by the number of its file and its feature `id`, or else its
position in the file, so names are distinct and do not depend on the number of
our shards. Preprocessors of a task that draw at random use SeqIO's seeds, which
depend on the position in the file, and those that join examples join them
within a file.

This module imports SeqIO and TensorFlow, and is imported when such a source is
opened. The modules of `config.data.seqio_modules`, which register the task, are
imported before the task is looked up.
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

# SeqIO would draw another seed for preprocessors in every process.
_SEED = 0


class SeqioSource(document_source.Source):
  """A registered task; its documents are texts if they are divisible."""

  def __init__(self, name: str, max_bytes: int, *, pairs: bool):
    """Finds the task.

    Args:
      name: 'seqio:NAME[:SPLIT]'.
      max_bytes: see `document_source.Source`.
      pairs: whether documents are pairs of texts.

    Raises:
      UserError: no such task is registered, it is a mixture, or it lacks the
        split.
    """
    # Before the base class reads it, to decide whether documents are divisible.
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
    """Yields the examples of a shard: of whole files where there are enough."""
    count = self._num_files
    # The cap is on the text of all files in order, so every shard reads that.
    if self.max_bytes:
      entries = itertools.chain.from_iterable(map(self._file, range(count)))
      yield from self._every(entries, shard_index, num_shards)
      return
    for file in range(shard_index % count, count, num_shards):
      # All shards that read this file, including this shard, take turns.
      readers = range(file % num_shards, num_shards, count)
      turn = readers.index(shard_index)
      yield from itertools.islice(self._file(file), turn, None, len(readers))

  def _file(self, index: int) -> Iterator[document_source.Entry]:
    # Neither shuffled nor trimmed: names have positions in the file, and
    # objectives cut documents to the lengths of the rows.
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
      # A task's ids may repeat in another file.
      name = f'{self._task.name}:{self._split}:{index}:{example}'
      yield name.replace('::', ':_:'), functools.partial(self._read, row)

  def _read(self, row: dict[str, Any]) -> str:
    if self.divisible:
      # Tasks of language modelling have the text as their targets.
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
    # Raw tasks have no preprocessor that encodes.
    if isinstance(row[name], bytes):
      return document_source.decode(row[name], self.name, f'feature {name!r}')
    vocabulary = self._task.output_features[name].vocabulary
    ids = row[name].tolist()
    # The token that ends a sequence is not a part of its text.
    if ids and ids[-1] == vocabulary.eos_id:
      ids.pop()
    return vocabulary.decode(ids)

  def _content(self) -> Iterator[object]:
    yield self._split
    yield self._num_files
    yield self._task.num_input_examples(self._split)
    # A task has no version or checksum. A few examples show most changes of its
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
  """Returns the tasks of a source and their rates in a mixture.

  Args:
    name: 'seqio:NAME[:SPLIT]', a task or a mixture.

  Returns:
    Name of the source of every task with a rate above 0 -> its rate by
    examples; None for a task that is named itself.

  Raises:
    UserError: nothing of the name is registered.
  """
  task, split = _parse(name)
  mixture = _get(task)
  if not isinstance(mixture, seqio.Mixture):
    return {name: None}
  rates_of_tasks = {
    f'seqio:{task.name}:{split}': rate
    for task in mixture.tasks
    # SeqIO too ignores tasks without the split.
    if split in task.splits and (rate := float(mixture.get_rate(task)))
  }
  if not rates_of_tasks:
    raise errors.UserError(
      f'source {name!r}: no task of the mixture has a split {split!r} and a'
      ' rate above 0; name a split as seqio:NAME:SPLIT'
    )
  return rates_of_tasks
