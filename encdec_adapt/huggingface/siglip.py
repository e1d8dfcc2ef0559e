"""The tensors of a vision part: a SigLIP tower and the projector behind it.

Names and shapes as transformers 5.23 has them (`modeling_siglip.py`,
`modeling_gemma3.py`), without what comes before `vision_tower`.
"""

from collections.abc import Mapping
from typing import Any

from encdec_adapt.cli import errors

PROJECTION = 'multi_modal_projector.mm_input_projection_weight'
NORM = 'multi_modal_projector.mm_soft_emb_norm.weight'
MODEL_TYPE = 'siglip_vision_model'
_TOWER = 'vision_tower.'
_OLD = f'{_TOWER}vision_model.'  # As transformers 4 wrote it.
# What the class takes where a file is silent.
DEFAULTS: Mapping[str, Any] = {
  'hidden_size': 768,
  'intermediate_size': 3072,
  'num_hidden_layers': 12,
  'num_channels': 3,
  'image_size': 224,
  'patch_size': 16,
  'vision_use_head': True,
}
_MOST_LAYERS = 1000

Shapes = dict[str, tuple[int, ...]]


def canonical(name: str) -> str:
  """The name of a tensor here.

  Args:
    name: with `vision_model.` (transformers 4) or without (5).

  Returns:
    The one without.
  """
  if name.startswith(_OLD):
    return _TOWER + name.removeprefix(_OLD)
  return name


def shapes(raw: Mapping[str, Any], width: int, file: str) -> Shapes:
  """Every tensor of a vision part.

  Args:
    raw: `vision_config` of a config.json.
    width: of the text part, to which images are projected.
    file: what errors call the config.json.

  Returns:
    Canonical name -> shape.

  Raises:
    UserError: a field has a value that no tower has.
  """
  config = _checked(raw, f'vision_config of {file}')
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
    **_norm('post_layernorm', own),
  }
  for i in range(config['num_hidden_layers']):
    layer = f'encoder.layers.{i}'
    for norm in ('layer_norm1', 'layer_norm2'):
      found |= _norm(f'{layer}.{norm}', own)
    for name in ('q_proj', 'k_proj', 'v_proj', 'out_proj'):
      found |= _dense(f'{layer}.self_attn.{name}', own, own)
    found |= _mlp(layer, own, inner)
  if config['vision_use_head']:
    found |= _head(own, inner)
  found = {_TOWER + name: shape for name, shape in found.items()}
  return {**found, PROJECTION: (own, width), NORM: (own,)}


def _checked(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
  """Its fields with the defaults of the class."""
  if raw.get('model_type', MODEL_TYPE) != MODEL_TYPE:
    raise errors.UserError(
      f'{where} has model_type = {raw["model_type"]!r}; the vision part that'
      f' is kept for export is a {MODEL_TYPE}. Give a folder that has one.'
    )
  config = {key: raw.get(key, default) for key, default in DEFAULTS.items()}
  for key, value in config.items():
    if key == 'vision_use_head':
      fits, wanted = isinstance(value, bool), 'true or false'
    else:
      most = _MOST_LAYERS if key == 'num_hidden_layers' else 2**31 - 1
      fits = type(value) is int and 1 <= value <= most
      wanted = f'an integer from 1 to {most}'
    if not fits:
      raise errors.UserError(
        f'{where} has {key} = {value!r}; it must be {wanted}.'
      )
  return config


def _norm(name: str, width: int) -> Shapes:
  return {f'{name}.weight': (width,), f'{name}.bias': (width,)}


def _dense(name: str, inputs: int, outputs: int) -> Shapes:
  return {f'{name}.weight': (outputs, inputs), f'{name}.bias': (outputs,)}


def _mlp(name: str, width: int, inner: int) -> Shapes:
  return {
    **_dense(f'{name}.mlp.fc1', width, inner),
    **_dense(f'{name}.mlp.fc2', inner, width),
  }


def _head(width: int, inner: int) -> Shapes:
  """The pooling head, which neither Gemma 3 nor T5Gemma 2 was released with."""
  return {
    'head.probe': (1, 1, width),
    'head.attention.in_proj_weight': (3 * width, width),
    'head.attention.in_proj_bias': (3 * width,),
    **_dense('head.attention.out_proj', width, width),
    **_norm('head.layernorm', width),
    **_mlp('head', width, inner),
  }
