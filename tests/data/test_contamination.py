"""Duplicates, and evaluation examples within training text."""

import json

from encdec_adapt.data import contamination, mixtures
from encdec_adapt.data.document_source import Document


def test_a_text_is_kept_where_it_comes_first(tmp_path):
  for name, text in (('a/1', 'x'), ('a/2', 'y'), ('a/3', 'x'), ('b/1', 'y')):
    path = tmp_path / f'{name}.txt'
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
  first, second = f'text:{tmp_path}/a/*.txt', f'text:{tmp_path}/b/*.txt'
  parts = mixtures.open_parts(f'{first} + {second}')
  assert contamination.duplicates(parts) == {
    first: frozenset({'3.txt'}),
    second: frozenset({'1.txt'}),
  }
  left_out = contamination.duplicates(parts)
  parts = mixtures.open_parts(f'{first} + {second}', left_out=left_out)
  draw = mixtures.Draw('train', 0.0, seed=0)
  found = [one.text for part in parts for one in part.documents(draw)]
  assert found == ['x', 'y']


def test_runs_of_thirteen_words_are_found():
  numbers = [f'word{i}' for i in range(40)]
  training = [Document('t', ' '.join(numbers))]
  evaluation = {
    'long': [
      Document('in', 'Before. ' + ', '.join(numbers[5:18]).upper() + '!'),
      Document('12 words', 'other ' + ' '.join(numbers[5:17]) + ' other'),
    ],
    'short': [Document('in', 'word3 word4'), Document('out', 'word4 word3')],
  }
  long, short = contamination.report(training, evaluation).splitlines()
  assert long.startswith('long: 1 of 2 examples') and long.endswith(': in')
  assert short.startswith('short: 1 of 2 examples') and short.endswith(': in')


def test_pairs_and_conversations_are_searched_as_text(tmp_path):
  words = [f'word{i}' for i in range(14)]
  text = '\n'.join(words)
  (tmp_path / 'a.jsonl').write_text(json.dumps({'q': 'x', 'a': text}))
  messages = [{'role': 'user', 'content': text}]
  (tmp_path / 'b.jsonl').write_text(json.dumps({'messages': messages}))
  (tmp_path / 'c.jsonl').write_text(json.dumps({'text': text}))
  names = ('pairs:{}/a.jsonl#q,a', 'chat:{}/b.jsonl', 'jsonl:{}/c.jsonl')
  plain = [
    part.source.plain(document)
    for name in names
    for part in mixtures.open_parts(name.format(tmp_path))
    for document in part.source.documents()
  ]
  assert [one.text for one in plain] == [f'x\n{text}', text, text]
