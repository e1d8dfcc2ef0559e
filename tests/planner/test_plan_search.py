"""Candidates of a search, remedies, and the command with a fake compiler."""

import json
import math

import jax
import pytest

from encdec_adapt import config as config_lib
from encdec_adapt import plan
from encdec_adapt.base import errors
from encdec_adapt.configs import sft
from encdec_adapt.files import atomic
from encdec_adapt.planner import (
  chips,
  plan_report,
  plan_search,
  program_plans,
  programs,
  stored_plans,
)
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.telemetry import environment
from tests import tiny
from tests.planner import toy

DECODER = tiny.ROOT / 'configs/decoders/small'
MIB, GIB = 2**20, 2**30


def test_candidates_are_ranked_and_divide():
  job = toy.job(train__batch_size=64, train__microbatches=32)
  candidates = plan_search.ranked(job, toy.where())
  assert candidates[0].rate >= 0.98 * max(c.rate for c in candidates)
  assert len({c.flags for c in candidates}) == len(candidates)
  for candidate in candidates:
    mesh = candidate.job.mesh.shape
    assert math.prod(mesh.values()) == 8
    assert candidate.job.rows % (mesh['replica'] * mesh['fsdp']) == 0
    assert '--config.train.batch_size=64' in candidate.flags
    remat = candidate.job.resolved.compute.remat
    assert f'--config.compute.remat={remat}' in candidate.flags
  assert {c.job.mesh.shape['tensor'] for c in candidates} == {1, 2}


@pytest.mark.parametrize(
  'changes, count',
  [
    ({}, 0),  # The start, which training shares.
    ({'teacher__checkpoint': str(DECODER)}, 0),
    ({'init__encoder': 'elsewhere', 'teacher__checkpoint': str(DECODER)}, 1),
    ({'teacher__dtype': 'bfloat16'}, 1),
  ],
)
def test_a_reference_of_adapters_is_counted_if_it_is_not_the_base(
  changes, count
):
  config = sft.get_config(f'source={DECODER},lora=2')
  config.loss.kind = 'dpo'
  config.data.objective = 'preferences'
  config.compute.dtype = 'float32'
  config.compute.remat = 'none'
  for key, value in changes.items():
    config.update_from_flattened_dict({key.replace('__', '.'): value})
  settings = config_lib.load(config, sources=False)
  mesh = mesh_lib.make_mesh(settings.mesh, jax.devices()[:1])
  job = programs.Job.of('train', settings, 'cpu', mesh)
  program = job.program()
  assert len(job.references.keys() & program.arguments.keys()) == count


def test_of_equally_fast_ones_the_smallest_comes_first():
  job, shape = (
    toy.job(train__batch_size=64, train__steps=3600),
    toy.plan(toy.job()),
  )
  candidates = [
    plan_search.Candidate(
      job,
      (f'--flag={number}',),
      shape | {'memory': {'peak': peak}, 'roofline': {'step_s': seconds}},
    )
    for number, (seconds, peak) in enumerate([(1, 3), (1.01, 2), (2, 1)])
  ]
  _, *lines = plan_search.text(candidates, toy.where(), price=2).splitlines()
  # Flags, hours and the cost of eight GPUs.
  columns = [(row[-1], row[3], row[4]) for row in map(str.split, lines)]
  assert columns == [
    ('--flag=1', '1.0', '16'),
    ('--flag=0', '1.0', '16'),
    ('--flag=2', '2.0', '32'),
  ]


def _remedies(budget, name='train', **changes):
  """Keys and values of the remedies of a job that does not fit."""
  job = toy.job(name, **{'train__batch_size': 64, **changes})
  where = toy.where(budget)
  plan = toy.plan(job, where)
  assert not plan['fits']
  found = plan_search.remedies(job, plan, where)
  chosen = [
    dict(flag.removeprefix('--config.').split('=') for flag in flags.split())
    for flags in found['remedies']
  ]
  return chosen, found['advice']


def test_a_training_step_keeps_its_batch():
  found, advice = _remedies(24 * MIB, compute__remat='none')
  assert advice is None and 0 < len(found) <= 3
  for chosen in found:
    assert chosen['train.batch_size'] == '64'
    assert not any(key.startswith('optimizer.') for key in chosen)
    text = {'mesh.rules', 'compute.remat'}
    changes = {
      key.replace('.', '__'): value if key in text else int(value)
      for key, value in chosen.items()
    }
    assert toy.plan(toy.job(**changes), toy.where(24 * MIB))['fits']


