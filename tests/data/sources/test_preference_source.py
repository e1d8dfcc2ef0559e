"""The forms of preferences, and the sets of shared/data where they are."""

import gzip
import json
import pathlib

import pytest

from encdec_adapt.base import errors
from encdec_adapt.data.sources import text_sources

DATA = pathlib.Path(__file__).resolve().parents[4] / 'shared' / 'data'


def _documents(folder, fields, *rows, skip=False):
  file = folder / 'rows.jsonl'
  file.write_text('\n'.join(map(json.dumps, rows)))
  source = text_sources.open_source(f'preferences:{file}#{fields}')
  source.skips_bad = skip
  documents = [json.loads(x.text) for x in source.documents()]
  return (documents, source.counts['bad_documents']) if skip else documents


USER = {'role': 'user', 'content': 'why'}
YES, NO = ({'role': 'assistant', 'content': text} for text in ('yes', 'no'))


def test_texts_with_margin(tmp_path):
  row = {'p': 'why', 'c': 'yes', 'r': 'no', 'm': 2}
  documents = _documents(tmp_path, 'p,c,r,margin=m', row)
  assert documents == [['yes', 'no', 'why', 2]]


def test_labels_choose_the_answer_and_ties_are_empty(tmp_path):
  rows = [
    {'p': 'why', 'a': 'yes', 'b': 'no', 'l': label}
    for label in (1, 2, 0, '2', 'tie')
  ]
  first, second = ['yes', 'no', 'why', None], ['no', 'yes', 'why', None]
  documents = _documents(tmp_path, 'p,a,b,label=l', *rows)
  assert documents == [first, second, [], second, []]


@pytest.mark.parametrize(
  'chosen, rejected',
  [
    ([USER, YES], [USER, NO]),
    ('\n\nHuman: why\n\nAssistant: yes', '\n\nHuman: why\n\nAssistant: no'),
  ],
)
def test_whole_dialogues_with_a_common_beginning(chosen, rejected, tmp_path):
  row = {'chosen': chosen, 'rejected': rejected}
  documents = _documents(tmp_path, 'chosen,rejected', row)
  assert documents == [['yes', 'no', [USER], None]]


@pytest.mark.parametrize(
  'chosen, rejected',
  [
    ({'from': 'gpt', 'value': 'yes'}, {'from': 'gpt', 'value': 'no'}),
    ([YES], [NO]),
    ('yes', 'no'),
  ],
)
def test_turns_after_a_conversation(chosen, rejected, tmp_path):
  row = {'m': [{'from': 'human', 'value': 'why'}], 'c': chosen, 'r': rejected}
  documents = _documents(tmp_path, 'm,c,r', row)
  assert documents == [['yes', 'no', [USER], None]]


@pytest.mark.parametrize(
  'fields, changes, message',
  [
    (
      'p,c,r',
      {'c': None},
      "rows.jsonl, line 2, has .* in 'c', which must be",
    ),
    ('p,c,r,margin=m', {}, "line 2, has 'x' in 'm', which must be a number"),
    ('p,c,r,label=l', {'l': 3}, 'line 2: l is .3.; it must be 1, 2, 0 or tie'),
    ('p,c,r', {'c': [YES, YES]}, 'line 2: the answer .* is not one message'),
    ('p,c,r', {'c': USER}, 'line 2: the answer .* is not one message'),
    ('p,c,r', {'p': [{'role': 'judge', 'content': ''}]}, 'line 2: the message'),
    (
      'c,r',
      {'c': [USER, YES, USER], 'r': [USER, NO]},
      'line 2: the dialogues of',
    ),
    ('c,r', {'c': [YES], 'r': [NO]}, 'line 2: the dialogues of 1 and 1 turns'),
    (
      'c,r',
      {'c': 'yes'},
      "line 2: the dialogue 'yes' does not begin with a turn",
    ),
  ],
)
def test_bad_lines_are_named_or_counted(fields, changes, message, tmp_path):
  row = {'p': 'why', 'c': 'yes', 'r': 'no', 'm': 'x', 'l': 1} | changes
  right = {'p': 'why', 'c': 'yes', 'r': 'no', 'm': 1, 'l': 1}
  if fields == 'c,r':
    right = {'c': [USER, YES], 'r': [USER, NO]}
  with pytest.raises(errors.UserError, match=message):
    _documents(tmp_path, fields, right, row)
  _, skipped = _documents(tmp_path, fields, right, row, skip=True)
  assert skipped == 1


@pytest.mark.parametrize(
  'fields', ['', 'c', 'p,c,r,x', 'p,c,r,score=m', ',c,r']
)
def test_fields_of_another_form_are_refused(fields, tmp_path):
  with pytest.raises(
    errors.UserError, match='must be fields as in preferences'
  ):
    _documents(tmp_path, fields, {})


@pytest.mark.skipif(not DATA.exists(), reason='needs ../shared/data')
def test_published_sets(tmp_path):
  with gzip.open(DATA / 'pref_hh_harmless/harmless-base_test.jsonl.gz') as file:
    rows = [json.loads(line) for line in file]
  documents, skipped = _documents(tmp_path, 'chosen,rejected', *rows, skip=True)
  # In five, a turn holds turns of its own, and a dialogue goes on behind it.
  assert (len(documents), skipped) == (2307, 5)
  rows = json.loads((DATA / 'pref_dpo_en_demo/dpo_en_demo.json').read_text())
  documents = _documents(tmp_path, 'conversations,chosen,rejected', *rows)
  assert len(documents) == 300
  assert {x['role'] for x in documents[0][2]} == {'user'}
  rows = json.loads((DATA / 'pref_pandalm_test/testset-v1.json').read_text())
  fields = 'instruction,response1,response2,label=annotator1'
  documents, skipped = _documents(tmp_path, fields, *rows, skip=True)
  assert sum(not x for x in documents) == 97
  assert len(documents) + skipped == 999
