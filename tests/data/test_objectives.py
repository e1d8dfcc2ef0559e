"""Literal examples of every objective, and what holds for any document."""

from types import SimpleNamespace

import hypothesis
from hypothesis import strategies
import numpy as np
import pytest

from encdec_adapt.data import batch, objectives
from encdec_adapt.runtime import errors

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
  return [part.tolist() for part in pair]


def _windows(objective, size):
  return [
    (len(window), ends)
    for window, ends in objective.segments(np.arange(size, dtype=np.int32))
  ]


def test_causal_lm():
  objective = _make('causal_lm', 0, 4)
  # The document's last window has room for EOS.
  assert _windows(objective, 9) == [(4, False), (4, False), (1, True)]
  assert _windows(objective, 8) == [(4, False), (3, False), (1, True)]
  assert _windows(objective, 3) == [(3, True)]
  window = np.array([50, 51, 52], np.int32)
  assert _lists(objective(window, False, None)) == [[], [50, 51, 52]]
  assert _lists(objective(window, True, None)) == [[], [50, 51, 52, EOS]]


def test_prefix_lm_splits_exactly_in_half():
  objective = _make('prefix_lm', 4, 4)
  # BOS and 3 inputs, 4 targets; or 3 and EOS.
  assert _windows(objective, 20) == [(7, False), (7, False), (6, True)]
  assert objective.largest == 7
  window = np.arange(50, 57, dtype=np.int32)
  assert _lists(objective(window, False, None)) == [
    [50, 51, 52],
    [53, 54, 55, 56],
  ]
  assert _lists(objective(window[:6], True, None)) == [
    [50, 51, 52],
    [53, 54, 55, EOS],
  ]
  assert _lists(objective(window[:1], True, None)) == [[], [50, EOS]]
  paper = _make('prefix_lm', 4096, 4096)
  assert paper.largest == 8191


def test_prefix_lm_uniform_draws_every_split():
  objective = _make('prefix_lm_uniform', 5, 4)
  assert _windows(objective, 9) == [(4, False), (4, False), (1, True)]
  window = np.arange(50, 54, dtype=np.int32)
  rng = _rng()
  counts = np.zeros(4, int)
  for _ in range(600):
    inputs, targets = objective(window, False, rng)
    counts[len(inputs)] += 1
    assert [*inputs, *targets] == [50, 51, 52, 53]
  assert counts[0] == 0 and counts[1:].min() > 150
  assert _lists(objective(window[:1], True, rng)) == [[], [50, EOS]]
  paper = _make('prefix_lm_uniform', 627, 626)  # Ours has BOS inside.
  assert paper.largest == 626


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
    ('R', 3, 0.15, 512, 77, 26),
    ('R', 8, 0.15, 512, 77, 10),
    ('S', None, 0.25, 512, 128, 1),
    ('X', 3, 0.5, 512, 256, 85),
    ('X', 8, 0.5, 512, 256, 32),
    ('X', 64, 0.15, 512, 77, 1),
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


def test_ul2_hides_the_last_quarter_for_s():
  objective = _make('ul2', 16, 16)
  objective.denoisers = [objectives.Denoiser('S', None, 0.25)]
  window = np.arange(TEXT, TEXT + 8, dtype=np.int32)
  assert _lists(objective(window, True, _rng())) == [
    [S, 100, 101, 102, 103, 104, 105, A],
    [A, 106, 107, EOS],
  ]


def test_ul2_draws_its_denoisers_equally():
  objective = _make('ul2', 64, 64)
  window = np.arange(TEXT, TEXT + 64, dtype=np.int32)
  rng = _rng()
  modes = [objective(window, False, rng).inputs[0] for _ in range(1400)]
  assert modes.count(R) == pytest.approx(400, abs=80)
  assert modes.count(S) == pytest.approx(200, abs=60)
  assert modes.count(X) == pytest.approx(800, abs=80)


