"""Prefix, separator and chat format survive jobs, exports and imports."""

import json
import shutil

import pytest

import encdec_adapt
from encdec_adapt import config as config_lib
from encdec_adapt import evaluate, materialize, train
from encdec_adapt.base import errors
from encdec_adapt.cli import command
from encdec_adapt.generation import prompt_encoding
from encdec_adapt.objectives import objective_names
from encdec_adapt.stored import inherited_framing, model_on_disk
from encdec_adapt.tokenizers import vocabulary_training
from tests import tiny
from tests.e2e import folders

pytestmark = pytest.mark.e2e
PREFIX = 'prefix="over, the: "'


def _tuned(source, path, objective):
  """A copy of a run, as if it had been trained for an objective."""
  shutil.copytree(source, path)
  config = folders.read(path / 'config.json')
  config['data'] |= {'objective': objective, 'source': ''}
  config['data'] |= {'encoder_length': 16, 'decoder_length': 16}
  (path / 'config.json').write_text(json.dumps(config))
  return path


@pytest.fixture(scope='module')
def pair(folder, adapted):
  return _tuned(adapted, folder / 'pair', f'pairs:{PREFIX}')


@pytest.fixture(scope='module')
def decoder(folder, imported):
  objective = rf'pairs:{PREFIX},separator=":\n"'
  return _tuned(imported, folder / 'decoder', objective)


@pytest.fixture(scope='module')
def chat(folder):
  vocabulary_training.train_vocabulary(
    tiny.text(100), folder / 'chat.model', tiny.VOCAB, chat='chatml'
  )
  source = folders.make_folder(
    folder / 'of_chats', folders.GEMMA, folder / 'chat.model'
  )
  pair = folders.adapt(folder / 'plain', f'--encoder={source}')
  return _tuned(pair, folder / 'chat', 'chat')


def _objective(config, source, workdir, **changes):
  """The objective of a job that starts from a source."""
  flags = f'--config=configs/{config.format(source)}', '--config.data.source='
  flags += tuple(f'--config.data.{k}={v}' for k, v in changes.items())
  config = command.parse(train.define_flags, flags).config
  return inherited_framing.inherit(config, str(workdir)).data.objective


RECIPES = {
  'sft.py:source={}': 'pairs:{}',
  'sft.py:source={},meap=inputs': 'pairs:{},meap=inputs',
  'sft.py:source={},lora=4': 'pairs:{}',
  'sft.py:source={},format=chat': 'chat',
  'post_training.py:recipe=reward,source={}': 'preferences:{}',
  'post_training.py:recipe=dpo,source={}': 'preferences:{}',
  'post_training.py:recipe=rloo,source={}': 'pairs:{}',
  'post_training.py:recipe=grpo,source={}': 'pairs:{}',
  'post_training.py:recipe=distill,teacher=x,source={}': 'pairs:{}',
  'pretrained.py:source={}': 'prefix_lm',
}


@pytest.mark.parametrize('config, objective', RECIPES.items())
def test_every_recipe_reads_prompts_as_its_source(
  config, objective, pair, chat, tmp_path, capsys
):
  expected = objective.format(PREFIX)
  assert _objective(config, pair, tmp_path) == expected
  if expected != 'prefix_lm':
    assert f"'over, the: ' as in {pair}\n" in capsys.readouterr().out or (
      expected == 'chat'
    )
  # A folder states it, too.
  if '{}' not in objective:
    assert _objective(config, chat, tmp_path) == objective
  else:
    with pytest.raises(
      errors.UserError, match='conversations; state the prefix'
    ):
      _objective(config, chat, tmp_path)


def test_an_objective_may_state_its_own_framing(
  pair, decoder, chat, tmp_path, capsys
):
  sft, dpo = 'sft.py:source={}', 'post_training.py:recipe=dpo,source={}'
  both = rf'{PREFIX},separator=":\n"'
  assert _objective(sft, decoder, tmp_path) == f'pairs:{both}'
  assert _objective(dpo, decoder, tmp_path) == f'preferences:{both}'
  for text, objective in (
    ('pairs:prefix=', r'pairs:separator=":\n",prefix='),
    ('pairs:separator=" "', rf'pairs:{PREFIX},separator=" "'),
  ):
    assert _objective(sft, decoder, tmp_path, objective=text) == objective
  lines = capsys.readouterr().out
  assert f"prefix '', where {decoder} was trained on 'over, the" in lines
  assert f"separator ' ', where {decoder} was trained on 'over, the" in lines
  plain = 'pairs:prefix=""'
  assert _objective(sft, chat, tmp_path, objective=plain) == plain
  several = _tuned(pair, tmp_path / 'run', f'pairs | pairs:{PREFIX}')
  with pytest.raises(errors.UserError, match='on input or .*; state'):
    _objective(sft, several, tmp_path)


@pytest.mark.parametrize(
  'started, objective',
  [
    ('pairs', r'pairs:prefix="a: ",separator="\n"'),
    ('pairs | pairs:prefix=b', r'pairs:prefix="a: " | pairs:prefix=b'),
    ('chat | pairs', r'chat:separator="\n" | pairs:separator="|"'),
  ],
)
def test_a_resumed_job_inherits_its_own_framing(
  started, objective, pair, tmp_path
):
  config = config_lib.saved(str(pair))
  config.init.mode, config.init.encoder = 'checkpoint', str(tmp_path / 'gone')
  config.data.objective = objective
  config_lib.save(config, str(tmp_path))
  config.data.objective = started
  for workdir, expected in ((tmp_path, objective), (tmp_path / 'x', started)):
    resumed = inherited_framing.inherit(config, str(workdir))
    assert objective_names.parse(resumed.data.objective) == (
      objective_names.parse(expected)
    )


