"""Candidates of a search, remedies, and the command with a fake compiler."""

import importlib.util
import json
import math

import jax
import pytest

from encdec_adapt import plan
from encdec_adapt.cli import command, errors
from encdec_adapt.files import atomic
from encdec_adapt.planning import (
  calibration,
  chips,
  cost_model,
  hlo,
  plan_report,
  programs,
  search,
  stored_plans,
)
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import rules as rules_lib
from tests import tiny
from tests.planning import toy

MIB, GIB = 2**20, 2**30
needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec('libtpu') is None,
  reason="libtpu is not installed: pip install -e '.[tpu]'",
)


def devices():
  return jax.devices()[:8]


def test_candidates_are_ranked_and_divide():
  found = search.ranked(toy.settings(), toy.WHERE, devices(), toy.BUDGET)
  rates = [one.rate for one in found]
  assert rates == sorted(rates, reverse=True)
  assert len({one.flags for one in found}) == len(found)
  for one in found:
    mesh = one.settings.mesh
    assert mesh.replica * mesh.fsdp * mesh.sequence * mesh.tensor == 8
    assert one.settings.train.batch_size % (mesh.replica * mesh.fsdp) == 0
    assert f'--config.compute.remat={one.settings.compute.remat}' in one.flags
  assert {one.settings.mesh.tensor for one in found} == {1, 2}
  with pytest.raises(errors.UserError, match='nothing fits .* of 1.0 KiB'):
    search.ranked(toy.settings(), toy.WHERE, devices(), 2**10)


@pytest.mark.parametrize(
  'topology, slices, halves',
  [
    # The second if two devices share a row.
    ('v5e:4x4', 1, [(8, 1), (4, 2)]),
    ('v5e:8x8', 1, [(32, 1), (16, 2)]),
    ('v5e:4x4', 2, []),
    ('v5e:16x16', 1, []),
    ('h100:16', 1, []),
  ],
)
def test_meshes_that_shard_alike_are_tried_once(topology, slices, halves):
  """Shapes cannot tell them apart; a TPU's compiler likes two halves best."""
  where = chips.parse(topology, slices)
  job = toy.settings(data__encoder_length=1024, data__decoder_length=1024)
  shards, whole = [], []
  for mesh in search.meshes(job, where):
    rules = rules_lib.named(mesh['mesh.rules'])
    shards.append(
      tuple(
        math.prod(mesh[f'mesh.{axis}'] for axis in axes)
        for axes in (rules.length, rules.heads, rules.embed, rules.vocab)
      )
    )
    if rules.summed_first:
      assert mesh['mesh.replica'] == 2 and mesh['mesh.tensor'] == 1
      whole.append((mesh['mesh.fsdp'], mesh['mesh.sequence']))
  assert len(set(shards)) == len(shards)
  assert whole == halves


def options(flags):
  words = (flag.removeprefix('--config.') for flag in flags.split())
  return dict(word.split('=') for word in words)


def make_plan(budget, name='train', **changes):
  asked = toy.settings(train__batch_size=64, **changes)
  mesh = mesh_lib.make_mesh(asked.mesh, devices())
  plan = cost_model.describe(name, asked, mesh, toy.WHERE, budget)
  assert not plan['fits']
  found = search.remedies(name, asked, plan, toy.WHERE, devices())
  return [options(flags) for flags in found['remedies']], found['advice']


def test_a_training_step_keeps_its_batch():
  found, advice = make_plan(24 * MIB, compute__remat='none')
  assert advice is None and 0 < len(found) <= 3
  for chosen in found:
    assert chosen.pop('train.batch_size') == '64'
    assert not any(key.startswith('optimizer.') for key in chosen)
    text = {'mesh.rules', 'compute.remat'}
    changes = {
      key.replace('.', '__'): value if key in text else int(value)
      for key, value in chosen.items()
    }
    asked = toy.settings(train__batch_size=64, **changes)
    mesh = mesh_lib.make_mesh(asked.mesh, devices())
    program = 'train', asked, mesh, toy.WHERE, 24 * MIB
    assert cost_model.describe(*program)['fits']


def test_then_the_optimizer_keeps_less():
  found, _ = make_plan(12 * MIB)
  kinds = [
    {k for k in chosen if k.startswith('optimizer.')} for chosen in found
  ]
  # Neither is better: one costs time, the other is another recipe.
  assert kinds[0] == {'optimizer.offload'} and 'optimizer.kind' in kinds[1]
  found, advice = make_plan(2**10)
  assert not found and advice.startswith('nothing fits into h100:8 x 1')
  # Some of the changes are refused alone beside these settings.
  moments = ('moment_dtype', 'second_moment_dtype')
  asked = {f'optimizer__{name}': 'bfloat16' for name in moments}
  _, advice = make_plan(10 * MIB, train__microbatches=32, **asked)
  assert advice.startswith('nothing fits into h100:8 x 1')


def test_candidates_of_a_job_with_microbatches():
  job = toy.settings(train__batch_size=64, train__microbatches=32)
  assert search.ranked(job, toy.WHERE, devices(), 96 * MIB)


