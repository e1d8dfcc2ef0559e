"""The exchange commands as a user gives them, without torch.

Hugging Face folders are made by our own exporter; that transformers reads and
writes the same is the business of tests/parity.
"""

import functools
import json
import os
import re
import shutil

import numpy as np
import pytest
from safetensors import numpy as safetensors
import tokenizers

from encdec_adapt import config as config_lib
from encdec_adapt import evaluate, train
from encdec_adapt.checkpoints import manager
from encdec_adapt.cli import command, errors
from encdec_adapt.conversion import (
  kept_files,
  run_artifacts,
  stored_model,
  work_directory,
)
from encdec_adapt.huggingface import siglip, tensor_writer
from encdec_adapt.models import model_config, parameters
from encdec_adapt.tokenizers import vocabularies, vocabulary_training
from tests import tiny, tiny_tokenizers
from tests.e2e import folders

pytestmark = [
  pytest.mark.e2e,
  pytest.mark.usefixtures('in_the_repository'),
]
convert_ = tiny.convert
_train = functools.partial(tiny.call, train)


def test_an_imported_folder_is_a_run(folder, gemma, imported):
  settings = config_lib.load_run(str(imported))
  stack = model_config.StackConfig(**folders.GEMMA, vocab_multiple=128)
  assert settings.model == model_config.DecoderOnlyConfig(stack)
  found = manager.open_latest(imported)
  assert found.step == 0
  assert found.read_meta()['made_by']['sources'] == [str(gemma)]
  assert not found.problems()
  # Read like any other run, wherever it is moved.
  moved = shutil.copytree(imported, folder / 'moved')
  assert tiny.generate(moved, 'the quick', f'{folder}/out.json') == 0
  flags = [f'--checkpoint={moved}', f'--records={folder}/causal_lm/eval']
  assert tiny.call(evaluate, *flags) == 0
  assert (
    json.loads((moved / run_artifacts.EVALUATION).read_text())['eval_loss'] > 0
  )


def test_import_then_export_gives_the_same_bytes(folder, gemma, imported):
  output = folder / 'exported'
  flags = [f'--checkpoint={imported}', f'--output={output}']
  assert convert_('export', *flags) == 0
  for name in (
    'model.safetensors',
    'config.json',
    'chat_template.json',
    'tokenizer.model',
  ):
    assert (output / name).read_bytes() == (gemma / name).read_bytes(), name
  generation = json.loads((output / 'generation_config.json').read_text())
  assert generation == folders.GENERATION
  card = (output / 'README.md').read_text()
  assert 'Gemma2ForCausalLM.from_pretrained' in card
  assert 'convert import` of `gemma`' in card
  assert "written without cache_implementation ('hybrid')" in card
  assert convert_('diff', output, imported) == 0


def test_export_in_bfloat16_and_shards(folder, imported, monkeypatch):
  monkeypatch.setattr(tensor_writer, 'SHARD_BYTES', 10_000)
  output = folder / 'half'
  flags = [f'--checkpoint={imported}', f'--output={output}']
  convert_('export', *flags, '--dtype=bfloat16')
  index = json.loads((output / 'model.safetensors.index.json').read_text())
  assert len(set(index['weight_map'].values())) > 1
  assert json.loads((output / 'config.json').read_text())['dtype'] == 'bfloat16'
  opened = stored_model.open_model(output)
  assert {str(array.dtype) for array in opened.arrays()} == {'bfloat16'}
  assert convert_('verify', imported, output, '--tolerance=1e-6') == 1
  assert convert_('verify', imported, output, '--tolerance=1') == 0


def test_what_is_imported_in_bfloat16_is_exported_so(folder, imported, capsys):
  half, run, again = (folder / name for name in ('bf16', 'bf16_run', 'bf16_2'))
  flags = [f'--checkpoint={imported}', f'--output={half}', '--dtype=bfloat16']
  convert_('export', *flags)
  convert_('import', f'--source={half}', f'--output={run}')
  capsys.readouterr()
  convert_('export', f'--checkpoint={run}', f'--output={again}')
  assert 'tensors of bfloat16' in capsys.readouterr().out
  for name in ('model.safetensors', 'config.json'):
    assert (again / name).read_bytes() == (half / name).read_bytes(), name
  assert 'exported in bfloat16 by' in (again / 'README.md').read_text()


