"""Rows that the sources and objectives give, as stored in golden_records.json.

    python -m tests.data.making.test_golden_records

rewrites the file after an intended change of records.
"""

import contextlib
from importlib import metadata
import json
import pathlib
import sys
import tempfile

import numpy as np
import pytest

from encdec_adapt.base import errors
from encdec_adapt.data.making import materialization
from encdec_adapt.data.records import record_sets
from encdec_adapt.objectives import randomness
from encdec_adapt.tokenizers import vocabulary_pair
from tests import tiny

LONG = [pytest.mark.multiproc, pytest.mark.long]
TABLE = pathlib.Path(__file__).parent / 'golden_records.json'
FIELDS = dict(
  objective='prefix_lm_uniform',
  encoder_length=24,
  decoder_length=24,
  shards=2,
  seed=1,
  sentinels='recycle',
  eval_fraction=0.25,
)
# Source, and the fields of the record set that differ.
CASES = {
  'text': ('text:*.txt', {}),
  'lines': ('text:c.txt#lines', {'pack': False, 'max_rows': 9}),
  'pieces': ('text:long/book.txt', {'objective': 'prefix_lm'}),
  'windows': (
    'text:*.txt',
    {'objective': 'causal_lm:concatenate', 'encoder_length': 0},
  ),
  'objectives': ('text:*.txt', {'objective': 'prefix_lm | ul2'}),
  'jsonl': ('jsonl:rows.jsonl', {'objective': 'bart'}),
  'pairs': ('pairs:rows.jsonl#q,a', {'objective': 'pairs'}),
  'chat': ('chat:rows.jsonl', {'objective': 'chat'}),
  'preferences': (
    'preferences:rows.jsonl#q,a,b',
    {'objective': 'preferences'},
  ),
  'labels': (
    'labels:rows.jsonl#text,label',
    {
      'objective': 'classify:labels=no|yes',
      'encoder_length': 48,
      'decoder_length': 0,
    },
  ),
  'embed': (
    'embed:rows.jsonl#q,a,negatives',
    {'objective': 'embed', 'encoder_length': 48, 'decoder_length': 0},
  ),
  'parquet': ('parquet:rows.parquet#body', {}),
  'mixture': (
    'text:*.txt@1.5 + jsonl:rows.jsonl@0.5',
    {'objective': 'span_corruption'},
  ),
  'skip': ('jsonl:bad.jsonl', {'bad_documents': 'skip'}),
  'deduplicate': ('text:*.txt + text:copies/*.txt', {'deduplicate': True}),
  'max_bytes': ('text:*.txt + jsonl:rows.jsonl', {'max_bytes': 4000}),
}


def write_sources(folder: pathlib.Path) -> None:
  """Writes the files of all cases, and a vocabulary with turns of chats."""
  texts = tiny.text(60)
  for i, name in enumerate('abcdefghijkl'):
    text = f'{texts[i]}\n{texts[i + 12]}'
    (folder / f'{name}.txt').write_bytes(text.encode())
  (folder / 'a.txt').write_bytes(b'')
  (folder / 'b.txt').write_bytes(f'\ufeff{texts[0]}\0\0'.encode())
  (folder / 'c.txt').write_bytes('\r\n'.join(texts).encode())
  (folder / 'd.txt').write_bytes(
    '\u2581 <unused0>\u00e9\U0001f600 '.encode() * 9
  )
  for name in ('long', 'copies'):
    (folder / name).mkdir()
  (folder / 'long' / 'book.txt').write_text('\n\n'.join(tiny.text(200, seed=1)))
  (folder / 'copies' / 'e.txt').write_bytes((folder / 'e.txt').read_bytes())
  (folder / 'copies' / 'm.txt').write_text(texts[59])
  rows = [
    {
      # Half of a pair of surrogates, which only JSON's escapes can hold.
      'text': f'{text[: 20 + i]}\ud83d',
      'q': text[:30],
      'a': text[30 : 40 + i],
      'b': text[-20:],
      'label': ('no', 'yes')[i % 2],
      'negatives': [text[40:50]] * (i % 2),
      'messages': [
        {'role': 'user', 'content': text[:20]},
        {'role': 'assistant', 'content': text[20:30]},
        {'role': 'user', 'content': 'Why?'},
        {'role': 'assistant', 'content': text[30:35]},
      ],
    }
    for i, text in enumerate(texts)
  ]
  lines = [json.dumps(row) for row in rows]
  (folder / 'rows.jsonl').write_text('\n'.join(lines))
  bad = [b'{"text": "fine"}', b'{"body": 1}', b'{"text": "\xff"}', b'{']
  (folder / 'bad.jsonl').write_bytes(b'\n'.join(bad * 12))
  path = tiny.ROOT / 'configs' / 'decoders' / 'base' / 'tokenizer.json'
  tokenizer = json.loads(path.read_text())
  for i, name in enumerate(('<|im_start|>', '<|im_end|>')):
    token = {**tokenizer['added_tokens'][0], 'id': 2048 + i, 'content': name}
    tokenizer['added_tokens'].append(token)
  (folder / 'tokenizer.json').write_text(json.dumps(tokenizer))
  pyarrow = pytest.importorskip('pyarrow')
  from pyarrow import parquet

  table = pyarrow.table({'body': texts, 'other': range(60)})
  parquet.write_table(table, folder / 'rows.parquet', row_group_size=25)


