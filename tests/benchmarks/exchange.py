"""Import and export of a random model, against a plain copy of its bytes.

A folder of random bf16 weights is copied (and synced, as ours is), imported,
exported again, and loaded and saved by transformers. Each runs in a process of
its own, whose peak memory is read at its end: pages of mapped files are in it.
Every one starts with the folder's pages in the page cache, if they fit.
`--size` is that of a decoder (2b) or a pair (2b_2b): 2b has 5.2 GB, and needs
four times that on the disk, in `--folder`. `--peer` measures transformers too.
"""

from collections.abc import Sequence
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import Any

import ml_dtypes
import numpy as np

from encdec_adapt.huggingface import config_json, tensor_writer, weights
from encdec_adapt.models import model_config, presets
from tests.benchmarks import results

# A process that measures itself: seconds of the work, and its peak memory.
_MEASURE = """
import json, sys, time
{prepare}
start = time.perf_counter()
{work}
seconds = time.perf_counter() - start
# Not getrusage's, which counts the process that this one was forked from.
lines = open('/proc/self/status').readlines()
(peak,) = (int(l.split()[1]) * 1024 for l in lines if l.startswith('VmHWM:'))
print(json.dumps([seconds, peak]))
"""
_CONVERT = (
  'from encdec_adapt import convert\nfrom encdec_adapt.cli import command',
  "command.run_subcommand('', convert.COMMANDS, {arguments!r})",
)
# As ours does, so that all end with the bytes on the disk.
_SYNC = (
  'import os, pathlib, shutil\n'
  'def sync(folder):\n'
  '  for path in pathlib.Path(folder).iterdir():\n'
  '    with open(path, "rb") as file:\n'
  '      os.fsync(file.fileno())\n'
)
_COPY = (
  _SYNC,
  'shutil.copytree({source!r}, {output!r})\nsync({output!r})',
)
_LOAD = (
  'import torch, transformers',
  'model = transformers.{name}.from_pretrained({source!r},'
  ' dtype=torch.bfloat16)\n'
  # Weights are mapped: only what is read has been loaded.
  'sum(float(p.detach().view(-1)[::1024].float().sum())'
  ' for p in model.parameters())',
)
_SAVE = (
  _SYNC + 'import torch, transformers\n'
  'model = transformers.{name}.from_pretrained({source!r},'
  ' dtype=torch.bfloat16)',
  'model.save_pretrained({output!r})\nsync({output!r})',
)


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

  def plan(weight: weights.Weight) -> tensor_writer.PlannedTensor:
    shape = weight.their_shape
    return tensor_writer.PlannedTensor(
      weight.name, shape, block.dtype, lambda: np.resize(block, shape)
    )

  plans = [plan(w) for w in weights.weights(model, layout).values()]
  tensor_writer.write_tensors(folder, plans)
  return sum(tensor.nbytes for tensor in plans)


def measure(code: tuple[str, str], **names: Any) -> tuple[float, float]:
  """Runs code in a process of its own.

  Args:
    code: setup code, and the code to measure.
    **names: values of the placeholders in the code.

  Returns:
    Seconds, and the peak memory of the process in bytes.
  """
  prepare, work = (part.format(**names) for part in code)
  done = subprocess.run(
    [sys.executable, '-c', _MEASURE.format(prepare=prepare, work=work)],
    capture_output=True,
    text=True,
  )
  if done.returncode:
    raise RuntimeError(done.stderr)
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
  name = raw['architectures'][0]
  rows = []

  def add(what: str, code: tuple[str, str], leaves=None, **names: Any) -> None:
    seconds, peak = measure(code, **names)
    copied = rows[0]['seconds'] if rows else seconds
    rows.append(
      {
        'what': what,
        'GB': nbytes / 1e9,
        'seconds': seconds,
        'GB/s': nbytes / 1e9 / seconds,
        'of the copy': copied / seconds,
        'peak GB': peak / 1e9,
      }
    )
    if leaves:
      shutil.rmtree(leaves)

  add('copy', _COPY, output, source=str(source), output=str(output))
  flags = [f'--source={source}', f'--output={run}']
  add('import', _CONVERT, arguments=['import', *flags])
  flags = [f'--checkpoint={run}', f'--output={output}', '--dtype=bfloat16']
  add('export', _CONVERT, arguments=['export', *flags])
  shutil.rmtree(run)
  shutil.rmtree(output)
  if peer:
    add('from_pretrained', _LOAD, name=name, source=str(source))
    names = dict(name=name, source=str(source), output=str(output))
    add('save_pretrained', _SAVE, output, **names)
  return rows


if __name__ == '__main__':
  main()
