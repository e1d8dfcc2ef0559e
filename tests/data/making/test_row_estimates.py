"""Estimates of rows against the records that are made of the same text."""

import pydoc_data.topics

import pytest

from encdec_adapt import config as config_lib
from encdec_adapt.data.making import materialization, row_estimates
from encdec_adapt.data.records import record_sets, row_rates
from encdec_adapt.files import paths


@pytest.fixture
def data(tmp_path):
  """Two objectives of a text whose vocabulary is not trained yet."""
  for name, topic in pydoc_data.topics.topics.items():
    (tmp_path / f'{name}.txt').write_text(topic, encoding='utf-8')
  config = config_lib.defaults()
  config.data.source = f'text:{tmp_path}/*.txt'
  config.data.objective = 'prefix_lm | span_corruption'
  config.data.encoder_length = config.data.decoder_length = 64
  config.data.passes, config.data.shards, config.data.workers = 2, 3, 1
  for stack in (config.model.encoder, config.model.decoder):
    stack.vocab_size = 512
  return config_lib.load(config, str(tmp_path / 'run')).data


@pytest.mark.parametrize('shards', [1, 4])
def test_rows_are_estimated_before_they_are_made(data, shards, monkeypatch):
  if shards > 1:
    monkeypatch.setattr(row_estimates, '_MOST_BYTES', 2**18)
  estimate = row_estimates.estimate(data)
  assert not paths.at(data.folder).exists()
  materialization.materialize(data)
  folder = paths.join(data.folder, 'train')
  made = record_sets.read_manifest(folder)
  assert estimate['passes'] == len(made['passes']) == 2
  for part, found in zip(made['parts'], estimate['parts'], strict=True):
    assert found['objective'] == part['objective']
    for unit in row_rates.UNITS.values():
      assert found[unit] % shards == 0
      assert found[unit] == pytest.approx(part[unit], rel=0.05 * shards)
