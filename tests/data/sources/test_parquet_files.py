"""Rows of parquet files as documents."""

import json

import pyarrow as pa
from pyarrow import parquet
import pytest

from encdec_adapt.base import errors
from encdec_adapt.data.sources import document_source, text_sources
from tests.data.sources.test_file_sources import read_shards

ROWS = [
  {
    'text': f'text {i}',
    'answer': f'answer {i}',
    'label': i,
    'messages': [{'role': 'user', 'content': f'turn {i}'}],
  }
  for i in range(50)
]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Two files of parquet, with several row groups, and the same JSON lines."""
  folder = tmp_path_factory.mktemp('rows')
  for name, rows in (('a', ROWS[:40]), ('b', ROWS[40:])):
    table = pa.Table.from_pylist(rows)
    parquet.write_table(table, folder / f'{name}.parquet', row_group_size=7)
    lines = ''.join(json.dumps(row) + '\n' for row in rows)
    (folder / f'{name}.jsonl').write_text(lines)
  (folder / 'a.yaml').write_text(
    'templates: {a: {name: a, jinja: "{{text}} ||| {{label}}"}}'
  )
  return folder


def test_rows_are_documents_of_one_shard(folder):
  name = f'parquet:{folder}/*.parquet'
  documents = read_shards(name)
  assert documents == [
    document_source.Document(
      f'a.parquet:{i}' if i < 40 else f'b.parquet:{i - 40}', row['text']
    )
    for i, row in enumerate(ROWS)
  ]
  for shards in (2, 3, 7, 64):
    assert read_shards(name, shards=shards) == documents
  capped = read_shards(name, max_bytes=(folder / 'a.parquet').stat().st_size)
  assert capped == documents[:40]
  assert read_shards(f'{name}#answer')[3].text == 'answer 3'


def test_a_shard_reads_its_row_groups(folder, monkeypatch):
  groups = []
  iter_batches = parquet.ParquetFile.iter_batches

  def record(self, size, row_groups, columns):
    groups.append((row_groups, columns))
    return iter_batches(self, size, row_groups, columns=columns)

  monkeypatch.setattr(parquet.ParquetFile, 'iter_batches', record)
  source = text_sources.open_source(f'parquet:{folder}/a.parquet')
  assert len(list(source.documents(None, 1, 4))) == 10
  assert groups == [([1], ['text']), ([2], ['text'])]


@pytest.mark.parametrize(
  'form',
  [
    'pairs:{}#text,answer',
    'labels:{}#text,label',
    'chat:{}',
    'prompts:{}#{folder}/a.yaml',
  ],
)
def test_pairs_labels_and_chats_are_those_of_json_lines(folder, form):
  of_lines, of_rows = (
    [
      document.text
      for document in read_shards(
        form.format(f'{folder}/*.{suffix}', folder=folder)
      )
    ]
    for suffix in ('jsonl', 'parquet')
  )
  assert of_rows == of_lines and len(of_rows) == 50


def test_bad_parquet_is_refused(folder, tmp_path):
  (tmp_path / 'broken.parquet').write_bytes(b'not parquet')
  for name, text in (('x', 'a'), ('y', 1)):
    table = pa.Table.from_pylist([{'text': text, 'n': 0}])
    parquet.write_table(table, tmp_path / f'{name}.parquet')
  for name, data in (('good', '\u00fc'.encode()), ('bad', b'\xff')):
    table = pa.table({'text': pa.array([b'x', data], pa.binary())})
    parquet.write_table(table, tmp_path / f'{name}.parquet')
  good = read_shards(f'parquet:{tmp_path}/good.parquet')
  assert [x.text for x in good] == ['x', '\u00fc']
  nulls = pa.table({'text': pa.array(['a', None], pa.string())})
  parquet.write_table(nulls, tmp_path / 'null.parquet')
  for name, words in (
    (
      f'parquet:{folder}/*.parquet#body',
      "no field 'body' but text, answer, la",
    ),
    (f'parquet:{tmp_path}/broken.parquet', 'broken.parquet is not a parquet'),
    (f'parquet:{tmp_path}/null.parquet', "row 1, has None in 'text', which"),
    (f'parquet:{tmp_path}/bad.parquet', "row 1, column 'text', is not UTF-8"),
  ):
    with pytest.raises(errors.UserError, match=words):
      read_shards(name)
  two = text_sources.open_source(f'parquet:{tmp_path}/[xy].parquet')
  with pytest.raises(
    errors.UserError,
    match="y.parquet has .*'text': 'int64'}, but .*x.parquet {'text': 'string",
  ):
    two.fingerprint()
  text_sources.open_source(f'labels:{tmp_path}/[xy].parquet#n,n').fingerprint()
