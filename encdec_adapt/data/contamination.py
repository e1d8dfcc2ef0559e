"""Overlap of training text with evaluation sets: duplicates and n-grams.

`duplicates` finds documents with the same text, which
`config.data.deduplicate` leaves out. `report` counts the evaluation examples
that share a run of 13 words with training text, the rule of GPT-3
(arXiv:2005.14165, appendix C): words are lower case, without punctuation, and
an example of fewer words is compared as a whole.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import hashlib
import re

from encdec_adapt.data import document_source, mixtures

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
  evaluation: Mapping[str, Iterable[document_source.Document]],
) -> str:
  """Reports which evaluation examples stand in the training text.

  Args:
    training: documents that are trained on.
    evaluation: name of a set -> its examples.

  Returns:
    A line for every set: examples with a common run of words, and their ids.
  """
  wanted: dict[int, set[tuple[str, str]]] = {}
  sizes, lengths = {}, set()
  for name, documents in evaluation.items():
    sizes[name] = 0
    for document in documents:
      sizes[name] += 1
      words = _WORD.findall(document.text.lower())
      size = min(WORDS, len(words))
      lengths.add(size)
      for gram in _grams(words, size):
        wanted.setdefault(gram, set()).add((name, document.id))
  found: dict[str, set[str]] = {name: set() for name in sizes}
  for document in training:
    words = _WORD.findall(document.text.lower())
    for size in lengths:
      for gram in _grams(words, size):
        for name, example in wanted.get(gram, ()):
          found[name].add(example)
  return '\n'.join(
    f'{name}: {len(found[name])} of {size} examples share {WORDS} words with'
    f' the training text: {", ".join(sorted(found[name])[:5]) or "none"}'
    for name, size in sizes.items()
  )


def _grams(words: Sequence[str], size: int) -> Iterator[int]:
  """Yields hashes of all runs of `size` words; none of no words."""
  if size:
    for i in range(len(words) - size + 1):
      yield hash((size, *words[i : i + size]))
