"""Retrieval tasks made from any text: needles, documents, several needles.

A fact assigns a code to a thing, `The code of the anchor is 48-17-93.`, and is
inserted into text (the haystack) of a given number of tokens. The tasks:

| name            | the context, and the question                             |
|-----------------|-----------------------------------------------------------|
| needle/L/D      | a fact at the relative depth D of L tokens                |
| documents_N/P   | N documents with a fact each; the fact of document P      |
| chain/L         | five facts: A has the code of B, B that of C, C a code    |
|                 | (two more are decoys); the code of A                      |
| values/L        | five facts; the codes of three of them                    |

Needle in a haystack, the positions of the gold document and multi-needle
reasoning are the retrieval tests of MEAP (arXiv:2502.07490). The same text,
lengths and vocabulary give the same examples. Each example has separate facts,
so the scores of a task are independent, as intervals and tests assume. From
`evaluation`, this module imports only `results`.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import zlib

import numpy as np

from encdec_adapt.base import errors, option_strings
from encdec_adapt.data.sources import text_sources
from encdec_adapt.evaluation.results import results_store
from encdec_adapt.tokenizers import vocabulary

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
# Positions of the gold document by the number of documents, as in "Lost in the
# Middle" (arXiv:2307.03172), the source of MEAP's test.
POSITIONS = {10: (1, 5, 10), 20: (1, 5, 10, 15, 20)}
# Facts in the context, by the kind of task.
FACTS = {'needle': 1, 'chain': 5, 'values': 5}
FACTS |= {f'documents_{count}': count for count in POSITIONS}
_EXAMPLES = 20  # Examples of a task by default.
# Maximum characters of the text: examples differ in their start position, and
# more text would only take longer to encode.
_CHARACTERS = 1 << 20
# Enough for the 20 facts of the largest task, each about a different thing.
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
    codes: texts required in the answer.
    choices: answers to choose from, the right answer first.
  """

  task: str
  context: np.ndarray
  question: str
  codes: Sequence[str]
  choices: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Retrieval:
  """Source of the examples.

  Attributes:
    text: text of the haystacks.
    lengths: numbers of tokens of the haystacks.
    count: number of examples per task.
    seed: seed of the facts, and of the positions in the text.
    kinds: kinds of tasks, of `FACTS`.
  """

  text: str
  lengths: Sequence[int]
  count: int = _EXAMPLES
  seed: int = 0
  kinds: Sequence[str] = tuple(FACTS)

  def options(self) -> results_store.Options:
    """Returns all inputs of the scores."""
    options = {
      'retrieval': results_store.text_digest(self.text),
      'lengths': list(self.lengths),
      'examples': self.count,
      'seed': self.seed,
    }
    # Without the key of results from before kinds could be chosen.
    if self.kinds != tuple(FACTS):
      options['kinds'] = list(self.kinds)
    return options

  def tasks(self) -> list[str]:
    """Returns the names of the tasks."""
    names = [
      *(f'needle/{n}/{depth:g}' for n in self.lengths for depth in DEPTHS),
      *(f'{kind}/{n}' for kind in ('chain', 'values') for n in self.lengths),
      *(f'documents_{n}/{i}' for n, gold in POSITIONS.items() for i in gold),
    ]
    return [name for name in names if name.partition('/')[0] in self.kinds]

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
        # Seeded by name and number: more examples or other lengths leave
        # examples unchanged. Python's `hash` of a string differs by process.
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
    """Builds an example in `text`, tokens from a random position."""
    kind, *arguments = task.split('/')
    things, codes = draw_facts(rng)
    values, count, choices = codes, 1, codes[:4]
    if kind == 'chain':
      values = [*(f'that of the {thing}' for thing in things[1:3]), *codes]
    elif kind == 'values':
      # Wrong choices permute the same codes: knowing the codes without their
      # things is not enough.
      count, orders = 3, ((0, 1, 2), (1, 2, 0), (2, 0, 1), (1, 0, 2))
      choices = [_list([codes[i] for i in order]) for order in orders]
    facts = [
      reader.encode(f' {fact(things[i], values[i])}\n')
      for i in range(FACTS[kind])
    ]
    if kind.startswith('documents'):
      position, length = int(arguments[0]), max(self.lengths)
      context = _documents(reader, text, length, facts, position)
    else:
      depths = [float(arguments[1])] if kind == 'needle' else DEPTHS
      # Links of a chain are not in order.
      facts = [facts[i] for i in rng.permutation(len(facts))]
      ends = reader.sentence_ends
      context = hide(text, ends, int(arguments[0]), facts, depths)
    question = _question(things[:count])
    # The question ends without a space, so each choice starts with a space.
    choices = [f' {choice}' for choice in choices]
    return Example(task, context, question, codes[:count], choices)


