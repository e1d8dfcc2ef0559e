"""The results store: what a later run finds after kills and damage."""

import json
import math

import numpy as np
import pytest

from encdec_adapt.base import errors
from encdec_adapt.evaluation.results import results_store
from encdec_adapt.files import append_log, paths

MODEL = results_store.Model('runs/a', 4, 'f00d')
OPTIONS = {'task': 'boolq', 'shots': 0}
SCORES = [
  results_store.Score('boolq', 'acc', 0.5, 0.25, 4, (1.0, 0.0, 0.0, 1.0)),
  results_store.Score('boolq', 'bleu', 12.25, None, 4),
]


def _add(folder, *given):
  with results_store.Store(folder) as store:
    for model, options, scores in given:
      store.add(model, options, scores)


@pytest.mark.parametrize('kind', ['disk', 'bucket'])
def test_scores_are_found_by_model_and_options(kind, tmp_path, bucket):
  folder = tmp_path if kind == 'disk' else f'{bucket}/results'
  _add(folder, (MODEL, OPTIONS, SCORES))
  with results_store.Store(folder) as store:
    assert store.find(MODEL, {'shots': 0, 'task': 'boolq'}) == SCORES
    assert not store.find(MODEL, {**OPTIONS, 'shots': 5})
    for other in (
      results_store.Model('runs/b', 4, 'f00d'),
      results_store.Model('runs/a', 8, 'f00d'),
      results_store.Model('runs/a', 4, 'beef'),
    ):
      assert not store.find(other, OPTIONS)


def test_the_newest_results_of_a_run(tmp_path):
  later = results_store.Model('runs/a', 8, 'f00d')
  again = [
    results_store.Score('boolq', 'acc', math.nan, None, 4, (math.nan, 1.0))
  ]
  _add(tmp_path, (later, OPTIONS, SCORES), (MODEL, OPTIONS, SCORES))
  _add(tmp_path, (later, OPTIONS, again))
  with results_store.Store(tmp_path) as store:
    found = {score.metric: (opts, score) for opts, score in store.entries()}
    assert set(found) == {'acc', 'bleu'}
    options, score = found['acc']
    assert options == OPTIONS
    # JSON has no numbers that are not finite.
    assert math.isnan(score.value) and math.isnan(score.scores[0])


def test_ratios_keep_weights_and_groups(tmp_path):
  weights, groups = np.array([3.0, 5.0]), ('json::docs', 'ast::docs')
  score = results_store.ratio_score(
    'held_out', 'loss', np.array([6.0, 20.0]), weights, groups
  )
  assert score.value == 26 / 8 and score.weights == (3, 5)
  _add(tmp_path, (MODEL, OPTIONS, [score]))
  with results_store.Store(tmp_path) as store:
    (found,) = store.find(MODEL, OPTIONS)
  assert (found.weights, found.groups) == (score.weights, groups)
  assert found.scores == pytest.approx(score.scores)


def test_lines_have_all_that_a_reader_needs(tmp_path):
  _add(tmp_path, (MODEL, OPTIONS, SCORES))
  lines = (tmp_path / results_store.FILE).read_text().splitlines()
  assert json.loads(lines[0]) == {
    'run': 'runs/a',
    'step': 4,
    'fingerprint': 'f00d',
    'options': OPTIONS,
    'task': 'boolq',
    'metric': 'acc',
    'value': 0.5,
    'stderr': 0.25,
    'n': 4,
    'scores': [1, 0, 0, 1],
  }


@pytest.mark.parametrize('lines', [0, 1])
def test_a_kill_while_writing_leaves_no_half_of_a_task(lines, tmp_path):
  other = {'task': 'copa'}
  _add(tmp_path, (MODEL, other, SCORES), (MODEL, OPTIONS, SCORES))
  path = tmp_path / results_store.FILE
  content = path.read_bytes().splitlines(keepends=True)
  path.write_bytes(b''.join(content[: 2 + lines]) + content[3][:-5])
  with results_store.Store(tmp_path) as store:
    assert not store.find(MODEL, OPTIONS)
    # Without a line of the interrupted task the one before it is repeated.
    assert bool(store.find(MODEL, other)) == bool(lines)
    store.add(MODEL, OPTIONS, SCORES)
  with results_store.Store(tmp_path) as store:
    assert store.find(MODEL, OPTIONS) == SCORES


@pytest.mark.parametrize(
  'line', ['nonsense', '[1]', '{"run": "a"}', '{"run": "a", "step": "x"}']
)
def test_a_bad_line_is_named(line, tmp_path):
  _add(tmp_path, (MODEL, OPTIONS, SCORES))
  path = tmp_path / results_store.FILE
  path.write_text(path.read_text() + line + '\n')
  with pytest.raises(errors.UserError, match=r'results.jsonl, line 3 is not'):
    results_store.Store(tmp_path)


def test_results_beyond_a_restored_step_are_dropped(tmp_path):
  steps = [results_store.Model('runs/a', step, 'f00d') for step in (0, 2, 4)]
  _add(tmp_path, *((model, OPTIONS, SCORES) for model in steps))
  with results_store.Store(tmp_path, last_step=2) as store:
    assert [bool(store.find(m, OPTIONS)) for m in steps] == [True, True, False]
  content = append_log.read(paths.at(tmp_path) / results_store.FILE)
  assert len(content.splitlines()) == 4
