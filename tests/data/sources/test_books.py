"""The source `books`: passages of text files, split book by book."""

import json

import pytest

from encdec_adapt import config as config_lib
from encdec_adapt import configs
from encdec_adapt.base import errors
from encdec_adapt.configs import books, classification
from encdec_adapt.data.sources import text_sources
from encdec_adapt.objectives import framing, objective_names
from tests.objectives import objective_cases

MODULE = ('encdec_adapt.configs.books',)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp('books')
  for name, words in (('emma', 2000), ('ivanhoe', 500)):
    text = '\n'.join(f'{name} wrote {i}.' for i in range(words))
    (folder / f'{name}.txt').write_text(text)
  return folder


def _documents(folder, **options):
  source = text_sources.open_source(f'books:{folder}/*.txt', 0, MODULE)
  return source, list(source.documents(**options))


def test_passages_have_the_label_of_their_book(folder):
  source, documents = _documents(folder)
  assert source.labels == ['emma', 'ivanhoe']
  texts = {label: [] for label in source.labels}
  for document in documents:
    ((text,), label) = json.loads(document.text)
    assert 0 < len(text) <= 240 and document.id.startswith(f'{label}.txt::')
    texts[label].append(text)
  # Nothing is lost: lines are joined, and words stay whole.
  for label, passages in texts.items():
    text = (folder / f'{label}.txt').read_text()
    assert ' '.join(passages) == ' '.join(text.split())
  shards = [
    _documents(folder, shard_index=i, num_shards=3)[1] for i in range(3)
  ]
  assert sorted(x.id for part in shards for x in part) == sorted(
    x.id for x in documents
  )


def test_the_last_part_of_every_book_is_held_out(folder):
  source, documents = _documents(folder)
  for label in source.labels:
    ids = [x.id for x in documents if x.id.startswith(label)]
    held_out = [source.in_split(x, 'eval', 0.2, 0) for x in ids]
    first = held_out.index(True)
    assert held_out == [False] * first + [True] * (len(ids) - first)
    assert len(ids) - first == pytest.approx(0.2 * len(ids), abs=1)
    trained = [source.in_split(x, 'train', 0.2, 0) for x in ids]
    assert trained == [not x for x in held_out]


def test_an_example_is_read_by_classify(folder):
  source, documents = _documents(folder)
  labels = json.dumps('|'.join(source.labels))
  (objective,) = objective_names.parse(f'classify:labels={labels}')
  vocabulary = objective_cases.vocabulary(encode=lambda text: [*text.encode()])
  maker = objective.make(framing.Lengths(256, 0), vocabulary)
  last = documents[-1]
  (pair,) = maker.examples([(last.id, last.text)], None)
  assert pair.targets[-1] == 1 and pair.weights.tolist()[-2:] == [0, 1]


def test_a_classifier_of_books_is_configured_by_a_glob(folder):
  source = configs.path('decoders/small')
  config = classification.get_config(f'source={source},books={folder}/*.txt')
  (objective,) = config_lib.load(config, str(folder)).data.objectives
  assert objective.options['labels'] == ('emma', 'ivanhoe')
  assert config.data.source == f'books:{folder}/*.txt'


@pytest.mark.parametrize(
  'name, words',
  [
    ('books:{}/emma.txt', 'at least two files'),
    ('books:{}/*.md', 'no file matches'),
    ('books:{}/*.txt#lines', 'must be left out'),
  ],
)
def test_bad_names_are_refused(folder, name, words):
  with pytest.raises(errors.UserError, match=words):
    books.BookSource(name.format(folder)).labels  # noqa: B018
