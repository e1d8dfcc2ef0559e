"""Files as documents: ids, ranges of shards, caps and what is refused."""

import gzip
import itertools
import json
import os
import pathlib
import re
import tempfile
from unittest import mock

import hypothesis
from hypothesis import strategies
import pytest
import zstandard

from encdec_adapt.base import errors
from encdec_adapt.data.sources import document_source, text_sources
from encdec_adapt.files import decompression, paths, text_lines


def _write(folder, **files):
  for name, text in files.items():
    path = folder / name.replace('__', '/')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def test_text_files_are_documents(tmp_path):
  _write(tmp_path, b__x='second\n', a='first \u00e9', empty='', c__d__e='3')
  source = text_sources.open_source(f'text:{tmp_path}/**')
  assert list(source.documents()) == [
    document_source.Document('a', 'first \u00e9'),
    document_source.Document('b/x', 'second\n'),
    document_source.Document('c/d/e', '3'),
  ]


def test_names_that_are_not_utf8_have_ids(tmp_path):
  name = os.fsencode(tmp_path / 'caf') + b'\xe9.txt'
  with open(name, 'w') as file:
    file.write('text')
  source = text_sources.open_source(f'text:{tmp_path}/*.txt')
  [document] = source.documents()
  assert document.id.encode() == b'caf\\xe9.txt'


def test_jsonl_lines_are_documents(tmp_path):
  lines = '{"text": "one", "n": 1}\n\n{"text": "tw\\ud800o"}\n{"text": ""}\n'
  _write(tmp_path, **{'a::b.jsonl': lines})
  source = text_sources.open_source(f'jsonl:{tmp_path}/*.jsonl')
  assert list(source.documents()) == [
    document_source.Document('a:_:b.jsonl:0', 'one'),
    document_source.Document('a:_:b.jsonl:25', 'tw\ufffdo'),
  ]
  _write(tmp_path, **{'other.json': '{"body": "b", "text": "t"}'})
  source = text_sources.open_source(f'jsonl:{tmp_path}/*.json#body')
  assert [document.text for document in source.documents()] == ['b']


@pytest.mark.parametrize('empty', ['a', 'm', 'z'])
@pytest.mark.parametrize('shards', [1, 2, 5])
def test_an_empty_file_among_many_is_left_out(tmp_path, empty, shards):
  files = {f'{x}.jsonl': f'{{"text": "{x}"}}\n' * 3 for x in 'bcdn'}
  _write(tmp_path, **files, **{f'{empty}.jsonl': ''})
  for kind, count in (('jsonl', 12), ('text', 4)):
    source = text_sources.open_source(f'{kind}:{tmp_path}/*.jsonl')
    documents = [
      document.id
      for shard in range(shards)
      for document in source.documents(None, shard, shards)
    ]
    assert len({*documents}) == len(documents) == count
    assert not any(x.startswith(empty) for x in documents)


def test_documents_are_located_by_their_lines(tmp_path):
  _write(tmp_path, **{'a.jsonl': '{"text": "b"}\n\n{"text": "c"}\n', 'd': 'e'})
  source = text_sources.open_source(f'jsonl:{tmp_path}/*.jsonl')
  assert [source.locate(x.id) for x in source.documents()] == [
    f'{tmp_path}/a.jsonl, line 1',
    f'{tmp_path}/a.jsonl, line 3',
  ]
  # Documents of another source, and a piece of a document.
  assert source.locate('f.jsonl:3') == 'f.jsonl:3'
  whole = text_sources.open_source(f'text:{tmp_path}/d')
  assert [whole.locate(x) for x in ('d', 'd:2')] == [f'{tmp_path}/d', 'd:2']


def test_files_of_a_bucket_are_as_those_of_a_disk(tmp_path, bucket, store):
  lines = '{"text": "one"}\n\n{"text": "two"}\n' + '{"text": "x"}\n' * 3
  files = {'b__x.jsonl': lines, 'a.jsonl': '{"text": "a"}', 'a.txt': 'not'}
  _write(tmp_path, **files, **{'b__c__d.jsonl': '{"text": "d"}'})
  paths.upload(tmp_path, paths.at(f'{bucket}/text'))
  paths.write(f'{bucket}/other/a.jsonl', b'{"text": "elsewhere"}')
  for glob in ('*.jsonl', '**/*.jsonl', 'b/x.jsonl', '?.txt', '[ab].*'):
    kind = 'jsonl' if 'jsonl' in glob else 'text'
    on_disk, in_bucket = (
      list(text_sources.open_source(f'{kind}:{root}/{glob}').documents())
      for root in (tmp_path, f'{bucket}/text')
    )
    assert on_disk and on_disk == in_bucket, glob
  source = text_sources.open_source(f'jsonl:{bucket}/text/*.jsonl')
  first = source.fingerprint()
  requests = len(store.requests)
  assert source.fingerprint() == first
  assert len(store.requests) == requests
  paths.write(f'{bucket}/text/a.jsonl', b'{"text": "b"}')
  changed = text_sources.open_source(f'jsonl:{bucket}/text/*.jsonl')
  assert changed.fingerprint() != first
  with pytest.raises(errors.UserError, match='no file matches .*absent'):
    text_sources.open_source(f'text:{bucket}/absent/*')
  with pytest.raises(errors.UserError, match=f'cannot be listed: {bucket}/a'):
    text_sources.open_source(f'text:{bucket}/a**/x')


