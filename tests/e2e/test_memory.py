"""Host memory of conversions that stream: never that of the model.

Measured in a process of its own, as the most that it had resident beyond what
it has once every command has run on a tiny model. Pages of mapped files count.
That of export is bounded in tests/huggingface/test_tensors.py: what it
reads and writes together is more than this model.
"""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from encdec_adapt.models import model_config, presets
from tests.benchmarks import exchange

# Fourteen stacked arrays of one size (the projections of two layers of a
# pattern), 9.4 MB each in bf16, and little else.
LARGE = dataclasses.replace(
  presets.stack('2b'),
  layers=18,
  width=512,
  mlp_width=1024,
  heads=8,
  kv_heads=8,
  head_dim=128,
  vocab_size=512,
)
TINY = dataclasses.replace(LARGE, layers=2, width=32, mlp_width=64)
LARGEST = 9 * 512 * 1024 * 2
# Two arrays, and those that they are made from: measured 3.0 of import and 5.3
# of adapt, whose pair has 34 such arrays.
MOST = 8 * LARGEST
# Reads lists of arguments; prints the peak above the start for each.
SCRIPT = """
import gc, json, sys
from encdec_adapt import convert
from encdec_adapt.cli import command

def resident(field):
  lines = open('/proc/self/status').readlines()
  (line,) = (line for line in lines if line.startswith(field))
  return int(line.split()[1]) * 1024

for arguments in json.loads(sys.argv[1]):
  gc.collect()
  open('/proc/self/clear_refs', 'w').write('5')  # Resets the peak.
  before = resident('VmRSS:')
  assert command.run_subcommand('', convert.COMMANDS, arguments) == 0
  print('peak', resident('VmHWM:') - before)
"""


@pytest.fixture(scope='module')
def peaks(tmp_path_factory):
  """Bytes by command, for the large model."""
  folder = tmp_path_factory.mktemp('memory')
  jobs = []
  for name, stack in (('tiny', TINY), ('large', LARGE)):
    source, run, pair = (
      folder / f'{name}_{kind}' for kind in ('source', 'run', 'pair')
    )
    exchange.make_folder(source, model_config.DecoderOnlyConfig(stack))
    jobs += [
      ['import', f'--source={source}', f'--output={run}'],
      ['adapt', f'--encoder={source}', f'--output={pair}'],
    ]
  done = subprocess.run(
    [sys.executable, '-c', SCRIPT, json.dumps(jobs)],
    capture_output=True,
    text=True,
    # glibc gives what is freed back at once; what it keeps of it else depends
    # on how busy the cores are.
    env={**os.environ, 'MALLOC_MMAP_THRESHOLD_': str(1 << 20)},
  )
  assert not done.returncode, done.stderr
  lines = [line.split() for line in done.stdout.splitlines()]
  found = [int(line[1]) for line in lines if line[:1] == ['peak']]
  return dict(zip(('import', 'adapt'), found[2:], strict=True))


@pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')
@pytest.mark.parametrize('name', ['import', 'adapt'])
def test_memory_stays_near_the_largest_array(name, peaks):
  assert peaks[name] < MOST, f'{peaks[name] / LARGEST:.1f} of the largest'
