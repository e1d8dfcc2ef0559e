"""Files of an embedding model for `sentence_transformers`.

Besides config.json and weights, read by its Transformer module: a folder each
for the modules for pooling, projections and normalisation, and the prompts.
Names and fields are from sentence-transformers 6.2.
"""

from collections.abc import Mapping
import json

import numpy as np
from safetensors import numpy as safetensors
import tokenizers

from encdec_adapt.base import errors
from encdec_adapt.files import atomic, paths
from encdec_adapt.models import heads, model_config
from encdec_adapt.tokenizers import tokenizer_writer
from encdec_adapt.tokenizers import vocabulary as vocabulary_lib

_PROCESSOR = 'processor_config.json'
PROMPTS = 'config_sentence_transformers.json'
MODULES = 'modules.json'
POOLING = '1_Pooling/config.json'
TRANSFORMER = 'sentence_bert_config.json'
_MODE = 'pooling_mode_'
_PLAIN = ['Transformer', 'Pooling', 'Normalize']
_CLASSES = 'sentence_transformers.models.'
_POOLING = {'mean': 'mean_tokens', 'first': 'cls_token', 'last': 'lasttoken'}


def files(
  stack: model_config.StackConfig,
  params: Mapping[str, np.ndarray],
  prompts: Mapping[str, str],
  room: int | None,
) -> dict[str, bytes]:
  """Returns the files, name in the folder -> content.

  Args:
    stack: the stack.
    params: path -> parameter, including the projections.
    prompts: prefixes of queries and documents.
    room: maximum tokens of a text; None for the limit of config.json.
  """
  head, content = stack.head, {}
  width = stack.width
  pooling = {f'{_MODE}{x}': False for x in _POOLING.values()}
  pooling |= {f'{_MODE}{_POOLING[head.pooling]}': True}
  limit = {'max_seq_length': room} if room else {}
  parts = [
    ('Transformer', limit),
    ('Pooling', {'word_embedding_dimension': width, **pooling}),
  ]
  for i, size in enumerate(head.projections):
    kernel = np.asarray(params[f'decoder/embedding/projection_{i}'], np.float32)
    weight = {'linear.weight': np.ascontiguousarray(kernel.T)}
    content[f'{i + 2}_Dense/model.safetensors'] = safetensors.save(weight)
    identity = 'torch.nn.modules.linear.Identity'
    fields = {'in_features': width, 'out_features': size, 'bias': False}
    parts.append(('Dense', {**fields, 'activation_function': identity}))
    width = size
  parts.append(('Normalize', {}))
  modules = []
  for i, (name, fields) in enumerate(parts):
    # The first module is at the top of the folder, with config.json.
    path = f'{i}_{name}' if i else ''
    file = f'{path}/config.json' if i else TRANSFORMER
    content[file] = atomic.json_bytes(fields)
    module = {'idx': i, 'name': str(i), 'path': path}
    modules.append({**module, 'type': f'{_CLASSES}{name}'})
  content[MODULES] = atomic.json_bytes(modules)
  # Overrides other files and the class default, an image processor, for which
  # the folder may have no files.
  content[_PROCESSOR] = atomic.json_bytes({'processor_class': 'AutoTokenizer'})
  content[PROMPTS] = atomic.json_bytes(
    {'prompts': dict(prompts), 'similarity_fn_name': 'cosine'}
  )
  return content


def read_head(folder: paths.Path) -> heads.Embedding | None:
  """Returns the head of a folder: a pooling, and normalised vectors.

  Args:
    folder: the folder.

  Returns:
    None for a folder without modules.json, with modules besides
    Transformer, Pooling and Normalize, with a pooling that is not one of ours,
    or if it lowers the case of texts.

  Raises:
    UserError: a file is damaged.
  """
  if not (folder / MODULES).exists():
    return None
  try:
    modules = json.loads((folder / MODULES).read_text())
    kinds = [module['type'].rpartition('.')[2] for module in modules]
  except (ValueError, TypeError, KeyError, AttributeError) as error:
    raise atomic.damaged(folder / MODULES, str(error)) from error
  if kinds != _PLAIN:
    return None
  fields, file = atomic.read_json(folder / POOLING), folder / TRANSFORMER
  transformer = atomic.read_json(file) if file.exists() else {}
  # From version 6 a field names the pooling; before, each had a field.
  modes = {fields.get('pooling_mode', '')} | {
    x.removeprefix(_MODE)
    for x, used in fields.items()
    if x.startswith(_MODE) and used
  }
  modes.discard('')
  names = {name: ours for ours, x in _POOLING.items() for name in (x, ours)}
  names['cls'] = 'first'
  poolings = {names.get(mode) for mode in modes}
  if (
    len(poolings) != 1
    or None in poolings
    or not fields.get('include_prompt', True)
    or transformer.get('do_lower_case')
  ):
    return None
  sizes = atomic.read_json(folder / 'config.json').get('matryoshka_dimensions')
  return heads.Embedding(*poolings, dimensions=tuple(sizes or ())[1:])


def read_room(folder: paths.Path) -> int | None:
  """Returns the most tokens of a text that its files allow, or None.

  Raises:
    UserError: the file is damaged, or the number is none.
  """
  file = folder / TRANSFORMER
  room = atomic.read_json(file).get('max_seq_length') if file.exists() else None
  if room is not None and (type(room) is not int or room < 1):
    raise errors.UserError(
      f'{file} has max_seq_length = {room!r}; it must be an integer above 0.'
    )
  return room


def framed(content: bytes, vocabulary: vocabulary_lib.Vocabulary) -> bytes:
  """Returns a tokenizer.json that frames each text as an encoder input."""
  tokenizer = tokenizers.Tokenizer.from_str(content.decode())
  tokenizer.post_processor = tokenizer_writer.template(vocabulary)
  return tokenizer.to_str(pretty=True).encode()
