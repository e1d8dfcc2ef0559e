"""Documents, their order, ids, splits, caps and what is refused."""

import os

import pytest

from encdec_adapt.cli import errors
from encdec_adapt.data import text_sources
from encdec_adapt.files import paths


@pytest.fixture(scope='module')
def python_documents():
  return list(
    text_sources.open_source('python', max_bytes=1_500_000).documents()
  )


def _write(folder, **files):
  for name, text in files.items():
    path = folder / name.replace('__', '/')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def test_python_has_topics_docstrings_and_sources(python_documents):
  assert len(python_documents) > 30  # Modules without docstrings are not.
  assert all(document.text for document in python_documents)
  ids = []
  # Wants none, so that nothing is read.
  list(text_sources.open_source('python').documents(lambda _, i: ids.append(i)))
  assert len(set(ids)) == len(ids) > 500
  assert {'topic/for', 'ast.py::docstrings', 'json/decoder.py::source'} < set(
    ids
  )
  parts = {part for i in ids for part in i.partition('::')[0].split('/')}
  assert not parts & {'site-packages', 'test', 'tests', 'encodings'}


def test_python_is_the_same_again(python_documents):
  again = text_sources.open_source('python', max_bytes=1_500_000)
  assert list(again.documents()) == python_documents
  assert again.fingerprint() == again.fingerprint()
  assert again.fingerprint() != text_sources.open_source('python').fingerprint()


def test_docstrings_are_read_without_importing():
  source = '''"""Module."""
raise SystemExit('imported')
class A:
  """Class."""
  def f(self, x=1):
    """Method.

      Indented.
    """
async def g(): """Coroutine \\ud800."""
def silent(): pass
'''
  assert text_sources._docstrings(source) == (
    'Module.\n\n\nA\n\nClass.\n\n\nA.f(self, x=1)\n\nMethod.\n\nIndented.'
    '\n\n\ng()\n\nCoroutine \ufffd.\n'
  )
  assert text_sources._docstrings('print "Python 2"') == ''


def test_text_files_are_documents(tmp_path):
  _write(tmp_path, b__x='second\n', a='first \u00e9', empty='', c__d__e='3')
  source = text_sources.open_source(f'text:{tmp_path}/**')
  assert list(source.documents()) == [
    text_sources.Document('a', 'first \u00e9'),
    text_sources.Document('b/x', 'second\n'),
    text_sources.Document('c/d/e', '3'),
  ]


def test_jsonl_lines_are_documents(tmp_path):
  lines = '{"text": "one", "n": 1}\n\n{"text": "tw\\ud800o"}\n{"text": ""}\n'
  _write(tmp_path, **{'a::b.jsonl': lines})
  source = text_sources.open_source(f'jsonl:{tmp_path}/*.jsonl')
  assert list(source.documents()) == [
    text_sources.Document('a:_:b.jsonl:1', 'one'),
    text_sources.Document('a:_:b.jsonl:3', 'tw\ufffdo'),
  ]
  _write(tmp_path, **{'other.json': '{"body": "b", "text": "t"}'})
  other = text_sources.open_source(f'jsonl:{tmp_path}/*.json#body')
  assert [document.text for document in other.documents()] == ['b']


def test_files_of_a_bucket_are_as_those_of_a_disk(tmp_path, bucket, store):
  lines = '{"text": "one"}\n\n{"text": "two"}\n' + '{"text": "x"}\n' * 3
  files = {'b__x.jsonl': lines, 'a.jsonl': '{"text": "a"}', 'a.txt': 'not'}
  _write(tmp_path, **files, **{'b__c__d.jsonl': '{"text": "d"}'})
  paths.upload(tmp_path, paths.at(f'{bucket}/text'))
  paths.write(f'{bucket}/other/a.jsonl', b'{"text": "elsewhere"}')
  for glob in ('*.jsonl', '**/*.jsonl', 'b/x.jsonl', '?.txt', '[ab].*'):
    kind = 'jsonl' if 'jsonl' in glob else 'text'
    here, there = (
      list(text_sources.open_source(f'{kind}:{root}/{glob}').documents())
      for root in (tmp_path, f'{bucket}/text')
    )
    assert here and here == there, glob
  source = text_sources.open_source(f'jsonl:{bucket}/text/*.jsonl')
  first = source.fingerprint()
  requests = len(store.requests)
  assert source.fingerprint() == first
  assert len(store.requests) == requests
  paths.write(f'{bucket}/text/a.jsonl', b'{"text": "b"}')
  changed = text_sources.open_source(f'jsonl:{bucket}/text/*.jsonl')
  assert changed.fingerprint() != first
  with pytest.raises(errors.UserError, match='absent.* in its bucket'):
    text_sources.open_source(f'text:{bucket}/absent/*')
  with pytest.raises(errors.UserError, match=f'cannot be listed: {bucket}/a'):
    text_sources.open_source(f'text:{bucket}/a**/x')


