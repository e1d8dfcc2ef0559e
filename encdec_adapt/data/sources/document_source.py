"""Documents, and the base class of their sources.

A source is a subclass of `Source` that is registered under the kind with which
names of it begin (`register`); `text_sources` opens sources by name.

Document ids depend neither on the machine nor on the reader, nor on the number
of shards or workers. They decide the train/eval split (`in_split`): the part
before the last '::' (`group`) is hashed, so that two documents made from one
text (the docstrings and the source of a module) are on the same side.

A shard has its share of a source (`Source.entries`): for every number of
shards each document is in exactly one of them, and a shard's documents are
always the same, in the same order.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

import abc
import collections
from collections.abc import Callable, Iterable, Iterator
import dataclasses
import functools
import itertools
import json
import re

from encdec_adapt import configs
from encdec_adapt.base import errors
from encdec_adapt.objectives import randomness

PASSAGE = 4000  # Characters after which `Pieces` cuts a document.
# The id of a document, and a function that reads its text: the other split's
# documents are listed without being read.
Entry = tuple[str, Callable[[], str]]


@dataclasses.dataclass(frozen=True)
class Document:
  """A document: its id, unique in its source, and its text, not empty."""

  id: str
  text: str


def group(document_id: str) -> str:
  """Returns the group of documents that is held out as a whole."""
  return document_id.rpartition('::')[0] or document_id


def is_development(name: str) -> bool:
  """Returns whether a held-out group is in the development part.

  Every third group is, by digest: learning rates and checkpoints are chosen
  there, and studies report the other groups. The digest is of the name alone,
  so that record sets of all objectives of a text agree.

  Args:
    name: name of the group.
  """
  return randomness.digest('development', name) % 3 == 0


def in_split(
  document_id: str, split: str, eval_fraction: float, seed: int
) -> bool:
  """Returns whether a document belongs to `split`, by a hash of its id.

  Args:
    document_id: document id; only its `group` counts.
    split: 'train' or 'eval'.
    eval_fraction: share of the documents in 'eval', in [0, 1].
    seed: seed of the split.
  """
  # A hash, not a draw in order: a document stays on its side of the split when
  # the source grows, or is read in other shards.
  uniform = randomness.digest('split', seed, group(document_id)) / 2**128
  return (uniform < eval_fraction) == (split == 'eval')


class Source(abc.ABC):
  """Documents in a fixed order.

  Attributes:
    form: how a name of this source is written, for errors.
    document_kind: kind of its documents, as objectives name it: 'text', or the
      JSON of 'pairs', 'chat', 'preferences', 'labels' or 'embed'.
    revisions: changes to the documents since record format 7, in order; see
      `example_maker.ExampleMaker.revisions`.
    name: name that the source was opened by.
    divisible: whether documents may be cut.
    skips_bad: whether documents that cannot be read are left out.
    counts: selected documents so far that could not be read
      ('bad_documents') or were cut at the cap ('cut_documents').
    max_bytes: only the beginning of the source is used, 0 for all of it: the
      documents that lie within the first `max_bytes` bytes of the files, or,
      for sources other than files, those before the UTF-8 text exceeds them.
      A document that may be cut is used up to its last paragraph within.
  """

  form = ''
  document_kind = 'text'
  revisions: tuple[str, ...] = ()

  def __init__(self, name: str, max_bytes: int = 0):
    """Opens the source.

    Args:
      name: name of the source.
      max_bytes: cap, see the class; 0 for none.
    """
    self.name = name
    self.max_bytes = max_bytes
    # A piece of a JSON document does not parse.
    self.divisible = self.document_kind == 'text'
    self.skips_bad = False
    self.counts: collections.Counter[str] = collections.Counter()

  @abc.abstractmethod
  def entries(
    self, shard_index: int = 0, num_shards: int = 1
  ) -> Iterator[Entry]:
    """Yields ids and readers of the documents of a shard, within the cap."""

  @abc.abstractmethod
  def _content(self) -> Iterator[object]:
    """Yields the values that determine the fingerprint."""

  def in_split(
    self, document_id: str, split: str, eval_fraction: float, seed: int
  ) -> bool:
    """Returns whether a document belongs to `split`.

    Args:
      document_id: document id of this source.
      split: 'train' or 'eval'.
      eval_fraction: share of the documents in 'eval', in [0, 1].
      seed: seed of the split.

    Returns:
      `document_source.in_split`, unless the source knows its own splits.
    """
    return in_split(document_id, split, eval_fraction, seed)

  def locate(self, document_id: str) -> str:
    """Returns the location of a document for messages: by default its id."""
    return document_id

  def documents(
    self,
    keep: Callable[[str], bool] | None = None,
    shard_index: int = 0,
    num_shards: int = 1,
  ) -> Iterator[Document]:
    """Yields the documents of a shard that have text, in order.

    Args:
      keep: function of the id that selects documents; others are not read.
      shard_index: number of the shard, in [0, num_shards).
      num_shards: number of shards that the source is divided into.

    Raises:
      UserError: the source is missing, or has no text; a shard may have none.
    """
    # A shard of many may have no text although the source has.
    empty = num_shards == 1
    for document_id, read_text in self.entries(shard_index, num_shards):
      if keep is not None and not keep(document_id):
        # It is not read, so it may have text.
        empty = False
        continue
      try:
        text = read_text()
      except errors.UserError:
        if not self.skips_bad:
          raise
        self.counts['bad_documents'] += 1
        continue
      if text:
        empty = False
        yield Document(document_id, text)
    if empty:
      raise errors.UserError(
        f'source {self.name!r} has no text within max_bytes={self.max_bytes};'
        ' check its files, the field and the cap'
      )

  def plain(self, document: Document) -> Document:
    """Returns a document with the bare text of its pair, messages or texts."""
    if self.document_kind == 'text':
      return document
    content = json.loads(document.text)
    # Labels and further fields are left out, since they are not text that a
    # training document could contain. Only texts of labelled examples, and
    # messages with further fields, are a list in the list.
    if content and isinstance(content[0], list):
      content = content[0]
    elif self.document_kind == 'pairs':
      content = content[:2]
    return dataclasses.replace(document, text='\n'.join(_texts(content)))

  def fingerprint(self) -> str:
    """Returns a hex digest of the content and the cap.

    It is computed from names, sizes and three samples of each local file, and
    from the store's checksums of files in a bucket.
    """
    parts = [self.max_bytes, *self._content()]
    # Earlier versions left out the document that exceeds the cap.
    parts += ['cut'] if self.max_bytes > 0 and self.divisible else []
    return f'{randomness.digest(configs.portable(self.name), *parts):032x}'

  def _every(
    self, entries: Iterable[Entry], shard_index: int, num_shards: int
  ) -> Iterator[Entry]:
    """Yields every n-th of all entries, for a source that has to be scanned."""
    if self.max_bytes:
      entries = self._capped(entries)
    return itertools.islice(entries, shard_index, None, num_shards)

  def _capped(self, entries: Iterable[Entry]) -> Iterator[Entry]:
    """Reads entries and yields them until their text exceeds the cap."""
    size = 0
    for document_id, read_text in entries:
      try:
        text = read_text()
      except errors.UserError:
        # The reader raises again if the document's split is read, and only then
        # is the document an error, or counted as skipped.
        yield document_id, read_text
        continue
      room = self.max_bytes - size
      size += len(text.encode('utf-8'))
      if size > self.max_bytes:
        if self.divisible:
          yield document_id, functools.partial(self._cut, text, room)
        return
      # The text was read to measure it; reading it twice would cost as much.
      yield document_id, functools.partial(str, text)

  def _cut(self, text: str, room: int) -> str:
    """Returns the paragraphs of a text within a number of bytes.

    If no paragraph fits, returns its lines, else words, else characters, if
    they are as long as a piece of `Pieces`; '' for shorter texts.
    """
    text = text.encode('utf-8')[: max(room, 0)].decode('utf-8', 'ignore')
    ends = r'.*\n\s*\n|.{4000,}\n|.{4000,}\s|.{4000,}'
    text = (re.match(ends, text, re.DOTALL) or [''])[0]
    self.counts['cut_documents'] += bool(text)
    return text


# The registered classes by kind.
KINDS: dict[str, type[Source]] = {}


def register(kind: str) -> Callable[[type[Source]], type[Source]]:
  """Registers a class of sources, as a decorator.

  Args:
    kind: names of the source are `kind`, or begin with `kind:`.
  """

  def decorate(source: type[Source]) -> type[Source]:
    KINDS[kind] = source
    return source

  return decorate


def _texts(content: object) -> Iterator[str]:
  if isinstance(content, str):
    yield content
  elif isinstance(content, dict):
    yield from _texts(content.get('content'))
  elif isinstance(content, list):
    for part in content:
      yield from _texts(part)


class Pieces(Source):
  """Wrapper that cuts the documents of a source into pieces.

  Piece i of document D has the id D:i. A piece ends at the first empty line
  after 4,000 characters, or with the document. If neither follows within 8,000
  more characters, it ends at the first end of a line after the 4,000, without
  that at the first space, and in a text that has neither after 4,000
  characters. Every shard reads all documents.
  """

  # The alternatives are tried in order. Each repeats the 4,000 characters, so
  # that a later alternative matches only where no earlier one does. The split
  # hashes the numbers of the pieces: another pattern would move text from the
  # training side to the held-out side.
  _PIECE = re.compile(
    r'.{4000}.{0,8000}?(?:\n\s*\n|\Z)'
    r'|.{4000}.{0,8000}?\n'
    r'|.{4000}.{0,8000}?\s'
    r'|.{4000}'
    r'|.+',
    re.DOTALL,
  )

  def __init__(self, source: Source):
    """Takes the name and the cap of the source, which has texts."""
    super().__init__(source.name, source.max_bytes)
    self._source = source

  def entries(
    self, shard_index: int = 0, num_shards: int = 1
  ) -> Iterator[Entry]:
    """Yields every n-th piece; the documents are within the cap."""
    pieces = (
      (f'{document.id}:{number}', match.group)
      for document in self._source.documents()
      for number, match in enumerate(self._PIECE.finditer(document.text), 1)
    )
    # Not `_every`: it would apply the cap to the pieces a second time.
    return itertools.islice(pieces, shard_index, None, num_shards)

  def _content(self) -> Iterator[object]:
    yield self._source.fingerprint()


def decode(data: bytes, source: str, location: str | Callable[[], str]) -> str:
  """Decodes UTF-8.

  Args:
    data: text; U+FEFF is a character like any other.
    source: name of the source, for the error.
    location: location in the source, for the error; a function if it is slow
      to find.

  Raises:
    UserError: the data are not UTF-8; names the location and the byte.
  """
  try:
    return data.decode('utf-8')
  except UnicodeDecodeError as error:
    location = location if isinstance(location, str) else location()
    raise errors.UserError(
      f'source {source!r}: {location}, is not UTF-8 (byte {error.start});'
      ' convert it, for example with `iconv -t UTF-8`'
    ) from None


def encodable(text: str) -> str:
  """Replaces lone surrogates, which UTF-8 cannot hold, by U+FFFD."""
  # Most texts are ASCII, which Python knows of a string without a scan.
  if text.isascii():
    return text
  # Decoders replace by U+FFFD, while the encoder of UTF-8 would write '?'.
  return text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
