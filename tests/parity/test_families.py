"""Every family from the folder that transformers saves: logits, fp32 eager."""

import numpy as np
import pytest

import encdec_adapt
from encdec_adapt.interop import export, tensor_folder
from encdec_adapt.interop import folder as folder_lib
from encdec_adapt.models import parameters

pytestmark = pytest.mark.parity

# Rows longer than 2 W + 1, head_dim x heads different from the width.
SHAPE = dict(
  vocab_size=67,
  hidden_size=32,
  intermediate_size=48,
  num_hidden_layers=5,
  num_attention_heads=4,
  num_key_value_heads=2,
  head_dim=12,
  max_position_embeddings=64,
  pad_token_id=0,
  eos_token_id=1,
  bos_token_id=2,
)
LLAMA3 = dict(
  rope_type='llama3',
  rope_theta=1000.0,
  factor=4.0,
  low_freq_factor=1.0,
  high_freq_factor=4.0,
  original_max_position_embeddings=16,
)
GEMMA3_ROPE = dict(
  sliding_attention=dict(rope_type='default', rope_theta=100.0),
  full_attention=dict(rope_type='linear', rope_theta=1000.0, factor=4.0),
)
GEMMA3 = dict(
  sliding_window=5,
  query_pre_attn_scalar=7,
  sliding_window_pattern=3,
  layer_types=['sliding_attention', 'sliding_attention', 'full_attention'] * 2,
  rope_parameters=GEMMA3_ROPE,
)
GEMMA3['layer_types'] = GEMMA3['layer_types'][:5]
CASES = {
  'gemma2': (
    'Gemma2',
    dict(
      sliding_window=4,
      query_pre_attn_scalar=7,
      attn_logit_softcapping=5.0,
      final_logit_softcapping=8.0,
    ),
  ),
  'gemma3': ('Gemma3', GEMMA3),
  'llama3': (
    'Llama',
    dict(rope_parameters=LLAMA3, attention_bias=True, mlp_bias=True),
  ),
  'llama_tied': ('Llama', dict(tie_word_embeddings=True)),
  'mistral': ('Mistral', dict(sliding_window=4)),
  'qwen2': ('Qwen2', {}),
  'qwen2_window': (
    'Qwen2',
    dict(use_sliding_window=True, sliding_window=4, max_window_layers=2),
  ),
  'qwen3': ('Qwen3', dict(attention_bias=True)),
}


def save(hf, name, settings, folder):
  """A tiny model of the class, redrawn, saved as a user gets it."""
  settings._attn_implementation = 'eager'
  model = hf.redraw(getattr(hf.transformers, name)(settings))
  model.save_pretrained(folder)
  return model


def assert_comes_back(hf, theirs, source, folder, logits):
  """Exported, every tensor is bit-equal and the class loads all of them."""
  opened = folder_lib.ModelFolder.open(source)
  arrays = {array.path: np.asarray(array) for array in opened.arrays()}
  export.write(folder, opened.config, arrays)
  before, after = (tensor_folder.TensorFolder.open(x) for x in (source, folder))
  kept = set(before.tensors) - set(opened.unused)
  assert set(after.tensors) == kept
  for name in kept:
    np.testing.assert_array_equal(after.read(name), before.read(name), name)
  again, info = type(theirs).from_pretrained(
    folder, output_loading_info=True, attn_implementation='eager'
  )
  missing = {k for k in info['missing_keys'] if k not in opened.unused}
  assert not [
    k for k in missing if 'vision' not in k and 'multi_modal' not in k
  ]
  assert not info['unexpected_keys']
  assert not info['mismatched_keys']
  with hf.torch.no_grad():
    one, other = (logits(model.eval()) for model in (theirs, again))
  np.testing.assert_array_equal(one.numpy(), other.numpy())


@pytest.mark.parametrize('case', CASES)
def test_decoder_only(case, hugging_face, rows, tmp_path):
  hf = hugging_face
  name, fields = CASES[case]
  config_name = 'Gemma3TextConfig' if name == 'Gemma3' else f'{name}Config'
  settings = getattr(hf.transformers, config_name)(**{**SHAPE, **fields})
  theirs = save(hf, f'{name}ForCausalLM', settings, tmp_path / 'model')
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
  assert_comes_back(
    hf,
    theirs,
    tmp_path / 'model',
    tmp_path / 'again',
    lambda model: model(input_ids=tokens, use_cache=False).logits,
  )


def test_t5gemma2(hugging_face, rows, tmp_path):
  hf = hugging_face
  t = hf.transformers
  text = {**SHAPE, **GEMMA3}
  settings = t.T5Gemma2Config(
    encoder=dict(
      text_config=dict(
        **{**text, 'num_hidden_layers': 4, 'sliding_window': 4},
        model_type='t5gemma2_text',
      )
      | {'layer_types': text['layer_types'][:4]},
      vision_config=dict(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
      ),
      mm_tokens_per_image=1,
      boi_token_index=60,
      eoi_token_index=61,
      image_token_index=62,
    ),
    decoder=dict(**text, model_type='t5gemma2_decoder'),
    image_token_index=62,
    eoi_token_index=61,
  )
  for part in (
    settings,
    settings.encoder,
    settings.encoder.text_config,
    settings.decoder,
  ):
    part._attn_implementation = 'eager'
  theirs = save(
    hf, 'T5Gemma2ForConditionalGeneration', settings, tmp_path / 'model'
  )
  model = encdec_adapt.load(tmp_path / 'model')
  encoder, decoder = rows((13, 10), 13, 60), rows((9, 12), 12, 60, seed=1)
  encoder = (encoder[0].at[0, 3].set(61), *encoder[1:])

  ours = model.logits(decoder[0], encoder[0], encoder[1] > 0, decoder[1] > 0)
  ids, mask, decoder_ids, decoder_mask = (
    hf.torch.tensor(np.asarray(x)).long() for x in (*encoder[:2], *decoder[:2])
  )
  with hf.torch.no_grad():
    out = theirs(
      input_ids=ids,
      attention_mask=mask,
      decoder_input_ids=decoder_ids,
      decoder_attention_mask=decoder_mask,
      use_cache=False,
    )
  real = np.asarray(decoder[1]) > 0
  np.testing.assert_allclose(
    np.asarray(ours)[real],
    out.logits.numpy()[real],
    atol=hf.tolerance,
  )
  assert_comes_back(
    hf,
    theirs,
    tmp_path / 'model',
    tmp_path / 'again',
    lambda model: (
      model(
        input_ids=ids, decoder_input_ids=decoder_ids, use_cache=False
      ).logits
    ),
  )
