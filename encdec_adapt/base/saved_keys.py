"""Translates configurations saved by earlier versions to current keys.

Only this module knows earlier keys and values. It is called to read saved
files, never for flags, and rewrites no saved file.
"""

from collections.abc import Mapping
import functools
import math
from typing import Any

from encdec_adapt.base import option_strings

Section = dict[str, Any]

# The defaults of section `model.head`.
_HEAD = {
  'kind': 'tokens',
  'tied': True,
  'scaled': False,
  'transform': False,
  'fixed_bias': False,
  'labels': 0,
  'pooled': '',
  'layer': '',
  'pooling': 'mean',
  'projections': (),
  'dimensions': (),
  'temperature': 0.0,
}


def translate(config: Mapping[str, Any]) -> Section:
  """Returns a saved configuration in the keys and values of this version.

  Args:
    config: sections and values saved by this or the previous version.

  Returns:
    Sections and values; JSON lists become tuples.
  """
  config = dict(_with_tuples(config))
  if 'model' in config:
    config['model'] = model(config['model'], _head_of_job(config))
  train, checkpoint = config.get('train', {}), config.get('checkpoint', {})
  data = config.get('data', {})
  if 'evaluators' in train:
    config['evaluation'] = _evaluation(train.pop('evaluators'))
  if isinstance(train.get('trackers'), str):
    names = map(str.strip, train['trackers'].split(','))
    train['trackers'] = tuple(filter(None, names))
  if loss := config.get('loss'):
    config['loss'] = _loss(loss)
  if isinstance(train.get('lora'), str):
    train['lora'] = _lora(train['lora'])
  if isinstance(train.get('rollouts'), str):
    train['rollouts'] = _rollouts(train['rollouts'])
  if isinstance(train.get('rewards'), str):
    train['rewards'] = _rewards(train['rewards'])
  if isinstance(data.get('seqio_modules'), str):
    names = data['seqio_modules'].split(',')
    data['seqio_modules'] = tuple(filter(None, names))
  if 'every' in checkpoint:
    checkpoint['every'] = _interval(str(checkpoint['every']))
  return config


def model(section: Mapping[str, Any], options: Mapping[str, Any]) -> Section:
  """Returns section `model` in the keys and values of this version.

  Args:
    section: the section of a run, or of a native folder.
    options: options of the head, formerly in other sections.
  """
  section = dict(_with_tuples(section))
  if 'head' not in section:
    decoder = section.get('decoder', {})
    section['head'] = _head(section.pop('embedding', ''), decoder)
    if options.get('kind') == 'labels':
      section['head'] = dict(_HEAD)
    if options.get('kind') == 'reward':
      section['head']['scaled'] = False
    section['head'] |= options
    for side in section.keys() & {'encoder', 'decoder'}:
      section[side].pop('tied_head', None)
      section[side].pop('scaled_head', None)
  for side in section.keys() & {'encoder', 'decoder'}:
    stack = section[side]
    for name, read in (('positions', _positions), ('rope_scaling', _scaling)):
      if isinstance(stack.get(name), str):
        stack[name] = read(stack[name])
  return section


def native_model(content: Mapping[str, Any]) -> Section:
  """Returns section `model` of the config.json of a native folder.

  Args:
    content: the file. Formerly it had the number of labels beside the section,
      1 for a reward model and 0 for other models than classifiers.
  """
  labels = content.get('classes', 0)
  head = {'kind': 'labels', 'labels': labels} if labels > 1 else {}
  return model(content['model'], {'kind': 'reward'} if labels == 1 else head)


def _head(options: str, decoder: Section) -> Section:
  """Returns section `head`, formerly 'pooling=mean,projections=24+16'."""
  if not options:
    tied, scaled = decoder.get('tied_head', True), decoder.get('scaled_head')
    return {**_HEAD, 'tied': tied, 'scaled': bool(scaled)}
  pairs = dict(item.split('=') for item in options.split(','))
  widths = {
    name: tuple(map(int, filter(None, pairs.get(name, '').split('+'))))
    for name in ('projections', 'dimensions')
  }
  pooling = pairs.get('pooling', 'mean')
  return {**_HEAD, **widths, 'kind': 'embedding', 'pooling': pooling}


def _head_of_job(config: Section) -> Section:
  """Returns options of the head formerly set by loss or objective."""
  loss = config.get('loss', {}).get('kind', '')
  objectives = config.get('data', {}).get('objective', '')
  objective = option_strings.Part('', objectives).divide(r' \| ')[0]
  for option in objective.options():
    name, value = option.partition('=')
    if name.text == 'labels':
      return {'kind': 'labels', 'labels': len(value.text.split('|'))}
  if loss == 'reward':
    return {'kind': 'reward'}
  if loss.startswith('infonce:'):
    pairs = filter(None, loss.partition(':')[2].split(','))
    options = dict(x.split('=') for x in pairs)
    if options.get('learn_temperature') == '1':
      return {'temperature': float(options.get('temperature', 0.05))}
  return {}


def _positions(text: str) -> Section:
  """Returns section `positions`, formerly 'rotary' or 'relative:32,128'."""
  kind, _, numbers = text.partition(':')
  buckets, distance = map(int, (numbers or '32,128').split(','))
  return {'kind': kind, 'buckets': buckets, 'distance': distance}


