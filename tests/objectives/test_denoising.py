"""Denoisers: literal spans, counts, mixtures and policies for sentinels."""

import dataclasses

import numpy as np
import pytest

from encdec_adapt.base import errors
from encdec_adapt.objectives import denoising, framing, objective_names
from tests import gemma_ids
from tests.objectives import objective_cases as cases
from tests.objectives.objective_cases import TEXT, A, B, C, R, S, X


def _window(size):
  return np.arange(TEXT, TEXT + size, dtype=np.int32)


def test_corrupt_spans():
  window = np.arange(50, 60, dtype=np.int32)
  none, mode = np.zeros((2, 0), np.int32)[0], np.array([7], np.int32)
  # Visible runs of 2, 1 and 3 tokens, hidden ones of 1, 2 and 1, by their ends.
  ends = np.array([2, 3, 6]), np.array([1, 3, 4])
  for start in (none, mode):
    pair = denoising.corrupt_spans(window, *ends, np.array([A, B, C]), start)
    assert cases.lists(pair) == [
      [*start, 50, 51, A, 53, B, 56, 57, 58, C],
      [A, 52, B, 54, 55, C, 59],
    ]
  pair = denoising.corrupt_spans(
    window[:1], np.array([0]), np.array([1]), np.array([A]), none
  )
  assert cases.lists(pair) == [[A], [A, 50]]
  # As many spans as take the other way give the same.
  many = np.arange(400, dtype=np.int32)
  halves, names = np.arange(1, 201), np.arange(1000, 1200)
  pair = denoising.corrupt_spans(many, halves, halves, names, mode)
  assert pair.inputs.tolist() == [
    7,
    *(x for i in range(200) for x in (2 * i, 1000 + i)),
  ]
  assert pair.targets.tolist() == [
    x for i in range(200) for x in (1000 + i, 2 * i + 1)
  ]


@pytest.mark.parametrize('name', ['ul2', 't5gemma2', 'ul2r:concatenate'])
def test_the_text_of_every_denoiser_is_restored(name):
  objective = cases.make(name, 48, 48, sentinel_policy='recycle')
  document = np.arange(TEXT, TEXT + 600, dtype=np.int32)
  pairs = cases.pairs(objective, document)
  ids = dataclasses.replace(
    gemma_ids.SIDE,
    sentinels=tuple(cases.vocabulary().sentinels),
    modes=(R, S, X),
  )
  row = framing.frame_row(pairs, framing.Lengths(2000, 2000), gemma_ids.FRAMING)
  rows = framing.with_windows(framing.stack_rows([row]), ids)
  tokens, index = rows['window_tokens'][0], rows['window_index'][0]
  text = tokens[(tokens != gemma_ids.BOS) & (rows['window_segments'][0] > 0)]
  assert text.tolist() == [*document, gemma_ids.EOS]
  targets, predicted = row['targets'], index >= 0
  assert (tokens[index + 1] == targets)[predicted].all()
  segments = rows['window_segments'][0][index], row['decoder_segments']
  assert (segments[0] == segments[1])[predicted].all()
  hidden = np.isin(targets, ids.sentinels) | (row['decoder_segments'] == 0)
  assert (hidden == ~predicted).all() and predicted.sum() > 100


def test_partition_is_uniform():
  rng = np.random.default_rng(0)
  assert denoising.partition(7, 1, None).tolist() == [7]
  assert denoising.partition(3, 3, rng).tolist() == [1, 2, 3]
  drawn = [tuple(denoising.partition(5, 3, rng)) for _ in range(1200)]
  ways = {way: drawn.count(way) for way in drawn}
  # 6 ways to write 5 as an ordered sum of three positive numbers.
  assert len(ways) == 6 and all(way[-1] == 5 for way in ways)
  assert all(np.diff(way, prepend=0).min() >= 1 for way in ways)
  assert min(ways.values()) > 150


def test_normal_lengths_vary_less_than_random_ones():
  rng = np.random.default_rng(0)
  deviations = []
  for hide in (denoising.normal_partition, denoising.partition):
    drawn = np.concatenate(
      [np.diff(hide(800, 100, rng), prepend=0) for _ in range(50)]
    )
    assert drawn.min() >= 1 and drawn.sum() == 50 * 800
    deviations.append(drawn.std())
  normal, uniform = deviations
  assert normal == pytest.approx(3.5, abs=0.5) and uniform > 6
  assert denoising.normal_partition(4, 4, rng).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
  'denoiser, length, noise, spans',
  [
    ('R:8:0.15', 512, 77, 10),
    ('S:suffix:0.25', 512, 128, 1),
    ('X:3:0.5', 512, 256, 85),
    ('X:64:0.5', 512, 256, 4),
    ('R:3:0.15', 1, 1, 1),
    ('X:3:0.5', 2, 1, 1),
    ('-:3:0.15', 568, 85, 28),  # T5's window for 512 inputs (papers' 114/626).
  ],
)
def test_counts(denoiser, length, noise, spans):
  (parsed,) = denoising.parse_mixture(denoiser)
  assert parsed.counts(length) == (noise, spans)


