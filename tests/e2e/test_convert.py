"""`convert import`, `export` and `merge` as a user gives them, without torch.

Hugging Face folders are made by our own exporter; tests/parity compares it
with transformers.
"""

import json
import re
import shutil

import numpy as np
import pytest
from safetensors import numpy as safetensors
import tokenizers

from encdec_adapt import config as config_lib
from encdec_adapt import train
from encdec_adapt.base import errors
from encdec_adapt.checkpoints import manager
from encdec_adapt.models import model_config
from encdec_adapt.stored import pretrained_files
from encdec_adapt.tokenizers import vocabulary_training
from tests import tiny
from tests.e2e import folders

pytestmark = pytest.mark.e2e
convert_ = tiny.convert
_export, _json = folders.export, folders.read
EYES = 'vision_tower.patches.weight'


def _assert_same_files(a, b, *names):
  for name in names:
    assert (a / name).read_bytes() == (b / name).read_bytes(), name


def _other_vocabulary(path):
  vocabulary_training.train_vocabulary(tiny.text(200, seed=5), path, tiny.VOCAB)
  return path


@pytest.mark.long
def test_an_imported_folder_is_a_run(folder, gemma, imported):
  settings = config_lib.load_run(str(imported))
  stack = model_config.StackConfig(**folders.GEMMA, vocab_multiple=128)
  assert settings.model == model_config.DecoderOnlyConfig(stack)
  checkpoint = manager.open_latest(imported)
  assert checkpoint.step == 0
  assert checkpoint.read_meta()['made_by']['sources'] == [str(gemma)]
  # It can be read like any other run, also where it was moved.
  moved = shutil.copytree(imported, folder / 'moved')
  assert tiny.generate(moved, 'the quick', f'{folder}/out.json') == 0
  assert folders.evaluate(moved, folder / 'causal_lm' / 'eval')['loss'] > 0
  with pytest.raises(errors.UserError, match='config.init.encoder'):
    tiny.call(train, *tiny.flags(folder, 'causal_lm'), f'--workdir={moved}')


def test_import_then_export_gives_the_same_bytes(folder, gemma, imported):
  output = _export(imported, folder / 'exported')
  names = 'model.safetensors', 'config.json', 'chat_template.json'
  _assert_same_files(output, gemma, *names, 'tokenizer.model')
  assert _json(output / 'generation_config.json') == folders.GENERATION
  card = (output / 'README.md').read_text()
  assert 'Gemma2ForCausalLM.from_pretrained' in card
  assert 'convert import` of `gemma`' in card
  assert "written without cache_implementation ('hybrid')" in card
  assert convert_('diff', output, imported) == 0


def test_bfloat16_is_kept_from_import_to_export(folder, imported):
  half = _export(imported, folder / 'bf16', '--dtype=bfloat16')
  assert _json(half / 'config.json')['dtype'] == 'bfloat16'
  assert convert_('verify', imported, half, '--tolerance=1e-6') == 1
  assert convert_('verify', imported, half, '--tolerance=1') == 0
  run = folders.import_folder(half, folder / 'bf16_run')
  again = _export(run, folder / 'bf16_again')
  _assert_same_files(again, half, 'model.safetensors', 'config.json')
  # Tokenizer files that an export made are carried along from then on.
  _assert_same_files(again, half, 'tokenizer.json', 'tokenizer_config.json')
  assert 'exported in bfloat16 by' in (again / 'README.md').read_text()


def test_what_transformers_cannot_load_is_written_in_our_layout(
  folder, cross_family, capsys
):
  output = folder / 'own'
  with pytest.raises(errors.UserError, match='no class for this model'):
    _export(cross_family, output, '--layout=transformers')
  assert not output.exists()
  _export(cross_family, output)
  printed = capsys.readouterr().out
  assert 'transformers has no class for this model' in printed
  assert 'transformers runs the code in it' in printed
  raw = _json(output / 'config.json')
  assert raw['model_type'] == 'encdec_adapt'
  assert raw['model']['decoder']['norm_gain'] == 'direct'
  tensors = safetensors.load_file(output / 'model.safetensors')
  assert tensors['decoder.layers.1.attention.query'].shape == (16, 2, 8)
  assert tensors['encoder.embedder.table'].shape == (tiny.VOCAB, 16)
  assert tensors['decoder.head.table'].shape == (50, 16)
  assert convert_('diff', cross_family, output) == 0
  assert convert_('verify', cross_family, output, folders.ROUNDED) == 0
  run = folders.import_folder(output, folder / 'own_run')
  again = _export(run, folder / 'own_again')
  _assert_same_files(again, output, 'model.safetensors', 'config.json')


