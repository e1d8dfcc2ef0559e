"""Records of a bucket: copied once, verified, gone on with; and made."""

import pytest

from encdec_adapt import config as config_lib
from encdec_adapt.base import errors
from encdec_adapt.cli import command
from encdec_adapt.data.making import materialization
from encdec_adapt.data.records import record_sets
from encdec_adapt.files import paths
from tests import tiny


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  return tmp_path / 'cache'


@pytest.fixture
def put(bucket, tmp_path):
  """Records in a bucket; gives their folder and that they were copied from."""
  tiny.make_records(tmp_path / 'made', 24)
  folder = paths.at(f'{bucket}/records')
  here = tmp_path / 'made' / 'prefix_lm' / 'train'
  paths.upload(here, folder, record_sets.MANIFEST)
  return folder, here


def _reads(store, start):
  return [r for r in store.requests[start:] if r.endswith('.array_record')]


def test_read_from_a_copy_that_is_made_once(put, store, cache):
  folder, here = put
  wanted = record_sets.RecordSet.open(here)
  found = record_sets.RecordSet.open(folder)
  assert cache in found.folder.parents
  assert found.digests == wanted.digests
  copied, original = (
    [[p.targets.tolist() for p in row] for row in records.read(range(24))]
    for records in (found, wanted)
  )
  assert copied == original
  start = len(store.requests)
  record_sets.RecordSet.open(folder)
  assert _reads(store, start) == []


@pytest.mark.parametrize('damage', ['flip', 'part'])
def test_a_damaged_or_half_made_copy_is_made_whole(put, cache, damage):
  folder, here = put
  place = record_sets.RecordSet.open(folder).folder
  (shard,) = place.rglob('*.array_record')
  data = bytearray(shard.read_bytes())
  if damage == 'flip':
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
  else:
    shard.unlink()
    shard.with_name(shard.name + '.part').write_bytes(data[:100])
  assert len(record_sets.RecordSet.open(folder)) == 24
  (wanted,) = here.rglob('*.array_record')
  assert shard.read_bytes() == wanted.read_bytes()


def test_damage_in_the_bucket_is_refused(put):
  folder, here = put
  (shard,) = here.rglob('*.array_record')
  name = shard.relative_to(here).as_posix()
  paths.write(folder / name, shard.read_bytes()[:-1] + b'x')
  with pytest.raises(errors.UserError, match='another SHA-256'):
    record_sets.RecordSet.open(folder)
  (folder / name).unlink()
  with pytest.raises(errors.UserError, match='cannot be copied'):
    record_sets.RecordSet.open(folder)


def test_made_here_and_put_there(bucket, tmp_path, store, capsys):
  """A job with more passes adds them to what it finds in the bucket."""
  text = tmp_path / 'text'
  text.mkdir()
  for number, document in enumerate(tiny.text(60)):
    (text / f'{number}.txt').write_text(document)

  def settings(workdir, passes):
    values = command.parse(
      command.define_config,
      [
        *tiny.flags(tmp_path, 'prefix_lm'),
        f'--config.data.source=text:{text}/*.txt',
        '--config.data.folder=',
        '--config.data.vocabulary=',
        '--config.data.train_vocabulary=True',
        f'--config.data.passes={passes}',
        '--config.data.workers=1',
      ],
    )
    return config_lib.load(values.config, workdir).data

  local, there = (
    settings(str(tmp_path / 'local'), 1),
    settings(f'{bucket}/run', 1),
  )
  for data in (local, there):
    assert materialization.is_missing(data)
    materialization.materialize(data)
    assert not materialization.is_missing(data)
  opened = there.vocabularies.open()
  found, wanted = (
    materialization.open_sets(data, opened)[0] for data in (there, local)
  )
  assert found.digests == wanted.digests
  more = settings(f'{bucket}/run', 2)
  materialization.materialize(more)
  assert 'records: 1 of 3 shards to make' in capsys.readouterr().out
  found = materialization.open_sets(more, opened)[0]
  assert found.passes == 2 and found.digests[:1] == wanted.digests
