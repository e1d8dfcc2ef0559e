"""Programs compiled by one process are taken by the next."""

import subprocess
import sys

import pytest

from encdec_adapt.cli import errors
from encdec_adapt.cluster import compile_cache
from encdec_adapt.files import paths

_PROGRAM = """
import sys
import jax
import jax.numpy as jnp
from encdec_adapt.cluster import compile_cache

compile_cache.enable(sys.argv[1])
# So that a tiny program is kept too.
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
step = jax.jit(lambda x: jnp.tanh(x @ x) * 0.5, donate_argnums=0)
x = jnp.linspace(-1.0, 1.0, 256).reshape(16, 16)
for _ in range(3):
  x = step(x)
hits = events.count('/jax/compilation_cache/cache_hits')
print(hits > 0, float(x.sum()).hex())
"""


@pytest.mark.parametrize('place', ['file system', 'bucket'])
def test_a_second_process_takes_the_same_program(tmp_path, place, request):
  folder = tmp_path / 'cache'
  if place == 'bucket':
    folder = paths.at(request.getfixturevalue('bucket'))
  hits, sums = [], []
  for _ in range(2):
    done = subprocess.run(
      [sys.executable, '-c', _PROGRAM, str(folder)],
      capture_output=True,
      text=True,
      check=True,
    )
    hit, total = done.stdout.split()
    hits.append(hit)
    sums.append(total)
  assert hits == ['False', 'True']
  assert sums[0] == sums[1]
  (machine,) = folder.iterdir()
  assert len(machine.name) == 16


def test_a_folder_that_cannot_be_written(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(errors.UserError, match='cannot be written'):
    compile_cache.enable(tmp_path / 'file')
