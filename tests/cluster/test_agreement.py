"""What differs between processes is named with field, hosts and values."""

import json

import pytest

from encdec_adapt.cluster import agreement
from encdec_adapt.telemetry import environment

ALIKE = {'jax': '1', 'config.train.steps': 20}


def members(*changes, clocks=()):
  """Processes that have `ALIKE` but for what is given of each."""
  return [
    agreement.Member(
      number,
      f'host-{number}',
      {**ALIKE, **changed},
      clocks[number] if clocks else 0.0,
    )
    for number, changed in enumerate(changes)
  ]


def test_those_that_agree_have_no_problem():
  assert agreement.problem(members({}, {}, {})) == ''
  assert agreement.problem(members({}, {}, clocks=(0, -4.9))) == ''


@pytest.mark.parametrize(
  'field, there, said',
  [
    (
      'config.train.steps',
      30,
      'config.train.steps is 20 on process 0 (host-0), 30 on process 1',
    ),
    ('jax', '2', 'jax is "1" on process 0 (host-0), "2" on process 1 (host-1)'),
    ('libtpu', None, 'libtpu is absent on process 0 (host-0), null on process'),
  ],
)
def test_a_field_that_differs_is_named(field, there, said):
  problem = agreement.problem(members({}, {field: there}))
  assert said in problem
  assert 'Start every process with the same' in problem


def test_the_odd_one_of_many_is_named_first():
  problem = agreement.problem(
    members(*[{}] * 5, {'jax': '2'}, *[{}] * 4),
  )
  assert (
    'jax is "2" on process 5 (host-5), "1" on process 0 (host-0), process 1'
    ' (host-1), process 2 (host-2) and 6 more.'
  ) in problem


def test_many_fields_are_counted():
  problem = agreement.problem(
    members({}, {f'config.{key}': 1 for key in 'abcdefghijk'})
  )
  assert problem.count('config.') == 8
  assert '; and 3 more.' in problem


@pytest.mark.parametrize(
  'clock, said', [(7.25, '7.2 s ahead of'), (-90.0, '90.0 s behind')]
)
def test_a_clock_that_differs_is_named(clock, said):
  problem = agreement.problem(members({}, {}, clocks=(0, clock)))
  assert f'the clock of process 1 (host-1) is at least {said}' in problem
  assert '5 s are allowed' in problem and 'time server' in problem
  assert 'Start every process' not in problem


@pytest.mark.parametrize(
  'clock, ahead', [(10.0, 0), (12.0, 0), (12.5, 0.5), (9.0, -1.0)]
)
def test_a_clock_is_off_by_what_waiting_cannot_explain(clock, ahead):
  assert agreement.clock_ahead(10.0, clock, 12.0) == ahead


def test_facts_are_versions_options_source_and_what_was_told(monkeypatch):
  monkeypatch.setenv('XLA_FLAGS', '--b --a')
  told = {'workdir': '/w', 'config': {'train': {'steps': 3}, 'seeds': (1, 2)}}
  found = agreement.facts(told)
  assert json.loads(json.dumps(found)) == found
  assert {'python', 'jax', 'jaxlib', 'libtpu', 'encdec_adapt'} <= found.keys()
  assert found['source'] == environment.source_digest()
  assert found['xla_flags'] == '--a --b'
  assert found['config.train.steps'] == 3 and found['workdir'] == '/w'
  assert found['config.seeds'] == [1, 2]
