"""Rewards of completions, and what is said of those that fail."""

import functools

import numpy as np
import pytest

from encdec_adapt import generate
from encdec_adapt.base import errors
from encdec_adapt.cluster import code_limits, distributed
from encdec_adapt.objectives import framing
from encdec_adapt.training.jobs import completion_rewards as rewards
from encdec_adapt.training.sections import rewards_section

PAIR = framing.Pair(np.zeros(0, np.int32), np.zeros(0, np.int32))


def _group(texts, target='', prompt='a question', **fields):
  known = {'target': target, **fields}
  return rewards.Completions(prompt, known, texts, PAIR, [])


def _make(*functions, **options):
  config = rewards_section.RewardsConfig(functions=functions, **options)
  return rewards.Rewards(config, lambda path: None)


@pytest.mark.parametrize(
  'completion, target, right',
  [
    ('so it is 5.', '5', True),
    ('It costs $1,234.50.', 'They pay\n#### 1234.5', True),
    ('3 of 7', 'it is 7 #### 3', False),
    ('3 of 7', '7 and #### 7', True),
    ('-4', '4', False),
    ('10-4', '4', True),
    ('.5', '0.50', True),
    ('no number', '5', False),
    (' Paris\n', 'Paris', True),
    ('Paris 5', 'Paris', False),
  ],
)
def test_answers(completion, target, right):
  assert rewards.is_right(completion, target) == right


def test_parts_have_weights_and_shapes(tmp_path):
  (tmp_path / 'mine.py').write_text(
    'def length(prompts, completions, fields):\n'
    '  assert prompts == ["a question"] * 4\n'
    '  return [len(x) + f["more"] for x, f in zip(completions, fields)]\n'
  )
  function = f'{tmp_path}/mine.py#length'
  scores = _make(function, answers=2.0, function_weights=(0.5,))
  groups = [
    _group(['1', '22'], '22', more=10),
    _group(['333', '22'], '333', more=0),
  ]
  values, counts = scores(groups)
  assert not counts
  assert scores.weights == {'answers': 2, 'length': 0.5}
  np.testing.assert_array_equal(values['answers'], [[0, 1], [1, 0]])
  np.testing.assert_array_equal(values['length'], [[11, 12], [3, 2]])


def test_processes_score_their_shares(monkeypatch):
  scores = _make(answers=1.0)
  groups = [_group([str(i), '1'], '1') for i in range(3)]
  expected, _ = scores(groups)
  shares, sizes = [], []

  def gather(name, value):
    shares.append(value)
    sizes.append(len(value[0]['answers']))
    return shares if len(shares) == 2 else [value, [{}, 0, '']]

  monkeypatch.setattr(distributed, 'gather', gather)
  for process in range(2):
    count_and_index = lambda process=process: (2, process)  # noqa: E731
    monkeypatch.setattr(distributed, 'count_and_index', count_and_index)
    values, _ = scores(groups)
  assert sizes == [4, 2]
  np.testing.assert_array_equal(values['answers'], expected['answers'])


def test_programs_run_with_the_tests_of_their_row(monkeypatch):
  with pytest.raises(errors.UserError, match='--allow_code'):
    _make(code=1.0)
  run = functools.partial(code_limits.run, seconds=2)
  monkeypatch.setattr(code_limits, 'run', run)
  with code_limits.allowed(True):
    values, counts = _make(code=1.0)(
      [
        _group(
          ['def f():\n  return 2', 'def f():\n  return 3'],
          tests='assert f() == 2',
        ),
        _group(
          ['f = lambda: 2', 'while True: pass'], tests=['assert f()', 'f()']
        ),
      ]
    )
  np.testing.assert_array_equal(values['code'], [[1, 0], [1, 0]])
  assert counts == {'timeouts': 1}


@pytest.mark.parametrize(
  'body, problem',
  [
    ("if 'bad' in c: raise KeyError('x')", "raises KeyError: 'x',"),
    ("if 'bad' in c: return [float('nan')] * len(c)", 'returns nan'),
    ("if 'bad' in c: return [1.0] * (len(c) + 1)", 'values for'),
    ('return None', 'raises TypeError'),
    ("if 'bad' in c: raise SystemExit(0)", 'raises SystemExit: 0,'),
  ],
)
def test_a_failing_function_names_the_example(tmp_path, body, problem):
  (tmp_path / 'mine.py').write_text(
    f'def f(p, c, fields):\n  {body}\n  return [0.0] * len(c)\n'
  )
  scores = _make(f'{tmp_path}/mine.py#f')
  groups = [_group(['good', 'fine']), _group(['bad', 'good'], prompt='the 2nd')]
  with pytest.raises(rewards.RewardError, match=problem) as error:
    scores(groups)
  if 'bad' in body:
    assert "'the 2nd' with the completion 'bad'" in str(error.value)


@pytest.mark.parametrize(
  'texts, options, message',
  [
    (['a.py#answers'], {'answers': 1.0}, 'have the same name'),
    (['a.py#f'], {'models': ('runs/f',)}, 'have the same name'),
    (['a.py#f'], {'function_weights': (1.0, 2.0)}, 'a weight for each'),
    ([], {'model_weights': (1.0,)}, 'a weight for each'),
    (['a.py#f'], {'function_weights': (0.0,)}, 'must be above 0'),
    (['/no/such.py#f'], {}, 'FileNotFoundError'),
    (['a.py'], {}, 'must be FILE.py#FUNCTION'),
    (['{}/exits.py#f'], {}, 'SystemExit: 0'),
    (['{}/value.py#f'], {}, 'TypeError: the first argument must be callable'),
  ],
)
def test_wrong_rewards_are_refused(tmp_path, texts, options, message):
  (tmp_path / 'exits.py').write_text('raise SystemExit(0)')
  (tmp_path / 'value.py').write_text('f = 3')
  with pytest.raises(errors.UserError, match=message):
    _make(*(text.format(tmp_path) for text in texts), **options)


@pytest.mark.parametrize('text', ['answers', 'code@0.5', 'python:'])
def test_a_prompt_alone_has_no_answer_to_compare_with(text):
  with pytest.raises(errors.UserError, match='--reward.*a prompt has no'):
    generate._parse_rewards(text)


def test_a_file_may_define_dataclasses(tmp_path):
  (tmp_path / 'mine.py').write_text(
    'from __future__ import annotations\nimport dataclasses\n'
    '@dataclasses.dataclass\nclass Score:\n  value: float\n'
    'def f(p, c, fields):\n  return [Score(2.0).value] * len(c)\n'
  )
  values, _ = _make(f'{tmp_path}/mine.py#f')([_group(['a'])])
  np.testing.assert_array_equal(values['f'], [[2.0]])


def test_a_function_named_code_runs_no_programs(tmp_path):
  (tmp_path / 'mine.py').write_text(
    'def code(p, c, fields):\n  return [0.0] * len(c)\n'
  )
  _, counts = _make(f'{tmp_path}/mine.py#code')([_group(['a', 'b'])])
  assert counts == {}
