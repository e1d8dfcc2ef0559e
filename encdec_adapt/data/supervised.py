"""Supervised examples: pairs of texts, and conversations.

| name  | source  | inputs                              | targets             |
|-------|---------|-------------------------------------|---------------------|
| pairs | pairs:  | the first text                      | the second, EOS     |
| chat  | chat:   | the conversation before a turn of   | the turn and its end|
|       |         | the assistant, which it opens       | token               |

Every turn of the assistant is an example, so the loss is on its turns only.
The format is that of the vocabulary (`tokenizers/chat_format.py`), and inputs
are the ids that `generate --chat` reads. Examples are never split; one that is
longer than a row is dropped, or with the option `too_long=truncate` cut at the
end of inputs and targets, and the manifest counts both. `prefix=TEXT` precedes
all inputs of `pairs` ("summarize: " in T5).

MEAP fine-tuning (arXiv:2502.07490) adds a copy in which 10% of the tokens are
masked where the model reads them, if the targets have more than 50 tokens.
Held-out records have no copies:

| option        | layout                                                      |
|---------------|-------------------------------------------------------------|
| meap=separate | its published code: the copy is an example of its own, whose|
|               | targets alone are masked; weights are 1 at masked tokens    |
| meap=concat   | the paper: the copy (inputs and targets, both masked)       |
|               | follows the targets in the same sequence, where that fits;  |
|               | weights are 1 at targets and at masked tokens               |

Pure numpy; this module imports neither TensorFlow nor SeqIO nor jax.
"""

import collections
from collections.abc import Callable, Iterable, Iterator
import json

import numpy as np

from encdec_adapt.cli import errors
from encdec_adapt.data import batch, noising, objectives
from encdec_adapt.tokenizers import chat_format
from encdec_adapt.tokenizers import vocabulary as vocabulary_lib

_MEAP_SHARE = 0.1  # Of the tokens of the copy.
_MEAP_LEAST = 50  # Targets without EOS; shorter ones have no copy.
TOO_LONG = ('drop', 'truncate')
MEAP = ('separate', 'concat')

# (number of tokens, number to choose) -> positions.
Sample = Callable[[int, int], Iterable[int]]


class Supervised(objectives.Objective):
  """Pairs of texts; see the module's docstring."""

  options = ('too_long', 'meap', 'prefix')
  reads = 'text'
  source = 'pairs'

  def __init__(
    self,
    name: str,
    lengths: batch.Lengths,
    vocabulary: vocabulary_lib.Vocabulary,
    *,
    too_long: str = 'drop',
    meap: str = '',
    prefix: str = '',
  ):
    """Checks the options.

    Args:
      name: name of the objective, for errors.
      lengths: row lengths that every pair has to fit.
      vocabulary: vocabulary of both sides.
      too_long: rule for examples longer than a row, one of `TOO_LONG`.
      meap: layout of MEAP's copies, one of `MEAP`; '' for none.
      prefix: text before all inputs.

    Raises:
      UserError: the lengths do not suit pairs, or the vocabulary lacks special
        tokens.
    """
    super().__init__(name, lengths)
    self.draws = bool(meap)
    self.counts = collections.Counter(dropped=0, truncated=0)
    self._truncates = too_long == 'truncate'
    self._meap = meap
    self._prefix = prefix
    self._vocabulary = vocabulary
    if meap:
      self._mask = noising.mask_token(name, vocabulary)

  def examples(self, documents, generator):
    for name, content in documents:
      try:
        pairs = list(self._pairs(name, json.loads(content)))
      except errors.UserError:
        if not self.skips_bad:
          raise
        self.counts['bad_documents'] += 1
        continue
      for i, pair in enumerate(pairs):
        place = f'{name}#{i}'
        for one in self._with_copy(pair, lambda place=place: generator(place)):
          fitting = self._fitting(one)
          # A copy that was cut may have lost its masked tokens.
          if fitting and (fitting.weights is None or fitting.weights.any()):
            yield fitting._replace(documents=(name,))

  def _pairs(self, name: str, content: list) -> Iterator[batch.Pair]:
    """Yields the pairs of a document."""
    del name
    inputs, targets = content
    encode = self._vocabulary.encode
    yield self._pair(
      encode(self._prefix + inputs), encode(targets), self._vocabulary.eos
    )

  def _pair(self, inputs, targets, end: int) -> batch.Pair:
    return batch.Pair(inputs, np.append(targets, np.int32(end)))

  def _fitting(self, pair: batch.Pair) -> batch.Pair | None:
    """Returns a pair that fits a row; None if it is dropped."""
    encoder, decoder = batch.positions(pair, self.lengths)
    if encoder <= self.lengths.encoder and decoder <= self.lengths.decoder:
      return pair
    if not self._truncates:
      self.counts['dropped'] += 1
      return None
    self.counts['truncated'] += 1
    targets = slice(self.lengths.decoder)
    return pair._replace(
      inputs=pair.inputs[: self.lengths.encoder - 1],
      **{
        field: getattr(pair, field)[targets]
        for field in ('targets', 'decoder_inputs', 'weights')
        if getattr(pair, field) is not None
      },
    )

  def _with_copy(
    self, pair: batch.Pair, generator: Callable[[], np.random.Generator]
  ) -> Iterator[batch.Pair]:
    """Yields a pair, and MEAP's copy beside or inside of it."""
    if not self._meap:
      yield pair
      return

    def sample(size: int, count: int) -> np.ndarray:
      return generator().choice(size, count, replace=False)

    made = meap_copies(pair, self._mask, self._meap, sample)
    # A pair and its copy in one sequence may be too long.
    longest = max(self.lengths.decoder, len(pair.targets))
    if len(made[0].targets) > longest:
      self.counts['left without a masked copy'] += 1
      yield pair._replace(
        decoder_inputs=pair.targets,
        weights=np.ones(len(pair.targets), np.float32),
      )
    else:
      yield from made


