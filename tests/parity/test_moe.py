"""Families with experts: balance loss, fused tensors, number of experts."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import encdec_adapt
from encdec_adapt.base import errors
from encdec_adapt.huggingface import folder, tensor_folder
from encdec_adapt.models import expert_layer
from tests.parity import tiny_models

pytestmark = pytest.mark.parity


def make(name, path, **changes):
  """Saves a model of transformers in a folder and returns it."""
  case = tiny_models.CASES[name]
  settings = case.settings()
  settings.update(changes)
  theirs = tiny_models.make(case, settings=settings)
  theirs.save_pretrained(path)
  return theirs


def test_load_balancing_loss(tmp_path):
  theirs = make('mixtral', tmp_path / 'model', num_hidden_layers=1)
  model = encdec_adapt.load(tmp_path / 'model')
  rows = tiny_models.batch(tiny_models.CASES['mixtral'])
  positions = np.indices(rows.decoder.shape)[1]
  triple = (rows.decoder, rows.decoder_mask, positions)
  routing = []
  triple = tuple(jnp.asarray(x, jnp.int32) for x in triple)
  model.model.decode(model.params, *triple, routing=routing)
  torch = tiny_models.torch
  with torch.no_grad():
    out = theirs(
      input_ids=torch.tensor(rows.decoder).long(),
      attention_mask=torch.tensor(rows.decoder_mask).long(),
      use_cache=False,
      output_router_logits=True,
    )
  # Theirs counts assignments by token, of which there are two.
  np.testing.assert_allclose(
    2 * expert_layer.mean_losses(routing).balance,
    out.aux_loss.numpy(),
    rtol=1e-5,
  )
  real = torch.tensor(rows.decoder_mask.reshape(-1))
  logits = torch.logsumexp(out.router_logits[0][real], dim=-1)
  np.testing.assert_allclose(
    expert_layer.mean_losses(routing).z, (logits**2).mean().numpy(), rtol=1e-5
  )


@pytest.mark.parametrize('case', ['mixtral', 'qwen2_moe'])
def test_experts_in_one_tensor(case, tmp_path):
  theirs = make(case, tmp_path / 'apart')
  theirs.save_pretrained(tmp_path / 'fused', save_original_format=False)
  found = tensor_folder.TensorFolder(tmp_path / 'fused').tensors
  assert 'model.layers.0.mlp.experts.gate_up_proj' in found
  apart, fused = (
    folder.ModelFolder(path).arrays()
    for path in (tmp_path / 'apart', tmp_path / 'fused')
  )
  assert apart.keys() == fused.keys()
  for path, array in apart.items():
    np.testing.assert_array_equal(array, fused[path], path)


def test_another_number_of_experts_is_refused(tmp_path):
  theirs = make('qwen3_moe', tmp_path / 'apart')
  theirs.save_pretrained(tmp_path / 'fused', save_original_format=False)
  for name, tensor in (('apart', 'experts.4.'), ('fused', 'mlp.experts.')):
    path = tmp_path / name / 'config.json'
    raw = json.loads(path.read_text())
    for experts_in_file, message in (
      (4, f'{tensor}.* is not a tensor of the model'),
      (6, r'has no tensor .*experts\.5\.'),
    ):
      raw['num_local_experts'] = experts_in_file
      path.write_text(json.dumps(raw))
      with pytest.raises(errors.UserError, match=message):
        folder.ModelFolder(tmp_path / name)
