"""`convert adapt` and training's adaptation, with every option, by command."""

import json
import os
import re
import shutil

from flax import traverse_util
import jax
import numpy as np
import pytest
from safetensors import numpy as safetensors

from encdec_adapt import train
from encdec_adapt.adaptation import array_plans, weight_plan
from encdec_adapt.base import errors
from encdec_adapt.stored import model_on_disk
from encdec_adapt.tokenizers import vocabulary_training
from tests import tiny
from tests.e2e import folders

pytestmark = pytest.mark.e2e

convert_ = tiny.convert


@pytest.mark.long
def test_adapt_writes_what_adaptation_makes(folder, gemma, wide, capsys):
  """Array by array: the same as all at once, fresh ones too."""
  flags = [f'--encoder={wide}', f'--decoder={gemma}', '--seed=3']
  flags.append('--post_norm_gain=zero')
  output = folders.adapt(folder / 'unbalanced', *flags)
  assert 'cross_attention_warmup' in capsys.readouterr().out
  sources = []
  for path in (wide, gemma):
    model = model_on_disk.open_model(path, vocab_multiple=128).model
    nested = traverse_util.unflatten_dict(folders.arrays(path), sep='/')
    sources.append((model, nested))
  target = model_on_disk.open_model(output).model
  models = [model for model, _ in sources]
  coverage = weight_plan.make_plan(target, *models, post_norm_gain='zero')

  @jax.jit
  def adapt(params, rng):
    pairs = zip(models, params, strict=True)
    return array_plans.fill(target, coverage, *pairs, rng=rng)

  want = adapt([params for _, params in sources], jax.random.key(3))
  got = folders.arrays(output)
  want = traverse_util.flatten_dict(want, sep='/')
  assert got.keys() == want.keys()
  for path, array in got.items():
    np.testing.assert_array_equal(array, want[path], path)
  saved = folders.read(output / 'coverage.json')
  assert saved == json.loads(json.dumps(coverage.to_json()))
  assert saved['parameters']['fresh'] > 0
  assert saved['parameters']['constant'] == 2 * 16
  # The encoder's own tokenizer files differ, and neither are lost.
  exported = folders.export(output, folder / 'unbalanced_out')
  assert convert_('diff', output, exported) == 0
  for sub, name in (('', 'wide'), ('decoder_tokenizer', 'gemma')):
    assert folders.read(exported / sub / 'chat_template.json')['of'] == name
    assert (exported / sub / 'tokenizer.json').exists()


def test_a_dry_run_reads_no_weights(gemma, tmp_path, capsys):
  source = shutil.copytree(gemma, tmp_path / 'source')
  file = source / 'model.safetensors'
  tensors = dict(safetensors.load_file(file))
  tensors['model.norm.weight'][:] = np.nan
  safetensors.save_file(tensors, file, {'format': 'pt'})
  flags = [f'--encoder={source}', '--model.encoder.kv_heads=2', '--dry_run']
  assert convert_('adapt', *flags) == 0
  shown = capsys.readouterr().out
  assert re.search(r'encoder/layers/0-1/attention/key .*head 2 times', shown)
  assert 'no weights were read, nothing was written' in shown
  assert os.listdir(tmp_path) == ['source']


@pytest.mark.long
def test_training_adapts_with_options(folder, pairs, gemma):
  """Merged attention, one table, new tokens: as the model's configuration."""
  workdir = folder / 'merged_pair'
  flags = [
    '--config.init.mode=adapt',
    f'--config.init.encoder={gemma}',
    '--config.model.cross_merged=True',
    '--config.model.shared_table=True',
    '--config.model.encoder.kv_heads=2',
    *(f'--config.model.{s}.vocab_size=410' for s in ('encoder', 'decoder')),
    '--config.train.steps=2',
    f'--workdir={workdir}',
  ]
  assert tiny.call(train, *pairs, *flags) == 0
  coverage = folders.read(workdir / 'coverage.json')
  assert coverage['parameters']['fresh'] == 0
  table = coverage['target']['decoder/embedder/table']
  assert table['transforms'] == ['10 new tokens, the mean of the 400']
  exported = folders.export(workdir, folder / 'merged_out')
  assert convert_('verify', workdir, exported, folders.ROUNDED) == 0


def test_two_vocabularies_share_no_table(gemma, tmp_path):
  other = shutil.copytree(gemma, tmp_path / 'other')
  texts = ['another text, of other words'] * 40
  vocabulary_training.train_vocabulary(texts, other / 'tokenizer.model', 378)
  flags = [f'--encoder={other}', f'--decoder={gemma}', '--dry_run']
  assert convert_('adapt', *flags) == 0
  with pytest.raises(
    errors.UserError, match='different tokenizers: in a table'
  ):
    convert_('adapt', *flags, '--model.shared_table')
