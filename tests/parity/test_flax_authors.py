"""Compares our import with models that the authors' own code saves.

Needs the package `gemma`, in an environment of its own (see
`encdec_adapt/huggingface/README.md`). Differences of their arithmetic: rows are
padded on the right only, because their positions count tokens; only logits at
tokens are compared, because they give zeros at padding; the encoder's window is
the exclusive one.
"""

import dataclasses
import json

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import encdec_adapt
from encdec_adapt.huggingface import config_json
from encdec_adapt.models import model_config
from tests import tiny, toy_models

pytestmark = [pytest.mark.parity, pytest.mark.slow]
_REASON = "the authors' code: pip install gemma, in an environment of its own"
ROWS = 70  # Of their tables; the vocabulary is smaller.
TOLERANCE = 2e-4
CAPS = dict(attention_softcap=5.0, final_softcap=8.0)
DECODER = toy_models.stack(
  layers=4, width=32, mlp_width=40, vocab_size=67, **CAPS
)
ENCODER = dataclasses.replace(
  DECODER,
  layers=2,
  width=24,
  heads=2,  # As many of keys: query, key and value in one array.
  head_dim=16,
  window=3,
  query_scale=16.0,
  attention_softcap=4.0,
)


def their_config(modules, stack, transpose_gating_einsum=False, **fields):
  """Returns the config of their stack."""
  kinds = modules.AttentionType
  names = {'local': kinds.LOCAL_SLIDING, 'global': kinds.GLOBAL}
  scale = modules.QueryPreAttentionNormalisation.BY_ONE_OVER_SQRT_HEAD_DIM
  return modules.TransformerConfig(
    num_embed=ROWS,
    embed_dim=stack.width,
    hidden_dim=stack.mlp_width,
    num_heads=stack.heads,
    head_dim=stack.head_dim,
    num_kv_heads=stack.kv_heads,
    final_logit_softcap=stack.final_softcap,
    attention_types=tuple(
      names[stack.layer_kind(i)] for i in range(stack.layers)
    ),
    use_post_attn_norm=True,
    use_post_ffw_norm=True,
    query_pre_attn_norm=scale,
    attn_logits_soft_cap=stack.attention_softcap,
    sliding_window_size=stack.window,
    transpose_gating_einsum=transpose_gating_einsum,
    **fields,
  )


def t5gemma():
  """Returns their model of an unbalanced pair."""
  reason = _REASON
  modules = pytest.importorskip('gemma.research.t5gemma.modules', reason=reason)
  theirs = pytest.importorskip('gemma.research.t5gemma.t5gemma', reason=reason)
  # As the 9B has it, the encoder's gate is stored the other way around.
  encoder = their_config(
    modules,
    ENCODER,
    num_layers=ENCODER.layers,
    bidirectional=True,
    transpose_gating_einsum=True,
  )
  decoder = their_config(
    modules,
    DECODER,
    num_layers=DECODER.layers,
    enable_cross_attention=True,
    kv_embed_dim=ENCODER.width,
  )
  config = theirs.T5GemmaConfig(encoder_config=encoder, decoder_config=decoder)
  return theirs.T5Gemma(
    config, name=None, dtype=jnp.float32, target_tokens='t', input_tokens='i'
  )


def flat(params):
  """Returns the tree of their first releases, one level of joined names.

  Source: `gm.ckpts._compat.flatten_and_remap_params`.
  """
  found = {}
  for (*path, leaf), value in traverse_util.flatten_dict(params).items():
    if path[-1] == 'mlp':
      path, leaf = [*path, leaf], 'w'
    found.setdefault('/'.join(['transformer', *path]), {})[leaf] = value
  return found


def rows(length, seed):
  """Returns tokens and mask; the second row is padded on the right."""
  tokens = np.random.default_rng(seed).integers(3, 67, (2, length), np.int32)
  tokens[1, length - 4 :] = 0
  return tokens, tokens != 0


def assert_imported(theirs, inputs, config, folder, ours, form='nested'):
  """Compares the logits of a model of theirs with those of our import.

  The checkpoint is saved as their `gm.ckpts.save_params` does, and imported by
  the command.

  Args:
    theirs: their model; its weights are redrawn at a scale at which windows,
      caps and gains matter.
    inputs: keyword arguments of their model.
    config: our configuration of the same model.
    folder: folder for the checkpoint and the imported run.
    ours: arguments of our `logits`; the first is the decoder's tokens.
    form: form of the checkpoint's tree: 'nested', or 'flat' as their first
      releases were.
  """
  params = theirs.init(jax.random.key(0), **inputs)['params']
  leaves, structure = jax.tree.flatten(params)
  draws = np.random.default_rng(0)
  params = structure.unflatten(
    [draws.normal(0, 0.3, x.shape).astype(np.float32) for x in leaves]
  )
  expected = theirs.apply({'params': params}, **inputs).logits
  with ocp.StandardCheckpointer() as checkpointer:
    saved = flat(params) if form == 'flat' else params
    checkpointer.save(folder / 'flax', saved)
  raw, _ = config_json.raw_from_model(config)
  (folder / 'config.json').write_text(json.dumps(raw))
  flags = [f'--source={folder}/flax', f'--model={folder}/config.json']
  assert tiny.convert('import', *flags, f'--output={folder}/run') == 0
  got = encdec_adapt.load(folder / 'run').logits(*ours)
  mask = ours[0] != 0
  np.testing.assert_allclose(
    np.asarray(got)[mask],
    np.asarray(expected)[mask][:, :67],
    rtol=0,
    atol=TOLERANCE,
  )


def test_t5gemma(tmp_path, capsys):
  encoder, encoder_mask = rows(13, 0)
  decoder, mask = rows(12, 1)
  assert_imported(
    t5gemma(),
    dict(target_tokens=decoder, input_tokens=encoder),
    model_config.encoder_decoder(ENCODER, DECODER),
    tmp_path,
    (decoder, encoder, encoder_mask, mask),
  )
  assert 'rows 67 to 69' in capsys.readouterr().out


@pytest.mark.parametrize('form', ['nested', 'flat'])
def test_gemma2(form, tmp_path):
  nn = pytest.importorskip('gemma.gm.nn', reason=_REASON)
  config = pytest.importorskip('gemma.gm.nn.config', reason=_REASON)
  stack = their_config(config, DECODER)
  tokens, mask = rows(12, 1)
  assert_imported(
    nn.Transformer(config=stack, dtype=jnp.float32, tokens='t'),
    dict(tokens=tokens),
    model_config.DecoderOnlyConfig(DECODER),
    tmp_path,
    (tokens, None, None, mask),
    form,
  )
