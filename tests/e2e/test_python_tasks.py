"""The tasks of the demonstration are made of held-out text and can be run."""

import json

import pytest

from encdec_adapt.configs import python_tasks
from encdec_adapt.evaluation.tasks import task_groups, text_pairs
from tests import tiny

pytestmark = pytest.mark.e2e


def test_tasks(tmp_path, monkeypatch):
  pytest.importorskip('lm_eval', reason="needs pip install -e '.[eval]'")
  monkeypatch.chdir(tiny.ROOT)
  flags = [f'--output={tmp_path}', '--examples=8']
  assert tiny.call(python_tasks, *flags) == 0
  planned = task_groups.plan([], str(tmp_path))
  names = [task.name for task in planned.tasks]
  assert names == ['continuation', 'next_word', 'package']
  pairs = text_pairs.read(f'{tmp_path}/docstring.jsonl', max_tokens=64)
  assert len(pairs.inputs) == 8
  lines = (tmp_path / 'continuation.jsonl').read_text().splitlines()
  for row in map(json.loads, lines):
    assert len({len(choice) for choice in row['choices']}) == 1
    assert len(set(row['choices'])) == 4 and 0 <= row['answer'] < 4
  rows = (tmp_path / 'packages.jsonl').read_text().splitlines()
  labels = {json.loads(row)['label'] for row in rows}
  assert len(rows) > 500 and len(labels) == 8
  again = tmp_path / 'again'
  tiny.call(python_tasks, f'--output={again}', '--examples=8')
  assert (again / 'continuation.jsonl').read_text().splitlines() == lines
