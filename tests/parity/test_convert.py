"""From Gemma folders of transformers to T5Gemma folders that it loads.

As a user does it: import, adapt, export, load with transformers.
"""

import json

import pytest

import encdec_adapt
from encdec_adapt.base import errors
from tests import tiny
from tests.parity import tiny_models

pytestmark = [pytest.mark.parity, pytest.mark.long]
convert_ = tiny.convert

EOI = tiny_models.IMAGE_IDS['eoi_token_index']
WIDTHS = {'balanced': (32, 32), 'unbalanced': (48, 32)}


@pytest.fixture(params=WIDTHS)
def exported(request, tmp_path):
  """A T5Gemma folder that the commands made from two Gemma 2 folders."""
  case = tiny_models.CASES['gemma2']
  sources = []
  for seed, width in enumerate(WIDTHS[request.param]):
    settings = case.settings()
    settings.update({'hidden_size': width, 'max_position_embeddings': 77})
    source, run = tmp_path / f'source{seed}', tmp_path / f'run{seed}'
    tiny_models.make(case, seed, settings).save_pretrained(source)
    file = source / 'generation_config.json'
    generation = json.loads(file.read_text())
    generation |= {'max_new_tokens': 33, 'cache_implementation': 'hybrid'}
    file.write_text(json.dumps(generation))
    convert_('import', f'--source={source}', f'--output={run}')
    sources.append(run)
  pair, output = tmp_path / 'pair', tmp_path / 'exported'
  flags = [f'--encoder={sources[0]}', f'--decoder={sources[1]}']
  assert convert_('adapt', *flags, f'--output={pair}') == 0
  assert convert_('export', f'--checkpoint={pair}', f'--output={output}') == 0
  return output


def _assert_same(ours, theirs):
  """Compares logits and greedy text of a T5Gemma with transformers."""
  rows = tiny_models.batch(tiny_models.CASES['t5gemma'])
  tiny_models.assert_same_logits(ours, theirs, rows)
  tiny_models.assert_same_text(ours, theirs, rows)


def test_gemma2_to_t5gemma(exported):
  theirs = tiny_models.load(exported)
  for part in (theirs.config.encoder, theirs.config.decoder):
    assert part.max_position_embeddings == 77
    ids = (part.pad_token_id, part.eos_token_id, part.bos_token_id)
    assert ids == (0, 1, 2)
  assert theirs.generation_config.max_new_tokens == 33
  assert theirs.generation_config.decoder_start_token_id == 2
  # transformers 5.23 with eager attention sees one key more on either side.
  ours = encdec_adapt.load(exported, encoder_window='inclusive')
  _assert_same(ours, theirs)
  # The pair before its export, and the folder as transformers computes it.
  pair = exported.parent / 'pair'
  flags = ['--encoder_window=inclusive', '--with=transformers', '--rows=2']
  assert convert_('verify', pair, exported, *flags, '--tolerance=2e-4') == 0
  with pytest.raises(errors.UserError, match='output of `convert export'):
    convert_('verify', exported, pair, *flags)


@pytest.fixture(params=['balanced', 'unbalanced'])
def t5gemma2(request, tmp_path):
  """A T5Gemma 2 folder that the commands made from two Gemma 3 folders.

  Its vision part comes from a third, which reads images.
  """
  case = tiny_models.CASES['gemma3']
  changes = {}
  if request.param == 'unbalanced':  # In all but the width.
    changes = dict(
      num_hidden_layers=4,
      layer_types=tiny_models.GEMMA3['layer_types'][:4],
      num_attention_heads=2,
      num_key_value_heads=1,
      sliding_window=4,
    )
  flags = ['--target=t5gemma2', f'--model.eoi_token={EOI}']
  for seed, side in enumerate(('encoder', 'decoder')):
    settings = case.settings()
    settings.update(changes if side == 'encoder' else {})
    folder = tmp_path / side
    tiny_models.make(case, seed, settings).save_pretrained(folder)
    flags.append(f'--{side}={folder}')
  donor = tiny_models.make(tiny_models.CASES['gemma3_images'], 2)
  donor.save_pretrained(tmp_path / 'donor')
  pair, output = tmp_path / 'pair', tmp_path / 'exported'
  assert convert_('adapt', *flags, f'--output={pair}') == 0
  flags = [f'--checkpoint={pair}', f'--output={output}']
  flags += ['--layout=transformers', f'--vision={tmp_path}/donor']
  assert convert_('export', *flags) == 0
  return pair, output


def test_gemma3_to_t5gemma2(t5gemma2):
  pair, exported = t5gemma2
  theirs = tiny_models.load(exported)  # Nothing missing.
  assert theirs.config.eoi_token_index == EOI
  # The token that has a vector of its own is in it, on both sides.
  rows = tiny_models.batch(tiny_models.CASES['t5gemma2'])
  for path in (pair, exported):
    tiny_models.assert_same_logits(encdec_adapt.load(path), theirs, rows)
