"""Checks a GPU that has not run this code, in ten minutes, cheapest first.

    bash launch/device.sh check [--output=device_check.json] [--chip=h100]

 1. numerics: attention backends against the reference (`gpu_numerics`);
 2. sharded: a step on all devices against one device, where there are several
    (`gpu_sharded`);
 3. decode: 2B-2B with 1, 8 and 64 rows against the memory's bandwidth
    (`gpu_generation`);
 4. step: the training step of 2B-2B on random weights, packed and not
    (`gpu_step`), by every backend whose kernels passed, with fewer rows or
    layers where all do not fit. Beside it, the prediction of
    `encdec_adapt.plan`, which is computed meanwhile.

Each check is a process of its own. The results so far are written after each,
so that a run that is cut keeps them. A check that fails is recorded with its
error, and the next one starts; the exit status is then 1. `--chip` is the chip
that was planned for; another one is refused.
"""

from collections.abc import Sequence
import contextlib
import json
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
from encdec_adapt.ops import attention
from encdec_adapt.planning import chips
from encdec_adapt.telemetry import environment
from tests.benchmarks import results

SECONDS = 560  # The remainder of ten minutes is for installing.
PLATFORM = 'cuda'
DECODE_ROWS = 1, 8, 64
EXAMPLES = 8, 1  # In a row of a step.
# Layers of each stack and rows, of which the first that fit are measured:
# parameters and gradients of all layers take 42 GiB in float32.
ATTEMPTS = (26, 4), (26, 1), (12, 1), (4, 1)
# Sizes of Gemma 2 2B but for the layers, as flags of `gpu_step`.
SIZES = ['--width=2304', '--mlp_width=9216', '--heads=8', '--kv_heads=4']
SIZES += ['--head_dim=256', '--vocab_size=256000']
# More flags by module, for other shapes.
FLAGS: dict[str, list[str]] = {}
# The configuration that a step of `gpu_step` has.
PLAN = ['--config=configs/gemma2.py:size=2b_2b', '--config.loss.distillation=0']
PLAN += ['--config.loss.chunk=1024', '--config.compute.attention_chunk=256']
PLAN += [
  '--config.compute.remat=attention',
  '--config.optimizer.kind=adafactor',
]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Runs all checks; returns what is written."""
  parser = results.parser(__doc__, chip='', describe=False)
  parser.set_defaults(output='device_check.json')
  arguments = parser.parse_args(argv)
  if arguments.describe:
    print(json.dumps(describe()))
    return {}
  # As an exception, so that no process is left on the GPU.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
  device = _device(arguments.chip)
  chip = arguments.chip or device['chip']
  with tempfile.TemporaryDirectory() as folder:
    run = _Run(device, arguments.output, folder)
    for dtype in ('bfloat16', 'float32'):
      run.check(f'numerics, {dtype}', 'gpu_numerics', [f'--dtype={dtype}'])
    backends = run.backends()
    if chip:
      run.start_plan(chip, backends[0])
    if device['local_devices'] > 1:
      flags = [f'--devices={device["local_devices"]}', '--head_dim=64']
      run.check('sharded', 'gpu_sharded', [*flags, '--backends', *backends])
    for rows in DECODE_ROWS:
      flags = [f'--chip={chip or ""}', '--rows', str(rows)]
      run.check(f'decode, {rows} rows', 'gpu_generation', flags)
    for backend in backends:
      attempts = list(ATTEMPTS)
      for examples in EXAMPLES:
        while attempts and not run.step(backend, examples, *attempts[0]):
          attempts.pop(0)
    run.finish_plan()
  return run.content


def describe() -> dict[str, Any]:
  """Returns versions and device of this process."""
  hardware = chips.slice_of(jax.devices())
  memory = jax.devices()[0].memory_stats() or {}
  return {
    **environment.versions(),
    **environment.devices(),
    'bytes': memory.get('bytes_limit'),
    'chip': hardware and hardware.chip.name,
  }


def _device(chip: str) -> dict[str, Any]:
  """Returns `describe` of the GPU.

  Args:
    chip: the chip that was planned for, or ''.

  Raises:
    SystemExit: there is no GPU, or it is another chip.
  """
  done = subprocess.run(
    [sys.executable, '-m', 'tests.benchmarks.device_check', '--describe'],
    env={**os.environ, 'JAX_PLATFORMS': PLATFORM},
    capture_output=True,
    text=True,
  )
  if done.returncode:
    raise SystemExit(
      f'JAX finds no GPU: {_last_line(done.stderr)} The driver: {_driver()}.'
      ' CUDA 13 needs driver 580 or newer, CUDA 12 needs 525.'
    )
  device = json.loads(_last_line(done.stdout))
  print(json.dumps(device, indent=1), flush=True)
  if chip and PLATFORM == 'cuda' and chip != device['chip']:
    raise SystemExit(
      f'--chip={chip}: this machine has {device["device_kind"]}, which is'
      f' {device["chip"] or "not in planning.chips"}. Leave out --chip to'
      ' compare with a plan for it.'
    )
  return device


def _driver() -> str:
  """Returns what nvidia-smi says of the driver, in a line."""
  query = ['nvidia-smi', '--query-gpu=name,driver_version', '--format=csv']
  try:
    done = subprocess.run(query, capture_output=True, text=True)
  except FileNotFoundError:
    return 'nvidia-smi is not installed'
  return _last_line(done.stdout + done.stderr)


def _last_line(text: str) -> str:
  return (text.strip() or 'no output').splitlines()[-1]


class _Run:
  """Checks and their results.

  Attributes:
    content: what is written: 'device', 'checks' by name, and 'plan'.
  """

  def __init__(self, device: dict[str, Any], output: str, folder: str):
    """Starts the clock; temporary files are written into the folder."""
    self.content = {'device': device, 'checks': {}, 'plan': {}}
    self._output, self._folder = output, pathlib.Path(folder)
    self._end, self._plan = time.monotonic() + SECONDS, None
    # Steps that differ in their data only are compiled once.
    self._environment = os.environ | {
      'JAX_PLATFORMS': PLATFORM,
      'JAX_COMPILATION_CACHE_DIR': folder,
    }

  def check(
    self, name: str, module: str, flags: list[str], **variables: str
  ) -> list[dict[str, Any]]:
    """Runs a benchmark, writes its results and returns its rows."""
    print(f'\n== {name}', flush=True)
    output, start = self._folder / 'rows.json', time.monotonic()
    output.unlink(missing_ok=True)
    process = subprocess.Popen(
      [sys.executable, '-m', f'tests.benchmarks.{module}', *flags]
      + [f'--output={output}', *FLAGS.get(module, ())],
      env=self._environment | variables,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      start_new_session=True,
    )
    text = ''
    try:
      text, _ = process.communicate(timeout=self._seconds_left())
    except subprocess.TimeoutExpired:
      text = f'cut, since {SECONDS} s are over'
    finally:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    print(text, flush=True)
    result = {'seconds': time.monotonic() - start, 'rows': []}
    if output.exists():
      result['rows'] = json.loads(output.read_text())['rows']
    if process.wait():
      result['error'] = _last_line(text)
    self.content['checks'][name] = result
    self._write()
    return result['rows']

  def step(self, backend: str, examples: int, layers: int, batch: int) -> bool:
    """Measures a training step; returns whether it fits."""
    rows = self.check(
      f'step, {backend}, {examples} examples a row, {layers} layers x {batch}',
      'gpu_step',
      [*SIZES, f'--layers={layers}', '--backends', backend]
      + ['--batches', str(batch), '--examples', str(examples)]
      + ['--peer_attentions'],
      CUDA_VISIBLE_DEVICES='0',
    )
    return bool(rows)

  def backends(self) -> list[str]:
    """Returns the backends with correct kernels, then those without kernels.

    Kernels that refuse the head dimension of a step are left out.
    """
    names = attention.on_platform('cpu' if PLATFORM == 'cpu' else 'gpu')
    kernels = [name for name in names if attention.BACKENDS[name].kernels]
    rows = [
      row
      for row in self.content['checks']['numerics, bfloat16']['rows']
      if f'--head_dim={row["head dim"]}' in SIZES
    ]
    wrong = {row['backend'] for row in rows if not row.get('passed')}
    tested = {row['backend'] for row in rows}
    names = [name for name in kernels if name in tested - wrong]
    return [*names, 'chunked']

  def start_plan(self, chip: str, backend: str) -> None:
    """Starts to plan the first step; the processor is free meanwhile."""
    layers, batch = ATTEMPTS[0]
    sides = [
      f'--config.model.{side}.layers={layers}'
      for side in ('encoder', 'decoder')
    ]
    with open(self._folder / 'plan.log', 'w') as log:
      self._plan = subprocess.Popen(
        [sys.executable, '-m', 'encdec_adapt.plan', f'--topology={chip}:1']
        + [f'--output={self._folder}/plan.json', *PLAN, *sides]
        + [f'--config.compute.attention={backend}']
        + [f'--config.train.batch_size={batch}'],
        env=self._environment | {'JAX_PLATFORMS': 'cpu'},
        stdout=log,
        stderr=log,
      )

  def finish_plan(self) -> None:
    """Writes the prediction."""
    if self._plan is None:
      kind = self.content['device']['device_kind']
      plan = {'error': f'{kind} is not in planning.chips'}
    else:
      with contextlib.suppress(subprocess.TimeoutExpired):
        self._plan.wait(self._seconds_left())
      self._plan.kill()
      output = self._folder / 'plan.json'
      plan = {'error': _last_line((self._folder / 'plan.log').read_text())}
      if output.exists():
        train = json.loads(output.read_text())['programs']['train']
        plan = {
          'source': train['source'],
          'peak GiB': train['memory']['peak'] / 2**30,
          'step s': (train['roofline'] or {}).get('step_s'),
          'MFU': train['mfu'],
        }
    self.content['plan'] = plan
    self._write()

  def _seconds_left(self) -> float:
    return max(0.0, self._end - time.monotonic())

  def _write(self) -> None:
    atomic.write_json(self._output, self.content)


if __name__ == '__main__':
  checks = main().get('checks', {})
  sys.exit(any('error' in check for check in checks.values()))
