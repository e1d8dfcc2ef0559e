"""Mixtures: what a text names, and which documents a pass draws."""

import collections
import itertools

import pytest

from encdec_adapt.base import errors
from encdec_adapt.data.sources import document_source, mixtures, text_sources

COUNT = 300


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Two JSONL files of COUNT documents each, named by their line."""
  folder = tmp_path_factory.mktemp('text')
  for name in 'ab':
    lines = [f'{{"text": "{name} {i}"}}\n' for i in range(COUNT)]
    (folder / f'{name}.jsonl').write_text(''.join(lines))
  return folder


def _part(folder, weight, name='a'):
  return mixtures.Part(
    text_sources.open_source(f'jsonl:{folder}/{name}.jsonl'), weight
  )


def _texts(part, *shard, split='train', eval_fraction=0.0, pass_index=0):
  draw = mixtures.Draw(split, eval_fraction, seed=1, pass_index=pass_index)
  return [document.text for document in part.documents(draw, *shard)]


@pytest.mark.parametrize(
  'text, expected',
  [
    ('python', [('python', 1.0)]),
    ('python@2', [('python', 2.0)]),
    ('a@.5 +  tfds:c4:train[:10%]', [('a', 0.5), ('tfds:c4:train[:10%]', 1)]),
    ('text:/a+b/me@home/*.txt', [('text:/a+b/me@home/*.txt', 1.0)]),
    ('text:/me@home/*.txt@1e-2', [('text:/me@home/*.txt', 0.01)]),
  ],
)
def test_names_and_weights(text, expected):
  assert mixtures.parse(text) == expected


def test_quoted_paths_and_fields_may_have_dividers(tmp_path):
  folder = tmp_path / 'a + b#c,d @2'
  folder.mkdir()
  (folder / 'x.jsonl').write_text('{"text": "x", "a,b=": "y"}\n')
  path = f'"{folder}/x.jsonl"'
  texts = [f'jsonl:{path}', f'jsonl:{path}#"a,b="@2', f'text:{path}#lines']
  parts = mixtures.open_parts(' + '.join(texts))
  assert [part.weight for part in parts] == [1, 2, 1]
  assert [_texts(x)[0][:3] for x in parts] == ['x', 'y', '{"t']
  names = text_sources.named_fields(f'embed:"{folder},x=1"#q,p,scores="a,b="')
  assert names == {'scores'}
  with pytest.raises(errors.UserError, match='@2 cannot be read'):
    text_sources.open_source(f'python:"{folder}"')


@pytest.mark.parametrize(
  'text, message',
  [
    ('python@0', "'python@0' at column 1 has weight 0 after the @; .* above 0"),
    (
      'python@2 + python',
      "'python' at column 12 is named twice",
    ),
    ('python@two', "source 'python@two': not a source"),
    ('python + ', "source '': not a source"),
  ],
)
def test_what_is_not_understood_is_refused(text, message):
  with pytest.raises(errors.UserError, match=message):
    mixtures.open_parts(text)


def test_whole_weights_draw_all_documents_so_often(folder):
  texts = [f'a {i}' for i in range(COUNT)]
  assert _texts(_part(folder, 1.0)) == texts
  documents = _part(folder, 2.0).documents(mixtures.Draw('train', 0.0, 1))
  ids = {document.id: document.text for document in documents}
  assert list(ids.values()) == 2 * texts
  assert {'a.jsonl:0', 'a.jsonl:0::1'} < set(ids)


def test_fractions_draw_other_documents_in_each_pass(folder):
  first = _texts(_part(folder, 0.25))
  assert len(first) == len(set(first)) == pytest.approx(COUNT / 4, abs=25)
  assert first == _texts(_part(folder, 0.25))
  second = _texts(_part(folder, 0.25), pass_index=1)
  assert len(second) == pytest.approx(COUNT / 4, abs=25)
  # A quarter of the first are drawn again; all or none would be a pattern.
  repeated = len(set(first) & set(second)) / len(first)
  assert repeated == pytest.approx(0.25, abs=0.15)
  # More weight adds documents and leaves those that were drawn.
  assert set(first) < set(_texts(_part(folder, 0.5)))
  counts = collections.Counter(_texts(_part(folder, 1.25)))
  assert counts == collections.Counter([f'a {i}' for i in range(COUNT)] + first)


def test_shards_divide_what_is_drawn(folder):
  texts = _texts(_part(folder, 1.5))
  for shards in (2, 3):
    parts = [
      text for i in range(shards) for text in _texts(
        _part(folder, 1.5), i, shards
      )
    ]  # fmt: skip
    assert sorted(parts) == sorted(texts)


def test_held_out_documents_are_drawn_once_at_most(folder):
  options = dict(eval_fraction=0.4)
  held_out = _texts(_part(folder, 3.0), split='eval', **options)
  assert len(held_out) == len(set(held_out)) == pytest.approx(120, abs=30)
  train = _texts(_part(folder, 3.0), **options)
  assert not set(train) & set(held_out)
  assert len(train) + 3 * len(held_out) == 3 * COUNT
  fewer = _texts(_part(folder, 0.5), split='eval', **options)
  assert set(fewer) < set(held_out) and fewer


def test_documents_come_in_turn_and_all_of_them(folder):
  parts = [_part(folder, 0.1), _part(folder, 1.0, 'b')]
  draw = mixtures.Draw('train', 0.0, 1)
  texts = [doc.text for doc in mixtures.interleaved_documents(parts, draw)]
  few = _texts(parts[0])
  assert texts[: 2 * len(few) : 2] == few
  assert [text for text in texts if text[0] == 'b'] == _texts(parts[1])
  assert len(texts) == len(few) + COUNT


def test_the_fingerprint_is_of_all_sources_and_caps(folder):
  draw = mixtures.Draw('train', 0.1, seed=1)
  text = f'jsonl:{folder}/a.jsonl@2 + jsonl:{folder}/b.jsonl'
  prints = {
    mixtures.fingerprint(mixtures.open_parts(text, **caps), draw)
    for caps in ({}, {'max_bytes': 49}, {'max_bytes': 50})
  }
  assert len(prints) == 3
  parts = mixtures.open_parts(f'jsonl:{folder}/a.jsonl')
  assert mixtures.fingerprint(parts, draw) == parts[0].source.fingerprint()


def test_pieces_of_a_few_documents_are_held_out(tmp_path):
  text = ''.join(f'word {i} is here.\n\n' for i in range(3000))
  for name in 'abc':
    (tmp_path / f'{name}.txt').write_text(text.replace('word', name))
  (part,) = mixtures.open_parts(f'text:{tmp_path}/*.txt')
  train, held_out = (
    list(part.documents(mixtures.Draw(split, 0.1, seed=4)))
    for split in ('train', 'eval')
  )
  assert 0 < len(held_out) < 0.3 * len(train)
  assert all(
    doc.id.split(':')[0] in ('a.txt', 'b.txt', 'c.txt') for doc in train
  )
  assert min(len(doc.text) for doc in held_out) < 4200
  # Every word is on one side, and nothing is lost.
  characters = sorted(''.join(doc.text for doc in [*train, *held_out]))
  assert characters == sorted(
    ''.join(text.replace('word', name) for name in 'abc')
  )
  # Earlier records of few held-out documents, not of none, have whole ones.
  prints = [
    mixtures.fingerprint([part], mixtures.Draw('train', fraction, seed=1))
    for fraction in (0.9, 0.001)
  ]
  assert prints[0] != prints[1] == part.source.fingerprint()


@pytest.mark.parametrize(
  'line, end',
  [
    ('a short line\n', '\n'),
    ('a word, ' * 600 + '\n', '\n'),
    ('a word ', ' '),
    ('\u5b57', '\u5b57'),
  ],
)
def test_a_long_text_without_empty_lines_is_cut(tmp_path, line, end):
  text = line * (400_000 // len(line))
  (tmp_path / 'a.txt').write_text(text)
  (part,) = mixtures.open_parts(f'text:{tmp_path}/*.txt')
  pieces = {}
  for shard, split in itertools.product(range(3), ('train', 'eval')):
    draw = mixtures.Draw(split, 0.2, seed=4)
    documents = list(part.documents(draw, shard, 3))
    assert documents
    pieces |= {int(doc.id.split(':')[1]): doc.text for doc in documents}
  texts = [pieces[i] for i in range(1, len(pieces) + 1)]
  assert ''.join(texts) == text
  assert all(x.endswith(end) and 4000 <= len(x) < 12_000 for x in texts[:-1])


def test_texts_with_empty_lines_are_cut_there(tmp_path):
  # As they were before other texts were cut: records are made of these.
  parts = [
    'x' * 4000 + 'y\n' * 3999 + '\n',
    'z' * 9000 + '\n \n',
    'end\n' * 1500,
  ]
  (tmp_path / 'a.txt').write_text(''.join(parts))
  source = text_sources.open_source(f'text:{tmp_path}/*.txt')
  pieces = document_source.Pieces(source).documents()
  assert [doc.text for doc in pieces] == parts