def _scaling(text: str) -> Section:
  """Returns section `rope_scaling`, formerly 'llama3:8,1,4,8192'."""
  kind, _, numbers = text.partition(':')
  values = map(float, filter(None, numbers.split(',')))
  section = {'factor': 8.0, 'low': 1.0, 'high': 4.0, 'original_length': 8192.0}
  # 'linear' has only the first, 'none' has none.
  section |= dict(zip(section, values, strict=False))
  length = int(section['original_length'])
  return {**section, 'kind': kind, 'original_length': length}


def _with_tuples(value: Any) -> Any:
  if isinstance(value, Mapping):
    return {key: _with_tuples(x) for key, x in value.items()}
  return tuple(value) if isinstance(value, list) else value


def _evaluation(text: str) -> Section:
  """Returns section `evaluation` of 'loss=100,samples=5%,tasks/=1000'."""
  section: Section = {'loss': 0.0, 'samples': 0.0}
  tasks: dict[str, float] = {}
  for entry in filter(None, text.split(',')):
    # The last mark, as names of folders may contain it.
    name, _, number = entry.strip().rpartition('=')
    values = section if name in section else tasks
    values[name] = _interval(number)
  every = min(tasks.values(), default=0.0)
  if len({*tasks.values()}) > 1:
    print_once(
      f'note: config.train.evaluators was {text!r}, with tasks of several'
      f' intervals; all have config.evaluation.tasks_every={every:g} now'
    )
  return section | {'tasks': tuple(tasks), 'tasks_every': every}


def _loss(section: Section) -> Section:
  """Returns section `loss`, formerly 'dpo:beta=0.2 + cross_entropy@0.3'."""
  if 'distillation' not in section:
    return section
  text, *shares = section.pop('kind', '').split(' + ')
  share = section.pop('distillation')
  temperature = section.pop('temperature', 1.0)
  kind, _, pairs = text.strip().partition(':')
  options: Section = {}
  for pair in filter(None, pairs.split(',')):
    key, _, value = pair.partition('=')
    options[key] = _number(value)
  for entry in shares:  # Of cross-entropy.
    options['cross_entropy'] = float(entry.partition('@')[2] or 1)
  if not kind:
    kind = 'distill' if share else 'cross_entropy'
  if kind == 'distill':
    options |= {'share': share or 1.0, 'temperature': temperature}
  if 'lambda' in options:
    options['weight'] = options.pop('lambda')
  if 'learn_temperature' in options:
    options['learn_temperature'] = bool(options['learn_temperature'])
  return section | {'kind': kind} | ({kind: options} if options else {})


def _number(text: str) -> float | str:
  try:
    return float(text)
  except ValueError:
    return text


def _lora(text: str) -> Section:
  """Returns section `train.lora`, formerly 'rank=16,targets=attention+mlp'."""
  defaults = {'rank': 16 if text else 0, 'alpha': 0.0, 'targets': ''}
  defaults |= {'full': '', 'dropout': 0.0, 'rslora': 0, 'base': ''}
  section = option_strings.key_values('config.train.lora', text, defaults)
  for name in ('targets', 'full'):
    section[name] = tuple(filter(None, section[name].split('+')))
  return section | {'rslora': bool(section['rslora'])}


def _rollouts(text: str) -> Section:
  """Returns section `train.rollouts`, formerly 'samples=8,cut=0.5'."""
  defaults = {'samples': 8, 'tokens': 0, 'temperature': 1.0, 'top_k': 0}
  defaults |= {'top_p': 1.0, 'cut': 'keep', 'max_kl': 0.0}
  section = option_strings.key_values('config.train.rollouts', text, defaults)
  penalty = 0.0
  if section['cut'] not in ('keep', 'mask'):
    section['cut'], penalty = 'penalty', float(section['cut'])
  return section | {'cut_penalty': penalty}


def _rewards(text: str) -> Section:
  """Returns section `train.rewards`, formerly 'answers + model:runs/rm@0.5'."""
  section: Section = {'answers': 0.0, 'code': 0.0}
  names: dict[str, dict[str, float]] = {'model': {}, 'python': {}}
  parts = option_strings.things('config.train.rewards', text, r' \+ ')
  for part, weight in parts if text else ():
    kind, value = part.partition(':')
    weights = names[kind.text] if value else section
    # Only the file of a function may be quoted.
    entry = '#'.join(x.text for x in value.divide('#')) if value else part.text
    weights[entry] = weight or 1.0
  for key, weights in zip(('model', 'function'), names.values(), strict=True):
    section[f'{key}s'] = tuple(weights)
    section[f'{key}_weights'] = tuple(weights.values())
  return section


def _interval(text: str) -> float:
  """Returns the interval of '100', or of '10%', a fraction of the steps."""
  if not text.endswith('%'):
    return float(text)
  # 100 % must stay below 1, as 1 is a number of steps.
  return min(float(text[:-1]) / 100, math.nextafter(1, 0))


@functools.cache  # A run may be both source and teacher of a job.
def print_once(line: str) -> None:
  """Prints a line, once in a process."""
  print(line)
