"""A pair tuned on questions with passages: generated, served and exported."""

import json

import jax
from jax import numpy as jnp
import numpy as np
import pytest

import encdec_adapt
from encdec_adapt import config as config_lib
from encdec_adapt import evaluate, generate
from encdec_adapt.base import errors
from encdec_adapt.objectives import objective_names, passages
from tests import tiny, toy_models
from tests.e2e import folders, test_t5

pytestmark = [pytest.mark.e2e, pytest.mark.long]
LENGTH = 32
DOCUMENTS = ['the fox', {'title': 'a dog', 'text': 'two cats sleep'}] * 2
PROMPT = {'question': 'who', 'documents': DOCUMENTS}


@pytest.fixture(scope='module')
def source(tmp_path_factory):
  """A pair of random weights."""
  folder = tmp_path_factory.mktemp('models') / 'pair'
  stack = toy_models.stack(vocab_size=toy_models.GEMMA_SIZE)
  toy_models.save(folder, toy_models.pair_and_decoder(stack)['encoder_decoder'])
  return folder


@pytest.fixture(scope='module')
def run(source, tmp_path_factory):
  """The pair after two steps on packed rows, on a mesh of 8 devices."""
  folder = tmp_path_factory.mktemp('runs')
  lines = [
    {'q': 'who', 'a': f'cat {i % 9}', 'p': DOCUMENTS[: 1 + i % 4]}
    for i in range(60)
  ]
  (folder / 'pairs.jsonl').write_text('\n'.join(map(json.dumps, lines)))
  return test_t5.job(
    f'sft.py:source={source}',
    (8 * LENGTH, 32),
    folder / 'run',
    f'--config.data.source=pairs:{folder}/pairs.jsonl#q,a,p',
    f'--config.data.objective=passages:length={LENGTH}',
    '--config.evaluation.samples=2',
    *test_t5.MESH,
  )


@pytest.fixture(scope='module')
def loaded(run):
  return encdec_adapt.load(run)


def _texts(loaded):
  """Each passage, framed."""
  vocabulary = loaded.tokenizer
  encode = passages.encode
  return [
    np.array([vocabulary.bos, *encode(vocabulary, 'who', [x], LENGTH)])
    for x in DOCUMENTS
  ]


def test_answers_follow_passages_encoded_alone(loaded, run, tmp_path):
  (manifest,) = run.glob('records/train/manifest.json')
  totals = json.loads(manifest.read_text())['totals']
  assert totals['rows'] < totals['pairs']  # Packed.
  lines = (run / 'samples.jsonl').read_text().splitlines()
  assert 'question: who' in json.loads(lines[-1])['prompt']
  # The states of each passage alone, one after another.
  states = [loaded.encode(jnp.asarray(text[None])) for text in _texts(loaded)]
  states = jnp.concatenate(states, axis=1)
  target = [loaded.tokenizer.bos, *loaded.tokenizer.encode('two cats')]
  tokens = jnp.asarray([target])
  ones = jnp.ones_like(tokens)
  hidden = loaded.model.decode(
    loaded.params,
    tokens,
    ones,
    jnp.arange(len(target))[None],
    states,
    jnp.ones(states.shape[:2], jnp.int32),
  )
  logits = loaded.model.logits(loaded.params, hidden)[0, :-1]
  log_probs = jax.nn.log_softmax(logits)[jnp.arange(len(logits)), target[1:]]
  (score,) = loaded.score([PROMPT], ['two cats'])
  np.testing.assert_allclose(score.log_prob, log_probs.sum(), rtol=1e-4)
  (other,) = loaded.score(
    [{**PROMPT, 'documents': DOCUMENTS[:1]}], ['two cats']
  )
  assert abs(other.log_prob - score.log_prob) > 0.01
  answers = loaded.generate([PROMPT], max_tokens=6)
  file, output = tmp_path / 'prompts.jsonl', tmp_path / 'out.jsonl'
  file.write_text(json.dumps(PROMPT))
  flags = f'--checkpoint={run}', f'--prompts={file}', f'--output={output}'
  assert tiny.call(generate, *flags, '--max_tokens=6') == 0
  assert json.loads(output.read_text())['continuation'] == answers[0]


