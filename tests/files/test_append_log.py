"""Append-only files in a bucket: parts and outages."""

import pytest

from encdec_adapt.files import append_log, paths


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
  monkeypatch.setattr(append_log, 'PART', 100)


def test_full_parts_are_uploaded_and_the_rest_by_flush(bucket, store):
  path = paths.at(bucket) / 'x'
  file = append_log.append(path)
  for number in range(25):
    file.write(b'%09d\n' % number)
  names = [store.key(f'{bucket}/x{end}') for end in ('', '-000001')]
  assert store.names(store.key(path)) == names
  assert append_log.read(path).splitlines() == [b'%09d' % n for n in range(20)]
  file.flush()
  assert len(append_log.read(path)) == 250
  file.write(b'lost\n')
  resumed = append_log.append(path)
  resumed.write(b'new\n')
  resumed.close()
  assert append_log.read(path).endswith(b'000000024\nnew\n')
  append_log.replace(path, b'all\n')
  assert store.names(store.key(path)) == names[:1]
  assert append_log.read(path) == b'all\n'


def test_an_outage_of_the_bucket_loses_nothing(bucket, monkeypatch, capsys):
  path = paths.at(bucket) / 'x'
  file = append_log.append(path)

  def refuse(path, data):
    raise OSError('no answer')

  with monkeypatch.context() as outage:
    outage.setattr(paths, 'write', refuse)
    for number in range(15):
      file.write(b'%09d\n' % number)
    with pytest.raises(OSError, match='no answer'):
      file.flush()
  assert 'x is written later: no answer' in capsys.readouterr().err
  monkeypatch.setattr(append_log, 'EVERY', 0.0)
  for number in range(15, 25):
    file.write(b'%09d\n' % number)
  assert append_log.read(path).splitlines() == [b'%09d' % n for n in range(25)]
