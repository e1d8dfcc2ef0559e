"""The run on a card: parts one after the other, each with a deadline.

Every part is a process. At its end a line goes to OUTPUT/parts.jsonl: `part`,
`state`, `seconds`, `limit`, and its scores and curves. `state` is 'finished';
'not finished' (SIGTERM at the deadline, or of the whole run); 'failed', with
the exit status; 'restarted' (slow steps); or 'dropped': no time is left, or an
earlier part failed. OUTPUT/log.txt has what processes print.

If time is short, the run drops translation first, then summaries, then the
control's evaluations between the first and the last step, never the control:
the pair leaves it and the scores their time.

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

_GRACE = 15.0  # Seconds between SIGTERM and SIGKILL.
_SAVING = 45.0  # The same for a job on text, which saves 6.8 GB.
_LEAST = 5.0  # Seconds for a part to be worth starting.
_FIRST = 20  # Steps whose time tells whether a card is slow.
# Metrics that come back with the values of single examples.
_METRICS = ('loss', 'loss_shuffled_prefix', 'rougeL', 'chrf')
# Fields of the manifest that come back, so that the report is of this run.
_FIELDS = ('commit', 'rates', 'flops', 'files', 'floors', 'documents')

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
    imports = [(folders.card / 'site').absolute(), plan.ROOT]
    imports += filter(None, [os.environ.get('PYTHONPATH')])
    self._environment = {
      **os.environ,
      'PYTHONPATH': ':'.join(map(str, imports)),
      'JAX_COMPILATION_CACHE_DIR': str((folders.card / 'compiled').absolute()),
      'PYTHONUNBUFFERED': '1',
      'JAX_PLATFORMS': 'cpu' if size.is_rehearsal else 'cuda',
      'XLA_PYTHON_CLIENT_MEM_FRACTION': '.9',
    }

  @property
  def seconds_left(self) -> float:
    """Seconds until the end of the run."""
    return self.size.end - (time.monotonic() - self._start)

  def part(
    self,
    name: str,
    command: list[str],
    limit: float,
    results: Results,
    stop: Callable[[], float] | None = None,
    grace: float = _GRACE,
  ) -> str:
    """Runs a part to its end or deadline and writes its line.

    Args:
      name: name of the part.
      command: command line of its process.
      limit: seconds to SIGTERM; fewer if the run has fewer left.
      results: returns what comes back, also of a part that is not finished.
      stop: returns the seconds of a step that is too slow, else 0.
      grace: seconds between SIGTERM and SIGKILL.

    Returns:
      The state.
    """
    limit = min(limit, self.seconds_left - grace)
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
        _end(process, grace)
        line = {'status': process.returncode, **_safe(results)}
        if slow:
          line['step_seconds'] = slow
        self._write(name, state, time.monotonic() - began, limit, line)
    return state

  def drop(self, name: str, reason: str) -> str:
    """Writes the line of a part that is not started; returns its state."""
    self._write(name, 'dropped', 0, 0, {'reason': reason})
    return 'dropped'

  def _write(self, name, state, seconds, limit, fields):
    line = {'part': name, 'state': state, 'seconds': round(seconds, 1)}
    line |= {'limit': round(limit, 1), **fields}
    with open(self.folders.output / 'parts.jsonl', 'a') as file:
      file.write(json.dumps(line) + '\n')
      file.flush()
      os.fsync(file.fileno())
    print(f'{name}: {state}, {seconds:.0f} of {limit:.0f} s', flush=True)


def _end(process: subprocess.Popen, grace: float) -> None:
  """Ends a process with SIGTERM, after the grace with SIGKILL."""
  if process.poll() is None:
    process.send_signal(signal.SIGTERM)
    try:
      process.wait(grace)
    except subprocess.TimeoutExpired:
      process.kill()
  process.wait()


def _safe(results: Results) -> Mapping[str, Any]:
  """Returns results; of a part that ended too early there may be none."""
  try:
    return results()
  except Exception as error:  # The line of the part must be written.
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
  command = [sys.executable, '-m', 'launch.real_model', 'source']
  command += [f'--folder={folders.root}']
  command += ['--rehearsal'] * size.is_rehearsal
  facts = functools.partial(_facts, job.manifest)
  if job.part('source', command, limits['source'], facts) != 'finished':
    log = (folders.output / 'log.txt').read_text()
    raise commands.LaunchError(
      f'without its source nothing can run: {log.strip().splitlines()[-1]}'
    )
  _score(job, 'source_scores', ['source'], limits['source_scores'])

  steps = job.manifest['steps']
  scoring = limits['scores'] + _GRACE
  control = limits['decoder'] + _SAVING
  slow = functools.partial(slow_step, card / 'pair', size.slow)
  state = _train(job, 'pair', steps, size.every, control + scoring, slow)
  if state == 'restarted':
    steps = min(size.fewer_steps, steps)
    shutil.rmtree(card / 'pair')
    state = _train(job, 'pair', steps, size.every, control + scoring)
  if state == 'not finished':
    steps = last_step(card / 'pair') or steps
  steps = plan.decoder_steps(job.manifest['flops'], steps)
  every = steps if job.seconds_left < size.control else size.every
  _train(job, 'decoder', steps, every, scoring)
  _score(job, 'scores', list(plan.ARMS), limits['scores'])

  for task in plan.TASKS:
    _run_task(job, task)
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


def _facts(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
  """Returns the card, versions of packages, and what was prepared."""
  from importlib import metadata

  names = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint')
  versions = {name: metadata.version(name) for name in names}
  query = ['nvidia-smi', '--query-gpu=name,driver_version']
  card = 'no card'
  if shutil.which(query[0]):
    process = subprocess.run(
      [*query, '--format=csv,noheader'], capture_output=True, text=True
    )
    card = process.stdout.strip() or process.stderr.strip()
  prepared = {name: manifest[name] for name in _FIELDS}
  return {'card': card, 'python': sys.version.split()[0], **versions} | prepared


def _command(name: str, *arguments: str) -> list[str]:
  return [sys.executable, '-m', f'encdec_adapt.{name}', *arguments]


def _job_flags(workdir: pathlib.Path, **values: Any) -> list[str]:
  return [
    *plan.flags(
      train__trackers='()',
      checkpoint__every=1_000_000,  # Only the last step.
      checkpoint__keep=1,
      # 'auto' would compile up to two steps; the plan of the pair's has 34 GiB.
      compute__remat='dots',
      **values,
    ),
    f'--workdir={workdir}',
  ]


def _train(
  job: Run,
  arm: str,
  steps: int,
  every: int,
  reserved: float,
  stop: Callable[[], float] | None = None,
) -> str:
  """Trains an arm on text in all the time that is not reserved."""
  size, card = job.size, job.folders.card
  texts = pathlib.Path(job.manifest['folder']) / 'texts'
  command = _command(
    'train',
    *plan.arm_flags(size, arm, str(card / 'source')),
    *plan.text_flags(size, str(texts)),
    *_job_flags(
      card / arm,
      data__folder=card / 'records',
      train__steps=steps,
      evaluation__loss=every,
      optimizer__learning_rate=job.manifest['rates'][arm],
    ),
  )
  results = functools.partial(curves, card / arm)
  limit = job.seconds_left - reserved - _SAVING
  return job.part(arm, command, limit, results, stop, _SAVING)


def _score(job: Run, name: str, names: list[str], limit: float) -> None:
  """Scores models on the held-out rows."""
  card = job.folders.card
  models = [card / x for x in names if _exists(card / x)]
  if not models:
    job.drop(name, f'no checkpoint of {" or ".join(names)}')
    return
  command = _command(
    'evaluate',
    *(f'--checkpoint={path}' for path in models),
    f'--records={card / "records" / "eval"}',
    f'--output={card / name}',
    '--batch_size=32',
    '--cost=',
  )
  job.part(name, command, limit, functools.partial(scores, card / name))


def _run_task(job: Run, task: str) -> None:
  """Tunes both arms on a task, then both answer its test."""
  limits, card = job.size.limits, job.folders.card
  kinds = [kind for kind in ('tuned', 'answers') for _ in plan.ARMS]
  missing = [arm for arm in plan.ARMS if not _exists(card / arm)]
  if missing or job.seconds_left < sum(limits[kind] for kind in kinds):
    reason = f'{job.seconds_left:.0f} s are left'
    if missing:
      reason = f'no checkpoint of {" and ".join(missing)}'
    job.drop(task, reason)
    return
  for index, kind in enumerate(kinds):
    arm = plan.ARMS[index % len(plan.ARMS)]
    # A share of the time: what a part does not need goes to those after it.
    share = limits[kind] / sum(limits[x] for x in kinds[index:])
    part = _tune if kind == 'tuned' else _answer
    part(job, task, arm, share * job.seconds_left)


def _tune(job: Run, task: str, arm: str, limit: float) -> None:
  size, card = job.size, job.folders.card
  run = card / f'{arm}_{task}'
  examples = f'{job.manifest["folder"]}/{task}/train.jsonl'
  command = _command(
    'train',
    f'--config=sft:source={card / arm}',
    *plan.task_flags(size, task, examples),
    *_job_flags(
      run,
      data__folder=card / task / 'records',
      train__batch_size=size.task_rows,
      train__steps=size.task_steps,
      evaluation__loss=0,
      evaluation__samples=0,
      checkpoint__keep_best=False,
    ),
  )
  job.part(run.name, command, limit, functools.partial(curves, run))


def _answer(job: Run, task: str, arm: str, limit: float) -> None:
  size, card = job.size, job.folders.card
  index, run = plan.TASKS.index(task), card / f'{arm}_{task}'
  name = f'{run.name}_answers'
  if not _exists(run):
    job.drop(name, f'no checkpoint of {run.name}')
    return
  command = _command(
    'evaluate',
    f'--checkpoint={run}',
    f'--pairs={card / task / "test.jsonl"}#source,target',
    f'--output={card / name}',
    f'--max_tokens={size.answer_tokens[index]}',
    # All answers at once: one size of the state, and few programs.
    '--batch_size=640',
    '--cost=',
    *([f'--limit={size.answers[index]}'] if size.answers[index] else []),
  )
  job.part(name, command, limit, functools.partial(scores, card / name))


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
  return {
    'evaluations': [
      {name: x[name] for name in ('step', 'loss')}
      for x in records
      if x['kind'] == 'eval'
    ],
    'steps': last_step(run),
    'step_seconds': step_seconds(records),
    'mfu': times[-1]['mfu'] if times else None,
  }


def scores(folder: pathlib.Path) -> dict[str, Any]:
  """Returns the scores of an evaluation."""
  rows = _lines(folder / 'results.jsonl')
  return {'scores': [x for x in rows if x['metric'] in _METRICS]}


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
