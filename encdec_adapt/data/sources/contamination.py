"""Overlap of training text with evaluation sets: duplicates and n-grams.

`duplicates` finds documents with equal text, for `config.data.deduplicate`.
`report` counts evaluation examples that share a 13-gram of words with training
text, following GPT-3 (arXiv:2005.14165, appendix C): words are lower case,
without punctuation, and shorter examples are compared as a whole.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

import collections
from collections.abc import Iterable, Iterator, Sequence
import hashlib
import re

from encdec_adapt.data.sources import document_source, mixtures

WORDS = 13
_WORD = re.compile(r'\w+')


def duplicates(parts: Sequence[mixtures.Part]) -> dict[str, frozenset[str]]:
  """Finds documents with the text of an earlier document.

  Args:
    parts: sources; a text in several is kept in the first.

  Returns:
    Source name -> ids of the documents to drop.

  Raises:
    UserError: a source cannot be read.
  """
  # Digests, because the texts of a large source do not fit in memory. 16 bytes
  # make collisions, which would drop a document, negligible.
  digests: set[bytes] = set()
  repeated_ids: dict[str, frozenset[str]] = {}
  for part in parts:
    ids = set()
    for document in part.source.documents():
      digest = hashlib.blake2b(document.text.encode(), digest_size=16).digest()
      if digest in digests:
        ids.add(document.id)
      digests.add(digest)
    repeated_ids[part.source.name] = frozenset(ids)
    # Making the records reads the source again and counts bad documents.
    part.source.counts.clear()
  return repeated_ids


def report(
  training: Iterable[document_source.Document],
  evaluation: Sequence[document_source.Source],
) -> str:
  """Reports evaluation examples found in the training text.

  Args:
    training: training documents.
    evaluation: sources of the evaluation sets.

  Returns:
    A line for every set: the number of examples with a common n-gram and the
    locations of the first five.

  Raises:
    UserError: a source cannot be read, or has no text.
  """
  # The evaluation sets are indexed and the training text is streamed: only the
  # former surely fit in memory.
  examples_of_run = collections.defaultdict(set)
  ids: dict[str, list[str]] = {source.name: [] for source in evaluation}
  lengths = set()
  for source in evaluation:
    for document in map(source.plain, source.documents()):
      ids[source.name].append(document.id)
      words = _WORD.findall(document.text.lower())
      size = min(WORDS, len(words))
      lengths.add(size)
      for run in _run_hashes(words, size):
        examples_of_run[run].add((source.name, document.id))
  matches = set()
  for document in training:
    words = _WORD.findall(document.text.lower())
    # Short examples are compared as a whole, so training text is also cut into
    # n-grams of their lengths.
    for size in lengths:
      for run in _run_hashes(words, size):
        matches |= examples_of_run.get(run, set())
  lines = []
  for source in evaluation:
    examples = [i for i in ids[source.name] if (source.name, i) in matches]
    # Several examples may share a location, such as a line in several
    # templates.
    first = dict.fromkeys(map(source.locate, examples[:5]))
    lines.append(
      f'{source.name}: {len(examples)} of {len(ids[source.name])} examples'
      f' share {WORDS} words with the training text:'
      f' {"; ".join(first) or "none"}'
    )
  return '\n'.join(lines)


def _run_hashes(words: Sequence[str], size: int) -> Iterator[int]:
  # Otherwise a document without words would match every training document.
  if size:
    for i in range(len(words) - size + 1):
      yield hash((size, *words[i : i + size]))
