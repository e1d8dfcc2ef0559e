"""Models on the Hugging Face Hub, as the commands read and upload them."""

import re

import pytest

from encdec_adapt import config as config_lib
from encdec_adapt import train
from encdec_adapt.base import errors
from encdec_adapt.cli import command
from encdec_adapt.files import hub as hub_lib
from encdec_adapt.stored import model_on_disk
from tests import fake_hub, tiny
from tests.e2e import folders

pytestmark = pytest.mark.e2e

ADDRESS = 'hf://org/gemma'
# What repositories have besides.
COPIES = ('pytorch_model.bin', 'consolidated.safetensors', 'onnx/config.json')


@pytest.fixture
def hub(monkeypatch, gemma, tmp_path):
  with fake_hub.serve(monkeypatch, tmp_path / 'cache') as server:
    copies = dict.fromkeys(COPIES, b'x')
    commit = server.put('org/gemma', gemma, **copies)
    server.pinned = f'{ADDRESS}@{commit}'
    yield server


@pytest.mark.long
def test_a_resumed_job_reads_the_commits_of_its_start(
  hub, gemma, pairs, tmp_path, capsys
):
  keys = ('init.encoder', 'teacher.checkpoint', 'data.vocabulary')
  flags = [
    *pairs,
    *(f'--config.{key}={ADDRESS}' for key in keys),
    '--config.init.mode=adapt',
    '--config.loss.kind=distill',
    '--config.loss.distill.share=0.5',
    '--config.train.steps=2',
  ]
  run = tmp_path / 'run'
  assert tiny.call(train, *flags, f'--workdir={run}') == 0
  assert f'the cost of {hub.pinned} is unknown' in capsys.readouterr().out
  files = {path.name for path in gemma.iterdir()} - {'README.md'}
  assert sorted(hub.downloads) == sorted(files)
  card = folders.export(run, tmp_path / 'exported') / 'README.md'
  text = card.read_text()
  assert 'Started by `adapt` from `org/gemma`' in text
  assert 'Loss: distill, share 0.5, which reads `org/gemma`.' in text
  assert 'base_model:\n- org/gemma\n' in text
  # The branch moves, and the process that resumes looks again.
  moved = f'{ADDRESS}@{hub.put("org/gemma", gemma)}'
  hub_lib.commit_of.cache_clear()
  config = command.parse(train.define_flags, flags).config
  for key in ('', keys[1]):
    if key:  # Another commit is read where it is named.
      config.update_from_flattened_dict({key: moved})
    commits = config_lib.pinned(config, run)
    for name in keys:
      section, field = name.split('.')
      wanted = moved if name == key else hub.pinned
      assert commits[section][field] == wanted
  config.train.rewards.models = (ADDRESS, str(gemma))
  models = config_lib.pinned(config, run).train.rewards.models
  assert models == (moved, str(gemma))


@pytest.mark.long
def test_a_model_of_the_hub_is_read_where_a_folder_is(
  hub, gemma, tmp_path, capsys
):
  imported = folders.import_folder(ADDRESS, tmp_path / 'imported')
  opened = model_on_disk.open_model(ADDRESS)
  assert opened.vocabularies.decoder == f'{ADDRESS}/tokenizer.model'
  assert opened.require_vocabularies().decoder.size == tiny.VOCAB
  made_by = folders.read(imported / 'summary.json')['made_by']
  assert made_by['sources'] == [hub.pinned]
  assert tiny.convert('diff', f'{ADDRESS}@main', gemma) == 0
  assert tiny.generate(ADDRESS, 'the quick', tmp_path / 'out') == 0
  done = tiny.run('convert', 'inspect', 'hf://org/none')
  assert done.returncode == 2 and 'hf auth login' in done.stderr
  assert 'Traceback' not in done.stderr
  # And back: an upload prints the files, and is read again.
  capsys.readouterr()
  assert tiny.convert('push', gemma, '--repo=org/mine') == 0
  shown = capsys.readouterr().out
  for path in gemma.iterdir():
    assert re.search(rf'^ *[\d.]+ \w+ {path.name}$', shown, re.M)
  assert shown.endswith('/org/mine\n') and hub.private == {'org/mine'}
  assert tiny.convert('diff', 'hf://org/mine', gemma) == 0
  with pytest.raises(errors.UserError, match='not an exported folder'):
    tiny.convert('push', imported, '--repo=org/mine')
  with pytest.raises(errors.UserError, match='`convert push` uploads'):
    folders.export(gemma, ADDRESS)
