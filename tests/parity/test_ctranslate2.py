"""Exported T5Gemma folders in CTranslate2: where its scores are right.

Its loader takes over neither soft-caps nor the windows, among others
(`encdec_adapt/huggingface/README.md` has the list). If a case that is wrong
here becomes right, its new version takes the field over: correct the README.
"""

import numpy as np
import pytest

from encdec_adapt.huggingface import export
from encdec_adapt.huggingface import folder as folder_lib
from tests.parity import tiny_models

pytestmark = [pytest.mark.parity, pytest.mark.slow]

TOLERANCE = 1e-4  # Nats per token, fp32.
WRONG = 10 * TOLERANCE
# What its loader assumes: no caps, no window below the length of a text, the
# scale of head_dim, rotary base 10000, a tied head.
PLAIN = dict(
  attn_logit_softcapping=None,
  final_logit_softcapping=None,
  sliding_window=4096,
  query_pre_attn_scalar=12,
)
NARROW = dict(
  hidden_size=24, num_hidden_layers=3, num_attention_heads=2, head_dim=16
)
# Fields of (encoder, decoder, top), and whether scores are right.
CASES = {
  'balanced': ({}, {}, {}, True),
  'unbalanced': (NARROW | {'query_pre_attn_scalar': 16}, {}, {}, True),
  'soft-cap of scores': ({}, {'attn_logit_softcapping': 1.0}, {}, False),
  'soft-cap of logits': ({}, {'final_logit_softcapping': 3.0}, {}, False),
  'window of the decoder': ({}, {'sliding_window': 3}, {}, False),
  'window of the encoder': ({'sliding_window': 3}, {}, {}, False),
  'query scale': ({}, {'query_pre_attn_scalar': 3}, {}, False),
  'rotary base': (
    {'rope_parameters': {'rope_type': 'default', 'rope_theta': 100.0}},
    {},
    {},
    False,
  ),
  'untied head': ({}, {}, {'tie_word_embeddings': False}, False),
}


@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory):
  """The folder of a tokenizer."""
  folder = tmp_path_factory.mktemp('tokenizer')
  return tiny_models.save_tokenizer(folder, 'gemma')


def _export(name, tokenizer, path):
  """Exports a pair of the case with our exporter; returns it in torch."""
  encoder, decoder, top, _ = CASES[name]
  loaded = tiny_models.transformers.AutoTokenizer.from_pretrained(tokenizer)
  shape = {**tiny_models.SHAPE, **PLAIN, 'vocab_size': len(loaded)}
  settings = tiny_models.t5gemma_settings(shape, encoder, decoder, **top)
  case = tiny_models.CASES['t5gemma']
  theirs = tiny_models.make(case, settings=settings)
  theirs.save_pretrained(path / 'theirs')
  opened = folder_lib.ModelFolder(path / 'theirs')
  export.write(
    path / 'exported',
    opened.config,
    opened.arrays(),
    files={file.name: file for file in tokenizer.iterdir()},
  )
  return loaded, tiny_models.load(path / 'exported')


@pytest.mark.parametrize('name', CASES)
def test_scores(name, tokenizer, tmp_path):
  ctranslate2 = pytest.importorskip(
    'ctranslate2', reason="needs ctranslate2: pip install -e '.[ctranslate2]'"
  )
  loaded, theirs = _export(name, tokenizer, tmp_path)
  converter = ctranslate2.converters.TransformersConverter(
    str(tmp_path / 'exported')
  )
  converter.convert(str(tmp_path / 'converted'))
  translator = ctranslate2.Translator(
    str(tmp_path / 'converted'), compute_type='float32'
  )
  source, target = (
    loaded.convert_ids_to_tokens(loaded.encode(text, add_special_tokens=False))
    for text in ('the quick brown fox jumps over', 'a lazy dog and two cats')
  )
  (found,) = translator.score_batch([source], [target])
  ids = loaded.convert_tokens_to_ids([loaded.bos_token, *target])
  torch = tiny_models.torch
  with torch.no_grad():
    logits = theirs(
      input_ids=torch.tensor([loaded.convert_tokens_to_ids(source)]),
      decoder_input_ids=torch.tensor([ids]),
    ).logits[0]
  scores = torch.log_softmax(logits.float(), -1).numpy()
  wanted = [*ids[1:], loaded.eos_token_id]
  expected = scores[np.arange(len(wanted)), wanted]
  difference = np.abs(np.asarray(found.log_probs) - expected).max()
  print(name, difference)
  if CASES[name][-1]:
    assert difference < TOLERANCE
  else:
    assert difference > WRONG
