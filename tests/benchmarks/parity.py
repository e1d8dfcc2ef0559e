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

import numpy as np

import encdec_adapt
from tests.benchmarks import results
from tests.parity import tiny_models


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Measures and prints."""
  arguments = results.parser(
    __doc__, seeds=2, families=list(tiny_models.CASES)
  ).parse_args(argv)
  rows = [
    _measure(name, tiny_models.CASES[name], arguments.seeds)
    for name in arguments.families
  ]
  return results.report('parity', rows, arguments)


def _measure(name: str, case: tiny_models.Case, seeds: int) -> dict[str, Any]:
  """The row of one family."""
  rows = tiny_models.batch(case)
  largest, rounded = 0.0, []
  for seed in range(seeds):
    with tempfile.TemporaryDirectory() as folder:
      rounded.append(tiny_models.in_bfloat16(case, seed, pathlib.Path(folder)))
      ours = encdec_adapt.load(folder, encoder_window=case.encoder_window)
    difference = tiny_models.our_logits(ours, rows) - rounded[-1][0]
    largest = max(largest, float(np.abs(difference).max()))
  to_fp32, to_bf16 = tiny_models.rounding_ratios(rounded)
  return {
    'family': name,
    'fp32': largest,
    'bf16 to fp32': to_fp32,
    'bf16 to bf16': to_bf16,
    'covered': case.covers,
  }


if __name__ == '__main__':
  main()