def test_documents_are_served(loaded):
  app = pytest.importorskip('tests.server.test_http_app')
  service = app._service(loaded)
  documents = DOCUMENTS[:1]
  body = {'prompt': 'who', 'documents': documents, 'temperature': 0}
  with app._client(service) as client:
    answer = client.post(app.COMPLETIONS, json={**body, 'max_tokens': 6})
    (expected,) = loaded.generate(
      [{'question': 'who', 'documents': documents}], max_tokens=6
    )
    assert answer.json()['choices'][0]['text'] == expected
    for change, words in (
      ({'documents': [3]}, 'documents: passage 1 is 3; it must be'),
      ({'documents': 'text'}, 'it must be a list of texts'),
      ({'documents': DOCUMENTS * 9}, 'at most 40 fit'),
      ({'echo': True}, 'documents are not echoed'),
      ({'prompt': ['a', 'b']}, 'documents need one prompt of text'),
    ):
      answer = client.post(app.COMPLETIONS, json=body | change)
      assert answer.status_code == 400
      assert words in answer.json()['error']['message']


def test_held_out_rows_and_answers_are_measured(run, source, tmp_path):
  found = folders.evaluate(run, run / 'records' / 'eval')
  # On one device; the job was on a mesh of 8.
  losses = (run / 'metrics.jsonl').read_text().splitlines()
  losses = [json.loads(x)['loss'] for x in losses if '"eval"' in x]
  assert found['loss'] == pytest.approx(losses[-1], rel=1e-5)
  file = tmp_path / 'pairs.jsonl'
  line = {'q': 'who', 'a': 'cat', 'p': DOCUMENTS}
  file.write_text(json.dumps(line))
  flags = f'--pairs={file}#q,a,p', f'--output={tmp_path}/out', '--cost='
  flags += '--max_tokens=4', f'--checkpoint={run}'
  assert tiny.call(evaluate, *flags) == 0
  file.write_text(json.dumps({**line, 'p': 'text'}))
  with pytest.raises(errors.UserError, match='line 1: p is .* must be a list'):
    tiny.call(evaluate, *flags)
  with pytest.raises(errors.UserError, match='makes none; use records'):
    model = encdec_adapt.load(run).config
    config_lib.check_passages(model, objective_names.parse_one('pairs'))


def test_prompts_of_another_kind_are_refused(loaded, source):
  with pytest.raises(
    errors.UserError, match='passages of at most 32 tokens .* one has'
  ):
    loaded.generate(['a dog and a fox ' * 20])
  with pytest.raises(errors.UserError, match='was not trained on passages'):
    encdec_adapt.load(source).generate([PROMPT])
  with pytest.raises(errors.UserError, match='4 documents take .* give fewer'):
    loaded.generate([PROMPT], max_prompt=20)


def test_a_run_on_whole_inputs_names_the_passages(run, tmp_path):
  flags = f'--config=configs/sft.py:source={run}', f'--workdir={tmp_path}/on'
  with pytest.raises(
    errors.UserError, match='makes no passages; set the section'
  ):
    tiny.call(
      test_t5.train, *flags, *test_t5.JOB, '--config.data.source=pairs:x#q,a'
    )


def test_passages_need_a_vocabulary(source, tmp_path):
  flags = [f'--config=configs/sft.py:source={source}']
  flags.append('--config.data.source=pairs:x#q,a,p')
  flags += [f'--workdir={tmp_path}', '--config.data.objective=passages']
  flags.append('--config.data.vocabulary=')
  with pytest.raises(errors.UserError, match='vocabulary .* cannot be read'):
    tiny.call(test_t5.train, *flags)


@pytest.mark.parity
def test_an_exported_class_reads_states_of_passages(loaded, run, tmp_path):
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  exported = folders.export(run, tmp_path / 'exported')
  theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(
    exported, attn_implementation='eager'
  )
  with torch.no_grad():
    states = [
      theirs.get_encoder()(input_ids=torch.tensor(text[None])).last_hidden_state
      for text in _texts(loaded)
    ]
  states = torch.cat(states, dim=1)
  # Of the four passages, as `encoder_outputs`.
  encoded = transformers.modeling_outputs.BaseModelOutput(states)
  tokens = theirs.generate(
    encoder_outputs=encoded,
    attention_mask=torch.ones(states.shape[:2]),
    max_new_tokens=6,
    do_sample=False,
  )
  (answer,) = loaded.generate([PROMPT], max_tokens=6)
  ids = tokens[0, 1:].tolist()
  assert loaded.tokenizer.decode_generated(ids) == answer
  assert encdec_adapt.load(exported).config.encoder.passages.length == 0


def test_the_layout_of_the_project_keeps_passages(loaded, run, tmp_path):
  native = folders.export(run, tmp_path / 'native', '--layout=encdec_adapt')
  again = encdec_adapt.load(folders.import_folder(native, tmp_path / 'again'))
  assert again.config.encoder == loaded.config.encoder
  assert again.generate([PROMPT], max_tokens=6) == loaded.generate(
    [PROMPT], max_tokens=6
  )