def test_only_what_is_wanted_is_read(tmp_path):
  _write(tmp_path, a='a', b=b'\xff not UTF-8', c='c')
  source = text_sources.open_source(f'text:{tmp_path}/*')
  documents = source.documents(lambda name: name != 'b')
  assert [document.id for document in documents] == ['a', 'c']
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
    [document.id for document in source.documents(None, shard, 2)]
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


@pytest.mark.parametrize(
  'line, message',
  [
    (b'{"text": ', 'line 2, is not a JSON object .JSONDecodeError'),
    (b'{"body": "x", "id": 3}', "line 2, has no field 'text' but body, id;"),
    (b'{"text": 3}', "line 2, has 3 in 'text', which must be text;"),
    (b'["x"]', 'line 2, is not a JSON object'),
    (b'\xff', 'line 2, is not UTF-8'),
  ],
)
def test_jsonl_refuses(tmp_path, line, message):
  _write(tmp_path, **{'a.jsonl': b'{"text": "fine"}\n' + line})
  with pytest.raises(errors.UserError, match=message):
    list(text_sources.open_source(f'jsonl:{tmp_path}/a.jsonl').documents())


def test_only_the_byte_order_mark_of_a_file_is_dropped(tmp_path):
  file = tmp_path / 'a.txt'
  file.write_text('\ufeffx\n\ufeffx\n\n\ufeff\n')
  for unit, texts in (
    ('', ['x\n\ufeffx\n\n\ufeff\n']),
    ('#paragraphs', ['x\n\ufeffx', '\ufeff']),
    ('#lines', ['x', '\ufeffx', '\ufeff']),
  ):
    documents = text_sources.open_source(f'text:{file}{unit}').documents()
    assert [doc.text for doc in documents] == texts
  lines = text_lines.read(str(file)).values()
  assert '|'.join(lines) == 'x|\ufeffx||\ufeff'
  # In a string U+FEFF is text; outside of one it is not JSON.
  file.write_text('\ufeff{"text": "\ufeffx"}\n\ufeff{"text": "x"}')
  templates = tmp_path / 'a.yaml'
  templates.write_text('templates: {a: {name: a, jinja: "{{text}} ||| b"}}')
  for name, text in (
    (f'jsonl:{file}', '\ufeffx'),
    (f'prompts:{file}#{templates}', '["\ufeffx", "b"]'),
  ):
    documents = text_sources.open_source(name).documents()
    assert next(documents).text == text
    with pytest.raises(errors.UserError, match='line 2.* BOM'):
      next(documents)
  with pytest.raises(errors.UserError, match='line 2 is not JSON .* BOM'):
    text_lines.read_json(str(file))


def test_sources_of_pairs_and_conversations(tmp_path):
  file = tmp_path / 'a.jsonl'
  file.write_text('{"q": "\u00e9?", "a": "b", "turns": []}\n')
  (pair,) = text_sources.open_source(f'pairs:{file}#q,a').documents()
  assert json.loads(pair.text) == ['\u00e9?', 'b'] and pair.id == 'a.jsonl:0'
  (chat,) = text_sources.open_source(f'chat:{file}#turns').documents()
  assert json.loads(chat.text) == []
  # Further fields are kept, and are no text of the document.
  source = text_sources.open_source(f'pairs:{file}#q,a,turns')
  (pair,) = source.documents()
  assert json.loads(pair.text) == ['\u00e9?', 'b', {'turns': []}]
  assert source.plain(pair).text == '\u00e9?\nb'
  (chat,) = text_sources.open_source(f'chat:{file}#turns,a').documents()
  assert json.loads(chat.text) == [[], {'a': 'b'}]
  for name, words in (
    (f'pairs:{file}#q', 'must be fields as in pairs:'),
    (f'pairs:{file}#q,b', "a.jsonl, line 1, has no field 'b' but q,"),
    (f'pairs:{file}#q,a,tests', "line 1, has no field 'tests' but"),
    (f'chat:{file}', "line 1, has no field 'messages' but"),
    (f'pairs:{file}#turns,a', r"has \[\] in 'turns', which must be text"),
  ):
    with pytest.raises(errors.UserError, match=words):
      list(text_sources.open_source(name).documents())


