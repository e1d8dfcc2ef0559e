"""Supervised fine-tuning from the command line, on pairs."""

import json
import subprocess
import sys

import pytest


@pytest.mark.long
@pytest.mark.e2e
def test_pairs_fine_tune_a_decoder(tmp_path, request):
  root = request.config.rootpath
  lines = [
    {'q': f'The name of number {i} is', 'a': f' value_{i}' * (1 + i % 9)}
    for i in range(120)
  ]
  file = tmp_path / 'pairs.jsonl'
  file.write_text('\n'.join(map(json.dumps, lines)))
  done = subprocess.run(
    [
      *(sys.executable, '-m', 'encdec_adapt.train'),
      f'--config=configs/sft.py:source={root}/configs/decoders/small,meap=separate',
      f'--workdir={tmp_path}/run',
      f'--config.data.source=pairs:{file}#q,a',
      '--config.data.encoder_length=64',
      '--config.data.decoder_length=128',
      '--config.data.eval_fraction=0.2',
      '--config.data.workers=1',
      '--config.train.batch_size=8',
      '--config.train.eval_batch_size=8',
      '--config.optimizer.learning_rate=3e-3',
      '--config.compute.remat=none',
    ],
    cwd=root,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  summary = json.loads((tmp_path / 'run' / 'summary.json').read_text())
  losses = [
    json.loads(line)['loss']
    for line in (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()
    if json.loads(line)['kind'] == 'eval'
  ]
  assert losses[-1] < losses[0] - 0.1
  manifest = json.loads(
    (tmp_path / 'run' / 'records' / 'train' / 'manifest.json').read_text()
  )
  assert manifest['spec']['passes'] == 3
  assert summary['steps'] == -(-manifest['totals']['rows'] // 8)
  samples = (tmp_path / 'run' / 'samples.jsonl').read_text().splitlines()
  samples = [json.loads(line) for line in samples]
  assert [(s['step'], s['row']) for s in samples] == [
    (step, row) for step in (0, summary['steps']) for row in (0, 1)
  ]
  assert all('The name of number' in sample['prompt'] for sample in samples)
  assert all('value_' in sample['reference'] for sample in samples)
  # Answers of more than 50 tokens have a masked copy.
  assert manifest['totals']['pairs'] > 3 * 90
