"""Runs, records and studies that earlier versions saved.

Each archive in tests/saved is named for the commit that made it, with

    python -m encdec_adapt.study --study=study.py

in a folder with study.py, lines.txt and a link to configs. Locks, reports,
TensorBoard's files and the state of the stage `loss_run` were removed then.
"""

import json
import pathlib
import zipfile

import numpy as np
import pytest

from encdec_adapt import study, train
from encdec_adapt.data.records import record_sets
from encdec_adapt.lab import pages, stage_states, stages
from encdec_adapt.stored import model_on_disk
from encdec_adapt.telemetry import metrics
from tests import tiny
from tests.e2e import folders

ARCHIVES = sorted((tiny.ROOT / 'tests' / 'saved').glob('*.zip'))


@pytest.mark.long
@pytest.mark.parametrize('archive', ARCHIVES, ids=lambda path: path.stem)
def test_a_study_is_opened_resumed_and_exported(
  archive, tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  pathlib.Path('configs').symlink_to(tiny.ROOT / 'configs')
  with zipfile.ZipFile(archive) as file:
    file.extractall()
  # As a user changes a page for this version.
  page = pathlib.Path('study.py')
  page.write_text(
    page.read_text()
    .replace("train.evaluators': 'loss=2'", "evaluation.loss': 2")
    .replace('encdec_adapt.evaluation.studies', 'encdec_adapt.lab')
  )
  results = pathlib.Path('saved/loss_run/results.jsonl')
  before = results.read_text()

  # The last stage finds its results; no other stage runs.
  assert tiny.call(study, '--study=study.py', '--worker') == 0
  out = capsys.readouterr().out
  assert '[run]' not in out and '0 evaluations, 1 done before' in out

  # Another study reads the stages that this one had finished.
  state = pathlib.Path('saved/stages/run/stage.json')
  other = page.read_text().replace("='saved'", "='second'")
  pathlib.Path('second.py').write_text(other)
  assert tiny.call(study, '--study=second.py', '--worker') == 0
  assert '[' not in capsys.readouterr().out  # Nothing ran.
  # A run of another configuration is not that stage.
  third = other.replace('second', 'third').replace(
    "rmup_steps': 2", "rmup_steps': 1"
  )
  pathlib.Path('third.py').write_text(third)
  page = study.load('third.py')
  states = stage_states.States(page, stages.resolve(page))
  assert states.missing(states.stages['loss_run']) == ['run']
  assert 'format' not in json.loads(state.read_text())
  assert tiny.call(study, '--study=study.py') == 0
  assert json.loads(state.read_text())['format'] == 2
  assert results.read_text() == before
  assert len(record_sets.RecordSet.open('saved/records/train'))

  exported = folders.export('saved/run', tmp_path / 'exported')
  weights, trained = (
    model_on_disk.open_model(str(path)).arrays()
    for path in (exported, 'saved/run')
  )
  assert weights.keys() == trained.keys()
  for name, array in trained.items():
    np.testing.assert_array_equal(weights[name], array, name)

  run = stages.resolve(study.load('study.py'))['run']
  folders_of = {x: f'saved/{x}' for x in ('run', 'records')} | {'root': 'saved'}
  flags = [pages.fill(text, folders_of) for text in run.arguments]
  assert tiny.call(train, *flags, '--config.train.steps=6') == 0
  lines = metrics.read_metrics('saved/run')
  steps = [line['step'] for line in lines if line['kind'] == 'eval']
  assert steps == [0, 2, 4, 6]
