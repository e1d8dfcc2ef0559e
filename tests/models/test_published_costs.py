"""Parameters and inference FLOPs of the T5Gemma paper (2504.06225)."""

import math

import pytest

from encdec_adapt.models import forward_flops, parameters, presets

# Rows of the table of embeddings: 256,000 tokens, padded (Gemma 2).
_ROWS = 256128


def _released(*sizes):
  if len(sizes) == 2:
    return presets.t5gemma('_'.join(sizes), vocab_size=_ROWS)
  return presets.decoder_only(*sizes, vocab_size=_ROWS)


def _paper(*sizes):
  return presets.with_paper_widths(_released(*sizes))


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
  count = _count(_paper(size))
  assert count / 1e6 == pytest.approx(millions, abs=0.05)
  # The paper counts pairs without cross-attention: twice the decoder.
  pair = _paper(size, size)
  assert _count(pair, without=('cross',)) == 2 * count


# In units of 1e14 FLOPs: 4096 inputs and 4096 targets, 8192 of a decoder.
@pytest.mark.parametrize(
  'sizes, published, released, corrected',
  [
    (('s',), 0.0288, 0.0297, None),
    (('b',), 0.0525, 0.0570, None),
    (('l',), 0.1057, 0.1223, None),
    (('xl',), 0.2722, 0.3333, None),
    (('2b',), 0.4911, 0.4911, 0.4911),
    (('9b',), 1.7168, 1.7168, 1.7168),
    (('s', 's'), 0.0267, 0.0277, 0.0207),
    (('b', 'b'), 0.0478, 0.0523, 0.0432),
    (('l', 'l'), 0.0932, 0.1100, 0.1045),
    (('xl', 'xl'), 0.2471, 0.3086, 0.2862),
    (('2b', '2b'), 0.4642, 0.4642, 0.4995),
    (('9b', '2b'), 1.0471, 1.0471, 1.1008),
    (('9b', '9b'), 1.6299, 1.6299, 1.8791),
  ],
)
def test_inference_flops_of_figure_3(sizes, published, released, corrected):
  # The paper counts an encoder as a causal decoder with logits, and leaves
  # cross-attention out.
  model = _paper(*sizes)
  counted = [
    forward_flops.published(x, 4096, 4096) / 1e14
    for x in (model, _released(*sizes))
  ]
  assert counted == pytest.approx([published, released], rel=0.005)
  if corrected is not None:
    length = 8192 // len(sizes)
    source = length if len(sizes) == 2 else 0
    flops = forward_flops.forward(model, source, length, source)
    assert flops / 1e14 == pytest.approx(corrected, rel=0.005)


@pytest.mark.parametrize('model', [_released('9b', '2b'), _released('2b')])
def test_prefill_and_decode_add_up(model):
  prompt, generated = 4090, 20  # Beyond the window of 4096.
  prefill, decode = forward_flops.generation(model, prompt, generated)
  first = 0
  if 'encoder' in model.stacks:
    assert prefill + decode == forward_flops.forward(
      model, prompt, generated, 0
    )
  else:  # The first step reads the last token of the prompt again.
    first = prompt - 1
  # The steps, one at a time.
  steps = [
    forward_flops.decoding(model, prompt, first + n + 1)
    for n in range(generated)
  ]
  assert decode == sum(steps)
