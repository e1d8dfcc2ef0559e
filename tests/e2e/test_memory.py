"""Conversions stream: their arrays in memory are few, whatever the model.

NumPy's arrays are measured, those that are mapped from files are not. That of
export is bounded in tests/huggingface/test_tensors.py: what it reads and
writes together is more than this model.
"""

import dataclasses
import tracemalloc

import pytest

from encdec_adapt.models import model_config, presets
from tests.benchmarks import exchange
from tests.e2e import folders

pytestmark = pytest.mark.e2e

# Fourteen stacked arrays of one size (the projections of two layers of a
# pattern), 9.4 MB each in bf16, and little else.
LARGE = dataclasses.replace(
  presets.stack('2b'),
  layers=18,
  width=512,
  mlp_width=1024,
  heads=8,
  kv_heads=8,
  head_dim=128,
  vocab_size=512,
)
LARGEST = 9 * 512 * 1024 * 2


@pytest.mark.long
@pytest.mark.parametrize('convert', [folders.import_folder, folders.adapt])
def test_memory_stays_near_the_largest_array(convert, tmp_path):
  source = tmp_path / 'source'
  exchange.make_folder(source, model_config.DecoderOnlyConfig(LARGE))
  tracemalloc.start()
  try:
    if convert == folders.adapt:
      convert(tmp_path / 'output', f'--encoder={source}')
    else:
      convert(source, tmp_path / 'output')
    _, peak = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()
  assert peak < 8 * LARGEST, f'{peak / LARGEST:.1f} of the largest'