@pytest.mark.parametrize('name', ['eval', 'decode'])
def test_evaluation_and_decoding_change_mesh_and_rows(name):
  keys = {f'mesh.{axis}' for axis in mesh_lib.AXES}
  keys |= {'mesh.rules', 'train.eval_batch_size'}
  found, _ = make_plan(6 * MIB, name, train__eval_batch_size=4096)
  assert found and all(set(chosen) <= keys for chosen in found)
  found, advice = make_plan(2**10, name)
  assert not found and 'Take more chips' in advice


@pytest.fixture
def answers(monkeypatch):
  """Three candidates, and what the compiler answers for each."""
  monkeypatch.chdir(tiny.ROOT)
  asked = toy.settings()
  mesh = mesh_lib.make_mesh(asked.mesh, devices())
  shape = cost_model.describe('train', asked, mesh, chips.parse('h100:8'), GIB)
  found = [
    search.Candidate(asked, (f'--flag={n}',), shape, 16) for n in range(3)
  ]
  monkeypatch.setattr(search, 'ranked', lambda *_: found)
  monkeypatch.setattr(chips, 'devices_of', lambda _: devices())
  answers = []

  def compiled(*_):
    answer = answers.pop(0)
    if isinstance(answer, BaseException):
      raise answer
    return shape | answer

  monkeypatch.setattr(plan, '_compiled', compiled)
  return answers


V5E = ['--config=configs/base.py', '--topology=v5e:2x4']


@needs_libtpu
def test_a_candidate_that_does_not_compile_is_left_out(
  answers, tmp_path, capsys
):
  refused = jax.errors.JaxRuntimeError('vector memory\nand much more')
  answers += [{'fits': False}, refused, {'fits': True}]
  output = tmp_path / 'search.json'
  flags = [*V5E, '--search=3', f'--output={output}']
  assert plan.main(command.parse(plan.define_flags, flags)) == 0
  assert 'vector memory' in capsys.readouterr().out
  (row,) = json.loads(output.read_text())['candidates']
  assert row['flags'] == ['--flag=2']


@needs_libtpu
@pytest.mark.parametrize(
  'error, words',
  [
    (jax.errors.JaxRuntimeError('INTERNAL: Bitcast\nand'), 'libtpu .*Bitcast'),
    (hlo.UnknownProgramError("kernel 'fly'"), "'train'.*v5e:2x4 x 1.*'fly'"),
  ],
)
def test_a_compiler_that_fails_is_named(answers, error, words):
  answers.append(error)
  with pytest.raises(errors.UserError, match=words):
    plan.main(command.parse(plan.define_flags, V5E))


def refused(message, budget=15.75 * GIB):
  """The plan of a program that the compiler refuses with a message."""

  def refuse(*args):
    raise jax.errors.JaxRuntimeError(message)

  settings = toy.settings()
  mesh = mesh_lib.make_mesh(settings.mesh, devices())
  target = plan_report.Target(chips.parse('v5e:2x4'), mesh, budget, [], 1.0)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(plan_report, '_compile', refuse)
    return plan_report.describe(programs.evaluate(settings, mesh), target)


def test_a_program_out_of_memory_fits_no_budget():
  # Less than a chip has, but nothing was compiled.
  words = 'Ran out of memory in memory space hbm. Used 15.60G of 15.48G hbm.'
  found = refused(words, budget=32 * GIB)
  assert toy.KEYS < set(found)
  assert not found['fits'] and found['memory']['peak'] == 15.6 * GIB
  assert found['memory']['budget'] == chips.CHIPS['v5e'].hbm_bytes
  unknown = {k for k, v in found.items() if v is None}
  assert unknown >= {'flops', 'collectives', 'kernels', 'roofline', 'mfu'}
  assert 'DOES NOT FIT' in plan_report.text(found)
  assert search.Candidate(toy.settings(), (), found, 1).rate == 0
  request = {'config': 'a.py', 'topology': 'v5e:4x4', 'num_slices': 1}
  written = {**request, **stored_plans.content({'decode': found})}
  (row,) = stored_plans.markdown([written]).splitlines()[2:]
  assert row.startswith('| `a.py`, decode | v5e:4x4 | 15.6 of 15.8 | - | - | ')
  (name, run), *_ = calibration.RUNS.items()
  text = calibration.text([calibration.row(name, found)])
  assert name in text and 'does not fit' in text
  with pytest.raises(jax.errors.JaxRuntimeError, match='1.10M'):
    refused('Ran out of memory in memory space smem. Used 1.10M of 1.00M smem.')


def test_plans_are_read_from_a_bucket(bucket):
  folder = f'{bucket}/plans'
  with pytest.raises(errors.UserError, match='plans has no plans'):
    stored_plans.read(folder)
  plan = {'config': 'a.py', **stored_plans.content({'train': {'fits': True}})}
  atomic.write_json(f'{folder}/plan.json', plan)
  atomic.write_json(f'{folder}/search.json', {'candidates': []})
  assert stored_plans.read(folder) == [plan]
