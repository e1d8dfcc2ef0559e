"""A BERT and GPT-2 pair equals transformers' `EncoderDecoderModel`."""

import dataclasses

from flax import traverse_util
import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.huggingface import folder as folder_lib
from encdec_adapt.models import build, layer_leaves, model_config
from tests.parity import tiny_models

pytestmark = pytest.mark.parity
torch, transformers = tiny_models.torch, tiny_models.transformers


def arrays_of(model, path):
  """Saves a model of transformers; returns our config and its leaves."""
  model.save_pretrained(path)
  opened = folder_lib.ModelFolder(path)
  return opened.config.decoder, leaves_of(opened.config, opened.arrays())


def leaves_of(config, arrays):
  """Returns the arrays of a model by leaf."""
  return {
    name: np.asarray(arrays[leaf.path])[
      () if leaf.index is None else leaf.index
    ]
    for name, leaf in layer_leaves.leaves_of(config).items()
  }


def cross_attention(theirs, projection, heads):
  """Returns our leaves of cross-attention, given theirs of a layer.

  `projection` maps the encoder's states to the decoder's width; None for none.
  """
  part = {k: v.detach().numpy() for k, v in theirs.named_parameters()}
  width = part['c_attn.weight'].shape[0]
  weights, biases = part['c_attn.weight'], part['c_attn.bias']
  if projection is not None:
    kernel, bias = (x.detach().numpy() for x in projection.parameters())
    biases = biases + bias @ weights
    weights = kernel.T @ weights
  split = {'query': (part['q_attn.weight'], part['q_attn.bias'])}
  halves = (np.split(x, 2, axis=-1) for x in (weights, biases))
  pieces = zip(*halves, strict=True)
  split |= dict(zip(('key', 'value'), pieces, strict=True))
  leaves = {}
  for name, (kernel, bias) in split.items():
    leaves[name] = kernel.reshape(kernel.shape[0], heads, -1)
    leaves[f'{name}_bias'] = bias.reshape(heads, -1)
  leaves['output'] = part['c_proj.weight'].reshape(heads, -1, width)
  leaves['output_bias'] = part['c_proj.bias']
  return leaves


@pytest.mark.parametrize('width', [32, 24])
def test_logits_of_encoder_decoder_model(width, tmp_path):
  bert = tiny_models.CASES['bert'].settings()
  bert.hidden_size = width
  gpt2 = tiny_models.CASES['gpt2'].settings()
  plain = transformers.GPT2LMHeadModel(gpt2)
  gpt2 = type(gpt2)(**gpt2.to_dict() | {'add_cross_attention': True})
  gpt2.is_decoder = True
  config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
    bert, gpt2
  )
  tiny_models.with_eager_attention(config)
  theirs = transformers.EncoderDecoderModel(config).eval()
  generator = torch.Generator().manual_seed(0)
  with torch.no_grad():
    for weight in theirs.parameters():
      weight.normal_(float((weight == 1).all()), 0.3, generator=generator)
  plain.load_state_dict(theirs.decoder.state_dict(), strict=False)
  encoder, encoder_leaves = arrays_of(theirs.encoder, tmp_path / 'bert')
  decoder, decoder_leaves = arrays_of(plain, tmp_path / 'gpt2')
  pair = model_config.encoder_decoder(encoder, decoder)
  leaves = {
    x.replace('decoder', 'encoder', 1): y for x, y in encoder_leaves.items()
  }
  leaves |= decoder_leaves
  projection = getattr(theirs, 'enc_to_dec_proj', None)
  assert (projection is None) == (width == 32)
  for i, block in enumerate(theirs.decoder.transformer.h):
    prefix = f'decoder/layers/{i}/'
    cross = cross_attention(block.crossattention, projection, decoder.heads)
    leaves |= {f'{prefix}cross_attention/{k}': v for k, v in cross.items()}
    norm = block.ln_cross_attn
    leaves[f'{prefix}pre_cross_norm/scale'] = norm.weight.detach().numpy()
    leaves[f'{prefix}pre_cross_norm/bias'] = norm.bias.detach().numpy()
  stored = layer_leaves.stored_leaves(layer_leaves.leaves_of(pair))
  params = traverse_util.unflatten_dict(
    {
      path: jnp.asarray(np.stack([leaves[name] for name in names]))
      if len(names) > 1
      else jnp.asarray(leaves[names[0]])
      for path, names in stored.items()
    },
    sep='/',
  )
  rows = tiny_models.batch(
    dataclasses.replace(tiny_models.CASES['bert'], is_pair=True)
  )
  expected = tiny_models.their_logits(theirs, rows)
  model = build.build(pair)
  triples = [
    (jnp.asarray(tokens), jnp.asarray(mask, jnp.int32), positions)
    for tokens, mask in (
      (rows.encoder, rows.encoder_mask),
      (rows.decoder, rows.decoder_mask),
    )
    for positions in [
      jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    ]
  ]
  encoded = model.encode(params, *triples[0])
  states = model.decode(params, *triples[1], encoded, triples[0][1])
  found = np.asarray(model.logits(params, states))[rows.decoder_mask]
  assert np.abs(expected).max() > 2
  np.testing.assert_allclose(
    found, expected, rtol=0, atol=tiny_models.TOLERANCE
  )