def test_export_tells_of_another_window(folder, adapted, capsys):
  output = folder / 'windowed'
  convert_('export', f'--checkpoint={adapted}', f'--output={output}')
  said = capsys.readouterr().out
  for words in (said, (output / 'README.md').read_text()):
    assert 'less than 8 tokens on either side' in words
    assert 'in transformers 5.23 with eager attention, at 8.' in words


def test_adapted_pairs_say_where_weights_came_from(adapted, imported):
  account = json.loads((adapted / 'coverage.json').read_text())
  assert account['parameters']['fresh'] == 0
  assert stored_model.open_model(adapted).step == 0
  settings = config_lib.load_run(str(adapted))
  assert settings.model.encoder.role == 'bidirectional'
  # Rows of the tables that no token has are not counted.
  assert settings.model.decoder.table_rows == 512
  count = parameters.count(settings.model)
  assert sum(account['parameters'].values()) == count
  cross = 'decoder/layers/1/cross_attention/query'
  assert account['target'][cross]['leaf'] == 'decoder/layers/1/attention/query'


def test_an_unbalanced_pair_has_fresh_cross_attention(
  folder, gemma, wide, capsys
):
  output = folder / 'unbalanced'
  flags = [f'--encoder={wide}', f'--decoder={gemma}', f'--output={output}']
  assert convert_('adapt', *flags, '--post_norm_gain=zero') == 0
  assert 'cross_attention_warmup' in capsys.readouterr().out
  account = json.loads((output / 'coverage.json').read_text())
  assert account['parameters']['fresh'] > 0
  assert account['parameters']['constant'] == 2 * 16
  exported = folder / 'unbalanced_out'
  convert_('export', f'--checkpoint={output}', f'--output={exported}')
  assert convert_('diff', output, exported) == 0
  assert convert_('verify', output, exported, folders.ROUNDED) == 0
  # The encoder's own tokenizer differs, and neither is lost.
  names = [
    json.loads((exported / sub / 'chat_template.json').read_text())['of']
    for sub in ('', 'encoder')
  ]
  assert names == ['gemma', 'wide']


def test_what_transformers_cannot_load_is_written_in_our_layout(
  folder, cross_family, capsys
):
  output = folder / 'own'
  flags = [f'--checkpoint={cross_family}', f'--output={output}']
  with pytest.raises(errors.UserError, match='no class for this model'):
    convert_('export', *flags, '--layout=transformers')
  assert not output.exists()
  assert convert_('export', *flags) == 0
  assert 'transformers has no class for this model' in capsys.readouterr().out
  raw = json.loads((output / 'config.json').read_text())
  assert raw['model_type'] == 'encdec_adapt'
  assert raw['decoder']['norm_gain'] == 'direct'
  tensors = safetensors.load_file(output / 'model.safetensors')
  assert tensors['decoder.layers.1.attention.query'].shape == (16, 2, 8)
  assert tensors['encoder.embedder.table'].shape == (tiny.VOCAB, 16)
  assert tensors['decoder.head.table'].shape == (50, 16)
  assert stored_model.open_model(output).model == (
    stored_model.open_model(cross_family).model
  )
  assert convert_('diff', cross_family, output) == 0
  assert convert_('verify', cross_family, output, folders.ROUNDED) == 0
  # And again from there, token ids and all.
  again = folder / 'own_again'
  convert_('import', f'--source={output}', f'--output={folder}/own_run')
  convert_('export', f'--checkpoint={folder}/own_run', f'--output={again}')
  for name in ('model.safetensors', 'config.json'):
    assert (again / name).read_bytes() == (output / name).read_bytes()


