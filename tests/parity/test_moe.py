"""Families with experts from the folder that transformers saves."""

import dataclasses
import json

import numpy as np
import pytest

import encdec_adapt
from encdec_adapt.interop import folder, tensor_folder
from encdec_adapt.models import build, experts, parameters
from encdec_adapt.models import config as config_lib
from encdec_adapt.runtime import errors
from tests.parity import test_families

pytestmark = pytest.mark.parity

# Five experts of different load, of which two or three are taken.
EXPERTS = dict(num_experts=5, num_experts_per_tok=3, moe_intermediate_size=20)
CASES = {
  'mixtral': (
    'Mixtral',
    dict(num_local_experts=5, num_experts_per_tok=2, sliding_window=4),
  ),
  'qwen2_moe': (
    'Qwen2Moe',
    dict(**EXPERTS, shared_expert_intermediate_size=24),
  ),
  'qwen3_moe': ('Qwen3Moe', dict(**EXPERTS, norm_topk_prob=True)),
  'qwen3_moe_dense_first': (
    'Qwen3Moe',
    dict(
      **EXPERTS,
      mlp_only_layers=[0, 1],
      attention_bias=True,
      use_sliding_window=True,
      sliding_window=4,
    ),
  ),
}


def make(hf, case, folder, **changes):
  """The model of transformers, saved in the folder."""
  name, fields = CASES[case]
  settings = getattr(hf.transformers, f'{name}Config')(
    **{**test_families.SHAPE, **fields, **changes}
  )
  return test_families.save(hf, f'{name}ForCausalLM', settings, folder)


@pytest.mark.parametrize('case', CASES)
def test_logits_and_back(case, hugging_face, rows, tmp_path):
  hf = hugging_face
  theirs = make(hf, case, tmp_path / 'model')
  model = encdec_adapt.load(tmp_path / 'model')
  assert parameters.count(model.config) == theirs.num_parameters()

  triple = rows((14, 9), 14, 67)
  ours = model.logits(triple[0], decoder_mask=triple[1] > 0)
  tokens, segments, _ = (hf.torch.tensor(np.asarray(x)).long() for x in triple)
  with hf.torch.no_grad():
    out = theirs(input_ids=tokens, attention_mask=segments, use_cache=False)
  real = np.asarray(triple[1]) > 0
  np.testing.assert_allclose(
    np.asarray(ours)[real], out.logits.numpy()[real], atol=hf.tolerance
  )
  test_families.assert_comes_back(
    hf,
    theirs,
    tmp_path / 'model',
    tmp_path / 'again',
    lambda model: model(input_ids=tokens, use_cache=False).logits,
  )
  raw = json.loads((tmp_path / 'again' / 'config.json').read_text())
  assert raw['model_type'] == case.removesuffix('_dense_first')


def test_load_balancing_loss(hugging_face, rows, tmp_path):
  hf = hugging_face
  one_layer = dict(num_hidden_layers=1)
  theirs = make(hf, 'mixtral', tmp_path / 'model', **one_layer)
  model = encdec_adapt.load(tmp_path / 'model')
  triple = rows((14, 9), 14, 67)
  routing = []
  model.model.decode(model.params, *triple, routing=routing)
  tokens, segments, _ = (hf.torch.tensor(np.asarray(x)).long() for x in triple)
  with hf.torch.no_grad():
    out = theirs(
      input_ids=tokens,
      attention_mask=segments,
      use_cache=False,
      output_router_logits=True,
    )
  # Theirs counts assignments by token, of which there are two.
  np.testing.assert_allclose(
    2 * experts.mean_losses(routing).balance, out.aux_loss.numpy(), rtol=1e-5
  )
  real = segments.reshape(-1).bool()
  logits = hf.torch.logsumexp(out.router_logits[0][real], dim=-1)
  np.testing.assert_allclose(
    experts.mean_losses(routing).z, (logits**2).mean().numpy(), rtol=1e-5
  )


@pytest.mark.parametrize('case', ['mixtral', 'qwen2_moe'])
def test_experts_in_one_tensor(case, hugging_face, tmp_path):
  hf = hugging_face
  theirs = make(hf, case, tmp_path / 'apart')
  theirs.save_pretrained(tmp_path / 'fused', save_original_format=False)
  found = tensor_folder.TensorFolder.open(tmp_path / 'fused').tensors
  assert 'model.layers.0.mlp.experts.gate_up_proj' in found
  apart, fused = (
    {array.path: array for array in folder.ModelFolder.open(path).arrays()}
    for path in (tmp_path / 'apart', tmp_path / 'fused')
  )
  assert apart.keys() == fused.keys()
  for path, array in apart.items():
    np.testing.assert_array_equal(array, fused[path], path)


def test_another_number_of_experts_is_refused(hugging_face, tmp_path):
  theirs = make(hugging_face, 'qwen3_moe', tmp_path / 'apart')
  theirs.save_pretrained(tmp_path / 'fused', save_original_format=False)
  for name, tensor in (('apart', 'experts.4.'), ('fused', 'mlp.experts.')):
    path = tmp_path / name / 'config.json'
    raw = json.loads(path.read_text())
    for experts_in_file, message in (
      (4, f'{tensor}.* is no tensor of the model'),
      (6, r'has no tensor .*experts\.5\.'),
    ):
      raw['num_local_experts'] = experts_in_file
      path.write_text(json.dumps(raw))
      with pytest.raises(errors.UserError, match=message):
        folder.ModelFolder.open(tmp_path / name)


@pytest.mark.parametrize(
  'case, change',
  [
    ('mixtral', {'norm_topk': False}),
    ('mixtral', {'experts_per_token': 3}),
    ('qwen2_moe', {'norm_topk': True}),
  ],
  ids=str,
)
def test_the_comparison_would_notice(
  case, change, hugging_face, rows, tmp_path
):
  hf = hugging_face
  theirs = make(hf, case, tmp_path / 'model')
  model = encdec_adapt.load(tmp_path / 'model')
  stack = model.config.decoder
  changed = config_lib.DecoderOnlyConfig(dataclasses.replace(stack, **change))
  triple = rows((14, 14), 14, 67)
  other = build.build(changed)
  ours = other.logits(model.params, other.decode(model.params, *triple))
  tokens = hf.torch.tensor(np.asarray(triple[0])).long()
  with hf.torch.no_grad():
    out = theirs(input_ids=tokens, use_cache=False)
  difference = np.abs(np.asarray(ours) - out.logits.numpy()).max()
  assert difference > 10 * hf.tolerance
