"""Rewards of completions: the state read, groups, shapes and refusals."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.base import errors
from encdec_adapt.inference import rewards
from encdec_adapt.models import architecture, build, heads, model_config
from encdec_adapt.objectives import framing
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import rules
from encdec_adapt.training.jobs import job_models
from tests import gemma_ids, toy_models

BOS, EOS = 2, 1
PROMPTS = [[7, 8, 9], [30], [12, 13]]
COMPLETIONS = [[[5, 6, EOS], [21, EOS]], [[EOS], [40, 41, 42, 43, EOS]]]
COMPLETIONS += [[[50, 51], [50, 51, EOS]]]
KINDS = [kind for kind in architecture.BY_NAME.values() if kind.generates]


@pytest.fixture(scope='module', params=KINDS, ids=lambda kind: kind.name)
def model(request):
  """A reward model of each kind, and its parameters."""
  stack = toy_models.stack(role=request.param.role)
  config = model_config.DecoderOnlyConfig(stack)
  if request.param.encodes_prompt:
    config = model_config.encoder_decoder(stack, stack)
  config = model_config.reward_model(config)
  return build.build(config), toy_models.params(config)


GROUPS = [
  [
    framing.Pair(*(np.array(ids, np.int32) for ids in (prompt, x)))
    for x in group
  ]
  for prompt, group in zip(PROMPTS, COMPLETIONS, strict=True)
]


def _score(model, mesh=None, **options):
  mesh = mesh or mesh_lib.make_mesh(
    mesh_lib.MeshConfig(), devices=jax.devices()[:1]
  )
  options = {'rows': 2, 'ids': gemma_ids.FRAMING, **options}
  return rewards.score(
    *model, GROUPS, mesh=mesh, rules=rules.RULES['fsdp'], **options
  )


def _dense(model, prompt, completion):
  """The output at the last token, of unpadded rows."""
  model, params = model
  prompt = [BOS, *prompt]
  tokens = {'decoder': [*prompt, *completion]}
  options = {'prefix': jnp.arange(len(tokens['decoder']))[None] < len(prompt)}
  if model.architecture.encodes_prompt:
    tokens = {'encoder': prompt, 'decoder': [BOS, *completion]}
    options = {}
  fields = {
    name: (jnp.array([x]), jnp.ones((1, len(x)), int), jnp.arange(len(x))[None])
    for name, x in tokens.items()
  }
  options = {name: jnp.int32(x) for name, x in options.items()}
  hidden = model.architecture.states(model, params, fields, **options)
  return float(model.logits(params, hidden)[0, -1, 0])


@pytest.mark.long
def test_a_group_has_the_outputs_at_its_last_tokens(model):
  found = _score(model)
  expected = [
    [_dense(model, prompt, x) for x in group]
    for prompt, group in zip(PROMPTS, COMPLETIONS, strict=True)
  ]
  np.testing.assert_allclose(found, expected, atol=2e-5)
  # The end is read: with and without it is another reward.
  assert abs(found[2, 0] - found[2, 1]) > 1e-3
  fixed = _score(model, lengths=framing.Lengths(4, 6))
  np.testing.assert_allclose(fixed, found, atol=2e-5)


@pytest.mark.long
@pytest.mark.sharded
def test_a_mesh_gives_the_same_rewards(model):
  mesh = mesh_lib.make_mesh(mesh_lib.MeshConfig(fsdp=2, sequence=2, tensor=2))
  expected = _score(model)
  found = _score(model, mesh=mesh)
  np.testing.assert_allclose(found, expected, atol=2e-5)


def test_a_language_model_is_refused(model):
  config = model[0].config
  config = model_config.with_head(config, heads.Tokens())
  with pytest.raises(errors.UserError, match='not a reward model: .* 60 out'):
    _score((build.build(config), model[1]))


def test_reward_models_of_other_vocabularies_or_lengths_are_refused(tmp_path):
  stack = toy_models.stack(vocab_size=toy_models.GEMMA_SIZE)
  pair = model_config.encoder_decoder(stack, stack)
  trained = toy_models.save(tmp_path / 'policy', pair, native=True)
  folder = tmp_path / 'reward'
  toy_models.save(folder, model_config.reward_model(pair), native=True)
  choice = trained.stored.vocabularies

  def opened(lengths=framing.Lengths(8, 8), model=trained, path=folder):
    compute = model.model.compute
    return job_models.open_reward_model(
      str(path), model.placement, compute, choice, lengths
    )

  params = opened().read()
  assert params['decoder']['head']['table'].shape[0] == 1
  with pytest.raises(errors.UserError, match='policy is not a reward model'):
    opened(path=tmp_path / 'policy')
  file = folder / 'config.json'
  raw = json.loads(file.read_text())
  limits = {'decoder': {'max_position_embeddings': 8}}
  file.write_text(json.dumps(raw | {'carried': limits}))
  opened(framing.Lengths(8, 7))
  # BOS and eight tokens.
  with pytest.raises(errors.UserError, match='8 positions in its decoder'):
    opened()
  with pytest.raises(errors.UserError, match='8 positions in its encoder'):
    opened(framing.Lengths(9, 4))
  other = toy_models.stack(vocab_size=toy_models.GEMMA_SIZE + 8)
  other = toy_models.load(model_config.encoder_decoder(other, other))
  with pytest.raises(errors.UserError, match='reward model .* has 512 tokens'):
    opened(framing.Lengths(4, 4), model=other)
