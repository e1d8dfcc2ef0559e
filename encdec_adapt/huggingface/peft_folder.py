"""Folders of adapters as PEFT writes and reads them.

PEFT names tensors by the modules of a model in memory, and stores every layer
apart: A [r, in] and B [out, r] of a projection, and the transposes of ours
for a table. Parameters that train whole are its `modules_to_save`.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import json
import re
from typing import Any

import numpy as np
import safetensors.numpy

from encdec_adapt.base import errors
from encdec_adapt.files import atomic, lazy_array, paths
from encdec_adapt.huggingface import tensor_folder, weights
from encdec_adapt.models import adapters as adapters_lib
from encdec_adapt.models import layer_leaves, model_config

CONFIG, WEIGHTS = 'adapter_config.json', 'adapter_model.safetensors'
_PREFIX = 'base_model.model.'
# PEFT's names of A and B: of linear modules, and of embeddings, of which A is
# what multiplies tokens, too.
_LINEAR = {'lora_A.weight': adapters_lib.A, 'lora_B.weight': adapters_lib.B}
_TABLE = {
  'lora_embedding_A': adapters_lib.A,
  'lora_embedding_B': adapters_lib.B,
}
# Some writers keep the name of the adapter in those of tensors.
_TENSOR = re.compile(
  r'(.+)\.(lora_[AB]|lora_embedding_[AB])(?:\.default)?(\.weight)?'
)
# Options of PEFT that change the function, with values that do not.
_NEUTRAL = {
  'peft_type': ('LORA',),
  'bias': ('none',),
  'init_lora_weights': (True, False, None, 'gaussian', 'eva', 'orthogonal'),
  **dict.fromkeys(
    (
      *('use_dora', 'fan_in_fan_out', 'lora_bias', 'use_qalora'),
      *('layers_to_transform', 'layers_pattern', 'layer_replication'),
      *('rank_pattern', 'alpha_pattern', 'target_parameters'),
      *('trainable_token_indices', 'alora_invocation_tokens'),
    ),
    (None, False, [], {}),
  ),
}


@dataclasses.dataclass(frozen=True)
class _Slot:
  """Where a tensor of PEFT is among our parameters.

  Attributes:
    path: path of our parameter.
    index: layer in it; None where it has no axis of layers.
    shape: shape of a layer.
    inputs: leading dimensions that are the tensor's columns; 0 for a tensor
      that is stored as the weight says.
    rows: rows of a table that are tokens; None for all rows.
    weight: the tensor of the model that a whole parameter is.
  """

  path: str
  index: int | None
  shape: tuple[int, ...]
  inputs: int = 0
  rows: int | None = None
  weight: weights.Weight | None = None

  def to_theirs(self, ours: np.ndarray) -> np.ndarray:
    """Returns PEFT's tensor."""
    if self.weight:
      return self.weight.to_theirs(ours)
    rows = int(np.prod(self.shape[: self.inputs]))
    return ours.reshape(rows, -1)[: self.rows].T

  def to_ours(self, theirs: np.ndarray) -> np.ndarray:
    """Returns a layer of our parameter."""
    ours = self.weight.to_ours(theirs) if self.weight else theirs.T
    if self.rows is None:
      return ours.reshape(self.shape)
    # Rows that pad the table.
    return np.pad(ours, [(0, self.shape[0] - len(ours)), (0, 0)])


def files(
  adapters: adapters_lib.Adapters,
  arrays: Mapping[str, lazy_array.LazyArray],
  layout: weights.Layout,
  base: str,
) -> dict[str, bytes]:
  """Returns the files of a folder that PEFT loads.

  Args:
    adapters: the adapters.
    arrays: path -> trained parameter.
    layout: names of the model's tensors.
    base: name or path of the base for PEFT.

  Raises:
    UserError: PEFT would compute another function.
  """
  options, model = adapters.options, adapters.model
  tied = model.decoder.tied_head
  tables = [x for x in adapters.table if x.split('/')[1] == 'embedder']
  if tables and tied:
    raise errors.UserError(
      f'the adapters have {tables[0]}, and the head is tied to that table: PEFT'
      ' would change the embeddings and not the head. Export the merged model'
      ' (`convert export` without --layout=peft).'
    )
  tensors, modules, whole = {}, set(), set()
  for name, slot in _slots(adapters, layout).items():
    module = name.removeprefix(_PREFIX).rpartition('.')[0]
    (whole if slot.weight else modules).add(module.removesuffix('.lora_A'))
    ours = arrays[slot.path]
    ours = np.asarray(ours if slot.index is None else ours[slot.index])
    tensors[name] = np.ascontiguousarray(slot.to_theirs(ours))
  modules = {x.removesuffix('.lora_B') for x in modules}
  is_pair = model.architecture.encodes_prompt
  alpha = options.alpha or 2.0 * options.rank
  config = {
    'peft_type': 'LORA',
    'task_type': 'SEQ_2_SEQ_LM' if is_pair else 'CAUSAL_LM',
    'base_model_name_or_path': base,
    'r': options.rank,
    'lora_alpha': int(alpha) if alpha == int(alpha) else alpha,
    'lora_dropout': options.dropout,
    'use_rslora': bool(options.rslora),
    'target_modules': sorted(modules),
    'modules_to_save': sorted(whole) or None,
    'bias': 'none',
    'inference_mode': True,
  }
  content = safetensors.numpy.save(tensors, metadata={'format': 'pt'})
  return {
    CONFIG: (json.dumps(config, indent=2) + '\n').encode(),
    WEIGHTS: content,
  }


