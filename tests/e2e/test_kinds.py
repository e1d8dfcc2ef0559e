"""Jobs of models of one stack other than causal decoders on text."""

import json

import pytest

from tests import tiny
from tests.e2e import folders


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.parametrize(
  'kind, flags',
  [
    ('encoder_only', ['data.objective=bert', 'data.decoder_length=0']),
    pytest.param(
      'decoder_only',
      ['data.objective=prefix_lm', 'loss.on_inputs=1'],
      marks=pytest.mark.slow,
    ),
    ('decoder_only', ['data.objective=meap_shared', 'data.encoder_length=0']),
  ],
)
def test_a_job_starts_from_a_causal_decoder(kind, flags, tmp_path):
  values = [
    f'model.kind={kind}',
    'data.encoder_length=64',
    'data.decoder_length=64',
    'data.source=python',
    'data.max_bytes=60000',
    'data.eval_fraction=0.2',
    'data.shards=1',
    'train.batch_size=8',
    'train.eval_batch_size=8',
    'train.steps=3',
    'optimizer.learning_rate=1e-3',
    'compute.remat=none',
    *flags,
  ]
  flags = [
    '--config=configs/pretrained.py:source=configs/decoders/small',
    f'--workdir={tmp_path}/run',
    *(f'--config.{value}' for value in values),
  ]
  done = tiny.run('train', *flags)
  assert done.returncode == 0, done.stdout + done.stderr
  assert 'the first example read' in done.stdout
  summary = json.loads((tmp_path / 'run' / 'summary.json').read_text())
  assert summary['steps'] == 3 and summary['eval_loss'] > 0
  if kind == 'encoder_only':
    more = '--config.train.steps=5', '--config.train.batch_size=16'
    more += ('--config.checkpoint.keep=2',)
    assert tiny.run('train', *flags, *more).returncode == 0
    card = folders.export(tmp_path / 'run', tmp_path / 'out') / 'README.md'
    text = card.read_text()
    assert '(encoder_only)' in text and '| | encoder |\n' in text
    assert 'type: fill-mask' in text
    assert 'to step 5 of 5, with 8 rows a step, 16 from step 4, objec' in text
    early = folders.export(f'{tmp_path}/run@3', tmp_path / 'early')
    assert 'with 8 rows a step, objec' in (early / 'README.md').read_text()
