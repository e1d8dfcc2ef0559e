"""What a failing training job leaves, and what it reports."""

import functools
import itertools
import re
import shlex
import time

import jax
import pytest

from encdec_adapt import train
from encdec_adapt.base import errors
from encdec_adapt.checkpoints import checksums, manager
from encdec_adapt.training import step as step_lib
from tests import tiny

pytestmark = pytest.mark.e2e
_train = functools.partial(tiny.call, train)


def test_devices_out_of_memory_lose_nothing_and_name_what_to_ask(
  pairs, tmp_path, monkeypatch
):
  """Where other parameters thaw, between two saves."""
  make = step_lib.make_train_step

  def make_small(*arguments):
    return make(*arguments) if len(arguments[5]) == 1 else refuse

  def refuse(*_):
    raise jax.errors.JaxRuntimeError(
      'RESOURCE_EXHAUSTED: Out of memory while trying to allocate 64 bytes.'
    )

  monkeypatch.setattr(step_lib, 'make_train_step', make_small)
  flags = [*pairs, '--config.train.cross_attention_warmup=2']
  with pytest.raises(errors.UserError) as caught:
    _train(*flags, f'--workdir={tmp_path}/run')
  said = str(caught.value)
  assert 'Out of memory while trying to allocate 64 bytes' in said
  (line,) = re.findall('`(python -m encdec_adapt.plan .*?)`', said)
  # Intervals are floats, as in 3.0.
  named = {flag.removesuffix('.0') for flag in shlex.split(line)[3:]}
  assert {*flags, '--topology=v5e:4x4'} <= named
  assert manager.open_latest(tmp_path / 'run').step == 2


@pytest.mark.long
def test_what_is_being_saved_when_a_job_fails_is_completed(
  pairs, tmp_path, monkeypatch
):
  make, write = step_lib.make_train_step, checksums.write

  def make_failing(*arguments):
    step, calls = make(*arguments), itertools.count(1)

    def run(*values):
      if next(calls) == 3:
        raise ValueError('the third step fails')
      return step(*values)

    return run

  def write_slowly(path):
    time.sleep(2)
    write(path)

  monkeypatch.setattr(step_lib, 'make_train_step', make_failing)
  monkeypatch.setattr(checksums, 'write', write_slowly)
  with pytest.raises(ValueError, match='the third step fails'):
    _train(*pairs, '--config.checkpoint.every=2', f'--workdir={tmp_path}/run')
  assert manager.open_latest(tmp_path / 'run').step == 2


@pytest.mark.long
def test_a_job_that_ends_with_a_loss_that_is_not_finite_has_diverged(
  pairs, tmp_path
):
  """Of fewer steps than end a job by skipped updates; also given again."""
  flags = [*pairs, '--config.train.steps=3', f'--workdir={tmp_path}/run']
  flags += ['--config.optimizer.learning_rate=1e30']
  for _ in range(2):
    with pytest.raises(errors.DivergedError, match='eval loss nan;'):
      _train(*flags)
