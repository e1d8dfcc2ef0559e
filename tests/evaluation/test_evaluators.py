"""Tasks during training: what is recorded, and what a restart repeats."""

import json
import shutil

import pytest

from encdec_adapt import evaluate, train
from encdec_adapt.base import errors
from encdec_adapt.checkpoints import manager
from encdec_adapt.evaluation.results import results_store
from encdec_adapt.telemetry import metrics
from tests import tiny

pytest.importorskip('lm_eval')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Records, and a folder with one task."""
  folder = tmp_path_factory.mktemp('evaluators')
  tiny.make_records(folder)
  tasks = folder / 'tasks'
  tasks.mkdir()
  (tasks / 'animals.yaml').write_text(
    'task: animals\n'
    'dataset_path: json\n'
    'dataset_kwargs: {data_files: {test: animals.jsonl}}\n'
    'test_split: test\n'
    'output_type: multiple_choice\n'
    'doc_to_text: "{{text}}"\n'
    'doc_to_choice: [" cats", " dog", " fox"]\n'
    'doc_to_target: "{{answer}}"\n'
    'metric_list: [{metric: acc}]\n'
  )
  rows = [
    {'text': f'the quick {word}', 'answer': i % 3}
    for i, word in enumerate(tiny.WORDS)
  ]
  (tasks / 'animals.jsonl').write_text(
    ''.join(json.dumps(row) + '\n' for row in rows)
  )
  return folder


def _flags(folder, workdir, *evaluation):
  return [
    *tiny.flags(folder, 'prefix_lm'),
    *(f'--config.evaluation.{flag}' for flag in evaluation),
    '--config.train.steps=4',
    '--config.checkpoint.every=2',
    f'--workdir={workdir}',
  ]


def _lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.long
@pytest.mark.e2e
def test_tasks_run_during_training_and_again_after_a_kill(folder, tmp_path):
  flags = 'loss=2', f'tasks={folder}/tasks', 'tasks_every=4'
  job = _flags(folder, tmp_path / 'run', *flags)
  # Of the four held-out groups, of two rows each, the development part has one.
  job.append('--config.data.development_rows=4')
  run = tmp_path / 'run'
  assert tiny.call(train, *job) == 0
  lines = _lines(run / results_store.FILE)
  steps = {
    task: [x['step'] for x in lines if (x['task'], x['metric']) == (task, name)]
    for task, name in (('held_out', 'loss'), ('animals', 'acc'))
  }
  assert steps == {'held_out': [0, 2, 4], 'animals': [0, 4]}
  assert {x['n'] for x in lines if x['task'] == 'held_out'} == {2}
  # TensorBoard shows the same numbers, which come from these records.
  shown = [x for x in metrics.read_metrics(run) if x['kind'] == 'scores']
  found = [x['value'] for x in lines if x['task'] == 'animals']
  assert [x['animals/acc'] for x in shown] == pytest.approx(found, abs=1e-6)
  # The last one is that of the saved model.
  flags = [f'--checkpoint={run}', f'--task_folder={folder}/tasks', '--cost=']
  output = tmp_path / 'evaluation'
  assert tiny.call(evaluate, *flags, f'--output={output}') == 0
  (saved,) = _lines(output / results_store.FILE)
  assert saved['value'] == pytest.approx(found[-1], abs=1e-6)
  assert (saved['step'], saved['n']) == (4, len(tiny.WORDS))
  # As after a kill between the scores of step 4 and its save.
  content = (run / results_store.FILE).read_bytes()
  shutil.rmtree(run / manager.FOLDER / '4')
  (run / results_store.FILE).write_bytes(content + b'{"run": "')
  assert tiny.call(train, *job) == 0
  assert (run / results_store.FILE).read_bytes() == content


@pytest.mark.long
@pytest.mark.e2e
def test_nothing_is_evaluated_without_evaluators(folder, tmp_path):
  assert tiny.call(train, *_flags(folder, tmp_path / 'run', 'loss=0')) == 0
  kinds = {record['kind'] for record in metrics.read_metrics(tmp_path / 'run')}
  assert 'train' in kinds and not kinds & {'eval', 'scores'}
  assert not _lines(tmp_path / 'run' / results_store.FILE)
  assert manager.open_latest(tmp_path / 'run').step == 4


@pytest.mark.e2e
def test_a_wrong_task_is_refused_before_any_work(folder, tmp_path):
  broken = shutil.copytree(folder / 'tasks', tmp_path / 'broken')
  path = broken / 'animals.jsonl'
  path.write_text(path.read_text() + '{"text": "a dog"}\n')
  run = tmp_path / 'run'
  with pytest.raises(errors.UserError, match=r"line 14 has no field 'answer'"):
    flags = 'loss=2', f'tasks={broken}', 'tasks_every=2'
    tiny.call(train, *_flags(folder, run, *flags))
  assert not (run / metrics.FILE).exists()
