"""The run on a card: parts one after the other, each with a deadline.

Every part is a process. At its end a line goes to OUTPUT/parts.jsonl: `part`,
`state`, `seconds`, `limit`, and its scores and curves. `state` is 'finished';
'not finished' (SIGTERM at the deadline, or of the whole run); 'failed', with
the exit status; 'restarted' (slow steps); or 'dropped', for lack of time or of
what an earlier part should have made. OUTPUT/log.txt has what processes print.

What is dropped first: translation, then the control's evaluations between the
first and the last step, never the control.

This module imports nothing of the package.
"""

from collections.abc import Callable, Mapping
import functools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from typing import Any

from launch import commands
from launch.real_model import plan, weights

_GRACE = 15.0  # Seconds after SIGTERM: a job saves.
_LEAST = 5.0  # Seconds for a part to be worth starting.
_FIRST = 20  # Steps whose time tells whether a card is slow.
# Metrics that come back with the values of single examples.
_METRICS = ('loss', 'loss_shuffled_prefix', 'rougeL', 'chrf', 'cut_short')

Results = Callable[[], Mapping[str, Any]]


class Run:
  """The parts of a run, their deadlines and their results."""

  def __init__(self, size: plan.Size, folders: plan.Folders):
    """Reads the manifest of the last copy and empties the output.

    Raises:
      LaunchError: the last copy is missing.
    """
    self.size, self.folders = size, folders
    self._start = time.monotonic()
    path = folders.copy(size.parts + 1) / 'manifest.json'
    if not path.is_file():
      raise commands.LaunchError(
        f'{path.parent} is not on this machine; copy it, and then run.'
      )
    self.manifest = plan.read_json(path)
    shutil.rmtree(folders.card, ignore_errors=True)
    for folder in (folders.output, folders.card):
      folder.mkdir(parents=True, exist_ok=True)
    for name in ('parts.jsonl', 'log.txt'):
      (folders.output / name).unlink(missing_ok=True)
    self.failed: list[str] = []
    path = [(folders.card / 'site').absolute(), plan.ROOT]
    path += filter(None, [os.environ.get('PYTHONPATH')])
    self._environment = {
      **os.environ,
      'PYTHONPATH': ':'.join(map(str, path)),
      'PYTHONUNBUFFERED': '1',
      'JAX_PLATFORMS': 'cpu' if size.is_rehearsal else 'cuda',
      'XLA_PYTHON_CLIENT_MEM_FRACTION': '.9',
    }

  @property
  def left(self) -> float:
    """Seconds until the end of the run, less those of a stop."""
    return self.size.end - _GRACE - (time.monotonic() - self._start)

  def part(
    self,
    name: str,
    command: list[str],
    limit: float,
    results: Results,
    stop: Callable[[], float] | None = None,
  ) -> str:
    """Runs a part to its end or deadline and writes its line.

    Args:
      name: name of the part.
      command: its process.
      limit: seconds; fewer if the run has fewer left.
      results: returns what comes back, also of a part that is not finished.
      stop: returns the seconds of a step that is too slow, else 0.

    Returns:
      The state.
    """
    limit = min(limit, self.left)
    if limit < _LEAST:
      return self.drop(name, f'{max(limit, 0):.0f} s are left')
    began, state, slow = time.monotonic(), 'not finished', 0.0
    with open(self.folders.output / 'log.txt', 'a') as log:
      print(f'\n== {name}', file=log, flush=True)
      process = subprocess.Popen(
        command,
        cwd=plan.ROOT,
        env=self._environment,
        stdout=log,
        stderr=subprocess.STDOUT,
      )
      try:
        while process.poll() is None and time.monotonic() - began < limit:
          if slow := stop() if stop else 0:
            # Not SIGTERM: the run is discarded, and a save takes its time.
            process.kill()
            break
          time.sleep(0.1)
        if slow:
          state = 'restarted'
        elif process.poll() is not None:
          state = 'failed' if process.returncode else 'finished'
          self.failed += [name] * (state == 'failed')
      finally:
        # Also at a SIGTERM of the whole run.
        _end(process)
        line = {'status': process.returncode, **_safe(results)}
        if slow:
          line['step_seconds'] = slow
        self._write(name, state, time.monotonic() - began, limit, line)
    return state

  def drop(self, name: str, reason: str) -> str:
    """Writes the line of a part that is not started; returns its state."""
    self._write(name, 'dropped', 0, 0, {'reason': reason})
    return 'dropped'

  def _write(self, name, state, seconds, limit, more):
    line = {'part': name, 'state': state, 'seconds': round(seconds, 1)}
    line |= {'limit': round(limit, 1), **more}
    with open(self.folders.output / 'parts.jsonl', 'a') as file:
      file.write(json.dumps(line) + '\n')
      file.flush()
      os.fsync(file.fileno())
    print(f'{name}: {state}, {seconds:.0f} of {limit:.0f} s', flush=True)


