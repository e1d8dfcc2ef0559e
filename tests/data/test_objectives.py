"""Literal examples of every objective, and what holds for any document."""

from types import SimpleNamespace

import hypothesis
from hypothesis import strategies
import numpy as np
import pytest

from encdec_adapt.cli import errors
from encdec_adapt.data import batch, objectives
from tests import framing

EOS = 1
A, B, C = 5, 6, 7  # sentinels
R, S, X = 8, 9, 10
TEXT = 100  # first id of text


def _vocabulary(sentinels=96):
  return SimpleNamespace(
    path='v.model',
    eos=EOS,
    sentinels=[A, B, C] + list(range(11, 11 + sentinels - 3)),
    mode_ids={'R': R, 'S': S, 'X': X},
  )


def _make(name, encoder, decoder, *, sentinels=96, **options):
  return objectives.make_objective(
    name, batch.Lengths(encoder, decoder), _vocabulary(sentinels), **options
  )


def _rng(seed=0):
  return np.random.default_rng(seed)


def _lists(pair):
  return [part.tolist() for part in pair.parts]


def _pairs(objective, tokens, seed=0):
  """A document's pairs; window i has a generator of its own."""
  tokens = np.asarray(tokens, np.int32)
  return list(objective.pairs(tokens, lambda i: _rng([seed, i])))


def _windows(objective, size):
  """Sizes of the windows of a document, and which of them end it."""
  result = []
  for pair in _pairs(objective, np.full(size, TEXT)):
    tokens = np.concatenate(pair.parts)
    result.append((int((tokens == TEXT).sum()), bool(tokens[-1] == EOS)))
  return result


def _plan(objective, mode, mean, density):
  """UL2's plan for one of its denoisers."""
  wanted = objectives.Denoiser(mode, mean, density)
  (plan,) = (plan for plan in objective.plans if plan.denoiser == wanted)
  return plan


def test_causal_lm():
  objective = _make('causal_lm', 0, 4)
  # The document's last window has room for EOS.
  assert _windows(objective, 9) == [(4, False), (4, False), (1, True)]
  assert _windows(objective, 8) == [(4, False), (3, False), (1, True)]
  assert _windows(objective, 3) == [(3, True)]
  pairs = _pairs(objective, range(50, 56))
  assert [_lists(pair) for pair in pairs] == [
    [[], [50, 51, 52, 53]],
    [[], [54, 55, EOS]],
  ]


def test_prefix_lm_splits_exactly_in_half():
  objective = _make('prefix_lm', 4, 4)
  # BOS and 3 inputs, 4 targets; or 3 and EOS.
  assert _windows(objective, 20) == [(7, False), (7, False), (6, True)]
  pairs = _pairs(objective, range(50, 63))
  assert [_lists(pair) for pair in pairs] == [
    [[50, 51, 52], [53, 54, 55, 56]],
    [[57, 58, 59], [60, 61, 62, EOS]],
  ]
  assert [_lists(pair) for pair in _pairs(objective, [50])] == [[[], [50, EOS]]]


def test_prefix_lm_uniform_draws_every_split():
  objective = _make('prefix_lm_uniform', 5, 4)
  assert _windows(objective, 9) == [(4, False), (4, False), (1, True)]
  window = np.arange(50, 54, dtype=np.int32)
  rng = _rng()
  counts = np.zeros(4, int)
  for _ in range(600):
    plan = objective.draw_plan(rng)
    inputs, targets = objective.split(window, plan, rng).parts
    counts[len(inputs)] += 1
    assert [*inputs, *targets] == [50, 51, 52, 53]
  assert counts[0] == 0 and counts[1:].min() > 150
  assert [_lists(pair) for pair in _pairs(objective, [50])] == [[[], [50, EOS]]]


def test_corrupt_spans():
  window = np.arange(50, 60, dtype=np.int32)
  pair = objectives.corrupt_spans(
    window, np.array([2, 1, 3]), np.array([1, 2, 1]), np.array([A, B, C])
  )
  assert _lists(pair) == [
    [50, 51, A, 53, B, 56, 57, 58, C],
    [A, 52, B, 54, 55, C, 59],
  ]
  assert pair.inputs.dtype == pair.targets.dtype == np.int32
  pair = objectives.corrupt_spans(
    window[:1], np.array([0]), np.array([1]), np.array([A])
  )
  assert _lists(pair) == [[A], [A, 50]]


