"""Pairs with an encoder that was trained as one, and pairs of GPT-2."""

import json

import numpy as np
import pytest

import encdec_adapt
from encdec_adapt import train
from encdec_adapt.base import errors
from encdec_adapt.tokenizers import vocabulary_pair
from tests import tiny
from tests.e2e import folders, test_t5
from tests.parity import tiny_models

transformers = pytest.importorskip('transformers')
pytestmark = [pytest.mark.e2e, pytest.mark.parity, pytest.mark.long]
# Case -> family of the tokenizer.
CASES = {
  'bert': 'bert',
  'modernbert': 'bert',
  'gpt2': 'gpt2',
  'llama_tied': 'llama3',
}


def save(name, folder):
  """Saves a tiny model of a case with a tokenizer of its family."""
  tiny_models.save_tokenizer(folder, CASES[name])
  tokens = vocabulary_pair.open_vocabulary(folder)
  case = tiny_models.CASES[name]
  settings = case.settings()
  settings.vocab_size = tokens.size
  settings.pad_token_id = tokens.pad
  for role in ('bos', 'eos', 'pad'):
    if name != 'bert':  # Its class names none.
      setattr(settings, f'{role}_token_id', getattr(tokens, role))
  tiny_models.make(case, settings=settings).save_pretrained(folder)
  return folder


@pytest.mark.parametrize(
  'encoder, decoder', [('modernbert', 'llama_tied'), ('gpt2', 'gpt2')]
)
def test_a_pair_is_adapted_tuned_and_exported(encoder, decoder, tmp_path):
  pair, run = tmp_path / 'pair', tmp_path / 'run'
  names = encoder, decoder
  sources = [save(name, tmp_path / name) for name in dict.fromkeys(names)]
  flags = [f'--output={pair}', '--vocab_multiple=8']
  flags += [f'--encoder={sources[0]}', f'--decoder={sources[-1]}']
  assert tiny.convert('adapt', *flags) == 0
  if (
    encoder == 'modernbert'
  ):  # What the masked language model has for its table.
    report = (pair / 'coverage.json').read_text()
    leaves = json.loads(report)['sources']['encoder_source']
    assert 'an encoder has no head' in str(leaves)

  lines = [{'q': f'the fox {i}', 'a': f'two cats {i % 9}'} for i in range(60)]
  (tmp_path / 'pairs.jsonl').write_text('\n'.join(map(json.dumps, lines)))
  source = f'--config.data.source=pairs:{tmp_path}/pairs.jsonl#q,a'
  config = f'sft.py:source={pair}'
  test_t5.job(config, (32, 16), run, source, *test_t5.MESH)
  tuned = encdec_adapt.load(run)
  (text,) = tuned.generate(['the fox 3'], max_tokens=8)
  exported = folders.export(run, tmp_path / 'exported')
  again = encdec_adapt.load(exported)
  assert again.generate(['the fox 3'], max_tokens=8) == [text]
  flags = '--tolerance=1e-3', '--length=24'  # They have 32 positions.
  assert tiny.convert('verify', run, exported, *flags) == 0


def test_rows_beyond_the_positions_are_refused(tmp_path):
  sources = [save(name, tmp_path / name) for name in ('bert', 'llama_tied')]
  config = 'pretrained.py:encoder={},decoder={}'.format(*sources)
  flags = f'--config=configs/{config}', '--dry_run', *test_t5.JOB
  source = '--config.data.source=python'
  flags += ('--config.data.encoder_length=64',)
  message = 'rows have 64 tokens for the encoder, which has 34 learned'
  with pytest.raises(errors.UserError, match=message):
    tiny.call(train, *flags, source, f'--workdir={tmp_path / "run"}')
  gpt2 = save('gpt2', tmp_path / 'gpt2')
  verify = 'verify', gpt2, gpt2, '--with=transformers'
  for flag, message in (
    ('--length=64', '64 tokens for the decoder, which has 32 .* shorten --len'),
    ('--length=24', 'tokens for the decoder, which has 32 .* leave out --with'),
  ):
    with pytest.raises(errors.UserError, match=message):
      tiny.convert(*verify, flag)