def test_a_trained_pair_is_exported_with_its_history(folder, pairs, adapted):
  workdir, output = folder / 'trained', folder / 'trained_out'
  flags = [
    '--config.init.mode=checkpoint',
    f'--config.init.encoder={adapted}',
    '--config.train.steps=2',
    '--config.model.encoder.vocab_multiple=128',
    '--config.model.decoder.vocab_multiple=128',
    f'--workdir={workdir}',
  ]
  assert _train(*pairs, *flags) == 0
  convert_('export', f'--checkpoint={workdir}', f'--output={output}')
  raw = json.loads((output / 'config.json').read_text())
  assert raw['model_type'] == 't5gemma'
  assert raw['eos_token_id'] == 1
  for part in ('encoder', 'decoder'):
    assert raw[part]['max_position_embeddings'] == 77
    assert raw[part]['bos_token_id'] == 2
  generation = json.loads((output / 'generation_config.json').read_text())
  assert generation == {**folders.GENERATION, 'decoder_start_token_id': 2}
  assert (output / 'chat_template.json').exists()
  card = (output / 'README.md').read_text()
  assert re.search(r'Trained to step 2 of 2, with 8 rows', card)
  assert '`checkpoint` from `adapted`' in card
  assert 'convert adapt` of `imported`' in card
  assert re.search(r'Adapted: [\d,]+ parameters copied', card)
  assert 'convert import` of `gemma`' in card
  assert convert_('verify', workdir, output, folders.ROUNDED) == 0
  assert convert_('diff', workdir, adapted) == 1


@pytest.mark.parametrize(
  'vocabulary, says',
  [
    ('', '400 to 401 in the tokenizer files.'),
    # Another's ids than those of the files that are carried along.
    (
      'bytes',
      '359 to 360, which no tokenizer file has: they were added by'
      ' config.data.add_sentinels=2.',
    ),
  ],
)
def test_added_sentinels_are_written_or_spoken_of(
  vocabulary, says, folder, imported
):
  workdir = folder / f'{vocabulary}_sentinels'
  output = folder / f'{vocabulary}_sentinels_out'
  source = stored_model.open_model(imported)
  made_by = {'command': 'import', 'sources': []}
  kept = kept_files.folders(imported)
  # Its checkpoint names no vocabulary, so that any may be put beside it.
  work_directory.write(
    workdir,
    work_directory.Contents(source.model, made_by, kept),
    work_directory.lazy_params(source.arrays(), lambda *_: None),
  )
  config = json.loads((workdir / 'config.json').read_text())
  own = source.vocabularies.decoder
  config['data'].update(add_sentinels=2, vocabulary=vocabulary or own)
  (workdir / 'config.json').write_text(json.dumps(config))
  assert (
    convert_('export', f'--checkpoint={workdir}', f'--output={output}') == 0
  )
  card = (output / 'README.md').read_text()
  assert f'2 tokens, <sentinel_0> to <sentinel_1>, have the ids {says}' in card
  found = vocabularies.open_vocabulary(output)
  assert (found.specials.get('<sentinel_1>') == 401) == (not vocabulary)
  before = (workdir / 'hugging_face/decoder/tokenizer.model').read_bytes()
  after = (output / 'tokenizer.model').read_bytes()
  assert (after == before) == bool(vocabulary)


def test_a_pair_comes_back_from_its_folder(folder, adapted, capsys):
  """With both stacks' fields, and the encoder's window as asked for."""
  one, other = folder / 'pair_out', folder / 'pair_again'
  convert_('export', f'--checkpoint={adapted}', f'--output={one}')
  flags = [f'--source={one}', f'--output={folder}/pair_run']
  assert convert_('import', *flags, '--encoder_window=inclusive') == 0
  settings = config_lib.load_run(f'{folder}/pair_run')
  assert settings.model.encoder.window_rule == 'inclusive'
  convert_('export', f'--checkpoint={folder}/pair_run', f'--output={other}')
  for name in ('model.safetensors', 'chat_template.json'):
    assert (one / name).read_bytes() == (other / name).read_bytes(), name
  assert convert_('diff', adapted, f'{folder}/pair_run') == 1  # The window.
  # Which is kept, and said, though transformers has no field for it.
  raws = [json.loads((f / 'config.json').read_text()) for f in (one, other)]
  assert raws[1] == {**raws[0], 'encoder_window': 'inclusive'}
  card = (other / 'README.md').read_text()
  for words in (capsys.readouterr().out, card):
    assert 'look at 8 tokens on either side, as in transformers 5.23' in words
  assert "load('PATH', encoder_window='inclusive')" in card
  flags = [f'{folder}/pair_run', other, folders.ROUNDED]
  assert convert_('verify', *flags) == 0
  assert convert_('verify', one, *flags[1:]) == 1


