"""Literal examples of the noises of T5, BART, BERT and MEAP."""

import numpy as np
import pytest

from encdec_adapt.base import errors
from encdec_adapt.objectives import framing, objective_names
from tests.objectives import objective_cases as cases
from tests.objectives.objective_cases import EOS, MASK, STOP, TEXT

WINDOW = np.arange(TEXT, TEXT + 40, dtype=np.int32)


def _split(name, window=WINDOW, seed=0, length=128):
  objective = cases.make_fitting(name, length)
  rng = np.random.default_rng(seed)
  return objective.split(np.asarray(window, np.int32), objective.plans[0], rng)


@pytest.mark.parametrize(
  'name, hidden', [('mask_tokens', 6), ('bart_masking:share=0.5', 20)]
)
def test_masked_tokens(name, hidden):
  pair = _split(name)
  assert pair.targets.tolist() == WINDOW.tolist()
  masked = pair.inputs == MASK
  assert masked.sum() == hidden
  assert (pair.inputs[~masked] == WINDOW[~masked]).all()


def test_deleted_and_dropped_tokens():
  deleted, dropped = _split('bart_deletion'), _split('drop_tokens')
  assert deleted.targets.tolist() == WINDOW.tolist()
  assert len(deleted.inputs) == 34 and set(deleted.inputs) < set(WINDOW)
  assert sorted([*dropped.inputs, *dropped.targets]) == WINDOW.tolist()
  assert dropped.targets.tolist() == sorted(dropped.targets)
  assert len(dropped.targets) == 6


def test_adjacent_hidden_tokens_share_a_sentinel():
  # Two of three tokens are hidden: literal results by which one stays.
  a, b, c = TEXT, TEXT + 1, TEXT + 2
  first, second = cases.A, cases.B
  found = {
    str(cases.lists(_split('iid_denoising:share=0.6', WINDOW[:3], seed)))
    for seed in range(30)
  }
  assert found == {
    str([[first, c], [first, a, b]]),
    str([[first, b, second], [first, a, second, c]]),
    str([[a, first], [first, b, c]]),
  }


def test_rotated_and_replaced_tokens():
  rotated, replaced = _split('bart_rotation'), _split('replace_tokens')
  at = WINDOW.tolist().index(rotated.inputs[0])
  assert rotated.inputs.tolist() == [*WINDOW[at:], *WINDOW[:at]] and at
  assert 0 < (replaced.inputs != WINDOW).sum() <= 6
  assert replaced.inputs.min() >= TEXT  # Never a special token.
  for pair in (rotated, replaced):
    assert pair.targets.tolist() == WINDOW.tolist()


def test_sentences_are_permuted_whole():
  a, b, c, d, e = range(TEXT, TEXT + 5)
  window = [a, b, STOP, c, STOP, d, e]
  found = {
    str(_split('bart_permutation', window, seed).inputs.tolist())
    for seed in range(60)
  }
  sentences = [[a, b, STOP], [c, STOP], [d, e]]
  orders = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
  assert found == {
    str([token for i in order for token in sentences[i]]) for order in orders
  }


@pytest.mark.parametrize('name', ['bart_infilling', 'bart'])
def test_infilling_hides_a_share_in_spans_of_poisson_lengths(name):
  window = np.arange(TEXT, TEXT + 100, dtype=np.int32)
  gaps, spans = [], 0
  for seed in range(200):
    pair = _split(name, window, seed)
    assert pair.targets.tolist() == window.tolist()
    kept = pair.inputs[pair.inputs != MASK]
    assert len(kept) == 70 and len(pair.inputs) <= 100
    spans += (pair.inputs == MASK).sum()
    if name == 'bart_infilling':
      assert (np.diff(kept) > 0).all()
      alone = np.flatnonzero(pair.inputs == MASK)
      for i in alone[(alone > 0) & (alone < len(pair.inputs) - 1)]:
        before, after = pair.inputs[i - 1], pair.inputs[i + 1]
        if MASK not in (before, after):
          gaps.append(after - before - 1)
  # 30 hidden tokens in spans of 3 on average, e^-3 of which are empty.
  assert spans / 200 == pytest.approx(10, abs=1.5)
  if gaps:
    assert np.mean(gaps) == pytest.approx(3, abs=0.4)
    assert np.mean(np.equal(gaps, 0)) == pytest.approx(np.exp(-3), abs=0.04)


