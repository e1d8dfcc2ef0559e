"""Chooses the transformers class that a model is written for."""

from collections.abc import Callable, Iterable, Mapping
import dataclasses
from typing import Any

from encdec_adapt.base import errors
from encdec_adapt.huggingface import raw_fields, weights
from encdec_adapt.models import model_config

# Fields that files of models without local layers lack.
_LOCAL = ('window', 'window_rule', 'local_rope_theta')


def choose(
  config: model_config.ModelConfig,
  kinds: Iterable[str],
  write: Callable[[model_config.ModelConfig, str], dict[str, Any]],
  read: Callable[
    [Mapping[str, Any], str], tuple[model_config.ModelConfig, weights.Layout]
  ],
) -> tuple[dict[str, Any], weights.Layout]:
  """Returns the config.json of the first class that supports a model.

  Args:
    config: model config.
    kinds: `model_type` of each class.
    write: returns the fields of a model for a `model_type`.
    read: returns the model of such fields and its tensor names, given also the
      name of the file.

  Raises:
    UserError: no class supports the model; names the reasons.
  """
  reasons = []
  for kind in kinds:
    try:
      raw = write(config, kind)
      raw_fields.check(raw, 'the exported config')
      back, layout = read(raw, 'the exported config')
    except errors.UserError as error:
      reasons.append(f'{kind}: {error}')
      continue
    for side, stack in back.stacks.items():
      if 'local' not in stack.pattern and side in config.stacks:
        unread = {name: getattr(config.stacks[side], name) for name in _LOCAL}
        stack = dataclasses.replace(stack, **unread)
        back = dataclasses.replace(back, **{side: stack})
    if not (different := model_config.differences(back, config)):
      return raw, layout
    reasons.append(f'{kind}: {different[0]}.')
  raise errors.UserError(
    f'transformers has no class for this model. {" ".join(reasons)}'
  )
