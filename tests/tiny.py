"""A tiny job for tests of whole commands: text, vocabulary, records, flags.

Records are written directly, so that a test knows the length of every row.
"""

from collections.abc import Callable, Iterable
import csv
import os
import pathlib
import socket
import subprocess
import sys
import time
import types
from typing import Any

from flax import traverse_util
import jax
import numpy as np
import pytest

from encdec_adapt import convert as commands
from encdec_adapt import generate as generate_lib
from encdec_adapt.checkpoints import manager
from encdec_adapt.cli import command
from encdec_adapt.data.records import record_sets, record_writing, row_order
from encdec_adapt.objectives import framing
from encdec_adapt.tokenizers import vocabulary_pair, vocabulary_training
from tests import xla_flags

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORDS = 'the quick brown fox jumps over a lazy dog while two cats sleep'.split()
VOCAB = 400
STACK = dict(layers=2, width=16, mlp_width=32, heads=2, kv_heads=1, head_dim=8)
STACK |= dict(vocab_size=VOCAB, window=8, pattern=('local',))
# Of a row's targets. They differ, so that what is divided by the weight of a
# part of a batch is not what is divided by that of the whole.
SHORTEST, LONGEST = 3, 16


def slow_except(kept: Iterable[Any], values: Iterable[Any]) -> list[Any]:
  """Parameters of a test, of which all but the kept ones are marked slow."""
  kept = set(kept)
  return [
    pytest.param(x, marks=[pytest.mark.slow] * (x not in kept)) for x in values
  ]


def text(documents: int, seed: int = 0) -> list[str]:
  """Documents of random words, some of them long."""
  rng = np.random.default_rng(seed)
  return [
    ' '.join(rng.choice(WORDS, rng.integers(20, 80))) + '.\n'
    for _ in range(documents)
  ]


def make_records(
  folder: pathlib.Path,
  rows: int = 96,
  held_out: int = 8,
  pack: bool = True,
  shards: int = 1,
  more: tuple[str, ...] = (),
) -> list[str]:
  """Writes a vocabulary and prefix_lm and causal_lm records.

  The vocabulary does not depend on how many rows are held out, at most 8.
  Every row is one pair with 3 to 16 targets, for a prefix_lm after 15 inputs;
  `more` objectives of pairs cut a document into a row for each window.

  Returns:
    The flags of a job that reads the prefix_lm records.
  """
  documents = text(rows + 8)
  vocabulary = vocabulary_training.train_vocabulary(
    documents, folder / 'vocabulary.model', VOCAB
  )
  for objective, lengths in (
    ('prefix_lm', framing.Lengths(16, 16)),
    ('causal_lm', framing.Lengths(0, 32)),
    *((name, framing.Lengths(16, 16)) for name in more),
  ):
    for split, some in (
      ('train', documents[:rows]),
      ('eval', documents[rows:][:held_out]),
    ):
      _write_set(
        folder / objective / split,
        objective,
        split,
        lengths,
        vocabulary,
        some,
        pack and split == 'train',
        shards,
      )
  return [*flags(folder, 'prefix_lm'), f'--config.data.shards={shards}']


def _write_set(
  folder, objective, split, lengths, vocabulary, documents, pack, shards
):
  spec = record_sets.RecordSpec(
    source='text:none',
    split=split,
    objective=objective,
    encoder_length=lengths.encoder,
    decoder_length=lengths.decoder,
    shards=shards,
    pack=pack,
    sentinels='recycle',
    eval_fraction=0.04,
    max_rows=0 if split == 'train' else 8,
    vocabulary=vocabulary.fingerprint,
    encoder_vocabulary=vocabulary.fingerprint,
  )
  parts = [record_sets.Part(objective, 'text:none')]
  entries = {}
  for key in record_writing.shard_keys(spec, parts):
    with record_writing.ShardWriter(folder, spec, key) as writer:
      for index, document in [*enumerate(documents)][key.shard :: shards]:
        tokens = vocabulary.encode(document)
        if objective not in ('prefix_lm', 'causal_lm'):
          maker = spec.objectives[0].make(
            lengths, vocabulary, sentinel_policy=spec.sentinels
          )
          rng = np.random.default_rng(index)
          for pair in maker.pairs(tokens, lambda i, rng=rng: rng):
            writer.write([pair])
          continue
        half = 15 if lengths.encoder else 0
        # Every length comes up, neighbours' being far apart.
        count = SHORTEST + index * 5 % (LONGEST - SHORTEST + 1)
        assert len(tokens) >= half + count - 1
        targets = np.append(tokens[half : half + count - 1], vocabulary.eos)
        # Two documents of a group, as a module's docstrings and source are.
        name = f'text_{7 + index // 2}::{index % 2}'
        pair = framing.Pair(tokens[:half], targets.astype(np.int32))
        writer.write([pair._replace(documents=(name,))])
      entries[key] = writer.finish(
        examples=len(documents), shared_sentinel_spans=0
      )
  opened = vocabulary_pair.Opened(vocabulary, vocabulary)
  described = opened.describe()
  record_writing.write_manifest(folder, spec, parts, entries, described)


