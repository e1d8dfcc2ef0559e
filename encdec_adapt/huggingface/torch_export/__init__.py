"""Torch code for `transformers` in exports with our layout.

`modeling_encdec_adapt.py` implements pairs of any families from their
config.json. It imports nothing of the package, and no module imports it. This
module has only names and file contents.
"""

import pathlib
from typing import Any

from encdec_adapt.models import heads, model_config

_CONFIGURATION = 'configuration_encdec_adapt'
_MODELING = 'modeling_encdec_adapt'
ARCHITECTURE = 'EncDecAdaptForConditionalGeneration'
# Fields of config.json that point `transformers` to the code.
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


_SCALED = [heads.Tokens(tied, scaled=True) for tied in (True, False)]
# Fields by supported kinds of model and head.
_CODE = {('encoder_decoder', 'tokens'): FIELDS} | {
  (kind, 'embedding'): _EMBEDDER for kind in heads.Embedding.models
}


def _kinds(model: model_config.ModelConfig) -> tuple[str, str]:
  return model.architecture.name, model.decoder.head.kind


# Fields that the code does not read, and the value that it computes.
_PLAIN = {
  'norm': 'rms',
  'norms_after_sum': False,
  'embedding_norm': False,
  'first_norm': True,
  'token_types': 0,
}


def fields(model: model_config.ModelConfig) -> dict[str, Any]:
  """Returns fields of config.json that point `transformers` to the code."""
  return _CODE[_kinds(model)]


def problem(model: model_config.ModelConfig) -> str:
  """Returns why the code does not support a model; '' if it does."""
  if _kinds(model) not in _CODE:
    kind, head = _kinds(model)
    return (
      'it has pairs that predict tokens and embedding models only, and this'
      f' model is {kind} with a head of {head}'
    )
  for name, stack in model.stacks.items():
    if stack.experts:
      return f'it has no experts, and the {name} has {stack.experts} in a layer'
    if stack.sharing_layers or stack.layer_input_width:
      return (
        'it has neither layers that share keys and values nor a second table,'
        f' and the {name} has'
      )
    for field, value in _PLAIN.items():
      if getattr(stack, field) != value:
        return (
          f'it supports only {field} {value!r}, and the {name} has'
          f' {getattr(stack, field)!r}'
        )
    if stack.positions.kind == 'learned' or stack.activation == 'gelu':
      return f'it has no parts of GPT-2 or BERT, and the {name} has some'
    is_scaled = model.decoder.head in _SCALED
    if stack.relative or not stack.mlp_gated or is_scaled:
      return f"it has no parts of T5's block, and the {name} has some"
  return ''


def files() -> dict[str, Any]:
  """Returns the files of the code: name in the export -> content."""
  folder = pathlib.Path(__file__).parent
  names = (f'{_CONFIGURATION}.py', f'{_MODELING}.py')
  return {name: (folder / name).read_bytes() for name in names}
