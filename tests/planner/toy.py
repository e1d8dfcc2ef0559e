"""A toy pair, what it is planned for, and what its plans have."""

import dataclasses
import importlib.util

import jax
import pytest

from encdec_adapt import config as config_lib
from encdec_adapt.models import model_config, presets
from encdec_adapt.planner import analytic_estimate, chips, programs
from encdec_adapt.sharding import mesh as mesh_lib

needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec('libtpu') is None,
  reason="libtpu is not installed: pip install -e '.[tpu]'",
)
ROWS, LENGTH = 16, 64
KEYS = {'memory', 'flops', 'collectives', 'kernels', 'roofline', 'mfu'}
KEYS |= {'source', 'fits', 'trace_s', 'compile_s'}


def where(budget=64 * 2**20, **changes):
  """Eight H100 of which a program may use a few bytes."""
  asked = chips.parse('h100:8')
  chip = dataclasses.replace(asked.chip, hbm_bytes=budget, **changes)
  return dataclasses.replace(asked, chip=chip)


def job(name='train', **changes):
  """A program of the pair; `section__field` changes a key."""
  config = config_lib.defaults()
  pair = model_config.EncoderDecoderConfig(
    *(presets.t5gemma('toy_toy').stacks[s] for s in ('encoder', 'decoder'))
  )
  config_lib.set_model(config.model, pair)
  config.data.objective = 'prefix_lm'
  config.data.encoder_length = config.data.decoder_length = LENGTH
  config.train.batch_size = ROWS
  config.compute.dtype = 'bfloat16'
  config.compute.remat = 'full'
  for key, value in changes.items():
    config.update_from_flattened_dict({key.replace('__', '.'): value})
  settings = config_lib.load(config, sources=False)
  mesh = mesh_lib.make_mesh(settings.mesh, jax.devices()[:8])
  return programs.Job.of(name, settings, 'cpu', mesh)


# Sampling needs a policy, and scoring its reward model, which is not there.
POLICY = {'loss__kind': 'rloo', 'train__rollouts__samples': 4}
POLICY |= {'train__rollouts__tokens': 16}
POLICY |= {'train__rewards__models': ('nowhere/judge',)}


def program_job(name):
  """A program of the pair, or of a policy where only that has it."""
  return job(name, **(POLICY if name in ('sample', 'reward') else {}))


def plan(job, where=where()):
  """The analytic plan of a program."""
  given = analytic_estimate.Arguments.of(job, job.program())
  return analytic_estimate.describe(job, where, given)
