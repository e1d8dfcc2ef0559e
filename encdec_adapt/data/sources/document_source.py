"""Documents, and the base class of their sources.

A source is a subclass of `Source`, registered under a kind, the prefix of its
names (`register`). `text_sources` opens sources by name.

Document ids do not depend on the machine, the reader, or the number of shards
or workers. They determine the train/eval split (`Source.in_split`): the part
before the last '::' (`group`) is hashed, so that two documents made from one
text (the docstrings and the source of a module) are in the same split.

Shards partition a source (`Source.entries`): for any number of shards, each
document is in exactly one shard, and a shard always has the same documents in
the same order.

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

PASSAGE = 4000  # Characters before a piece may end: `Pieces`.
# Document id and a function that reads the text: documents of the other split
# are listed, but not read.
Entry = tuple[str, Callable[[], str]]


@dataclasses.dataclass(frozen=True)
class Document:
  """A document: id, unique in its source, and text, not empty."""

  id: str
  text: str


def group(document_id: str) -> str:
  """Returns the document's group, which is held out as a whole."""
  return document_id.rpartition('::')[0] or document_id


def is_development(name: str) -> bool:
  """Returns whether a held-out group is in the development part.

  Every third group is, by digest: learning rates and checkpoints are chosen on
  it, and studies report the other groups. The digest depends on the name only,
  so that record sets of all objectives of a text agree.

  Args:
    name: name of the group.
  """
  return randomness.digest('development', name) % 3 == 0


class Source(abc.ABC):
  """Documents in a fixed order.

  Attributes:
    form: syntax of the source's name, for errors.
    document_kind: kind of its documents, as in objectives: 'text', or the JSON
      of 'pairs', 'chat', 'preferences', 'labels' or 'embed'.
    revisions: changes to the documents since record format 7, in order; see
      `example_maker.ExampleMaker.revisions`.
    name: full name of the source.
    divisible: whether documents may be split or truncated.
    skips_bad: whether unreadable documents are skipped.
    counts: selected documents so far that were unreadable ('bad_documents') or
      truncated at the cap ('cut_documents').
    max_bytes: cap on the source, 0 for none: keeps the documents within the
      first `max_bytes` bytes of the files or, for other sources, of the UTF-8
      text. A divisible document is truncated to its last paragraph within the
      cap.
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
    # Pieces of a JSON document would not parse.
    self.divisible = self.document_kind == 'text'
    self.skips_bad = False
    self.counts: collections.Counter[str] = collections.Counter()

  @abc.abstractmethod
  def entries(
    self, shard_index: int = 0, num_shards: int = 1
  ) -> Iterator[Entry]:
    """Yields ids and readers of a shard's documents within the cap."""

  @abc.abstractmethod
  def _content(self) -> Iterator[object]:
    """Yields the values that determine the fingerprint."""

  def in_split(
    self, document_id: str, split: str, eval_fraction: float, seed: int
  ) -> bool:
    """Returns whether a document belongs to `split`.

    A hash of the id decides, unless the source defines its own splits.

    Args:
      document_id: document id of this source; only its `group` counts.
      split: 'train' or 'eval'.
      eval_fraction: share of the documents in 'eval', in [0, 1].
      seed: seed of the split.
    """
    # A hash, not a sequential draw: a document keeps its split if the source
    # grows or is sharded differently.
    uniform = randomness.digest('split', seed, group(document_id)) / 2**128
    return (uniform < eval_fraction) == (split == 'eval')

  def locate(self, document_id: str) -> str:
    """Returns a document's location for messages, by default its id."""
    return document_id

  def documents(
    self,
    keep: Callable[[str], bool] | None = None,
    shard_index: int = 0,
    num_shards: int = 1,
  ) -> Iterator[Document]:
    """Yields a shard's documents with text, in order.

    Args:
      keep: predicate on ids; other documents are not read.
      shard_index: number of the shard, in [0, num_shards).
      num_shards: number of shards of the source.

    Raises:
      UserError: the source is missing or has no text; a shard may have none.
    """
    # One of several shards may have no text.
    empty = num_shards == 1
    for document_id, read_text in self.entries(shard_index, num_shards):
      if keep is not None and not keep(document_id):
        # Not read, so it may have text.
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
      cap = f' within max_bytes={self.max_bytes}' if self.max_bytes else ''
      raise errors.UserError(
        f'source {self.name!r} has no text{cap}; check its files and the field'
      )

  def plain(self, document: Document) -> Document:
    """Returns a document with the plain text of its JSON content."""
    if self.document_kind == 'text':
      return document
    content = json.loads(document.text)
    # Drops labels and further fields, which a training document could not
    # contain. Only texts of labelled examples and messages with further fields
    # are nested lists.
    if content and isinstance(content[0], list):
      content = content[0]
    elif self.document_kind == 'pairs':
      content = content[:2]
    return dataclasses.replace(document, text='\n'.join(_texts(content)))

  def fingerprint(self) -> str:
    """Returns a hex digest of the content and the cap.

    The digest covers name, size and three samples of each local file, and the
    store's checksum of each file in a bucket.
    """
    parts = [self.max_bytes, *self._content()]
    # Earlier versions dropped the document that exceeds the cap.
    parts += ['cut'] if self.max_bytes > 0 and self.divisible else []
    return f'{randomness.digest(configs.portable(self.name), *parts):032x}'

  def _every(
    self, entries: Iterable[Entry], shard_index: int, num_shards: int
  ) -> Iterator[Entry]:
    """Yields every n-th entry, for sources that must be scanned."""
    if self.max_bytes:
      entries = self._capped(entries)
    return itertools.islice(entries, shard_index, None, num_shards)

  def _capped(self, entries: Iterable[Entry]) -> Iterator[Entry]:
    """Yields entries until their text exceeds the cap; reads them all."""
    size = 0
    for document_id, read_text in entries:
      try:
        text = read_text()
      except errors.UserError:
        # The reader raises again if the document is selected; only then is it
        # an error or counted as skipped.
        yield document_id, read_text
        continue
      room = self.max_bytes - size
      size += len(text.encode('utf-8'))
      if size > self.max_bytes:
        if self.divisible:
          yield document_id, functools.partial(self._cut, text, room)
        return
      # Reuses the text, which was read to measure it.
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


