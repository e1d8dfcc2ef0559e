"""Reads and writes PEFT adapter folders.

PEFT names tensors by a model's modules in memory, and stores A [r, in] and
B [out, r] per layer. Fully trained parameters are its `modules_to_save`. Our
adapters have one rank and one scale: with `rank_pattern` or `alpha_pattern`,
all are padded with zeros to the largest rank, and B is multiplied by the ratio
of the scales. Layers missing from `layers_to_transform` are zeros.
"""

from collections.abc import Callable, Iterator, Mapping
import re
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy

from encdec_adapt.base import errors
from encdec_adapt.files import atomic, lazy_array, paths
from encdec_adapt.huggingface import tensor_folder, weights
from encdec_adapt.models import adapters as adapters_lib
from encdec_adapt.models import heads, layer_leaves, model_config

CONFIG, WEIGHTS = 'adapter_config.json', 'adapter_model.safetensors'
_PREFIX = 'base_model.model.'
_SUFFIXES = {
  '.lora_A.weight': adapters_lib.A,
  '.lora_B.weight': adapters_lib.B,
}
# PEFT options that change the function -> values that do not. Other options may
# have any value.
_NEUTRAL = {
  'peft_type': ('LORA',),
  'bias': ('none',),
  'init_lora_weights': (True, False, None, 'gaussian', 'eva', 'orthogonal'),
} | dict.fromkeys(
  'use_dora fan_in_fan_out lora_bias use_qalora layer_replication'
  ' target_parameters trainable_token_indices'
  ' alora_invocation_tokens'.split(),
  (None, False, [], {}),
)


class _Slot(NamedTuple):
  """Our counterpart of a PEFT tensor.

  Attributes:
    path: path of our parameter.
    index: index of the layer; () without an axis of layers.
    shape: shape of the tensor.
    to_theirs: converts our layer to the tensor.
    to_ours: the inverse.
  """

  path: str
  index: tuple[int, ...]
  shape: tuple[int, ...]
  to_theirs: Callable[[np.ndarray], np.ndarray]
  to_ours: Callable[[np.ndarray], np.ndarray]


def files(
  adapters: adapters_lib.Adapters,
  arrays: Mapping[str, lazy_array.LazyArray],
  layout: weights.Layout,
  base: str,
) -> dict[str, bytes]:
  """Returns the files of a PEFT adapter folder, by name.

  Args:
    adapters: the adapters.
    arrays: path -> trained parameter.
    layout: names of the model's tensors.
    base: name or path of the base model for PEFT.

  Raises:
    UserError: PEFT would compute another function.
  """
  if layout.inputs_first or adapters.model.decoder.head.layer:
    raise errors.UserError(
      'PEFT folders of GPT-2, of masked language models and of their'
      ' classifiers are not written; export the merged model.'
    )
  options, tensors = adapters.options, {}
  modules = {True: set(), False: set()}  # By whether they are fully trained.
  for name, slot in _slots(adapters, layout).items():
    ours = np.asarray(arrays[slot.path][slot.index])
    tensors[_PREFIX + name] = np.ascontiguousarray(slot.to_theirs(ours))
    module = name.rpartition('.')[0].removesuffix('.lora_A')
    modules[slot.path in adapters.full].add(module.removesuffix('.lora_B'))
  model, stack = adapters.model, adapters.model.decoder
  task = 'SEQ_CLS' if heads.classifies(stack.head) else 'CAUSAL_LM'
  if model.architecture.encodes_prompt:
    task = 'SEQ_2_SEQ_LM'
  elif model.architecture.is_encoder:
    task = 'FEATURE_EXTRACTION'  # `T5EncoderModel`.
  config = {
    'peft_type': 'LORA',
    'task_type': task,
    'base_model_name_or_path': base,
    'r': options.rank,
    'lora_alpha': options.numerator,
    'lora_dropout': options.dropout,
    'use_rslora': options.rslora,
    'target_modules': sorted(modules[False]),
    'modules_to_save': sorted(modules[True]) or None,
    'inference_mode': True,
  }
  content = safetensors.numpy.save(tensors, metadata={'format': 'pt'})
  return {CONFIG: atomic.json_bytes(config), WEIGHTS: content}


