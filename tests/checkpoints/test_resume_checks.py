"""What a job may be continued as."""

import contextlib

import pytest

from encdec_adapt.base import errors
from encdec_adapt.checkpoints import resume_checks

ONE = {'records': ['a'], 'seed': 0}
TWO = {'records': ['a', 'b'], 'seed': 0}
RANGES = [[(0, 96)], [(96, 190)]]


@pytest.mark.parametrize('position', [0, 96])
def test_passes_are_added_behind_the_position(position):
  resume_checks.check_same_rows(ONE, TWO, [position], RANGES)


def test_passes_before_the_position_of_a_repetition_are_refused():
  said = 'passes is 2, .*97 rows of 96 were read.*Set it to 1'
  with pytest.raises(errors.UserError, match=said):
    resume_checks.check_same_rows(ONE, TWO, [97], RANGES)
  resume_checks.check_same_rows(ONE, ONE, [97], RANGES[:1])


def test_another_reference_is_refused():
  one, other = ({'references': {'teacher': digest}} for digest in 'ab')
  resume_checks.check_same_references(one, one)
  # Checkpoints of a version or a loss without one.
  resume_checks.check_same_references({}, one)
  resume_checks.check_same_references(one, {'references': {}})
  with pytest.raises(errors.UserError, match='another teacher: .* a, now b'):
    resume_checks.check_same_references(one, other)


def test_passes_that_are_gone_are_refused():
  with pytest.raises(errors.UserError, match='records was'):
    resume_checks.check_same_rows(TWO, ONE, [8], RANGES[:1])


@pytest.mark.parametrize(
  'platform, flags, expected',
  [
    ('cpu', '', []),
    ('gpu', '--xla_gpu_autotune_level=0', ["XLA_FLAGS='--xla_gpu_determin"]),
    (
      'gpu',
      '--xla_gpu_autotune_level=0 --xla_gpu_deterministic_ops=true',
      [],
    ),
  ],
)
def test_gpus_resume_bit_for_bit_with_two_flags(platform, flags, expected):
  meta = {'fingerprint': {'platform': platform, 'xla_flags': flags}}
  reports = []
  resume_checks.report_environment(meta, meta, reports.append)
  assert len(reports) == len(expected)
  assert all(
    part in report for part, report in zip(expected, reports, strict=True)
  )


@pytest.mark.parametrize('step, is_refused', [(10, False), (11, True)])
def test_a_step_stays_on_its_side_of_the_warm_up(step, is_refused):
  context = contextlib.nullcontext()
  if is_refused:
    words = 'warmup is 1000, .* had 10 up to its step 11: give .*warmup=10'
    context = pytest.raises(errors.UserError, match=words)
  with context:
    resume_checks.check_same_phase(10, 1000, step)


def test_a_changed_environment_is_reported():
  saved, now = (
    {'fingerprint': {'platform': 'cpu', 'xla_flags': '', 'cores': cores}}
    for cores in (1, 2)
  )
  reports = []
  resume_checks.report_environment(saved, now, reports.append)
  assert ['cores: 1 before, 2 now' in report for report in reports] == [True]
