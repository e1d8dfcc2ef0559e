"""Import and export of a random model, against a plain copy of its bytes.

A folder of random bf16 weights is copied (and synced, as ours is), imported,
exported again, and loaded and saved by transformers. Each runs in a process of
its own, whose peak memory is read at its end: pages of mapped files are in it.
Every one starts with the folder's pages in the page cache, if they fit.
`--size` is that of a decoder (2b) or a pair (2b_2b): 2b has 5.2 GB, and needs
four times that on the disk, in `--folder`. `--peer` measures transformers too.
"""

from collections.abc import Sequence
import functools
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import Any

import ml_dtypes
import numpy as np

from encdec_adapt.files import lazy_array
from encdec_adapt.huggingface import config_json, tensor_writer, weights
from encdec_adapt.models import model_config, presets
from tests.benchmarks import results

# A process that measures itself: seconds of the work, and its peak memory.
_MEASURE = """
import json, os, pathlib, sys, time
name, source, run, output = sys.argv[1:]
def sync(folder):
  for path in pathlib.Path(folder).iterdir():
    with open(path, 'rb') as file:
      os.fsync(file.fileno())
{prepare}
start = time.perf_counter()
{work}
seconds = time.perf_counter() - start
# Not getrusage's, which counts the process that this one was forked from.
lines = open('/proc/self/status').readlines()
(peak,) = (int(l.split()[1]) * 1024 for l in lines if l.startswith('VmHWM:'))
print(json.dumps([seconds, peak]))
"""
_CONVERT = """
from encdec_adapt import convert
from encdec_adapt.cli import command
def call(*arguments):
  command.run_subcommand('', convert.COMMANDS, arguments)
"""
_LOAD = """
import torch, transformers
def load():
  kind = getattr(transformers, name)
  return kind.from_pretrained(source, dtype=torch.bfloat16)
"""
# Task -> its preparation, and the measured work. Except for from_pretrained,
# all end with the bytes on the disk.
_TASKS = {
  'copy': ('import shutil', 'shutil.copytree(source, output)\nsync(output)'),
  'import': (
    _CONVERT,
    'call("import", "--source=" + source, "--output=" + run)',
  ),
  'export': (
    _CONVERT,
    'call("export", "--checkpoint=" + run, "--output=" + output,'
    ' "--dtype=bfloat16")',
  ),
}
_PEER_TASKS = {
  # Weights are mapped: only what is read has been loaded.
  'from_pretrained': (
    _LOAD,
    'sum(float(p.detach().view(-1)[::1024].float().sum())'
    ' for p in load().parameters())',
  ),
  'save_pretrained': (
    _LOAD + 'model = load()',
    'model.save_pretrained(output)\nsync(output)',
  ),
}


def make_folder(folder: pathlib.Path, model: model_config.ModelConfig) -> int:
  """Writes a folder of random bf16 weights.

  Args:
    folder: folder to make.
    model: config of the model; transformers must have a class for it.

  Returns:
    Bytes of the weights.
  """
  raw, layout = config_json.raw_from_model(model)
  folder.mkdir()
  (folder / 'config.json').write_text(json.dumps({**raw, 'dtype': 'bfloat16'}))
  rng = np.random.default_rng(0)
  block = rng.normal(0, 0.02, 1 << 22).astype(ml_dtypes.bfloat16)

  tensors = {}
  for name, weight in weights.weights(model, layout).items():
    shape = weight.their_shape
    make = functools.partial(np.resize, block, shape)
    tensors[name] = lazy_array.LazyArray.in_full(shape, block.dtype, make)
  tensor_writer.write_tensors(folder, tensors)
  return sum(tensor.nbytes for tensor in tensors.values())


def measure(prepare: str, work: str, *names: Any) -> tuple[float, float]:
  """Runs code in a process of its own.

  Args:
    prepare: code that is not measured.
    work: code to measure.
    *names: class of the model in transformers; folders of the source, of the
      imported model, and of the output.

  Returns:
    Seconds, and the peak memory of the process in bytes.
  """
  code = _MEASURE.format(prepare=prepare, work=work)
  done = subprocess.run(
    [sys.executable, '-c', code, *map(str, names)],
    stdout=subprocess.PIPE,
    text=True,
    check=True,
  )
  seconds, peak = json.loads(done.stdout.splitlines()[-1])
  return seconds, peak


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Measures and prints."""
  arguments = results.parser(
    __doc__, size='s', vocab_size=256_000, folder='', peer=False
  ).parse_args(argv)
  is_one = arguments.size in presets.STACKS
  make = presets.decoder_only if is_one else presets.t5gemma
  model = make(arguments.size, vocab_size=arguments.vocab_size)
  with tempfile.TemporaryDirectory(dir=arguments.folder or None) as folder:
    rows = _measure_all(pathlib.Path(folder), model, peer=arguments.peer)
  return results.report('exchange', rows, arguments)


def _measure_all(
  folder: pathlib.Path, model: model_config.ModelConfig, *, peer: bool
) -> list[dict[str, Any]]:
  source, run, output = (folder / name for name in ('source', 'run', 'out'))
  nbytes = make_folder(source, model)
  raw, _ = config_json.raw_from_model(model)
  names = raw['architectures'][0], source, run, output
  rows = []
  for task, code in {**_TASKS, **(_PEER_TASKS if peer else {})}.items():
    shutil.rmtree(output, ignore_errors=True)
    seconds, peak = measure(*code, *names)
    copied = rows[0]['seconds'] if rows else seconds
    rows.append(
      {
        'task': task,
        'GB': nbytes / 1e9,
        'seconds': seconds,
        'GB/s': nbytes / 1e9 / seconds,
        'of the copy': copied / seconds,
        'peak GB': peak / 1e9,
      }
    )
  return rows


if __name__ == '__main__':
  main()