def read(
  folder: paths.Path, model: model_config.ModelConfig, layout: weights.Layout
) -> tuple[adapters_lib.Adapters, dict[str, np.ndarray]]:
  """Reads a PEFT adapter folder.

  Args:
    folder: folder with `CONFIG` and `WEIGHTS`.
    model: the base model.
    layout: names of its tensors.

  Returns:
    The adapters, and path -> parameter in the stored dtype.

  Raises:
    UserError: an option is unsupported, `WEIGHTS` is missing or has values that
      are not finite, or the adapters belong to another model.
  """
  config = atomic.read_json(folder / CONFIG)
  for name, neutral in _NEUTRAL.items():
    if (value := config.get(name, neutral[0])) not in neutral:
      raise errors.UserError(
        f'{folder / CONFIG} has {name} {value!r}, which has no counterpart'
        ' here; merge such adapters with PEFT, and import the merged model.'
      )
  if not (folder / WEIGHTS).exists():
    raise errors.UserError(
      f'{folder} has no {WEIGHTS}, only {CONFIG}; save the adapters again with'
      ' save_pretrained, or download that file.'
    )
  stored = tensor_folder.TensorFolder(folder, WEIGHTS)
  tensors = {x.removeprefix(_PREFIX): stored.read(x) for x in stored.tensors}
  if float(config['lora_alpha']) <= 0:
    raise errors.UserError(
      f'{folder / CONFIG}: lora_alpha is {config["lora_alpha"]}, with which'
      ' adapters have no effect; it must be above 0.'
    )
  rank, tensors = _with_one_rank(config, tensors)
  tensors = {layout.canonical(x): tensor for x, tensor in tensors.items()}
  targets, full = _targets(tensors, model, layout, folder)
  power = 0.5 if config.get('use_rslora') else 1
  layers = config.get('layers_to_transform')
  layers = [] if layers is None else np.ravel(layers)
  options = adapters_lib.Options(
    rank,
    config['lora_alpha'] * (rank / config['r']) ** power,
    tuple(sorted(targets)),
    tuple(sorted(full)),
    config.get('lora_dropout') or 0.0,
    bool(config.get('use_rslora')),
  )
  adapters = adapters_lib.Adapters(model, options)
  arrays: dict[str, np.ndarray] = {}
  for name, slot in _slots(adapters, layout).items():
    name = layout.canonical(name)
    number = re.search(r'\.(\d+)\.', name)
    if number and len(layers) and int(number[1]) not in layers:
      tensors.setdefault(name, np.zeros(slot.shape, np.float32))
    shape = tensors[name].shape if name in tensors else 'absent'
    if shape != slot.shape:
      raise errors.UserError(
        f'{folder / WEIGHTS}: {name} is {shape}, and must be {slot.shape} in'
        ' every layer of layers_to_transform: the adapters are of another'
        ' model, or of some layers only. Merge those with PEFT, and import the'
        ' merged model.'
      )
    tensor_folder.check_finite(name, tensors[name], folder / WEIGHTS)
    ours, info = slot.to_ours(tensors[name]), adapters.table[slot.path]
    arrays.setdefault(slot.path, np.zeros(info.shape, ours.dtype))
    # Rows that pad a table stay zero.
    arrays[slot.path][slot.index][: len(ours)] = ours
  return adapters, arrays