def _end(process: subprocess.Popen) -> None:
  """Ends a process with SIGTERM, after the grace with SIGKILL."""
  if process.poll() is None:
    process.send_signal(signal.SIGTERM)
    try:
      process.wait(_GRACE)
    except subprocess.TimeoutExpired:
      process.kill()
  process.wait()


def _safe(results: Results) -> Mapping[str, Any]:
  """Returns results; of a part that ended too early there may be none."""
  try:
    return results()
  except (OSError, ValueError, KeyError) as error:
    return {'results': f'{type(error).__name__}: {error}'}


# -- The parts -----------------------------------------------------------------


def run(size: plan.Size, folders: plan.Folders) -> None:
  """Runs all parts.

  Raises:
    LaunchError: a copy is missing or damaged, or a part failed.
  """
  # The part that runs then is ended and written, see `Run.part`.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
  job = Run(size, folders)
  card, limits = folders.card, size.limits
  more = ['--rehearsal'] if size.is_rehearsal else []
  source = [sys.executable, '-m', 'launch.real_model', 'source', *more]
  source += [f'--folder={folders.root}']
  if job.part('source', source, limits['source'], _machine) != 'finished':
    log = (folders.output / 'log.txt').read_text()
    raise commands.LaunchError(
      f'without its source nothing can run: {log.strip().splitlines()[-1]}'
    )
  _score(job, 'source_scores', ['source'], limits['source_scores'])

  planned = job.manifest['steps']
  slow = functools.partial(slow_step, card / 'pair', size.slow)
  state = _train(job, 'pair', planned, size.every, stop=slow)
  if state == 'restarted':
    planned = min(size.fewer_steps, planned)
    shutil.rmtree(card / 'pair')
    state = _train(job, 'pair', planned, size.every)
  done = last_step(card / 'pair') if state == 'not finished' else planned
  steps = plan.decoder_steps(job.manifest['flops'], done or planned)
  every = steps if job.left < size.control else size.every
  _train(job, 'decoder', steps, every)
  _score(job, 'scores', list(plan.ARMS), limits['scores'])

  for task in plan.TASKS:
    if task == plan.TASKS[-1] and job.left < size.last_task:
      job.drop(task, f'{job.left:.0f} s are left')
      continue
    for arm in plan.ARMS:
      _tune(job, task, arm)
  print(f'{folders.output} has the results.')
  if job.failed:
    raise commands.LaunchError(
      f'{", ".join(job.failed)} failed; {folders.output / "log.txt"} has the'
      ' errors.'
    )