def test_partition_is_uniform():
  rng = _rng()
  assert objectives.partition(7, 1, None).tolist() == [7]
  assert objectives.partition(3, 3, rng).tolist() == [1, 1, 1]
  drawn = [tuple(objectives.partition(5, 3, rng)) for _ in range(1200)]
  ways = {way: drawn.count(way) for way in drawn}
  # 6 ways to write 5 as an ordered sum of three positive numbers.
  assert len(ways) == 6 and all(sum(way) == 5 for way in ways)
  assert min(ways.values()) > 150


@pytest.mark.parametrize(
  'mode, mean, density, length, noise, spans',
  [
    ('R', 8, 0.15, 512, 77, 10),
    ('S', None, 0.25, 512, 128, 1),
    ('X', 3, 0.5, 512, 256, 85),
    ('X', 64, 0.5, 512, 256, 4),
    ('R', 3, 0.15, 1, 1, 1),
    ('X', 3, 0.5, 2, 1, 1),
  ],
)
def test_denoiser_counts(mode, mean, density, length, noise, spans):
  denoiser = objectives.Denoiser(mode, mean, density)
  assert denoiser.counts(length) == (noise, spans)
  if length > 2:
    assert denoiser in objectives.UL2_DENOISERS


def test_ul2_draws_its_denoisers_equally():
  objective = _make('ul2', 64, 64)
  rng = _rng()
  drawn = [objective.draw_plan(rng).denoiser for _ in range(1400)]
  assert len(set(drawn)) == len(objectives.UL2_DENOISERS) == 7
  for denoiser in objectives.UL2_DENOISERS:
    assert drawn.count(denoiser) == pytest.approx(200, abs=60)
  (last,) = (p for p in objective.plans if p.denoiser.mode == 'S')
  window = np.arange(TEXT, TEXT + 8, dtype=np.int32)
  assert _lists(objective.split(window, last, rng)) == [
    [S, 100, 101, 102, 103, 104, 105, A],
    [A, 106, 107],
  ]
  window = np.arange(TEXT, TEXT + 64, dtype=np.int32)
  modes = {'R': R, 'S': S, 'X': X}
  for plan in objective.plans:
    inputs = objective.split(window, plan, rng).inputs
    assert inputs[0] == modes[plan.denoiser.mode]


@pytest.mark.parametrize('lengths', [(64, 64), (40, 9), (9, 40)])
def test_ul2_plans_the_longest_windows_that_fit(lengths):
  for plan in _make('ul2', *lengths).plans:
    for ends, longest in ((0, plan.last), (1, plan.inside)):
      fitting = []
      for size in range(1, 400):
        inputs, targets = plan.denoiser.sizes(size)
        # BOS before the inputs; EOS after the last targets.
        if inputs + 1 <= lengths[0] and targets + (1 - ends) <= lengths[1]:
          fitting.append(size)
      assert fitting == list(range(1, longest + 1))


def test_ul2_windows_vary_where_denoisers_fill_different_sides():
  # With 512 + 256, (3, 0.15) fills the inputs, and (3, 0.5) the targets.
  objective = _make('ul2', 512, 256)
  longest = {plan.denoiser: plan.inside for plan in objective.plans}
  rng = _rng()
  shares = []
  for _ in range(400):
    plan = objective.draw_plan(rng)
    assert 1 <= plan.last <= plan.inside
    shares.append(plan.inside / longest[plan.denoiser])
  assert 0.24 <= min(shares) < 0.27 and 0.73 < max(shares) <= 0.75
  assert np.mean(shares) == pytest.approx(0.5, abs=0.03)
  # Targets alone bind here: they fill a row with every denoiser.
  narrow = _make('ul2', 2048, 128, sentinel_policy='recycle')
  plans = {narrow.draw_plan(rng) for _ in range(200)}
  assert plans == set(narrow.plans)


