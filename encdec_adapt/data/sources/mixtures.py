"""Mixtures of text sources with weights.

    python@2 + jsonl:/data/*.jsonl@0.25

' + ' separates sources (`data/sources/text_sources.py`). The number after '@'
is the source's weight (default 1): how often a pass draws each of its
documents. Weight 2 draws all twice, 0.25 a quarter of them (a new quarter
each pass), 1.5 all of them and half of them again. So a pass is an epoch of a
source with weight 1, no text is dropped because another source is exhausted,
and the content of a pass is known in advance. Held-out documents are drawn at
most once.

If no document of a source would be held out, or fewer than `FEWEST` and some
document is longer than a passage, passages are held out instead
(`document_source.Pieces`). This check reads ids until it finds `FEWEST`, and
the documents if there are fewer (`cut_sources`); it runs once for all shards.

A fraction's documents are chosen by a hash of (seed, pass, source, document
id). The second draw of a document in a pass gets '::1' appended to its id, so
that its masks and splits differ.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import itertools
import math
import types

from encdec_adapt import configs
from encdec_adapt.base import errors, option_strings
from encdec_adapt.data.sources import (
  document_source,
  tensorflow_import,
  text_sources,
)
from encdec_adapt.objectives import randomness

FEWEST = 10  # Held-out documents; below it, passages are held out.


@dataclasses.dataclass(frozen=True)
class Draw:
  """Selection of a source's documents: a split and a pass.

  Attributes:
    split: 'train' or 'eval'.
    eval_fraction: share of the documents in 'eval', in [0, 1].
    seed: seed of the split and of all draws.
    pass_index: 0, 1, ..; each pass draws anew within the split.
  """

  split: str
  eval_fraction: float
  seed: int
  pass_index: int = 0

  def has(self, source: document_source.Source, document_id: str) -> bool:
    """Returns whether a document of a source is in the split."""
    return source.in_split(
      document_id, self.split, self.eval_fraction, self.seed
    )


@dataclasses.dataclass(frozen=True)
class Part:
  """A source of a mixture.

  Attributes:
    source: source of documents.
    weight: draws of each document per pass; positive.
    rate: the source's rate by examples in a SeqIO mixture, else None.
    left_out: ids of dropped documents (duplicates).
    cut: whether pieces of documents are held out; None to determine it at the
      first draw.
  """

  source: document_source.Source
  weight: float
  rate: float | None = None
  left_out: frozenset[str] = frozenset()
  cut: bool | None = None

  @functools.cache  # noqa: B019  Parts are few and live as long as the job.
  def is_cut(self, draw: Draw) -> bool:
    """Returns whether pieces are held out, for lack of documents.

    Args:
      draw: selection of documents; its split does not matter.

    Raises:
      UserError: the source has no text.
    """
    if self.cut is not None:
      return self.cut
    # Raises an error if the source has no text; one of several shards does not.
    next(self.source.documents())
    is_cut = False
    if draw.eval_fraction and self.source.divisible:
      is_cut = self.has_few(draw) or not self.held_out(draw)
    # Making the records reads and counts the documents again.
    self.source.counts.clear()
    return is_cut

  def held_out(self, draw: Draw) -> int:
    """Returns the number of held-out documents, counted up to `FEWEST`."""
    draw = dataclasses.replace(draw, split='eval')
    held_out = (draw.has(self.source, x) for x, _ in self.source.entries())
    return sum(itertools.islice(filter(None, held_out), FEWEST))

  def has_few(self, draw: Draw) -> bool:
    """Returns whether few documents would be held out and any is long."""
    if not self.source.divisible or not 0 < self.held_out(draw) < FEWEST:
      return False
    sizes = (len(document.text) for document in self.source.documents())
    return any(size > document_source.PASSAGE for size in sizes)

  def fingerprint(self, draw: Draw) -> str:
    """Returns the fingerprint of the source and its held-out unit."""
    # Earlier versions held out whole documents even if few.
    return self.source.fingerprint() + (
      ' in passages' if self.has_few(draw) else ''
    )

  def counts(self, draw: Draw, shard_index: int) -> Mapping[str, int]:
    """Returns `Source.counts` of a shard."""
    # Every shard reads all documents split into pieces, so the first shard
    # counts for all.
    return {} if shard_index and self.is_cut(draw) else self.source.counts

  def documents(
    self, draw: Draw, shard_index: int = 0, num_shards: int = 1
  ) -> Iterator[document_source.Document]:
    """Yields the drawn documents, the whole first draw before the second.

    Args:
      draw: selection of documents.
      shard_index: number of the shard, in [0, num_shards).
      num_shards: number of shards of the source.

    Raises:
      UserError: the source is missing or has no text.
    """
    cut = self.is_cut(draw)
    source = document_source.Pieces(self.source) if cut else self.source

    def document_id(name: str) -> str:
      return name.rpartition(':')[0] if cut else name

    # Repeated held-out documents would bias the held-out loss.
    weight = self.weight if draw.split == 'train' else min(self.weight, 1.0)
    for number in range(math.ceil(weight)):
      share = weight - number  # 1 or more in all rounds but the last.

      def keep(name: str, share=share) -> bool:
        # Duplicates are whole documents, not pieces.
        return (
          draw.has(source, name)
          and document_id(name) not in self.left_out
          and (share >= 1 or self._uniform(draw, name) < share)
        )

      counts = self.source.counts.copy()
      for document in source.documents(keep, shard_index, num_shards):
        if number:
          # Random draws are keyed by id: a new id gives new masks and splits.
          name = f'{document.id}::{number}'
          document = dataclasses.replace(document, id=name)
        yield document
      if number:
        self.source.counts = counts  # Each document counts once.

  def _uniform(self, draw: Draw, document_id: str) -> float:
    # Independent of the weight: a larger weight adds documents.
    name = configs.portable(self.source.name)
    key = draw.seed, draw.pass_index, name, document_id
    return randomness.digest('draw', *key) / 2**128


def parse(text: str) -> list[tuple[str, float]]:
  """Returns the names and weights of the sources of a mixture.

  Non-numeric text after an '@' belongs to the name.

  Raises:
    UserError: a weight is not positive, or a source is named twice.
  """
  weights: dict[str, float] = {}
  for part, weight in option_strings.things('the source', text, r'\s\+\s'):
    if part.raw in weights:
      raise part.error(
        'is named twice; name it once, with the sum of the weights'
      )
    weights[part.raw] = weight or 1.0
  return list(weights.items())


def open_parts(
  text: str,
  *,
  max_bytes: int = 0,
  seqio_modules: tuple[str, ...] = (),
  kind: str = '',
  skip_bad: bool = False,
  left_out: Mapping[str, frozenset[str]] = types.MappingProxyType({}),
  cut: frozenset[str] | None = None,
) -> list[Part]:
  """Opens the sources of a mixture.

  Args:
    text: sources and weights, see the module's docstring.
    max_bytes: cap on the bytes of each source; 0 for none.
    seqio_modules: modules that register sources and SeqIO tasks.
    kind: kind of documents (`document_source.Source.document_kind`); sources of
      other kinds are left out. '' opens all sources.
    skip_bad: whether unreadable documents are skipped.
    left_out: source name -> ids of dropped documents.
    cut: result of `cut_sources`; None to determine it at the first draw.

  Raises:
    UserError: the text cannot be parsed, or a source has no documents.
  """
  opened = []
  for name, weight in parse(text):
    if kind and kind not in text_sources.document_kinds(name, seqio_modules):
      continue
    if not name.startswith(text_sources.SEQIO):
      source = text_sources.open_source(name, max_bytes, seqio_modules)
      opened.append((source, weight, None))
      continue
    seqio_source = tensorflow_import.import_module(
      'encdec_adapt.data.seqio.seqio_source', f'source {name!r}'
    )
    # Registers the task or mixture.
    text_sources.import_modules(seqio_modules)
    for task, rate in seqio_source.rates(name).items():
      source = seqio_source.SeqioSource(task, max_bytes, pairs=kind == 'pairs')
      opened.append((source, weight, rate))
  parts, names = [], set()
  for source, weight, rate in opened:
    if source.name in names:
      raise errors.UserError(
        f'config.data.source has {source.name!r} twice: mixtures of SeqIO may'
        ' share a task; name one of them, or make a mixture of both.'
      )
    names.add(source.name)
    source.skips_bad = skip_bad
    ids = left_out.get(source.name, frozenset())
    is_cut = None if cut is None else source.name in cut
    parts.append(Part(source, weight, rate, ids, is_cut))
  return parts


def cut_sources(parts: Sequence[Part], draw: Draw) -> frozenset[str]:
  """Returns the names of sources with held-out pieces.

  Raises:
    UserError: a source has no text.
  """
  return frozenset(part.source.name for part in parts if part.is_cut(draw))


def fingerprint(parts: Sequence[Part], draw: Draw) -> str:
  """Returns a digest of the content, caps and weights of all sources.

  Args:
    parts: the sources.
    draw: selection of documents; its split does not matter.
  """
  if len(parts) == 1:
    return parts[0].fingerprint(draw)
  prints = [(part.fingerprint(draw), part.weight) for part in parts]
  return f'{randomness.digest(*prints):032x}'


def interleaved_documents(
  parts: Sequence[Part], draw: Draw
) -> Iterator[document_source.Document]:
  """Yields a document of each source in turn until all are exhausted.

  Pairs, conversations and labelled examples are reduced to plain text.
  """
  for documents in itertools.zip_longest(
    *(map(p.source.plain, p.documents(draw)) for p in parts)
  ):
    # Exhausted sources give None.
    yield from filter(None, documents)