EYES = 'vision_tower.patches.weight'


@pytest.fixture(scope='module')
def seeing(folder, wide):
  """The wider one, with a tensor of a part that reads images."""
  path = shutil.copytree(wide, folder / 'seeing')
  tensors = safetensors.load_file(path / 'model.safetensors')
  tensors[EYES] = np.ones(4, np.float32)
  safetensors.save_file(tensors, path / 'model.safetensors', {'format': 'pt'})
  return path


def test_what_is_no_part_of_the_model_is_reported(
  folder, seeing, gemma, tmp_path, capsys
):
  said = f'not part of the model: {EYES} (of the vision part'
  flags = [f'--encoder={seeing}', f'--decoder={gemma}']
  assert convert_('adapt', *flags, f'--output={tmp_path}/pair') == 0
  assert said in capsys.readouterr().out
  account = json.loads((tmp_path / 'pair' / 'coverage.json').read_text())
  assert list(account['not_part_of_the_model']) == ['encoder_source']
  flags = [
    f'--config=configs/pretrained.py:encoder={seeing},decoder={gemma}',
    f'--config.data.vocabulary={folder}/vocabulary.model',
  ]
  assert _train(*flags, '--dry_run') == 0
  assert said in capsys.readouterr().out


def test_what_is_kept_takes_the_place_of_what_was(gemma, tmp_path):
  """As of a job that is started again before its first checkpoint."""
  sees, run = tmp_path / 'sees', tmp_path / 'run'
  sees.mkdir()
  tower = {'num_hidden_layers': 1, 'vision_use_head': False, 'image_size': 16}
  encoder = {'vision_config': tower, 'text_config': {'hidden_size': 16}}
  (sees / 'config.json').write_text(
    json.dumps({'model_type': 't5gemma2', 'encoder': encoder})
  )
  shapes = siglip.shapes(tower, 16, 'config.json')
  tensors = {f'model.encoder.{n}': np.zeros(s, 'f4') for n, s in shapes.items()}
  safetensors.save_file(tensors, sees / 'model.safetensors', {'format': 'pt'})
  for _ in range(2):
    kept_files.keep(run, {'decoder': sees, 'encoder': gemma})
  kept = run / kept_files.FOLDER
  part = kept_files.vision_part({'decoder': kept / 'decoder'})
  assert len(part.names) == len(shapes)
  kept_files.keep(run, {'decoder': gemma})
  assert os.listdir(kept) == ['decoder']
  assert not (kept / 'decoder' / 'vision').exists()
  kept_files.keep(run, {})
  assert not kept.exists()


def test_training_starts_from_folders(folder, pairs, gemma, seeing, capsys):
  wide = seeing
  flags = [
    '--config.init.mode=adapt',
    f'--config.init.encoder={wide}',
    f'--config.init.decoder={gemma}',
    f'--config.teacher.checkpoint={gemma}',
    '--config.loss.distillation=0.5',
    '--config.model.encoder.width=24',
    '--config.train.steps=2',
    f'--workdir={folder}/from_folders',
  ]
  assert _train(*pairs, *flags) == 0
  shown = capsys.readouterr().out
  assert f'{wide} has no tokenizer' in shown
  assert f'{gemma} has no tokenizer' not in shown
  workdir = folder / 'from_folders'
  summary = json.loads((workdir / 'summary.json').read_text())
  assert summary['not_counted'] == [str(wide), str(gemma)]
  assert (workdir / 'hugging_face' / 'encoder' / 'config.json').exists()
  account = json.loads((workdir / 'coverage.json').read_text())
  assert account['parameters']['copied'] > account['parameters']['fresh'] > 0
  assert EYES in account['not_part_of_the_model']['encoder_source']
  assert f'not part of the model: {EYES}' in shown