def flags(folder: pathlib.Path, objective: str) -> list[str]:
  """Flags of a job on these records with a model of a few thousand weights."""
  is_pair = objective == 'prefix_lm'
  length = 16 if is_pair else 32
  values = {
    'data.folder': folder / objective,
    'data.vocabulary': folder / 'vocabulary.model',
    'data.source': 'text:none',
    'data.objective': objective,
    'data.encoder_length': length * is_pair,
    'data.decoder_length': length,
    'data.shards': 1,
    'data.eval_rows': 8,
    'model.kind': 'encoder_decoder' if is_pair else 'decoder_only',
    'model.vocab_multiple': 8,
    'compute.dtype': 'float32',
    'train.batch_size': 8,
    'train.steps': 12,
    'train.log_every': 1,
    'evaluation.loss': 4,
    'train.eval_batch_size': 8,
    'optimizer.warmup_steps': 2,
    'checkpoint.every': 3,
  }
  for side in ('encoder', 'decoder'):
    values |= {f'model.{side}.{key}': value for key, value in STACK.items()}
  return ['--config=configs/base.py'] + [
    f'--config.{key}={value}' for key, value in values.items()
  ]


def target_tokens(folder: pathlib.Path, rows: int | None = None) -> int:
  """Targets in the first rows of a training stream; in all rows for None."""
  found = record_sets.RecordSet.open(folder)
  order = row_order.Order(found)
  numbers = range(len(found)) if rows is None else map(order.row, range(rows))
  return sum(
    len(pair.targets) for row in found.read(list(numbers)) for pair in row
  )


def assert_same_params(workdir: pathlib.Path, reference: pathlib.Path) -> None:
  """The newest checkpoints of two runs hold the same parameters, to the bit."""
  found, wanted = read_params(workdir), read_params(reference)
  assert found.keys() == wanted.keys()
  for path, value in wanted.items():
    np.testing.assert_array_equal(found[path], value, path)


def read_params(workdir: pathlib.Path) -> dict[str, np.ndarray]:
  """Reads the parameters of a run's newest checkpoint by their paths."""
  found = manager.open_latest(workdir)
  abstract = {
    tuple(path.split('/')): jax.ShapeDtypeStruct(*info)
    for path, info in found.open_state().arrays.items()
    if path.startswith('params/')
  }
  state = found.restore(traverse_util.unflatten_dict(abstract), partial=True)
  flat = traverse_util.flatten_dict(state, sep='/')
  return {path: np.asarray(value) for path, value in flat.items()}


def environment(devices: int = 1) -> dict[str, str]:
  """What a command started by a test runs under."""
  return {
    **os.environ,
    'JAX_PLATFORMS': 'cpu',
    'XLA_FLAGS': xla_flags.cpu(devices),
    'PYTHONUNBUFFERED': '1',
  }


def call(main: types.ModuleType, *argv) -> int:
  """Runs a command with flags only in this process; returns its status."""
  return main.main(command.parse(main.define_flags, [str(a) for a in argv]))


def convert(*argv) -> int:
  """Runs `convert` in this process; returns its status."""
  return command.run_subcommand('', commands.COMMANDS, [str(a) for a in argv])


def generate(checkpoint, prompt: str, output) -> int:
  """Continues a prompt by two tokens, written to a file; returns the status."""
  return call(
    generate_lib,
    f'--checkpoint={checkpoint}',
    f'--prompt={prompt}',
    '--max_tokens=2',
    f'--output={output}',
  )


def _popen(
  arguments, devices: int = 1, variables=None, **options
) -> subprocess.Popen:
  """Starts Python in the repository."""
  return subprocess.Popen(
    [sys.executable, *map(str, arguments)],
    cwd=ROOT,
    env=environment(devices) | (variables or {}),
    **options,
  )


def start(
  module: str, *arguments: str, devices: int = 1, log: pathlib.Path
) -> subprocess.Popen:
  """Starts a command of the package, or of `tests.`, in the repository."""
  name = module if module.startswith('tests.') else f'encdec_adapt.{module}'
  with open(log, 'ab') as file:
    return _popen(
      ['-m', name, *arguments], devices, stdout=file, stderr=subprocess.STDOUT
    )


def free_port() -> int:
  """A port that nobody listens on."""
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    return probe.getsockname()[1]


