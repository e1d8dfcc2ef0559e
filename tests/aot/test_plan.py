"""Plans of tiny configurations, compiled for a TPU that is not here."""

import importlib.util
import json
import subprocess
import sys

import pytest

from encdec_adapt import plan
from encdec_adapt.planning import chips, out_of_memory, stored
from tests import tiny

pytestmark = [
  pytest.mark.aot,
  pytest.mark.skipif(
    importlib.util.find_spec('libtpu') is None,
    reason="libtpu is not installed: pip install -e '.[tpu]'",
  ),
]

LAYERS, ROWS, LENGTH = 4, 8, 1024
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
FLAGS = [f'--config.{key}={value}' for key, value in CHANGES.items()]


def run(*flags, environment=None):
  return subprocess.run(
    [sys.executable, '-m', 'encdec_adapt.plan', '--config=configs/base.py']
    + [*FLAGS, *flags],
    capture_output=True,
    text=True,
    cwd=tiny.ROOT,
    env={**tiny.environment(), **(environment or {})},
    timeout=900,
  )


@pytest.fixture(scope='module')
def plans(tmp_path_factory):
  output = tmp_path_factory.mktemp('plan') / 'plan.json'
  done = run(
    '--topology=v5e:2x2', '--programs=train,eval,decode', f'--output={output}'
  )
  assert done.returncode == 0, done.stdout + done.stderr
  assert '[train] v5e:2x2 x 1: 4 chips' in done.stdout
  written = json.loads(output.read_text())
  assert written['config'] == 'configs/base.py'
  assert written['overrides']['compute.remat'] == 'attention'
  assert stored.flags(written, stored.programs(written))[-3:] == [
    '--topology=v5e:2x2',
    '--num_slices=1',
    '--programs=train,eval,decode',
  ]
  return stored.programs(written)


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
  # one call. One kernel has all gradients where all see all.
  for part, count in {'fwd': 3, 'dq': 1, 'dkv': 3}.items():
    (found,) = [n for name, n in calls.items() if f'_{part}_' in name]
    assert found == count * LAYERS
  assert {row['axes'] for row in train['collectives']} == {'fsdp'}


def test_memory_adds_up(plans):
  memory = plans['train']['memory']
  arguments = memory['arguments']
  assert arguments['optimizer'] == pytest.approx(
    2 * arguments['parameters'], rel=0.01
  )
  parts = sum(memory[k] for k in ('temporary', 'results', 'code'))
  assert memory['temporary'] == pytest.approx(sum(memory['parts'].values()))
  assert 0 < memory['parts']['loss'] < memory['temporary']
  assert memory['parts']['gradients'] == pytest.approx(
    arguments['parameters'], rel=0.01
  )
  assert memory['peak'] == pytest.approx(
    parts + sum(arguments.values()), rel=0.05
  )


def test_decoding_reads_its_caches(plans):
  decode = plans['decode']
  # Keys and values, of self- and cross-attention, bfloat16, one row a device.
  entries = 2 * 2 * LAYERS * LENGTH * 2 * 128 * 2
  assert decode['memory']['arguments']['caches'] == pytest.approx(
    entries, rel=0.02
  )
  assert not decode['kernels']


def test_eval_and_decode_stand_beside_the_formula(plans):
  rows, width, heads, kv_heads = 4, 256, 4 * 128, 2 * 128
  own = 2 * width * (2 * heads + 2 * kv_heads) + 6 * width * 512
  cross = 2 * width * 2 * heads
  scores = 4 * heads * 2 * LENGTH  # Of the cache and of the source.
  decode = LAYERS * (own + cross + scores) + 2 * width * 1024
  assert plans['decode']['flops']['model'] == rows * decode / 4
  evaluated = plans['eval']
  # A third of a training step's, on half of its rows.
  trained = plans['train']['flops']['model']
  assert evaluated['flops']['model'] == trained / 3 / 2
  counted = evaluated['flops']['products'] + evaluated['flops']['kernels']
  assert counted == pytest.approx(evaluated['flops']['model'], rel=0.25)
  for name in ('eval', 'decode'):
    assert 0 < plans[name]['mfu'] < 1
  memory = evaluated['memory']
  assert set(memory['parts']) == {'loss', 'activations'}
  # Inside a job the optimizer's state stays where it is.
  state = plans['train']['memory']['arguments']['optimizer']
  assert memory['beside'] == {'optimizer': state}
  assert memory['peak'] > state + memory['arguments']['parameters']


