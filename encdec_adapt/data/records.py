"""Record sets: packed rows of token ids on disk, read by index.

A record set is a folder:

  manifest.json                                  written last
  pass-00000/shard-00003-of-00008.array_record   rows (`data/rows.py`)
  pass-00000/shard-00003-of-00008.json           that shard's counts and hash

A pass is one draw of masks, splits and packing over the whole source. A row
is numbered through all shards of all passes, in that order.

A shard is written under a temporary name, synced, renamed, and then vouched
for by its .json; the manifest names the shards of a finished set. Reading
refuses a set whose manifest does not match, and shards that are not what was
written: ArrayRecord itself reads a truncated file as an empty one.

This module imports neither TensorFlow nor SeqIO.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import pathlib
from typing import Any

from array_record.python import array_record_module
from grain import sources

from encdec_adapt.cli import errors
from encdec_adapt.data import batch, record_copy, rows
from encdec_adapt.files import atomic, paths
from encdec_adapt.tokenizers import special_ids

# Of rows, file names, windows, packing and manifest; counts up when changed.
FORMAT = 3
MANIFEST = 'manifest.json'
# Fields of a spec that a config leaves empty.
FINGERPRINTS = ('source_fingerprint', 'vocabulary', 'encoder_vocabulary')
# One row per chunk, for reads in random order. Level 1 reads fastest.
WRITER_OPTIONS = 'group_size:1,zstd:1'


@dataclasses.dataclass(frozen=True)
class RecordSpec:
  """Everything the content of a record set depends on.

  Attributes:
    source: what `data/mixtures.py` understands: names and weights of sources.
    split: 'train' or 'eval'.
    objective: an objective's name, e.g. 'prefix_lm'.
    encoder_length: S of the rows in tokens; 0 for a causal language model.
    decoder_length: T of the rows in tokens.
    passes: how many times the source is drawn, at least 1.
    shards: files per pass; a file is the unit of work and of restarting.
    seed: of all draws.
    pack: several pairs per row; False writes one pair per row, in order.
    sentinels: what happens when sentinel ids run out, e.g. 'recycle'.
    eval_fraction: share of the documents held out for 'eval', 0 to 1.
    max_documents: use at most so many documents of each source; 0 uses all.
    max_bytes: use documents up to so many bytes of each source's text; 0 uses
      all.
    max_rows: keep at most so many rows per pass, spread over the documents;
      0 keeps all.
    source_fingerprint: of the text; '' in a config, which is filled in when
      records are made and compared when it is known.
    vocabulary: fingerprint of the decoder's vocabulary; '' in a config, as
      above.
    encoder_vocabulary: of the encoder's, equal where there is one for both.
  """

  source: str
  split: str
  objective: str
  encoder_length: int
  decoder_length: int
  passes: int = 1
  shards: int = 8
  seed: int = 0
  pack: bool = True
  sentinels: str = 'unique'
  eval_fraction: float = 0.0
  max_documents: int = 0
  max_bytes: int = 0
  max_rows: int = 0
  source_fingerprint: str = ''
  vocabulary: str = ''
  encoder_vocabulary: str = ''

  def __post_init__(self):
    rules = {
      'encoder_length': (self.encoder_length >= 0, '0 or more'),
      'decoder_length': (self.decoder_length >= 1, 'at least 1'),
      'passes': (self.passes >= 1, 'at least 1'),
      'shards': (self.shards >= 1, 'at least 1'),
      'seed': (self.seed >= 0, '0 or more'),
      'eval_fraction': (0 <= self.eval_fraction <= 1, 'from 0 to 1'),
      'max_documents': (self.max_documents >= 0, '0 (all) or more'),
      'max_bytes': (self.max_bytes >= 0, '0 (all) or more'),
      'max_rows': (self.max_rows >= 0, '0 (all) or more'),
    }
    for field, (holds, right) in rules.items():
      if not holds:
        raise errors.UserError(
          f'data: {field}={getattr(self, field)!r} must be {right}'
        )

  @property
  def lengths(self) -> batch.Lengths:
    """S and T of the rows."""
    return batch.Lengths(self.encoder_length, self.decoder_length)

  def shard_identity(self) -> dict[str, Any]:
    """What a single shard depends on: all but the number of passes."""
    fields = {**dataclasses.asdict(self), 'format': FORMAT}
    del fields['passes']
    return fields


# -- Shards ------------------------------------------------------------------


def shard_path(
  folder: str | os.PathLike, spec: RecordSpec, pass_index: int, shard: int
) -> pathlib.Path:
  """Where a shard lies."""
  name = f'shard-{shard:05d}-of-{spec.shards:05d}.array_record'
  return pathlib.Path(folder) / f'pass-{pass_index:05d}' / name


class ShardWriter(contextlib.AbstractContextManager):
  """Writes one shard; what is not finished leaves no file behind.

  Use as a context manager: `write` each row, then `finish`.
  """

  def __init__(
    self,
    folder: str | os.PathLike,
    spec: RecordSpec,
    pass_index: int,
    shard: int,
  ):
    """Opens a temporary file beside the shard's place.

    Args:
      folder: of the record set; made if missing.
      spec: of the record set, its vocabulary filled in.
      pass_index: 0 to spec.passes - 1.
      shard: 0 to spec.shards - 1.
    """
    self._spec = spec
    self._path = shard_path(folder, spec, pass_index, shard)
    self._path.parent.mkdir(parents=True, exist_ok=True)
    self._temporary = self._path.with_suffix(f'.{os.getpid()}.tmp')
    self._writer = array_record_module.ArrayRecordWriter(
      str(self._temporary), WRITER_OPTIONS
    )
    self._finished = False
    self.counts = dict.fromkeys(
      ('rows', 'pairs', 'encoder_positions', 'target_tokens'), 0
    )

  def write(self, pairs: Sequence[batch.Pair]) -> None:
    """Appends one row.

    Raises:
      UserError: the disk does not take it.
    """
    with self._disk_errors():
      self._writer.write(rows.encode_row(pairs))
    self.counts['rows'] += 1
    self.counts['pairs'] += len(pairs)
    for pair in pairs:
      self.counts['encoder_positions'] += batch.encoder_cost(
        pair, self._spec.lengths
      )
      self.counts['target_tokens'] += len(pair.targets)

  def finish(self, **counts: int) -> dict[str, Any]:
    """Puts the shard in its place.

    Args:
      **counts: what else to remember, e.g. documents=17.

    Returns:
      The shard's entry in the manifest.

    Raises:
      UserError: the disk does not take it.
    """
    with self._disk_errors():
      self._writer.close()
      paths.sync(self._temporary)
      entry = {
        **self.counts,
        **counts,
        'bytes': self._temporary.stat().st_size,
        'sha256': record_copy.file_hash(self._temporary),
      }
      os.replace(self._temporary, self._path)
      atomic.write_json(
        self._path.with_suffix('.json'),
        {'identity': self._spec.shard_identity(), **entry},
      )
    self._finished = True
    return entry

  def __exit__(self, *unused):
    if not self._finished:
      with contextlib.suppress(RuntimeError):  # The disk is full already.
        self._writer.close()
      self._temporary.unlink(missing_ok=True)

  @contextlib.contextmanager
  def _disk_errors(self):
    """ArrayRecord tells of a full disk, late, in a RuntimeError."""
    try:
      yield
    except (OSError, RuntimeError) as error:
      raise errors.UserError(
        f'record shard {self._path} cannot be written ({error}); free some'
        ' space, or name another data folder. Finished shards are kept'
      ) from error


def finished_shard(
  folder: str | os.PathLike, spec: RecordSpec, pass_index: int, shard: int
) -> dict[str, Any] | None:
  """The manifest entry of a shard that is there, whole and of this spec.

  Returns:
    None if the shard has to be (re)written.
  """
  path = shard_path(folder, spec, pass_index, shard)
  try:
    entry = json.loads(path.with_suffix('.json').read_text())
  except (FileNotFoundError, json.JSONDecodeError):
    return None
  if entry.pop('identity', None) != spec.shard_identity():
    return None
  return entry if record_copy.is_whole(path, entry) else None


# -- Manifest ----------------------------------------------------------------


def write_manifest(
  folder: str | os.PathLike,
  spec: RecordSpec,
  entries: Mapping[tuple[int, int], Mapping[str, Any]],
  vocabularies: Mapping[str, Any],
) -> dict[str, Any]:
  """Declares a record set finished.

  Args:
    folder: of the record set.
    spec: what it was made from.
    entries: what `ShardWriter.finish` returned, by (pass, shard), of all.
    vocabularies: of the tokens, as `vocabularies.Opened.describe` has them;
      rows are framed with their ids.

  Returns:
    The manifest: format, spec, vocabularies (fingerprints and special
    tokens), totals (the shards' counts added up), fill of both sides, and per
    pass its rows and its shards' entries.
  """
  passes = []
  totals: dict[str, int] = {}
  for pass_index in range(spec.passes):
    shards = []
    for shard in range(spec.shards):
      entry = entries[pass_index, shard]
      path = shard_path(folder, spec, pass_index, shard)
      name = path.relative_to(folder).as_posix()
      shards.append({'file': name, **entry})
      for key, value in entry.items():
        if key != 'sha256':
          totals[key] = totals.get(key, 0) + value
    count = sum(entry['rows'] for entry in shards)
    passes.append({'rows': count, 'shards': shards})
  count = max(totals['rows'], 1)
  manifest = {
    'format': FORMAT,
    'spec': dataclasses.asdict(spec),
    'vocabularies': dict(vocabularies),
    'totals': totals,
    'fill': {
      'encoder': totals['encoder_positions']
      / (count * max(spec.encoder_length, 1)),
      'decoder': totals['target_tokens'] / (count * spec.decoder_length),
    },
    'passes': passes,
  }
  atomic.write_json(pathlib.Path(folder) / MANIFEST, manifest)
  return manifest


def read_manifest(folder: str | os.PathLike) -> dict[str, Any] | None:
  """The manifest of a finished record set, None where there is none.

  Raises:
    UserError: there is one, but of another format or not readable.
  """
  path = paths.at(folder) / MANIFEST
  try:
    manifest = json.loads(path.read_bytes())
  except FileNotFoundError:
    return None
  except (json.JSONDecodeError, UnicodeDecodeError) as error:
    raise errors.UserError(
      f'{path} is not a manifest ({error}); remove it and materialise again:'
      ' finished shards are kept'
    ) from error
  found = manifest.get('format') if isinstance(manifest, dict) else None
  if found != FORMAT:
    raise errors.UserError(
      f'{path} has format {found!r}, this version reads {FORMAT}; materialise'
      ' the records again into an empty folder'
    )
  return manifest


# -- Reading -----------------------------------------------------------------


class RecordSet:
  """The rows of a finished record set, by number.

  Attributes:
    folder: where it lies.
    spec: what it was made from.
    framing: special ids that its rows are framed with.
    manifest: the rest of what is known of it.
    starts: first row number of each pass, and the number of rows at the end.
  """

  def __init__(self, folder: pathlib.Path, manifest: dict[str, Any]):
    """Use `open`."""
    self.folder = folder
    self.spec = RecordSpec(**manifest['spec'])
    self.framing = special_ids.Framing.from_description(
      manifest['vocabularies']
    )
    self.manifest = manifest
    counts = [entry['rows'] for entry in manifest['passes']]
    self.starts = tuple(itertools.accumulate(counts, initial=0))
    self._source = sources.ArrayRecordDataSource(
      [str(folder / entry['file']) for entry in _shards(manifest)]
    )
    if len(self._source) != len(self):
      raise errors.UserError(
        f'{folder} holds {len(self._source)} rows, its manifest says'
        f' {len(self)}; materialise again: finished shards are kept'
      )

  @classmethod
  def open(
    cls,
    folder: str | os.PathLike,
    expect: RecordSpec | None = None,
    *,
    verify: bool = True,
  ) -> 'RecordSet':
    """Opens a record set and checks that it is the one that is meant.

    Args:
      folder: of the record set. Of a bucket, a copy on this machine is read.
      expect: refuse a set made from anything else. A fingerprint that is ''
        in it is not compared.
      verify: read every shard and compare its hash (about a second per GB);
        sizes are compared in any case.

    Raises:
      UserError: no records, made from something else, damaged, or empty.
    """
    folder = paths.at(folder)
    manifest = read_manifest(folder)
    if manifest is None:
      raise errors.UserError(
        f'no records in {folder} ({MANIFEST} is missing); run `python -m'
        ' encdec_adapt.materialize` with the same config'
      )
    if expect is not None:
      check_spec(folder, manifest, expect)
    if paths.is_bucket(folder):
      folder = record_copy.fetch(folder, shards(manifest))
    else:
      for entry in _shards(manifest):
        _check_shard(folder / entry['file'], entry, verify)
    if not manifest['totals']['rows']:
      raise errors.UserError(f'the records in {folder} have no rows')
    return cls(folder, manifest)

  @functools.cached_property
  def digests(self) -> list[str]:
    """Hash of each pass's content: what a position in these rows is good for.

    Adding passes leaves those before them as they are.
    """
    return [
      hashlib.sha256(
        ' '.join(shard['sha256'] for shard in entry['shards']).encode()
      ).hexdigest()
      for entry in self.manifest['passes']
    ]

  def __len__(self) -> int:
    """Rows of all passes."""
    return self.starts[-1]

  @property
  def passes(self) -> int:
    """Number of passes."""
    return len(self.starts) - 1

  def rows(self, pass_index: int) -> int:
    """Rows of one pass."""
    return self.starts[pass_index + 1] - self.starts[pass_index]

  def read(self, indices: Sequence[int]) -> list[list[batch.Pair]]:
    """Reads rows by number, 0 to len - 1, in the order asked for."""
    if not len(indices):  # ArrayRecord refuses to read nothing.
      return []
    records = self._source.__getitems__([int(i) for i in indices])
    return [rows.decode_row(record) for record in records]


def check_spec(
  folder: str | os.PathLike, manifest: Mapping[str, Any], expect: RecordSpec
) -> None:
  """Refuses a manifest of another spec; names every field that differs.

  Raises:
    UserError: the manifest is not of `expect`.
  """
  found = manifest['spec']
  wrong = []
  for field, value in dataclasses.asdict(expect).items():
    if field in FINGERPRINTS and not value:
      continue
    if found.get(field) != value:
      wrong.append(
        f'{field} is {found.get(field)!r} in the records and {value!r} in the'
        ' config'
      )
  if wrong:
    raise errors.UserError(
      f'the records in {folder} do not match: {"; ".join(wrong)}. Set the'
      ' config back, or name another data folder and materialise there'
    )


def shards(manifest: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
  """Entries of all shards by their names below the folder."""
  return {entry['file']: entry for entry in _shards(manifest)}


def _shards(manifest: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
  for entry in manifest['passes']:
    yield from entry['shards']


def _check_shard(
  path: pathlib.Path, entry: Mapping[str, Any], verify: bool
) -> None:
  """Refuses a shard that is not what the manifest says."""
  if not path.exists():
    what = 'is missing'
  elif (size := path.stat().st_size) != entry['bytes']:
    what = f'has {size} bytes, the manifest says {entry["bytes"]}'
  elif verify and record_copy.file_hash(path) != entry['sha256']:
    what = 'has another SHA-256 than the manifest says'
  else:
    return
  raise errors.UserError(
    f'record shard {path} {what}; remove {path.parent.parent / MANIFEST} and'
    ' materialise again: undamaged shards are kept'
  )