def test_a_run_of_our_own_is_exported_with_its_vocabulary(folder, pairs):
  workdir, output = folder / 'scratch', folder / 'scratch_out'
  flags = tiny.flags(folder, 'causal_lm')
  assert _train(*flags, '--config.train.steps=2', f'--workdir={workdir}') == 0
  convert_('export', f'--checkpoint={workdir}', f'--output={output}')
  vocabulary = (folder / 'vocabulary.model').read_bytes()
  assert (output / 'tokenizer.model').read_bytes() == vocabulary
  raw = json.loads((output / 'config.json').read_text())
  assert {key: raw[key] for key in folders.IDS} == folders.IDS
  assert 'causal_lm' in (output / 'README.md').read_text()


def test_a_vocabulary_that_is_elsewhere_is_not_lost(
  folder, pairs, tmp_path, monkeypatch
):
  del pairs  # They made the vocabulary.
  name, workdir, output = 'own.model', tmp_path / 'run', tmp_path / 'out'
  for place in ('here', 'nowhere'):
    (tmp_path / place).mkdir()
  shutil.copyfile(folder / 'vocabulary.model', tmp_path / 'here' / name)
  flags = [
    f'--config={tiny.ROOT}/configs/base.py',
    *tiny.flags(folder, 'causal_lm')[1:],
    f'--config.data.vocabulary={name}',
    '--config.train.steps=2',
    f'--workdir={workdir}',
  ]
  monkeypatch.chdir(tmp_path / 'here')
  assert _train(*flags) == 0

  def refused(words):
    with pytest.raises(errors.UserError, match=words):
      convert_('export', f'--checkpoint={workdir}', f'--output={output}')
    assert not output.exists()
    with pytest.raises(errors.UserError, match=words):
      tiny.generate(workdir, 'the quick', tmp_path / 'out.json')

  monkeypatch.chdir(tmp_path / 'nowhere')
  assert tiny.generate(workdir, 'the quick', tmp_path / 'out.json') == 0
  convert_('export', f'--checkpoint={workdir}', f'--output={output}')
  assert (output / 'tokenizer.model').exists()
  shutil.rmtree(output)

  # Without the copy in the folder, that of the configuration is looked for.
  shutil.rmtree(workdir / config_lib.VOCABULARIES)
  refused(r'own.model of the decoder, .* is not there. The path is relative')
  vocabulary_training.train_vocabulary(
    tiny.text(200, seed=5), tmp_path / 'nowhere' / name, tiny.VOCAB
  )
  refused('is not the one that the checkpoint .* relative: run in the folder')
  monkeypatch.chdir(tmp_path / 'here')
  convert_('export', f'--checkpoint={workdir}', f'--output={output}')
  assert (output / 'tokenizer.model').exists()


def test_another_vocabulary_than_the_folders_is_refused(tmp_path, pairs, gemma):
  other = tmp_path / 'other'
  shutil.copytree(gemma, other)
  vocabulary_training.train_vocabulary(
    tiny.text(200, seed=5), other / 'tokenizer.model', tiny.VOCAB
  )
  flags = [
    '--config.init.mode=adapt',
    f'--config.init.encoder={other}',
    f'--workdir={tmp_path}/run',
  ]
  with pytest.raises(errors.UserError, match='ids would mean other text'):
    _train(*pairs, *flags)


def test_a_configuration_takes_its_model_from_folders(gemma, llama, imported):
  def load(arg):
    flags = [f'--config=configs/pretrained.py:{arg}']
    return config_lib.load(command.parse(train.define_flags, flags).config)

  settings = load(f'encoder={gemma},decoder={llama}')
  assert settings.model.decoder.activation == 'silu'
  assert settings.model.encoder.width == 16
  assert settings.init.mode == 'adapt'
  settings = load(f'source={imported}')
  assert settings.model == config_lib.load_run(str(imported)).model
  with pytest.raises(errors.UserError, match='after the colon'):
    load(f'encoder={gemma},source={gemma}')


def test_a_converted_folder_is_no_job_to_continue(folder, imported, tmp_path):
  copy = shutil.copytree(imported, tmp_path / 'copy')
  with pytest.raises(errors.UserError, match='config.init.encoder'):
    _train(*tiny.flags(folder, 'causal_lm'), f'--workdir={copy}')