EXPORT = ('export', '--checkpoint={}')
EXPORTS = {
  'transformers': ('pair', EXPORT),
  'native': ('pair', (*EXPORT, '--layout=encdec_adapt')),
  'imported': ('decoder', EXPORT, ('import', '--source={}')),
  'merged': ('decoder', ('merge', '{}', '{}')),
  'merged folders': ('pair', EXPORT, ('merge', '{}', '{}')),
  'adapted': ('decoder', ('adapt', '--encoder={}')),
  'chat': ('chat', EXPORT),
  'chat imported': ('chat', EXPORT, ('import', '--source={}')),
}


@pytest.mark.parametrize('name, steps', [(x, y) for x, *y in EXPORTS.values()])
def test_every_export_reads_prompts_as_its_run(name, steps, request, tmp_path):
  source = path = request.getfixturevalue(name)
  for number, (verb, *flags) in enumerate(steps):
    flags = [flag.format(path) for flag in flags]
    path = tmp_path / str(number)
    assert tiny.convert(verb, *flags, f'--output={path}') == 0
  ours, theirs = map(model_on_disk.open_model, (source, path))
  assert (theirs.framing.prefixes, theirs.framing.chats) == (
    ours.framing.prefixes,
    ours.framing.chats,
  )
  if theirs.model == ours.model:  # An encoder reads no separator.
    assert theirs.framing == ours.framing
  if name != 'chat' and theirs.model == ours.model:
    prompts = [prompt_encoding.PromptEncoder(x) for x in (ours, theirs)]
    ids, expected = (x.encode('the quick').tolist() for x in prompts)
    assert ids == expected
  if (path / 'README.md').exists():
    framing = 'conversations' if name == 'chat' else "'over, the: ' + "
    assert framing in (path / 'README.md').read_text()


@pytest.mark.long
@pytest.mark.parity
@pytest.mark.parametrize('name', ['pair', 'native', 'decoder', 'chat'])
def test_the_sample_of_a_card_frames_its_prompt(
  name, request, tmp_path, monkeypatch
):
  pytest.importorskip('transformers')
  run = request.getfixturevalue('pair' if name == 'native' else name)
  layout = ['--layout=encdec_adapt'] * (name == 'native')
  exported = folders.export(run, tmp_path / 'exported', *layout)
  names = folders.run_card(exported, monkeypatch)
  text = 'The quick brown fox'
  if name == 'chat':
    text = [{'role': 'user', 'content': text}]
  encoder = prompt_encoding.PromptEncoder(model_on_disk.open_model(run))
  expected = encoder.encode(text).tolist()
  assert names['inputs']['input_ids'].tolist() == [expected]


def test_a_wrong_statement_in_a_folder_is_refused(pair, tmp_path):
  exported = folders.export(pair, tmp_path / 'exported')
  config = folders.read(exported / 'config.json')
  config['task_specific_params']['encdec_adapt']['prefixes'] = 'over'
  (exported / 'config.json').write_text(json.dumps(config))
  with pytest.raises(errors.UserError, match='list of texts .prefixes.'):
    prompt_encoding.PromptEncoder(model_on_disk.open_model(exported))


@pytest.mark.long
def test_a_tuned_run_answers_its_prompts_behind_the_prefix(
  pair, adapted, tmp_path, capfd
):
  file = tmp_path / 'pairs.jsonl'
  words = tiny.WORDS
  lines = [
    {'input': f'{words[i % 9]} {words[i % 7]} {i}', 'target': words[i % 5]}
    for i in range(60)
  ]
  file.write_text('\n'.join(map(json.dumps, lines)))
  run = tmp_path / 'run'
  flags = (
    f'--config=configs/sft.py:source={pair}',
    f'--workdir={run}',
    f'--config.data.source=pairs:{file}#input,target',
    *folders.small_rows(tmp_path / 'records'),
    '--config.train.steps=2',
    '--config.evaluation.loss=2',
    '--config.evaluation.samples=0',
    '--config.compute.dtype=float32',
  )
  assert tiny.call(materialize, *flags) == 0
  assert tiny.call(train, *flags) == 0
  assert f"prefix 'over, the: ' as in {pair}" in capfd.readouterr().out
  exported = folders.export(run, tmp_path / 'exported')
  generated = tmp_path / 'text.jsonl'
  assert tiny.generate(exported, 'the quick', generated) == 0
  loaded = encdec_adapt.load(run)
  [expected] = loaded.generate(['over, the: the quick'], prefix='')
  assert loaded.generate(['the quick']) == [expected]
  assert encdec_adapt.load(exported).generate(['the quick']) == [expected]
  capfd.readouterr()
  arguments = [f'--checkpoint={x}' for x in (run, exported, adapted)]
  arguments += [f'--pairs={file}', '--limit=4', '--max_tokens=4', '--cost=']
  assert tiny.call(evaluate, *arguments, f'--output={tmp_path}/scores') == 0
  table = capfd.readouterr().out
  assert "run: 'over, the: ' + input; exported: 'over, the: ' + input" in table
  assert 'adapted: input' in table
