"""Tensors of a vision part: a SigLIP tower and the projector behind it.

Names and shapes are those of transformers 5.23 (`modeling_siglip.py`,
`modeling_gemma3.py`), without the part of a name before `vision_tower`.
"""

from collections.abc import Mapping
from typing import Any

from encdec_adapt.cli import errors
from encdec_adapt.huggingface import raw_fields

PROJECTION = 'multi_modal_projector.mm_input_projection_weight'
NORM = 'multi_modal_projector.mm_soft_emb_norm.weight'
MODEL_TYPE = 'siglip_vision_model'
_TOWER = 'vision_tower.'
_OLD = f'{_TOWER}vision_model.'  # transformers 4.
# Defaults of `SiglipVisionConfig`.
DEFAULTS: Mapping[str, Any] = {
  'hidden_size': 768,
  'intermediate_size': 3072,
  'num_hidden_layers': 12,
  'num_channels': 3,
  'image_size': 224,
  'patch_size': 16,
  'vision_use_head': True,
}

Shapes = dict[str, tuple[int, ...]]


def canonical(name: str) -> str:
  """Returns a tensor's name as transformers 5 spells it.

  Args:
    name: tensor name with `vision_model.` (transformers 4) or without (5).
  """
  if name.startswith(_OLD):
    return _TOWER + name.removeprefix(_OLD)
  return name


def shapes(raw: Mapping[str, Any], width: int, file: str) -> Shapes:
  """Returns the shape of every tensor of a vision part by canonical name.

  Args:
    raw: `vision_config` of a config.json.
    width: width of the text part, to which images are projected.
    file: name of the config.json, for error messages.

  Raises:
    UserError: the tower is of another kind, has a pooling head (no Gemma 3 or
      T5Gemma 2 was released with one) or a field that no tower has.
  """
  where = f'vision_config of {file}'
  raw_fields.check(raw, where)
  config = {**DEFAULTS, **raw}
  kind = raw.get('model_type', MODEL_TYPE)
  if kind != MODEL_TYPE or config['vision_use_head'] is not False:
    raise errors.UserError(
      f'{where} has model_type = {kind!r} and vision_use_head ='
      f' {config["vision_use_head"]!r}; only a {MODEL_TYPE} without a head can'
      ' be kept for export.'
    )
  own, inner = config['hidden_size'], config['intermediate_size']
  patch = config['patch_size']
  found: Shapes = {
    'embeddings.patch_embedding.weight': (
      (own, config['num_channels'], patch, patch)
    ),
    'embeddings.patch_embedding.bias': (own,),
    'embeddings.position_embedding.weight': (
      ((config['image_size'] // patch) ** 2, own)
    ),
  }
  modules: Shapes = {'post_layernorm': (own,)}
  for i in range(config['num_hidden_layers']):
    layer = f'encoder.layers.{i}.'
    for norm in ('layer_norm1', 'layer_norm2'):
      modules[layer + norm] = (own,)
    for name in ('q_proj', 'k_proj', 'v_proj', 'out_proj'):
      modules[f'{layer}self_attn.{name}'] = (own, own)
    modules[f'{layer}mlp.fc1'] = (inner, own)
    modules[f'{layer}mlp.fc2'] = (own, inner)
  for name, shape in modules.items():
    found |= {f'{name}.weight': shape, f'{name}.bias': shape[:1]}
  found = {_TOWER + name: shape for name, shape in found.items()}
  return {**found, PROJECTION: (own, width), NORM: (own,)}