def test_bert_masks_80_replaces_10_keeps_10():
  window = np.resize(WINDOW, 2000)
  pair = _split('bert', window, length=4096)
  chosen = pair.weights == 1
  assert chosen.sum() == 300 and set(pair.weights.tolist()) == {0.0, 1.0}
  assert pair.targets.tolist() == window.tolist()
  assert (pair.inputs[~chosen] == window[~chosen]).all()
  share = np.mean(pair.inputs[chosen] == MASK)
  assert share == pytest.approx(0.8, abs=0.07)
  kept = np.mean(pair.inputs[chosen] == window[chosen])
  assert kept == pytest.approx(0.1, abs=0.06)
  # Encoder-only: no EOS, and each window has targets in place.
  objective = cases.make('bert', 12, 0)
  made = cases.pairs(objective, np.resize(WINDOW, 25))
  assert [len(pair.inputs) for pair in made] == [11, 11, 3]
  assert EOS not in np.concatenate([pair.targets for pair in made])


@pytest.mark.parametrize('span, runs', [(1, None), (5, 3)])
def test_meap_masks_what_is_read_and_predicts_all(span, runs):
  window = np.arange(TEXT, TEXT + 100, dtype=np.int32)
  pair = _split(f'meap:span={span}', window)
  assert not len(pair.inputs) and pair.weights is None
  assert pair.targets.tolist() == window.tolist()
  masked = pair.decoder_inputs == MASK
  assert masked.sum() == 15  # int(100 * .15)
  assert (pair.decoder_inputs[~masked] == window[~masked]).all()
  starts = np.flatnonzero(np.diff(masked, prepend=False) & masked)
  assert runs is None or len(starts) <= runs
  objective = cases.make('meap', 0, 50)
  last = cases.pairs(objective, window)[-1]
  assert last.targets[-1] == last.decoder_inputs[-1] == EOS


def test_meap_masks_the_inputs_of_a_pair_alone():
  pair = _split('meap_prefix_lm:share=0.2')
  assert pair.targets.tolist() == WINDOW[20:].tolist()
  assert pair.decoder_inputs is None and pair.weights is None
  masked = pair.inputs == MASK
  assert (
    masked.sum() == 4 and (pair.inputs[~masked] == WINDOW[:20][~masked]).all()
  )
  # Windows are cut as without masks.
  document = np.arange(TEXT, TEXT + 130, dtype=np.int32)
  plain, meap = (
    cases.pairs(cases.make_fitting(name), document)
    for name in ('prefix_lm', 'meap_prefix_lm')
  )
  assert [x.targets.tolist() for x in meap] == [
    x.targets.tolist() for x in plain
  ]


def test_meap_masks_its_share_of_short_windows_on_average():
  window = np.full(11, TEXT, np.int32)  # 1.65 tokens of 11.
  objective = cases.make('meap', 0, 11)
  rng = np.random.default_rng(0)
  counts = np.array(
    [
      (objective.split(window, None, rng).decoder_inputs == MASK).sum()
      for _ in range(2000)
    ]
  )
  assert set(counts) == {1, 2}
  assert counts.mean() == pytest.approx(1.65, abs=0.04)


def test_special_tokens_that_are_missing_are_named():
  bare = cases.vocabulary(0, mask=None)
  with pytest.raises(errors.UserError, match='neither a mask token nor'):
    objective_names.parse_one('bart').make(framing.Lengths(9, 9), bare)
  # The last sentinel is the mask of a vocabulary that has none.
  some = cases.vocabulary(3, mask=None)
  objective = objective_names.parse_one('mask_tokens:share=0.5').make(
    framing.Lengths(9, 9), some
  )
  (pair,) = cases.pairs(objective, WINDOW[:6])
  assert (pair.inputs == cases.C).sum() == 3
  with pytest.raises(errors.UserError, match='add_sentinels to'):
    cases.make('iid_denoising', 128, 128, sentinels=4)


@pytest.mark.parametrize(
  'name, lengths, targets, shorter',
  [
    ('bart', (12, 8), 11, 9),  # The text, beside BOS and 11 tokens.
    # Half of 20 tokens, of 18, and 10 of 19.
    ('drop_tokens:share=0.5', (21, 9), 10, 19),
    ('iid_denoising:share=0.5', (21, 19), 20, 19),
  ],
)
def test_windows_are_not_shortened_silently(name, lengths, targets, shorter):
  message = (
    f'makes up to {targets} targets, more than .*decoder_length={lengths[1]};'
    f' .* at least {targets}, or encoder_length to at most {shorter}$'
  )
  with pytest.raises(errors.UserError, match=message):
    cases.make(name, *lengths, sentinels=20)
  cases.make(name, lengths[0], targets, sentinels=20)
  cases.make(name, shorter, lengths[1], sentinels=20)
