"""Arrays of adapters merged into their base, and digests of bases.

`model_on_disk` opens the models and passes their arrays.
"""

from collections.abc import Mapping
import contextlib
import functools
import hashlib

import numpy as np

from encdec_adapt.checkpoints import checksums
from encdec_adapt.files import lazy_array, paths
from encdec_adapt.models import adapters as adapters_lib
from encdec_adapt.models import layers_index, parameters

Arrays = Mapping[str, lazy_array.LazyArray]

_SAMPLES, _SAMPLE_BYTES = 64, 16 << 10


def merged(
  adapters: adapters_lib.Adapters, base: Arrays, trained: Arrays
) -> dict[str, lazy_array.LazyArray]:
  """Returns the merged parameters, computed lazily.

  Args:
    adapters: the adapters.
    base: path -> stored parameter of the base.
    trained: path -> trained parameter.

  Returns:
    Path -> parameter in the order of the parameter table: fully trained
    parameters, W + scale A B in float32, and unchanged parameters of the base.
  """

  def read(path: str, index: tuple[slice, ...]) -> np.ndarray:
    a, b = (trained[f'{path}/{x}'] for x in (adapters_lib.A, adapters_lib.B))
    start, middle = int(layers_index.is_stacked(path)), len(a.shape) - 1
    rank_slice = (slice(None),)
    part = np.asarray(base[path].read_part(index), np.float32)
    layers, rank = part.shape[:start], a.shape[-1]
    inputs = a.read_part(index[:middle] + rank_slice)
    outputs = b.read_part(index[:start] + rank_slice + index[middle:])
    # float32 for any stored dtype: PEFT may have written float16.
    update = np.matmul(
      np.asarray(inputs, np.float32).reshape(*layers, -1, rank),
      np.asarray(outputs, np.float32).reshape(*layers, rank, -1),
    )
    return part + np.float32(adapters.options.scale) * update.reshape(
      part.shape
    )

  arrays = {}
  for path in parameters.parameter_table(adapters.model):
    arrays[path] = trained[path] if path in adapters.full else base[path]
    if path in adapters.kernels:
      arrays[path] = lazy_array.LazyArray(
        base[path].shape, np.dtype(np.float32), functools.partial(read, path)
      )
  return arrays


def checkpoint_digest(step: paths.Path) -> str:
  """Returns the digest of a checkpoint: a hash of its checksum manifest."""
  return _digest([(step / checksums.FILE).read_bytes()])


def folder_digest(folder: paths.Path) -> str:
  """Returns two digests of a folder's weight files: of samples, and in full.

  Runs of earlier versions saved only the first, so compare by prefix.
  """
  contents = [_content_hash(file).encode() for file in _weight_files(folder)]
  return f'{sample_digest(folder)}-{_digest(contents)}'


def sample_digest(folder: paths.Path) -> str:
  """Returns a digest of samples of a folder's weight files."""
  parts = []
  for file in _weight_files(folder):
    size = paths.size(file)
    parts.append(f'{file.name} {size}'.encode())
    with paths.open_to_read(file) as content:
      for i in range(_SAMPLES):
        content.seek(max(size - _SAMPLE_BYTES, 0) * i // (_SAMPLES - 1))
        parts.append(content.read(_SAMPLE_BYTES))
  return _digest(parts)


def _weight_files(folder: paths.Path) -> list[paths.Path]:
  return sorted(folder.glob('*.safetensors'))


def _content_hash(file: paths.Path) -> str:
  """Returns the file's SHA-256, cached on disk by path, size and times."""
  version = paths.version(file)
  if not paths.is_bucket(file):
    # Copy tools may preserve the mtime.
    version += f' {file.stat().st_ctime_ns}'
  name = _digest([str(paths.absolute(file)).encode(), version.encode()])
  entry = paths.user_cache('hashes') / name
  if entry.exists():
    return entry.read_text()
  with paths.open_to_read(file) as content:
    digest = hashlib.file_digest(content, 'sha256').hexdigest()
  with contextlib.suppress(OSError):  # The cache is optional.
    paths.write(entry, digest.encode())
  return digest


def _digest(parts: list[bytes]) -> str:
  return hashlib.blake2b(b'\0'.join(parts), digest_size=8).hexdigest()
