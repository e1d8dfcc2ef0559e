"""Preferences of a file by a policy and a reward model, and its rewards."""

import json

import numpy as np
import pytest

from encdec_adapt.base import errors
from encdec_adapt.evaluation.results import predictions
from encdec_adapt.evaluation.tasks import preference_tasks
from encdec_adapt.generation import prompt_encoding
from encdec_adapt.inference import log_likelihoods
from encdec_adapt.models import model_config
from tests import toy_models

LINES = [
  {'prompt': 'the cat', 'chosen': 'sat on a mat', 'rejected': 'the', 'w': 1},
  {'prompt': 'the dog', 'chosen': 'the', 'rejected': 'sat on the mat', 'w': 1},
  {'prompt': 'the mat', 'chosen': 'a cat', 'rejected': 'a dog', 'w': 2},
  {'prompt': 'the mat', 'chosen': 'a cat', 'rejected': 'a dog', 'w': 0},
]
PAIR = model_config.encoder_decoder(
  *2 * [toy_models.stack(vocab_size=toy_models.GEMMA_SIZE)]
)


@pytest.fixture(scope='module')
def spec(tmp_path_factory):
  file = tmp_path_factory.mktemp('files') / 'rows.jsonl'
  file.write_text('\n'.join(map(json.dumps, LINES)))
  return f'{file}#prompt,chosen,rejected,label=w'


@pytest.fixture(scope='module')
def reward_model(tmp_path_factory):
  folder = tmp_path_factory.mktemp('models') / 'reward'
  config = model_config.reward_model(PAIR)
  return toy_models.save(folder, config, native=True)


def _evaluated(evaluation, model):
  """Scores by metric, and predictions in the order of the file."""
  evaluation.check(model.stored)
  results = evaluation.scores(model, 2, lambda *_: None)
  made = [x for x in results if isinstance(x, predictions.Prediction)]
  return {x.metric: x for x in results if x not in made}, made


def test_a_reward_model_ranks_answers_by_their_rewards(
  spec, reward_model, tmp_path
):
  evaluation = preference_tasks.read_preferences(spec)
  scores, made = _evaluated(evaluation, reward_model)
  # A tie is left out, and the second answer of the third line is the better.
  better = [
    (x['chosen'], x['rejected'])[:: 1 if x['w'] == 1 else -1] for x in LINES[:3]
  ]
  assert [x.references for x in made] == [[chosen] for chosen, _ in better]
  file = tmp_path / 'answers.jsonl'
  rows = [
    {'prompt': line['prompt'], 'continuation': answer, 'ended': 'eos'}
    for line, pair in zip(LINES, better, strict=False)
    for answer in pair
  ]
  file.write_text('\n'.join(map(json.dumps, rows)))
  single = preference_tasks.read_completions(f'{file}#prompt,continuation')
  mean, each = _evaluated(single, reward_model)
  rewards = np.array([x.scores['reward'] for x in each]).reshape(3, 2)
  margins = [x.scores['margin'] for x in made]
  np.testing.assert_allclose(margins, rewards[:, 0] - rewards[:, 1], atol=1e-5)
  assert scores['accuracy'].value == np.mean(rewards[:, 0] > rewards[:, 1])
  # Models of other losses are compared by it alone.
  paired = [x for x in ('accuracy', 'brier', 'loss') if scores[x].scores]
  assert paired == ['accuracy']
  assert mean['reward'].value == pytest.approx(rewards.mean(), rel=1e-5)
  # What was cut short is scored without an end.
  rows[0]['ended'] = 'length'
  file.write_text(json.dumps(rows[0]))
  _, (cut,) = _evaluated(
    preference_tasks.read_completions(f'{file}#prompt,continuation'),
    reward_model,
  )
  assert abs(cut.scores['reward'] - rewards[0, 0]) > 1e-4


def test_a_language_model_ranks_by_mean_log_probabilities(spec, tmp_path):
  model = toy_models.save(tmp_path / 'policy', PAIR, native=True)
  scores, made = _evaluated(preference_tasks.read_preferences(spec), model)
  writer, reader = model.tokenizer, prompt_encoding.PromptEncoder(model.stored)
  pairs = [
    log_likelihoods.Pair(
      reader.encode(x.input), [*writer.encode(line[name]), writer.eos]
    )
    for x, line in zip(made, LINES, strict=False)
    for name in ('chosen', 'rejected')
  ]
  sums = model.score_tokens(pairs)
  means = [sums[i].log_prob / len(pair[1]) for i, pair in enumerate(pairs)]
  margins = np.diff(np.reshape(means, (3, 2)))[:, 0] * [-1, -1, 1]
  found = [x.scores['margin'] for x in made]
  np.testing.assert_allclose(found, margins, atol=1e-5)
  assert scores['brier'].value == pytest.approx(
    np.mean((1 / (1 + np.exp(margins))) ** 2), rel=1e-4
  )
  with pytest.raises(errors.UserError, match='is not a reward model'):
    preference_tasks.RewardEvaluation('x', [('a', 'b', True)]).check(
      model.stored
    )


def test_an_empty_completion_is_scored_if_it_has_ended(tmp_path):
  file = tmp_path / 'rows.jsonl'
  file.write_text('{"prompt": "a", "completion": "", "ended": "eos"}')
  assert preference_tasks.read_completions(str(file)).rows == [('a', '', True)]
  file.write_text('{"prompt": "a", "completion": "", "ended": "length"}')
  with pytest.raises(errors.UserError, match='line 1.*only if it has ended'):
    preference_tasks.read_completions(str(file))


def test_wrong_lines_are_named(tmp_path):
  file = tmp_path / 'rows.jsonl'
  file.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a"}')
  with pytest.raises(errors.UserError, match='line 2.*completion a text'):
    preference_tasks.read_completions(str(file))
  with pytest.raises(errors.UserError, match="line 1.*'chosen'"):
    preference_tasks.read_preferences(f'{file}#prompt,chosen,rejected')
