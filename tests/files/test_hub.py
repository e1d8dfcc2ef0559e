"""Files of the Hugging Face Hub, by the real client from a server here."""

import subprocess
import sys

from huggingface_hub import constants
import pytest

from encdec_adapt.base import errors
from encdec_adapt.files import hub as hub_lib
from tests import fake_hub

REPO = 'org/name'
ADDRESS = f'hf://{REPO}'
CONTENT = {
  name: bytes(range(256)) * size
  for name, size in (('config.json', 10), ('big', 1000), ('unread', 5))
}


@pytest.fixture
def hub(monkeypatch, tmp_path):
  with fake_hub.serve(monkeypatch, tmp_path / 'cache') as server:
    server.pinned = f'{ADDRESS}@{server.commit(REPO, CONTENT)}'
    yield server


def test_files_that_match_are_downloaded_once(hub):
  folder = hub_lib.fetch(ADDRESS, ['config.json', 'b*'])
  assert sorted(hub.downloads) == ['big', 'config.json']
  assert {x.name: x.read_bytes() for x in folder.iterdir()} == {
    name: CONTENT[name] for name in hub.downloads
  }
  # A commit that the cache has is read without the Hub.
  hub.refusal = 500, ''
  assert hub_lib.pinned(ADDRESS) == hub.pinned
  assert hub_lib.fetch(hub.pinned, ['b*']) == folder
  hub_lib.commit_of.cache_clear()
  hub.refusal = None
  moved = f'{ADDRESS}@{hub.commit(REPO, {})}'
  assert hub_lib.pinned(ADDRESS) == moved
  assert hub_lib.pinned(ADDRESS, hub.pinned) == hub.pinned
  assert hub_lib.pinned(f'{ADDRESS}@main', hub.pinned) == hub.pinned
  assert hub_lib.pinned(moved, hub.pinned) == moved
  assert hub_lib.pinned(f'{ADDRESS}/x', hub.pinned) == f'{moved}/x'


LOGIN = '`hf auth login`'
LATER = 'same command again, later'
USER, ABSENT = errors.UserError, errors.AbsentError


@pytest.mark.parametrize(
  'refusal, address, words, kind',
  [
    ((401, ''), ADDRESS, rf'refused \(401.* {LOGIN}', USER),
    ((403, 'GatedRepo'), ADDRESS, f'Gated.* terms at http://.*{LOGIN}', USER),
    ((404, ''), ADDRESS, r'refused \(404', USER),
    ((429, ''), ADDRESS, f'429.* {LATER}.*{LOGIN}', ABSENT),
    ((500, ''), ADDRESS, f'500.* {LATER}', ABSENT),
    (None, 'hf://org/none', f'NotFound.*{LOGIN}', USER),
    (None, f'{ADDRESS}@v2', f'git ls-remote http.*/{REPO}`', USER),
    (None, 'hf://name', 'give hf://ORG/NAME', USER),
    (None, 'hf://spaces/a/b', 'is a space.* give hf://ORG/NAME', USER),
    (
      None,
      'hf://datasets/a/b@v',
      f'NotFound.*http.*/datasets/a/b .*{LOGIN}',
      USER,
    ),
    ('HF_HUB_OFFLINE', ADDRESS, f'hf download {REPO}', USER),
    ('ENDPOINT', ADDRESS, f'hf download {REPO}', USER),
  ],
)
def test_an_error_names_the_command(
  hub, monkeypatch, refusal, address, words, kind
):
  if isinstance(refusal, str):  # Not the Hub's, but of the way there.
    monkeypatch.setattr(constants, refusal, 'http://127.0.0.1:9')
  else:
    hub.refusal = refusal
  with pytest.raises(errors.UserError, match=words) as error:
    hub_lib.fetch(address, ['config.json'])
  assert type(error.value) is kind


def test_a_download_that_breaks_is_completed_by_the_next(hub, monkeypatch):
  # The client waits before each try.
  monkeypatch.setattr('huggingface_hub.file_download.time.sleep', lambda _: 0)
  hub.breaks = {'big'}
  with pytest.raises(errors.AbsentError, match='same command again'):
    hub_lib.fetch(ADDRESS, ['*'])
  hub.breaks, hub.downloads = set(), []
  folder = hub_lib.fetch(ADDRESS, ['*'])
  assert (folder / 'big').read_bytes() == CONTENT['big']
  assert hub.downloads == ['big']


def test_processes_of_a_host_download_once(hub):
  code = f'from encdec_adapt.files import hub; hub.fetch("{ADDRESS}", ["*"])'
  command = [sys.executable, '-c', code]
  processes = [subprocess.Popen(command) for _ in range(3)]
  assert [process.wait(60) for process in processes] == [0, 0, 0]
  assert sorted(hub.downloads) == sorted(CONTENT)


def test_a_push_is_private_and_replaces_shards(hub, tmp_path):
  for shard in ('1', '2'):
    (tmp_path / 'model').mkdir(exist_ok=True)
    for name in ('config.json', f'{shard}.safetensors'):
      (tmp_path / 'model' / name).write_text(name)
    url = hub_lib.push(tmp_path / 'model', 'org/new', public=False)
    (tmp_path / 'model' / f'{shard}.safetensors').unlink()
  assert url == f'{hub.url}/org/new' and hub.private == {'org/new'}
  *_, content = hub.commits['org/new'].values()
  assert sorted(content) == ['2.safetensors', 'config.json']
  with pytest.raises(errors.UserError, match='is private; leave out --public'):
    hub_lib.push(tmp_path / 'model', 'org/new', public=True)
  with pytest.raises(errors.UserError, match='=a/b@main must be ORG/NAME'):
    hub_lib.push(tmp_path / 'model', 'a/b@main', public=False)
  with pytest.raises(errors.UserError, match='is public; give --public'):
    hub_lib.push(tmp_path / 'model', REPO, public=False)
