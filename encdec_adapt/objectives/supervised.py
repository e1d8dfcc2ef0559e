"""Supervised fine-tuning: pairs of texts, and conversations.

| name  | source  | inputs                              | targets             |
|-------|---------|-------------------------------------|---------------------|
| pairs | pairs:  | the first text                      | the second, EOS     |
| chat  | chat:   | the conversation before an assistant| the turn and its end|
|       |         | turn, with assistant header         | token               |

Every assistant turn is an example, so the loss is on these turns only. The
vocabulary defines the chat format (`tokenizers/chat_format.py`). A conversation
is encoded as a whole and cut at its answers: targets match
`apply_chat_template`, and inputs match `generate --chat`, except for a token
across header and answer (line breaks), which belongs to the answer.

Further fields of a document (`row_sources`) stay with its examples for reward
functions; the model does not read them.

Examples are never split: longer examples are dropped or, with the option
`too_long=truncate`, truncated at the end of inputs and targets; the manifest
counts both. In jobs that complete prompts, too long inputs are an error unless
`too_long` is set. `prefix=TEXT` precedes all inputs of `pairs` ("summarize: "
in T5). `separator=TEXT` separates inputs and targets in the rows of a
decoder-only model or a teacher, as an input without weight; encoders do not
read it.

The manifest also counts empty targets and lossy targets. Decoded, a lossy
target differs by more than Unicode normalisation (NFKC) and spaces, mostly
because T5's vocabularies lack characters.

With two vocabularies, inputs are encoded in both (for `chat` in the format of
each), and answers and their end token in the decoder's.

MEAP fine-tuning (arXiv:2502.07490) adds a copy with 10% of its tokens masked as
the model reads them, if the targets have more than 50 tokens. Held-out records
have no copies. The layout `inputs` is ours; the paper's models are decoders:

| option        | layout                                                      |
|---------------|-------------------------------------------------------------|
| meap=separate | the published code: the copy is another example, with masks |
|               | in its targets only; weights are 1 at masked tokens         |
| meap=concat   | the paper: the copy (inputs and targets, both masked)       |
|               | follows the targets in the same sequence, if it fits;       |
|               | weights are 1 at targets and at masked tokens               |
| meap=inputs   | the copy is another example with masks in its inputs only,  |
|               | for an encoder; the loss is on all of its targets           |

Pure NumPy; must not import TensorFlow, SeqIO or JAX.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import functools
import json
import os
from typing import Any
import unicodedata

import numpy as np

from encdec_adapt.base import errors, option_strings
from encdec_adapt.objectives import (
  example_maker,
  framing,
  noising,
  row_fields,
)
from encdec_adapt.tokenizers import chat_format
from encdec_adapt.tokenizers import vocabulary as vocabulary_lib

_MEAP_SHARE = 0.1  # Masked share of the copy's tokens.
_MEAP_LEAST = 50  # Only longer targets, without EOS, have a copy.
TOO_LONG = ('drop', 'truncate')
MEAP = ('separate', 'concat', 'inputs')


def _choice(
  name: str, values: Sequence[str], **fields: Any
) -> example_maker.Option:
  form = f'{name}={"|".join(values)}'
  return example_maker.Option(str, form, values.__contains__, **fields)


def text_option(name: str) -> example_maker.Option:
  """Returns an option with text values."""
  return example_maker.Option(
    str,
    f'{name}=TEXT, a JSON string in quotes or without a comma',
    verbatim=True,
  )


# (number of tokens, number to choose) -> positions.
Sample = Callable[[int, int], Iterable[int]]
# A pair, and the text of its targets.
Answer = tuple[framing.Pair, str]


class Supervised(example_maker.ExampleMaker):
  """Pairs of texts; see the module's docstring."""

  options = {
    'too_long': _choice('too_long', TOO_LONG),
    'meap': _choice(
      'meap',
      MEAP,
      one_vocabulary='a masked copy repeats inputs and targets in the tokens of'
      ' one',
    ),
    'prefix': text_option('prefix'),
    'separator': text_option('separator'),
  }
  reads = 'text'
  documents = 'pairs'
  teacher_reads = 'inputs'
  one_vocabulary = ''
  _counted = ('dropped', 'truncated')

  @classmethod
  def without_masks(cls, text, options):
    if not options.get('meap'):
      return text
    name, _, entries = text.partition(':')
    plain = [
      entry.text
      for entry in option_strings.Part('', entries).divide(',')
      if not entry.text.startswith('meap=')
    ]
    return ':'.join(filter(None, [name, ','.join(plain)]))

  @classmethod
  def build(
    cls, text, lengths, vocabulary, encoder_vocabulary, sentinel_policy, options
  ):
    encoder = () if encoder_vocabulary is None else (encoder_vocabulary,)
    return cls(text, lengths, vocabulary, *encoder, **options)

  def __init__(
    self,
    name: str,
    lengths: framing.Lengths,
    vocabulary: vocabulary_lib.Vocabulary,
    encoder_vocabulary: vocabulary_lib.Vocabulary | None = None,
    *,
    too_long: str = 'drop',
    meap: str = '',
    prefix: str = '',
    separator: str = '',
  ):
    """Checks the options.

    Args:
      name: name of the objective, for errors.
      lengths: row lengths; every pair must fit.
      vocabulary: vocabulary of the decoder.
      encoder_vocabulary: vocabulary of the encoder, if different.
      too_long: rule for examples longer than a row, one of `TOO_LONG`.
      meap: layout of MEAP's copies, one of `MEAP`; '' for none.
      prefix: text before all inputs.
      separator: text between inputs and targets of decoder-only rows.

    Raises:
      UserError: the lengths do not suit pairs or the separator, or the
        vocabulary lacks special tokens.
    """
    super().__init__(name, lengths)
    self._truncates = too_long == 'truncate'
    self._meap = meap
    self._prefix = prefix
    self._vocabulary = vocabulary
    self._encoder_vocabulary = encoder_vocabulary
    self._separator = vocabulary.encode(separator)
    # Truncated inputs should keep a token.
    least = len(self._separator) + lengths.edges + 1
    if separator and least > lengths.encoder:
      raise errors.UserError(
        f'objective {name!r}: its separator has {len(self._separator)} tokens,'
        f' which leave no inputs of config.data.encoder_length='
        f'{lengths.encoder}; set it to at least {least}'
      )
    if meap:
      self._mask = noising.mask_token(name, vocabulary)

  def examples(self, documents, generator, policy=example_maker.POLICY):
    for name, pairs in self._parsed(documents, policy, self._pairs):
      for i, (pair, text) in enumerate(pairs):
        draw = functools.partial(generator, f'{name}#{i}')
        for example in self._with_copy(pair, draw):
          fitting = self._fitting(name, example, policy)
          # A truncated copy may have lost its masked tokens.
          if fitting and (fitting.weights is None or fitting.weights.any()):
            self._count_losses(name, policy, (pair, text))
            yield fitting._replace(documents=(name,))

  def _count_losses(
    self, name: str, policy: example_maker.DocumentPolicy, *answers: Answer
  ) -> None:
    """Counts an example with an empty or a lossy target.

    Args:
      name: document id.
      policy: locates the document.
      *answers: one answer, or two of a preference.
    """
    for pair, text in answers:
      decoded = _normal(self._vocabulary.decode(pair.targets))
      text = _normal(text)
      if not text or text != decoded:
        loss = 'lossy_targets' if text else 'empty_targets'
        self.counts[loss] += 1
        # Shows long texts from their first difference on.
        start = max(0, len(os.path.commonprefix([text, decoded])) - 40)
        texts = f'{text[start:]!r:.80} becomes {decoded[start:]!r:.80}'
        self.first_losses.setdefault(loss, f'{policy.locate(name)}: {texts}')
        return

  def _pairs(self, inputs: Any, targets: Any, *fields: Any) -> list[Answer]:
    """Returns the pairs of a document, with the texts of their targets.

    Raises:
      UserError: the document is bad.
    """
    # The prefix is encoded with the inputs: tokens may span the boundary.
    encode, special = self._vocabulary.encode, self._vocabulary.ids
    ids = encode(self._prefix + inputs)
    answer = [*special.target_opening, *encode(targets).tolist(), special.eos]
    answer = np.array(answer, np.int32)
    pair = framing.Pair(ids, answer, fields=_fields(*fields))
    if self._encoder_vocabulary:
      ids = self._encoder_vocabulary.encode(self._prefix + inputs)
      pair = pair._replace(inputs=ids, prefix=pair.inputs)
    return [(pair, targets)]

  def _separated(
    self, pair: framing.Pair, room: int | None = None
  ) -> framing.Pair:
    """Returns a pair with the separator, if any, at the end of its prefix.

    Args:
      pair: pair without the separator.
      room: maximum number of tokens of the inputs, and of the prefix with
        separator; None for no limit.
    """
    # Truncates inputs but not the separator, which tells a decoder-only model
    # where they end.
    cut = None if room is None else room - len(self._separator)
    prefix = pair.prefix
    if prefix is not None or len(self._separator):
      prefix = np.concatenate([pair.teacher_inputs[:cut], self._separator])
    return pair._replace(inputs=pair.inputs[:room], prefix=prefix)

  def _fitting(
    self,
    name: str,
    unseparated: framing.Pair,
    policy: example_maker.DocumentPolicy,
  ) -> framing.Pair | None:
    # `positions` counts the longer of inputs and prefix, with the separator.
    pair = self._separated(unseparated)
    encoder, decoder = pair.positions(self.lengths)
    if encoder <= self.lengths.encoder and decoder <= self.lengths.decoder:
      return pair
    if policy.refuses_long and encoder > self.lengths.encoder:
      raise errors.UserError(
        f'example {policy.locate(name)}: its prompt has {encoder} tokens with'
        f' BOS, and config.data.encoder_length is {self.lengths.encoder}; raise'
        ' it, or leave such examples out with the option too_long=drop of'
        f' config.data.objective={self.name!r}.'
      )
    if not self._truncates:
      self.counts['dropped'] += 1
      return None
    self.counts['truncated'] += 1
    targets = slice(self.lengths.decoder)
    room = self.lengths.encoder - self.lengths.edges
    pair = self._separated(unseparated, room)
    return pair._replace(
      **{
        field: getattr(pair, field)[targets]
        for field in ('targets', 'decoder_inputs', 'weights')
        if getattr(pair, field) is not None
      }
    )

  def _with_copy(
    self, pair: framing.Pair, generator: Callable[[], np.random.Generator]
  ) -> Iterator[framing.Pair]:
    if not self._meap:
      yield pair
      return

    def sample(size: int, count: int) -> np.ndarray:
      return generator().choice(size, count, replace=False)

    copies = meap_copies(pair, self._mask, self._meap, sample, self._separator)
    # A pair and its copy in one sequence may be too long. A pair too long by
    # itself is dropped or truncated later, not counted here.
    longest = max(self.lengths.decoder, len(pair.targets))
    if len(copies[0].targets) > longest:
      self.counts['left without a masked copy'] += 1
      yield pair._replace(
        decoder_inputs=pair.targets,
        weights=np.ones(len(pair.targets), np.float32),
      )
    else:
      yield from copies


