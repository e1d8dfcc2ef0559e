"""The exchange commands as a user gives them, without torch.

Hugging Face folders are made by our own exporter; that transformers reads and
writes the same is the business of tests/parity.
"""

import json
import os
import re
import shutil

from flax import traverse_util
import jax
import numpy as np
import pytest
from safetensors import numpy as safetensors

from encdec_adapt import config as config_lib
from encdec_adapt import convert, evaluate, generate, train
from encdec_adapt.data import vocabulary_training
from encdec_adapt.exchange import source as source_lib
from encdec_adapt.interop import export
from encdec_adapt.models import config as model_config
from encdec_adapt.models import parameters
from encdec_adapt.runtime import command, errors
from encdec_adapt.training import checkpoint
from tests import tiny

pytestmark = pytest.mark.e2e

# The model of `tiny.flags`.
GEMMA = dict(
  layers=2,
  width=16,
  mlp_width=32,
  heads=2,
  kv_heads=1,
  head_dim=8,
  vocab_size=tiny.VOCAB,
  window=8,
  pattern=('local',),
  query_scale=32.0,
)
LLAMA = dict(
  layers=2,
  width=16,
  mlp_width=24,
  heads=2,
  kv_heads=2,
  head_dim=8,
  vocab_size=50,
  pattern=('global',),
  query_scale=8.0,
  norm_gain='direct',
  post_norms=False,
  scale_embeddings=False,
  attention_softcap=None,
  final_softcap=None,
  activation='silu',
  tied_head=False,
)
# Tables padded otherwise are summed in another order.
ROUNDED = '--tolerance=1e-5'
IDS = {'bos_token_id': 2, 'eos_token_id': 1, 'pad_token_id': 0}
FIELDS = {'decoder': {**IDS, 'max_position_embeddings': 77}}


def convert_(*argv) -> int:
  return command.run_subcommand('', convert.COMMANDS, [str(a) for a in argv])


def make_folder(path, shape, vocabulary=None, seed=0):
  """A Hugging Face folder with random weights and what comes with them."""
  config = model_config.DecoderOnlyConfig(model_config.StackConfig(**shape))
  params = traverse_util.flatten_dict(
    parameters.init(config, jax.random.key(seed)), sep='/'
  )
  draws = np.random.default_rng(seed)
  export.write(
    path,
    config,
    {
      name: np.asarray(p) + draws.normal(0, 0.1, p.shape).astype(np.float32)
      for name, p in params.items()
    },
    fields=FIELDS,
    texts={
      'chat_template.json': json.dumps({'of': path.name}),
      'generation_config.json': json.dumps(
        {**IDS, 'eos_token_id': [1, 5], 'cache_implementation': 'hybrid'}
      ),
    },
    carried={'tokenizer.model': vocabulary} if vocabulary else {},
  )
  return path


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp('convert')


@pytest.fixture(scope='module')
def pairs(folder):
  """Flags of an encoder-decoder job."""
  return tiny.make_records(folder)


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
  monkeypatch.chdir(tiny.ROOT)


@pytest.fixture(scope='module')
def gemma(folder, pairs):
  return make_folder(folder / 'gemma', GEMMA, folder / 'vocabulary.model')


@pytest.fixture(scope='module')
def wide(folder, pairs):
  """A wider one, without a tokenizer.model."""
  return make_folder(folder / 'wide', {**GEMMA, 'width': 24}, seed=1)


@pytest.fixture(scope='module')
def llama(folder):
  return make_folder(folder / 'llama', LLAMA, seed=2)


@pytest.fixture(scope='module')
def imported(folder, gemma):
  assert (
    convert_('import', f'--source={gemma}', f'--output={folder}/imported') == 0
  )
  return folder / 'imported'


@pytest.fixture(scope='module')
def adapted(folder, imported):
  output = folder / 'adapted'
  assert convert_('adapt', f'--encoder={imported}', f'--output={output}') == 0
  return output


