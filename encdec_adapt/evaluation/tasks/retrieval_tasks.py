"""Retrieval tasks made from any text: needles, documents, several needles.

A fact gives a thing a code, `The code of the anchor is 48-17-93.`, and stands
in text (the haystack) whose length is counted in tokens. The tasks:

| name            | the context, and what is asked                            |
|-----------------|-----------------------------------------------------------|
| needle/L/D      | one fact at the relative depth D of L tokens              |
| documents_N/P   | N documents with a fact each; that of document P          |
| chain/L         | five facts: A has the code of B, B that of C, C a code    |
|                 | (two more are decoys); the code of A                      |
| values/L        | five facts; the codes of three of them                    |

Needle in a haystack, the positions of the gold document and multi-needle
reasoning are the retrieval tests of MEAP (arXiv:2502.07490). The same text,
lengths and vocabulary give the same examples. Every example has its own facts,
so that the scores of a task are independent, as intervals and tests assume.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import hashlib
import zlib

import numpy as np

from encdec_adapt.base import errors, option_strings
from encdec_adapt.data.sources import text_sources
from encdec_adapt.evaluation.results import results_store
from encdec_adapt.tokenizers import vocabulary

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
# Positions of the gold document by the number of documents, as in "Lost in the
# Middle" (arXiv:2307.03172), whose test MEAP takes over.
POSITIONS = {10: (1, 5, 10), 20: (1, 5, 10, 15, 20)}
# Facts in the context, by the kind of task.
FACTS = {'needle': 1, 'chain': 5, 'values': 5}
FACTS |= {f'documents_{count}': count for count in POSITIONS}
_EXAMPLES = 20  # Of a task, unless a limit is given.
_CHARACTERS = 1 << 20  # Most characters of the text that are used.
_FACT = ' The code of the {} is {}.\n'
_THINGS = (
  'anchor basket bridge bottle candle carpet castle circle clock cloud'
  ' engine feather flower garden hammer harbor island kettle ladder lantern'
  ' lemon letter mirror mountain orange pencil piano pillow pocket river'
  ' saddle shovel silver spoon table ticket tunnel violin wagon window'
).split()


@dataclasses.dataclass(frozen=True, eq=False)
class Example:
  """A context with a question.

  Attributes:
    task: name of the task, with length and depth or position.
    context: token ids of the context [n], without BOS.
    question: text after the context, up to the answer.
    codes: what the answer must contain.
    choices: answers to choose from, the right one first.
  """

  task: str
  context: np.ndarray
  question: str
  codes: Sequence[str]
  choices: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Retrieval:
  """What the examples are made from.

  Attributes:
    text: text of the haystacks.
    lengths: numbers of tokens of the haystacks.
    count: number of examples of a task.
    seed: seed of the facts, and of the places in the text.
  """

  text: str
  lengths: Sequence[int]
  count: int = _EXAMPLES
  seed: int = 0

  def options(self) -> results_store.Options:
    """Returns what decides the scores of a model."""
    digest = hashlib.blake2b(self.text.encode(), digest_size=8).hexdigest()
    return {
      'retrieval': digest,
      'lengths': list(self.lengths),
      'examples': self.count,
      'seed': self.seed,
    }

  def tasks(self) -> list[str]:
    """Returns the names of the tasks."""
    return [
      *(f'needle/{n}/{depth:g}' for n in self.lengths for depth in DEPTHS),
      *(f'{kind}/{n}' for kind in ('chain', 'values') for n in self.lengths),
      *(f'documents_{n}/{at}' for n, some in POSITIONS.items() for at in some),
    ]

  def examples(self, reader: vocabulary.Vocabulary) -> Iterator[Example]:
    """Yields the examples of all tasks.

    Args:
      reader: vocabulary of the model's prompts.

    Raises:
      UserError: a haystack is shorter than its needles.
    """
    text = reader.encode(self.text)
    for task in self.tasks():
      for number in range(self.count):
        seed = self.seed, zlib.crc32(task.encode()), number
        rng = np.random.default_rng(seed)
        start = int(rng.integers(len(text)))
        yield self._example(task, reader, np.roll(text, -start), rng)

  def _example(
    self,
    task: str,
    reader: vocabulary.Vocabulary,
    text: np.ndarray,
    rng: np.random.Generator,
  ) -> Example:
    """Makes an example of a task in text that begins at a place of its own."""
    kind, *place = task.split('/')
    things = rng.permutation(_THINGS).tolist()
    # No two codes share a part.
    parts = (10 + rng.permutation(90)).reshape(-1, 3).tolist()
    codes = ['-'.join(map(str, part)) for part in parts]
    values, asked, choices = codes, 1, codes[:4]
    if kind == 'chain':
      values = [*(f'that of the {thing}' for thing in things[1:3]), *codes]
    elif kind == 'values':
      asked, orders = 3, ((0, 1, 2), (1, 2, 0), (2, 0, 1), (1, 0, 2))
      choices = [_list([codes[i] for i in order]) for order in orders]
    facts = [
      reader.encode(_FACT.format(things[i], values[i]))
      for i in range(FACTS[kind])
    ]
    if kind.startswith('documents'):
      length = max(self.lengths)
      context = _documents(reader, text, length, facts, int(place[0]))
    else:
      depths = [float(place[1])] if kind == 'needle' else DEPTHS
      facts = [facts[i] for i in rng.permutation(len(facts))]
      ends = reader.sentence_ends
      context = hide(text, ends, int(place[0]), facts, depths)
    return Example(
      task,
      context,
      _question(things[:asked]),
      codes[:asked],
      [f' {choice}' for choice in choices],
    )


def read(source: str, lengths: str, limit: int | None = None) -> Retrieval:
  """Reads the text and parses the lengths.

  Args:
    source: name of a text source, see `data.sources.text_sources`.
    lengths: numbers of tokens: N,N.
    limit: examples of a task.

  Raises:
    UserError: there is no text, or a length is no number.
  """
  tokens = {
    part.read(int, 'a number of tokens, as in 256,512.', lambda n: n > 0)
    for part in option_strings.Part('--retrieval_lengths', lengths).divide(',')
  }
  if 'text' not in text_sources.document_kinds(source):
    raise errors.UserError(
      f'--retrieval={source} has no plain text; give text:GLOB or jsonl:GLOB.'
    )
  parts, size = [], 0
  for _, read_text in text_sources.open_source(source).entries():
    parts.append(read_text())
    size += len(parts[-1])
    if size >= _CHARACTERS:
      break
  text = '\n'.join(parts)[:_CHARACTERS]
  if not text.strip():
    raise errors.UserError(f'--retrieval={source} is empty; give some text.')
  return Retrieval(text, sorted(tokens), limit or _EXAMPLES)


def hide(
  text: np.ndarray,
  ends: np.ndarray,
  length: int,
  needles: Sequence[np.ndarray],
  depths: Sequence[float],
) -> np.ndarray:
  """Puts needles into text, at ends of sentences where some are near.

  Args:
    text: tokens [n], which are repeated where they do not suffice.
    ends: whether a token ends a sentence, by its id.
    length: number of tokens of the result.
    needles: tokens of each needle.
    depths: relative place of each, from 0 to 1, ascending.

  Raises:
    UserError: the needles are longer than the result.
  """
  sizes = [len(needle) for needle in needles]
  room = length - sum(sizes)
  if room < 0:
    raise errors.UserError(
      f'--retrieval_lengths has {length} tokens, and {len(needles)} needles'
      f' have {sum(sizes)}; give lengths of at least {sum(sizes)}.'
    )
  cut = np.resize(text, room)
  between = np.array([0, *np.flatnonzero(ends[cut]) + 1, room])
  places = []
  for depth in depths:
    place = round(depth * room)
    near = int(between[np.abs(between - place).argmin()])
    places.append(near if abs(near - place) <= length // 10 else place)
  return np.insert(cut, np.repeat(places, sizes), np.concatenate(needles))


def _documents(
  reader: vocabulary.Vocabulary,
  text: np.ndarray,
  length: int,
  facts: Sequence[np.ndarray],
  position: int,
) -> np.ndarray:
  """Makes documents of equal length, each of which ends with a fact.

  Args:
    reader: the vocabulary.
    text: tokens [n], a piece of which is in every document.
    length: tokens of all documents, more where the facts need them.
    facts: tokens of each fact, the gold document's first.
    position: position of the gold document, from 1 on.
  """
  size = length // len(facts)
  pieces = np.resize(text, (len(facts), size))
  order = list(range(1, len(facts)))
  order.insert(position - 1, 0)
  found = []
  for number, i in enumerate(order, 1):
    head = reader.encode(f'\nDocument {number}:')
    room = max(0, size - len(head) - len(facts[i]))
    found += [head, pieces[i][:room], facts[i]]
  return np.concatenate(found)


def _question(things: Sequence[str]) -> str:
  """Returns a question, and its answer up to the codes.

  A model that was only pretrained continues it as one that was tuned does.
  """
  are, codes = ('is', 'code') if len(things) == 1 else ('are', 'codes')
  what = f'the {codes} of {_list([f"the {thing}" for thing in things])}'
  return f'\nQuestion: What {are} {what}?\nAnswer: T{what[1:]} {are}'


def _list(texts: Sequence[str]) -> str:
  """Returns 'a', 'a and b', 'a, b and c'."""
  return ' and '.join(filter(None, [', '.join(texts[:-1]), texts[-1]]))