def meap_copies(
  pair: framing.Pair,
  mask: int,
  layout: str,
  sample: Sample,
  separator: Sequence[int] = (),
) -> list[framing.Pair]:
  """Adds MEAP's masked copy to a pair.

  Args:
    pair: a pair with EOS as its last target.
    mask: mask token.
    layout: one of `MEAP`, see the module's docstring.
    sample: draws the masked positions, like `random.sample(range(n), k)`;
      called once, and not for pairs without a copy.
    separator: tokens between inputs and targets of the copy.

  Returns:
    One or two pairs. All have decoder inputs and weights (none do for the
    layout 'inputs'), as pairs of a row must have the same fields.
  """
  inputs, targets = pair.parts
  has_copy = len(targets) - 1 > _MEAP_LEAST
  if layout == 'inputs':
    count = int(len(inputs) * _MEAP_SHARE)
    if not (has_copy and count):
      return [pair]
    read = inputs.copy()
    read[list(sample(len(inputs), count))] = mask
    return [pair, pair._replace(inputs=read)]
  ones = np.ones(len(targets), np.float32)
  plain = pair._replace(decoder_inputs=targets, weights=ones)
  if not has_copy:
    return [plain]
  separate = layout == 'separate'
  context = np.append(inputs, np.array(separator, np.int32))
  copy = targets if separate else np.concatenate([context, targets])
  size = len(copy) - 1  # The last token, EOS, is never masked.
  masked = np.array(list(sample(size, int(size * _MEAP_SHARE))))
  decoder_inputs, weights = copy.copy(), np.zeros(len(copy), np.float32)
  if not separate:
    weights[len(context) :] = 1
  decoder_inputs[masked], weights[masked] = mask, 1
  if separate:
    return [
      plain,
      pair._replace(decoder_inputs=decoder_inputs, weights=weights),
    ]
  return [
    pair._replace(
      targets=np.concatenate([targets, copy]),
      decoder_inputs=np.concatenate([targets, decoder_inputs]),
      weights=np.concatenate([ones, weights]),
    )
  ]


