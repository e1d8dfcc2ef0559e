"""The source `tfds:NAME:SPLIT[:FIELD]`: a prepared TFDS dataset.

A shard reads its examples by index. With a cap, every shard reads the capped
prefix of the split.

This module imports no TensorFlow; opening a source does.
"""

from collections.abc import Iterator
import functools
import os
import re
from typing import Any

from encdec_adapt.base import errors, option_strings
from encdec_adapt.data.sources import document_source, tensorflow_import

# A split may be a slice, such as train[:10%].
_FORM = r'tfds:("[^"]+"|[^:]+(?::[\d.*]+)?):((?:[^:\[]|\[[^]]*\])+)(?::(\w+))?'


@document_source.register('tfds')
class TfdsSource(document_source.Source):
  """Each example's feature `text`, or FIELD, in dataset order."""

  form = 'tfds:NAME:SPLIT[:FIELD]'

  def __init__(self, name: str, max_bytes: int = 0):
    """Opens the dataset; see `document_source.Source`.

    Raises:
      UserError: the name is malformed, TFDS cannot open the dataset, or the
        feature does not exist.
    """
    super().__init__(name, max_bytes)
    match = re.fullmatch(_FORM, self.name)
    if not match:
      raise errors.UserError(
        f'source {self.name!r}: the form is tfds:NAME:SPLIT[:FIELD], where'
        ' NAME may end in :VERSION, or be the folder of a prepared version'
      )
    dataset, self._split, self._field = match.groups(default='text')
    dataset = option_strings.Part('the source', dataset).text
    self._tfds = tensorflow_import.import_module(
      'tensorflow_datasets', f'source {self.name!r}'
    )
    try:
      # A version's folder can be read without the dataset's code.
      if os.path.isdir(dataset):
        self._builder = self._tfds.builder_from_directory(dataset)
      else:
        self._builder = self._tfds.builder(dataset)
      self._examples = self._builder.info.splits[self._split].num_examples
    except Exception as error:  # TFDS errors have no common class.
      raise errors.UserError(
        f'source {self.name!r}: TFDS cannot open it: {error}. Prepare it with'
        f' `tfds build {dataset}`, or set TFDS_DATA_DIR'
      ) from error
    if self._field not in self._builder.info.features:
      raise errors.UserError(
        f'source {self.name!r}: there is no feature {self._field!r} but'
        f' {sorted(self._builder.info.features)}; name it as the last part'
      )

  def entries(
    self, shard_index: int = 0, num_shards: int = 1
  ) -> Iterator[document_source.Entry]:
    """Yields the examples of a shard: a slice of the split unless capped."""
    if self.max_bytes:
      return self._every(self._read(self._split), shard_index, num_shards)
    if shard_index >= self._examples:
      return iter(())  # TFDS refuses an empty slice.
    # Files outside a slice are not opened.
    splits = self._tfds.even_splits(self._split, num_shards)
    return self._read(splits[shard_index])

  def _read(self, split: Any) -> Iterator[document_source.Entry]:
    # Ordered: index i is the same example on every machine.
    config = self._tfds.ReadConfig(
      shuffle_seed=0, interleave_cycle_length=1, add_tfds_id=True
    )
    rows = self._builder.as_dataset(
      split=split, shuffle_files=False, read_config=config
    )
    for row in self._tfds.as_numpy(rows):
      name = row['tfds_id'].decode().replace('::', ':_:')
      arguments = row[self._field], self.name, name
      yield name, functools.partial(document_source.decode, *arguments)

  def _content(self) -> Iterator[object]:
    # By TFDS's rules, a dataset version never changes.
    yield self._builder.info.full_name
    yield self._examples
    yield self._field
