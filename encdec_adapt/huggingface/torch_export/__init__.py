"""Torch code that an export in our layout carries for `transformers`.

`modeling_encdec_adapt.py` computes a pair of any families by its config.json;
nothing here imports it, and it imports nothing of the package. This module
holds names and file contents only.
"""

import pathlib
from typing import Any

from encdec_adapt.models import model_config

_CONFIGURATION = 'configuration_encdec_adapt'
_MODELING = 'modeling_encdec_adapt'
ARCHITECTURE = 'EncDecAdaptForConditionalGeneration'
# Fields of config.json by which `transformers` finds the code.
FIELDS = {
  'architectures': [ARCHITECTURE],
  'auto_map': {
    'AutoConfig': f'{_CONFIGURATION}.EncDecAdaptConfig',
    'AutoModelForSeq2SeqLM': f'{_MODELING}.{ARCHITECTURE}',
  },
  'is_encoder_decoder': True,
}
_EMBEDDER = {
  'architectures': ['EncDecAdaptModel'],
  'auto_map': {
    'AutoConfig': f'{_CONFIGURATION}.EncDecAdaptConfig',
    'AutoModel': f'{_MODELING}.EncDecAdaptModel',
  },
}


def fields(model: model_config.ModelConfig) -> dict[str, Any]:
  """Returns fields of config.json by which `transformers` finds the code."""
  return FIELDS if model.architecture.encodes_prompt else _EMBEDDER


def problem(model: model_config.ModelConfig) -> str:
  """Returns why the code cannot compute a model, '' if it can."""
  if not (model.architecture.encodes_prompt or model.decoder.embedding):
    kind = model.architecture.name
    return f'it has pairs and embedding models only, and this model is {kind}'
  if model.decoder.classes:
    return 'it has language models only, and this one is a reward model'
  for name, stack in model.stacks.items():
    if stack.experts:
      return f'it has no experts, and the {name} has {stack.experts} in a layer'
    if stack.relative or not stack.mlp_gated or stack.scaled_head:
      return f"it has no parts of T5's block, and the {name} has some"
  return ''


def files() -> dict[str, Any]:
  """Returns the files of the code, name in the export -> content."""
  folder = pathlib.Path(__file__).parent
  names = (f'{_CONFIGURATION}.py', f'{_MODELING}.py')
  return {name: (folder / name).read_bytes() for name in names}