class Chat(Supervised):
  """Assistant turns of conversations."""

  options = {k: x for k, x in Supervised.options.items() if k != 'prefix'}
  documents = 'chat'

  @classmethod
  def rows(cls, options):
    return row_fields.RowFields(ends_turns=True)

  @classmethod
  def revisions(cls, options):
    return ('answers are cut from the ids of the whole conversation',)

  def __init__(self, name, lengths, vocabulary, *encoder, **options):
    """Finds the chat template of each vocabulary; see `Supervised`."""
    super().__init__(name, lengths, vocabulary, *encoder, **options)
    # Raises for a vocabulary without a template before any text is read.
    for side in (vocabulary, *encoder):
      chat_format.template_of(side)

  def _pairs(self, *content):
    messages, fields = [*content], ()
    # Further fields follow a list of messages.
    if content and isinstance(content[0], list):
      messages, *fields = content
    _check_answers(messages)
    ids, turns = _encode(messages, self._vocabulary)
    opening = np.array(self._vocabulary.ids.target_opening, np.int32)
    pairs = [
      framing.Pair(
        ids[:i],
        np.concatenate([opening, ids[i:stop]]),
        fields=_fields(*fields),
      )
      for i, stop in turns
    ]
    if self._encoder_vocabulary:
      ids, turns = _encode(messages, self._encoder_vocabulary)
      pairs = [
        pair._replace(inputs=ids[:i], prefix=pair.inputs)
        for pair, (i, _) in zip(pairs, turns, strict=True)
      ]
    texts = [x['content'] for x in messages if x['role'] == 'assistant']
    return list(zip(pairs, texts, strict=True))


