"""Checks a GPU that has not run this code, in ten minutes, cheapest first.

    bash launch/device.sh check [--output=device_check.json] [--chip=h100]

 1. numerics: attention backends against the reference (`gpu_numerics`);
 2. sharded: a step on all devices against one device, where there are several;
 3. decode: 2B-2B with 1, 8 and 64 rows against the memory's bandwidth
    (`gpu_generation`);
 4. step: the training step of 2B-2B on random weights, packed and not
    (`gpu_step`), by every backend whose kernels passed, with fewer rows or
    layers where all do not fit;
 5. plan: the prediction of `encdec_adapt.plan` for each of these steps.

Each check is a process of its own, and its result is written before the next
one starts, so that a run that is cut keeps it. A check that fails, or a step
that does not fit, is recorded with its error; the exit status is then 1.
`--chip` is the chip that was planned for; another one is refused.
"""

from collections.abc import Sequence
from concurrent import futures
import contextlib
import json
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax

from encdec_adapt.files import atomic
from encdec_adapt.planner import chips
from encdec_adapt.telemetry import environment
from tests.benchmarks import results

SECONDS = 560  # The remainder of ten minutes is for installing.
LIMIT = 200  # Of a check, as kernels may hang.
DECODE_ROWS = 1, 8, 64
EXAMPLES = 8, 1  # In a row of a step.
# Layers of each stack and rows, of which the first that fit are measured:
# parameters and gradients of all layers take 42 GiB in float32.
ATTEMPTS = (26, 4), (26, 1), (12, 1), (4, 1)
# Sizes of Gemma 2 2B but for the layers.
SIZES = ['--width=2304', '--mlp_width=9216', '--heads=8', '--kv_heads=4']
SIZES += ['--head_dim=256', '--vocab_size=256000']
# The same step as a configuration.
PLAN = [
  '--config=configs/gemma2.py:size=2b_2b',
  '--config.loss.kind=cross_entropy',
]
PLAN += ['--config.loss.chunk=1024', '--config.compute.attention_chunk=256']
PLAN += ['--config.compute.remat=attention']
PLAN += ['--config.optimizer.kind=adafactor']
# More flags by module, for other shapes.
FLAGS: dict[str, list[str]] = {}
_ONE_DEVICE = {'CUDA_VISIBLE_DEVICES': '0', 'JAX_NUM_CPU_DEVICES': '1'}
_FULL_PRECISION = {'JAX_DEFAULT_MATMUL_PRECISION': 'highest'}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Runs all checks; returns what is written."""
  parser = results.parser(__doc__, chip='')
  parser.set_defaults(output='device_check.json')
  arguments = parser.parse_args(argv)
  # In its own process, as JAX reserves a GPU's memory for the first one.
  spawn = multiprocessing.get_context('spawn')
  with futures.ProcessPoolExecutor(1, spawn) as pool:
    device = pool.submit(describe).result()
  chip = arguments.chip or device['chip'] or ''
  if device['platform'] == 'gpu' and chip != (device['chip'] or ''):
    raise SystemExit(
      f'--chip={chip}: this machine has {device["device_kind"]}, which is'
      f' {device["chip"] or "not in planner.chips"}. Leave out --chip.'
    )
  with tempfile.TemporaryDirectory() as folder:
    run = _Run({'device': device, 'checks': {}}, arguments.output, folder)
    for dtype in ('bfloat16', 'float32'):
      run.check(f'numerics, {dtype}', 'gpu_numerics', [f'--dtype={dtype}'])
    backends = run.backends()
    if device['devices'] > 1:
      for backend in backends:
        run.compare_devices(backend)
    for rows in DECODE_ROWS:
      run.check(f'decode, {rows} rows', 'gpu_generation', ['--rows', str(rows)])
    for backend in backends:
      attempts = list(ATTEMPTS)
      for examples in EXAMPLES:
        while attempts and not run.step(backend, examples, *attempts[0]):
          attempts.pop(0)
      if attempts:
        run.plan(chip, backend, *attempts[0])
  return run.content


def describe() -> dict[str, Any]:
  """Returns versions and devices of this process."""
  hardware = chips.slice_of(jax.devices())
  return environment.report() | {'chip': hardware and hardware.chip.name}


class _Run:
  """Checks; the results are written after each.

  Attributes:
    content: what is written: 'device', and 'checks' by name.
  """

  def __init__(self, content: dict[str, Any], output: str, folder: str):
    """Starts the clock; temporary files are written into the folder."""
    self.content, self._output, self._folder = content, output, folder
    self._end = time.monotonic() + SECONDS

  def check(
    self, name: str, module: str, flags: list[str], **variables: str
  ) -> list[dict[str, Any]]:
    """Runs a module, writes its result and returns its rows."""
    print(f'\n== {name}', flush=True)
    start, folder = time.monotonic(), pathlib.Path(self._folder)
    output, log = folder / 'result.json', folder / 'log.txt'
    output.unlink(missing_ok=True)
    path = module if '.' in module else f'tests.benchmarks.{module}'
    # Steps that differ in their data only are compiled once.
    variables = {'JAX_COMPILATION_CACHE_DIR': self._folder, **variables}
    with log.open('w') as stream:
      process = subprocess.Popen(
        [sys.executable, '-m', path, *flags, f'--output={output}']
        + FLAGS.get(module, []),
        env={**os.environ, **variables},
        stdout=stream,
        stderr=subprocess.STDOUT,
        start_new_session=True,
      )
    limit, note = max(0, min(LIMIT, self._end - start)), ''
    try:
      process.wait(limit)
    except subprocess.TimeoutExpired:
      note = f'cut after {limit:.0f} s'
    finally:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    text = log.read_text() + note
    print(text, flush=True)
    result = {'seconds': time.monotonic() - start}
    if output.exists():
      result |= json.loads(output.read_text())
    if process.wait():
      result['error'] = text[-2000:]
    self._record(name, result)
    return result.get('rows', [])

  def backends(self) -> list[str]:
    """Returns kernels that are right at the size of a step, then `chunked`."""
    rows = self.content['checks']['numerics, bfloat16'].get('rows', [])
    rows = [row for row in rows if f'--head_dim={row["head dim"]}' in SIZES]
    wrong = {row['backend'] for row in rows if not row.get('passed')}
    kernels = {row['backend'] for row in rows} - wrong - {'chunked'}
    return [*sorted(kernels), 'chunked']

  def compare_devices(self, backend: str) -> None:
    """Compares losses of a small pair on all devices and on the first."""
    flags = ['--encoder_length=512', '--decoder_length=512', '--head_dim=64']
    flags += ['--batches', '16', '--examples', '2']
    flags += ['--backends', backend, '--peer_attentions']
    tolerance, precision = 1e-2, {}
    if backend == 'chunked':
      tolerance, precision = 1e-5, _FULL_PRECISION
      flags += ['--dtype=float32']
    name, losses = f'sharded, {backend}', []
    for variables in (precision, precision | _ONE_DEVICE):
      rows = self.check(name, 'gpu_step', flags, **variables)
      losses += [row['loss, last'] for row in rows]
    result = {'losses': losses}
    if len(losses) < 2 or abs(losses[0] / losses[1] - 1) > tolerance:
      result['error'] = f'losses of all devices and of one: {losses}'
    self._record(name, result)

  def step(self, backend: str, examples: int, layers: int, batch: int) -> bool:
    """Measures a training step; returns whether it fits."""
    name = f'step, {backend}, {examples} examples, {layers} layers x {batch}'
    flags = [*SIZES, f'--layers={layers}', '--batches', str(batch)]
    flags += ['--examples', str(examples), '--backends', backend]
    flags += ['--peer_attentions']
    return bool(self.check(name, 'gpu_step', flags, **_ONE_DEVICE))

  def plan(self, chip: str, backend: str, layers: int, batch: int) -> None:
    """Plans a step."""
    flags = [*PLAN, f'--topology={chip}:1', f'--examples={EXAMPLES[0]}']
    flags += [f'--config.compute.attention={backend}']
    flags += [f'--config.train.batch_size={batch}']
    for side in ('encoder', 'decoder'):
      flags += [f'--config.model.{side}.layers={layers}']
    name = f'plan, {backend}'
    self.check(name, 'encdec_adapt.plan', flags, JAX_PLATFORMS='cpu')

  def _record(self, name: str, result: dict[str, Any]) -> None:
    self.content['checks'][name] = result
    atomic.write_json(self._output, self.content)


if __name__ == '__main__':
  # As an exception, so that no process is left on the GPU.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
  sys.exit(any('error' in check for check in main()['checks'].values()))