@pytest.fixture(scope='module')
def trained(folder, pairs, adapted):
  """A run of two steps, both kept."""
  workdir = folder / 'trained'
  flags = [
    '--config.init.mode=checkpoint',
    f'--config.init.encoder={adapted}',
    '--config.train.steps=2',
    '--config.checkpoint.every=1',
    '--config.model.vocab_multiple=128',
    f'--workdir={workdir}',
  ]
  assert tiny.call(train, *pairs, *flags) == 0
  return workdir


@pytest.mark.long
def test_a_trained_pair_is_exported_with_its_history(folder, adapted, trained):
  workdir = trained
  output = _export(workdir, folder / 'trained_out')
  raw = _json(output / 'config.json')
  assert (raw['model_type'], raw['eos_token_id']) == ('t5gemma', 1)
  for part in ('encoder', 'decoder'):
    assert raw[part]['max_position_embeddings'] == 77
    assert raw[part]['bos_token_id'] == 2
  generation = _json(output / 'generation_config.json')
  assert generation == {**folders.GENERATION, 'decoder_start_token_id': 2}
  assert (output / 'chat_template.json').exists()
  card = (output / 'README.md').read_text()
  for words in (
    'Trained to step 2 of 2, with 8 rows',
    '`checkpoint` from `adapted`',
    'convert adapt` of `imported`',
    r'Adapted: [\d,]+ parameters copied',
    'convert import` of `gemma`',
    'Data: `text:none`',
    'Loss: cross-entropy to the data.',
    r'Held-out loss [\d.]+ at step 0, [\d.]+ at step 2 .nats per target token.',
    r'\d+ target tokens of \d+ tokens',
    'convert push . --repo=ORG/NAME',
    '- type: loss',
  ):
    assert re.search(words, card), words
  assert convert_('verify', workdir, output, folders.ROUNDED) == 0
  assert convert_('diff', workdir, adapted) == 1
  # As if the source were trained again later, from this run.
  config = _json(workdir / 'config.json')
  config['init']['encoder'] = str(workdir)
  (workdir / 'config.json').write_text(json.dumps(config))
  card = (_export(workdir, folder / 'cycle_out') / 'README.md').read_text()
  assert card.count('Trained to step') == 1


@pytest.mark.parametrize('matter', ['', '# license: todo\n', 'My model.\n'])
def test_a_card_need_not_have_fields(gemma, tmp_path, matter):
  source = shutil.copytree(gemma, tmp_path / 'source')
  (source / 'README.md').write_text(f'---\n{matter}---\n')
  [base] = pretrained_files.base_models(source)
  assert base['name'] == 'source' and not base.get('languages')


def test_the_hub_reads_the_metadata_of_a_card(folder, gemma, tmp_path):
  hub = pytest.importorskip('huggingface_hub')
  source = shutil.copytree(gemma, tmp_path / 'source')
  fields = '---\nlicense: other\nlicense_name: terms\nlanguage: en\n---\n'
  (source / 'README.md').write_text(f'{fields}# Gemma\n')
  run = folders.import_folder(source, tmp_path / 'run')
  scores = folders.evaluate(run, folder / 'causal_lm' / 'eval')
  flags = [f'--evaluation={run}/evaluation', '--language=en,de']
  data = hub.ModelCard.load(
    _export(run, tmp_path / 'out', *flags) / 'README.md'
  ).data
  assert (data.license, data.license_name) == ('other', 'terms')
  assert data.language == ['en', 'de']
  found = {x.metric_type: x.metric_value for x in data.eval_results}
  assert found['loss'] == pytest.approx(scores['loss'])
  with pytest.raises(errors.UserError, match='no results of .*source as it is'):
    _export(source, tmp_path / 'other', flags[0])


