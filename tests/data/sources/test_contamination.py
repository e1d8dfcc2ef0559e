"""Duplicates, and evaluation examples within training text."""

import json

from encdec_adapt.data.sources import contamination, mixtures, text_sources
from encdec_adapt.data.sources.document_source import Document


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
  texts = [doc.text for part in parts for doc in part.documents(draw)]
  assert texts == ['x', 'y']


def test_runs_of_thirteen_words_are_found(tmp_path):
  numbers = [f'word{i}' for i in range(40)]
  training = [Document('t', ' '.join(numbers))]
  long, short = tmp_path / 'long', tmp_path / 'short'
  long.write_text(
    f'other {" ".join(numbers[5:17])} other\n\n'
    f'Before. {", ".join(numbers[5:18]).upper()}!\n'
  )
  short.write_text('word3 word4\nword4 word3\n')
  sources = [
    text_sources.open_source(f'text:{file}#lines') for file in (long, short)
  ]
  assert contamination.report(training, sources) == '\n'.join(
    f'text:{file}#lines: 1 of 2 examples share 13 words with the training text:'
    f' {file}, line {line}'
    for file, line in ((long, 3), (short, 1))
  )


def test_pairs_and_conversations_are_searched_as_text(tmp_path):
  words = [f'word{i}' for i in range(14)]
  text = '\n'.join(words)
  (tmp_path / 'a.jsonl').write_text(json.dumps({'q': 'x', 'a': text}))
  messages = [{'role': 'user'}, {'role': 'user', 'content': text}]
  (tmp_path / 'b.jsonl').write_text(json.dumps({'messages': messages}))
  (tmp_path / 'c.jsonl').write_text(json.dumps({'text': text, 'tags': words}))
  names = (
    'pairs:{0}/a.jsonl#q,a',
    'chat:{0}/b.jsonl',
    'jsonl:{0}/c.jsonl',
    'labels:{0}/c.jsonl#tags,tags',
  )
  plain = [
    part.source.plain(document)
    for name in names
    for part in mixtures.open_parts(name.format(tmp_path))
    for document in part.source.documents()
  ]
  assert [doc.text for doc in plain] == [f'x\n{text}', text, text, text]
