"""Differences between processes are named with field, value and process."""

import json

from encdec_adapt.cluster import consistency
from encdec_adapt.telemetry import environment


def test_facts_are_versions_options_source_and_flags(monkeypatch):
  monkeypatch.setenv('XLA_FLAGS', '--b --a')
  flags = {'workdir': '/w', 'config': {'train': {'steps': 3}, 'seeds': (1, 2)}}
  found = consistency.process_facts(flags)
  assert json.loads(json.dumps(found)) == found
  assert {'python', 'jax', 'jaxlib', 'libtpu', 'encdec_adapt'} <= found.keys()
  assert found['source'] == environment.source_digest()
  assert found['xla_flags'] == '--a --b'
  assert found['config.train.steps'] == 3 and found['workdir'] == '/w'
  assert found['config.seeds'] == [1, 2]