def _normal(text: str) -> str:
  """Applies the changes of a text that count as lossless."""
  return ' '.join(unicodedata.normalize('NFKC', text).split())


def _fields(fields: Mapping[str, Any] | None = None) -> str | None:
  return None if fields is None else json.dumps(fields, ensure_ascii=False)


def _check_answers(messages: chat_format.Messages) -> None:
  """Raises an error if a conversation does not end with an answer to a user.

  Raises:
    UserError: names the broken rule.
  """
  chat_format.check_messages(messages)
  roles = [message['role'] for message in messages]
  if 'assistant' not in roles:
    raise errors.UserError('it has no turn of the assistant')
  if roles[-1] != 'assistant':
    raise errors.UserError(
      'it ends with the user, so that the last turn has no answer'
    )
  if roles[0] == 'assistant':
    raise errors.UserError('it begins with the assistant')


def _encode(
  messages: chat_format.Messages, vocabulary: vocabulary_lib.Vocabulary
) -> tuple[np.ndarray, list[tuple[int, int]]]:
  """Encodes a conversation and locates the assistant's turns.

  Returns:
    The ids, int32 [n]; and (start, stop) of each turn with its closing token.
  """
  encoded = chat_format.encode(messages, vocabulary)
  # The assistant mask changes at the start and the end of each turn.
  edges = np.diff(encoded.assistant, prepend=False, append=False)
  bounds = np.flatnonzero(edges).reshape(-1, 2)
  return encoded.ids, [(int(start), int(stop)) for start, stop in bounds]


OBJECTIVES = {
  'pairs': example_maker.Name(
    Supervised,
    "targets of given examples (`pairs:` sources), with MEAP's copies as an"
    ' option',
  ),
  'chat': example_maker.Name(Chat, "the assistant's turns (`chat:` sources)"),
}