def test_merge_averages_every_parameter(folder, gemma, imported, capsys):
  other = folders.make_folder(folder / 'other_gemma', folders.GEMMA, seed=5)
  output = folder / 'merged'
  flags = ['--weights=0.25,0.75', f'--output={output}']
  assert convert_('merge', imported, other, *flags) == 0
  arrays = [
    {a.path: np.asarray(a) for a in stored_model.open_model(path).arrays()}
    for path in (imported, output)
  ]
  theirs = stored_model.open_model(other, vocab_multiple=128)
  for array in theirs.arrays():
    mean = 0.25 * arrays[0][array.path] + 0.75 * np.asarray(array)
    np.testing.assert_allclose(arrays[1][array.path], mean, atol=1e-6)
  assert (output / 'vocabulary' / 'decoder' / 'tokenizer.model').exists()
  exported = folder / 'merged_out'
  convert_('export', f'--checkpoint={output}', f'--output={exported}')
  card = (exported / 'README.md').read_text()
  assert 'merge` of `imported` and `other_gemma`, weighted 0.25, 0.75.' in card
  capsys.readouterr()
  assert convert_('diff', imported, output) == 1
  assert 'decoder/layers/1/mlp/up' in capsys.readouterr().out


def test_models_with_other_tokenizers_are_not_merged(
  folder, gemma, imported, tmp_path
):
  other = tmp_path / 'other.model'
  vocabulary_training.train_vocabulary(
    tiny.text(200, seed=5), other, tiny.VOCAB
  )
  theirs = folders.make_folder(tmp_path / 'theirs', folders.GEMMA, other, 5)
  flags = [f'--output={tmp_path}/merged']
  with pytest.raises(errors.UserError, match='decoder of .*/theirs/tokenizer'):
    convert_('merge', imported, theirs, *flags)
  assert not (tmp_path / 'merged').exists()
  # Another file with the same tokens.
  file = folder / 'vocabulary.model'
  same = folders.make_folder(tmp_path / 'same', folders.GEMMA, file, 5)
  assert convert_('merge', gemma, same, *flags) == 0


def test_a_tokenizer_larger_than_the_table(folder, pairs, tmp_path):
  source = folders.make_folder(
    tmp_path / 'source',
    {**folders.GEMMA, 'vocab_size': 300},
    folder / 'vocabulary.model',
  )
  output = f'--output={tmp_path}/out'
  with pytest.raises(errors.UserError, match='400 tokens and .*300 rows') as e:
    convert_('import', f'--source={source}', output)
  assert str(e.value).endswith('give the vocabulary of this model.')
  flags = [f'--encoder={source}', output]
  with pytest.raises(errors.UserError, match='set --encoder_vocab_size=400'):
    convert_('adapt', *flags)
  flags.append('--encoder_vocab_size=400')
  with pytest.raises(errors.UserError, match='set --decoder_vocab_size=400'):
    convert_('adapt', *flags)
  assert os.listdir(tmp_path) == ['source']


def test_a_special_token_without_a_row_is_left_out(tmp_path, capsys):
  """As in a Gemma 3 of text that transformers 5 saved."""
  texts = tiny.text(20)
  file = tiny_tokenizers.save(tmp_path, 'gemma', texts, 400) / 'tokenizer.json'
  tokenizer = tokenizers.Tokenizer.from_file(str(file))
  rows = tokenizer.get_vocab_size()
  tokenizer.add_special_tokens(['<image_soft_token>'])
  tokenizer.save(str(file))
  source = folders.make_folder(
    tmp_path / 'source', {**folders.GEMMA, 'vocab_size': rows}
  )
  shutil.copy(file, source)
  flags = [f'--source={source}', f'--output={tmp_path}/run']
  assert convert_('import', *flags) == 0
  said = "rows of the decoder's table and are left out, '<image_soft_token>'"
  assert said in capsys.readouterr().out
  assert (
    tiny.generate(
      f'{tmp_path}/run', 'a <image_soft_token>', f'{tmp_path}/out.json'
    )
    == 0
  )
