"""Exported embedding models: `AutoModel` and `sentence_transformers` agree."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import encdec_adapt
from encdec_adapt import serve
from encdec_adapt.models import heads, model_config
from tests import tiny, toy_models
from tests.parity import test_vision, tiny_models
from tests.parity.test_torch_export import _stack

pytestmark = pytest.mark.parity
transformers = tiny_models.transformers
sentence_transformers = pytest.importorskip('sentence_transformers')

TEXTS = ['The quick brown fox', 'jumps', 'over the lazy dog, ' * 6]
SIZE = {'vocab_size': toy_models.GEMMA_SIZE}
MEAN = heads.Embedding('mean', (96, 24), (16, 8))
LAST = heads.Embedding('last')
FIRST = heads.Embedding('first', (20,))


def _encoder(name, head, **fields):
  return _stack(name, role='bidirectional', head=head, **SIZE, **fields)


MODELS = {
  'Gemma3TextModel': _encoder('gemma3', MEAN),
  'Gemma2Model': _stack('gemma2', head=LAST, **SIZE),
  'LlamaModel': _stack('llama3', head=MEAN, **SIZE),
  # Code in the folder: another window, and the encoder of a T5Gemma 2.
  'EncDecAdaptModel': _encoder('gemma2', FIRST, window_rule='inclusive'),
  'EncDecAdaptModel of T5Gemma 2': _encoder(
    'gemma3', MEAN, eoi_token=61, window_rule='centered', window=6
  ),
}


def _vectors(folder, texts, **options):
  model = sentence_transformers.SentenceTransformer(
    str(folder), device='cpu', trust_remote_code=True
  )
  return model.encode(texts, **options)


def _assert_same_vectors(folder, ours):
  vectors = ours.embed(TEXTS)
  vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
  np.testing.assert_allclose(_vectors(folder, TEXTS), vectors, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize('name', MODELS)
def test_vectors_are_equal(name, tmp_path):
  config = model_config.DecoderOnlyConfig(MODELS[name])
  ours = toy_models.save(tmp_path / 'model', config, native=True, scale=0.3)
  output = tmp_path / 'exported'
  checkpoint = f'--checkpoint={tmp_path}/model'
  assert tiny.convert('export', checkpoint, f'--output={output}') == 0
  raw = json.loads((output / 'config.json').read_text())
  assert raw['architectures'] == [name.split()[0]]
  sizes = config.decoder.head.sizes(config.decoder.width)
  assert raw['matryoshka_dimensions'] == list(sizes)
  _, info = transformers.AutoModel.from_pretrained(
    output, trust_remote_code=True, output_loading_info=True
  )
  assert not info['missing_keys'] and not info['unexpected_keys']
  vectors = ours.embed(TEXTS)
  assert vectors.shape == (3, sizes[0])
  np.testing.assert_allclose(_vectors(output, TEXTS), vectors, atol=1e-5)
  part = vectors[:, : sizes[-1]]
  part = part / np.linalg.norm(part, axis=1, keepdims=True)
  theirs = _vectors(
    output, TEXTS, truncate_dim=sizes[-1], normalize_embeddings=True
  )
  np.testing.assert_allclose(theirs, part, atol=1e-5)
  if name.startswith('EncDecAdapt'):  # The layout that this package reads.
    again = encdec_adapt.load(output).embed(TEXTS)
    np.testing.assert_array_equal(again, vectors)
    return
  reading = [
    lambda: encdec_adapt.load(output),
    lambda: tiny.call(serve, f'--checkpoint={output}'),
    lambda: tiny.convert('import', f'--source={output}', f'--output={output}2'),
  ]
  words = 'without projections are read'  # The head would be left out.
  if name == 'Gemma3TextModel':
    words = 'sets use_bidirectional_attention'
  for read in reading:
    with pytest.raises(encdec_adapt.UserError, match=words):
      read()


def test_the_encoder_of_a_pair_alone(tmp_path):
  stack = _stack('gemma3', **SIZE)
  pair = model_config.encoder_decoder(stack, stack, shared_table=True)
  ours = toy_models.save(tmp_path / 'pair', pair, native=True, scale=0.3)
  output = tmp_path / 'exported'
  flags = f'--checkpoint={tmp_path}/pair', f'--output={output}'
  assert tiny.convert('export', *flags, '--embedding=mean') == 0
  _assert_same_vectors(output, ours)
  again = f'--output={tmp_path}/again'
  with pytest.raises(encdec_adapt.UserError, match='without --embedding'):
    tiny.convert('export', flags[0], again, '--dimensions=8')


@pytest.mark.long
@pytest.mark.parametrize('reads_images', [True, False])
def test_the_encoder_of_a_t5gemma2_is_of_its_own_class(reads_images, tmp_path):
  stack = _stack('gemma3', vocab_size=model_config.EOI_TOKEN + 8)
  pair = model_config.t5gemma2(stack, stack)
  ours = toy_models.save(tmp_path / 'pair', pair, scale=0.3)
  output = tmp_path / 'exported'
  flags = [f'--checkpoint={tmp_path}/pair', f'--output={output}']
  if reads_images:
    test_vision.save('gemma3_images', tmp_path / 'donor')
    flags.append(f'--vision={tmp_path}/donor')
  assert tiny.convert('export', *flags, '--embedding=mean') == 0
  model, info = transformers.AutoModel.from_pretrained(
    output, output_loading_info=True
  )
  assert type(model).__name__ == 'T5Gemma2Encoder'
  missing = {name.partition('.')[0] for name in info['missing_keys']}
  vision = {'vision_tower', 'multi_modal_projector'}
  assert missing == (set() if reads_images else vision)
  assert not info['unexpected_keys']
  tokens = np.array([[2, *range(5, 25), model_config.EOI_TOKEN, 7]])
  with tiny_models.torch.no_grad():
    states = model(tiny_models.torch.tensor(tokens)).last_hidden_state
  positions = jnp.arange(tokens.size)[None]
  fields = jnp.array(tokens), jnp.ones_like(positions), positions
  expected = ours.model.architecture.encode(ours.model, ours.params, fields)
  np.testing.assert_allclose(states, expected, atol=1e-5)
  _assert_same_vectors(output, ours)


def test_the_encoder_of_a_t5(tmp_path):
  folder, output = tmp_path / 'model', tmp_path / 'exported'
  tokens = tiny_models.save_t5_tokenizer(folder)
  fields = tiny_models.T5 | {'vocab_size': len(tokens)}
  settings = transformers.T5Config(**fields)
  case = tiny_models.Case('T5EncoderModel', lambda: settings, '')
  tiny_models.make(case).save_pretrained(folder)
  flags = f'--checkpoint={folder}', f'--output={output}'
  assert tiny.convert('export', *flags, '--embedding=mean') == 0
  raw = json.loads((output / 'config.json').read_text())
  assert raw['matryoshka_dimensions'] == [32]
  with pytest.raises(encdec_adapt.UserError, match='T5EncoderModel .* not log'):
    tiny.convert('verify', folder, folder, '--with=transformers')
  _assert_same_vectors(output, encdec_adapt.load(folder))


def test_a_head_is_part_of_the_models_differences():
  plain = model_config.DecoderOnlyConfig(MODELS['Gemma2Model'])
  other = model_config.with_head(plain, heads.Tokens())
  assert any('head.kind' in x for x in model_config.differences(plain, other))
  assert not model_config.differences(plain, plain)
