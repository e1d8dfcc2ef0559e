"""Weights in parts, and a folder of a GGUF file without torch.

This module imports nothing of the package; `gguf` and `safetensors` only where
a GGUF file is read.
"""

from collections.abc import Mapping
import hashlib
import json
import pathlib
import shutil
from typing import Any

import numpy as np

from launch import commands

PART = 'weights.part'
CONFIG = 'config.json'
SAFETENSORS = 'model.safetensors'
# Names of a layer's tensors in a GGUF file of Gemma 3 -> in transformers.
_LAYER = {
  'attn_q': 'self_attn.q_proj',
  'attn_k': 'self_attn.k_proj',
  'attn_v': 'self_attn.v_proj',
  'attn_output': 'self_attn.o_proj',
  'attn_q_norm': 'self_attn.q_norm',
  'attn_k_norm': 'self_attn.k_norm',
  'attn_norm': 'input_layernorm',
  'post_attention_norm': 'post_attention_layernorm',
  'ffn_norm': 'pre_feedforward_layernorm',
  'post_ffw_norm': 'post_feedforward_layernorm',
  'ffn_gate': 'mlp.gate_proj',
  'ffn_up': 'mlp.up_proj',
  'ffn_down': 'mlp.down_proj',
}
_TOP = {'token_embd': 'model.embed_tokens', 'output_norm': 'model.norm'}


def digest(path: pathlib.Path) -> str:
  """Returns the SHA-256 of a file."""
  with open(path, 'rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


def split(path: pathlib.Path, parts: list[pathlib.Path]) -> dict[str, Any]:
  """Divides a file into parts of equal size, one in each folder.

  Returns:
    Name of the file, and bytes and SHA-256 of each part.
  """
  data = path.read_bytes()
  size = -(-len(data) // len(parts))
  entries = []
  for number, folder in enumerate(parts):
    part = folder / PART
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    part.write_bytes(data[number * size : (number + 1) * size])
    entries.append({'bytes': part.stat().st_size, 'sha256': digest(part)})
  return {'name': path.name, 'parts': entries}


def join(
  expected: Mapping[str, Any], parts: list[pathlib.Path], output: pathlib.Path
) -> pathlib.Path:
  """Compares the checksums of the parts of a file and joins them.

  Args:
    expected: result of `split`.
    parts: folders of the parts, in order.
    output: folder for the file.

  Raises:
    LaunchError: parts are missing, damaged, or of other weights; names them.
  """
  missing = [str(x) for x in parts if not (x / PART).is_file()]
  if missing:
    raise commands.LaunchError(
      f'{", ".join(missing)} of the weights are not on this machine, which may'
      ' have been replaced since they were copied; copy them again, and then'
      ' run.'
    )
  for folder, entry in zip(parts, expected['parts'], strict=True):
    size = (folder / PART).stat().st_size
    if size != entry['bytes'] or digest(folder / PART) != entry['sha256']:
      raise commands.LaunchError(
        f'{folder} is damaged or of other weights: {size:,} bytes, where'
        f' {entry["bytes"]:,} of SHA-256 {entry["sha256"][:12]} are expected;'
        ' copy it again.'
      )
  output.mkdir(parents=True, exist_ok=True)
  path = output / expected['name']
  with open(path, 'wb') as file:
    for folder in parts:
      file.write((folder / PART).read_bytes())
  return path


def from_gguf(path: pathlib.Path, folder: pathlib.Path) -> None:
  """Writes the dequantised weights of a GGUF file of Gemma 3 into a folder.

  Args:
    path: the GGUF file.
    folder: folder of the model.
  """
  import gguf
  from safetensors import numpy as safetensors

  arrays = {}
  for tensor in gguf.GGUFReader(str(path)).tensors:
    name = name_of(tensor.name)
    values = gguf.dequantize(tensor.data, tensor.tensor_type)
    values = np.asarray(values, np.float32)
    # Norms of Gemma are 1 + w in a GGUF.
    arrays[name] = values - 1 if 'norm' in name else values
  safetensors.save_file(arrays, folder / SAFETENSORS, {'format': 'pt'})


def check_shapes(
  path: pathlib.Path, shapes: Mapping[str, tuple[int, ...]], file: pathlib.Path
) -> None:
  """Compares the shapes of weights with a config.json.

  Raises:
    LaunchError: names the sizes of both.
  """
  config = json.loads(file.read_text())
  layers = {x.split('.')[2] for x in shapes if x.startswith('model.layers.')}
  table = 'model.embed_tokens.weight'
  stored = {
    'num_hidden_layers': len(layers),
    'vocab_size': shapes[table][0],
    'hidden_size': shapes[table][1],
    'intermediate_size': shapes['model.layers.0.mlp.up_proj.weight'][0],
  }
  expected = {name: config[name] for name in stored}
  if stored != expected:
    raise commands.LaunchError(
      f'{path} has {stored}, and {file} {expected}: weights of another size;'
      ' use those of the model that was prepared.'
    )


def name_of(name: str) -> str:
  """Returns the name of a tensor in transformers."""
  stem = name.removesuffix('.weight')
  if stem in _TOP:
    return f'{_TOP[stem]}.weight'
  _, layer, part = stem.split('.')
  return f'model.layers.{layer}.{_LAYER[part]}.weight'