def unpack(size: plan.Size, folders: plan.Folders) -> None:
  """The first part: wheels, records, and the source's folder.

  Raises:
    LaunchError: a copy is missing or damaged.
  """
  last = folders.copy(size.parts + 1)
  manifest = plan.read_json(last / 'manifest.json')
  card, archive = folders.card, last / 'files.tar.xz'
  if weights.digest(archive) != manifest['files']:
    raise commands.LaunchError(f'{archive} is damaged; copy {last} again.')
  parts = [folders.copy(i + 1) for i in range(size.parts)]
  path = weights.join(manifest['weights'], parts, card / 'source')
  wheels = sorted(map(str, last.glob('wheels/*.whl')))
  if wheels:
    site = card / 'site'
    subprocess.run(
      [sys.executable, '-m', 'pip', 'install', '--quiet', '--no-index']
      + ['--no-deps', '--no-compile', f'--target={site}', *wheels],
      check=True,
    )
    sys.path.insert(0, str(site))
  with tarfile.open(archive) as files:
    files.extractall(card, filter='data')
  if path.suffix == '.gguf':
    weights.from_gguf(path, card / 'source')
    path.unlink()


def _machine() -> Mapping[str, Any]:
  """Returns the name of the card and the versions of what computes."""
  from importlib import metadata

  names = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint')
  versions = {name: metadata.version(name) for name in names}
  query = ['nvidia-smi', '--query-gpu=name,driver_version']
  card = 'no card'
  if shutil.which(query[0]):
    done = subprocess.run(
      [*query, '--format=csv,noheader'], capture_output=True, text=True
    )
    card = done.stdout.strip() or done.stderr.strip()
  return {'card': card, 'python': sys.version.split()[0], **versions}


def _command(name: str, *arguments: str) -> list[str]:
  return [sys.executable, '-m', f'encdec_adapt.{name}', *arguments]


def _job_flags(job: Run, workdir: pathlib.Path, **values: Any) -> list[str]:
  return [
    *plan.flags(
      train__trackers='()',
      checkpoint__every=1_000_000,  # Only the last step.
      checkpoint__keep=1,
      compute__compile_cache=job.folders.card / 'compiled',
      **values,
    ),
    f'--workdir={workdir}',
  ]


def _train(
  job: Run,
  arm: str,
  steps: int,
  every: int,
  stop: Callable[[], float] | None = None,
) -> str:
  """Trains an arm on text; returns the state."""
  size, card = job.size, job.folders.card
  texts = pathlib.Path(job.manifest['folder']) / 'texts'
  command = _command(
    'train',
    *plan.arm_flags(size, arm, str(card / 'source')),
    *plan.text_flags(size, str(texts)),
    *_job_flags(
      job,
      card / arm,
      data__folder=card / 'records',
      train__steps=steps,
      evaluation__loss=every,
      optimizer__learning_rate=job.manifest['rates'][arm],
    ),
  )
  results = functools.partial(curves, card / arm)
  return job.part(arm, command, job.size.limits[arm], results, stop)


def _score(job: Run, name: str, runs: list[str], limit: float) -> None:
  """Scores models on the held-out rows."""
  card = job.folders.card
  found = [x for x in runs if _exists(card / x)]
  if not found:
    job.drop(name, f'no checkpoint of {" or ".join(runs)}')
    return
  command = _command(
    'evaluate',
    *(f'--checkpoint={card / x}' for x in found),
    f'--records={card / "records" / "eval"}',
    f'--output={card / name}',
    '--batch_size=32',
    '--cost=',
  )
  job.part(name, command, limit, functools.partial(scores, card / name))