def read(
  source: str, lengths: str, kinds: str, limit: int | None = None
) -> Retrieval:
  """Reads the text, and parses the lengths and kinds.

  Args:
    source: name of a text source, see `data.sources.text_sources`.
    lengths: numbers of tokens: N,N.
    kinds: kinds of tasks, of `FACTS`: KIND,KIND.
    limit: examples per task.

  Raises:
    UserError: the text is missing, a length is not a number, or a kind unknown.
  """
  tokens = {
    part.read(int, 'a number of tokens, as in 256,512.', lambda n: n > 0)
    for part in option_strings.Part('--retrieval_lengths', lengths).divide(',')
  }
  named = {
    part.read(str, f'one of {", ".join(FACTS)}', FACTS.__contains__)
    for part in option_strings.Part('--retrieval_tasks', kinds).divide(',')
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
  count = limit or _EXAMPLES
  chosen = tuple(kind for kind in FACTS if kind in named)
  return Retrieval(text, sorted(tokens), count, kinds=chosen)


def draw_facts(rng: np.random.Generator) -> tuple[list[str], list[str]]:
  """Draws distinct things, and codes, more of both than an example needs.

  Args:
    rng: source of the draw.

  Returns:
    40 things, and 30 codes without common parts.
  """
  things = rng.permutation(_THINGS).tolist()
  # Codes share no parts: `rouge1` would reward a wrong code. All parts have two
  # digits, so choices have equal length.
  parts = (10 + rng.permutation(90)).reshape(-1, 3).tolist()
  return things, ['-'.join(map(str, part)) for part in parts]


def fact(thing: str, value: str) -> str:
  """Returns the sentence that gives a thing's code, or refers to another's."""
  return f'The code of the {thing} is {value}.'


def hide(
  text: np.ndarray,
  ends: np.ndarray,
  length: int,
  needles: Sequence[np.ndarray],
  depths: Sequence[float],
) -> np.ndarray:
  """Inserts needles into text, at nearby ends of sentences.

  Args:
    text: tokens [n], repeated if too short.
    ends: whether a token ends a sentence, by token id.
    length: number of tokens of the result.
    needles: tokens of each needle.
    depths: relative position of each needle, from 0 to 1, ascending.

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
  haystack = np.resize(text, room)
  between = np.array([0, *np.flatnonzero(ends[haystack]) + 1, room])
  indices = []
  for depth in depths:
    index = round(depth * room)
    near = int(between[np.abs(between - index).argmin()])
    # Some vocabularies and texts have few ends of sentences; the depth must
    # remain approximately right.
    indices.append(near if abs(near - index) <= length // 10 else index)
  return np.insert(haystack, np.repeat(indices, sizes), np.concatenate(needles))


def _documents(
  reader: vocabulary.Vocabulary,
  text: np.ndarray,
  length: int,
  facts: Sequence[np.ndarray],
  position: int,
) -> np.ndarray:
  """Builds documents of equal length, each with a fact at its end.

  Args:
    reader: the vocabulary.
    text: tokens [n]; each document has a piece of them.
    length: total tokens of the documents, more if the facts need them.
    facts: tokens of each fact, the gold document's first.
    position: 1-based position of the gold document.
  """
  size = length // len(facts)
  pieces = np.resize(text, (len(facts), size))
  order = list(range(1, len(facts)))
  order.insert(position - 1, 0)
  chunks = []
  for number, i in enumerate(order, 1):
    head = reader.encode(f'\nDocument {number}:')
    room = max(0, size - len(head) - len(facts[i]))
    chunks += [head, pieces[i][:room], facts[i]]
  return np.concatenate(chunks)


def _question(things: Sequence[str]) -> str:
  """Returns a question, and its answer up to the codes.

  Both pretrained and tuned models continue it.
  """
  verb, noun = ('is', 'code') if len(things) == 1 else ('are', 'codes')
  subject = f'the {noun} of {_list([f"the {thing}" for thing in things])}'
  return f'\nQuestion: What {verb} {subject}?\nAnswer: T{subject[1:]} {verb}'


def _list(texts: Sequence[str]) -> str:
  return ' and '.join(filter(None, [', '.join(texts[:-1]), texts[-1]]))
