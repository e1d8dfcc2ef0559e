"""Tiny models of every family in transformers, and their predictions.

Shared by all parity tests and `tests.benchmarks.parity`. A test module that
imports this one is skipped if torch or transformers is not installed. Weights
are redrawn at a scale at which soft-caps, norm gains and windows matter, so
that a wrong variant differs by far more than the tolerance; every field that
may differ from a default or between two stacks does.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import encdec_adapt
from encdec_adapt.inference import beam_search, sampling
from encdec_adapt.inference import engine as engine_lib
from tests import tiny, tiny_tokenizers
from tests.tokenizers import t5_files

_REASON = 'parity with Hugging Face needs torch and transformers'
torch = pytest.importorskip('torch', reason=_REASON)
transformers = pytest.importorskip('transformers', reason=_REASON)
torch.set_num_threads(1)

# fp32 logits, absolute: variants that are wrong differ by 1e-3 and more.
TOLERANCE = 2e-4
VOCAB = 67
IMAGE_IDS = dict(boi_token_index=63, eoi_token_index=61, image_token_index=62)
_DRAWN = (3, 56)  # Ids of a batch: below every special one, in any vocabulary.
_LENGTH = 14  # More than 2 W + 1, for every window here.
SHORT = 9  # Of a row with padding; more than W.
_GENERATED = 12  # Tokens: more than twice any window.

# head_dim x heads differs from the width.
SHAPE = dict(
  vocab_size=VOCAB,
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
GEMMA2 = dict(
  sliding_window=4,
  query_pre_attn_scalar=7,
  attn_logit_softcapping=5.0,
  final_logit_softcapping=8.0,
)
# Fewer, other and narrower in every field, with another vocabulary.
GEMMA2_OTHER = dict(
  vocab_size=59,
  hidden_size=24,
  intermediate_size=40,
  num_hidden_layers=4,
  num_attention_heads=2,
  num_key_value_heads=1,
  head_dim=16,
  sliding_window=3,
  query_pre_attn_scalar=20,
  attn_logit_softcapping=4.0,
  rope_parameters=dict(rope_type='default', rope_theta=500.0),
)
_THREE = ['sliding_attention', 'sliding_attention', 'full_attention']
GEMMA3 = dict(
  sliding_window=5,
  query_pre_attn_scalar=7,
  layer_types=(_THREE * 2)[:5],
  rope_parameters=dict(
    sliding_attention=dict(rope_type='default', rope_theta=100.0),
    full_attention=dict(rope_type='linear', rope_theta=1000.0, factor=4.0),
  ),
)
GEMMA4 = dict(
  sliding_window=5,
  layer_types=(_THREE * 2)[:6],
  num_hidden_layers=6,
  global_head_dim=24,
  num_global_key_value_heads=1,
  attention_k_eq_v=True,
  hidden_size_per_layer_input=0,
  final_logit_softcapping=3.0,
  rope_parameters=dict(
    sliding_attention=dict(rope_type='default', rope_theta=100.0),
    full_attention=dict(
      rope_type='proportional', rope_theta=1000.0, partial_rotary_factor=0.25
    ),
  ),
)
LLAMA3 = dict(
  rope_type='llama3',
  rope_theta=1000.0,
  factor=4.0,
  low_freq_factor=1.0,
  high_freq_factor=4.0,
  original_max_position_embeddings=16,
)
# Five experts of different load, of which two or three are taken.
_EXPERTS = dict(num_experts=5, num_experts_per_tok=3, moe_intermediate_size=24)
# Stacks of other depths, and texts that reach all buckets.
T5 = dict(
  vocab_size=VOCAB,
  d_model=32,
  d_kv=12,
  d_ff=48,
  num_layers=4,
  # Fewer: transformers 5.24 makes caches of as many layers as the encoder has.
  num_decoder_layers=3,
  num_heads=4,
  relative_attention_num_buckets=8,
  relative_attention_max_distance=10,
  layer_norm_epsilon=1e-5,
  pad_token_id=0,
  eos_token_id=1,
  decoder_start_token_id=0,
)
# Stacks that differ in every field that may; 6 is the root of the width.
_BART = dict(
  vocab_size=VOCAB,
  d_model=36,
  encoder_layers=3,
  decoder_layers=2,
  encoder_attention_heads=4,
  decoder_attention_heads=6,
  encoder_ffn_dim=48,
  decoder_ffn_dim=40,
  max_position_embeddings=128,
  pad_token_id=0,
  eos_token_id=1,
  bos_token_id=2,
  decoder_start_token_id=1,
  forced_eos_token_id=None,
)
_BERT = dict(
  vocab_size=VOCAB,
  hidden_size=32,
  intermediate_size=48,
  num_hidden_layers=3,
  num_attention_heads=4,
  max_position_embeddings=34,
  layer_norm_eps=1e-4,
  pad_token_id=0,
)
VISION = dict(
  hidden_size=16,
  intermediate_size=24,
  num_hidden_layers=2,
  num_attention_heads=2,
  image_size=28,
  patch_size=14,
  vision_use_head=False,
)


@dataclasses.dataclass(frozen=True)
class Case:
  """A model of transformers.

  Attributes:
    architecture: name of its class.
    settings: returns its config.
    covers: features it covers, as in the parity table.
    is_pair: whether it is an encoder-decoder.
    encoder_window: window rule of this version of transformers with eager
      attention, if it differs from our default.
    eoi: token id of the end of an image, or None.
    pads_right: whether prompts are padded on the right only, as positions
      count padding.
    own_head: whether its head is untied, though transformers 5 ties that of
      every model built from a config of the class.
  """

  architecture: str
  settings: Callable[[], Any]
  covers: str
  is_pair: bool = False
  encoder_window: str | None = None
  eoi: int | None = None
  own_head: bool = False
  pads_right: bool = False


def _decoder(family: str, covers: str, **fields) -> Case:
  def settings():
    name = 'Gemma3TextConfig' if family == 'Gemma3' else f'{family}Config'
    return getattr(transformers, name)(**{**SHAPE, **fields})

  return Case(f'{family}ForCausalLM', settings, covers)


def t5gemma_settings(shape: Mapping, encoder: Mapping, decoder: Mapping, **top):
  """Returns the config of a T5Gemma.

  Args:
    shape: fields of both stacks.
    encoder: further fields of the encoder.
    decoder: further fields of the decoder.
    **top: fields of the pair.
  """
  module = transformers.models.t5gemma.T5GemmaModuleConfig
  return transformers.T5GemmaConfig(
    encoder=module(**{**shape, **encoder}),
    decoder=module(**{**shape, **decoder}),
    vocab_size=shape['vocab_size'],
    **top,
  )


def _t5gemma(covers: str, encoder: Mapping, **top) -> Case:
  def settings():
    return t5gemma_settings({**SHAPE, **GEMMA2}, encoder, {}, **top)

  return Case(
    'T5GemmaForConditionalGeneration', settings, covers, True, 'inclusive'
  )


def _t5(family: str, covers: str, *, own_head: bool = True, **fields) -> Case:
  def settings():
    return getattr(transformers, f'{family}Config')(**{**T5, **fields})

  name = f'{family}ForConditionalGeneration'
  return Case(name, settings, covers, True, own_head=own_head)


def _bart(family: str, covers: str, **fields) -> Case:
  def settings():
    return getattr(transformers, f'{family}Config')(**{**_BART, **fields})

  name = f'{family}ForConditionalGeneration'
  return Case(name, settings, covers, True, pads_right=True)


def t5gemma2_settings():
  """Returns the config of a T5Gemma 2 with different stacks."""
  text = {**SHAPE, **GEMMA3}
  shorter = dict(
    num_hidden_layers=4, sliding_window=4, layer_types=(_THREE * 2)[:4]
  )
  return transformers.T5Gemma2Config(
    encoder=dict(
      text_config={**text, **shorter, 'model_type': 't5gemma2_text'},
      vision_config=VISION,
      mm_tokens_per_image=1,
      **IMAGE_IDS,
    ),
    decoder={**text, 'model_type': 't5gemma2_decoder'},
    image_token_index=IMAGE_IDS['image_token_index'],
    eoi_token_index=IMAGE_IDS['eoi_token_index'],
  )


def gemma3_settings():
  """Returns the config of a Gemma 3 that reads images."""
  return transformers.Gemma3Config(
    text_config={**SHAPE, **GEMMA3},
    vision_config=VISION,
    mm_tokens_per_image=1,
    **IMAGE_IDS,
  )


def gemma4_settings():
  """Returns the config of a Gemma 4 that reads images and sound."""
  return transformers.Gemma4Config(
    text_config={**SHAPE, **GEMMA4},
    vision_config=dict(
      hidden_size=16,
      intermediate_size=24,
      num_hidden_layers=1,
      num_attention_heads=2,
      num_key_value_heads=2,
      head_dim=8,
      position_embedding_size=16,
    ),
    audio_config=dict(
      hidden_size=16,
      num_hidden_layers=1,
      num_attention_heads=2,
      output_proj_dims=16,
    ),
    image_token_id=VOCAB - 1,
    audio_token_id=VOCAB - 2,
    video_token_id=VOCAB - 3,
  )


CASES: Mapping[str, Case] = {
  'gemma': _decoder('Gemma', 'one key/value head', num_key_value_heads=1),
  'gemma2': _decoder('Gemma2', 'windows, both soft-caps', **GEMMA2),
  'gemma3': _decoder(
    'Gemma3', 'qk-norm, two rotary bases, linear scaling', **GEMMA3
  ),
  'gemma4': Case(
    'Gemma4ForCausalLM',
    lambda: transformers.Gemma4TextConfig(**{**SHAPE, **GEMMA4}),
    'values from keys, wider global heads that rotate in part, layer scalars',
  ),
  'gemma4_shared': Case(
    'Gemma4ForCausalLM',
    lambda: transformers.Gemma4TextConfig(
      **{
        **SHAPE,
        **GEMMA4,
        'attention_k_eq_v': False,
        'num_hidden_layers': 8,
        'layer_types': _THREE[1:] * 4,
        'num_kv_shared_layers': 4,
        'hidden_size_per_layer_input': 8,
        'vocab_size_per_layer_input': VOCAB,
        'use_double_wide_mlp': True,
      }
    ),
    'keys and values of other layers, wider feed-forwards, a second table',
  ),
  'gemma4_experts': Case(
    'Gemma4ForCausalLM',
    lambda: transformers.Gemma4TextConfig(
      **SHAPE
      | GEMMA4
      | dict(num_hidden_layers=4, layer_types=_THREE[1:] * 2)
      | dict(enable_moe_block=True, num_experts=5, top_k_experts=3)
      | dict(moe_intermediate_size=24)
    ),
    'experts beside a feed-forward, scaled one by one',
  ),
  'gemma4_unified_images': Case(
    'Gemma4UnifiedForConditionalGeneration',
    lambda: transformers.Gemma4UnifiedConfig(
      text_config={
        **SHAPE,
        **{k: v for k, v in GEMMA4.items() if 'per_layer' not in k},
      },
      vision_config=dict(mm_embed_dim=16, mm_posemb_size=8, patch_size=4),
      audio_config=dict(audio_embed_dim=16),
      # Their model reads these as padding, and generation may write any token.
      image_token_id=0,
      audio_token_id=0,
      video_token_id=0,
    ),
    'text of the 12B, with vision and audio parts',
  ),
  'gemma4_images': Case(
    'Gemma4ForConditionalGeneration',
    gemma4_settings,
    'text of a folder with vision and audio parts',
  ),
  'gemma3_images': Case(
    'Gemma3ForConditionalGeneration',
    gemma3_settings,
    'text of a folder with a vision part',
  ),
  'llama3': _decoder(
    'Llama',
    'llama3 scaling, biases, untied',
    rope_parameters=LLAMA3,
    attention_bias=True,
    mlp_bias=True,
  ),
  'llama_tied': _decoder('Llama', 'tied head', tie_word_embeddings=True),
  'mistral': _decoder('Mistral', 'a window in every layer', sliding_window=4),
  'qwen2': _decoder('Qwen2', 'biases of query, key, value'),
  'qwen2_window': _decoder(
    'Qwen2',
    'a window in the upper layers',
    use_sliding_window=True,
    sliding_window=4,
    max_window_layers=2,
  ),
  'qwen3': _decoder('Qwen3', 'qk-norm, biases', attention_bias=True),
  'mixtral': _decoder(
    'Mixtral',
    'experts, a window in every layer',
    num_local_experts=5,
    num_experts_per_tok=2,
    sliding_window=4,
  ),
  'qwen2_moe': _decoder(
    'Qwen2Moe',
    'experts and a shared one',
    **_EXPERTS,
    shared_expert_intermediate_size=40,
  ),
  'qwen3_moe': _decoder(
    'Qwen3Moe',
    'experts above dense layers',
    **_EXPERTS,
    norm_topk_prob=True,
    mlp_only_layers=[0, 1],
    attention_bias=True,
    use_sliding_window=True,
    sliding_window=4,
  ),
  't5gemma': _t5gemma('balanced, tied', {}),
  't5gemma_unbalanced': _t5gemma(
    'stacks that differ in every field, untied',
    GEMMA2_OTHER,
    tie_word_embeddings=False,
  ),
  't5gemma2': Case(
    'T5Gemma2ForConditionalGeneration',
    t5gemma2_settings,
    'merged attention, end of image, vision part carried',
    is_pair=True,
    eoi=IMAGE_IDS['eoi_token_index'],
  ),
  'gpt2': Case(
    'GPT2LMHeadModel',
    lambda: transformers.GPT2Config(
      **dict(vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=3, n_head=4),
      **dict(n_inner=48, layer_norm_epsilon=1e-4, pad_token_id=0),
      **dict(bos_token_id=2, eos_token_id=1),
    ),
    'LayerNorm, learned positions, fused kernels stored by input',
  ),
  'bert': Case(
    'BertForMaskedLM',
    lambda: transformers.BertConfig(**_BERT, type_vocab_size=2),
    'norms of the sums, exact GELU, a head with a bias',
  ),
  'roberta': Case(
    'RobertaForMaskedLM',
    lambda: transformers.RobertaConfig(
      **_BERT, bos_token_id=2, eos_token_id=1, type_vocab_size=1
    ),
    'positions of real tokens, from 2',
  ),
  'modernbert': Case(
    'ModernBertForMaskedLM',
    lambda: transformers.ModernBertConfig(
      **{k: v for k, v in _BERT.items() if 'layer' not in k},
      **dict(num_hidden_layers=8, local_attention=6, norm_eps=1e-4),
      rope_parameters={
        'full_attention': dict(rope_type='default', rope_theta=1000.0),
        'sliding_attention': dict(rope_type='default', rope_theta=100.0),
      },
    ),
    'windows of both directions, fused gates, layer 0 without a norm',
  ),
  'bart': _bart(
    'Bart', 'norms of the sums, positions and norms of embeddings by stack'
  ),
  'mbart': _bart(
    'MBart', 'norms before and at the end, scaled', scale_embedding=True
  ),
  't5': _t5(
    'T5', 'one table a stack, one branch, tied and scaled', own_head=False
  ),
  't5_v1_1': _t5(
    'T5',
    'gated by GELU, untied',
    feed_forward_proj='gated-gelu',
    tie_word_embeddings=False,
  ),
  'mt5': _t5('MT5', 'gated by SiLU', feed_forward_proj='gated-silu'),
  'umt5': _t5('UMT5', 'a table a layer, untied and scaled'),
}


# -- Models -------------------------------------------------------------------


def make(case: Case, seed: int = 0, settings: Any = None):
  """Returns a model in eval mode with every weight drawn from N(0, 0.3^2).

  Gains that are initialised to one are drawn around one.

  Args:
    case: case of the model.
    seed: seed of the draws.
    settings: config; None for that of the case.
  """
  settings = settings or case.settings()
  with_eager_attention(settings)
  model = getattr(transformers, case.architecture)(settings)
  if case.own_head:
    model.lm_head.weight = torch.nn.Parameter(model.shared.weight.clone())
  if settings.model_type == 'bart' and model.can_generate():
    model.generation_config.forced_bos_token_id = settings.bos_token_id
  generator = torch.Generator().manual_seed(seed)
  with torch.no_grad():
    for weight in model.parameters():
      weight.normal_(float((weight == 1).all()), 0.3, generator=generator)
    for name, scalar in model.named_buffers():
      if name.endswith('layer_scalar'):  # Gemma 4; not near 0.
        scalar.uniform_(0.7, 1.3, generator=generator)
      if name == 'final_logits_bias' and settings.model_type == 'bart':
        scalar.normal_(0.0, 0.3, generator=generator)
    for name, weight in model.named_parameters():
      if name.endswith('Attention.q.weight'):
        weight.mul_(0.3)  # T5 does not divide scores by sqrt(12).
    if case.is_pair and getattr(settings, 'scale_decoder_outputs', False):
      model.lm_head.weight.mul_(4.0)  # Its states are divided by sqrt(32).
  return model.float().eval()


def with_eager_attention(settings: Any) -> None:
  """Sets eager attention in a config and all inner configs."""
  settings._attn_implementation = 'eager'
  for part in vars(settings).values():
    if isinstance(part, transformers.PreTrainedConfig):
      with_eager_attention(part)


def load(folder: pathlib.Path, may_miss: str | None = None, **arguments):
  """Loads a folder by its class; no weight may be missing or unexpected.

  Args:
    folder: folder of the model.
    may_miss: weights with this in their name may be missing.
    **arguments: passed to `from_pretrained`.
  """
  (name,) = json.loads((folder / 'config.json').read_text())['architectures']
  model, info = getattr(transformers, name).from_pretrained(
    folder, output_loading_info=True, attn_implementation='eager', **arguments
  )
  for problem in ('missing_keys', 'unexpected_keys', 'mismatched_keys'):
    found = {
      key for key in info[problem] if not (may_miss and may_miss in str(key))
    }
    assert not found, f'{problem}: {found}'
  return model.eval()


def save_tokenizer(folder: pathlib.Path, family: str) -> pathlib.Path:
  """Saves a tokenizer and names the class that reads it; returns the folder."""
  tiny_tokenizers.save(folder, family, tiny.text(30), 400)
  file = folder / 'tokenizer_config.json'
  config = json.loads(file.read_text())
  config['tokenizer_class'] = 'PreTrainedTokenizerFast'
  file.write_text(json.dumps(config))
  return folder


def save_t5_tokenizer(folder: pathlib.Path) -> Any:
  """Saves T5's tokenizer as transformers does; returns it."""
  files = t5_files.train(folder.with_name('pieces') / 'spiece.model')
  tokenizer = transformers.T5Tokenizer.from_pretrained(files.parent)
  tokenizer.save_pretrained(folder)
  return tokenizer