def test_a_tokenizer_that_is_not_ours_is_carried_with_a_note(gemma, tmp_path):
  source = shutil.copytree(gemma, tmp_path / 'source')
  (source / 'tokenizer.model').unlink()
  words = tokenizers.models.WordLevel({'<unk>': 0, 'a': 1}, unk_token='<unk>')
  tokenizers.Tokenizer(words).save(f'{source}/tokenizer.json')
  run = folders.import_folder(source, tmp_path / 'run')
  for model in (run, source):
    output = _export(model, tmp_path / f'{model.name}_out')
    _assert_same_files(output, source, 'tokenizer.json')
    assert 'ids were not compared' in (output / 'README.md').read_text()


def test_a_pair_comes_back_from_its_folder(folder, adapted):
  """With fields of both stacks, and the encoder's window as asked for."""
  one = _export(adapted, folder / 'pair_out')
  assert 'less than 8 tokens on either' in (one / 'README.md').read_text()
  flags = [one, folder / 'pair_run', '--encoder_window=inclusive']
  run = folders.import_folder(*flags)
  other = _export(run, folder / 'pair_again')
  _assert_same_files(one, other, 'model.safetensors', 'chat_template.json')
  assert convert_('diff', adapted, run) == 1  # The window.
  # transformers has no field for it.
  raws = [_json(path / 'config.json') for path in (one, other)]
  assert raws[1] == {**raws[0], 'encoder_window': 'inclusive'}
  card = (other / 'README.md').read_text()
  assert 'look at 8 tokens on either side, as in transformers 5.23' in card
  assert convert_('verify', one, other, folders.ROUNDED) == 1


@pytest.mark.long
def test_training_starts_from_folders(folder, pairs, gemma, wide, capsys):
  # The wider model, with a tensor of a vision part.
  seeing = shutil.copytree(wide, folder / 'seeing')
  tensors = safetensors.load_file(seeing / 'model.safetensors')
  tensors[EYES] = np.ones(4, np.float32)
  safetensors.save_file(tensors, seeing / 'model.safetensors', {'format': 'pt'})
  workdir = folder / 'from_folders'
  flags = [
    '--config.init.mode=adapt',
    f'--config.init.encoder={seeing}',
    f'--config.init.decoder={gemma}',
    f'--config.teacher.checkpoint={gemma}',
    '--config.loss.kind=distill',
    '--config.loss.distill.share=0.5',
    '--config.model.encoder.width=24',
    '--config.train.steps=2',
    f'--workdir={workdir}',
  ]
  assert tiny.call(train, *pairs, *flags) == 0
  shown = capsys.readouterr().out
  assert f'{seeing} has no tokenizer' in shown
  assert f'{gemma} has no tokenizer' not in shown
  assert EYES in shown
  not_counted = _json(workdir / 'summary.json')['not_counted']
  assert not_counted == [str(seeing), str(gemma)]
  assert (workdir / 'hugging_face' / 'encoder' / 'config.json').exists()
  coverage = _json(workdir / 'coverage.json')
  counts = coverage['parameters']
  assert counts['copied'] > counts['fresh'] > 0
  assert EYES in coverage['not_part_of_the_model']['encoder_source']


@pytest.mark.long
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
  assert tiny.call(train, *flags) == 0
  monkeypatch.chdir(tmp_path / 'nowhere')
  assert tiny.generate(workdir, 'the quick', tmp_path / 'out.json') == 0
  # The run's own copy, and the ids of its configuration.
  _export(workdir, output)
  kept = (output / 'tokenizer.model').read_bytes()
  assert kept == (folder / 'vocabulary.model').read_bytes()
  raw = _json(output / 'config.json')
  assert {key: raw[key] for key in folders.IDS} == folders.IDS
  shutil.rmtree(output)
  # Without the copy, the path of the configuration is opened.
  shutil.rmtree(workdir / config_lib.VOCABULARIES)
  for change in (lambda _: None, _other_vocabulary):  # Missing, another one.
    change(tmp_path / 'nowhere' / name)
    with pytest.raises(errors.UserError, match='own.model of the decoder is'):
      _export(workdir, output)
    assert not output.exists()
  monkeypatch.chdir(tmp_path / 'here')
  _export(workdir, output)


