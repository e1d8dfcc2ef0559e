"""T5, mT5 and UMT5 as t5x (arXiv 2203.17189) stores them.

Source of names and shapes: google-research/t5x, `examples/t5` (minimal: a
kernel [in, out], layers numbered, a relative position bias for each stack) and
`examples/scalable_t5` (layers on axis 1, heads on axes of their own, a bias in
each layer).
"""

from collections.abc import Mapping
import dataclasses
import math

import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.huggingface import flax_folder, t5_json, tensor_folder
from encdec_adapt.models import model_config

_TABLE, _HEAD = 'token_embedder/embedding', 'decoder/logits_dense/kernel'
_BIAS = 'relpos_bias/rel_embedding'
# Our module -> theirs, in the decoder.
_MODULES = {
  'pre_attention_norm': 'pre_self_attention_layer_norm',
  'attention': 'self_attention',
  'pre_cross_norm': 'pre_cross_attention_layer_norm',
  'cross_attention': 'encoder_decoder_attention',
  'pre_mlp_norm': 'pre_mlp_layer_norm',
  'mlp': 'mlp',
}
# Our array in a module -> theirs; other kernels have our names.
_ARRAYS = {
  'scale': ('scale',),
  'output': ('out/kernel',),
  'gate': ('wi_0/kernel',),
  'up': ('wi_1/kernel', 'wi/kernel'),
  'down': ('wo/kernel',),
}


class T5xModel(flax_folder.FlaxModel):
  """A model in the layout of t5x, with every array matched.

  The index of an array is that of the layer on axis 1.
  """

  def _choices(self, leaf):
    side, part, *inner = leaf.split('/')
    if part != 'layers':
      scanned = f'{side}/{side}/{_BIAS}', 0
      return {
        'embedder': [(_TABLE, None)],
        'head': [(_HEAD, None)],
        'final_norm': [(f'{side}/{side}_norm/scale', None)],
        'relative_bias': [(f'{side}/{_BIAS}', None), scanned],
      }[part]
    layer, module, array = inner
    module = _MODULES[module]
    if side == 'encoder':
      module = module.replace('self_', '')
    names = [f'{module}/{x}' for x in _ARRAYS.get(array, (f'{array}/kernel',))]
    names = [_BIAS] if array == 'relative_bias' else names
    numbered = [(f'{side}/layers_{layer}/{name}', None) for name in names]
    return numbered + [(f'{side}/{side}/{name}', int(layer)) for name in names]

  def _fits(self, leaf, name, index):
    shape, ours = self._arrays[name][0], self._leaves[leaf].shape
    if leaf.endswith('/table'):
      table = (self._tokens(leaf), ours[1])
      return shape == (table[::-1] if name == _HEAD else table)
    if index is not None:
      side = leaf.split('/')[0]
      layers = self.config.stacks[side].layers
      if shape[1] != layers:
        raise errors.UserError(
          f'{self._folder}: {name} has {shape[1]} layers on axis 1, and the'
          f' {side} of --model {layers}. Give the config.json of this model.'
        )
      shape = (shape[0], *shape[2:])
    inputs = 2 if leaf.endswith('/output') else 1
    flat = math.prod(ours[:inputs]), math.prod(ours[inputs:])
    return shape == ours or (len(ours) == 3 and shape == flat)

  def _ours(self, leaf: str, stored: Mapping[str, np.ndarray]) -> np.ndarray:
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
  A stack has one bias, as in T5, unless those of the layers differ in one of
  the stacks, or layers have an array each.

  Args:
    config: config of the model.
    arrays: name -> stored shape and dtype.
    reader: reads arrays by name; reads the biases alone.
    folder: name of the folder, for error messages.

  Raises:
    UserError: the config is not that of a T5, mT5 or UMT5 with a decoder.
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
    return (tables != tables[:, :1]).any()

  kind = 'relative_each' if any(map(differ, config.stacks)) else 'relative'
  encoder, decoder = (
    dataclasses.replace(
      stack, positions=f'{kind}:{stack.positions.partition(":")[2]}'
    )
    for stack in config.stacks.values()
  )
  tied = _HEAD not in arrays
  decoder = dataclasses.replace(decoder, tied_head=tied, scaled_head=tied)
  config = dataclasses.replace(config, encoder=encoder, decoder=decoder)
  t5_json.raw_from_model(config)  # Refuses other blocks.
  return config