# -- Batches and predictions --------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Batch:
  """Three rows: without padding, padded on the right, and on the left.

  Attributes:
    decoder: tokens [B, T].
    decoder_mask: True at tokens, [B, T].
    encoder: tokens [B, S], None for a decoder-only model.
    encoder_mask: True at tokens, [B, S].
  """

  decoder: np.ndarray
  decoder_mask: np.ndarray
  encoder: np.ndarray | None = None
  encoder_mask: np.ndarray | None = None


def batch(case: Case) -> Batch:
  """Returns a batch with rows longer than twice any window."""
  sides = _rows(_LENGTH, 0)
  if case.is_pair:
    sides += _rows(_LENGTH - 1, 1)
    for x in sides[2:] if case.pads_right else ():
      x[2] = x[2, ::-1].copy()
  for tokens in sides[::2]:
    if case.eoi is not None:
      tokens[0, 3] = case.eoi
  return Batch(*sides)


def _rows(length: int, seed: int) -> list[np.ndarray]:
  """Returns tokens and mask of three rows."""
  tokens = np.random.default_rng(seed).integers(*_DRAWN, (3, length), np.int32)
  mask = np.ones(tokens.shape, bool)
  mask[1, SHORT:] = False
  mask[2, : length - SHORT] = False
  return [np.where(mask, tokens, 0), mask]


