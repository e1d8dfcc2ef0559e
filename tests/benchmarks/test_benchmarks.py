"""The benchmarks run at small sizes, and their claims hold."""

import json

import pytest

from encdec_adapt.planner import chips
from tests import tiny
from tests.benchmarks import (
  exchange,
  generation,
  gpu_generation,
  gpu_kernels,
  gpu_step,
  gpu_tuning,
  gradient_sums,
  lm_eval_requests,
  one_card,
  post_training,
  records,
  serving,
  vocabulary_loss,
)
from tests.planner import toy

pytestmark = pytest.mark.slow  # Nightly.
TINY = (
  ['--layers=1', '--width=16', '--mlp_width=32', '--heads=2', '--kv_heads=1']
  + ['--head_dim=8', '--vocab_size=64', '--attention_chunk=8', '--steps=1']
  + ['--encoder_length=32', '--decoder_length=16', '--dtype=float32']
  + ['--platform=cpu', '--remat=full', '--backends=chunked']
)

_SIZES = ('--layers', '--mlp', '--heads', '--kv', '--head_dim', '--vocab')


def test_vocabulary_loss():
  content = vocabulary_loss.main(
    ['--tokens=64', '--width=8', '--vocab_size=4096', '--chunk=8']
    + ['--steps=1', '--dtypes', 'float32']
  )
  ours, dense = content['rows']
  assert ours['value'] == pytest.approx(dense['value'], rel=1e-5)
  assert ours['memory ratio'] < 0.5


def test_records():
  rows = records.main(
    ['--rows=40', '--batch_size=8', '--text_bytes=200000', '--vocab_size=600']
  )['rows']
  assert [row['task'] for row in rows[:3]] == [
    'rows',
    'batches',
    'batches, teacher',
  ]
  assert all(row['tokens/s per core'] > 0 for row in rows)
  packed = [row for row in rows if 'rows of in order' in row]
  assert len(packed) == 4  # Two objectives, long and short documents.
  assert all(row['rows of in order'] <= 1 for row in packed)


@pytest.mark.parity
def test_generation():
  pytest.importorskip('transformers')
  sizes = ['--layers=2', '--width=32', '--mlp_width=32', '--heads=2']
  sizes += ['--kv_heads=1', '--head_dim=16', '--vocab_size=300', '--ends=9']
  rows = generation.main(
    [*sizes, '--prompts=6', '--tokens=8', '--steps=1', '--int8']
  )['rows']
  assert len(rows) == 5
  for row in rows[:4]:
    count = row['equal texts'].split(' of ')
    assert count[0] == count[1]


@pytest.mark.parity
def test_lm_eval_requests():
  for name in ('transformers', 'lm_eval'):
    pytest.importorskip(name)
  sizes = ['--layers=2', '--width=32', '--mlp_width=32', '--heads=2']
  (row,) = lm_eval_requests.main(
    [*sizes, '--kv_heads=1', '--contexts=3', '--longest=20', '--steps=1']
  )['rows']
  assert row['requests'] == 12 and row['ratio'] > 0


@pytest.mark.parity
def test_post_training():
  pytest.importorskip('trl')
  sizes = ['--layers=1', '--width=32', '--mlp_width=32', '--heads=2']
  sizes += ['--kv_heads=1', '--head_dim=16', '--vocab_size=300', '--pairs=2']
  dpo, rollout, grpo = post_training.main(
    [*sizes, '--prompts=2', '--samples=2', '--prompt_tokens=8', '--tokens=8']
    + ['--steps=1']
  )['rows']
  assert dpo['ours, last'] == pytest.approx(dpo['TRL, last'], abs=1e-5)
  assert 0 < rollout['TRL, last'] <= 2 * 2 * 8 >= rollout['ours, last'] > 0
  assert all(row['ratio'] > 0 for row in (dpo, rollout, grpo))


def test_serving():
  pytest.importorskip('uvicorn')
  sizes = ['--layers=1', '--width=32', '--mlp_width=32', '--heads=2']
  rows = serving.main(
    [*sizes, '--kv_heads=1', '--requests=6', '--longest=20', '--tokens=8']
    + ['--clients', '2', '--turns=2']
  )['rows']
  assert [row['lost'] for row in rows] == [0]
  assert len(set(rows[0]['equal texts'].split(' of '))) == 1


def test_gpu_generation():
  rows = gpu_generation.main(
    ['--pair=toy_toy', '--prompt=16', '--tokens=8', '--steps=2', '--int8']
    + ['--dtype=float32', '--rows', '1', '2']
  )['rows']
  assert [row['rows'] for row in rows] == [1, 2]
  assert all(row['GB read'] > 0 < row['prefill ms'] for row in rows)


