"""Ranges of keys against dense masks, and the backend without its kernels."""

import subprocess
import sys
from unittest import mock

from hypothesis import given, settings
import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.base import errors
from encdec_adapt.models import execution, model_config, presets
from encdec_adapt.ops import (
  attention,
  attention_gradients,
  attention_shards,
  masks,
)
from encdec_adapt.ops import attention_tokamax as tokamax
from encdec_adapt.training import setup
from tests import tiny
from tests.ops import attention_cases, tokamax_reference
from tests.ops.attention_cases import assert_like_reference, qkv, spec_of

MASKS = [*attention_cases.MASKS, 'prefix', 'prefix window', 'cross']


@pytest.mark.parametrize('name', MASKS)
def test_ranges_equal_the_dense_mask(name):
  key_ranges = jax.jit(tokamax.key_ranges)

  @settings(max_examples=20, deadline=None)
  @given(attention_cases.rows(10), attention_cases.rows(7))
  def check(tokens, memory):
    spec = attention_cases.make_spec(name, tokens, memory[0], window=3)
    first, last = map(np.asarray, key_ranges(spec))
    dense = np.asarray(masks.dense_mask(spec))
    sees = dense.any(-1)
    index = np.arange(dense.shape[2])
    within = (first[..., None] <= index) & (index < last[..., None])
    np.testing.assert_array_equal(within & sees[..., None], dense)
    # None is empty, and a causal one ends at its query.
    assert within.any(-1).all()
    if name.startswith('causal'):
      np.testing.assert_array_equal(last[0], np.arange(10) + 1)

  check()


@pytest.mark.parametrize('name', [*MASKS, 'blind cross'])
def test_equals_the_reference(name):
  if name == 'blind cross':
    spec = attention_cases.blind_cross()
  else:
    spec = spec_of(name, 75)
  arrays = qkv(spec.q_segments.shape[1], spec.kv_segments.shape[1])
  assert_like_reference(tokamax_reference.attend(), *arrays, spec)


def test_gradients_of_wide_heads_equal_the_reference(monkeypatch):
  monkeypatch.setattr(attention_gradients, 'SIZE', 16)
  spec = spec_of('causal window', 75)
  arrays = qkv(75, 75, head_dim=tokamax.KERNEL_HEAD_DIM + 32)
  assert_like_reference(tokamax_reference.attend(), *arrays, spec)


@pytest.mark.parametrize('remat, saved', [('attention', 3), ('full', 0)])
def test_a_policy_saves_what_attention_makes(remat, saved, capsys):
  """The output and the softmax's maxima and sums."""
  attend = tokamax_reference.attend()
  segments, positions = attention_cases.packed(96)

  def loss(states):
    spec = masks.causal(segments, positions, aligned=True)
    return jnp.sum(
      attend(states, states, states, spec, scale=1.0, softcap=None)
    )

  policy = execution.REMAT_POLICIES[remat]
  jax.ad_checkpoint.print_saved_residuals(
    jax.checkpoint(loss, policy=policy), jnp.ones((2, 96, 2, 32))
  )
  assert capsys.readouterr().out.count(attention_shards.SAVED) == saved


@pytest.mark.parametrize(
  'capability, head_dim, refused',
  [
    ('8.0', 64, r'a GPU of its kind GPUs, as it is for Hopper \(H100'),
    ('9.0', 512, 'a head dimension of 512 on a GPU of its kind'),
    ('10.0', 512, 'a head dimension of 512 on a GPU of its kind'),
    ('12.0', 64, 'a GPU of its kind GPUs'),
    ('9.0', 256, ''),
    ('10.0', 256, ''),
  ],
)
@pytest.mark.parametrize('installed', [True, False])
def test_other_gpus_and_environments_are_refused(
  capability, head_dim, refused, installed, monkeypatch
):
  spec = object() if installed else None
  monkeypatch.setattr('importlib.util.find_spec', lambda _: spec)
  device = mock.Mock(
    spec=jax.Device,
    platform='gpu',
    compute_capability=capability,
    device_kind='a GPU of its kind',
  )
  call = 'tokamax', spec_of('causal', 9), 'bfloat16', head_dim, device
  if installed and not refused:
    attention.check(*call)
    return
  missing = '' if installed else r'without tokamax \(pip .*\[gpu\].*3\.12'
  with pytest.raises(errors.UserError, match=refused or None) as raised:
    attention.check(*call)
  raised.match(missing)
  raised.match('that can: chunked, reference')


def test_wider_heads_have_chunked_attention_in_a_model_with_others(
  monkeypatch, capsys
):
  monkeypatch.setattr('importlib.util.find_spec', lambda _: object())
  device = mock.Mock(
    spec=jax.Device,
    platform='gpu',
    compute_capability='9.0',
    device_kind='a GPU of its kind',
  )
  compute = execution.ComputeConfig('bfloat16', 'none', attention='tokamax')
  model = presets.decoder_only('gemma4_31b')
  setup.check_stacks(compute, model, device)
  assert 'heads of 512 have' in capsys.readouterr().out
  assert attention.for_heads('tokamax', 512) == 'chunked'
  assert attention.for_heads('tokamax', 256) == 'tokamax'
  assert attention.for_heads('splash', 512) == 'splash'
  only = presets.stack('gemma4_31b', pattern=('global',))
  with pytest.raises(errors.UserError, match='a head dimension of 512'):
    setup.check_stacks(compute, model_config.DecoderOnlyConfig(only), device)


_TRACED = """
import jax
import jax.numpy as jnp
from encdec_adapt.ops import attention, masks
from tests.ops import attention_cases

attention.BACKENDS['tokamax'].load()
before = jax.jit(lambda x: x + 1)
before(jnp.ones(3))
from tests.ops import tokamax_reference
spec = attention_cases.spec_of('causal', 9)
attend = tokamax_reference.attend()
attend(*attention_cases.qkv(9, 9), spec, scale=1.0, softcap=None)
before(jnp.ones(3))
print(before._cache_size())
"""


def test_programs_that_were_traced_before_are_not_compiled_again():
  pytest.importorskip('tokamax', reason='tokamax needs Python 3.12')
  command = [sys.executable, '-c', _TRACED]
  done = subprocess.run(
    command, cwd=tiny.ROOT, capture_output=True, text=True, check=True
  )
  assert done.stdout.split()[-1] == '1'