def test_masked_tokens_are_learnt_and_exported(tmp_path):
  """A masked language model is trained on and goes back to transformers."""
  folder = save('bert', tmp_path / 'bert')
  file = tmp_path / 'texts.jsonl'
  file.write_text('\n'.join(json.dumps({'text': x}) for x in tiny.text(40)))
  source = f'--config.data.source=jsonl:{file}'
  run = test_t5.job(
    f'pretrained.py:source={folder}',
    (32, 0),
    tmp_path / 'run',
    source,
    '--config.data.objective=bert',
    *test_t5.MESH,
  )
  exported = folders.export(run, tmp_path / 'exported')
  theirs = tiny_models.load(exported)
  assert type(theirs).__name__ == 'BertForMaskedLM'
  bias = 'cls.predictions.bias'
  before = tiny_models.load(folder).state_dict()[bias]
  assert not np.array_equal(theirs.state_dict()[bias], before)
  tokens = np.random.default_rng(0).integers(5, 60, (2, 12), np.int32)
  with tiny_models.torch.no_grad():
    expected = theirs(input_ids=tiny_models.torch.tensor(tokens).long()).logits
  got = encdec_adapt.load(run).logits(tokens)
  np.testing.assert_allclose(got, expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize('name', ['bert', 'bart'])
def test_a_classifier_is_tuned_and_exported(name, tmp_path):
  folder, file = tmp_path / name, tmp_path / 'rows.jsonl'
  (save if name == 'bert' else test_t5.save_folder)(name, folder)
  rows = [{'a': f'fox {i}', 'label': ('no', 'yes')[i % 2]} for i in range(60)]
  file.write_text('\n'.join(map(json.dumps, rows)))
  source = f'--config.data.source=labels:{file}#a,label'
  pair = name == 'bart'
  config = f'classification.py:source={folder},pair={int(pair)}'
  mesh = [f'--config.mesh.{x}=2' for x in ('fsdp', 'sequence', 'tensor')]
  run = test_t5.job(config, (32, 0), tmp_path / 'run', source, *mesh)
  exported = folders.export(run, tmp_path / 'exported')
  theirs = tiny_models.load(exported)
  architecture = f'{name.title()}ForSequenceClassification'
  assert type(theirs).__name__ == architecture
  assert theirs.config.id2label == {0: 'no', 1: 'yes'}
  flags = f'--source={exported}', f'--output={tmp_path / "again"}'
  assert tiny.convert('import', *flags, '--vocab_multiple=1') == 0
  # Labels of texts are those of a pipeline of transformers.
  texts = [f'fox {i} and two cats' * (1 + i % 2) for i in range(5)]
  pipe = transformers.pipeline(
    'text-classification',
    model=theirs,
    tokenizer=transformers.AutoTokenizer.from_pretrained(exported),
    device='cpu',
  )
  expected = [pipe(text)[0]['label'] for text in texts]
  for path in (run, exported):
    assert encdec_adapt.load(path).classify(texts) == expected
  if pair:
    flags = '--with=transformers', '--length=24'
    assert tiny.convert('verify', run, exported, *flags) == 0
    return
  tokens = np.random.default_rng(0).integers(5, 60, (2, 12), np.int32)
  with tiny_models.torch.no_grad():
    expected = theirs(input_ids=tiny_models.torch.tensor(tokens).long()).logits
  got = encdec_adapt.load(run).logits(tokens)[:, -1]
  np.testing.assert_allclose(got, expected, rtol=0, atol=2e-4)


def test_a_labeller_of_words_is_known_as_one(tmp_path):
  file, run = tmp_path / 'rows.jsonl', tmp_path / 'run'
  rows = [
    {'words': ['a', 'fox', str(i)], 'tags': list('OXO')} for i in range(60)
  ]
  file.write_text('\n'.join(map(json.dumps, rows)))
  source = f'--config.data.source=labels:{file}#words,tags'
  objective = '--config.data.objective=tag:labels=O|X'
  config = f'classification.py:source={tiny.ROOT}/configs/decoders/small'
  test_t5.job(config, (32, 0), run, source, objective)
  exported, again = (
    folders.export(run, tmp_path / 'exported'),
    tmp_path / 'again',
  )
  flags = f'--source={exported}', f'--output={again}', '--vocab_multiple=128'
  assert tiny.convert('import', *flags) == 0
  for path in (run, exported, again):
    with pytest.raises(errors.UserError, match='labels words'):
      encdec_adapt.load(path).classify(['a fox'])


@pytest.mark.parametrize(
  'name, message',
  [('bert', 'is no encoder-decoder'), ('pair', 'with a single vocabulary')],
)
def test_texts_that_one_stack_cannot_read_are_refused(name, message, tmp_path):
  sources = [save(x, tmp_path / x) for x in ('bert', 'llama_tied')]
  flags = [f'--encoder={sources[0]}', f'--decoder={sources[1]}']
  flags += [f'--output={tmp_path / "pair"}', '--vocab_multiple=8']
  assert tiny.convert('adapt', *flags) == 0
  config = f'configs/classification.py:source={tmp_path / name},pair=1'
  with pytest.raises(errors.UserError, match=message):
    tiny.call(train, f'--config={config}', f'--workdir={tmp_path / "run"}')


def test_an_exported_embedding_model_is_read_back(tmp_path):
  library = pytest.importorskip('sentence_transformers')
  folder, output = save('bert', tmp_path / 'bert'), tmp_path / 'exported'
  file = str(folder / 'tokenizer.json')
  tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=file)
  tokenizer.backend_tokenizer.enable_padding(length=20)  # As all-MiniLM's.
  tokenizer.backend_tokenizer.save(file)
  flags = f'--checkpoint={folder}', f'--output={output}', '--embedding=mean'
  assert tiny.convert('export', *flags) == 0
  texts = ['the fox', 'two cats and a dog']
  vectors = encdec_adapt.load(output).embed(texts)
  theirs = library.SentenceTransformer(str(output), device='cpu').encode(texts)
  np.testing.assert_allclose(vectors, theirs, rtol=0, atol=1e-5)
  expected = encdec_adapt.load(folder).embed(texts, pooling='mean')
  expected /= np.linalg.norm(expected, axis=1, keepdims=True)
  np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-5)