@pytest.fixture(scope='module')
def cross_family(folder, gemma, llama):
  """Of Gemma's and Llama's: no class of transformers."""
  output = folder / 'cross_family'
  flags = [f'--encoder={gemma}', f'--decoder={llama}', f'--output={output}']
  assert convert_('adapt', *flags) == 0
  return output


def test_an_imported_folder_is_a_run(folder, gemma, imported):
  settings = config_lib.load_run(str(imported))
  stack = model_config.StackConfig(**GEMMA, vocab_multiple=128)
  assert settings.model == model_config.DecoderOnlyConfig(stack)
  found = checkpoint.open_latest(imported)
  assert found.step == 0
  assert found.read_meta()['made_by']['sources'] == [str(gemma)]
  assert not found.problems()
  # Read like any other run, wherever it is moved.
  moved = shutil.copytree(imported, folder / 'moved')
  flags = [
    f'--checkpoint={moved}',
    '--prompt=the quick',
    '--max_tokens=2',
    f'--output={folder}/out.json',
  ]
  assert generate.main(command.parse(generate.define_flags, flags)) == 0
  flags = [f'--checkpoint={moved}', f'--records={folder}/causal_lm/eval']
  assert evaluate.main(command.parse(evaluate.define_flags, flags)) == 0
  assert json.loads((moved / evaluate.FILE).read_text())['eval_loss'] > 0


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
  assert generation == {**IDS, 'eos_token_id': [1, 5]}
  card = (output / 'README.md').read_text()
  assert 'Gemma2ForCausalLM.from_pretrained' in card
  assert 'convert import` of `gemma`' in card
  assert convert_('diff', output, imported) == 0


def test_export_in_bfloat16_and_shards(folder, imported):
  output = folder / 'half'
  flags = [f'--checkpoint={imported}', f'--output={output}']
  convert_('export', *flags, '--dtype=bfloat16', '--shard_gb=1e-5')
  index = json.loads((output / 'model.safetensors.index.json').read_text())
  assert len(set(index['weight_map'].values())) > 1
  assert json.loads((output / 'config.json').read_text())['dtype'] == 'bfloat16'
  opened = source_lib.open_source(output)
  assert {str(array.dtype) for array in opened.arrays()} == {'bfloat16'}
  assert convert_('verify', imported, output, '--tolerance=1e-6') == 1
  assert convert_('verify', imported, output, '--tolerance=1') == 0


def test_adapted_pairs_say_where_weights_came_from(adapted, imported):
  account = json.loads((adapted / 'coverage.json').read_text())
  assert account['parameters']['fresh'] == 0
  assert source_lib.open_source(adapted).step == 0
  settings = config_lib.load_run(str(adapted))
  assert settings.model.encoder.role == 'bidirectional'
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
  assert convert_('verify', output, exported, ROUNDED) == 0
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
  assert source_lib.open_source(output).model == (
    source_lib.open_source(cross_family).model
  )
  assert convert_('diff', cross_family, output) == 0
  assert convert_('verify', cross_family, output, ROUNDED) == 0
  # And again from there, token ids and all.
  again = folder / 'own_again'
  convert_('import', f'--source={output}', f'--output={folder}/own_run')
  convert_('export', f'--checkpoint={folder}/own_run', f'--output={again}')
  for name in ('model.safetensors', 'config.json'):
    assert (again / name).read_bytes() == (output / name).read_bytes()


def _train(*flags) -> int:
  return train.main(command.parse(train.define_flags, flags))


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
  assert generation['decoder_start_token_id'] == 2
  assert (output / 'chat_template.json').exists()
  card = (output / 'README.md').read_text()
  assert re.search(r'Trained to step 2 of 2, with 8 rows', card)
  assert '`checkpoint` from `adapted`' in card
  assert 'convert adapt` of `imported`' in card
  assert re.search(r'Adapted: [\d,]+ parameters copied', card)
  assert 'convert import` of `gemma`' in card
  assert convert_('verify', workdir, output, ROUNDED) == 0
  assert convert_('diff', workdir, adapted) == 1


