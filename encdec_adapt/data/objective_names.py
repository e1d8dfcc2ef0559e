r"""Makes objectives by the names that a configuration gives them.

A name may have options after a colon, separated by commas:

    prefix_lm
    causal_lm:concatenate
    bart:share=0.2,concatenate
    meap:share=0.15,span=5
    denoise:R:3:0.15 + S:uniform@4

    pairs:too_long=truncate,prefix=summarize:
    pairs:prefix="Question: ",separator="\n"
    classify:labels=no|yes

A text is taken verbatim, spaces included, or is a JSON string in quotes, which
may have commas and escapes.

Several objectives, which then share the training rows (`data/row_order.py`),
are separated by ' | ': `prefix_lm | ul2` (`split`). All other functions take
one.

`concatenate` joins the documents of a shard before windows are cut; `share`
and `span` are described in `data/noising.py`, the options of `pairs` and `chat`
in `data/supervised.py`. What follows `denoise:` is a mixture of
`data/denoising.py`, which takes no other option.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any

from encdec_adapt.cli import errors, option_strings
from encdec_adapt.data import (
  batch,
  denoising,
  labelled,
  noising,
  objectives,
  supervised,
  text_split,
)
from encdec_adapt.tokenizers import vocabularies
from encdec_adapt.tokenizers import vocabulary as vocabulary_lib

MIXTURE = 'denoise'
_LABEL = 'config.data.objective'
_CONCATENATED = ('full_lm', 'ul2_published')
_CLASSES: dict[str, type[objectives.Objective]] = {
  **objectives.LANGUAGE_MODELS,
  **noising.NOISES,
  **supervised.SUPERVISED,
  **labelled.LABELLED,
}
NAMES = (*_CLASSES, *denoising.MIXTURES, MIXTURE)


def _share(text: str) -> float:
  if not 0 < float(text) < 1:
    raise ValueError
  return float(text)


def _span(text: str) -> int:
  if int(text) < 1:
    raise ValueError
  return int(text)


def _one_of(values: Sequence[str]) -> Callable[[str], str]:
  def read(text: str) -> str:
    if text not in values:
      raise ValueError
    return text

  return read


_OPTIONS = {
  'concatenate': 'concatenate',
  'share': 'share=NUMBER between 0 and 1',
  'span': 'span=NUMBER of at least 1',
  'too_long': f'too_long={"|".join(supervised.TOO_LONG)}',
  'meap': f'meap={"|".join(supervised.MEAP)}',
  'prefix': 'prefix=TEXT, a JSON string in quotes or without a comma',
  'separator': 'separator=TEXT likewise',
  'labels': 'labels=LABEL|LABEL without commas',
}
# What the value of an option is read by; raises ValueError.
_READ: Mapping[str, Callable[[str], Any]] = {
  'concatenate': lambda _: True,
  'share': _share,
  'span': _span,
  'too_long': _one_of(supervised.TOO_LONG),
  'meap': _one_of(supervised.MEAP),
  'prefix': option_strings.unquote,
  'separator': option_strings.unquote,
  'labels': lambda text: tuple(text.split('|')),
}


@functools.cache
def _parse(text: str) -> tuple[str, Mapping[str, Any]]:
  """Returns the name and the options of an objective.

  Raises:
    UserError: the name or an option is not known, or a value has a wrong type.
  """
  part = option_strings.Part(_LABEL, text)
  head, rest = part.partition(':')
  name = head.text
  if name not in NAMES:
    raise head.error(f'must be one of {", ".join(NAMES)}, or {MIXTURE}:MIXTURE')
  if name == MIXTURE:
    return name, {'mixture': denoising.parse_mixture(rest.text)}
  known = _class(name).options
  options: dict[str, Any] = {}
  if name in _CONCATENATED:
    options['concatenate'] = True
  for entry in filter(None, part.options()):
    key, value = entry.partition('=')
    if key.text not in known or (key.text == 'concatenate') == bool(value):
      forms = ', '.join(_OPTIONS[option] for option in known)
      raise entry.error(f'is not an option of {name}; it has {forms}')
    read = _READ.get(key.text, str)
    options[key.text] = value.read(read, f'as in {_OPTIONS[key.text]}')
  return name, options


def split(text: str) -> list[str]:
  """Returns the objectives of `config.data.objective`, at least one.

  Raises:
    UserError: one is not known or named twice, they fill other sides, or one
      of several masks whole batches.
  """
  # Without options there is no space to keep.
  names = [
    name.lstrip() if ':' in name else name.strip()
    for name in (
      part.text for part in option_strings.Part(_LABEL, text).divide(r' \| ')
    )
  ]
  sides = {name: feeds(name) for name in names}
  if len(sides) < len(names) or len(set(sides.values())) > 1:
    raise errors.UserError(
      f'config.data.objective is {text!r}; several objectives must differ and'
      f' fill the same sides of a row, but these fill {sides}'
    )
  if len(names) > 1 and any(shared_mask_share(name) for name in names):
    raise errors.UserError(
      f'config.data.objective is {text!r}; meap_shared masks the rows of a'
      ' whole step and stands alone; use meap'
    )
  return names


def feeds(text: str) -> str:
  """Returns the sides that an objective fills: see `Objective.feeds`.

  Raises:
    UserError: the objective is not known.
  """
  name, _ = _parse(text)
  return _class(name).feeds


def source_of(text: str) -> str:
  """Returns what an objective is made of: see `Objective.source`."""
  return _class(_parse(text)[0]).source


def labels(text: str) -> tuple[str, ...]:
  """Returns the labels that an objective predicts; empty for tokens."""
  return _parse(text)[1].get('labels', ())


def is_concatenated(text: str) -> bool:
  """Returns whether windows cross documents, so that EOS may be inside."""
  return _parse(text)[1].get('concatenate', False)


def masks_decoder_inputs(text: str) -> bool:
  """Returns whether the decoder reads other tokens than the targets."""
  name, options = _parse(text)
  return name.startswith('meap') or bool(options.get('meap'))


def for_evaluation(text: str) -> str:
  """Returns an objective without the masks that only training has (MEAP).

  Held-out losses of MEAP and of plain next-token prediction then compare, as
  in its published code.
  """
  name, options = _parse(text)
  if name.startswith('meap'):
    return 'causal_lm' + ':concatenate' * options.get('concatenate', False)
  if options.get('meap'):
    entries = [
      entry.text
      for entry in option_strings.Part(_LABEL, text).options()
      if not entry.text.startswith('meap=')
    ]
    return ':'.join([name, *([','.join(entries)] if entries else [])])
  return text


def one_vocabulary(text: str) -> str:
  """Returns why both sides must share a vocabulary; '' if they need not."""
  name, options = _parse(text)
  if options.get('concatenate'):
    return 'windows of concatenated documents are cut in the tokens of one'
  if options.get('meap'):
    return 'a masked copy repeats inputs and targets in the tokens of one'
  return _class(name).one_vocabulary


def check_vocabularies(text: str) -> None:
  """Refuses an objective that cannot have two vocabularies.

  Raises:
    UserError: states the reason.
  """
  if reason := one_vocabulary(text):
    raise errors.UserError(
      f'config.data.objective {text!r} needs one vocabulary for both sides:'
      f' {reason}. Leave out config.data.encoder_vocabulary, or use prefix_lm,'
      ' prefix_lm_uniform, reverse_prefix_lm, pairs or chat without these'
      ' options'
    )


def separator(text: str) -> str:
  """Returns the text between the inputs and targets of decoder-only rows."""
  return _parse(text)[1].get('separator', '')


def revisions(text: str) -> tuple[str, ...]:
  """Returns the changes to an objective; see `Objective.revisions`."""
  name, options = _parse(text)
  # `split` removed it, which an option at the end had.
  space = ('options keep the space at their end',) * (text != text.rstrip())
  return (*_class(name).revisions(options), *space)


def shared_mask_share(text: str) -> float:
  """Returns the share of inputs that framing masks: 0 but for meap_shared."""
  name, options = _parse(text)
  if name != 'meap_shared':
    return 0.0
  return options.get('share', noising.SharedMeap.default_share)


def added_sentinels(text: str, policy: str, lengths: batch.Lengths) -> int:
  """Returns the new sentinels that 'extend_vocabulary' needs, else 0."""
  mixture = _mixture(*_parse(text))
  if policy != 'extend_vocabulary' or mixture is None:
    return 0
  return denoising.most_spans(mixture, lengths)


def asked(text: str) -> dict[str, tuple[float, float | None]]:
  """Returns what an objective is to hide.

  Returns:
    Name of a noise, as in `Objective.count_hidden` -> its share of the windows,
    and the share of hidden tokens; None where that is drawn for every window.
  """
  name, options = _parse(text)
  if mixture := _mixture(name, options):
    total = sum(one.weight for one in mixture)
    return {
      one.label: (one.weight / total, one.density or None) for one in mixture
    }
  if issubclass(_class(name), noising.Noising):
    return {text: (1.0, options.get('share', _class(name).default_share))}
  return {}


def _class(name: str) -> type[objectives.Objective]:
  return _CLASSES.get(name, denoising.Denoising)


def _mixture(name: str, options: Mapping[str, Any]) -> Any:
  """Returns the denoisers of an objective, None if it has none."""
  if name in denoising.MIXTURES:
    return denoising.parse_mixture(denoising.MIXTURES[name])
  return options.get('mixture')


def make_objective(
  text: str,
  lengths: batch.Lengths,
  vocabulary: vocabulary_lib.Vocabulary,
  *,
  encoder_vocabulary: vocabulary_lib.Vocabulary | None = None,
  sentinel_policy: str = 'unique',
) -> objectives.Objective:
  """Makes an objective by its name.

  Args:
    text: name and options, see the module's docstring.
    lengths: row lengths that every pair has to fit.
    vocabulary: vocabulary with EOS, and what the objective needs of sentinels,
      mode tokens and a mask; the decoder's if there are two.
    encoder_vocabulary: vocabulary of the encoder if it is another one.
    sentinel_policy: one of `denoising.POLICIES`.

  Raises:
    UserError: the name or an option is not known, the lengths do not suit the
      objective, it cannot have two vocabularies, or the vocabulary lacks
      special tokens.
  """
  name, options = _parse(text)
  if encoder_vocabulary is not None:
    check_vocabularies(text)
  mixture = _mixture(name, options)
  if mixture is not None:
    return denoising.Denoising(
      text,
      lengths,
      vocabulary,
      mixture,
      sentinel_policy,
      concatenate=options.get('concatenate', False),
    )
  if encoder_vocabulary is None:
    return _CLASSES[name](text, lengths, vocabulary, **options)
  if name in supervised.SUPERVISED:
    return _CLASSES[name](
      text, lengths, vocabulary, encoder_vocabulary, **options
    )
  return text_split.TextSplit(
    _CLASSES[name](text, lengths, vocabulary, **options),
    vocabularies.Opened(vocabulary, encoder_vocabulary),
  )
