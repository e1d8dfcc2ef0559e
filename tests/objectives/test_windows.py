"""Language-model objectives, names and options, and what holds for all."""

import hypothesis
from hypothesis import strategies
import numpy as np
import pytest

from encdec_adapt.base import errors
from encdec_adapt.data.making import packing
from encdec_adapt.objectives import framing, objective_names
from tests import gemma_ids
from tests.objectives import objective_cases as cases
from tests.objectives.objective_cases import EOS, TEXT


def _windows(objective, size):
  """Sizes of the windows of a document, and which of them end it."""
  result = []
  for pair in cases.pairs(objective, np.full(size, TEXT)):
    tokens = np.concatenate(pair.parts)
    result.append((int((tokens == TEXT).sum()), bool(tokens[-1] == EOS)))
  return result


def test_causal_lm():
  objective = cases.make('causal_lm', 0, 4)
  # The document's last window has room for EOS.
  assert _windows(objective, 9) == [(4, False), (4, False), (1, True)]
  assert _windows(objective, 8) == [(4, False), (3, False), (1, True)]
  assert _windows(objective, 3) == [(3, True)]
  assert [cases.lists(p) for p in cases.pairs(objective, range(50, 56))] == [
    [[], [50, 51, 52, 53]],
    [[], [54, 55, EOS]],
  ]


def test_prefix_lm_splits_exactly_in_half():
  objective = cases.make('prefix_lm', 4, 4)
  # BOS and 3 inputs, 4 targets; or 3 and EOS.
  assert _windows(objective, 20) == [(7, False), (7, False), (6, True)]
  assert [cases.lists(p) for p in cases.pairs(objective, range(50, 63))] == [
    [[50, 51, 52], [53, 54, 55, 56]],
    [[57, 58, 59], [60, 61, 62, EOS]],
  ]
  assert cases.lists(cases.pairs(objective, [50])[0]) == [[], [50, EOS]]


@pytest.mark.parametrize('name', ['prefix_lm_uniform', 'reverse_prefix_lm'])
def test_uniform_splits_are_uniform(name):
  objective = cases.make(name, 6, 5)
  window = np.arange(50, 54, dtype=np.int32)
  rng = np.random.default_rng(0)
  counts = np.zeros(4, int)
  for _ in range(600):
    inputs, targets = objective.split(window, objective.plans[0], rng).parts
    first, second = inputs, targets
    if name == 'reverse_prefix_lm':
      first, second = second, first
    counts[len(first)] += 1
    assert [*first, *second] == [50, 51, 52, 53]
  assert counts[0] == 0 and counts[1:].min() > 150


def test_concatenated_windows_cross_documents():
  documents = [('a', [50, 51]), ('b', [60]), ('c', [70, 71, 72, 73])]
  found = [(name, np.array(ids, np.int32)) for name, ids in documents]
  made = list(cases.make('full_lm', 0, 4).examples(iter(found), None))
  assert [(pair.targets.tolist(), pair.documents) for pair in made] == [
    ([50, 51, EOS, 60], ('a', 'b')),
    ([EOS, 70, 71, 72], ('b', 'c')),
    ([73, EOS], ('c',)),
  ]
  apart = list(cases.make('causal_lm', 0, 4).examples(iter(found), None))
  assert [(pair.targets.tolist(), pair.documents) for pair in apart] == [
    ([50, 51, EOS], ('a',)),
    ([60, EOS], ('b',)),
    ([70, 71, 72], ('c',)),
    ([73, EOS], ('c',)),
  ]


