"""Files for loading an embedding model with `sentence_transformers`.

Besides config.json and weights, read by its Transformer module: a folder each
for the modules for pooling, projections and normalisation, and the prompts.
Names and fields are from sentence-transformers 6.2.
"""

from collections.abc import Mapping

import numpy as np
from safetensors import numpy as safetensors
import tokenizers

from encdec_adapt.files import atomic
from encdec_adapt.models import model_config
from encdec_adapt.tokenizers import tokenizer_writer
from encdec_adapt.tokenizers import vocabulary as vocabulary_lib

_PROCESSOR = 'processor_config.json'
PROMPTS = 'config_sentence_transformers.json'
MODULES = 'modules.json'
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
  pooling = {f'pooling_mode_{x}': False for x in _POOLING.values()}
  pooling |= {f'pooling_mode_{_POOLING[head.pooling]}': True}
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
    file = f'{path}/config.json' if i else 'sentence_bert_config.json'
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


def framed(content: bytes, vocabulary: vocabulary_lib.Vocabulary) -> bytes:
  """Returns a tokenizer.json that frames each text as an encoder input."""
  tokenizer = tokenizers.Tokenizer.from_str(content.decode())
  tokenizer.post_processor = tokenizer_writer.template(vocabulary)
  return tokenizer.to_str(pretty=True).encode()
