"""The rule that chooses `compute.remat`: what it compiles, what it takes."""

import math

import jax
import pytest

from encdec_adapt.training import remat_choice
from tests.planner import toy

ESTIMATES = {'dots': 100.0, 'none': 120.0, 'narrow_dots': 80.0}
ESTIMATES |= {'attention': 60.0, 'full': 40.0}


@pytest.mark.parametrize(
  'memory, compiled, repeating, policy',
  [
    # The fastest within nine tenths by the estimate, as the compiler agrees.
    (200, {'dots': 130}, (), 'dots'),
    (80, {'narrow_dots': 70}, (), 'narrow_dots'),
    # Estimates may be too high by a fifth.
    (100, {'dots': 85}, (), 'dots'),
    # The compiler needs more: others need as much more.
    (120, {'dots': 130, 'narrow_dots': 104}, (), 'narrow_dots'),
    (120, {'dots': 150, 'attention': 90}, (), 'attention'),
    # It ran out of memory, or repeats work by itself: the limit at least.
    (120, {'dots': math.inf, 'narrow_dots': 90}, (), 'narrow_dots'),
    (112, {'dots': 90, 'narrow_dots': 88}, ('dots',), 'narrow_dots'),
    # Never a third: what needs least is compiled when it runs.
    (120, {'dots': 130, 'narrow_dots': 110}, (), 'full'),
    (120, {'dots': 300, 'full': 100}, (), 'full'),
    # It may use all of the memory.
    (40, {'full': 39}, (), 'full'),
    (40, {'full': 39}, ('full',), 'full'),
  ],
)
def test_two_steps_are_compiled_at_most(memory, compiled, repeating, policy):
  tried = []

  def compile_step(name):
    tried.append(name)
    program = None if math.isinf(compiled[name]) else f'program of {name}'
    repeats = name in repeating
    return remat_choice.Trial(name, float(compiled[name]), program, repeats)

  choice = remat_choice.choose(ESTIMATES, float(memory), compile_step)
  assert tried == list(compiled)
  assert choice.policy == policy
  program = f'program of {policy}' if policy in compiled else None
  assert choice.program == program
  assert choice.describe().startswith(f"compute.remat is '{policy}', ")


@pytest.mark.parametrize('needed, fits', [(41.0, False), (39.0, True)])
def test_a_step_that_takes_all_of_the_memory_does_not_fit(needed, fits):
  choice = remat_choice.choose(
    ESTIMATES, 40.0, lambda name: remat_choice.Trial(name, needed)
  )
  assert (choice.policy, choice.fits) == ('full', fits)


def test_what_repeats_less_work_comes_first_and_needs_more():
  sizes = remat_choice.estimates(toy.job().work, 2.0**20, 2.0**16, 'gpu')
  names = ['dots', 'none', 'narrow_dots', 'attention', 'full']
  assert list(sizes) == names
  in_order = [sizes[name] for name in ('none', 'dots', *names[2:])]
  assert in_order == sorted(in_order, reverse=True)
  assert in_order[-1] > 2**20


def test_a_resumed_job_keeps_the_choice_on_the_same_devices():
  fingerprint = {'device_kind': 'a GPU', 'mesh': {'fsdp': 8}, 'cores': 2}
  compute = {'dtype': 'bfloat16', 'remat': 'dots'}
  saved = {'config': {'compute': compute}, 'fingerprint': fingerprint}
  assert (
    remat_choice.earlier_compute(saved, fingerprint | {'cores': 4}) == compute
  )
  for change in ({'device_kind': 'another'}, {'mesh': {'fsdp': 4}}):
    earlier = remat_choice.earlier_compute(saved, fingerprint | change)
    assert earlier == {'dtype': 'bfloat16'}


@pytest.mark.parametrize(
  'name, repeats',
  [
    # Of a step compiled for a GPU with too little memory, and with enough.
    ('loop_add_convert_fusion.2.remat', True),
    ('gte.remat.4', True),
    ('loop_broadcast_fusion.49.rematerialized.7', False),
    ('rematted_computation.closed_call.1', False),
  ],
)
def test_work_that_xla_repeats_is_recognised(name, repeats):
  text = f'  %{name} = f32[8]{{0}} fusion(), metadata={{op_name="a/remat"}}'
  assert remat_choice.repeats_work(text) == repeats


@pytest.mark.parametrize(
  'message',
  [
    'RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 18.5G of'
    ' 15.7G hbm',
    # Of temporary arrays alone: less than the memory of the device.
    'RESOURCE_EXHAUSTED: total memory required for HLO temporaries (17.86G)'
    ' exceeds available HBM',
    'RESOURCE_EXHAUSTED: Out of memory while trying to allocate 64 bytes.',
  ],
)
def test_a_compiler_that_ran_out_of_memory_has_no_step_that_fits(message):
  def lower(_):
    raise jax.errors.JaxRuntimeError(message)

  trial = remat_choice.compile_trial('dots', lower, 2.0**30)
  assert not trial.fits(2.0**40) and trial.program is None