def test_a_pair_comes_back_from_its_folder(folder, adapted):
  """With both stacks' fields, and the encoder's window as asked for."""
  one, other = folder / 'pair_out', folder / 'pair_again'
  convert_('export', f'--checkpoint={adapted}', f'--output={one}')
  flags = [f'--source={one}', f'--output={folder}/pair_run']
  assert convert_('import', *flags, '--encoder_window=inclusive') == 0
  settings = config_lib.load_run(f'{folder}/pair_run')
  assert settings.model.encoder.window_rule == 'inclusive'
  convert_('export', f'--checkpoint={folder}/pair_run', f'--output={other}')
  for name in ('model.safetensors', 'config.json', 'chat_template.json'):
    assert (one / name).read_bytes() == (other / name).read_bytes(), name
  assert convert_('diff', adapted, f'{folder}/pair_run') == 1  # The window.


def test_training_starts_from_folders(folder, pairs, gemma, wide, capsys):
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
  assert summary['not_counted'] == [str(wide), str(gemma), str(gemma)]
  assert (workdir / 'hugging_face' / 'encoder' / 'config.json').exists()
  account = json.loads((workdir / 'coverage.json').read_text())
  assert account['parameters']['copied'] > account['parameters']['fresh'] > 0


def test_a_run_of_our_own_is_exported_with_its_vocabulary(folder, pairs):
  workdir, output = folder / 'scratch', folder / 'scratch_out'
  flags = tiny.flags(folder, 'causal_lm')
  assert _train(*flags, '--config.train.steps=2', f'--workdir={workdir}') == 0
  convert_('export', f'--checkpoint={workdir}', f'--output={output}')
  vocabulary = (folder / 'vocabulary.model').read_bytes()
  assert (output / 'tokenizer.model').read_bytes() == vocabulary
  raw = json.loads((output / 'config.json').read_text())
  assert {key: raw[key] for key in IDS} == IDS
  assert 'causal_lm' in (output / 'README.md').read_text()


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


def test_inspect(adapted, gemma, capsys):
  assert convert_('inspect', adapted) == 0
  shown = capsys.readouterr().out
  assert 'work directory, checkpoint of step 0' in shown
  assert 'T5GemmaForConditionalGeneration' in shown
  count = parameters.count(source_lib.open_source(adapted).model)
  assert f'parameters: {count:,}' in shown
  assert re.search(r'^window +8 +8 *$', shown, re.MULTILINE)
  assert convert_('inspect', gemma) == 0
  assert 'stored in float32' in capsys.readouterr().out


def test_merge_averages_every_parameter(folder, gemma, imported, capsys):
  other = make_folder(folder / 'other_gemma', GEMMA, seed=5)
  output = folder / 'merged'
  flags = ['--weights=0.25,0.75', f'--output={output}']
  assert convert_('merge', imported, other, *flags) == 0
  arrays = [
    {a.path: np.asarray(a) for a in source_lib.open_source(path).arrays()}
    for path in (imported, output)
  ]
  theirs = source_lib.open_source(other, vocab_multiple=128)
  for array in theirs.arrays():
    mean = 0.25 * arrays[0][array.path] + 0.75 * np.asarray(array)
    np.testing.assert_allclose(arrays[1][array.path], mean, atol=1e-6)
  assert (output / 'vocabulary' / 'decoder' / 'tokenizer.model').exists()
  capsys.readouterr()
  assert convert_('diff', imported, output) == 1
  assert 'decoder/layers/1/mlp/up' in capsys.readouterr().out


