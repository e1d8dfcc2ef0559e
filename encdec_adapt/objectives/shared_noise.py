"""MEAP with one mask pattern per batch, as in its published code.

Source: github.com/scitix/MEAP. All rows and microbatches of a step have the
same masked positions, and patterns recur every 51 steps. They depend only on
the step, and are applied when rows are framed (`data/records/loader.py`);
the records are those of `causal_lm`.

Must not import TensorFlow, SeqIO or JAX.
"""

import random

import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.objectives import example_maker, framing, noising, windows

_SEED, _PATTERNS = 50, 51  # Both from the published code.


class SharedMeap(noising.NextToken):
  """Next-token prediction; inputs are masked when rows are framed."""

  draws = False
  split = windows.CausalLM.split

  def __init__(self, name, lengths, vocabulary, **options):
    """Checks that the vocabulary has a mask token; see `noising.Noising`."""
    super().__init__(name, lengths, vocabulary, **options)
    # Framing takes the mask from `RecordSet.mask`, which has no sentinel as a
    # substitute.
    if vocabulary.mask is None:
      raise errors.UserError(
        f'objective {name!r}: the vocabulary {vocabulary.path!r} has no mask'
        ' token; use meap, which takes a sentinel instead'
      )


def share_of(objective: example_maker.Objective) -> float:
  """Returns the share of inputs masked by a common pattern, else 0."""
  if objective.maker is not SharedMeap:
    return 0.0
  return objective.options.get('share', noising.SHARE)


def positions(step: int, length: int, share: float) -> np.ndarray:
  """Returns the masked positions of a row of inputs.

  Args:
    step: global step, from 0.
    length: T, length of the row; its last position is never masked.
    share: masked share of the row.

  Returns:
    int [int(T * share)], unordered; equal to the published code's
    `random.seed(50 + step % 51); random.sample(range(0, T - 1), int(T * P))`.
  """
  # Python's generator, not NumPy's, to reproduce the published patterns.
  draw = random.Random(_SEED + step % _PATTERNS)
  return np.array(draw.sample(range(length - 1), int(length * share)), int)


def apply(
  rows: framing.Batch, step: int, share: float, mask: int
) -> framing.Batch:
  """Masks decoder inputs, except padding, at the positions of a step."""
  tokens = rows['decoder_tokens'].copy()
  masked = positions(step, tokens.shape[1], share)
  real = rows['decoder_segments'][:, masked] > 0
  tokens[:, masked] = np.where(real, mask, tokens[:, masked])
  return rows | {'decoder_tokens': tokens}


OBJECTIVES = {
  'meap_shared': example_maker.Name(
    SharedMeap,
    "next token, with one pattern of masks for a whole batch (MEAP's code)",
  ),
}
