"""The environment report, and the compilation cache."""

import json
import subprocess
import sys

import jax
import pytest

from encdec_adapt.files import paths
from encdec_adapt.telemetry import environment


def test_report_and_fingerprint(monkeypatch):
  jax.devices()  # XLA ends the process for flags that it does not know.
  monkeypatch.setenv('XLA_FLAGS', ' --b=1  --a=2')
  report = json.loads(json.dumps(environment.report()))
  assert (report['jax'], report['devices']) == (jax.__version__, 8)
  assert report['cores'] >= 1
  assert report['xla_flags'] == '--a=2 --b=1'
  assert report['jax_enable_x64'] is False
  fingerprint = environment.fingerprint()
  assert not {'git', 'host', 'python'} & fingerprint.keys()
  assert {'jaxlib', 'cpu', 'cores', 'devices'} <= fingerprint.keys()
  saved = json.loads(json.dumps(fingerprint))
  assert environment.difference(saved, environment.fingerprint()) == []


def test_an_image_reports_the_commit_that_it_was_made_from(monkeypatch):
  monkeypatch.setenv('ENCDEC_ADAPT_GIT', 'abc-dirty')
  monkeypatch.setenv('PATH', '')  # As in an image, which has no git.
  assert environment.git_revision() == 'abc-dirty'


_COMPILE = """
import sys
import jax
import jax.numpy as jnp
from encdec_adapt.telemetry import environment

environment.enable_compile_cache(sys.argv[1])
# Caches a tiny program too.
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
step = jax.jit(lambda x: jnp.tanh(x @ x) * 0.5, donate_argnums=0)
total = step(jnp.linspace(-1.0, 1.0, 256).reshape(16, 16)).sum()
hits = events.count('/jax/compilation_cache/cache_hits')
print(hits > 0, float(total).hex())
"""


@pytest.mark.long
@pytest.mark.parametrize('fixture', ['tmp_path', 'bucket'])
def test_a_second_process_reads_compiled_programs(fixture, request):
  folder = paths.at(request.getfixturevalue(fixture)) / 'cache'
  command = [sys.executable, '-c', _COMPILE, str(folder)]
  first, second = (
    subprocess.check_output(command, text=True).split() for _ in range(2)
  )
  assert (first[0], second[0]) == ('False', 'True') and first[1] == second[1]
  (machine,) = folder.iterdir()
  assert len(machine.name) == 16