def test_only_what_is_wanted_is_read(tmp_path):
  _write(tmp_path, a='a', b=b'\xff not UTF-8', c='c')
  source = text_sources.open_source(f'text:{tmp_path}/*')
  kept = source.documents(lambda index, name: index != 1)
  assert [document.id for document in kept] == ['a', 'c']
  with pytest.raises(errors.UserError, match='b, is not UTF-8 .byte 0'):
    list(source.documents())


@pytest.mark.parametrize(
  'caps, ids',
  [
    (dict(max_bytes=7), ['a', 'b']),
    (dict(max_bytes=6), ['a']),
    (dict(max_bytes=100), ['a', 'b', 'c']),
  ],
)
def test_caps_take_the_first(tmp_path, caps, ids):
  _write(tmp_path, a='\u00e9\u00e9', b='bbb', c='c')
  source = text_sources.open_source(f'text:{tmp_path}/*', **caps)
  assert [document.id for document in source.documents()] == ids
  # A cap means the same documents to every reader of a shard.
  shards = [
    [
      document.id
      for document in source.documents(lambda i, _, shard=shard: i % 2 == shard)
    ]
    for shard in (0, 1)
  ]
  assert sorted(sum(shards, [])) == ids


def test_fingerprint_follows_the_content(tmp_path):
  big = b'x' * 200_000
  _write(tmp_path, a=big, b='b')
  name = f'text:{tmp_path}/*'
  first = text_sources.open_source(name).fingerprint()
  assert text_sources.open_source(name).fingerprint() == first
  os.utime(tmp_path / 'a', (1, 1))
  assert text_sources.open_source(name).fingerprint() == first
  assert text_sources.open_source(name, max_bytes=9).fingerprint() != first
  for changed in (b'y' + big[1:], big[:-1] + b'y', big + b'x'):
    _write(tmp_path, a=changed)
    assert text_sources.open_source(name).fingerprint() != first


def test_split_is_by_id_and_by_group():
  ids = [f'document {i}' for i in range(2000)]
  held_out = {i for i in ids if text_sources.in_split(i, 'eval', 0.1, 0)}
  trained = {i for i in ids if text_sources.in_split(i, 'train', 0.1, 0)}
  assert held_out | trained == set(ids) and not held_out & trained
  assert 150 < len(held_out) < 250
  for i in ids[:100]:
    sides = {
      text_sources.in_split(f'{i}::{kind}', 'eval', 0.5, 0)
      for kind in ('docstrings', 'source')
    }
    assert sides == {text_sources.in_split(i, 'eval', 0.5, 0)}
  assert not any(text_sources.in_split(i, 'eval', 0.0, 0) for i in ids)
  assert all(text_sources.in_split(i, 'eval', 1.0, 0) for i in ids)


def test_a_list_of_contents_decides_what_python_holds_out(tmp_path):
  every = {d.id: d.text for d in text_sources.open_source('python').documents()}
  chosen = ('topic/for', 'json/decoder.py::source')
  path = tmp_path / 'held_out.txt'
  path.write_text(
    '\n'.join(text_sources.content_digest(every[name]) for name in chosen)
  )
  source = text_sources.open_source(f'python:{path}')
  held_out, trained = (
    {name for name in every if source.in_split(name, split, 0.5, 0)}
    for split in ('eval', 'train')
  )
  assert held_out == {*chosen, 'json/decoder.py::docstrings'}
  assert trained == set(every) - held_out
  assert (
    source.fingerprint() != text_sources.open_source('python').fingerprint()
  )
  with pytest.raises(errors.UserError, match='held-out .* cannot be read'):
    text_sources.open_source(f'python:{tmp_path}/absent')


def test_sources_without_text_are_refused(tmp_path):
  for name in ('pyhton', 'text:', 'http://x'):
    with pytest.raises(errors.UserError, match='the forms are python'):
      text_sources.open_source(name)
  with pytest.raises(errors.UserError, match='no file matches .*absent'):
    text_sources.open_source(f'text:{tmp_path}/absent*')
  _write(tmp_path, a='', b='')
  with pytest.raises(errors.UserError, match='has no text'):
    list(text_sources.open_source(f'text:{tmp_path}/*').documents())


@pytest.mark.parametrize(
  'line, message',
  [
    (b'{"text": ', "line 2, is not .* text in 'text'"),
    (b'{"body": "x", "id": 3}', "line 2, is not .* text in 'text'"),
    (b'{"text": 3}', 'line 2, is not .* .3.; name the field'),
    (b'["x"]', 'line 2, is not'),
    (b'\xff', 'line 2, is not UTF-8'),
  ],
)
def test_jsonl_refuses(tmp_path, line, message):
  _write(tmp_path, **{'a.jsonl': b'{"text": "fine"}\n' + line})
  with pytest.raises(errors.UserError, match=message):
    list(text_sources.open_source(f'jsonl:{tmp_path}/a.jsonl').documents())