def make(
  sources: pathlib.Path, folder: pathlib.Path, workers: int, passes: int = 2
) -> None:
  """Makes the records of all cases below a folder."""
  sets = [
    (
      record_sets.RecordSpec(
        source, split, **FIELDS | changes | {'passes': passes}
      ),
      folder / name / split,
    )
    for name, (source, changes) in CASES.items()
    for split in ('train', 'eval')
  ]
  # Random draws are keyed by names of sources, hence the relative paths.
  with contextlib.chdir(sources):
    choice = vocabulary_pair.Choice('tokenizer.json')
    materialization.materialize_sets(sets, choice, workers=workers)


def describe(folder: pathlib.Path, name: str) -> dict[str, dict]:
  """Returns counts and digests of the rows and shards of a case, by split."""
  result = {}
  for split in ('train', 'eval'):
    records = record_sets.RecordSet.open(folder / name / split)
    rows = [
      [[_plain(value) for value in example] for example in row]
      for row in records.read(range(len(records)))
    ]
    shards = [
      x['sha256'] for p in records.manifest['passes'] for x in p['shards']
    ]
    counts = [
      {key: value for key, value in part.items() if key != 'bytes'}
      for part in records.manifest['parts']
    ]
    result[split] = {
      'parts': counts,
      'first_losses': records.manifest['first_losses'],
      'rows': f'{randomness.digest(json.dumps(rows)):032x}',
      'shards': f'{randomness.digest(*shards):032x}',
    }
  return result


def _plain(value: object) -> object:
  """Returns a field of an example as JSON has it."""
  return value.tolist() if isinstance(value, np.ndarray) else value


@pytest.fixture(scope='module')
def sources(tmp_path_factory):
  folder = tmp_path_factory.mktemp('sources')
  write_sources(folder)
  return folder


@pytest.fixture(
  scope='module',
  # Workers, and the passes of each call: an added pass tokenises again.
  params=[(1, [2]), pytest.param((2, [1, 2]), marks=LONG)],
)
def records(sources, tmp_path_factory, request):
  folder = tmp_path_factory.mktemp('records')
  with pytest.MonkeyPatch.context() as patch:
    # Not even one that is installed is imported.
    for name in ('seqio', 'tensorflow', 'tensorflow_datasets'):
      patch.setitem(sys.modules, name, None)
    workers, calls = request.param
    for passes in calls:
      make(sources, folder, workers, passes)
  return folder


@pytest.mark.parametrize('name', CASES)
def test_records_are_what_they_were(records, name):
  table = json.loads(TABLE.read_text())
  description = describe(records, name)
  if metadata.version('array-record') != table['array-record']:
    for split in ('train', 'eval'):
      description[split]['shards'] = table['cases'][name][split]['shards']
  assert description == table['cases'][name]


@pytest.mark.parametrize(
  'source, objective, words',
  [
    ('jsonl:bad.jsonl', 'prefix_lm', "bad.jsonl, line 2, has no field 'text'"),
    ('text:bad.jsonl', 'prefix_lm', 'bad.jsonl, is not UTF-8 .byte 39'),
    ('pairs:rows.jsonl#q,label,c', 'pairs', "rows.jsonl, .*no field 'c'"),
    ('chat:rows.jsonl#a', 'chat', 'rows.jsonl, line 1, has .* a list'),
    (
      'labels:rows.jsonl#text,label',
      'classify:labels=no|maybe',
      "rows.jsonl, line 2: its label 'yes'",
    ),
    ('text:a.txt', 'prefix_lm', 'has no text'),
  ],
)
def test_errors_name_the_file_and_the_line(
  sources, tmp_path, monkeypatch, source, objective, words
):
  monkeypatch.chdir(sources)
  fields = FIELDS | {'objective': objective, 'shards': 1, 'eval_fraction': 0.0}
  fields['decoder_length'] = 24 * (not objective.startswith('classify'))
  spec = record_sets.RecordSpec(source, 'train', **fields)
  with pytest.raises(errors.UserError, match=words):
    materialization.materialize_sets(
      [(spec, tmp_path)], vocabulary_pair.Choice('tokenizer.json')
    )


if __name__ == '__main__':
  with tempfile.TemporaryDirectory() as root:
    sources, folder = (pathlib.Path(root) / x for x in ('sources', 'records'))
    sources.mkdir()
    write_sources(sources)
    make(sources, folder, workers=1)
    table = {
      'array-record': metadata.version('array-record'),
      'cases': {name: describe(folder, name) for name in CASES},
    }
  TABLE.write_text(json.dumps(table, indent=1) + '\n')
