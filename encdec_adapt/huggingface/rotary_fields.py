"""Converts rotary fields between config.json and our configs.

Reads the spelling of transformers 4 and 5, writes the spelling of 5. Source:
transformers 5.24, `modeling_rope_utils.py`.
"""

from collections.abc import Mapping
from typing import Any

from encdec_adapt.base import errors
from encdec_adapt.models import model_config
from encdec_adapt.ops import rope

_Rope = Mapping[str, Any]
# Our scaling parameter (`rope.NUMBERS`) -> their field.
NAMES = {
  'factor': 'factor',
  'low': 'low_freq_factor',
  'high': 'high_freq_factor',
  'original_length': 'original_max_position_embeddings',
  'fraction': 'partial_rotary_factor',
}


def fields_from_raw(
  raw: Mapping[str, Any], file: str, *, local_theta: bool
) -> dict[str, Any]:
  """Returns our rotary fields.

  Args:
    raw: parsed object, with the defaults of its class.
    file: name of the file, for error messages.
    local_theta: whether local layers have a separate rotary base (Gemma 3, 4).

  Raises:
    UserError: a scaling is unsupported or lacks fields, or local layers have
      a separate scaling; or local layers have a separate base, but fields are
      not by kind of layer.
  """
  full, local = _by_kind(raw, file, local_theta)
  kind = full.get('rope_type', full.get('type', 'default'))
  kind = 'none' if kind == 'default' else kind
  if kind not in rope.NUMBERS:
    raise errors.UserError(
      f'{file} scales its rotary embedding by {kind!r}; supported are default,'
      ' linear, llama3 and proportional.'
    )
  if kind == 'proportional' and full.get('factor', 1) != 1:
    raise errors.UserError(
      f'{file} divides proportional rotary frequencies by {full["factor"]},'
      ' which is not supported; remove the factor.'
    )
  names = [NAMES[number] for number in rope.NUMBERS[kind]]
  if missing := [name for name in names if name not in full]:
    raise errors.UserError(
      f'{file} scales its rotary embedding by {kind!r} without {missing[0]!r}.'
    )
  numbers = {ours: float(full[NAMES[ours]]) for ours in rope.NUMBERS[kind]}
  if 'original_length' in numbers:
    numbers['original_length'] = int(numbers['original_length'])
  fields: dict[str, Any] = {
    'rope_theta': float(full.get('rope_theta', raw['rope_theta'])),
    'rope_scaling': rope.Scaling(kind, **numbers),
  }
  local = {'rope_theta': raw['rope_theta'], **local} if local else full
  # With equal fields for both kinds, scaled or not, our local layers follow the
  # global layers.
  if local != full:
    if local.get('rope_type', 'default') != 'default':
      raise errors.UserError(
        f'{file} scales the rotary embedding of sliding layers by'
        f' {local["rope_type"]!r}; only that of full layers can be scaled.'
      )
    fields['local_rope_theta'] = float(local['rope_theta'])
  return fields


def _by_kind(
  raw: Mapping[str, Any], file: str, local_theta: bool
) -> tuple[_Rope, _Rope]:
  """Returns the fields of full and of sliding layers (empty if equal)."""
  full = {'rope_theta': raw['rope_theta']}
  local = {'rope_theta': raw['rope_local_base_freq']} if local_theta else {}
  parameters = raw.get('rope_parameters')
  if not parameters:  # transformers 4, where only full layers are scaled.
    return {**full, **(raw.get('rope_scaling') or {})}, local
  if any(isinstance(value, Mapping) for value in parameters.values()):
    sliding = parameters.get('sliding_attention') or {}
    return {**full, **parameters['full_attention']}, {**local, **sliding}
  if local_theta:
    # Its class reads only fields by kind and silently ignores these.
    raise errors.UserError(
      f'{file} has rope_parameters = {dict(parameters)!r}; those of'
      f' {raw.get("model_type", "this model")} are by kind of layer: give them'
      ' as full_attention and sliding_attention.'
    )
  return parameters, {}


def raw_from_stack(
  stack: model_config.StackConfig, *, local_theta: bool
) -> dict[str, Any]:
  """Returns `rope_parameters` of a stack in the spelling of transformers 5."""
  scaling = stack.rope_scaling
  kind = 'default' if scaling.kind == 'none' else scaling.kind
  full = {'rope_type': kind, 'rope_theta': stack.rope_theta}
  for name in rope.NUMBERS[scaling.kind]:
    full[NAMES[name]] = getattr(scaling, name)
  if not local_theta:
    return full
  local = full
  if stack.local_rope_theta is not None:
    local = {'rope_type': 'default', 'rope_theta': stack.local_rope_theta}
  return {'full_attention': full, 'sliding_attention': local}