def _with_one_rank(
  config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
) -> tuple[int, dict[str, np.ndarray]]:
  """Pads all adapters to the largest rank, and rescales B to one scale.

  Args:
    config: content of `CONFIG`.
    tensors: tensors by name in memory.

  Returns:
    The rank, and the tensors. A tensor with another rank than in `config` gets
    a wrong shape, which `read` refuses.
  """

  def value(name: str, key: str, patterns: str) -> float:
    module = name.partition('.lora_')[0]
    entries = (config.get(patterns) or {}).items()
    # The first match wins, as in peft.utils.other.get_pattern_key.
    matches = (x for k, x in entries if re.match(rf'(.*\.)?({k})$', module))
    return next(matches, config[key])

  power = 0.5 if config.get('use_rslora') else 1
  ranks = {x: value(x, 'r', 'rank_pattern') for x in tensors if '.lora_' in x}
  rank, uniform = max(ranks.values(), default=config['r']), dict(tensors)
  for name, rows in ranks.items():
    is_b = '.lora_B.' in name
    widths = [(0, (rank - rows) * (axis == is_b)) for axis in range(2)]
    uniform[name] = np.pad(tensors[name], widths)
    if is_b and (config.get('rank_pattern') or config.get('alpha_pattern')):
      factor = value(name, 'lora_alpha', 'alpha_pattern') / config['lora_alpha']
      factor *= (config['r'] / rows) ** power
      uniform[name] = uniform[name] * np.float32(factor)
  return rank, uniform


def _weights(
  model: model_config.ModelConfig, layout: weights.Layout
) -> Iterator[tuple[weights.Weight, layer_leaves.Leaf]]:
  leaves = layer_leaves.leaves_of(model)
  for weight in weights.weights(model, layout).values():
    is_module = layout.written(weight.name) == weight.name
    if weight.part is None and is_module:
      yield weight, leaves[weight.leaf]


def _slots(
  adapters: adapters_lib.Adapters, layout: weights.Layout
) -> dict[str, _Slot]:
  slots = {}
  for weight, leaf in _weights(adapters.model, layout):
    name = layout.in_memory(weight.name)
    index = () if leaf.index is None else (leaf.index,)
    # PEFT would change the embeddings but not a tied head.
    if leaf.path.split('/')[1] == 'embedder':
      continue
    if leaf.path in adapters.full:
      slot = leaf.path, index, weight.their_shape
      slots[name] = _Slot(*slot, weight.to_theirs, weight.to_ours)
    elif leaf.path in adapters.kernels:
      rank, (outputs, inputs) = adapters.options.rank, weight.their_shape
      sizes = {adapters_lib.A: (rank, inputs), adapters_lib.B: (outputs, rank)}
      for suffix, ours in _SUFFIXES.items():
        path, shape = f'{leaf.path}/{ours}', sizes[ours]
        layer = adapters.table[path].shape[len(index) :]
        slots[name.removesuffix('.weight') + suffix] = _Slot(
          path,
          index,
          shape,
          lambda x, shape=shape: x.reshape(shape[::-1]).T,
          lambda x, layer=layer: x.T.reshape(layer),
        )
  if missing := adapters.table.keys() - {slot.path for slot in slots.values()}:
    raise errors.UserError(
      f'{min(missing)} has no module of its own in transformers, or is a table'
      ' of tokens, so that PEFT cannot hold it; export the merged model.'
    )
  return slots


def _targets(
  tensors: Mapping[str, np.ndarray],
  model: model_config.ModelConfig,
  layout: weights.Layout,
  folder: paths.Path,
) -> tuple[set[str], set[str]]:
  leaves = {weight.name: leaf.path for weight, leaf in _weights(model, layout)}
  targets, full, is_tied = set(), set(), not model.decoder.head.module
  for name in tensors:
    suffix = next(filter(name.endswith, _SUFFIXES), '')
    module = name.removesuffix(suffix) + ('.weight' if suffix else '')
    if module not in leaves or leaves[module].split('/')[1] == 'embedder':
      cause = 'belongs to no module of the base that can have adapters here;'
      cause += ' the adapters are of another model'
      tables = 'embed_tokens', *layout.embedder.values()
      if any(x in name for x in tables) or (is_tied and 'lm_head' in name):
        cause = 'is of the embeddings, or of a head that is tied to them, and'
        cause += ' PEFT changes one without the other; leave out both'
      elif '.base_layer.' in name:
        cause = 'is a copy of the base; save the adapters with'
        cause += ' save_embedding_layers=False'
      raise errors.UserError(f'{folder / WEIGHTS}: {name} {cause}.')
    (targets if suffix else full).add(adapters_lib.name_of(leaves[module]))
  return targets, full