def their_output(model, rows: Batch):
  """Returns the model's logits for a batch, a tensor with gradients."""
  inputs = {'attention_mask': rows.decoder_mask, 'input_ids': rows.decoder}
  if rows.encoder is not None:
    inputs = {f'decoder_{name}': value for name, value in inputs.items()}
    inputs |= {'attention_mask': rows.encoder_mask, 'input_ids': rows.encoder}
  tensors = {k: torch.tensor(v).long() for k, v in inputs.items()}
  return model(**tensors, use_cache=False).logits


def their_logits(model, rows: Batch) -> np.ndarray:
  """Returns logits at every token (not at padding), [N, V], fp32."""
  with torch.no_grad():
    logits = their_output(model, rows)
  return logits.float().numpy()[rows.decoder_mask]


def our_logits(model, rows: Batch) -> np.ndarray:
  """Returns the same for a model that `encdec_adapt.load` returned."""
  logits = model.logits(
    rows.decoder, rows.encoder, rows.encoder_mask, rows.decoder_mask
  )
  return np.asarray(logits)[rows.decoder_mask]


def assert_same_logits(ours, theirs, rows: Batch) -> None:
  """Compares the fp32 logits of a model of ours with those of one in torch."""
  np.testing.assert_allclose(
    our_logits(ours, rows), their_logits(theirs, rows), rtol=0, atol=TOLERANCE
  )


