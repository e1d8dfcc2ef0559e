"""Pairs of other families: the torch code of an export computes as we do."""

import dataclasses
import json

import numpy as np
import pytest

import encdec_adapt
from encdec_adapt import configs
from encdec_adapt.base import errors
from encdec_adapt.huggingface import config_json, export
from encdec_adapt.models import heads, model_config, parameters
from tests import tiny
from tests.parity import tiny_models

pytestmark = pytest.mark.parity
torch, transformers = tiny_models.torch, tiny_models.transformers

EOI = 61
IDS = {'bos_token_id': 2, 'eos_token_id': 1, 'pad_token_id': 0}


def _stack(name, **fields):
  raw = tiny_models.CASES[name].settings().to_dict()
  return dataclasses.replace(
    config_json.model_from_raw(raw)[0].decoder, **fields
  )


# Encoder, decoder, options of the pair.
PAIRS = {
  # Unbalanced: biases and scaled rotation against qk-norm; an untied head.
  'llama_qwen': (_stack('llama3', width=40, layers=3), _stack('qwen3'), {}),
  'mistral': (_stack('mistral'), _stack('mistral'), {'causal_encoder': True}),
  'gemma2': (
    _stack('gemma2', window_rule='inclusive'),
    _stack('gemma2', attention_bias='qkvo', mlp_bias=True),
    {},
  ),
  'gemma3': (_stack('gemma3'), _stack('gemma3'), {'cross_layers': 'global'}),
  'gemma4': (
    _stack('gemma4', window_rule='exclusive'),
    _stack('gemma4', layers=3, head=heads.Tokens(tied=False)),
    {},
  ),
  'gemma4_merged': (
    _stack('gemma4'),
    _stack('gemma4'),
    {'cross_merged': True, 'shared_table': True, 'cross_layers': 'global'},
  ),
  'merged': (
    _stack('gemma3', eoi_token=EOI, window_rule='centered'),
    _stack('gemma3', eoi_token=EOI),
    {'cross_merged': True, 'shared_table': True, 'cross_layers': 'global'},
  ),
}


def export_pair(folder, encoder, decoder, options):
  """Writes a pair with random weights in our layout; returns its config."""
  model = model_config.encoder_decoder(encoder, decoder, **options)
  draws, arrays = np.random.default_rng(0), {}
  for path, info in parameters.parameter_table(model).items():
    stack = model.stacks[path.split('/')[0]]
    is_gain = path.endswith(('scale', 'query_norm', 'key_norm'))
    mean = float(is_gain and stack.norm_gain != 'one_plus')
    arrays[path] = draws.normal(mean, 0.3, info.shape).astype(np.float32)
  generation = {**IDS, 'decoder_start_token_id': 2}
  export.write(
    folder,
    model,
    arrays,
    native=True,
    fields={'decoder': IDS},
    files={'generation_config.json': json.dumps(generation).encode()},
  )
  return model


@pytest.fixture(
  params=tiny.slow_except(PAIRS.keys() - {'gemma4_merged'}, PAIRS)
)
def models(request, tmp_path):
  """The pair of an exported folder: ours, theirs, and a batch."""
  folder = tmp_path / 'exported'
  export_pair(folder, *PAIRS[request.param])
  theirs, info = transformers.AutoModelForSeq2SeqLM.from_pretrained(
    folder, trust_remote_code=True, output_loading_info=True
  )
  assert not any(info.values()), info
  eoi = EOI if request.param == 'merged' else None
  rows = tiny_models.batch(tiny_models.Case('', None, '', True, eoi=eoi))
  return encdec_adapt.load(folder), theirs.eval(), rows


@pytest.mark.long
def test_logits_and_text(models):
  """Rows are padded on either side, and longer than twice any window."""
  ours, theirs, rows = models
  tiny_models.assert_same_logits(ours, theirs, rows)
  assert np.abs(tiny_models.our_logits(ours, rows)).max() > 2
  inputs = {
    'input_ids': torch.tensor(rows.encoder).long(),
    'attention_mask': torch.tensor(rows.encoder_mask).long(),
    'max_new_tokens': 12,
    'do_sample': False,
  }
  # With a cache, token by token: each is the likeliest by our logits.
  text = theirs.generate(**inputs).numpy()
  assert text.shape[1] > 9
  logits = ours.logits(text[:, :-1], rows.encoder, rows.encoder_mask)
  is_token = np.cumsum(text[:, 1:] == IDS['eos_token_id'], axis=1) <= 1
  is_token &= text[:, 1:] != IDS['pad_token_id']
  likeliest = np.asarray(logits).argmax(-1)
  np.testing.assert_array_equal(likeliest[is_token], text[:, 1:][is_token])
  beams = [
    theirs.generate(**inputs, num_beams=3, use_cache=use_cache).numpy()
    for use_cache in (True, False)
  ]
  np.testing.assert_array_equal(*beams)


def test_it_verifies_learns_labels_and_refuses_unknown_options(
  tmp_path, capsys
):
  folder = tmp_path / 'exported'
  model = export_pair(folder, *PAIRS['llama_qwen'])
  flags = '--with=transformers', f'--tolerance={tiny_models.TOLERANCE}'
  assert tiny.convert('verify', folder, folder, *flags) == 0
  assert 'no tokenizer: logits alone' in capsys.readouterr().out
  theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(
    folder, trust_remote_code=True
  )
  inputs, labels = torch.tensor([[5, 6, 7]]), torch.tensor([[8, 9, -100]])
  output = theirs(input_ids=inputs, labels=labels)
  fed = torch.tensor([[2, 8, 9]])
  logits = theirs(input_ids=inputs, decoder_input_ids=fed).logits
  assert logits.shape[-1] == model.decoder.vocab_size
  logs = logits.log_softmax(-1)[0]
  torch.testing.assert_close(output.loss, -(logs[0, 8] + logs[1, 9]) / 2)
  output.loss.backward()
  assert all(weight.grad is not None for weight in theirs.parameters())
  values = theirs(input_ids=inputs, labels=labels, return_dict=False)
  torch.testing.assert_close(values[0], output.loss)
  theirs.generation_config.decoder_start_token_id = None
  with pytest.raises(ValueError, match='no decoder_start_token_id'):
    theirs(input_ids=inputs, labels=labels)
  with pytest.raises(NotImplementedError, match='output_attentions'):
    theirs(input_ids=inputs, labels=labels, output_attentions=True)
  for file in folder.glob('*.py'):
    file.unlink()
  with pytest.raises(errors.UserError, match='transformers cannot load'):
    tiny.convert('verify', folder, folder, *flags)


def test_experts_are_exported_without_the_code(tmp_path):
  experts = dataclasses.replace(_stack('qwen3'), experts=2, experts_per_token=1)
  export_pair(tmp_path / 'exported', _stack('llama3'), experts, {})
  assert not list(tmp_path.glob('exported/*.py'))
  with pytest.raises(errors.UserError, match='no experts, and the decoder has'):
    tiny.convert('verify', *[tmp_path / 'exported'] * 2, '--with=transformers')


def test_verification_does_not_ask_whether_to_run_code(tmp_path, monkeypatch):
  pair, folder = tmp_path / 'pair', tmp_path / 'exported'
  encoder = configs.path('decoders/small')
  encdec_adapt.adapt_checkpoint(encoder, pair)
  flags = f'--checkpoint={pair}', f'--output={folder}', '--layout=encdec_adapt'
  assert tiny.convert('export', *flags) == 0
  monkeypatch.setattr('builtins.input', pytest.fail)
  assert tiny.convert('verify', pair, folder, '--with=transformers') == 0
