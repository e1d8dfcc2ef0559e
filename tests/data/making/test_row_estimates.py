"""Estimates of rows against the records that are made of the same text."""

import pydoc_data.topics

import pytest

from encdec_adapt import config as config_lib
from encdec_adapt.data.making import materialization, row_estimates
from encdec_adapt.data.records import record_sets, row_rates
from encdec_adapt.files import paths


@pytest.fixture
def data(tmp_path):
  """Two objectives of two texts whose vocabulary is not trained yet."""
  for name, topic in pydoc_data.topics.topics.items():
    (tmp_path / f'{name}.txt').write_text(topic, encoding='utf-8')
  # A small source beside it, which is not divided.
  lines = '\n'.join(f'line {i} of a short text' for i in range(200))
  (tmp_path / 'short.lines').write_text(lines)
  config = config_lib.defaults()
  config.data.source = f'text:{tmp_path}/*.txt + text:{tmp_path}/*.lines#lines'
  config.data.objective = 'prefix_lm | span_corruption'
  config.data.encoder_length = config.data.decoder_length = 64
  config.data.passes, config.data.shards, config.data.workers = 2, 3, 1
  for stack in (config.model.encoder, config.model.decoder):
    stack.vocab_size = 512
  return config_lib.load(config, str(tmp_path / 'run')).data


@pytest.mark.long
@pytest.mark.parametrize('most', [row_estimates._MOST_BYTES, 2**18])
def test_rows_are_estimated_before_they_are_made(data, most, monkeypatch):
  monkeypatch.setattr(row_estimates, '_MOST_BYTES', most)
  estimate = row_estimates.estimate(data)
  assert not paths.at(data.folder).exists()
  materialization.materialize(data)
  folder = paths.join(data.folder, 'train')
  made = record_sets.read_manifest(folder)
  assert estimate['passes'] == len(made['passes']) == 2
  for part, found in zip(made['parts'], estimate['parts'], strict=True):
    assert [found[x] for x in ('objective', 'source')] == [
      part[x] for x in ('objective', 'source')
    ]
    # Text of some 700 kB is read whole, or a fourth of it.
    is_small = most > 2**18 or 'lines' in part['source']
    for unit in row_rates.UNITS.values():
      assert found[unit] == pytest.approx(
        part[unit], rel=0.05 if is_small else 0.2
      )