def test_paragraphs_and_lines_of_a_file_are_documents(tmp_path):
  file = tmp_path / 'a.txt'
  file.write_text('\n one\ntwo \n \n\nthree\n\n\nfour\n')

  def texts(unit):
    source = text_sources.open_source(f'text:{file}#{unit}')
    return [(doc.id, doc.text) for doc in source.documents()]

  assert texts('paragraphs') == [
    ('a.txt:1', ' one\ntwo '),
    ('a.txt:14', 'three'),
    ('a.txt:22', 'four'),
  ]
  assert [text for _, text in texts('lines')] == [
    ' one',
    'two ',
    'three',
    'four',
  ]
  with pytest.raises(errors.UserError, match='paragraphs or lines'):
    text_sources.open_source(f'text:{file}#words')


COMPRESS = {'': bytes, '.gz': gzip.compress, '.zst': zstandard.compress}


def test_compressed_files_are_as_those_that_are_not(tmp_path):
  lines = ['{"text": "first"}\n', '{"text": "\u00e9"}\n', '{"body": 1}\n']
  for suffix, compress in COMPRESS.items():
    file = tmp_path / f'a{suffix}'
    # Several streams in a row are a file, too.
    file.write_bytes(b''.join(compress(line.encode()) for line in lines))
    source = text_sources.open_source(f'jsonl:{file}')
    documents = source.documents()
    found = [next(documents), next(documents)]
    assert [(doc.id, doc.text) for doc in found] == [
      (f'a{suffix}:0', 'first'),
      (f'a{suffix}:18', '\u00e9'),
    ]
    with pytest.raises(errors.UserError, match='line 3, has no field'):
      next(documents)
    (text,) = text_sources.open_source(f'text:{file}').documents()
    assert text.text == ''.join(lines)
    read = text_lines.read(str(file)).values()
    assert list(read) == [line.rstrip() for line in lines]
    for data, words in (
      (compress(lines[0].encode())[:-3], 'ends in the middle'),
      (b'text\n', 'is damaged, or not compressed as its name says'),
    ):
      file.write_bytes(data)
      with pytest.raises(errors.UserError, match=words if suffix else 'json'):
        list(text_sources.open_source(f'jsonl:{file}').documents())


def read_shards(name, max_bytes=0, shards=1):
  """The documents of all shards, each opened by itself."""
  documents = []
  for i in range(shards):
    source = text_sources.open_source(name, max_bytes)
    documents += source.documents(None, i, shards)
  return documents


@hypothesis.settings(deadline=None, max_examples=150)
@hypothesis.given(
  files=strategies.lists(
    strategies.text('a\ufeff \r\n\t', max_size=60), min_size=1, max_size=4
  ),
  unit=strategies.sampled_from(['', '#lines', '#paragraphs']),
  suffix=strategies.sampled_from(sorted(COMPRESS)),
  shards=strategies.integers(2, 12),
  max_bytes=strategies.integers(1, 80),
)
def test_shards_divide_files(files, unit, suffix, shards, max_bytes):
  with (
    tempfile.TemporaryDirectory() as folder,
    # Several blocks in these short files.
    mock.patch.object(decompression, '_BLOCK', 7),
  ):
    for i, text in enumerate(files):
      data = COMPRESS[suffix](b'.' + text.encode())
      (pathlib.Path(folder) / f'{i}{suffix}').write_bytes(data)
    name = f'text:{folder}/*{unit}'
    documents = read_shards(name)
    # No document is lost, in two shards or elsewhere named otherwise.
    assert read_shards(name, shards=shards) == documents
    assert len({doc.id for doc in documents}) == len(documents)
    ends = {'': r'\Z', '#lines': '\n', '#paragraphs': r'\n\s*\n'}[unit]
    parts = itertools.chain(*(re.split(ends, '.' + text) for text in files))
    stripped = [doc.text.strip() for doc in documents]
    assert stripped == [part.strip() for part in parts if part.strip()]
    try:
      capped = read_shards(name, max_bytes)
    except errors.UserError:
      capped = []
    pairs = list(zip(capped, documents, strict=False))
    assert all(x.id == y.id and y.text.startswith(x.text) for x, y in pairs)
    if not suffix:
      assert sum(len(doc.text.encode()) for doc in capped) <= max_bytes
    assert read_shards(name, max_bytes, shards) == capped


def test_a_shard_reads_its_range_of_a_bucket(tmp_path, bucket, store):
  lines = [json.dumps({'text': f'{i} ' * 200_000}) for i in range(30)]
  paths.write(f'{bucket}/a.jsonl', '\n'.join(lines).encode())
  name = f'jsonl:{bucket}/a.jsonl'
  documents = read_shards(name)
  assert read_shards(name, shards=4) == documents and len(documents) == 30
