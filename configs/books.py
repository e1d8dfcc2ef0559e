r"""The source `books:GLOB`: passages of texts, and the book that each is from.

    python -m encdec_adapt.train --workdir=runs/books \
      --config='configs/classification.py:source=runs/adapted,books=books/*.txt'

Every file that matches is a book, whose name without its ending is a label, and
every 240 characters of it, up to the end of a word, are an example for
`classify`. The split is made book by book: the last share of each
(`config.data.eval_fraction`) is held out, so that no passage between two that
are learnt from is. The part of an id before '::' is the book.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

from collections.abc import Iterator
import functools
import json
import os
import textwrap

from encdec_adapt.base import errors, option_strings
from encdec_adapt.data.sources import document_source, file_sources

_LONGEST = 240  # Characters of a passage.


@document_source.register('books')
class BookSource(file_sources.TextSource):
  """`books:GLOB`: passages, labelled with the file that they are from."""

  form = 'books:GLOB'
  document_kind = 'labels'

  def _take_fields(self, fields: option_strings.Part) -> None:
    if fields:
      raise fields.error(f'must be left out, as in {self.form}')
    super()._take_fields(fields)

  @property
  def labels(self) -> list[str]:
    """The books, in the order of their files.

    Raises:
      UserError: there are fewer than two, or the name of one divides labels.
    """
    labels = [_label(name) for name in self._ids.values()]
    if len(labels) < 2 or any('|' in label for label in labels):
      raise errors.UserError(
        f'source {self.name!r} has the books {labels}; name at least two files,'
        ' whose names have no |.'
      )
    return labels

  def in_split(
    self, document_id: str, split: str, eval_fraction: float, seed: int
  ) -> bool:
    """Returns whether a passage belongs to `split`, by its place in a book."""
    number, count = map(int, document_id.rpartition('::')[2].split('/'))
    return (number >= count * (1 - eval_fraction)) == (split == 'eval')

  def _documents(
    self, unit: file_sources.Unit
  ) -> Iterator[document_source.Entry]:
    passages = textwrap.wrap(self._read(unit), _LONGEST, break_on_hyphens=False)
    for i, passage in enumerate(passages):
      document = json.dumps([[passage], _label(unit.id)], ensure_ascii=False)
      yield f'{unit.id}::{i}/{len(passages)}', functools.partial(str, document)


def _label(name: str) -> str:
  return os.path.splitext(name)[0]
