"""Record sets: packed rows of token ids on disk, read by index.

A record set is a folder:

  manifest.json                                    written last
  pass-00000/part-000/shard-00003-of-00008.array_record   rows (`row_codec.py`)
  pass-00000/part-000/shard-00003-of-00008.json    counts and hash of the shard

A pass is one draw of masks, splits and packing over the whole source. A part
holds the rows of one objective on one source; `data/records/row_order.py` mixes
parts. Row numbers run through passes, then parts, then shards.

`data/records/record_writing.py` writes the shards and, last, the manifest. The
reader rejects manifests that differ from the configuration and shards with a
size or hash other than the manifest's: ArrayRecord itself reads a truncated
file as empty.

This module imports neither TensorFlow nor SeqIO.
"""

from collections.abc import Mapping, Sequence
import copy
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import pathlib
from typing import Any

from grain import sources

from encdec_adapt.base import errors
from encdec_adapt.data.records import record_copy, row_codec
from encdec_adapt.data.sources import (
  document_source,
  mixtures,
  text_sources,
)
from encdec_adapt.files import paths
from encdec_adapt.objectives import (
  example_maker,
  framing,
  noising,
  objective_names,
)
from encdec_adapt.tokenizers import special_ids, vocabulary

# Version of rows, file names, windows, packing and manifest. Changes to a
# single objective or source are revisions of it, which keep other records
# valid.
FORMAT = 7
MANIFEST = 'manifest.json'
# Fields left empty by a configuration. They are compared only if known, because
# training jobs need not have the source.
_FILLED_IN = 'source_fingerprint vocabulary encoder_vocabulary opening'.split()