def read(
  folder: paths.Path, model: model_config.ModelConfig, layout: weights.Layout
) -> tuple[adapters_lib.Adapters, dict[str, np.ndarray]]:
  """Reads a folder that PEFT wrote.

  Args:
    folder: folder with `CONFIG` and `WEIGHTS`.
    model: the base.
    layout: names of its tensors.

  Returns:
    The adapters, and path -> parameter in the dtype that is stored.

  Raises:
    UserError: it has options or tensors that we do not have, or is of another
      model.
  """
  config = atomic.read_json(folder / CONFIG)
  for name, neutral in _NEUTRAL.items():
    if (value := config.get(name, neutral[0])) not in neutral:
      raise errors.UserError(
        f'{folder / CONFIG} has {name} {value!r}, which has no counterpart'
        ' here; merge such adapters with PEFT, and import the merged model.'
      )
  with paths.open_to_read(folder / WEIGHTS) as file:
    tensors = safetensors.numpy.load(file.read())
  tensors = {_canonical(name, layout): x for name, x in tensors.items()}
  targets, full = _targets(tensors, model, layout, folder)
  options = adapters_lib.Options(
    rank=config['r'],
    alpha=float(config['lora_alpha']),
    targets='+'.join(sorted(targets)),
    full='+'.join(sorted(full)),
    dropout=config.get('lora_dropout') or 0.0,
    rslora=int(config.get('use_rslora') or 0),
  )
  adapters = adapters_lib.Adapters(model, options)
  slots = {
    _canonical(name, layout): slot
    for name, slot in _slots(adapters, layout).items()
  }
  if missing := sorted(slots.keys() - tensors.keys()):
    raise errors.UserError(
      f'{folder} has no tensor {missing[0]}: adapters of some layers only have'
      ' no counterpart here. Merge them with PEFT, and import the result.'
    )
  arrays: dict[str, np.ndarray] = {}
  for name, slot in slots.items():
    tensor = tensors[name]
    wanted = slot.to_theirs(np.empty(slot.shape, np.int8)).shape
    if tensor.shape != wanted:
      raise errors.UserError(
        f'{folder / WEIGHTS}: {name} has shape {[*tensor.shape]}, and the base'
        f' requires {[*wanted]}; the adapters are of another model.'
      )
    tensor_folder.check_finite(name, tensor, folder / WEIGHTS)
    ours = slot.to_ours(tensor)
    if slot.index is None:
      arrays[slot.path] = ours
      continue
    shape = adapters.table[slot.path].shape
    arrays.setdefault(slot.path, np.empty(shape, tensor.dtype))
    arrays[slot.path][slot.index] = ours
  return adapters, arrays


def _canonical(name: str, layout: weights.Layout) -> str:
  """Returns a tensor's name with the canonical name of its module."""
  name = layout.canonical(name.removeprefix(_PREFIX))
  if match := _TENSOR.fullmatch(name):
    name = f'{match[1]}.{match[2]}{match[3] or ""}'
  return name


def _weights(
  model: model_config.ModelConfig, layout: weights.Layout
) -> Iterator[tuple[weights.Weight, layer_leaves.Leaf]]:
  """Yields every tensor of a model that is a whole leaf."""
  leaves = layer_leaves.leaves_of(model)
  for weight in weights.weights(model, layout).values():
    if weight.part is None:
      yield weight, leaves[weight.leaf]


def _slots(
  adapters: adapters_lib.Adapters, layout: weights.Layout
) -> dict[str, _Slot]:
  """Returns PEFT's name of every tensor -> where it is."""
  slots = {}
  for weight, leaf in _weights(adapters.model, layout):
    name = _PREFIX + layout.in_memory(weight.name)
    if leaf.path in adapters.full:
      slots[name] = _Slot(
        leaf.path, leaf.index, leaf.shape, rows=weight.rows, weight=weight
      )
    elif leaf.path in adapters.kernels:
      kinds = _LINEAR if weight.rows is None else _TABLE
      for theirs, ours in kinds.items():
        path = f'{leaf.path}/{ours}'
        shape = adapters.table[path].shape[leaf.index is not None :]
        inputs = len(shape) - 1 if ours == adapters_lib.A else 1
        tensor = f'{name.removesuffix(".weight")}.{theirs}'
        rows = weight.rows if ours == adapters_lib.A else None
        slots[tensor] = _Slot(path, leaf.index, shape, inputs, rows)
  stored = {slot.path for slot in slots.values()}
  if missing := sorted(adapters.table.keys() - stored):
    raise errors.UserError(
      f'{missing[0]} is no module of its own in transformers, so that PEFT'
      ' cannot hold it; export the merged model.'
    )
  return slots


def _targets(
  tensors: Mapping[str, Any],
  model: model_config.ModelConfig,
  layout: weights.Layout,
  folder: paths.Path,
) -> tuple[set[str], set[str]]:
  """Returns names of `targets` and `full` for what tensors belong to."""
  leaves = {weight.name: leaf.path for weight, leaf in _weights(model, layout)}
  targets, full = set(), set()
  for name in tensors:
    match = _TENSOR.fullmatch(name)
    path = leaves.get(f'{match[1]}.weight' if match else name)
    if path is None:
      raise errors.UserError(
        f'{folder / WEIGHTS}: {name} belongs to no module of the base that has'
        ' adapters here; the adapters are of another model.'
      )
    (targets if match else full).add(adapters_lib.name_of(path))
  return targets, full