@pytest.mark.long
def test_then_the_optimizer_keeps_less():
  found, _ = _remedies(8 * MIB)
  kinds = [
    {k for k in chosen if k.startswith('optimizer.')} for chosen in found
  ]
  # Neither is better: one costs time, the other is another recipe.
  assert kinds[0] == {'optimizer.offload'} and 'optimizer.kind' in kinds[1]
  # Some of the changes are refused alone beside these settings.
  moments = ('moment_dtype', 'second_moment_dtype')
  asked = {f'optimizer__{name}': 'bfloat16' for name in moments}
  found, advice = _remedies(6 * MIB, train__microbatches=32, **asked)
  assert not found and advice.startswith('nothing fits into h100:8 x 1')


@pytest.mark.parametrize('name', ['eval', 'decode'])
def test_evaluation_and_decoding_change_mesh_and_rows(name):
  keys = {f'mesh.{axis}' for axis in mesh_lib.AXES}
  keys |= {'mesh.rules', 'train.eval_batch_size'}
  found, _ = _remedies(12 * MIB, name, train__eval_batch_size=4096)
  assert found and all(set(chosen) <= keys for chosen in found)


@toy.needs_libtpu
def test_a_candidate_that_does_not_compile_is_left_out(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tiny.ROOT)
  job = toy.job()
  shape = toy.plan(job)
  found = [
    plan_search.Candidate(job, (f'--flag={n}',), shape) for n in range(3)
  ]
  refused = jax.errors.JaxRuntimeError('vector memory\nand much more')
  answers = iter([{'fits': False}, refused, {'fits': True}])

  def compiled(*_):
    answer = next(answers)
    if answer is refused:
      raise answer
    return shape | answer

  monkeypatch.setattr(plan_search, 'ranked', lambda *_: found)
  monkeypatch.setattr(chips, 'devices_of', lambda _: jax.devices()[:8])
  monkeypatch.setattr(plan_report, 'describe', compiled)
  output = tmp_path / 'search.json'
  flags = ['--config=configs/base.py', '--topology=v5e:2x4', '--search=3']
  assert tiny.call(plan, *flags, f'--output={output}') == 0
  assert 'vector memory' in capsys.readouterr().out
  (row,) = json.loads(output.read_text())['candidates']
  assert row['flags'] == ['--flag=2']


def test_a_machine_with_too_little_memory_compiles_nothing(monkeypatch):
  monkeypatch.setattr(chips, 'compiler', lambda kind: 'libtpu 0.0')
  monkeypatch.setattr(environment, 'memory_free', lambda: 2**27)
  with pytest.raises(errors.UserError, match=r'needs 4.0 GiB .* 1.0 GiB are'):
    program_plans.plan(toy.job(), toy.where())


def test_a_program_out_of_memory_fits_no_budget(monkeypatch):
  def refuse(*_):
    raise jax.errors.JaxRuntimeError(
      'Ran out of memory in memory space hbm. Used 15.60G of 15.48G hbm.'
    )

  monkeypatch.setattr(plan_report, '_compile', refuse)
  job = toy.job('eval')
  # Less than a chip has, but nothing was compiled.
  where = chips.parse('v5e:2x4', hbm_gib=32)
  found = plan_report.describe(job, where, job.program())
  assert toy.KEYS == set(found)
  assert not found['fits'] and found['memory']['peak'] == 15.6 * GIB
  assert found['memory']['budget'] == chips.CHIPS['v5e'].hbm_bytes
  assert 'DOES NOT FIT' in plan_report.text(
    found | {'replicated': [], 'missing_rewards': []}
  )
  assert plan_search.Candidate(toy.job(), (), found).rate == 0
  request = {'config': 'a.py', 'topology': 'v5e:4x4', 'num_slices': 1}
  written = {**request, 'programs': {'decode': found}}
  (row,) = stored_plans.markdown([written]).splitlines()[2:]
  assert row.startswith('| `a.py`, decode | v5e:4x4 | 15.6 of 15.8 | - | - | ')


def test_plans_are_read_from_a_bucket(bucket):
  folder = f'{bucket}/plans'
  with pytest.raises(errors.UserError, match='plans has no plans'):
    stored_plans.read(folder)
  plan = {'config': 'a.py', 'programs': {'train': {'fits': True}}}
  atomic.write_json(f'{folder}/plan.json', plan)
  atomic.write_json(f'{folder}/search.json', {'candidates': []})
  assert stored_plans.read(folder) == [plan]