def test_sentinels_run_out():
  with pytest.raises(
    errors.UserError,
    match='a window of 12285 tokens has up to 2047 spans .* only 96 sentinels'
    '.*8192 and 8192.*"recycle"',
  ):
    _make('ul2', 8192, 8192)
  # (3, 0.5) hides half of its tokens in spans of 3: 96 of them in 576.
  _make('ul2', 384, 384)
  with pytest.raises(errors.UserError, match='97 spans'):
    _make('ul2', 392, 392)


def test_recycled_sentinels_are_counted():
  objective = _make('ul2', 40, 40, sentinels=3, sentinel_policy='recycle')
  plan = _plan(objective, 'X', 3, 0.5)
  window = np.arange(TEXT, TEXT + 24, dtype=np.int32)  # 12 hidden in 4 spans
  pair = objective.split(window, plan, _rng())
  used = [i for i in pair.inputs.tolist() if i < TEXT]
  assert used == [X, A, B, C, A]
  assert [i for i in pair.targets.tolist() if i < TEXT] == [A, B, C, A]
  assert objective.shared_spans(pair) == 2
  three = objective.split(window[:18], plan, _rng())
  assert objective.shared_spans(three) == 0


def _restore(pair):
  """The window, from a pair with unique sentinels; and the hidden tokens."""
  inputs, targets = pair.inputs[1:].tolist(), pair.targets.tolist()
  if targets[-1] == EOS:
    targets.pop()
  spans = {}
  for token in targets:
    if token < TEXT:
      assert token not in spans
      spans[token] = []
      span = spans[token]
    else:
      span.append(token)
  window = []
  for token in inputs:
    window += spans.pop(token) if token < TEXT else [token]
  assert not spans
  return window, sum(token >= TEXT for token in targets)


@hypothesis.settings(deadline=None, max_examples=100)
@hypothesis.given(
  name=strategies.sampled_from(objectives.OBJECTIVES),
  size=strategies.integers(1, 400),
  encoder=strategies.integers(4, 96),
  decoder=strategies.integers(3, 96),
  seed=strategies.integers(0, 2**32),
)
def test_any_document(name, size, encoder, decoder, seed):
  lengths = batch.Lengths(0 if name == 'causal_lm' else encoder, decoder)
  objective = objectives.make_objective(name, lengths, _vocabulary())
  document = np.arange(TEXT, TEXT + size, dtype=np.int32)
  pairs = _pairs(objective, document, seed)
  restored = []
  for i, pair in enumerate(pairs):
    ends = i == len(pairs) - 1
    assert pair.inputs.dtype == pair.targets.dtype == np.int32
    batch.frame_row(
      [pair], lengths, framing.FRAMING
    )  # Raises if it does not fit.
    assert (pair.targets[-1] == EOS) == ends
    assert EOS not in pair.inputs and EOS not in pair.targets[:-1]
    if name == 'ul2':
      whole, hidden = _restore(pair)
      mode = {R: 'R', S: 'S', X: 'X'}[int(pair.inputs[0])]
      assert hidden in {
        denoiser.counts(len(whole))[0]
        for denoiser in objectives.UL2_DENOISERS
        if denoiser.mode == mode
      }
      assert objective.shared_spans(pair) == 0
    else:
      whole = [*pair.inputs, *pair.targets[: len(pair.targets) - ends]]
    assert whole
    restored += whole
  assert restored == document.tolist()


@pytest.mark.parametrize(
  'arguments, message',
  [
    (('causal_lm', 8, 8), 'the encoder length is 8; it has to be 0'),
    (('prefix_lm', 0, 8), 'the encoder length is 0; give one'),
    (('prefix_lm', 8, 1), 'no window fits encoder length 8 and decoder'),
    (('ul2', 2, 8), 'no window fits encoder length 2 and decoder'),
  ],
)
def test_refuses(arguments, message):
  with pytest.raises(errors.UserError, match=message):
    _make(*arguments)


def test_ul2_refuses_vocabularies_without_sentinels():
  bare = SimpleNamespace(path='v.model', eos=EOS, sentinels=[], mode_ids={})
  with pytest.raises(
    errors.UserError, match='has no sentinels and mode tokens'
  ):
    objectives.make_objective('ul2', batch.Lengths(8, 8), bare)
