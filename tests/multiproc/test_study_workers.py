"""Workers of a study: several processes, two kills, each stage made once."""

import json
import os
import pathlib

import pytest

from tests import tiny

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

_PAGE = """
from encdec_adapt.lab import pages

STACK = dict(layers=1, width=16, mlp_width=32, heads=2, kv_heads=1, head_dim=8)
STACK |= dict(vocab_size=512, window=8)
CHANGES = {
  'data.source': 'text:FOLDER/lines.txt#lines', 'data.vocabulary': 'bytes',
  'data.objective': 'prefix_lm', 'data.encoder_length': 16,
  'data.decoder_length': 16, 'data.shards': 1, 'data.workers': 1,
  'data.eval_fraction': 0.1, 'data.repeat': True, 'compute.dtype': 'float32',
  'train.batch_size': 8, 'train.steps': 200, 'train.log_every': 1,
  'evaluation.loss': 100, 'checkpoint.every': 40,
}
CHANGES |= {
  f'model.{side}.{key}': value
  for side in ('encoder', 'decoder') for key, value in STACK.items()
}


def get_study(arg):
  return pages.Study(
    'small', 'A study', 'tiny',
    arms=(
      pages.Arm('pair', 'base', CHANGES),
      pages.Arm(
        'tuned', 'base', CHANGES | {'init.mode': 'checkpoint', 'data.seed': 1},
        starts={'init.encoder': 'pair'},
      ),
    ),
    seeds=(0, 1),
    evaluations=(pages.Evaluation('loss', records='pair'),),
  )
"""
RUNS = [f'{arm}{seed}' for arm in ('pair', 'tuned') for seed in ('', '_seed1')]


def _start(folder: pathlib.Path, root: str, log: str):
  """Starts a worker on a single core."""
  cores = os.sched_getaffinity(0)
  os.sched_setaffinity(0, {min(cores)})
  try:
    return tiny.start(
      *('study', f'--study={folder}/page.py', f'--root={folder}/{root}'),
      *('--worker', '--jobs=1'),
      log=folder / f'{log}.log',
    )
  finally:
    os.sched_setaffinity(0, cores)


def _wait_for_training(root: pathlib.Path, run: str, workers) -> int:
  """Waits until a run has trained; returns the process that holds it."""
  metrics = root / run / 'metrics.jsonl'
  tiny.wait_until(
    lambda: metrics.exists() and '"train"' in metrics.read_text(), *workers
  )
  return json.loads((root / 'stages' / run / 'job.lock').read_text())['pid']


def test_three_workers_make_what_one_makes(tmp_path):
  (tmp_path / 'page.py').write_text(_PAGE.replace('FOLDER', str(tmp_path)))
  (tmp_path / 'lines.txt').write_text('\n'.join(tiny.text(200)))
  single = _start(tmp_path, 'a/single', 'single')
  assert single.wait(600) == 0, (tmp_path / 'single.log').read_text()[-3000:]

  root = tmp_path / 'b' / 'three'
  workers = {}

  def start():
    worker = _start(tmp_path, 'b/three', f'worker{len(workers)}')
    workers[worker.pid] = worker

  try:
    for _ in range(3):
      start()
    for run in ('pair', 'tuned'):
      pid = _wait_for_training(root, run, workers.values())
      workers.pop(pid).kill()
      start()
    for pid, worker in workers.items():
      assert worker.wait(600) == 0, pid
  finally:
    for worker in workers.values():
      worker.kill()
      worker.wait()

  states = {
    file.parent.name: json.loads(file.read_text())
    for file in (root / 'stages').glob('*/stage.json')
  }
  assert {x['status'] for x in states.values()} == {'finished'}
  assert [states[run]['starts'] for run in RUNS] == [2, 1, 2, 1]
  lines = (tmp_path / 'b' / 'studies' / 'stages.jsonl').read_text().split('\n')
  names = [json.loads(line)['name'] for line in lines if line]
  assert sorted(names) == sorted(states)  # Each has ended once.
  for run in RUNS:
    tiny.assert_same_params(root / run, tmp_path / 'a' / 'single' / run)
    scores = [
      [
        json.loads(x)['value']
        for x in (folder / f'loss_{run}' / 'results.jsonl').open()
      ]
      for folder in (root, tmp_path / 'a' / 'single')
    ]
    assert scores[0] == scores[1]