# Registered classes by kind.
KINDS: dict[str, type[Source]] = {}


def register(kind: str) -> Callable[[type[Source]], type[Source]]:
  """Decorator that registers a source class.

  Args:
    kind: names of the source are `kind` or start with `kind:`.

  Raises:
    ValueError: another class has the kind.
  """

  def decorate(source: type[Source]) -> type[Source]:
    if kind in KINDS and KINDS[kind].__qualname__ != source.__qualname__:
      raise ValueError(f'sources {KINDS[kind]} and {source} are both {kind!r}')
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
  """Wrapper that splits a source's documents into pieces.

  Piece i of document D has the id D:i. A piece ends at the first empty line
  after 4,000 characters or at the document's end. If neither follows within
  8,000 more characters, it ends at the first line end after the 4,000, else at
  the first space, else after 4,000 characters. Every shard reads all documents.
  """

  # Alternatives are tried in order. Each repeats the 4,000 characters, so that
  # it matches only if earlier patterns fail. The split hashes piece numbers:
  # another pattern would move text between the training and held-out splits.
  _PIECE = re.compile(
    r'.{4000}.{0,8000}?(?:\n\s*\n|\Z)'
    r'|.{4000}.{0,8000}?\n'
    r'|.{4000}.{0,8000}?\s'
    r'|.{4000}'
    r'|.+',
    re.DOTALL,
  )

  def __init__(self, source: Source):
    """Takes over the name and cap of a source of texts."""
    super().__init__(source.name, source.max_bytes)
    self._source = source

  def entries(
    self, shard_index: int = 0, num_shards: int = 1
  ) -> Iterator[Entry]:
    """Yields every n-th piece of the documents within the cap."""
    pieces = (
      (f'{document.id}:{number}', match.group)
      for document in self._source.documents()
      for number, match in enumerate(self._PIECE.finditer(document.text), 1)
    )
    # Not `_every`, which would apply the cap again.
    return itertools.islice(pieces, shard_index, None, num_shards)

  def _content(self) -> Iterator[object]:
    yield self._source.fingerprint()


def decode(data: bytes, source: str, location: str | Callable[[], str]) -> str:
  """Decodes UTF-8.

  Args:
    data: encoded text; U+FEFF is kept.
    source: name of the source, for the error.
    location: location in the source, for the error; a function if slow to
      compute.

  Raises:
    UserError: the data are not UTF-8; names location and byte.
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
  """Replaces lone surrogates, invalid in UTF-8, with U+FFFD."""
  # Most texts are ASCII, which Python stores as a flag.
  if text.isascii():
    return text
  # Decoders replace with U+FFFD; the UTF-8 encoder would write '?'.
  return text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