def rms(difference: np.ndarray) -> float:
  """Returns the root of the mean square."""
  return float(np.sqrt(np.mean(np.square(difference))))


def in_bfloat16(
  case: Case, seed: int, folder: pathlib.Path
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns logits [N, V]: theirs in fp32, theirs in bf16, ours in bf16.

  Args:
    case: case of the model.
    seed: seed of its weights.
    folder: folder to save it in.
  """
  model, rows = make(case, seed), batch(case)
  model.save_pretrained(folder)
  ours = encdec_adapt.load(
    folder, dtype=jnp.bfloat16, encoder_window=case.encoder_window
  )
  return (
    their_logits(model, rows),
    their_logits(load(folder, dtype=torch.bfloat16), rows),
    our_logits(ours, rows),
  )


def rounding_ratios(
  logits: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]],
) -> tuple[float, float]:
  """Returns the rounding error of our bf16 logits, relative to theirs.

  Root mean squares over all models together: the largest difference of so few
  logits is chance.

  Args:
    logits: results of `in_bfloat16`, one per model.

  Returns:
    Our distance to their fp32 logits and to their bf16 logits, each divided by
    the distance between those two.
  """
  exact, theirs, ours = (
    np.concatenate(some) for some in zip(*logits, strict=True)
  )
  unit = rms(theirs - exact)
  return rms(ours - exact) / unit, rms(ours - theirs) / unit


def prompts(rows: Batch) -> tuple[np.ndarray, np.ndarray]:
  """Returns tokens and mask [B, S] of the prompts of a batch."""
  if rows.encoder is not None:
    return rows.encoder, rows.encoder_mask
  # Prompts of decoder-only models end where generation starts.
  return rows.decoder[[0, 2]], rows.decoder_mask[[0, 2]]


def their_text(model, rows: Batch, **options: Any) -> np.ndarray:
  """Returns the continuation without prompt and BOS, [B, n].

  Args:
    model: model of transformers.
    rows: batch with the prompts.
    **options: of `generate`; greedy without.
  """
  tokens, mask = prompts(rows)
  text = model.generate(
    input_ids=torch.tensor(tokens).long(),
    attention_mask=torch.tensor(mask).long(),
    max_new_tokens=_GENERATED,
    do_sample=False,
    **options,
  ).numpy()
  # An encoder-decoder's text begins with BOS, a prompt's with the prompt.
  return text[:, 1 if rows.encoder is not None else tokens.shape[1] :]


def assert_same_text(ours, theirs, rows: Batch) -> None:
  """Compares generation from padded prompts token for token.

  Greedy, with a repetition penalty, and by beam search with two length
  penalties.

  Args:
    ours: model that `encdec_adapt.load` returned.
    theirs: corresponding model in torch.
    rows: batch with the prompts.
  """
  # Of a beam search two prompts at a time; the last ones are fewer.
  engine = ours.engine(rows=6)
  texts = [row[real > 0] for row, real in zip(*prompts(rows), strict=True)]
  for penalty in (1.0, 1.4):
    expected = their_text(theirs, rows, repetition_penalty=penalty)
    chosen = sampling.SamplingConfig(repetition_penalty=penalty)
    found = dict(
      engine.run(
        engine_lib.Request(prompt, _GENERATED, chosen) for prompt in texts
      )
    )
    assert max(len(completion.tokens) for completion in found.values()) > 1
    for row, completion in found.items():
      _assert_text(completion.tokens, expected[row])
  for penalty in (0.5, 2.0):
    expected = their_text(theirs, rows, num_beams=3, length_penalty=penalty)
    found = beam_search.search(
      engine, texts, beams=3, max_tokens=_GENERATED, length_penalty=penalty
    )
    for row, completion in found:
      _assert_text(completion.tokens, expected[row])


def _assert_text(tokens: np.ndarray, expected: np.ndarray) -> None:
  """Compares a row's tokens; the rest of theirs is padding."""
  np.testing.assert_array_equal(tokens, expected[: len(tokens)])
  # transformers fills up with EOS instead where padding is token 0.
  assert set(expected[len(tokens) :]) <= {0, 1}, (tokens, expected)
