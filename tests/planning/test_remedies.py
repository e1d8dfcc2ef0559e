"""What is proposed where a program does not fit."""

import dataclasses

import jax
import pytest

from encdec_adapt import plan as command_of_plan
from encdec_adapt.cli import command, errors
from encdec_adapt.planning import programs, remedies, shapes
from encdec_adapt.sharding import mesh as mesh_lib
from tests.planning import toy

MIB = 2**20


def devices():
  return jax.devices()[:8]


def make_plan(budget, **changes):
  asked = toy.settings(train__batch_size=64, **changes)
  mesh = mesh_lib.make_mesh(asked.mesh, devices())
  return asked, shapes.describe('train', asked, mesh, toy.WHERE, budget)


def options(flags):
  words = (flag.removeprefix('--config.') for flag in flags.split())
  return dict(word.split('=') for word in words)


def test_a_training_step_keeps_its_batch():
  asked, plan = make_plan(24 * MIB, compute__remat='none')
  assert not plan['fits']
  found = remedies.find('train', asked, plan, toy.WHERE, devices())
  assert found['advice'] is None and 0 < len(found['remedies']) <= 3
  for flags in found['remedies']:
    chosen = options(flags)
    assert chosen['train.batch_size'] == '64'
    assert not any(key.startswith('optimizer.') for key in chosen)
    changes = {
      key.replace('.', '__'): value if key in TEXT else int(value)
      for key, value in chosen.items()
      if key != 'train.batch_size'
    }
    assert make_plan(24 * MIB, **changes)[1]['fits']


TEXT = {'mesh.rules', 'compute.remat'}


def test_then_the_optimizer_keeps_less():
  asked, plan = make_plan(12 * MIB)
  found = remedies.find('train', asked, plan, toy.WHERE, devices())
  assert found['remedies']
  # Neither is better: one costs time, the other is another recipe.
  kinds = [
    {k for k in options(flags) if k.startswith('optimizer.')}
    for flags in found['remedies']
  ]
  assert kinds[:2] == [{'optimizer.offload'}, {'optimizer.kind'}]
  asked, plan = make_plan(2**10)
  found = remedies.find('train', asked, plan, toy.WHERE, devices())
  assert not found['remedies']
  assert found['advice'].startswith('nothing fits into h100:8 x 1: the least')


def test_batches_that_train_need_not_divide_for_an_evaluation():
  asked = toy.settings(train__batch_size=4)
  mesh = mesh_lib.make_mesh(
    dataclasses.replace(asked.mesh, replica=1, fsdp=4, tensor=2), devices()
  )
  asked = dataclasses.replace(
    asked, mesh=mesh_lib.MeshConfig(**dict(mesh.shape))
  )
  plan = shapes.describe('eval', asked, mesh, toy.WHERE, 4 * MIB)
  assert not plan['fits']
  found = remedies.find('eval', asked, plan, toy.WHERE, devices())
  assert found['remedies'] or found['advice']


@pytest.mark.parametrize('name', ['eval', 'decode'])
def test_what_does_not_train_has_remedies_of_its_own(name):
  asked = toy.settings()
  mesh = mesh_lib.make_mesh(asked.mesh, devices())
  program = programs.PROGRAMS[name](asked, mesh)
  arguments = programs.argument_bytes(program)
  beside = programs.tree_bytes(program.beside)
  assert set(beside) == ({'optimizer'} if name == 'eval' else set())
  peak = arguments['parameters'] + sum(beside.values()) + 64 * MIB
  memory = {'peak': peak, 'arguments': arguments, 'beside': beside}
  memory['budget'] = peak - 16 * MIB
  found = remedies.find(name, asked, {'memory': memory}, toy.WHERE, devices())
  first = options(found['remedies'][0])
  assert set(first) <= {
    'mesh.replica',
    'mesh.fsdp',
    'mesh.sequence',
    'mesh.tensor',
    'mesh.rules',
    'train.eval_batch_size',
  }
  assert first['train.eval_batch_size'] == '8'
  memory['budget'] = 2**10
  found = remedies.find(name, asked, {'memory': memory}, toy.WHERE, devices())
  assert not found['remedies'] and 'Take more chips' in found['advice']


@pytest.mark.parametrize(
  'words, count',
  [([], 0), (['--search'], 6), (['--search=2'], 2), (['--nosearch'], 0)],
)
def test_a_search_needs_no_number(words, count):
  define = command_of_plan.define_flags
  assert command.parse(define, words).search == count


def test_a_search_takes_nothing_but_a_number():
  with pytest.raises(errors.UserError, match='search'):
    command.parse(command_of_plan.define_flags, ['--search=some'])
