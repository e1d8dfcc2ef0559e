"""Plans of a tiny configuration, compiled for a TPU that is not here."""

import json

import pytest

from encdec_adapt import plan
from encdec_adapt.planner import chips
from encdec_adapt.sharding import compiler
from tests import tiny
from tests.planner import toy

LAYERS, ROWS, LENGTH = 2, 8, 1024
STACK = dict(layers=LAYERS, width=256, mlp_width=512, heads=4, kv_heads=2)
STACK |= dict(head_dim=128, vocab_size=1024)
CHANGES = {
  'model.kind': 'encoder_decoder',
  'compute.dtype': 'bfloat16',
  'compute.remat': 'attention',
  'compute.attention': 'splash',
  'data.objective': 'prefix_lm',
  'data.encoder_length': LENGTH,
  'data.decoder_length': LENGTH,
  'train.batch_size': ROWS,
  'train.eval_batch_size': 4,
}
for side in ('encoder', 'decoder'):
  CHANGES |= {f'model.{side}.{key}': value for key, value in STACK.items()}
FLAGS = [f'--config={tiny.ROOT}/configs/base.py', '--topology=v5e:2x2']
FLAGS += [f'--config.{key}={value}' for key, value in CHANGES.items()]


def make(folder, *flags):
  """Plans with these flags; returns the plans by program."""
  output = folder / 'plan.json'
  assert tiny.call(plan, *FLAGS, *flags, f'--output={output}') == 0
  return json.loads(output.read_text())['programs']


@pytest.fixture(scope='module')
def plans(tmp_path_factory):
  return make(tmp_path_factory.mktemp('plan'), '--programs=train,decode')


@pytest.mark.long
@toy.needs_libtpu
@pytest.mark.aot
def test_the_training_step_is_counted(plans):
  train = plans['train']
  assert train['fits'] and 0 < train['mfu'] < 1
  # Forward, backward (two), and the blocks forward once more.
  width, heads, kv_heads = 256, 4 * 128, 2 * 128
  attention = 2 * width * (2 * heads + 2 * kv_heads)
  layer = {'encoder': attention + 6 * width * 512}
  layer['decoder'] = layer['encoder'] + attention
  blocks = ROWS * LENGTH * LAYERS * sum(layer.values())
  vocabulary = ROWS * LENGTH * 2 * width * 1024
  expected = (4 * blocks + 3 * vocabulary) / 4
  assert train['flops']['products'] == pytest.approx(expected, rel=0.01)
  calls = {k['name']: k['calls'] for k in train['kernels']}
  # Self-attention of both stacks, and cross-attention; 2 rows a device are
  # one call. One kernel has all gradients without a mask.
  for part, count in {'fwd': 3, 'dq': 1, 'dkv': 3}.items():
    (found,) = [n for name, n in calls.items() if f'_{part}_' in name]
    assert found == count * LAYERS
  assert {row['axes'] for row in train['collectives']} == {'fsdp'}
  memory = train['memory']
  arguments = memory['arguments']
  assert arguments['optimizer'] == pytest.approx(
    2 * arguments['parameters'], rel=0.01
  )
  assert memory['temporary'] == pytest.approx(sum(memory['parts'].values()))
  parts = sum(memory[k] for k in ('temporary', 'results', 'code'))
  assert memory['peak'] == pytest.approx(
    parts + sum(arguments.values()), rel=0.05
  )


@pytest.mark.long
@toy.needs_libtpu
@pytest.mark.aot
def test_decoding_reads_its_caches(plans):
  decode = plans['decode']
  # Keys and values, of self- and cross-attention, bfloat16, one row a device.
  entries = 2 * 2 * LAYERS * LENGTH * 2 * 128 * 2
  assert decode['memory']['arguments']['caches'] == pytest.approx(
    entries, rel=0.02
  )
  assert not decode['kernels']