@pytest.mark.parametrize(
  'name, shares',
  [
    ('ul2', {'R': 2 / 7, 'S': 1 / 7, 'X': 4 / 7}),
    ('ul2_published', {'R': 2 / 7, 'S': 1 / 7, 'X': 4 / 7}),
    ('ul2r', {'R': 0.25, 'S': 0.5, 'X': 0.25}),
    ('t5gemma2', {'R': 1 / 8, 'S': 4 / 8, 'X': 3 / 8}),
    ('denoise:R:3:0.15@3 + S:uniform', {'R': 0.75, 'S': 0.25}),
  ],
)
def test_mixtures_draw_by_weight(name, shares):
  objective = cases.make(name, 64, 64)
  rng = np.random.default_rng(0)
  drawn = [objective.draw_plan(rng).task.mode for _ in range(1600)]
  for mode, share in shares.items():
    assert drawn.count(mode) / 1600 == pytest.approx(share, abs=0.04)


def test_the_three_kinds_of_denoisers():
  rng = np.random.default_rng(0)

  def split(name, size):
    objective = cases.make(f'denoise:{name}', 64, 64)
    return cases.lists(objective.split(_window(size), objective.plans[0], rng))

  assert split('S:suffix:0.25', 8) == [
    [S, *range(TEXT, TEXT + 6), A],
    [A, TEXT + 6, TEXT + 7],
  ]
  inputs, targets = split('S:uniform', 8)
  assert inputs[0] == S and inputs[1:] + targets == _window(8).tolist()
  inputs, targets = split('X:3:0.5', 24)  # 12 hidden tokens in 4 spans
  assert inputs[0] == X and sum(token < TEXT for token in inputs) == 5
  assert len(targets) == 12 + 4 and targets[0] == A
  assert split('-:3:0.15', 20)[0][0] == TEXT  # No mode token.
  assert split('R:3:0.15:normal', 20)[0][0] == R


@pytest.mark.parametrize('name', ['ul2', 't5gemma2', 'span_corruption'])
def test_windows_are_the_longest_that_fit(name):
  for plan in cases.make(name, 64, 64).plans:
    for ends, longest in ((0, plan.inner), (1, plan.last)):
      fitting = [
        size
        for size in range(1, 400)
        if plan.task.sizes(size)[0] + 1 <= 64
        and plan.task.sizes(size)[1] + ends <= 64
      ]
      assert fitting == list(range(1, longest + 1))


def test_t5_window_of_512_inputs():
  # Wang et al. 2022: 512 + 114 for 568 raw tokens; T5 counts an EOS on both
  # sides, which stand here for BOS of the encoder and EOS of the targets.
  objective = cases.make('span_corruption', 512, 114)
  assert objective.plans[0].inner == 568 and objective.plans[0].last == 568
  with pytest.raises(errors.UserError) as refused:
    cases.make('span_corruption', 512, 100)
  assert 'decoder_length to at least 113' in str(refused.value)
  number = int(str(refused.value).split()[-1])
  cases.make('span_corruption', number, 100)
  with pytest.raises(errors.UserError, match='at least'):
    cases.make('span_corruption', number + 4, 100)


def test_sentinels_run_out():
  with pytest.raises(errors.UserError, match='2047 spans .* 96 sentinels'):
    cases.make('ul2', 8192, 8192)
  # (3, 0.5) hides half of its tokens in spans of 3: 96 of them in 576.
  cases.make('ul2', 384, 384)
  with pytest.raises(errors.UserError, match='97 spans'):
    cases.make('ul2', 392, 392)


@pytest.mark.parametrize(
  'policy, used, shared',
  [('recycle', [A, B, C, A], 2), ('single', [A, A, A, A], 4)],
)
def test_shared_sentinels_are_counted(policy, used, shared):
  objective = cases.make(
    'denoise:-:3:0.5', 40, 40, sentinels=3, sentinel_policy=policy
  )
  window = _window(24)  # 12 hidden in 4 spans
  pair = objective.split(window, objective.plans[0], np.random.default_rng(0))
  for part in pair.parts:
    assert [i for i in part.tolist() if i < TEXT] == used
  assert objective.counts['shared_sentinel_spans'] == shared


def test_limit_segment_ends_windows_before_sentinels_run_out():
  objective = cases.make(
    'ul2', 512, 512, sentinels=10, sentinel_policy='limit_segment'
  )
  for plan in objective.plans:
    assert plan.task.counts(plan.inner)[1] <= 10
  (dense,) = (x for x in objective.plans if x.task.label == 'X:3:0.5')
  assert dense.task.counts(dense.inner + 1)[1] == 11


def test_extend_vocabulary_uses_new_sentinels_only():
  name, lengths = 'denoise:-:3:0.5', framing.Lengths(40, 40)
  options = objective_names.parse_one(name).options
  needed = denoising.added_sentinels(options, 'extend_vocabulary', lengths)
  assert denoising.added_sentinels(options, 'recycle', lengths) == 0
  objective = cases.make(
    name, 40, 40, sentinels=3 + needed, sentinel_policy='extend_vocabulary'
  )
  plan = objective.plans[0]
  assert plan.task.counts(plan.inner)[1] == needed
  pair = objective.split(_window(plan.inner), plan, np.random.default_rng(0))
  used = [i for i in pair.inputs.tolist() if i < TEXT]
  assert used == list(range(11, 11 + needed))


def test_vocabularies_without_sentinels_are_refused():
  bare = cases.vocabulary(0, mode_ids={})
  for name in ('ul2', 'span_corruption'):
    with pytest.raises(errors.UserError, match='no sentinels and mode tokens'):
      objective_names.parse_one(name).make(framing.Lengths(64, 64), bare)
  objective_names.parse_one('denoise:-:uniform').make(
    framing.Lengths(64, 64), bare
  )
