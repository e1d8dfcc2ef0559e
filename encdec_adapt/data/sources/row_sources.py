"""Sources of rows with fields: JSON lines and parquet files.

`jsonl` and `parquet` have texts; the others have pairs, labelled texts,
embedding examples and conversations (for preferences see `preference_source`).
Files named *.parquet are parquet. A row's id is its file and the offset of its
line, or the row number in a parquet file.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

from collections.abc import Callable, Iterator
import functools
import json
import math
from typing import Any

from encdec_adapt.base import errors, option_strings
from encdec_adapt.data.sources import (
  document_source,
  file_sources,
  parquet_files,
)

# Types of a field of any kind, except null.
ANY = (str, int, float, list, dict)
_TYPES = dict.fromkeys((int, float), 'a number') | {str: 'text', list: 'a list'}
_TYPES |= {dict: 'an object', type(None): 'null'}


class RowSource(file_sources.FileSource):
  """Files of rows with fields: JSON lines, or parquet by file name."""

  # Fields to read; None for all.
  _columns: list[str] | None = None

  def _is_parquet(self, path: str) -> bool:
    return path.endswith('.parquet')

  def _scan(
    self, path: str, start: int, stop: int
  ) -> Iterator[tuple[int, int, Any]]:
    if self._is_parquet(path):
      yield from parquet_files.rows(path, start, stop, self._columns)
    else:
      yield from super()._scan(path, start, stop)

  def _row(self, unit: file_sources.Unit) -> Any:
    """Returns the fields of a row; bytes columns are decoded as UTF-8.

    Raises:
      JSONDecodeError: a line is not JSON.
      UserError: a bytes column is not UTF-8; names file and row.
    """
    if not isinstance(unit.data, dict):
      return json.loads(super()._read(unit))
    location = self._line_location(unit.path, unit.offset)
    decode = document_source.decode
    return {
      name: decode(value, self.name, f'{location}, column {name!r}')
      if isinstance(value, bytes)
      else value
      for name, value in unit.data.items()
    }

  def _line_location(self, path: str, offset: int) -> str:
    if self._is_parquet(path):
      return f'{path}, row {offset}'
    return super()._line_location(path, offset)

  def _content(self) -> Iterator[object]:
    # Runs once per record set, before its shards are made.
    files = [path for path in self._sizes if self._is_parquet(path)]
    parquet_files.check_schemas(files, self._columns)
    return super()._content()


class FieldSource(RowSource):
  """Rows with the text in a field.

  Attributes:
    default_field: field if the name has none; '' for no default.
    field_counts: minimum and maximum number of fields in a name.
  """

  default_field = 'text'
  field_counts = (1, 1)

  def _take_fields(self, fields: option_strings.Part) -> None:
    names = [field.text for field in fields.divide(',')]
    self._columns = names if fields else [self.default_field]
    least, most = self.field_counts
    if not least <= len(self._columns) <= most or not all(self._columns):
      raise fields.error(f'must be fields as in {self.form}')

  def _read(self, unit: file_sources.Unit) -> str:
    try:
      row = self._row(unit)
    except json.JSONDecodeError as error:
      row = error
    content = self._document(functools.partial(self._value, unit, row))
    if not isinstance(content, str):
      # Unescaped, or `encodable` would miss surrogates.
      content = json.dumps(content, ensure_ascii=False)
    return document_source.encodable(content)

  def _document(self, value: Callable[..., Any]) -> object:
    """Returns a text, or an object to serialise as JSON.

    Args:
      value: function of a field name and its allowed types; returns the field.
    """
    return value(self._columns[0], str)

  def _value(
    self,
    unit: file_sources.Unit,
    row: Any,
    field: str,
    kind: type | tuple[type, ...],
  ) -> Any:
    """Returns a field of a row.

    Raises:
      UserError: the row is not a JSON object, or the field is missing or has
        another type; names file and line.
    """
    value = row.get(field) if isinstance(row, dict) else None
    if not isinstance(value, kind):
      kinds = kind if isinstance(kind, tuple) else (kind,)
      form = ' or '.join(dict.fromkeys(_TYPES[x] for x in kinds))
      problem = f'has {value!r:.200} in {field!r}, which must be {form}'
      if not isinstance(row, dict):
        problem = f'is not a JSON object ({row!r:.200})'
      elif field not in row:
        problem = f'has no field {field!r} but {", ".join(row) or "none"}'
      location = self._line_location(unit.path, unit.offset)
      raise errors.UserError(
        f'source {self.name!r}: {location}, {problem}; correct it, or the'
        f' fields that the source names, as in {self.form}'
      )
    return value


@document_source.register('jsonl')
class JsonlSource(FieldSource):
  """`jsonl:GLOB[#FIELD]`: each line is an object with the text in a field."""

  form = 'jsonl:GLOB[#FIELD]'


@document_source.register('parquet')
class ParquetSource(FieldSource):
  """`parquet:GLOB[#FIELD]`: each row has the text in a column."""

  form = 'parquet:GLOB[#FIELD]'

  def _is_parquet(self, path: str) -> bool:
    return True  # Regardless of the file name.


class ExampleSource(FieldSource):
  """Rows with an example and further fields about it.

  The document is a list; its last item is an object with the further fields, if
  any.
  """

  def _further(self, value: Callable[..., Any]) -> list[dict[str, Any]]:
    names = self._columns[self.field_counts[0] :]
    return [{name: value(name, ANY) for name in names}] if names else []


@document_source.register('pairs')
class PairSource(ExampleSource):
  """`pairs:GLOB#INPUTS,TARGETS[,FIELD..]`: two texts of each line."""

  form = 'pairs:GLOB#INPUTS,TARGETS[,FIELD..]'
  document_kind = 'pairs'

  field_counts = (2, math.inf)

  def _document(self, value: Callable[..., Any]) -> object:
    texts = [value(name, str) for name in self._columns[:2]]
    return texts + self._further(value)


@document_source.register('labels')
class LabelSource(FieldSource):
  """`labels:GLOB#TEXT[,TEXT],LABEL`: texts and their label in each line.

  A text is a string, or a list of words with a list of labels instead of a
  label. A label is a string or an integer.
  """

  form = 'labels:GLOB#TEXT,LABEL'
  document_kind = 'labels'

  field_counts = (2, math.inf)

  def _document(self, value: Callable[..., Any]) -> object:
    *texts, label = self._columns
    return [
      [value(name, (str, list)) for name in texts],
      value(label, (str, int, list)),
    ]


class NamedFieldSource(FieldSource):
  """Rows with texts and named further fields: `TEXT,TEXT,NAME=FIELD`.

  Attributes:
    field_names: allowed names of further fields.
  """

  field_names: tuple[str, ...] = ()

  def _take_fields(self, fields: option_strings.Part) -> None:
    parts = [field.partition('=') for field in fields.divide(',')]
    self._texts = [name.text for name, field in parts if not field]
    self._named = {name.text: field.text for name, field in parts if field}
    least, most = self.field_counts
    if (
      not least <= len(self._texts) <= most
      or not all(self._texts)
      or self._named.keys() - {*self.field_names}
    ):
      raise fields.error(f'must be fields as in {self.form}')
    self._columns = [*self._texts, *self._named.values()]


@document_source.register('embed')
class EmbedSource(NamedFieldSource):
  """A query, a positive text and negative texts.

  A negative field is a text or a list of texts, and may be missing or null.
  `scores` has a teacher's relevance of the positive and each negative, and
  `vectors` the embeddings of query, positive and negatives. A document is a
  JSON list of the texts, the scores and the vectors; scores and vectors are
  null unless named.
  """

  form = 'embed:GLOB#QUERY,POSITIVE[,NEGATIVE..][,scores=FIELD][,vectors=FIELD]'
  document_kind = 'embed'

  field_counts = (2, math.inf)
  field_names = ('scores', 'vectors')

  def _document(self, value: Callable[..., Any]) -> object:
    query, positive, *negatives = self._texts
    texts = [value(query, str), value(positive, str)]
    for name in negatives:
      content = value(name, (list, str, type(None))) or []
      texts += [content] if isinstance(content, str) else content
    named = [
      value(field, list) if (field := self._named.get(name)) else None
      for name in self.field_names
    ]
    return [texts, *named]


@document_source.register('chat')
class ChatSource(ExampleSource):
  """`chat:GLOB[#MESSAGES[,FIELD..]]`: a list of messages in each line."""

  form = 'chat:GLOB[#MESSAGES[,FIELD..]]'
  document_kind = 'chat'

  default_field = 'messages'
  field_counts = (1, math.inf)

  def _document(self, value: Callable[..., Any]) -> object:
    messages, further = value(self._columns[0], list), self._further(value)
    return [messages, *further] if further else messages
