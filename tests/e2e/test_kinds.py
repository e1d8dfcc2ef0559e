"""Jobs of models of one stack other than causal decoders on text."""

import json
import subprocess
import sys

import pytest


@pytest.mark.e2e
@pytest.mark.parametrize(
  'kind, flags',
  [
    ('encoder_only', ['data.objective=bert', 'data.decoder_length=0']),
    (
      'decoder_only',
      [
        'data.objective=prefix_lm',
        'data.decoder_length=64',
        'loss.on_inputs=1',
      ],
    ),
    ('decoder_only', ['data.objective=meap_shared', 'data.decoder_length=64']),
  ],
)
def test_a_job_starts_from_a_causal_decoder(kind, flags, tmp_path, request):
  root = request.config.rootpath
  inputs = 0 if 'meap' in flags[0] else 64
  done = subprocess.run(
    [
      *(sys.executable, '-m', 'encdec_adapt.train'),
      f'--config=configs/pretrained.py:source={root}/configs/decoders/small',
      f'--workdir={tmp_path}/run',
      f'--config.model.kind={kind}',
      f'--config.data.encoder_length={inputs}',
      '--config.data.max_bytes=60000',
      '--config.data.eval_fraction=0.2',
      '--config.data.shards=1',
      '--config.train.batch_size=8',
      '--config.train.eval_batch_size=8',
      '--config.train.steps=3',
      '--config.optimizer.learning_rate=1e-3',
      '--config.compute.remat=none',
      *(f'--config.{flag}' for flag in flags),
    ],
    cwd=root,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  assert 'the first example read' in done.stdout
  summary = json.loads((tmp_path / 'run' / 'summary.json').read_text())
  assert summary['steps'] == 3 and summary['eval_loss'] > 0