def test_ul2_windows_are_the_longest_that_fit():
  # (3, 0.15) keeps 0.85 of the tokens and adds 0.05 sentinels.
  assert _make('ul2', 8192, 8192, sentinel_policy='recycle').largest == 9100
  for encoder, decoder in ((16, 16), (40, 9), (9, 40), (100, 64)):
    objective = _make('ul2', encoder, decoder)

    def fits(size, objective=objective, encoder=encoder, decoder=decoder):
      inputs, targets = objective.sizes(size)
      return inputs + 1 <= encoder and targets <= decoder

    sizes = [size for size in range(1, 400) if fits(size)]
    assert sizes == list(range(1, objective.largest + 1))


def test_sentinels_run_out():
  with pytest.raises(
    errors.UserError,
    match='a window of 9100 tokens has up to 1517 spans .* only 96 sentinels.*'
    'shorter .they are 8192 and 8192.*"recycle"',
  ):
    _make('ul2', 8192, 8192)
  assert _make('ul2', 512, 512).largest == 567  # 94 spans


def test_recycled_sentinels_are_counted():
  objective = _make('ul2', 40, 40, sentinels=3, sentinel_policy='recycle')
  objective.denoisers = [objectives.Denoiser('X', 3, 0.5)]
  window = np.arange(TEXT, TEXT + 24, dtype=np.int32)  # 12 hidden in 4 spans
  pair = objective(window, False, _rng())
  used = [i for i in pair.inputs.tolist() if i < TEXT]
  assert used == [X, A, B, C, A]
  assert [i for i in pair.targets.tolist() if i < TEXT] == [A, B, C, A]
  assert objective.span_counts(pair) == (4, 2)
  three = objective(window[:18], False, _rng())
  assert objective.span_counts(three) == (3, 0)
  assert _make('causal_lm', 0, 8).span_counts(pair) == (0, 0)


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


@hypothesis.settings(deadline=None, max_examples=150)
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
  rng = _rng(seed)
  restored = []
  ended = False
  for window, ends in objective.segments(document):
    assert not ended
    ended = ends
    assert 1 <= len(window) <= objective.largest
    pair = objective(window, ends, rng)
    assert pair.inputs.dtype == pair.targets.dtype == np.int32
    batch.frame_row([pair], lengths)  # Raises if it does not fit.
    assert (pair.targets[-1] == EOS) == ends
    assert EOS not in pair.inputs and EOS not in pair.targets[:-1]
    if name == 'ul2':
      whole, hidden = _restore(pair)
      mode = {R: 'R', S: 'S', X: 'X'}[int(pair.inputs[0])]
      assert hidden in {
        denoiser.counts(len(window))[0]
        for denoiser in objectives.UL2_DENOISERS
        if denoiser.mode == mode
      }
      assert objective.span_counts(pair)[1] == 0
    else:
      whole = [*pair.inputs, *pair.targets[: len(pair.targets) - ends]]
    assert whole == window.tolist()
    restored += whole
  assert ended and restored == document.tolist()


def test_draws_come_from_the_generator_alone():
  window = np.arange(TEXT, TEXT + 64, dtype=np.int32)
  for name in ('prefix_lm_uniform', 'ul2'):
    objective = _make(name, 80, 80)
    assert objective.draws
    one, same, other = (
      _lists(objective(window, False, _rng(seed))) for seed in (0, 0, 1)
    )
    assert one == same != other


@pytest.mark.parametrize(
  'arguments, options, message',
  [
    (('mlm', 8, 8), {}, "objective 'mlm': it is one of"),
    (('causal_lm', 8, 8), {}, 'the encoder length is 8; it has to be 0'),
    (('prefix_lm', 0, 8), {}, 'the encoder length is 0; give one'),
    (('prefix_lm', 8, 1), {}, 'no window fits encoder length 8 and decoder'),
    (('ul2', 2, 8), {}, 'no window fits encoder length 2 and decoder'),
    (('ul2', 8, 8), {'sentinel_policy': 'reuse'}, "sentinel policy 'reuse'"),
  ],
)
def test_refuses(arguments, options, message):
  with pytest.raises(errors.UserError, match=message):
    _make(*arguments, **options)


def test_ul2_refuses_vocabularies_without_sentinels():
  bare = SimpleNamespace(path='v.model', eos=EOS, sentinels=[], mode_ids={})
  with pytest.raises(errors.UserError, match='has no pieces <unused0>'):
    objectives.make_objective('ul2', batch.Lengths(8, 8), bare)
