"""Toy models with random parameters."""

import json
import pathlib

from flax import traverse_util
from jax import numpy as jnp
import numpy as np
from safetensors import numpy as safetensors

import encdec_adapt
from encdec_adapt.generation import model_in_memory
from encdec_adapt.huggingface import export
from encdec_adapt.models import (
  build,
  heads,
  layer_leaves,
  model_config,
  parameters,
  presets,
)
from encdec_adapt.ops import relative_bias
from tests import tiny_tokenizers

GEMMA_SIZE = 512  # Above the ids of `save`'s vocabulary.


def stack(**changes):
  """A stack like Gemma 2's, small enough to compile at once."""
  fields = dict(layers=2, width=16, mlp_width=24, heads=4, kv_heads=2)
  fields |= dict(head_dim=8, vocab_size=60, window=4, query_scale=8.0)
  return model_config.StackConfig(**fields | changes)


def positions(kind):
  return relative_bias.Positions(kind, buckets=8, distance=10)


# Fields of T5's block, in place of those of `stack`.
_T5 = vars(presets.T5['t5_small'].decoder)
_SAME = 'pattern query_scale attention_softcap final_softcap norm_gain'
_SAME += ' post_norms scale_embeddings activation mlp_gated'
T5 = {key: _T5[key] for key in _SAME.split()}
T5 |= {'kv_heads': 4, 'positions': positions('relative')}
T5 |= {'head': heads.Tokens(scaled=True)}
UNTIED = heads.Tokens(tied=False)
# Of GPT-2's and BERT's blocks.
GPT2 = dict(norm='layer', norm_gain='direct_fp32', norm_bias=True, kv_heads=4)
GPT2 |= dict(attention_bias='qkvo', mlp_bias=True, mlp_gated=False)
GPT2 |= dict(pattern=('global',), post_norms=False, scale_embeddings=False)
GPT2 |= dict(attention_softcap=None, final_softcap=None)
GPT2 |= {'positions': relative_bias.Positions('learned', rows=64)}
BERT = GPT2 | dict(role='bidirectional', norms_after_sum=True, token_types=2)
BERT |= dict(embedding_norm=True, head=heads.Tokens(transform=True))


def params(config, seed=0, scale=0.5):
  """Random parameters of a model, nested."""
  rng = np.random.default_rng(seed)
  flat = {
    path: jnp.asarray(scale * rng.normal(size=info.shape), info.dtype)
    for path, info in parameters.parameter_table(config).items()
  }
  return traverse_util.unflatten_dict(flat, sep='/')


def leaves(config, flat):
  """Leaf name to array, cut out of the stored parameters by path."""
  return {
    name: np.asarray(
      flat[leaf.path] if leaf.index is None else flat[leaf.path][leaf.index]
    )
    for name, leaf in layer_leaves.leaves_of(config).items()
  }


def load(config, **options):
  """The model with random parameters, as `encdec_adapt.load` returns it."""
  model = build.build(config)
  return model_in_memory.LoadedModel(model, params(config, **options), None)


def pair_and_decoder(stack):
  """Models of one stack by their kind in a configuration."""
  return {
    'encoder_decoder': model_config.encoder_decoder(stack, stack),
    'decoder_only': model_config.DecoderOnlyConfig(stack),
  }


def save(
  folder: pathlib.Path,
  config: model_config.ModelConfig,
  native: bool = False,
  **options,
) -> model_in_memory.LoadedModel:
  """Writes a model with Gemma-like tokens to a folder and loads it.

  Args:
    folder: folder that does not exist.
    config: model with a vocabulary of at least `GEMMA_SIZE` tokens.
    native: whether to write the layout of this project.
    **options: of `params`.
  """
  tokens = folder.with_name(f'{folder.name}_tokens')
  tiny_tokenizers.save(tokens, 'gemma', tiny_tokenizers.TEXTS, 400)
  flat = traverse_util.flatten_dict(params(config, **options), sep='/')
  export.write(
    folder,
    config,
    {path: np.asarray(array) for path, array in flat.items()},
    native=native,
    files={file.name: file for file in tokens.iterdir()},
  )
  return encdec_adapt.load(folder)


def change(folder: pathlib.Path, tensors=lambda tensors: tensors, **fields):
  """Changes the tensors of a folder, and fields of its config.json."""
  file, config = folder / 'model.safetensors', folder / 'config.json'
  changed = tensors(safetensors.load_file(file))
  safetensors.save_file(changed, file, {'format': 'pt'})
  config.write_text(json.dumps(json.loads(config.read_text()) | fields))
