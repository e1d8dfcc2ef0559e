"""Parameters and inference FLOPs of the T5Gemma paper (2504.06225)."""

import dataclasses
import math

import pytest

from encdec_adapt.models import model_flops, parameters, presets

# Rows of the table of embeddings: 256,000 tokens, padded (Gemma 2).
_ROWS = 256128
# Of S to XL the paper's d_ffn counts both branches of the gated feed-forward,
# where the released ones have as much in each.
_PAPER_MLP = {'s': 512, 'b': 1024, 'l': 1408, 'xl': 2560}


def _sizes(*names):
  """Changes of the stacks of these sizes to those of the paper."""
  widths = [_PAPER_MLP.get(n, presets.STACKS[n].mlp_width) for n in names]
  return [dict(mlp_width=width, vocab_size=_ROWS) for width in widths]


def _decoder(size):
  return presets.decoder_only(size, **_sizes(size)[0])


def _pair(encoder, decoder):
  pair = presets.t5gemma(f'{encoder}_{decoder}')
  changes = _sizes(encoder, decoder)
  return dataclasses.replace(
    pair,
    encoder=dataclasses.replace(pair.encoder, **changes[0]),
    decoder=dataclasses.replace(pair.decoder, **changes[1]),
  )


def _count(model, *, without=()):
  """Parameters without tables and the parts that are named."""
  return sum(
    math.prod(info.shape)
    for path, info in parameters.parameter_table(model).items()
    if not any(part in path for part in ('embedder', *without))
  )


@pytest.mark.parametrize(
  'size, millions',
  [
    ('s', 14.7),
    ('b', 56.7),
    ('l', 204.6),
    ('xl', 780.3),
    ('2b', 2024.517888),
    ('9b', 8324.201984),
  ],
)
def test_parameters_of_table_1(size, millions):
  count = _count(_decoder(size))
  assert count / 1e6 == pytest.approx(millions, abs=0.05)
  # The paper counts pairs without cross-attention: twice the decoder.
  pair = _pair(size, size)
  assert _count(pair, without=('cross',)) == 2 * count


# In units of 1e14 FLOPs: 4096 inputs and 4096 targets, 8192 of a decoder.
@pytest.mark.parametrize(
  'sizes, published, corrected',
  [
    (('s',), 0.0288, None),
    (('b',), 0.0525, None),
    (('l',), 0.1057, None),
    (('xl',), 0.2722, None),
    (('2b',), 0.4911, 0.4911),
    (('9b',), 1.7168, 1.7168),
    (('s', 's'), 0.0267, 0.0207),
    (('b', 'b'), 0.0478, 0.0432),
    (('l', 'l'), 0.0932, 0.1045),
    (('xl', 'xl'), 0.2471, 0.2862),
    (('2b', '2b'), 0.4642, 0.4995),
    (('9b', '2b'), 1.0471, 1.1008),
    (('9b', '9b'), 1.6299, 1.8791),
  ],
)
def test_inference_flops_of_figure_3(sizes, published, corrected):
  # The paper counts an encoder as a causal decoder with logits, and leaves
  # cross-attention out.
  model = _pair(*sizes) if len(sizes) == 2 else _decoder(*sizes)
  counted = model_flops.published(model, 4096, 4096)
  assert counted / 1e14 == pytest.approx(published, rel=0.005)
  if corrected is not None:
    length = 8192 // len(sizes)
    source = length if len(sizes) == 2 else 0
    own = model_flops.forward(model, source, length, source)
    assert own / 1e14 == pytest.approx(corrected, rel=0.005)


@pytest.mark.parametrize('model', [_pair('9b', '2b'), _decoder('2b')])
def test_prefill_and_decode_add_up(model):
  prompt, generated = 4090, 20  # Beyond the window of 4096.
  prefill, decode = model_flops.generation(model, prompt, generated)
  whole = model_flops.forward(model, prompt, generated, prompt + generated)
  assert prefill + decode == whole
  # The steps, one at a time.
  whole = prompt * (len(model.stacks) == 1)
  steps = [
    model_flops.decoding(model, prompt, whole + n + 1) for n in range(generated)
  ]
  assert decode == sum(steps)
