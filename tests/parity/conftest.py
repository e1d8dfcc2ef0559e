"""Tiny random Hugging Face models and their weights in our tree.

Weights are redrawn with a scale at which soft-caps, norm gains and windows
matter, so that a wrong variant differs by far more than the tolerance.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.models import config
from tests import layer_trees

# fp32 logits, absolute: variants that are wrong differ by 1e-3 and more.
TOLERANCE = 2e-4

T5GEMMA_NORMS = {
  'pre_self_attn_layernorm': 'pre_attention_norm',
  'post_self_attn_layernorm': 'post_attention_norm',
  'pre_cross_attn_layernorm': 'pre_cross_norm',
  'post_cross_attn_layernorm': 'post_cross_norm',
  'pre_feedforward_layernorm': 'pre_mlp_norm',
  'post_feedforward_layernorm': 'post_mlp_norm',
}
GEMMA2_NORMS = {
  'input_layernorm': 'pre_attention_norm',
  'post_attention_layernorm': 'post_attention_norm',
  'pre_feedforward_layernorm': 'pre_mlp_norm',
  'post_feedforward_layernorm': 'post_mlp_norm',
}


@dataclasses.dataclass(frozen=True)
class HuggingFace:
  """The functions that parity tests need, torch imported."""

  torch: object
  transformers: object
  tolerance: float = TOLERANCE
  gemma2_norms: dict = dataclasses.field(default_factory=lambda: GEMMA2_NORMS)
  t5gemma_norms: dict = dataclasses.field(default_factory=lambda: T5GEMMA_NORMS)

  def settings(self, stack: config.StackConfig) -> dict:
    """Config fields of a Gemma 2 model or T5Gemma module of this shape."""
    kinds = {'local': 'sliding_attention', 'global': 'full_attention'}
    return {
      'vocab_size': stack.vocab_size,
      'hidden_size': stack.width,
      'intermediate_size': stack.mlp_width,
      'num_hidden_layers': stack.layers,
      'num_attention_heads': stack.heads,
      'num_key_value_heads': stack.kv_heads,
      'head_dim': stack.head_dim,
      'rms_norm_eps': stack.norm_eps,
      'query_pre_attn_scalar': int(stack.query_scale),  # a float is refused
      'sliding_window': stack.window,
      'layer_types': [kinds[stack.layer_kind(i)] for i in range(stack.layers)],
      'final_logit_softcapping': stack.final_softcap,
      'attn_logit_softcapping': stack.attention_softcap,
      'rope_parameters': {
        'rope_type': 'default',
        'rope_theta': stack.rope_theta,
      },
    }

  def redraw(self, model, seed: int = 0):
    """Draws every weight anew, N(0, 0.3^2), and switches to evaluation."""
    generator = self.torch.Generator().manual_seed(seed)
    with self.torch.no_grad():
      for weight in model.parameters():
        weight.normal_(0.0, 0.3, generator=generator)
    return model.float().eval()

  def stack(self, stack, get, prefix, norms):
    """Our tree of one stack.

    Args:
      stack: its shape.
      get: key -> array, of weights or of their gradients.
      prefix: what its keys start with, such as 'model.decoder'.
      norms: their name of each norm of a layer -> ours.
    """
    blocks = []
    for i in range(stack.layers):
      layer = f'{prefix}.layers.{i}'
      block = {
        ours: {'scale': get(f'{layer}.{theirs}.weight')}
        for theirs, ours in norms.items()
        if stack.cross_width is not None or 'cross' not in ours
      }
      block['attention'] = _attention(stack, get, f'{layer}.self_attn')
      if stack.cross_width is not None:
        cross = _attention(stack, get, f'{layer}.cross_attn')
        block['cross_attention'] = cross
      block['mlp'] = {
        name: get(f'{layer}.mlp.{name}_proj.weight').T
        for name in ('gate', 'up', 'down')
      }
      blocks.append(block)
    return {
      'embedder': {'table': get(f'{prefix}.embed_tokens.weight')},
      'final_norm': {'scale': get(f'{prefix}.norm.weight')},
      **layer_trees.join_layers(stack, blocks),
    }


def _attention(stack, get, prefix):
  """Our kernels of one attention: [out, in] becomes [D, heads, H]."""
  kernels = {}
  for name in ('query', 'key', 'value'):
    weight = get(f'{prefix}.{name[0]}_proj.weight')
    heads = stack.heads if name == 'query' else stack.kv_heads
    kernels[name] = weight.T.reshape(-1, heads, stack.head_dim)
  output = get(f'{prefix}.o_proj.weight')
  kernels['output'] = output.T.reshape(stack.heads, stack.head_dim, -1)
  return kernels


@pytest.fixture(scope='session')
def hugging_face():
  """torch and transformers; skips the test where they are not installed."""
  reason = 'parity with Hugging Face needs torch and transformers'
  torch = pytest.importorskip('torch', reason=reason)
  transformers = pytest.importorskip('transformers', reason=reason)
  torch.set_num_threads(1)
  return HuggingFace(torch, transformers)


@pytest.fixture
def rows():
  """A function (lengths, width, vocabulary, seed) -> right-padded tokens,
  segments and positions."""

  def make(lengths, width, vocab_size, seed=0):
    rng = np.random.default_rng(seed)
    index = np.tile(np.arange(width), (len(lengths), 1))
    real = index < np.asarray(lengths)[:, None]
    tokens = np.where(real, rng.integers(3, vocab_size, index.shape), 0)
    arrays = (tokens, real, np.where(real, index, 0))
    return tuple(jnp.asarray(x, jnp.int32) for x in arrays)

  return make