@dataclasses.dataclass(frozen=True)
class RecordSpec:
  """Settings that determine the content of a record set.

  Attributes:
    source: sources and weights, see `data/sources/mixtures.py`.
    split: 'train' or 'eval'.
    objective: objective, such as 'prefix_lm', with its options; ' | ' separates
      several.
    encoder_length: S of the rows in tokens; 0 for a causal language model.
    decoder_length: T of the rows in tokens; 0 for an encoder-only model.
    passes: number of draws over the source, at least 1.
    shards: files per part and pass, each a unit of work and restart.
    seed: seed of all draws.
    pack: whether to pack several pairs per row; otherwise one pair per row, in
      order.
    sentinels: policy for windows with more spans than sentinels
      (`objectives/denoising.py`).
    eval_fraction: share of the documents held out for 'eval', 0 to 1.
    seqio_modules: modules that register sources and SeqIO tasks,
      comma-separated.
    bad_documents: 'fail', or 'skip' to leave out unreadable documents.
    deduplicate: whether to drop documents that repeat an earlier text.
    max_bytes: bytes used of each source (`document_source.Source`); 0 for all.
    max_rows: rows sampled per pass; 0 for all.
    source_fingerprint: digest of the text; '' in a configuration: filled in
      when records are made, and not compared.
    vocabulary: fingerprint of the decoder's vocabulary; '' likewise.
    encoder_vocabulary: fingerprint of the encoder's vocabulary; '' likewise.
    opening: number of ids around inputs (`special_ids.SideIds.frame_size`)
      minus 1; 0 likewise.
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
  seqio_modules: str = ''
  bad_documents: str = 'fail'
  deduplicate: bool = False
  max_bytes: int = 0
  max_rows: int = 0
  source_fingerprint: str = ''
  vocabulary: str = ''
  encoder_vocabulary: str = ''
  opening: int = 0

  @property
  def lengths(self) -> framing.Lengths:
    """S and T of the rows."""
    lengths = self.encoder_length, self.decoder_length
    return framing.Lengths(*lengths, 1 + self.opening)

  @property
  def modules(self) -> tuple[str, ...]:
    """Names of the modules in `seqio_modules`."""
    return tuple(filter(None, self.seqio_modules.split(',')))

  @functools.cached_property
  def objectives(self) -> tuple[example_maker.Objective, ...]:
    """Objectives of the rows; held-out: no masks, one document per row."""
    objectives = objective_names.parse(self.objective)
    if self.split != 'eval':
      return objectives
    return tuple(map(objective_names.for_evaluation, objectives))

  @property
  def changes(self) -> dict[str, tuple[str, ...]]:
    """Changes to objectives and sources since `FORMAT`."""
    revisions = {f'objective {x.text!r}': x.revisions for x in self.objectives}
    for source, _ in mixtures.parse(self.source):
      revisions[f'source {source!r}'] = text_sources.revisions(
        source, self.modules
      )
    return {name: changes for name, changes in revisions.items() if changes}

  @property
  def revisions(self) -> dict[str, int]:
    """Revision numbers of changed objectives and sources."""
    return {name: len(changes) for name, changes in self.changes.items()}

  def shard_identity(self) -> dict[str, Any]:
    """Returns the settings that determine a shard: all but `passes`."""
    fields = {**dataclasses.asdict(self), 'format': FORMAT}
    del fields['passes']
    # Omitted if nothing has changed, so that older shards stay valid.
    if not self.opening:
      del fields['opening']
    revisions = self.revisions
    return {**fields, 'revisions': revisions} if revisions else fields


@dataclasses.dataclass(frozen=True)
class Part:
  """Objective and source of the rows of a part.

  Attributes:
    objective: name and options of the objective.
    source: name of the source.
    rate: the source's rate by examples in a SeqIO mixture, else None.
  """

  objective: str
  source: str
  rate: float | None = None

  def __str__(self) -> str:
    return f'{self.objective} of {self.source}'


def read_manifest(folder: str | os.PathLike) -> dict[str, Any] | None:
  """Returns the manifest of a finished record set, or None.

  Raises:
    UserError: it cannot be parsed, or has another format or a removed
      objective.
  """
  path = paths.at(folder) / MANIFEST
  try:
    manifest = json.loads(path.read_bytes())
  except FileNotFoundError:
    return None
  except ValueError as error:
    raise errors.UserError(
      f'{path} is not a manifest ({error}); remove it and materialise again:'
      ' finished shards are kept'
    ) from error
  if manifest['format'] != FORMAT:
    raise errors.UserError(
      f'{path} has format {manifest["format"]!r}, this version reads {FORMAT};'
      ' materialise the records again into an empty folder'
    )
  objective_names.parse(manifest['spec']['objective'])
  return manifest


class RecordSet:
  """Reader of a finished record set, by row number.

  Attributes:
    folder: local folder of the shards.
    spec: spec of the set.
    framing: special ids for framing rows.
    manifest: content of the manifest.
    parts: parts of the set, from the manifest.
    ranges: first row and end of every part in every pass, [pass][part].
  """

  def __init__(self, folder: pathlib.Path, manifest: dict[str, Any]):
    """Use `RecordSet.open`, which verifies the shards."""
    self.folder = folder
    self.spec = RecordSpec(**manifest['spec'])
    self.framing = special_ids.Framing.from_description(
      manifest['vocabularies']
    )
    self.manifest = manifest
    self.parts = manifest['parts']
    # Rows are numbered by pass, then by part, so that adding a pass does not
    # renumber earlier rows.
    counts = [n for entry in manifest['passes'] for n in entry['rows']]
    bounds = list(itertools.pairwise(itertools.accumulate(counts, initial=0)))
    parts = len(self.parts)
    self.ranges = [bounds[i : i + parts] for i in range(0, len(bounds), parts)]
    self._rows: Sequence[int] = range(manifest['totals']['rows'])
    self._source = sources.ArrayRecordDataSource(
      [str(folder / name) for name in shards(manifest)]
    )

  @classmethod
  def open(
    cls, folder: str | os.PathLike, expect: RecordSpec | None = None
  ) -> 'RecordSet':
    """Opens a record set, verifies its shards and compares its spec.

    Hashing takes about a second per GB.

    Args:
      folder: folder of the record set; shards in a bucket are copied locally.
      expect: spec to compare; empty fingerprints are not compared.

    Raises:
      UserError: the records are missing, damaged, empty or of another spec.
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
    folder = record_copy.fetch(folder, shards(manifest))
    if not manifest['totals']['rows']:
      raise errors.UserError(f'the records in {folder} have no rows')
    return cls(folder, manifest)

  @functools.cached_property
  def digests(self) -> list[str]:
    """Hash of each pass; identifies the rows of a saved position.

    Adding passes does not change existing hashes.
    """
    return [
      hashlib.sha256(
        ' '.join(shard['sha256'] for shard in entry['shards']).encode()
      ).hexdigest()
      for entry in self.manifest['passes']
    ]

  @property
  def mask(self) -> int:
    """The decoder's mask token."""
    described = self.manifest['vocabularies']['decoder']
    return described['special_tokens']['mask']['id']

  def __len__(self) -> int:
    """Returns the number of rows of all passes."""
    return len(self._rows)

  @property
  def passes(self) -> int:
    """Number of passes."""
    return len(self.ranges)

  def check_framing(
    self, rows: framing.Batch, decoder: vocabulary.Vocabulary
  ) -> None:
    """Checks a batch of these rows; see `framing.check_framing`.

    Args:
      rows: the batch.
      decoder: the decoder's vocabulary.

    Raises:
      ValueError: names the broken rule, the row and the position.
    """
    objectives = self.spec.objectives
    masked = [x.text for x in objectives if x.masks_inputs]
    # A row does not name its objective, so each rule is as lenient as the most
    # lenient objective requires.
    objectives[0].rows.check(
      rows,
      self.framing,
      mask=noising.mask_token(masked[0], decoder) if masked else None,
      # In some vocabularies EOS ends a turn, and inputs have several turns.
      eos_inside=any(
        x.options.get('concatenate') or x.rows.ends_turns for x in objectives
      ),
    )

  def read(self, indices: Sequence[int]) -> list[list[framing.Pair]]:
    """Reads rows by their numbers, in the order of `indices`."""
    if not len(indices):  # ArrayRecord refuses to read nothing.
      return []
    # `__getitems__` reads shards in parallel; indexing reads row by row.
    records = self._source.__getitems__([self._rows[int(i)] for i in indices])
    layout = self.spec.objectives[0].rows
    return [row_codec.decode_row(record, layout) for record in records]

  def groups(self, indices: Sequence[int]) -> list[str]:
    """Returns the document group of each example.

    Args:
      indices: row number of each example.

    Returns:
      See `document_source.group`; empty if an example has several groups or no
      document ids, or the rows do not have `len(indices)` examples.
    """
    groups = [
      {document_source.group(name) for name in pair.documents}
      for row in self.read(list(dict.fromkeys(indices)))
      for pair in row
    ]
    if any(len(names) != 1 for names in groups) or len(groups) != len(indices):
      return []
    return [name for (name,) in groups]

  def development(self, rows: int) -> 'RecordSet':
    """Returns a view of these records with development rows only.

    Args:
      rows: maximum number of rows, evenly spaced.

    Raises:
      UserError: the development part is empty.
    """
    groups = self.groups(range(len(self)))
    part = [
      self._rows[i]
      for i, name in enumerate(groups)
      if document_source.is_development(name)
    ]
    if not part:
      raise errors.UserError(
        f'config.data.development_rows is {rows}, and none of the'
        f' {len(self)} held-out rows in {self.folder} is in the development'
        f' part, a third of their {len(set(groups))} groups of documents;'
        ' raise config.data.eval_fraction or config.data.eval_rows, or set'
        ' development_rows to 0.'
      )
    return self._spaced(part, rows)

  def spaced(self, rows: int) -> 'RecordSet':
    """Returns a view of these records with evenly spaced rows.

    Args:
      rows: maximum number of rows.
    """
    return self._spaced(self._rows, rows)

  def _spaced(self, part: Sequence[int], rows: int) -> 'RecordSet':
    subset, count = copy.copy(self), min(rows, len(part))
    subset._rows = [part[i * len(part) // count] for i in range(count)]
    return subset


def check_spec(
  folder: str | os.PathLike, manifest: Mapping[str, Any], expect: RecordSpec
) -> None:
  """Checks that a manifest has a given spec.

  Raises:
    UserError: names every different field and every changed objective or
      source.
  """
  for name, changes in expect.changes.items():
    revision = manifest.get('revisions', {}).get(name, 0)
    if revision != len(changes):
      raise errors.UserError(
        f'the records in {folder} have revision {revision} of {name}, this'
        f' version makes {len(changes)}: {"; ".join(changes[revision:])}.'
        ' Materialise them again into an empty folder'
      )
  stored = manifest['spec']
  differences = [
    f'{field} is {stored.get(field)!r} in the records and {value!r} in the'
    ' config'
    for field, value in dataclasses.asdict(expect).items()
    if stored.get(field) != value and (value or field not in _FILLED_IN)
  ]
  if differences:
    raise errors.UserError(
      f'the records in {folder} do not match: {"; ".join(differences)}. Change'
      ' the config back, or name another data folder and materialise there'
    )


def check_framing(
  folder: str | os.PathLike,
  manifest: Mapping[str, Any],
  sides: Mapping[str, vocabulary.Vocabulary],
) -> None:
  """Checks that vocabularies frame inputs like the records.

  Args:
    folder: folder of the records, for errors.
    manifest: their manifest.
    sides: vocabularies by stack name.

  Raises:
    UserError: names both framings.
  """
  stored = special_ids.Framing.from_description(manifest['vocabularies'])
  for side, opened in sides.items():
    ours, theirs = (
      _framed(getattr(stored, side), side),
      _framed(opened.ids, side),
    )
    if ours != theirs:
      raise errors.UserError(
        f'the records {folder} frame inputs as `{ours}`, and the vocabulary'
        f' {opened.path} of the {side} as `{theirs}`; make records with that'
        ' vocabulary in another folder, or use that of the records.'
      )


def _framed(ids: special_ids.SideIds, side: str) -> str:
  """Returns inputs p as a stack reads them."""
  if ids.ends_with_eos:
    return f'{"BOS " * len(ids.opening)}p EOS{" +" * len(ids.closing)}'
  return f'{"BOS " * len(ids.edges(side)[0])}p'


def shards(manifest: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
  """Returns all shard entries, by name below the folder."""
  return {
    entry['file']: entry
    for pass_entry in manifest['passes']
    for entry in pass_entry['shards']
  }
