"""`import encdec_adapt`: its names, and what its functions refuse."""

import json
import re

import jax
import numpy as np
import pytest

import encdec_adapt as api
from encdec_adapt import generate
from encdec_adapt.base import errors
from encdec_adapt.models import model_config
from tests import test_imports, tiny, toy_models


def test_no_function_has_the_name_of_a_command():
  functions = {x for x, y in vars(api).items() if callable(y)}
  assert 'run_training' in functions
  assert not functions & test_imports.COMMANDS
  assert issubclass(errors.UserError, ValueError)
  assert api.UserError is errors.UserError
  both = [
    'from encdec_adapt import convert, evaluate, generate, train',
    'from encdec_adapt import load, run_training, UserError',
  ]
  for first, second in (both, both[::-1]):
    done = tiny.run_code(
      f'{first}\n{second}\nprint(train.main, run_training.__name__)'
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  stack = toy_models.stack(vocab_size=toy_models.GEMMA_SIZE)
  pair = model_config.encoder_decoder(stack, stack)
  return toy_models.save(tmp_path_factory.mktemp('models') / 'pair', pair)


TEXTS = ['the quick brown fox', 'cats']


def test_no_texts_have_no_results(model):
  assert model.generate([]) == model.score([], []) == []


@pytest.mark.long
def test_texts_are_continued_and_embedded_as_by_the_command(model, tmp_path):
  def command(**flags):
    output = tmp_path / 'results.jsonl'
    output.unlink(missing_ok=True)
    flags = {'checkpoint': model.stored.path, 'output': output, **flags}
    arguments = [f'--{name}={value}' for name, value in flags.items()]
    arguments += [f'--prompt={text}' for text in TEXTS]
    assert tiny.call(generate, *arguments) == 0
    return [json.loads(line) for line in output.read_text().splitlines()]

  options = {'max_tokens': 5, 'temperature': 0.9, 'seed': 3}
  texts = [line['continuation'] for line in command(**options)]
  assert model.generate(TEXTS, **options) == texts
  states = [line['embedding'] for line in command(embed='last')]
  found = model.embed(TEXTS, pooling='last')
  np.testing.assert_allclose(found, states, atol=1e-5)


def test_a_score_is_the_sum_of_log_probabilities(model):
  targets = ['jumps over', 'sleep']
  reader = model.tokenizer
  for text, target, score in zip(
    TEXTS, targets, model.score(TEXTS, targets), strict=True
  ):
    ids = reader.encode(target)
    source = np.array([[reader.bos, *reader.encode(text)]])
    logits = model.logits(np.array([[reader.bos, *ids[:-1]]]), source)[0]
    log_probs = np.asarray(jax.nn.log_softmax(logits))
    wanted = log_probs[np.arange(len(ids)), ids].sum()
    assert score.tokens == len(ids)
    assert score.log_prob == pytest.approx(wanted, abs=1e-3)


MISTYPED = {'encoder.kv_haeds': 2}


@pytest.mark.parametrize(
  'call, words',
  [
    (lambda m: m.generate('the quick'), "'the quick' is a text; give a list"),
    (lambda m: m.generate(['x', ' ']), 'text 1: the prompt is empty'),
    (lambda m: m.generate(['x'], max_tokens=0), 'max_tokens is 0'),
    (lambda m: m.generate(['x'], tempreature=1), "mean 'temperature'"),
    (lambda m: m.generate(['x'], stop='ab'), "stop is 'ab'; give texts"),
    (lambda m: m.score(['x'], ['y', 'z']), '1 inputs and targets .*; give a'),
    (
      lambda m: m.score(['x'], ['y'], top_k=5),
      "'top_k' is not an option .* prefix",
    ),
    (lambda m: m.embed(['x'], pooling='max'), "pooling is 'max'"),
    (lambda _: api.run_training(None, 'run'), 'config is None'),
    (lambda _: api.run_training('a.py', 'run'), "config is 'a.py'"),
    (lambda _: api.evaluate_checkpoints([], 'o', recrods=1), 'recrods'),
    (lambda _: api.adapt_checkpoint('a', 'b', model=MISTYPED), 'kv_haeds'),
  ],
)
def test_bad_input_is_refused(model, call, words):
  with pytest.raises(api.UserError, match=words):
    call(model)


@pytest.mark.e2e
@pytest.mark.long
def test_the_first_lines_of_python_run(tmp_path):
  readme = (tiny.ROOT / 'README.md').read_text()
  (block,) = re.findall(r'```python\n(.*?)```', readme, re.DOTALL)
  script = tmp_path / 'script.py'
  call = 'encdec_adapt.run_training'
  assert block.count(call) == 1
  script.write_text(block.replace(call, f'config.train.steps = 2\n{call}'))
  done = tiny.run_script(script)
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines()[-1].startswith("['")


@pytest.mark.e2e
@pytest.mark.long
def test_the_calls_of_the_readme_run(tmp_path):
  """As a script without a guard, in which worker processes make records."""
  readme = (tiny.ROOT / 'encdec_adapt' / 'README.md').read_text()
  blocks = re.findall(r'```python\n(.*?)```', readme, re.DOTALL)
  script = tmp_path / 'script.py'
  resume = (
    'config.train.steps = 12\n'
    "print(encdec_adapt.run_training(config, 'runs/trained')['steps'], 'steps')"
  )
  script.write_text('\n'.join(["print('begins')", *blocks, resume]))
  done = tiny.run_script(script)
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  assert lines.count('begins') == 1
  assert lines[-1] == '12 steps' and 'resuming at step 10' in lines
  assert "LoadedModel('runs/trained', encoder_decoder, 1,391,616 parame" in (
    done.stdout
  )
