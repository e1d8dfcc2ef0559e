"""Overlap of training text with evaluation sets: duplicates and n-grams.

`duplicates` finds documents with the same text, which
`config.data.deduplicate` leaves out. `report` counts the evaluation examples
that share a run of 13 words with training text, the rule of GPT-3
(arXiv:2005.14165, appendix C): words are lower case, without punctuation, and
an example of fewer words is compared as a whole.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

from collections.abc import Iterable, Iterator, Sequence
import hashlib
import re

from encdec_adapt.data.sources import document_source, mixtures

WORDS = 13
_WORD = re.compile(r'\w+')


def duplicates(parts: Sequence[mixtures.Part]) -> dict[str, frozenset[str]]:
  """Finds documents whose text an earlier document has.

  Args:
    parts: sources; a text in two of them is kept in the first.

  Returns:
    Name of a source -> ids of the documents to leave out.

  Raises:
    UserError: a source cannot be read.
  """
  seen: set[bytes] = set()
  found: dict[str, set[str]] = {}
  for part in parts:
    own = found.setdefault(part.source.name, set())
    for document in part.source.documents():
      digest = hashlib.blake2b(document.text.encode(), digest_size=16).digest()
      if digest in seen:
        own.add(document.id)
      seen.add(digest)
    part.source.skipped = 0  # It is read again.
  return {name: frozenset(ids) for name, ids in found.items()}


def report(
  training: Iterable[document_source.Document],
  evaluation: Sequence[document_source.Source],
) -> str:
  """Reports which evaluation examples stand in the training text.

  Args:
    training: documents that are trained on.
    evaluation: sources of the evaluation sets.

  Returns:
    A line for every set: examples with a common run of words, and where the
    first of them stand.

  Raises:
    UserError: a source cannot be read, or has no text.
  """
  wanted: dict[int, set[tuple[str, str]]] = {}
  ids: dict[str, list[str]] = {source.name: [] for source in evaluation}
  lengths = set()
  for source in evaluation:
    for document in map(source.plain, source.documents()):
      ids[source.name].append(document.id)
      words = _WORD.findall(document.text.lower())
      size = min(WORDS, len(words))
      lengths.add(size)
      for gram in _grams(words, size):
        wanted.setdefault(gram, set()).add((source.name, document.id))
  found: dict[str, set[str]] = {name: set() for name in ids}
  for document in training:
    words = _WORD.findall(document.text.lower())
    for size in lengths:
      for gram in _grams(words, size):
        for name, example in wanted.get(gram, ()):
          found[name].add(example)
  lines = []
  for source in evaluation:
    examples = [one for one in ids[source.name] if one in found[source.name]]
    first = dict.fromkeys(map(source.locate, examples[:5]))
    lines.append(
      f'{source.name}: {len(examples)} of {len(ids[source.name])} examples'
      f' share {WORDS} words with the training text:'
      f' {"; ".join(first) or "none"}'
    )
  return '\n'.join(lines)


def _grams(words: Sequence[str], size: int) -> Iterator[int]:
  """Yields hashes of all runs of `size` words; none of no words."""
  if size:
    for i in range(len(words) - size + 1):
      yield hash((size, *words[i : i + size]))
