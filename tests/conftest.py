"""Every test process: CPU, eight fake devices, shapes checked at calls."""

import collections
import itertools
import os
import pathlib

from tests import xla_flags

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = (
  os.environ.get('XLA_FLAGS', '') + ' ' + xla_flags.cpu(8)
)
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
# Most of the tests' time is compiling: processes share what they compile, and
# so does the next run (`pytest --cache-clear` removes it).
_CACHE = pathlib.Path(__file__).resolve().parent.parent / '.pytest_cache'
os.environ |= {
  'JAX_COMPILATION_CACHE_DIR': str(_CACHE / 'd' / 'compiled'),
  'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.2',
  'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '0',
}

from encdec_adapt.cluster import host_memory  # noqa: E402

host_memory.share_arena()
host_memory.keep_freed()

import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402

jax.devices()  # Eight of them, before a plan asks JAX for more.
jaxtyping.install_import_hook(
  ['encdec_adapt.ops', 'encdec_adapt.models', 'encdec_adapt.training'],
  'beartype.beartype',
)


@pytest.fixture(scope='session')
def store():
  """A fake of GCS, which all clients in this process talk to."""
  from tests import fake_gcs

  with fake_gcs.serve() as served:
    os.environ.update(served.environment())
    yield served


@pytest.fixture
def bucket(store):
  """Address of a folder of the fake with nothing in it."""
  store.refuses = 0
  return store.new_folder()


@pytest.fixture(autouse=True, scope='module')
def _forget_programs():
  """Frees compiled programs, which add up to gigabytes over all tests."""
  yield
  jax.clear_caches()


def pytest_collection_modifyitems(items):
  """Parity first, then the files that take longest, for even shares.

  torch must be imported before TensorFlow. Each brings an LLVM of its own; in
  the other order, torch's CUDA builds crash the process.
  """
  longest = {'multiproc', 'resume', 'aot'}

  def order(item):
    marks = {mark.name for mark in item.iter_markers()}
    return 'parity' not in marks, not longest & marks

  files = {}
  for item in items:
    first = files.get(item.path, (True, True))
    files[item.path] = min(first, order(item))
  items.sort(key=lambda item: files[item.path])


def pytest_terminal_summary(terminalreporter, config):
  """Prints the total time by marker, with the slowest tests."""
  if config.option.durations is None:
    return
  tiers = ('sharded', 'multiproc', 'aot', 'parity', 'resume', 'e2e')
  totals = collections.Counter()
  for report in itertools.chain(*terminalreporter.stats.values()):
    marks = getattr(report, 'keywords', ())
    tier = next((tier for tier in tiers if tier in marks), 'unit')
    totals[tier] += getattr(report, 'duration', 0.0)
  terminalreporter.section('total by marker')
  for tier, seconds in totals.most_common():
    terminalreporter.line(f'{seconds:8.1f}s {tier}')
