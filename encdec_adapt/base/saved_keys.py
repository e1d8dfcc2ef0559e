"""Configurations that earlier versions saved, in the keys of this version.

The only module that knows earlier keys and values. It is called where something
saved is read, never for flags, and no saved file is rewritten.
"""

from collections.abc import Mapping
from typing import Any

from encdec_adapt.base import errors

Section = dict[str, Any]


def current(config: Mapping[str, Any]) -> Section:
  """Returns a saved configuration in the keys and values of this version.

  Args:
    config: sections and values, as saved by this version or the one before.

  Raises:
    UserError: this version has no such configuration.
  """
  config = dict(config)
  if 'train' in config:
    train = config['train'] = dict(config['train'])
    if 'evaluators' in train:
      text, steps = train.pop('evaluators'), train.get('steps', 0)
      config['evaluation'] = _evaluation(text, steps)
    if isinstance(train.get('trackers'), str):
      names = train['trackers'].split(',')
      train['trackers'] = [x.strip() for x in names if x.strip()]
  if 'checkpoint' in config:
    checkpoint = config['checkpoint'] = dict(config['checkpoint'])
    if 'every' in checkpoint:
      steps = config.get('train', {}).get('steps', 0)
      checkpoint['every'] = _interval(str(checkpoint['every']), steps)
  return config


def _evaluation(text: str, steps: int) -> Section:
  """Returns section `evaluation`: 'loss=100,samples=5%,tasks/=1000' before."""
  section: Section = {'loss': 0.0, 'samples': 0.0, 'tasks': []}
  every = set()
  for entry in filter(None, text.split(',')):
    # The last mark, as the names of folders contain it too.
    name, _, number = entry.strip().rpartition('=')
    if name in ('loss', 'samples'):
      section[name] = _interval(number, steps)
    else:
      section['tasks'].append(name)
      every.add(_interval(number, steps))
  if len(every) > 1:
    raise errors.UserError(
      f'the saved configuration has config.train.evaluators={text!r}, tasks of'
      ' several intervals; this version has one, config.evaluation.tasks_every.'
      ' Continue with version 0.1.0, or start another job from its model.'
    )
  return section | {'tasks_every': max(every, default=0.0)}


def _interval(text: str, steps: int) -> float:
  """Returns the interval of '100', or of '10%' of so many steps."""
  if not text.endswith('%'):
    return float(text)
  share = float(text[:-1]) / 100
  return share if share < 1 else float(steps)