def start_several(
  count: int, module: str, *arguments: str, devices: int = 1, logs: pathlib.Path
) -> list[subprocess.Popen]:
  """Starts a command as a job of several processes.

  Process i writes to `process_<i>.log` in the folder `logs`.
  """
  logs.mkdir(parents=True, exist_ok=True)
  coordinator = f'127.0.0.1:{free_port()}'
  return [
    start(
      module,
      *arguments,
      f'--coordinator={coordinator}',
      f'--processes={count}',
      f'--process={index}',
      devices=devices,
      log=logs / f'process_{index}.log',
    )
    for index in range(count)
  ]


def start_programs(
  program: str,
  folder: pathlib.Path,
  count: int,
  *arguments: str,
  devices: int = 1,
  missing: int | None = None,
  **variables: str,
) -> list[subprocess.Popen]:
  """Starts Python text in the processes of a job, except a missing one.

  The program's arguments are the address of a coordinator, the number of
  processes, its own index, and `arguments`. Process INDEX writes to
  `INDEX.log` in the folder; `{}` in its environment variables is the index.
  """
  coordinator = f'127.0.0.1:{free_port()}'
  processes = []
  for index in set(range(count)) - {missing}:
    own = {key: value.format(index) for key, value in variables.items()}
    command = ['-c', program, coordinator, count, index, *arguments]
    with open(folder / f'{index}.log', 'w') as log:
      options = {'stdout': log, 'stderr': subprocess.STDOUT}
      processes.append(_popen(command, devices, own, **options))
  return processes


def wait_all(
  processes: list[subprocess.Popen], timeout: float = 300
) -> list[int]:
  """Statuses of processes that end by themselves; none is left running."""
  try:
    return [process.wait(timeout) for process in processes]
  finally:
    for process in processes:
      process.kill()
      process.wait()


def wait_until(
  due: Callable[[], bool],
  *processes: subprocess.Popen,
  text: Callable[[], str] = str,
) -> None:
  """Waits up to four minutes until `due()`, while all processes run.

  Args:
    due: whether the wait is over.
    *processes: the processes.
    text: returns their output, for failures.
  """
  deadline = time.monotonic() + 240
  while not due():
    statuses = [process.poll() for process in processes]
    assert statuses == [None] * len(processes), text()
    assert time.monotonic() < deadline, text()
    time.sleep(0.002)


def start_two(
  flags: list[str],
  workdir: pathlib.Path,
  command: str = 'train',
  devices: int = 1,
) -> tuple[list[subprocess.Popen], pathlib.Path]:
  """Starts a job of two processes; returns them and the folder of their logs.

  Args:
    flags: flags but the work directory.
    workdir: the work directory.
    command: the command, see `start`.
    devices: of each process.
  """
  logs = workdir.with_name(f'{workdir.name}_logs')
  flags = [*flags, f'--workdir={workdir}']
  return start_several(2, command, *flags, devices=devices, logs=logs), logs


def run_two(*arguments, **options) -> tuple[list[int], str]:
  """Statuses and output of a job of two processes, see `start_two`."""
  processes, logs = start_two(*arguments, **options)
  return wait_all(processes), read_logs(logs)


def read_logs(folder: pathlib.Path) -> str:
  """What the processes of a job have printed, with their names."""
  files = sorted(folder.glob('*.log'))
  return '\n'.join(f'{log.name}:\n{log.read_text()}' for log in files)


def run_code(code: str, *arguments: str) -> subprocess.CompletedProcess:
  """Runs Python code in a process of its own; its output is text."""
  return _run('-c', code, *arguments)


def run_script(script: pathlib.Path) -> subprocess.CompletedProcess:
  """Runs a Python file in its folder to its end; its output is text."""
  return subprocess.run(
    [sys.executable, script],
    cwd=script.parent,
    env=environment() | {'PYTHONPATH': str(ROOT)},
    capture_output=True,
    text=True,
    timeout=300,
  )


def run(
  module: str, *arguments: str, devices: int = 1, timeout: float = 300
) -> subprocess.CompletedProcess:
  """Runs a command to its end; its output is text."""
  name = f'encdec_adapt.{module}'
  return _run('-m', name, *arguments, devices=devices, timeout=timeout)


def _run(*arguments: str, devices: int = 1, timeout: float = 300):
  return subprocess.run(
    [sys.executable, *map(str, arguments)],
    cwd=ROOT,
    env=environment(devices),
    capture_output=True,
    text=True,
    timeout=timeout,
  )


def numbers(root: pathlib.Path) -> dict[tuple[str, ...], list[float]]:
  """Values in a study's numbers.csv by (arm, seed, task, metric), by step."""
  values = {}
  with open(root / 'numbers.csv') as file:
    for row in csv.DictReader(file):
      key = tuple(row[x] for x in ('arm', 'seed', 'task', 'metric'))
      values.setdefault(key, []).append(float(row['value']))
  return values
