"""Plans of a tiny configuration, compiled for eight H100 that are not here."""

import json

import pytest

from encdec_adapt.planner import chips
from tests import tiny

LAYERS, ROWS, LENGTH, CHIPS = 2, 16, 512, 8
STACK = dict(layers=LAYERS, width=256, mlp_width=512, heads=4, kv_heads=2)
STACK |= dict(head_dim=64, vocab_size=1024)
CHANGES = {
  'model.kind': 'encoder_decoder',
  'compute.dtype': 'bfloat16',
  'compute.remat': 'attention',
  'compute.attention': 'tokamax',
  'data.objective': 'prefix_lm',
  'data.encoder_length': LENGTH,
  'data.decoder_length': LENGTH,
  'train.batch_size': ROWS,
  'train.eval_batch_size': CHIPS,
}
for side in ('encoder', 'decoder'):
  CHANGES |= {f'model.{side}.{key}': value for key, value in STACK.items()}
FLAGS = [f'--config={tiny.ROOT}/configs/base.py', f'--topology=h100:{CHIPS}']
FLAGS += [f'--config.{key}={value}' for key, value in CHANGES.items()]
pytestmark = [
  pytest.mark.aot_gpu,
  pytest.mark.skipif(
    not chips.compiler('gpu'), reason="needs pip install -e '.[cuda13,gpu]'"
  ),
]


@pytest.fixture(scope='module')
def report(tmp_path_factory):
  """The plans by program, and what the command prints."""
  output = tmp_path_factory.mktemp('plan') / 'plan.json'
  # A process of its own: this one has other devices, and kernels are compiled
  # for the first kind of GPU that a process sees.
  flags = [*FLAGS, '--programs=train,eval,decode', f'--output={output}']
  done = tiny.run('plan', *flags, timeout=1800)
  assert done.returncode == 0, done.stderr
  return json.loads(output.read_text()), done.stdout


def test_the_training_step_is_counted(report):
  train = report[0]['programs']['train']
  assert train['source'] == 'compiled' and train['fits']
  # Forward, backward (two), and the blocks without attention forward again.
  width, heads, kv_heads = 256, 4 * 64, 2 * 64
  attention = 2 * width * (2 * heads + 2 * kv_heads)
  layer = {'encoder': attention + 6 * width * 512}
  layer['decoder'] = layer['encoder'] + attention
  blocks = ROWS * LENGTH * LAYERS * sum(layer.values())
  vocabulary = ROWS * LENGTH * 2 * width * 1024
  expected = (4 * blocks + 3 * vocabulary) / CHIPS
  assert train['flops']['products'] == pytest.approx(expected, rel=0.03)
  calls = {row['name']: row['calls'] for row in train['kernels']}
  # Self-attention of both stacks, and cross-attention.
  assert list(calls.values()) == [3 * LAYERS] * 3
  # 2 + 3 + 4 products; of the causal one, ten of sixteen blocks.
  pairs = ROWS / CHIPS * LENGTH**2 * 4 * 64 * 2 * 9 * LAYERS
  assert train['flops']['kernels'] == pytest.approx(pairs * (2 + 10 / 16))
  assert len(train['resources']) >= 3
  assert all(row['registers'] > 0 for row in train['resources'])


def test_collectives_and_memory_are_the_compilers(report):
  train = report[0]['programs']['train']
  assert {row['axes'] for row in train['collectives']} == {'fsdp'}
  kinds = {row['kind']: row for row in train['collectives']}
  assert {'all-gather', 'reduce-scatter'} <= set(kinds)
  # Weights in float32 or bfloat16, forward and backward.
  assert kinds['all-gather']['bytes'] > 2 * 2 * LAYERS * 256 * 512 * 3
  for row in train['collectives']:
    assert 0 <= row['exposed'] <= row['seconds'] * 1.001
  memory = train['memory']
  parts = sum(memory[k] for k in ('temporary', 'results', 'code'))
  total = parts + sum(memory['arguments'].values())
  assert memory['peak'] == pytest.approx(total, rel=0.05)
  assert 0 < train['mfu'] < 1


def test_weights_are_gathered_twice_and_their_gradients_scattered(report):
  rows = report[0]['programs']['train']['collectives']
  sent = {row['kind']: row['bytes'] * CHIPS / (CHIPS - 1) for row in rows}
  attention = 256 * 2 * (4 * 64 + 2 * 64)
  # The decoder also has cross-attention. Two bytes for each weight.
  weights = 2 * LAYERS * (3 * attention + 2 * 3 * 256 * 512)
  # The loss gathers states; lookups gather the float32 tables of both stacks.
  states, tables = 2 * ROWS * LENGTH * 256, 2 * 4 * 1024 * 256
  assert sent['all-gather'] < 1.1 * (2 * weights + states + tables)
  # The gradients of states and tables are float32.
  assert sent['reduce-scatter'] >= weights + 2 * states + tables
  assert sent['all-reduce'] < weights / 20


def test_evaluation_and_decoding_are_compiled(report):
  written, printed = report
  evaluated, decode = (written['programs'][k] for k in ('eval', 'decode'))
  assert len(evaluated['kernels']) == 1 and not decode['kernels']
  # Keys and values, of self- and cross-attention, bfloat16, a row a device.
  entries = 2 * 2 * LAYERS * LENGTH * 2 * 64 * 2
  assert decode['memory']['arguments']['caches'] == pytest.approx(
    entries, rel=0.02
  )
  assert 'registers' in printed and 'not autotuned' in printed
  assert set(written['versions']) == {'jax', chips.compiler('gpu').split()[0]}
