"""Gradients of all parameters against torch, fp32 eager."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import encdec_adapt
from encdec_adapt.models import build, execution
from tests.parity import tiny_models

pytestmark = pytest.mark.parity


# Cases with the parameters and layers of another case of the family.
_AS = (
  *('gemma3_images', 'gemma4_images', 'gemma4_unified_images', 'llama_tied'),
  'qwen2_window',
  't5gemma',
)


def gradients_folder(model, folder):
  """Writes a folder with the gradients as its weights.

  Loading it gives the gradients by our names.
  """
  gradients = copy.deepcopy(model)
  with tiny_models.torch.no_grad():
    for name, weight in model.named_parameters():
      if weight.grad is not None:  # The vision part has none.
        gradients.get_parameter(name).copy_(weight.grad)
  gradients.save_pretrained(folder)
  return folder


@pytest.mark.long
@pytest.mark.parametrize('name', [n for n in tiny_models.CASES if n not in _AS])
def test_gradients_of_all_parameters(name, saved, tmp_path):
  case, (model, _, ours) = tiny_models.CASES[name], saved(name)
  model.zero_grad()
  rows = tiny_models.batch(case)
  weights = np.random.default_rng(2).normal(
    size=(*rows.decoder.shape, tiny_models.VOCAB)
  )
  weights = (weights * rows.decoder_mask[..., None]).astype(np.float32)
  output = tiny_models.their_output(model, rows)
  (output * tiny_models.torch.tensor(weights)).sum().backward()

  expected = encdec_adapt.load(
    gradients_folder(model, tmp_path), encoder_window=case.encoder_window
  )
  # Several chunks of attention, which is what training uses.
  chunked = build.build(
    ours.config, execution.ComputeConfig('float32', 'none', attention_chunk=5)
  )

  @jax.jit
  @jax.grad
  def gradients(params):
    """Returns the gradients of the weighted sum of all logits."""
    sides = []
    for tokens, mask in (
      (rows.decoder, rows.decoder_mask),
      (rows.encoder, rows.encoder_mask),
    ):
      if tokens is not None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        segments = jnp.asarray(mask, jnp.int32)
        if name == 'roberta':  # Counts tokens, without padding.
          positions = jnp.maximum(jnp.cumsum(segments, axis=1) - 1, 0)
        sides.append((jnp.asarray(tokens), segments, positions))
    encoded = ()
    if case.is_pair:
      encoded = (chunked.encode(params, *sides[1]), sides[1][1])
    logits = chunked.logits(params, chunked.decode(params, *sides[0], *encoded))
    return jnp.sum(logits * weights)

  # Layers add up gradients of the keys that they share, and their rounding.
  atol = 2e-4 if name == 'gemma4_shared' else 1e-4

  def compare(path, got, theirs):
    """Compares the gradients of one parameter."""
    name = jax.tree_util.keystr(path)
    # Buffers in transformers.
    if 'layer_scalar' in name or 'logits_bias' in name and case.is_pair:
      assert not np.any(got)
      return
    positions = ours.config.decoder.positions.kind
    if positions == 'learned' and "'key_bias'" in name:
      # Adds the same to all scores of a query: only rounding is left.
      assert max(np.abs(got).max(), np.abs(theirs).max()) < 1e-4
      return
    assert np.abs(theirs).max() > 0, name
    np.testing.assert_allclose(
      got, theirs, rtol=0, atol=atol * np.abs(theirs).max(), err_msg=name
    )

  found = gradients(ours.params)
  jax.tree_util.tree_map_with_path(compare, found, expected.params)