@pytest.mark.parametrize(
  'lengths, window', [((626, 626), 624), ((627, 626), 625)]
)
def test_two_uniform_windows_of_a_stream_fill_a_row(lengths, window):
  objective = cases.make('prefix_lm_uniform:concatenate', *lengths)
  rng = np.random.default_rng(0)
  sizes = rng.integers(1, 3000, 200)
  documents = [
    (str(i), np.full(n, TEXT, np.int32)) for i, n in enumerate(sizes)
  ]
  pairs = list(
    objective.examples(documents, lambda key: np.random.default_rng(len(key)))
  )
  total = int(sizes.sum()) + len(sizes)  # Every document ends in EOS.
  parts = [[len(part) for part in pair.parts] for pair in pairs]
  assert [sum(part) for part in parts[:-1]] == [window] * (total // window)
  assert sum(parts[-1]) == total % window
  for first, second in zip(parts[:-1:2], parts[1:-1:2], strict=False):
    assert first == second[::-1] and min(first) >= 1
  rows = list(packing.pack_pairs(pairs, objective.lengths))
  assert len(rows) == -(-len(pairs) // 2)
  fill = [
    sum(pair.positions(objective.lengths)[side] for pair in pairs)
    / (len(rows) * length)
    for side, length in enumerate(lengths)
  ]
  assert min(fill) >= 0.97


def test_the_last_window_of_a_stream_is_split_within_it():
  objective = cases.make('prefix_lm_uniform:concatenate', 12, 10)
  for size in range(1, 20):
    document = ('a', np.full(size, TEXT, np.int32))
    for pairs in (
      list(
        objective.examples(
          [document], lambda _, seed=seed: np.random.default_rng(seed)
        )
      )
      for seed in range(5)
    ):
      row = framing.frame_row(pairs, objective.lengths, gemma_ids.FRAMING)
      assert row['weights'].sum() == sum(len(pair.targets) for pair in pairs)
      assert sum(len(part) for pair in pairs for part in pair.parts) == size + 1


def test_draws_are_keyed_by_document_or_window():
  keys = []

  def generator(name):
    keys.append(name)
    return np.random.default_rng(0)

  documents = [(name, np.full(7, TEXT, np.int32)) for name in 'ab']
  list(cases.make('bart', 7, 6).examples(documents, generator))
  assert keys == ['a#0', 'a#1', 'b#0', 'b#1']
  keys.clear()
  list(cases.make('bart:concatenate', 7, 6).examples(documents, generator))
  assert keys == ['#0', '#1', '#2']


def _restored(name, pair):
  """Text of a window, from pairs that keep all of it, as a sorted list."""
  # Otherwise targets are the window.
  tokens = np.concatenate(pair.parts) if name in _DIVIDED else pair.targets
  return sorted(tokens[tokens >= TEXT])


_DIVIDED = 'iid_denoising drop_tokens prefix_lm'.split()
_DIVIDED += 'span_corruption ul2 ul2_published ul2r t5gemma2'.split()
_DIVIDED += 'prefix_lm_uniform reverse_prefix_lm'.split()
# Some tokens of the text stand nowhere in what these make.
_REPLACED = ['replace_tokens', 'meap_prefix_lm']
_NAMES = [
  name
  for name, entry in objective_names.NAMES.items()
  if entry.maker.documents == 'text' and name != 'denoise'
]


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(
  name=strategies.sampled_from(_NAMES),
  sizes=strategies.lists(strategies.integers(1, 150), min_size=1, max_size=5),
  concatenate=strategies.booleans(),
  seed=strategies.integers(0, 2**32),
)
def test_nothing_is_lost_and_every_pair_fits(name, sizes, concatenate, seed):
  option = ':concatenate' * concatenate
  objective = cases.make_fitting(name + option, sentinel_policy='recycle')
  starts = np.cumsum([TEXT, *sizes])
  documents = [
    (str(i), np.arange(start, start + size, dtype=np.int32) % 400 + TEXT)
    for i, (start, size) in enumerate(zip(starts, sizes, strict=False))
  ]
  made = list(
    objective.examples(
      documents, lambda key: np.random.default_rng([seed, *key.encode()])
    )
  )
  text, ends, total = [], 0, 0
  for pair in made:
    assert {part.dtype for part in pair.parts} == {np.dtype(np.int32)}
    framing.frame_row([pair], objective.lengths, gemma_ids.FRAMING)
    text += _restored(name, pair)
    total += sum(map(len, pair.parts))
    ends += (np.concatenate([pair.targets]) == EOS).sum()
    if not objective.concatenate:
      ends_here = pair.targets[-1] == EOS
      assert (pair.targets == EOS).sum() == ends_here
  every = np.concatenate([tokens for _, tokens in documents])
  if name in _REPLACED:
    assert total >= len(every) + ends
  else:
    assert sorted(text) == sorted(every)
  if not objective.concatenate and objective.lengths.decoder:
    assert ends == len(sizes)
  documents_seen = [name for pair in made for name in pair.documents]
  assert list(dict.fromkeys(documents_seen)) == [
    str(i) for i in range(len(sizes))
  ]


@pytest.mark.parametrize(
  'arguments, message',
  [
    (('causal_lm', 8, 8), 'encoder_length is 8; it must be 0'),
    (('prefix_lm', 0, 8), 'encoder_length is 0; it must be above 0'),
    (('bert', 8, 8), 'decoder_length is 8; it must be 0'),
    (('prefix_lm', 8, 1), 'decoder_length=1; they must be at least 8 and 2$'),
    (('ul2', 2, 8), 'encoder_length=2 and .* at least 3 and 8$'),
    (('causal_lm', 0, 1), 'decoder_length=1; they must be at least 0 and 2$'),
    (('prefixlm', 8, 8), r"\(did you mean 'prefix_lm'\?\)"),
    (
      ('permuted_lm', 8, 8),
      'encdec_adapt 0.1.0 is the last version that reads',
    ),
    (('ul3', 8, 8), "objective is 'ul3'; .* causal_lm, full_lm"),
    (('bart:shares=0.2', 8, 8), "'shares=0.2' at column 6 is not an option"),
    (('bart_rotation:share=0.2', 8, 8), 'not an option of bart_rotation'),
    (
      ('bart:share=2', 8, 8),
      "'2' at column 12 must be as in share=.*between 0",
    ),
    (('causal_lm:concatenate=false', 0, 8), 'concatenate=false'),
    (('prefix_lm:shortest=-1', 8, 8), "'-1' at column 20 must be as in short"),
    (('denoise:R:3:0.15@inf', 8, 8), 'weight inf .*above 0'),
    (('prefix_lm_uniform:concatenate', 3, 8), 'must be at least 4 and 8'),
    (('pairs:separator="a', 8, 8), """'"a' at column 17 must be"""),
    (('bart:share=x', 8, 8), "'x' at column 12 must be"),
    (('meap:span=0', 0, 8), "'0' at column 11 must be as in span="),
    (('denoise:R:3', 8, 8), "'R:3' at column 1 must be MODE:MEAN:DENSITY"),
    (('denoise:Q:3:0.1', 8, 8), "'Q:3:0.1' at column 1 must be"),
    (('denoise:R:0.5:0.1', 8, 8), "'0.5' at column 3 must be a MEAN"),
    (('denoise:R:3:0.15@0', 8, 8), 'weight 0 .*above 0'),
  ],
)
def test_refuses(arguments, message):
  with pytest.raises(errors.UserError, match=message):
    cases.make(*arguments)


@pytest.mark.parametrize('concatenate', [False, True])
@pytest.mark.parametrize(
  'name', ['causal_lm', 'prefix_lm', 'denoise:R:3:0.15', 'bart', 'meap', 'bert']
)
def test_short_last_windows_are_dropped_and_counted(name, concatenate):
  mark = ',' if name[:4] == 'deno' else ':'
  option = f'{mark}shortest=8' + ',concatenate' * concatenate
  every = cases.make_fitting(name + option.replace('=8', '=0'), 32)
  kept = cases.make_fitting(name + option, 32)
  windows = every.plans[0].inner

  def examples(objective, size):
    documents = [('a', np.arange(TEXT, TEXT + size, dtype=np.int32))]
    return [
      cases.lists(pair)
      for pair in objective.examples(
        documents, lambda name: np.random.default_rng(len(name))
      )
    ]

  # EOS is the document's last token in a stream, and has a weight of its own.
  size = 2 * windows + 7 - concatenate
  assert examples(kept, size) == examples(every, size)[:-1]
  assert kept.counts['short_windows'] == 1
  assert examples(kept, size + 1) == examples(every, size + 1)
  assert kept.counts['short_windows'] == 1
  # A document that is short as a whole stays.
  assert examples(kept, 5) == examples(every, 5) != []
  assert kept.counts['short_windows'] == 1


def test_held_out_rows_of_meap_have_windows_of_the_same_lengths():
  objective = objective_names.parse_one('meap:share=0.2,shortest=8,concatenate')
  held_out = objective_names.for_evaluation(objective)
  assert held_out.text == 'causal_lm:concatenate,shortest=8'
  assert held_out.options == {'concatenate': False, 'shortest': 8}


@pytest.mark.parametrize(
  'name', ['full_lm', 'prefix_lm_uniform:concatenate', 'bart:concatenate']
)
def test_held_out_rows_never_cross_documents(name):
  objective = objective_names.parse_one(name)
  held_out = objective_names.for_evaluation(objective)
  # Earlier records are refused, which do.
  change = 'held-out windows do not cross documents'
  assert held_out.revisions == (*objective.revisions, change)
  lengths = framing.Lengths(0 if name == 'full_lm' else 12, 12)
  maker = held_out.make(lengths, cases.vocabulary())
  documents = [(name, np.full(5, TEXT, np.int32)) for name in 'abc']
  made = maker.examples(documents, lambda _: np.random.default_rng(0))
  assert [x.documents for x in made] == [('a',), ('b',), ('c',)]


def _shares(name):
  objective = objective_names.parse_one(name)
  return objective.maker.hidden_shares(name, objective.options)


@pytest.mark.parametrize(
  'name',
  [n for n in objective_names.NAMES if n != 'denoise' and _shares(n)],
)
def test_what_is_hidden_is_counted_and_is_what_is_asked(name):
  objective = cases.make_fitting(name, 200, sentinel_policy='recycle')
  cases.pairs(objective, np.arange(500, 1000).repeat(100))
  asked = _shares(name)
  counts = [
    [objective.counts[f'{noise}: {what}'] for noise in asked]
    for what in ('windows', 'tokens', 'hidden')
  ]
  windows, tokens, hidden = np.array(counts)
  if not windows.sum():
    return  # Permutation and rotation hide nothing.
  shares, rates = zip(*asked.values(), strict=True)
  np.testing.assert_allclose(windows / windows.sum(), shares, atol=0.1)
  wanted = [0.5 if rate is None else rate for rate in rates]
  np.testing.assert_allclose(hidden / tokens, wanted, atol=0.05)


@pytest.mark.parametrize(
  'text, names, separators',
  [
    ('pairs:separator=: ', ['pairs:separator=: '], [': ']),
    (r'pairs:separator="\n"', [r'pairs:separator="\n"'], ['\n']),
    (
      'chat:separator=", | " | pairs:separator=  | prefix_lm ',
      ['chat:separator=", | "', 'pairs:separator= ', 'prefix_lm'],
      [', | ', ' ', ''],
    ),
    (' ul2 | prefix_lm', ['ul2', 'prefix_lm'], ['', '']),
    ('pairs:separator=', ['pairs:separator='], ['']),
    ('pairs:too_long=drop ', ['pairs:too_long=drop'], ['']),
    ('denoise:S:uniform@4 ', ['denoise:S:uniform@4'], ['']),
  ],
)
def test_texts_of_options_are_verbatim_or_in_quotes(text, names, separators):
  parsed = objective_names.parse(text)
  assert [part.text for part in parsed] == names
  assert [x.options.get('separator', '') for x in parsed] == separators