def meap_copies(
  pair: batch.Pair, mask: int, layout: str, sample: Sample
) -> list[batch.Pair]:
  """Adds MEAP's masked copy to a pair.

  Args:
    pair: a pair whose last target ends it (EOS).
    mask: mask token.
    layout: 'separate' or 'concat', see the module's docstring.
    sample: draws the masked positions, as `random.sample(range(n), k)` does;
      called once, and not for pairs without a copy.

  Returns:
    One or two pairs, all with decoder inputs and weights, as rows need.
  """
  inputs, targets = pair.parts
  ones = np.ones(len(targets), np.float32)
  plain = pair._replace(decoder_inputs=targets, weights=ones)
  answer = len(targets) - 1
  if answer <= _MEAP_LEAST:
    return [plain]
  if layout == 'separate':
    at = np.array(list(sample(answer, int(answer * _MEAP_SHARE))))
    read, weights = targets.copy(), np.zeros(len(targets), np.float32)
    read[at], weights[at] = mask, 1
    return [plain, pair._replace(decoder_inputs=read, weights=weights)]
  copy = np.concatenate([inputs, targets])
  size = len(copy) - 1
  at = np.array(list(sample(size, int(size * _MEAP_SHARE))))
  read, weights = copy.copy(), np.zeros(len(copy), np.float32)
  weights[len(inputs) :] = 1
  read[at], weights[at] = mask, 1
  return [
    pair._replace(
      targets=np.concatenate([targets, copy]),
      decoder_inputs=np.concatenate([targets, read]),
      weights=np.concatenate([ones, weights]),
    )
  ]


class Chat(Supervised):
  """The assistant's turns of conversations."""

  options = ('too_long', 'meap')
  source = 'chat'

  def __init__(self, name, lengths, vocabulary, **options):
    """Finds the vocabulary's chat template; see `Supervised`."""
    super().__init__(name, lengths, vocabulary, **options)
    self._end = chat_format.end_of_turn(vocabulary)

  def _pairs(self, name, content):
    try:
      chat_format.check_messages(content)
      turns = [i for i, one in enumerate(content) if one['role'] == 'assistant']
      if not turns or turns[-1] != len(content) - 1:
        raise errors.UserError(
          'it has no turn of the assistant'
          if not turns
          else 'it ends with the user, so that the last turn has no answer'
        )
      for i in turns:
        before = content[:i]
        if not before:
          raise errors.UserError('it begins with the assistant')
        prompt = chat_format.encode(before, self._vocabulary, open_turn=True)
        answer = chat_format.turn_text(content[i], self._vocabulary)
        yield self._pair(prompt.ids, self._vocabulary.encode(answer), self._end)
    except errors.UserError as error:
      raise errors.UserError(
        f'conversation {self.locate(name)}: {error}'
      ) from error


SUPERVISED = {'pairs': Supervised, 'chat': Chat}