def test_diff_names_what_only_one_has(adapted, imported, capsys):
  assert convert_('diff', adapted, imported) == 1
  shown = capsys.readouterr().out
  assert re.search(r'cross_attention/key .* -> absent .*not comparable', shown)
  assert 'decoder/layers/1/mlp/up' not in shown
  convert_('diff', adapted, imported, '--all')
  assert re.search(r'decoder/layers/1/mlp/up .* equal', capsys.readouterr().out)


def test_verify_on_tokens_of_a_file(adapted, imported, tmp_path, capsys):
  rows = tmp_path / 'rows.jsonl'
  rows.write_text('{"encoder": [2, 9], "decoder": [2, 7, 8]}\n'
                  '{"encoder": [2, 9, 9], "decoder": [2]}\n')  # fmt: skip
  assert convert_('verify', adapted, adapted, f'--tokens={rows}') == 0
  shown = capsys.readouterr().out
  assert shown.startswith('4 predictions: largest difference of a logit 0.0')
  with pytest.raises(errors.UserError, match='line 1: write a list of ids'):
    convert_('verify', imported, imported, f'--tokens={rows}')
  rows.write_text('[2, 400]')
  with pytest.raises(errors.UserError, match='400 of decoder is no id below'):
    convert_('verify', imported, imported, f'--tokens={rows}')


# -- bad input ---------------------------------------------------------------


def _damage(folder, tensors=None, config=None):
  """Changes a folder's tensors and config in place."""
  file = folder / 'model.safetensors'
  found = dict(safetensors.load_file(file))
  if tensors:
    tensors(found)
    safetensors.save_file(found, file, {'format': 'pt'})
  if config:
    raw = json.loads((folder / 'config.json').read_text())
    raw.update(config)
    (folder / 'config.json').write_text(json.dumps(raw))


NORM = 'model.layers.1.input_layernorm.weight'
DAMAGES = {
  'missing': (dict(tensors=lambda t: t.pop(NORM)), f'no tensor .{NORM}'),
  'extra': (
    dict(tensors=lambda t: t.update(stray=np.zeros(2, np.float32))),
    'stray in .*no tensor of the model',
  ),
  'shape': (
    dict(tensors=lambda t: t.update({NORM: np.zeros(17, np.float32)})),
    rf'{NORM} in .* has shape \[17\]',
  ),
  'nan': (
    dict(tensors=lambda t: t.update({NORM: np.full(16, np.nan, np.float32)})),
    f'{NORM}.* has the value nan at .0',
  ),
  'infinite': (
    dict(tensors=lambda t: t.update({NORM: np.full(16, np.inf, np.float32)})),
    f'{NORM}.* has the value inf',
  ),
  'contradiction': (dict(config={'hidden_size': 32}), r'config.json .*says'),
  'layers': (
    dict(config={'num_hidden_layers': 1, 'layer_types': None}),
    r'model.layers.1\S+ in .* no tensor of the model',
  ),
  'family': (dict(config={'model_type': 'mamba'}), "'mamba'.* gemma2"),
  'activation': (dict(config={'hidden_activation': 'relu'}), "'relu'; we have"),
  'own layout': (
    dict(config={'model_type': 'encdec_adapt', 'format_version': 9}),
    'format_version 9',
  ),
}  # fmt: skip


@pytest.mark.parametrize('damage', DAMAGES)
def test_a_damaged_folder_leaves_nothing_behind(damage, gemma, tmp_path):
  source = shutil.copytree(gemma, tmp_path / 'source')
  changes, words = DAMAGES[damage]
  _damage(source, **changes)
  for name in ('import', 'adapt'):
    flag = '--source' if name == 'import' else '--encoder'
    with pytest.raises(errors.UserError, match=words):
      convert_(name, f'{flag}={source}', f'--output={tmp_path}/out')
  assert os.listdir(tmp_path) == ['source']