def _tune(job: Run, task: str, arm: str) -> None:
  """Tunes an arm on a task and answers its test."""
  size, card = job.size, job.folders.card
  index, run = plan.TASKS.index(task), card / f'{arm}_{task}'
  if not _exists(card / arm):
    job.drop(f'{arm}_{task}', f'no checkpoint of {arm}')
    return
  examples = f'{job.manifest["folder"]}/{task}/train.jsonl'
  command = _command(
    'train',
    f'--config=sft:source={card / arm}',
    *plan.task_flags(size, task, examples),
    *_job_flags(
      job,
      run,
      data__folder=card / task / 'records',
      train__batch_size=size.task_rows,
      train__steps=size.task_steps,
      evaluation__loss=0,
      evaluation__samples=0,
      checkpoint__keep_best=False,
    ),
  )
  limits, results = size.limits, functools.partial(curves, run)
  job.part(run.name, command, limits['tuned'], results)
  name = f'{run.name}_answers'
  if not _exists(run):
    job.drop(name, f'no checkpoint of {run.name}')
    return
  limit = size.answers[index]
  command = _command(
    'evaluate',
    f'--checkpoint={run}',
    f'--pairs={card / task / "test.jsonl"}#source,target',
    f'--output={card / name}',
    '--max_tokens=64',
    '--batch_size=64',
    '--cost=',
    *([f'--limit={limit}'] if limit else []),
  )
  results = functools.partial(scores, card / name)
  job.part(name, command, limits['answers'], results)


# -- What comes back -----------------------------------------------------------


def _exists(model: pathlib.Path) -> bool:
  """Whether a folder of weights, or a checkpoint of a run, is there."""
  return (model / weights.SAFETENSORS).exists() or any(
    x.name.isdigit() for x in model.glob('checkpoints/*')
  )


def _lines(path: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the JSON lines of a file, without a last one that is cut."""
  if not path.exists():
    return []
  text = path.read_text()
  return [json.loads(x) for x in text[: text.rfind('\n') + 1].splitlines()]


def curves(run: pathlib.Path) -> dict[str, Any]:
  """Returns the held-out losses of a job by step, and its rates."""
  records = _lines(run / 'metrics.jsonl')
  times = [x for x in records if x['kind'] == 'time' and 'mfu' in x]
  summary = run / 'summary.json'
  return {
    'evaluations': [
      {name: x[name] for name in ('step', 'loss', 'accuracy')}
      for x in records
      if x['kind'] == 'eval'
    ],
    'losses': [[x['step'], x['loss']] for x in records if x['kind'] == 'train'],
    'steps': last_step(run),
    'step_seconds': step_seconds(records),
    'mfu': times[-1]['mfu'] if times else None,
    'summary': plan.read_json(summary) if summary.exists() else None,
  }


def scores(folder: pathlib.Path) -> dict[str, Any]:
  """Returns the scores and the answers of an evaluation."""
  answers = [
    x['answer']
    for path in sorted(folder.glob('predictions/*.jsonl'))
    for x in _lines(path)
  ]
  rows = _lines(folder / 'results.jsonl')
  return {
    'scores': [x for x in rows if x['metric'] in _METRICS],
    'means': {
      f'{pathlib.Path(x["run"]).name}/{x["metric"]}': x['value'] for x in rows
    },
    'answers': answers,
  }


def last_step(run: pathlib.Path) -> int:
  """Returns the last step of a job's newest checkpoint; 0 without any."""
  steps = [x.name for x in run.glob('checkpoints/*') if x.name.isdigit()]
  return max(map(int, steps), default=0)


def step_seconds(records: list[dict[str, Any]]) -> float | None:
  """Returns the mean seconds of a step without what compiling, evaluating and
  saving take; None without steps."""
  parts = ('data', 'dispatch', 'device')
  times = [
    sum(x[f'seconds/{part}'] for part in parts)
    for x in records
    if x['kind'] == 'time' and not x['seconds/compile']
  ]
  return sum(times) / len(times) if times else None


def slow_step(run: pathlib.Path, limit: float) -> float:
  """Returns the seconds of a step if the first steps exceed the limit, else 0.

  Only between the step that decides and the next few: later it is too late.
  """
  records = _lines(run / 'metrics.jsonl')
  steps = [x['step'] for x in records if x['kind'] == 'time']
  if not steps or not _FIRST <= steps[-1] < 2 * _FIRST:
    return 0
  first = [x for x in records if x['step'] <= _FIRST]
  seconds = step_seconds(first) or 0
  return seconds if seconds > limit else 0
