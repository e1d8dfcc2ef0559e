"""The text around a model's prompts: task prefix, separator, chat format.

The objectives of a run define it. An export writes it into config.json, under
`task_specific_params` like T5's prefixes, or into a file beside PEFT adapters.
No model is opened here.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import json
from typing import Any

from encdec_adapt.files import atomic, paths
from encdec_adapt.models import architecture as architectures
from encdec_adapt.objectives import example_maker

_FIELD, _ENTRY = 'task_specific_params', 'encdec_adapt'
PEFT = 'prompt_framing.json'  # In a PEFT folder, as its config has no field.


@dataclasses.dataclass(frozen=True)
class PromptFraming:
  """Text around the prompts of a model, as in training.

  Attributes:
    prefixes: texts before the inputs, one per task of a mixture.
    separator: text after the inputs of a decoder-only model; '' for models with
      an encoder.
    chats: whether prompts are conversations in the vocabulary's chat format.
  """

  prefixes: tuple[str, ...] = ()
  separator: str = ''
  chats: bool = False

  def __bool__(self) -> bool:
    return any(self.prefixes) or bool(self.separator) or self.chats

  def fields(self) -> dict[str, Any]:
    """Returns the framing as fields of config.json; empty for plain texts."""
    return {_FIELD: {_ENTRY: dataclasses.asdict(self)}} if self else {}

  def training_objective(self) -> str:
    """Returns the objective to train on answers to such prompts."""
    separator = {'separator': self.separator} if self.separator else {}
    parts = [with_options('chat', separator)] if self.chats else []
    for prefix in self._text_prefixes:
      parts.append(with_options('pairs', {'prefix': prefix, **separator}))
    return ' | '.join(parts)

  def prompt(self, prefix: str) -> str:
    """Returns a readable form: 'input' between the quoted texts around it."""
    before = [repr(prefix)] if prefix else []
    after = [repr(self.separator)] if self.separator else []
    return ' + '.join([*before, 'input', *after])

  def describe(self) -> str:
    """Returns a readable list of all prompt forms."""
    forms = ['conversations'] if self.chats else []
    return ' or '.join([*forms, *map(self.prompt, self._text_prefixes)])

  @property
  def _text_prefixes(self) -> tuple[str, ...]:
    return self.prefixes or (() if self.chats else ('',))


def of_objectives(
  objectives: Sequence[example_maker.Objective],
  architecture: architectures.Architecture,
) -> PromptFraming:
  """Returns the prompt framing of a run.

  Args:
    objectives: training objectives of the run.
    architecture: architecture of its model; encoders read no separator.
  """
  prefixes = [
    x.options.get('prefix', '')
    for x in objectives
    if 'prefix' in x.maker.options
  ]
  separators = [x.options.get('separator', '') for x in objectives]
  return PromptFraming(
    tuple(dict.fromkeys(prefixes)),
    '' if architecture.encodes_prompt else next(filter(None, separators), ''),
    any(x.rows.ends_turns for x in objectives),
  )


def in_file(file: paths.Path) -> PromptFraming:
  """Reads the framing from a file; plain texts if it has none.

  Args:
    file: a config.json, or `PEFT`; may be missing.

  Raises:
    UserError: the file is damaged, or a field has the wrong type.
  """
  tasks = atomic.read_json(file).get(_FIELD) if file.exists() else None
  entry = tasks.get(_ENTRY) if isinstance(tasks, Mapping) else None
  values = dataclasses.asdict(PromptFraming()) | {'prefixes': []}
  values |= {k: entry[k] for k in values if k in (entry or ())}
  texts = values['prefixes'], [values['separator']]
  is_text = all(isinstance(x, list) and {*map(type, x)} <= {str} for x in texts)
  if not (is_text and isinstance(values['chats'], bool)):
    raise atomic.damaged(
      file,
      f'{_FIELD}.{_ENTRY} must have a list of texts (prefixes), a text'
      f' (separator) and true or false (chats), and is {entry}',
    )
  return PromptFraming(**values | {'prefixes': tuple(values['prefixes'])})


def with_options(objective: str, options: Mapping[str, str]) -> str:
  """Returns an objective with added text options, as JSON strings."""
  name, _, rest = objective.partition(':')
  texts = [
    f'{key}={json.dumps(text, ensure_ascii=False)}'
    for key, text in options.items()
  ]
  return ':'.join(filter(None, [name, ','.join(filter(None, [*texts, rest]))]))
