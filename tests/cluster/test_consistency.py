"""Differences between processes are named with field, value and process."""

import json

from encdec_adapt.cluster import consistency
from encdec_adapt.telemetry import environment


def _processes(*changes):
  """Facts of processes that are equal up to the given changes."""
  equal = {'jax': '1', 'config.train.steps': 20}
  return {f'process {n}': {**equal, **c} for n, c in enumerate(changes)}


def test_equal_processes_have_no_difference():
  assert consistency.describe_differences(_processes({}, {}, {})) == ''


def test_fields_values_and_processes_are_named():
  found = consistency.describe_differences(
    _processes(*[{}] * 5, {'jax': '2', 'libtpu': None})
  )
  assert (
    'jax is "2" on process 5, "1" on process 0, process 1, process 2 and 2'
    ' more; libtpu is null on process 5, absent on process 0,'
  ) in found
  many = {f'config.{key}': 1 for key in 'abcdefghijk'}
  found = consistency.describe_differences(_processes({}, many))
  assert found.count('config.') == 8 and 'and 3 more.' in found


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
