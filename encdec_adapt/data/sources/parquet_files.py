"""Range reads of rows of parquet files.

Each row counts as an equal share of its file's bytes, so a range of bytes is a
range of rows. Only row groups in that range are read, one at a time.

Reading a file imports `pyarrow`. This module imports neither TensorFlow nor
SeqIO nor jax.
"""

from collections.abc import Iterator, Sequence
import contextlib
from typing import Any

from encdec_adapt.base import errors, packages
from encdec_adapt.files import paths

_ROWS = 1024  # Rows converted to Python objects at a time.


def rows(
  path: str, start: int, stop: int, columns: Sequence[str] | None
) -> Iterator[tuple[int, int, dict[str, Any]]]:
  """Yields number, end in bytes and fields of the rows starting in a range.

  Args:
    path: path of the file.
    start: first byte of the range.
    stop: end of the range.
    columns: names of the columns to read; None for all.

  Raises:
    UserError: the file is not parquet, or lacks a column.
  """
  nbytes = paths.size(paths.at(path))
  with _opened(path, columns) as file:
    total = file.metadata.num_rows
    # Row r begins at byte r * nbytes // total.
    first, end = (-(-byte * total // nbytes) for byte in (start, stop))
    index = 0
    for group in range(file.metadata.num_row_groups):
      size = file.metadata.row_group(group).num_rows
      # Skips row groups of other readers.
      if index + size <= first or index >= end:
        index += size
        continue
      for batch in file.iter_batches(_ROWS, [group], columns):
        skipped = max(first - index, 0)
        part = batch.slice(skipped, max(end - index - skipped, 0))
        for i, values in enumerate(part.to_pylist(), index + skipped):
          yield i, (i + 1) * nbytes // total, values
        index += len(batch)


def check_schemas(files: Sequence[str], columns: Sequence[str] | None) -> None:
  """Checks that files have the same columns.

  Args:
    files: paths of the files.
    columns: names of the columns to read; None for all.

  Raises:
    UserError: two files differ; names both and their columns.
  """
  schemas = [_schema(path, columns) for path in files]
  for path, schema in zip(files, schemas, strict=True):
    if schema != schemas[0]:
      raise errors.UserError(
        f'{path} has the columns {schema}, but {files[0]} {schemas[0]}; name'
        " files of one schema, or each schema as a source (separated by ' + ')"
      )


def _schema(path: str, columns: Sequence[str] | None) -> dict[str, str]:
  with _opened(path, columns) as file:
    # 64-bit offsets of some writers do not change the rows.
    return {
      field.name: str(field.type).replace('large_', '')
      for field in file.schema_arrow
      if columns is None or field.name in columns
    }


@contextlib.contextmanager
def _opened(path: str, columns: Sequence[str] | None) -> Iterator[Any]:
  packages.require(path, 'data', 'pyarrow')
  from pyarrow import parquet

  with paths.open_to_read(path) as raw:
    try:
      file = parquet.ParquetFile(raw)
    except ValueError as error:  # Arrow raises ValueErrors for bad content.
      raise errors.UserError(
        f'{path} is not a parquet file ({error})'
      ) from error
    for name in columns or ():
      if name not in file.schema_arrow.names:
        raise errors.UserError(
          f'{path} has no field {name!r} but'
          f' {", ".join(file.schema_arrow.names)}; name one of these in the'
          ' source, after a #'
        )
    yield file