def test_tensors_that_are_no_weights_are_named(gemma, tmp_path, capsys):
  source = shutil.copytree(gemma, tmp_path / 'source')
  names = [f'model.layers.{i}.self_attn.rotary_emb.inv_freq' for i in range(2)]
  buffers = dict.fromkeys(names, np.ones(4, np.float32))
  _damage(source, tensors=lambda t: t.update(buffers))
  assert convert_('import', f'--source={source}', f'--output={tmp_path}/o') == 0
  assert f'unused: {names[0]} and 1 more' in capsys.readouterr().out
  summary = json.loads((tmp_path / 'o' / 'summary.json').read_text())
  assert list(summary['made_by']['unused']) == names


def test_a_tokenizer_larger_than_the_table(folder, pairs, tmp_path):
  source = make_folder(
    tmp_path / 'source',
    {**GEMMA, 'vocab_size': 300},
    folder / 'vocabulary.model',
  )
  with pytest.raises(errors.UserError, match='400 tokens.*300 rows'):
    convert_('import', f'--source={source}', f'--output={tmp_path}/out')
  assert os.listdir(tmp_path) == ['source']


def test_parameters_that_are_not_finite_are_not_exported(imported, tmp_path):
  output = tmp_path / 'out'
  shape = model_config.DecoderOnlyConfig(model_config.StackConfig(**GEMMA))
  params = {
    path: np.full(info.shape, 1e5, np.float32)
    for path, info in parameters.parameter_table(shape).items()
  }
  with pytest.raises(errors.UserError, match='float16 form.*has the value inf'):
    export.write(output, shape, params, dtype=np.dtype(np.float16))
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  'argv, words',
  [
    ([], 'a command is missing'),
    (['exprot'], "'exprot'.*Did you mean export"),
    (['import'], '--source is missing'),
    (['import', '--surce=x'], 'surce'),
    (['import', '--source=nowhere', '--output={tmp}/x'], 'nowhere holds no'),
    (['import', '--source={imported}', '--output={tmp}/x'], 'work directory'),
    (['import', '--source={gemma}', '--output={gemma}'], 'exists already'),
    (['export', '--checkpoint={imported}', '--output={gemma}'],
     'exists already'),
    (['export', '--checkpoint={imported}', '--output={tmp}/x', '--shard_gb=0'],
     'shard_gb is 0'),
    (['adapt', '--encoder={gemma}', '--output={gemma}'], 'exists already'),
    (['adapt', '--encoder={adapted}', '--output={tmp}/x'],
     'is an encoder-decoder'),
    (['adapt', '--encoder={wide}', '--decoder={gemma}', '--output={tmp}/x',
      '--cross_attention=copy'], 'as wide as the decoder'),
    (['inspect'], 'inspect takes PATH, not nothing'),
    (['inspect', '{gemma}', '{gemma}'], 'inspect takes PATH'),
    (['diff', '{gemma}'], 'diff takes A B'),
    (['merge', '{gemma}', '{wide}', '--output={tmp}/x'], 'width is 16 and 24'),
    (['merge', '{gemma}', '{gemma}', '--weights=1,1', '--output={tmp}/x'],
     'sum to 2'),
    (['merge', '{gemma}', '{gemma}', '--weights=1', '--output={tmp}/x'],
     '1 weights are given for 2'),
    (['merge', '{gemma}', '{gemma}', '--weights=a,b', '--output={tmp}/x'],
     'is not numbers'),
    (['verify', '{gemma}', '{llama}'], 'no tokens in common'),
    (['verify', '{gemma}', '{gemma}', '--rows=0'], 'rows is 0'),
    (['verify', '{gemma}', '{gemma}', '--tokens=nowhere'], 'cannot be read'),
  ],
)  # fmt: skip
def test_bad_arguments(
  argv, words, gemma, wide, llama, imported, adapted, tmp_path
):
  names = dict(
    gemma=gemma,
    wide=wide,
    llama=llama,
    imported=imported,
    adapted=adapted,
    tmp=tmp_path,
  )
  with pytest.raises(errors.UserError, match=words):
    convert_(*(argument.format(**names) for argument in argv))
  assert not list(tmp_path.iterdir())
