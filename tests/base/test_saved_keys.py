"""Configurations of the version before, in today's keys."""

import pytest

from encdec_adapt.base import errors, saved_keys


def test_strings_become_values():
  saved = {
    'train': {
      'steps': 40,
      'evaluators': 'loss=5%,samples=10,tasks/=100%',
      'trackers': 'tensorboard, wandb',
    },
    'checkpoint': {'every': '20%', 'keep': 2},
  }
  before = repr(saved)
  assert saved_keys.current(saved) == {
    'train': {'steps': 40, 'trackers': ['tensorboard', 'wandb']},
    'evaluation': {
      'loss': 0.05,
      'samples': 10.0,
      'tasks': ['tasks/'],
      'tasks_every': 40.0,
    },
    'checkpoint': {'every': 0.2, 'keep': 2},
  }
  assert repr(saved) == before
  # Today's are left as they are.
  today = saved_keys.current(saved)
  assert saved_keys.current(today) == today
  nothing = {'train': {'evaluators': '', 'trackers': ''}}
  current = saved_keys.current(nothing)
  assert current['train'] == {'trackers': []}
  assert current['evaluation']['loss'] == 0 == current['evaluation']['samples']


def test_tasks_of_several_intervals_need_the_version_before():
  saved = {'train': {'evaluators': 'loss=1,a=2,b=3', 'steps': 9}}
  with pytest.raises(errors.UserError, match='several intervals.*0.1.0'):
    saved_keys.current(saved)
