"""A reward model from the command line: trained, scored by, chosen by."""

import json

import numpy as np
import pytest

import encdec_adapt
from encdec_adapt import evaluate, generate
from encdec_adapt.generation import answer_encoding
from tests import tiny
from tests.e2e import folders

ZERO = """
def zero(prompts, completions, fields):
  assert {x['ended'] for x in fields} <= {'eos', 'length'}
  return [0] * len(completions)
"""
SOURCE = f'{tiny.ROOT}/configs/decoders/small'


def _lines(file):
  return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.e2e
@pytest.mark.long
def test_a_reward_model_trains_scores_and_chooses(tmp_path):
  rows = [
    {
      'prompt': f'The name of number {i} is',
      'chosen': f' value_{i}' * (1 + i % 3),
      'rejected': f' other {i}' * (1 + i % 2),
      'by': 0.5,
    }
    for i in range(120)
  ]
  file = tmp_path / 'preferences.jsonl'
  file.write_text('\n'.join(map(json.dumps, rows)))
  fields = 'prompt,chosen,rejected,margin=by'
  run, output = tmp_path / 'run', tmp_path / 'evaluation'
  done = tiny.run(
    'train',
    f'--config=configs/sft.py:source={SOURCE}',
    f'--workdir={run}',
    '--config.loss.kind=reward',
    '--config.data.objective=preferences:separator=":"',
    f'--config.data.source=preferences:{file}#{fields}',
    '--config.data.encoder_length=32',
    '--config.data.decoder_length=32',
    '--config.data.eval_fraction=0.2',
    '--config.data.workers=1',
    '--config.train.batch_size=8',
    '--config.evaluation.loss=12',
    '--config.evaluation.samples=0',
    '--config.train.steps=12',
    '--config.optimizer.schedule=constant',
    '--config.optimizer.warmup_steps=0',
    '--config.optimizer.learning_rate=1e-3',
  )
  assert done.returncode == 0, done.stdout + done.stderr
  held_out = [
    x for x in _lines(run / 'results.jsonl') if x['metric'] == 'accuracy'
  ]
  assert held_out[-1]['value'] > 0.9 and held_out[-1]['stderr'] is not None
  (tmp_path / 'zero.py').write_text(ZERO)
  flags = [
    f'--checkpoint={SOURCE}',
    '--prompt=The name of number 7 is',
    '--prompt=The name of number 8 is',
    '--temperature=1',
    '--max_tokens=8',
    '--best_of=3',
    f'--reward=model:{run} + python:{tmp_path}/zero.py#zero@0.5',
    f'--output={tmp_path}/best.jsonl',
  ]
  assert tiny.call(generate, *flags) == 0
  best = _lines(tmp_path / 'best.jsonl')
  for line in best:
    assert line['reward'] == max(line['rewards']) and len(line['rewards']) == 3
  flags = [
    f'--checkpoint={run}',
    f'--preferences={file}#{fields}',
    f'--rewards={tmp_path}/best.jsonl#prompt,continuation',
    '--cost=',
    f'--output={output}',
  ]
  assert tiny.call(evaluate, *flags) == 0
  scores = {x['metric']: x for x in _lines(output / 'results.jsonl')}
  assert scores['accuracy']['value'] > 0.9 and scores['accuracy']['n'] == 120
  rewards = [line['reward'] for line in best]
  assert scores['reward']['value'] == pytest.approx(np.mean(rewards), abs=1e-4)
  page = (output / 'report.html').read_text()
  assert 'accuracy_at_0.9' in page and 'alt="calibration on pref' in page
  # Exported and read back, with its separator: the same rewards.
  exported = folders.export(run, tmp_path / 'exported')
  raw = json.loads((exported / 'config.json').read_text())
  assert raw['architectures'][0].endswith('ForSequenceClassification')
  again = answer_encoding.score_texts(
    encdec_adapt.load(exported),
    [line['prompt'] for line in best],
    [line['continuation'] for line in best],
    [line['ended'] != 'length' for line in best],
    batch_size=2,
  )
  # The run computes in bfloat16 where processors multiply in it.
  np.testing.assert_allclose(again, rewards, rtol=0.02)
  # A policy learns by it, and scores as the run itself does.
  policy = tmp_path / 'policy'
  done = tiny.run(
    'train',
    f'--config=configs/sft.py:source={SOURCE}',
    f'--workdir={policy}',
    '--config.loss.kind=rloo',
    '--config.train.rollouts.samples=2',
    '--config.train.rollouts.tokens=8',
    f'--config.train.rewards.models={run}',
    '--config.train.rewards.model_weights=2',
    '--config.data.objective=pairs:separator=":"',
    f'--config.data.source=pairs:{file}#prompt,chosen',
    '--config.data.encoder_length=32',
    '--config.data.decoder_length=32',
    '--config.data.workers=1',
    '--config.train.batch_size=8',
    '--config.train.steps=2',
    '--config.train.log_every=1',
    '--config.evaluation.loss=2',
    '--config.evaluation.samples=0',
    '--config.optimizer.warmup_steps=0',
  )
  assert done.returncode == 0, done.stdout + done.stderr
  lines = _lines(policy / 'rollouts.jsonl')
  again = answer_encoding.score_texts(
    encdec_adapt.load(run),
    [line['prompt'] for line in lines],
    [line['completion'] for line in lines],
    [line['ended'] for line in lines],
    batch_size=2,
  )
  rewards = [line['rewards']['run'] for line in lines]
  assert [2 * x for x in rewards] == [line['reward'] for line in lines]
  # Close only: texts that are encoded again may have other tokens.
  assert np.corrcoef(again, rewards)[0, 1] > 0.98