def test_a_chip_of_v4_is_one_device():
  done = run('--topology=v4:2x2x1', '--config.mesh.fsdp=4', '--sharding')
  assert done.returncode == 0, done.stdout + done.stderr
  assert '[train]' in done.stdout


def test_kernels_of_sharded_lengths_are_counted(tmp_path):
  output = tmp_path / 'plan.json'
  done = run(
    '--topology=v5e:2x2',
    '--config.mesh.sequence=2',
    '--config.model.encoder.layers=1',
    '--config.model.decoder.layers=1',
    f'--output={output}',
  )
  assert done.returncode == 0, done.stdout + done.stderr
  train = json.loads(output.read_text())
  # Rows of two shards of 512: all but the decoder's own read all keys, of
  # which its last queries see all, too. Forward and backward (fused: 5
  # products; else 3 and 4) of 4 rows a device.
  pairs = 512 * LENGTH * 4 * 128 * 2
  expected = 4 * pairs * (2 * (2 + 5) + (2 + 3 + 4))
  assert train['flops']['kernels'] == pytest.approx(expected)


@pytest.mark.slow
def test_what_the_host_holds_is_no_memory_of_a_device(tmp_path):
  """Of a model whose state fills a chip: else the compiler takes its ease."""
  shape = dict(layers=20, width=4096, mlp_width=2048)
  found = {}
  for offload in (False, True):
    output = tmp_path / f'{offload}.json'
    done = run(
      '--topology=v5e:1x1',
      '--config.model.kind=decoder_only',
      '--config.data.objective=causal_lm',
      '--config.data.encoder_length=0',
      '--config.train.batch_size=1',
      '--config.train.eval_batch_size=1',
      '--config.compute.remat=full',
      *(f'--config.model.decoder.{k}={v}' for k, v in shape.items()),
      f'--config.optimizer.offload={offload}',
      f'--output={output}',
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found[offload] = json.loads(output.read_text())
  plain, held = found[False], found[True]
  size = plain['memory']['arguments']['optimizer']
  left = held['memory']['arguments'].get('optimizer', 0)
  assert left < 0.01 * size
  # Nor while it is updated: what is stacked is copied layer by layer.
  assert plain['memory']['peak'] - held['memory']['peak'] > 0.9 * size
  seconds = 2 * (size - left) / chips.CHIPS['v5e'].host_bandwidth
  assert held['roofline']['host_s'] == pytest.approx(seconds)
  assert plain['roofline']['host_s'] == 0


def test_over_the_budget_is_a_status():
  done = run('--topology=v5e:2x2', '--programs=decode', '--hbm_gib=0.001')
  assert done.returncode == plan.DOES_NOT_FIT, done.stderr
  assert 'DOES NOT FIT' in done.stdout
  assert 'would fit' not in done.stdout
  assert 'mesh and config.train.eval_batch_size needs' in done.stdout


@pytest.mark.parametrize(
  'flags, words',
  [
    (['--topology=v9:2x2'], 'v9:2x2 is not known'),
    (['--topology=v5e:3x5'], 'v5e are 1x1, 2x2, 2x4, 4x4, 4x8, 8x8,'),
    (['--topology=v5e:2x2', '--programs=fly'], '--programs=fly is not known'),
    (['--topology=v5e:2x2', '--config.mesh.tensor=3'], 'does not multiply'),
    (['--topology=v5e:2x2', '--config.train.batch_size=6'], 'batch_size is 6'),
  ],
)
def test_bad_questions(flags, words):
  done = run(*flags)
  assert done.returncode == 2, done.stdout + done.stderr
  assert words in done.stderr


@pytest.mark.parametrize(
  'message, needed',
  [
    ('Ran out of memory. Used 18.50G of 15.75G hbm.', 18.5 * 2**30),
    (
      'the total memory required for HLO temporaries (17.86G) exceeds'
      ' available HBM (15.75G).',
      17.86 * 2**30,
    ),
    ('Ran out of memory in memory space smem. Used 1.10M of 1.00M smem.', None),
    ('Ran out of memory in memory space vmem. Used 65.1M of 64.0M vmem.', None),
    ('something else', None),
  ],
)
def test_the_compilers_complaint_is_read(message, needed):
  assert out_of_memory.needed(message) == needed
