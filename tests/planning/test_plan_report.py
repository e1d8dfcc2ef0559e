"""What plans say where something is not known."""

import jax
import pytest

from encdec_adapt.cli import errors
from encdec_adapt.files import atomic
from encdec_adapt.planning import (
  calibration,
  chips,
  plan_report,
  programs,
  search,
  shapes,
  stored,
)
from encdec_adapt.sharding import mesh as mesh_lib
from tests.planning import toy

GIB = 2**30


def refused(message, budget=15.75 * GIB):
  """The plan of a program of which the compiler says no more than this."""

  def refuse(*args):
    raise jax.errors.JaxRuntimeError(message)

  settings = toy.settings()
  mesh = mesh_lib.make_mesh(settings.mesh, jax.devices()[:8])
  question = plan_report.Question(chips.parse('v5e:2x4'), mesh, budget, [], 1.0)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(plan_report, '_compile', refuse)
    return plan_report.describe(programs.evaluate(settings, mesh), question)


@pytest.fixture(scope='module')
def out_of_memory():
  """The plan of a program for which the compiler finds no memory."""
  return refused(
    'Ran out of memory in memory space hbm. Used 18.50G of 15.75G hbm.'
  )


def test_a_program_without_memory_has_every_key(out_of_memory):
  assert toy.KEYS < set(out_of_memory)
  unknown = {k for k, v in out_of_memory.items() if v is None}
  assert unknown >= {'flops', 'collectives', 'kernels', 'roofline', 'mfu'}
  assert not out_of_memory['fits']
  assert out_of_memory['memory']['peak'] == 18.5 * GIB


@pytest.mark.parametrize(
  'message',
  [
    'Ran out of memory in memory space hbm. Used 18.50G of 15.75G hbm.',
    # Less than a chip has, but nothing was compiled.
    'Ran out of memory in memory space hbm. Used 15.60G of 15.48G hbm.',
  ],
)
def test_what_was_not_compiled_fits_no_budget(message):
  found = refused(message, budget=32 * GIB)
  assert not found['fits']
  assert found['memory']['budget'] == chips.CHIPS['v5e'].hbm_bytes


def test_a_chips_other_memory_is_another_error():
  message = 'Ran out of memory in memory space smem. Used 1.10M of 1.00M smem.'
  with pytest.raises(jax.errors.JaxRuntimeError, match='1.10M'):
    refused(message)


def test_what_is_unknown_is_read(out_of_memory):
  assert 'DOES NOT FIT' in plan_report.text(out_of_memory)
  asked = toy.settings()
  one = search.Candidate(asked, ('--flag',), out_of_memory)
  assert one.rate == 0


def written(plans, config='configs/gemma2.py:size=2b_2b'):
  question = {'config': config, 'topology': 'v5e:4x4', 'num_slices': 1}
  return {**question, **stored.content(plans), 'calibration': []}


def test_a_table_has_what_is_known(out_of_memory):
  asked = toy.settings()
  mesh = mesh_lib.make_mesh(asked.mesh, jax.devices()[:8])
  by_shapes = shapes.describe('train', asked, mesh, chips.parse('h100:8'), GIB)
  plans = [
    written({'train': by_shapes}),
    written({'decode': out_of_memory}, 'configs/base.py'),
  ]
  rows = stored.markdown(plans).splitlines()[2:]
  assert rows[0].startswith('| `size=2b_2b` | v5e:4x4 | 0.')
  assert rows[0].endswith(f' | {by_shapes["mfu"]:.1%} | - |')
  assert rows[1].startswith(
    '| `configs/base.py`, decode | v5e:4x4 | 18.5 of 15.8 | - | - | - | '
  )


def test_plans_are_read_from_a_bucket(bucket):
  folder = f'{bucket}/plans'
  with pytest.raises(errors.UserError, match='plans has no plans'):
    stored.read(folder)
  plan = written({'train': {'fits': True}})
  atomic.write_json(f'{folder}/plan.json', plan)
  atomic.write_json(f'{folder}/search.json', {'candidates': []})
  assert stored.read(folder) == [plan]


def test_a_published_run_that_does_not_fit_is_told():
  (name, run), *_ = calibration.RUNS.items()
  plan = {'mfu': None, 'source': 'compiled', 'memory': {'peak': 40 * GIB}}
  text = calibration.text([calibration.row(name, plan)])
  assert f'{name}' in text and f'{run.mfu:.1%} published, does not fit' in text