@toy.needs_libtpu
@pytest.mark.aot
@pytest.mark.slow
def test_evaluation_and_kernels_of_sharded_lengths_are_counted(tmp_path):
  flags = ['--config.mesh.sequence=2', '--programs=train,eval']
  flags += [
    f'--config.model.{side}.layers=1' for side in ('encoder', 'decoder')
  ]
  plans = make(tmp_path, *flags)
  # Rows of two shards of 512: all but the decoder's own read all keys, of
  # which its last queries see all, too. Forward and backward (fused: 5
  # products; else 3 and 4) of 4 rows a device.
  pairs = 512 * LENGTH * 4 * 128 * 2
  expected = 4 * pairs * (2 * (2 + 5) + (2 + 3 + 4))
  assert plans['train']['flops']['kernels'] == pytest.approx(expected)
  evaluated, train = plans['eval'], plans['train']
  # A third of a training step's, on half of its rows.
  assert evaluated['flops']['model'] == train['flops']['model'] / 3 / 2
  # Inside a job the optimizer's state stays in memory.
  state = train['memory']['arguments']['optimizer']
  assert evaluated['memory']['beside'] == {'optimizer': state}
  assert evaluated['memory']['peak'] > state


@toy.needs_libtpu
@pytest.mark.aot
@pytest.mark.long
def test_the_scoring_of_a_reward_model_is_compiled(tmp_path):
  flags = ['--config.loss.kind=rloo', '--config.train.rewards.models=nowhere']
  flags += ['--config.data.objective=pairs', '--config.data.encoder_length=256']
  flags += ['--config.train.rollouts.samples=2']
  flags += ['--config.train.rollouts.tokens=127']
  flags += ['--config.data.source=']
  (plan,) = make(tmp_path, *flags, '--programs=reward').values()
  memory, layer = plan['memory'], 2 * 256 * (2 * 512 + 2 * 256) + 6 * 256 * 512
  # The prompt is read once for both completions, also by cross-attention: its
  # keys and values.
  products = layer * (256 + 2 * 128)
  products += 2 * 256 * (2 * 512 * 2 * 128 + 2 * 256 * 256)
  products += 4 * 512 * (256 * 256 + 2 * 128 * (128 + 256))  # Scores.
  assert plan['flops']['products'] == pytest.approx(
    ROWS * LAYERS * products / 4, rel=0.06
  )
  assert memory['peak'] > sum(memory['beside'].values())
  assert memory['arguments']['reward model 1'] == pytest.approx(
    memory['beside']['teacher'], rel=0.01
  )
  assert not plan['kernels'] and plan['missing_rewards'] == ['nowhere']


@toy.needs_libtpu
@pytest.mark.aot
@pytest.mark.slow
def test_offloaded_state_takes_no_device_memory(tmp_path):
  """With a state that fills a chip: else the compiler has no need."""
  shape = dict(layers=20, width=4096, mlp_width=2048)
  flags = [
    '--topology=v5e:1x1',
    '--config.model.kind=decoder_only',
    '--config.data.objective=causal_lm',
    '--config.data.encoder_length=0',
    '--config.train.batch_size=1',
    '--config.train.eval_batch_size=1',
    '--config.compute.remat=full',
    *(f'--config.model.decoder.{k}={v}' for k, v in shape.items()),
  ]
  plain, held = (
    make(tmp_path, *flags, f'--config.optimizer.offload={value}')['train']
    for value in (False, True)
  )
  size = plain['memory']['arguments']['optimizer']
  left = held['memory']['arguments'].get('optimizer', 0)
  assert left < 0.01 * size
  # Nor while it is updated: stacked leaves are copied layer by layer.
  assert plain['memory']['peak'] - held['memory']['peak'] > 0.9 * size
  seconds = 2 * (size - left) / chips.CHIPS['v5e'].host_bandwidth
  assert held['roofline']['host_s'] == pytest.approx(seconds)


@pytest.mark.parametrize(
  'message, nbytes',
  [
    ('Ran out of memory. Used 18.50G of 15.75G hbm.', 18.5 * 2**30),
    (
      'the total memory required for HLO temporaries (17.86G) exceeds'
      ' available HBM (15.75G).',
      17.86 * 2**30,
    ),
    ('Ran out of memory in memory space vmem. Used 65.1M of 64.0M vmem.', None),
    ('something else', None),
  ],
)
def test_the_compilers_message_is_read(message, nbytes):
  assert compiler.needed_bytes(message) == nbytes
