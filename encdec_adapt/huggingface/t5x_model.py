"""T5, mT5 and UMT5 as t5x stores them.

Source of names and shapes: google-research/t5x, `examples/t5` (minimal: a
kernel [in, out], layers numbered, a relative position bias for each stack) and
`examples/scalable_t5` (layers on axis 1, heads on axes of their own, a bias in
each layer).
"""

from collections.abc import Iterator, Mapping
import dataclasses
import math

import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.huggingface import flax_folder, t5_json, tensor_folder
from encdec_adapt.models import model_config

_TABLE, _HEAD = 'token_embedder/embedding', 'decoder/logits_dense/kernel'
_BIAS = 'relpos_bias/rel_embedding'
_FLOATS = ('bfloat16', 'float16', 'float32', 'float64')
# Our module -> theirs, in both stacks and in the decoder.
_ENCODER = {
  'pre_attention_norm': 'pre_attention_layer_norm',
  'attention': 'attention',
  'pre_mlp_norm': 'pre_mlp_layer_norm',
  'mlp': 'mlp',
}
_DECODER = _ENCODER | {
  'pre_attention_norm': 'pre_self_attention_layer_norm',
  'attention': 'self_attention',
  'pre_cross_norm': 'pre_cross_attention_layer_norm',
  'cross_attention': 'encoder_decoder_attention',
}


class T5xModel(flax_folder.FlaxModel):
  """A model in the layout of t5x, with every array matched.

  The index of a part is the layer, on axis 1; None for the whole array.
  """

  def _part(self, leaf, stored):
    """Finds the array of a leaf and checks its shape."""
    gated = self.config.decoder.mlp_gated
    choices = list(_their_names(leaf, gated=gated))
    part = next((part for part in choices if part[0] in stored), None)
    if part is None:
      names = ' or '.join(repr(name) for name, _ in choices)
      raise errors.UserError(
        f'{self._folder} has no array {names}, which holds {leaf}. It is'
        ' incomplete, or not the model of --model.'
      )
    name, layer = part
    shape, dtype = self._arrays[name]
    forms = self._shapes(leaf, name)
    if layer is not None:
      layers = self.config.stacks[leaf.split('/')[0]].layers
      forms = [(form[0], layers, *form[1:]) for form in forms]
    if shape not in forms:
      raise errors.UserError(
        f'{self._folder}: {name} has shape {list(shape)}, and the model of'
        f' --model requires {" or ".join(str(list(form)) for form in forms)}.'
        ' Give the config.json of this model.'
      )
    if dtype.name not in _FLOATS:
      raise errors.UserError(
        f'{self._folder}: {name} has dtype {dtype}; weights are'
        f' {", ".join(_FLOATS)}.'
      )
    return part

  def _shapes(self, leaf: str, name: str) -> list[tuple[int, ...]]:
    """Returns the shapes that the array of a leaf may have in a layer."""
    ours = self._leaves[leaf].shape
    if leaf.endswith('/table'):
      table = (self._tokens(leaf), ours[1])
      return [table[::-1] if name == _HEAD else table]
    if len(ours) < 3:
      return [ours]
    inputs = 2 if leaf.endswith('/output') else 1
    return [(math.prod(ours[:inputs]), math.prod(ours[inputs:])), ours]

  def _ours(self, leaf: str, stored: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns our leaf from their array."""
    (name, layer), shape = self._parts[leaf], self._leaves[leaf].shape
    array = stored[name] if layer is None else stored[name][:, layer]
    tensor_folder.check_finite(name, array, self._folder)
    if not leaf.endswith('/table'):
      return array.reshape(shape)
    array = array.T if name == _HEAD else array
    return np.pad(array, [(0, shape[0] - len(array)), (0, 0)])


def completed(
  config: model_config.ModelConfig,
  arrays: flax_folder.Arrays,
  reader: flax_folder.Reader,
  folder: str,
) -> model_config.ModelConfig:
  """Returns a config with the fields that the arrays decide.

  Without a head of its own the decoder scales its states and reads the table.
  Layers have a bias each where those of one array differ, or where layers have
  an array each.

  Args:
    config: config of the model.
    arrays: name -> stored shape and dtype.
    reader: reads arrays by name; reads the biases alone.
    folder: name of the folder, for error messages.

  Raises:
    UserError: the config is not that of T5, mT5 or UMT5 with a decoder.
  """
  relative = all(stack.relative for stack in config.stacks.values())
  if not config.architecture.encodes_prompt or not relative:
    raise errors.UserError(
      f'{folder} is a t5x checkpoint, and --model describes no encoder-decoder'
      ' with relative positions. Give the config.json of a T5, mT5 or UMT5;'
      ' other models of t5x are not supported.'
    )

  def differ(side: str) -> bool:
    name = f'{side}/{side}/{_BIAS}'
    if name not in arrays:
      return f'{side}/layers_0/{_BIAS}' in arrays
    tables = reader([name])[name]  # [N, layers, buckets]
    return not np.array_equal(
      tables, np.broadcast_to(tables[:, :1], tables.shape)
    )

  kind = 'relative_each' if any(map(differ, config.stacks)) else 'relative'
  tied = _HEAD not in arrays
  stacks = {}
  for side, stack in config.stacks.items():
    _, _, sizes = stack.positions.partition(':')
    fields = {'positions': f'{kind}:{sizes}'}
    if side == 'decoder':
      fields |= {'tied_head': tied, 'scaled_head': tied}
    stacks[side] = dataclasses.replace(stack, **fields)
  config = dataclasses.replace(config, **stacks)
  t5_json.raw_from_model(config)  # Refuses other blocks.
  return config


def _their_names(leaf: str, *, gated: bool) -> Iterator[tuple[str, int | None]]:
  """Yields names that the array of a leaf may have, each with a layer."""
  side, part, *inner = leaf.split('/')
  scanned = f'{side}/{side}/'
  if part == 'layers':
    number, module, *inner = inner
    name = _BIAS
    if inner != ['relative_bias']:
      name = f'{(_DECODER if side == "decoder" else _ENCODER)[module]}/'
      name += _inner_name(inner[0], gated=gated)
    yield f'{side}/layers_{number}/{name}', None
    yield scanned + name, int(number)
  elif part == 'relative_bias':
    yield f'{side}/{_BIAS}', None
    yield scanned + _BIAS, 0
  elif part == 'final_norm':
    yield f'{side}/{side}_norm/scale', None
  else:
    yield (_HEAD if part == 'head' else _TABLE), None


def _inner_name(name: str, *, gated: bool) -> str:
  """Returns the name of an array in its module."""
  if name == 'scale':
    return name
  names = {'output': 'out', 'gate': 'wi_0', 'down': 'wo'}
  names['up'] = 'wi_1' if gated else 'wi'
  return f'{names.get(name, name)}/kernel'
