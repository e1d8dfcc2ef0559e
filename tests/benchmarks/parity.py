"""How far our logits are from those of transformers, family by family.

Tiny random models with weights of a scale at which caps and windows matter,
eager attention, rows longer than two windows, whole, padded on the right and
on the left. `fp32` is the largest absolute difference of a logit. The bf16
columns are root mean squares over that of transformers' bf16 logits to its own
fp32 ones: of our bf16 logits to the fp32 ones, and to its bf16 ones.
"""

from collections.abc import Sequence
import pathlib
import tempfile
from typing import Any

import jax.numpy as jnp
import numpy as np

import encdec_adapt
from tests.benchmarks import results
from tests.parity import tiny_models


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Measures and prints."""
  parser = results.parser(__doc__)
  parser.add_argument('--seeds', type=int, default=2, help='models of a family')
  parser.add_argument(
    '--families',
    nargs='*',
    default=list(tiny_models.CASES),
    help='which; all by default',
  )
  arguments = parser.parse_args(argv)
  rows = [
    _measure(name, tiny_models.CASES[name], arguments.seeds)
    for name in arguments.families
  ]
  return results.report('parity', rows, arguments)


def _measure(name: str, case: tiny_models.Case, seeds: int) -> dict[str, Any]:
  """The row of one family."""
  rows = tiny_models.batch(case)
  largest, own, exact, theirs = 0.0, [], [], []
  for seed in range(seeds):
    model = tiny_models.make(case, seed)
    with tempfile.TemporaryDirectory() as folder:
      model.save_pretrained(folder)
      half = tiny_models.load(
        pathlib.Path(folder), dtype=tiny_models.torch.bfloat16
      )
      wide, narrow = (
        tiny_models.our_logits(
          encdec_adapt.load(
            folder, dtype=dtype, encoder_window=case.encoder_window
          ),
          rows,
        )
        for dtype in (jnp.float32, jnp.bfloat16)
      )
    reference = tiny_models.their_logits(model, rows)
    rounded = tiny_models.their_logits(half, rows)
    largest = max(largest, float(np.abs(wide - reference).max()))
    own.append(rounded - reference)
    exact.append(narrow - reference)
    theirs.append(narrow - rounded)
  unit = tiny_models.rms(np.stack(own))
  return {
    'family': name,
    'fp32': largest,
    'bf16 to fp32': tiny_models.rms(np.stack(exact)) / unit,
    'bf16 to bf16': tiny_models.rms(np.stack(theirs)) / unit,
    'covered': case.covers,
  }


if __name__ == '__main__':
  main()
