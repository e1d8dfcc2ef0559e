"""The benchmarks run at small sizes, and what they claim of fill holds."""

import json

import pytest

from tests.benchmarks import (
  exchange,
  packing,
  processes,
  records,
  vocabulary_loss,
)


def test_packing(tmp_path, capsys):
  output = tmp_path / 'packing.json'
  content = packing.main(['--documents=3000', f'--output={output}'])
  assert json.loads(output.read_text()) == content
  assert 'encoder fill' in capsys.readouterr().out
  ours = [row for row in content['rows'] if row['packer'] == 'ours']
  assert len(ours) == len(packing.LENGTHS) * len(packing.OBJECTIVES)
  assert all(row['ratio'] > 1.05 for row in ours)
  for row in ours:
    assert row[f'{row["binding"]} fill'] >= 0.97


def test_vocabulary_loss():
  content = vocabulary_loss.main(
    ['--tokens=64', '--width=8', '--vocab_size=4096', '--chunk=8']
    + ['--steps=1', '--dtypes', 'float32']
  )
  ours, dense = content['rows']
  assert ours['value'] == pytest.approx(dense['value'], rel=1e-5)
  assert ours['memory ratio'] < 0.5


def test_records():
  content = records.main(['--rows=40', '--batch_size=8', '--text_bytes=0'])
  assert [row['task'] for row in content['rows']] == [
    'rows',
    'batches',
    'batches, teacher',
  ]
  assert all(row['tokens/s per core'] > 0 for row in content['rows'])


@pytest.mark.multiproc
def test_processes():
  content = processes.main(
    ['--layers=1', '--width=16', '--mlp_width=16', '--heads=2', '--head_dim=8']
    + ['--vocab_size=64', '--batch_size=2', '--encoder_length=8']
    + ['--decoder_length=8', '--steps=1']
  )
  one, two = content['rows']
  assert (one['devices each'], two['devices each']) == (2, 1)
  assert one['time ratio'] == 1 and two['time ratio'] > 0
  assert two['loss, last'] == pytest.approx(one['loss, last'], rel=1e-5)


def test_exchange(tmp_path):
  content = exchange.main(
    ['--size=toy_small', '--vocab_size=300', f'--folder={tmp_path}']
  )
  rows = {row['what']: row for row in content['rows']}
  assert list(rows) == ['copy', 'import', 'export']
  # Ours import jax, which a copy does not; none holds more than a few GB.
  peaks = {name: row['peak GB'] for name, row in rows.items()}
  assert 0.005 < peaks['copy'] < 0.1 < peaks['import'] < 8
  assert peaks['copy'] < peaks['export'] < 8
  assert not list(tmp_path.iterdir())


@pytest.mark.parity
def test_parity():
  pytest.importorskip('torch')
  pytest.importorskip('transformers')
  from tests.benchmarks import parity

  content = parity.main(['--seeds=1', '--families', 'gemma2'])
  (row,) = content['rows']
  assert row['fp32'] < 2e-4 and row['bf16 to fp32'] < 1.5