def test_merge_averages_every_parameter(folder, imported):
  other = folders.make_folder(folder / 'other_gemma', folders.GEMMA, seed=5)
  output = folder / 'merged'
  flags = ['--weights=0.25,0.75', f'--output={output}']
  assert convert_('merge', imported, other, *flags) == 0
  one, two, average = map(folders.arrays, (imported, other, output))
  for path, array in average.items():
    mean = 0.25 * one[path] + 0.75 * two[path]
    np.testing.assert_allclose(array, mean, atol=1e-6)
  exported = _export(output, folder / 'merged_out')
  assert (exported / 'tokenizer.model').exists()
  card = (exported / 'README.md').read_text()
  assert 'merge` of `imported` and `other_gemma`, weighted 0.25, 0.75.' in card


def test_task_vectors_of_adapted_decoders(folder, gemma, imported, adapted):
  tuned = folders.make_folder(folder / 'tuned_gemma', folders.GEMMA, seed=6)
  trained = folders.make_folder(folder / 'trained_gemma', folders.GEMMA, seed=7)
  pt, (it, pair) = (
    adapted,
    [folders.adapt(x.with_suffix('.pair'), f'--encoder={x}')
     for x in (tuned, trained)],
  )  # fmt: skip
  output = folder / 'task_vector'
  flags = ['--weights=1,1,-1', f'--output={output}']
  assert convert_('merge', pair, it, pt, *flags) == 0
  merged, pair, it, pt = map(folders.arrays, (output, pair, it, pt))
  for path, array in merged.items():
    np.testing.assert_array_equal(array, pair[path] + it[path] - pt[path], path)
  # Cross-attention moves by the difference of self-attention.
  names = 'decoder/blocks/layer_0/{}attention/query'
  cross, own = (names.format(x) for x in ('cross_', ''))
  np.testing.assert_allclose(
    merged[cross] - pair[cross], it[own] - pt[own], atol=1e-6
  )


@pytest.mark.long
def test_merge_takes_the_last_steps_and_a_start(folder, adapted, trained):
  start, *steps = map(folders.arrays, (adapted, f'{trained}@1', f'{trained}@2'))
  start_flag = f'--start={adapted}'
  for name, flags, share in (
    ('mean', ['--last=2'], 1.0),
    ('near_start', ['--last=1', start_flag, '--weights=0.2'], 0.2),
  ):
    output = folder / name
    assert convert_('merge', trained, *flags, f'--output={output}') == 0
    for path, array in folders.arrays(output).items():
      last = steps[-1:] if name == 'near_start' else steps
      mean = sum(step[path] for step in last) / len(last)
      expected = start[path] + share * (mean - start[path])
      np.testing.assert_allclose(array, expected, atol=1e-6, err_msg=path)
  with pytest.raises(errors.UserError, match='of the steps 1, 2'):
    convert_('merge', trained, '--last=3', f'--output={folder}/three')


def test_models_with_other_vocabularies_are_not_combined(
  pairs, imported, tmp_path
):
  other = _other_vocabulary(tmp_path / 'other.model')
  theirs = folders.make_folder(tmp_path / 'theirs', folders.GEMMA, other, 5)
  with pytest.raises(errors.UserError, match='theirs has the voc.*other text'):
    convert_('merge', imported, theirs, f'--output={tmp_path}/merged')
  assert not (tmp_path / 'merged').exists()
  flags = ['--config.init.mode=adapt', f'--config.init.encoder={theirs}']
  with pytest.raises(errors.UserError, match='ids would mean other text'):
    tiny.call(train, *pairs, *flags, f'--workdir={tmp_path}/run')


def test_a_tokenizer_larger_than_the_table(folder, pairs, tmp_path):
  source = folders.make_folder(
    tmp_path / 'source',
    {**folders.GEMMA, 'vocab_size': 300},
    folder / 'vocabulary.model',
  )
  with pytest.raises(errors.UserError, match='400 tokens and .*300 rows'):
    folders.import_folder(source, tmp_path / 'out')
  flags = [f'--encoder={source}', '--model.encoder.vocab_size=400']
  with pytest.raises(errors.UserError, match='--model.decoder.vocab_size=400'):
    folders.adapt(tmp_path / 'out', *flags)
  assert not (tmp_path / 'out').exists()
