"""Rows of records as text."""

from types import SimpleNamespace

import numpy as np

from encdec_adapt.data.records import row_display
from encdec_adapt.objectives import embeddings, framing, objective_names
from encdec_adapt.tokenizers import vocabulary_pair


def test_special_tokens_weights_and_documents_are_shown():
  vocabulary = vocabulary_pair.open_vocabulary(vocabulary_pair.BYTES)
  encode, sentinel = vocabulary.encode, vocabulary.sentinels[0]
  pair = framing.Pair(
    np.append(encode('a\nb'), np.int32(sentinel)),
    encode('cde'),
    decoder_inputs=np.array([*encode('c'), vocabulary.mask, *encode('e')]),
    weights=np.array([1, 1, 0], np.float32),
    documents=('x.txt', 'y.txt'),
  )
  spec = SimpleNamespace(objectives=objective_names.parse('prefix_lm'))
  record_set = SimpleNamespace(read=lambda rows: [[pair]], spec=spec)
  opened = vocabulary_pair.Opened(vocabulary, vocabulary)
  plain = row_display.describe(record_set, opened, [7], colour=False)
  assert plain.splitlines() == [
    'row 7: 1 examples',
    ' segment 1, of x.txt, y.txt',
    '  inputs       4  a\\nb<unused0>',
    '  reads        3  c<mask>e',
    '  targets      3  cd{e}',
  ]
  lines = row_display.describe(
    record_set, opened, [7], colour=False, locate=lambda x: f'{x}, line 3'
  ).splitlines()
  assert lines[1] == ' segment 1, of x.txt, line 3, y.txt, line 3'
  coloured = row_display.describe(record_set, opened, [7], colour=True)
  assert '\033[36m<mask>\033[0m' in coloured
  assert 'cd\033[2me\033[0m' in coloured


def test_every_text_of_an_example_is_shown():
  vocabulary = vocabulary_pair.open_vocabulary(vocabulary_pair.BYTES)
  texts = embeddings.Texts(
    vocabulary.encode('abcdef'), np.array([2, 3, 1]), documents=('x:0',)
  )
  spec = SimpleNamespace(objectives=objective_names.parse('embed'))
  record_set = SimpleNamespace(read=lambda rows: [[texts]], spec=spec)
  opened = vocabulary_pair.Opened(vocabulary, vocabulary)
  shown = row_display.describe(record_set, opened, [0], colour=False)
  assert shown.splitlines()[2:] == [
    '  inputs       2  ab',
    '  inputs       3  cde',
    '  inputs       1  f',
  ]
