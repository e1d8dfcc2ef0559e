"""Digests of the folders that adapters are trained over."""

import hashlib
import os

import numpy as np
import pytest
from safetensors import numpy as safetensors

from encdec_adapt.stored import adapter_arrays


def test_every_tensor_counts_and_files_are_read_once(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  file = tmp_path / 'model.safetensors'
  tensors = {f'{i}': np.full((64, 512), i + 1.0, np.float32) for i in range(64)}
  safetensors.save_file(tensors, file)
  digest = adapter_arrays.folder_digest(tmp_path)
  times = file.stat()
  safetensors.save_file(tensors | {'37': tensors['37'] * 0}, file)
  os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
  assert adapter_arrays.folder_digest(tmp_path) != digest
  safetensors.save_file(tensors, file)
  assert adapter_arrays.folder_digest(tmp_path) == digest
  # Runs of earlier versions have the digest of samples, 16 letters.
  assert len(digest.partition('-')[0]) == 16
  monkeypatch.setattr(hashlib, 'file_digest', lambda *_: pytest.fail('again'))
  assert adapter_arrays.folder_digest(tmp_path) == digest
