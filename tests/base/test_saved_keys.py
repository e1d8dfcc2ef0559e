"""Configurations of the version before, in today's keys."""

import pytest

from encdec_adapt import config as config_lib
from encdec_adapt.base import keys, saved_keys
from encdec_adapt.models import model_section
from encdec_adapt.training.sections import evaluation_section

HEAD = keys.defaults(model_section.HeadSection)


def test_strings_become_values():
  saved = {
    'train': {'steps': 40, 'evaluators': '', 'trackers': 'tensorboard, wandb'},
    'data': {'seqio_modules': 'tasks,more.tasks'},
    'checkpoint': {'every': '20%', 'keep': 2},
    'model': {
      'embedding': 'pooling=last,projections=24+16',
      'decoder': {
        'pattern': ['local', 'global'],
        'positions': 'relative:8,32',
        'rope_scaling': 'linear:4',
        'tied_head': True,
      },
    },
  }
  before = repr(saved)
  today = {
    'train': {'steps': 40, 'trackers': ('tensorboard', 'wandb')},
    'evaluation': {
      'loss': 0.0,
      'samples': 0.0,
      'tasks': (),
      'tasks_every': 0.0,
    },
    'data': {'seqio_modules': ('tasks', 'more.tasks')},
    'checkpoint': {'every': 0.2, 'keep': 2},
    'model': {
      'head': {
        **HEAD,
        'kind': 'embedding',
        'pooling': 'last',
        'projections': (24, 16),
      },
      'decoder': {
        'pattern': ('local', 'global'),
        'positions': {'kind': 'relative', 'buckets': 8, 'distance': 32},
        'rope_scaling': {
          'kind': 'linear',
          'factor': 4.0,
          'low': 1.0,
          'high': 4.0,
          'original_length': 8192,
        },
      },
    },
  }
  assert saved_keys.translate(saved) == today
  assert repr(saved) == before
  assert saved_keys.translate(today) == today


@pytest.mark.parametrize(
  'key, text, values',
  [
    ('lora', '', {}),
    ('lora', 'alpha=8', {'rank': 16, 'alpha': 8.0}),
    ('lora', 'rank=2,full=norms+mlp', {'rank': 2, 'full': ('norms', 'mlp')}),
    ('rollouts', 'samples=4,cut=mask', {'samples': 4, 'cut': 'mask'}),
    ('rollouts', 'cut=0.5', {'cut': 'penalty', 'cut_penalty': 0.5}),
    ('rewards', '', {}),
    ('rewards', 'code@2 + answers', {'code': 2.0, 'answers': 1.0}),
    (
      'rewards',
      'model:a@3@0.5 + python:"b + c.py#f"',
      {
        'models': ('a@3',),
        'model_weights': (0.5,),
        'functions': ('b + c.py#f',),
        'function_weights': (1.0,),
      },
    ),
  ],
)
def test_strings_become_whole_sections(key, text, values):
  section = saved_keys.translate({'train': {key: text}})['train'][key]
  assert section == config_lib.defaults().train[key].to_dict() | values


@pytest.mark.parametrize(
  'loss, objective, head',
  [
    ('', 'prefix_lm', {'scaled': True, 'tied': False}),
    ('', 'classify:labels="a, b|c",x=1', {'kind': 'labels', 'labels': 2}),
    ('reward', 'preferences', {'kind': 'reward', 'tied': False}),
  ],
)
def test_the_head_that_a_job_decided(loss, objective, head):
  decoder = {'tied_head': False, 'scaled_head': True}
  saved = {
    'loss': {'kind': loss},
    'data': {'objective': objective},
    'model': {'embedding': '', 'decoder': decoder},
  }
  section = saved_keys.translate(saved)['model']
  assert section == {'head': HEAD | head, 'decoder': {}}
  # A folder had the number of labels beside its section.
  labels = 1 if loss else head.get('labels', 0)
  folder = {'model': saved['model'], 'classes': labels}
  assert saved_keys.native_model(folder) == section


@pytest.mark.parametrize(
  'evaluators, intervals',
  [
    ('loss=100,samples=500,tasks/=1000', {'samples': 500, 'tasks/': 1000}),
    ('loss=5%,samples=100%,a=10%', {'loss': 50, 'samples': 1000, 'a': 100}),
    ('loss=100, samples=10%', {'samples': 100}),
    # All tasks have the smallest interval.
    ('loss=100,a=300,b=200', {'a': 200, 'b': 200}),
  ],
)
def test_evaluators_become_intervals(evaluators, intervals, capsys):
  saved_keys.print_once.cache_clear()
  saved = {'train': {'evaluators': evaluators}}
  section = saved_keys.translate(saved)['evaluation']
  evaluation = evaluation_section.EvaluationConfig(**section)
  assert evaluation.intervals(1000) == {'loss': 100} | intervals
  assert ('several intervals' in capsys.readouterr().out) == (
    'b=' in evaluators
  )