def test_exchange(tmp_path):
  content = exchange.main(
    ['--size=toy_small', '--vocab_size=300', f'--folder={tmp_path}']
  )
  rows = {row['task']: row for row in content['rows']}
  assert list(rows) == ['copy', 'import', 'export']
  # Import and export load jax; none holds more than a few GB.
  peaks = {name: row['peak GB'] for name, row in rows.items()}
  assert 0.005 < peaks['copy'] < 0.1 < peaks['import'] < 8
  assert peaks['copy'] < peaks['export'] < 8
  assert not list(tmp_path.iterdir())


@pytest.mark.parity
def test_gpu_step(monkeypatch):
  pytest.importorskip('transformers')
  monkeypatch.setenv('XLA_FLAGS', '')  # One device.
  flags = [*TINY, '--batches', '2', '--examples', '1', '3']
  peer = ['--peer_attentions', 'eager', '--peer_eager_mode']
  ours, packed, theirs = gpu_step.main(flags + peer)['rows']
  assert theirs['implementation'] == 'transformers'
  assert theirs['speed ratio'] == 1 and theirs['FLOP/s'] > 0
  assert ours['loss'] == pytest.approx(theirs['loss'], rel=0.2)
  assert (packed['attention'], packed['examples']) == ('chunked', 3)
  assert packed['batch'] == 2 and packed['FLOP/s'] > 0 and packed['loss'] > 3


@pytest.mark.parity
def test_gpu_tuning(monkeypatch, tmp_path):
  for name in ('transformers', 'peft'):
    pytest.importorskip(name)
  monkeypatch.setenv('XLA_FLAGS', '')  # One device.
  sizes = [flag for flag in TINY if flag.startswith(_SIZES)]
  sizes += ['--width=64', '--mlp_width=64', '--head_dim=64', '--pair=']
  output = tmp_path / 'numbers.json'
  rows = gpu_tuning.main(
    [*sizes, '--dtype=float32', '--attention=chunked', '--remat=full', '--peer']
    + ['--peer_device=cpu', '--shapes=2x32+16', '--bases', 'bfloat16', 'nf4']
    + ['--policies=rloo', '--prompts=4', '--samples=2', '--tokens=8']
    + ['--prompt_tokens=16', f'--output={output}']
  )['rows']
  peer, *ours, policy = rows
  assert json.loads(output.read_text())['rows'][-1] == policy
  assert [row['job'] for row in ours] == [
    f'LoRA, {base}' for base in ('bfloat16', 'nf4')
  ]
  assert {row['trained'] for row in ours} == {peer['trained']}
  for row in ours:
    assert row['loss'] == pytest.approx(peer['loss'], rel=0.2)
    assert row['ratio'] > 0 < row['peak GiB']
  tokens = policy['sampled tokens/s'] * policy['sampling s']
  assert tokens == pytest.approx(4 * 2 * 8) and policy['update s'] > 0


def test_one_card(monkeypatch):
  monkeypatch.chdir(tiny.ROOT)
  monkeypatch.setattr(chips, 'compiler', lambda kind: None)
  flags = ['--jobs', 'decoding', '2B-2B, base nf4', '--cards', 'l4:1', 'h100:1']
  header, _, tuning, decoding = one_card.main(flags)
  assert header == '| job | 24 GB, L4 | 80 GB, H100 |'
  assert tuning.endswith('`dots` |') and decoding.count(' ~') == 2


def test_gpu_kernels():
  content = gpu_kernels.main(
    ['--batch=1', '--length=16', '--window=4', '--heads=2', '--kv_heads=1']
    + ['--head_dim=8', '--width=8', '--vocab_size=64', '--steps=1']
    + ['--dtype=float32', '--backends', 'chunked', '--examples', '2']
  )
  *attentions, loss = content['rows']
  assert len(attentions) == 20 and loss['kernel'] == 'vocabulary loss'
  assert all(row['TFLOP/s'] > 0 for row in content['rows'])


@pytest.mark.aot
@toy.needs_libtpu
def test_gradient_sums():
  sizes = ['--width=512', '--mlp_width=1024', '--tokens=512']
  found = gradient_sums.main(['--topologies=v5e:4x4', *sizes])
  one, two, whole = found['rows']
  assert one['of the least'] == pytest.approx(2)
  assert two['of the least'] < 1.3
  # Of one copy as of two: a half of the slice first, then its two halves.
  assert whole['sums'] == 'reduce-scatter'
  assert whole['of the least'] == pytest.approx(1)


@pytest.mark.parity
def test_parity():
  pytest.importorskip('torch')
  pytest.importorskip('transformers')
  from tests.benchmarks import parity

  content = parity.main(['--seeds=1', '--families', 'gemma2'])
  (row,) = content['rows']
  assert row['fp32'] < 2e-4 and row['bf16 to fp32'] < 1.5
