"""Models of encdec_adapt in torch, for `transformers`.

Exports include this file, and `transformers` runs it with
`trust_remote_code=True`. Parameters have the names and shapes of encdec_adapt.
Letters of shapes: batch B, encoder length S, decoder length T, either length L,
width D, query heads N, key/value heads K, head dimension H, keys C. `stack` has
the keys of encdec_adapt's `config.model.encoder` or `.decoder`.
"""

import functools
import math

import torch
from torch import nn
from torch.nn import functional
import transformers
from transformers import cache_utils, modeling_outputs

from .configuration_encdec_adapt import EncDecAdaptConfig

_HIDDEN = -1e30  # Below every score, and finite.
_ACTIVATIONS = {
  'silu': functional.silu,
  'relu': functional.relu,
  'gelu_tanh': functools.partial(functional.gelu, approximate='tanh'),
}
# transformers 5 renamed the field of caches between minor versions.
_IS_NEW = hasattr(modeling_outputs.Seq2SeqLMOutput, 'cache')
_CACHE = 'cache' if _IS_NEW else 'past_key_values'


def of_kind(stack, kind):
  """Returns the stack with the heads of layers of a kind."""
  stack = dict(stack)
  for name in ('head_dim', 'kv_heads'):
    size = stack.pop(f'global_{name}', 0)
    stack[name] = size if size and kind == 'global' else stack[name]
  stack['values_are_keys'] &= kind == 'global'
  return stack


def rms_norm(x, scale, stack):
  """Applies RMSNorm over the last axis, in float32; None for no gain."""
  x32 = x.float()
  mean_square = x32.square().mean(-1, keepdim=True)
  normal = x32 * torch.rsqrt(mean_square + stack['norm_eps'])
  if scale is None:
    return normal.type_as(x)
  # Gemma casts after the gain, Llama before it.
  if stack['norm_gain'] == 'direct':
    return normal.type_as(x) * scale
  one = stack['norm_gain'] == 'one_plus'
  return (normal * (scale.float() + one)).type_as(x)


def softcap(x, cap):
  """Bounds x to (-cap, cap); 0 means no cap."""
  return cap * torch.tanh(x / cap) if cap else x


def rotation(stack, kind, positions):
  """Returns cosines and sines [L, 1, H / 2] of positions [L], in float32."""
  theta, scaling = stack['rope_theta'], stack['rope_scaling']
  # The base of local layers is never scaled (Gemma 3).
  if kind == 'local' and stack['local_rope_theta']:
    theta, scaling = stack['local_rope_theta'], {'kind': 'none'}
  head_dim = of_kind(stack, kind)['head_dim']
  steps = torch.arange(0, head_dim, 2, device=positions.device)
  frequency = theta ** -(steps.float() / head_dim)
  if scaling['kind'] == 'proportional':
    frequency[int(scaling['fraction'] * head_dim // 2) :] = 0.0
  elif scaling['kind'] != 'none':
    share = 0.0
    if scaling['kind'] == 'llama3':
      low, high = scaling['low'], scaling['high']
      # Periods in the original training length.
      periods = scaling['original_length'] * frequency / (2 * math.pi)
      share = ((periods - low) / (high - low)).clamp(0, 1)
    frequency = (1 - share) * frequency / scaling['factor'] + share * frequency
  angle = (positions[:, None].float() * frequency)[:, None]
  return angle.cos(), angle.sin()


def rotate(x, cos, sin):
  """Rotates the two halves of the last axis of x [B, L, N, H]."""
  cos, sin = cos.type_as(x), sin.type_as(x)
  first, second = x.chunk(2, dim=-1)
  halves = first * cos - second * sin, second * cos + first * sin
  return torch.cat(halves, dim=-1)


def near(stack, kind, start, length, device):
  """Returns the mask [L, C] of keys in reach of queries from `start` on."""
  positions = torch.arange(start + length, device=device)
  behind = positions[start:, None] - positions
  window = stack['window'] if kind == 'local' else 1 << 60
  past, future = {
    'causal': (window - 1, 0),
    'exclusive': (window - 1, window - 1),
    'inclusive': (window, window),
    'centered': ((window + 1) // 2 - 1, window // 2),
  }[stack['window_rule']]
  return (behind <= past) & (-behind <= future)


def _check(options):
  """Checks for unsupported options, which would be silently ignored."""
  for name in options.keys() - {'return_dict', 'cache_position'}:
    if options[name] is not None and options[name] is not False:
      raise NotImplementedError(f'{name} is not supported by this model.')


class _Weights(nn.Module):
  """Parameters of the given shapes; `_init_weights` initialises them."""

  def __init__(self, stack, **shapes):
    super().__init__()
    self.stack = stack
    for name, shape in shapes.items():
      setattr(self, name, nn.Parameter(torch.empty(shape)))

  def project(self, name, x):
    """Contracts the last axes of x [B, L, ..] with a kernel's first axes."""
    kernel, bias = getattr(self, name), getattr(self, f'{name}_bias', None)
    shape = kernel.shape[x.dim() - 2 :]
    x = x.flatten(2)  # [B, L, I]
    matrix = kernel.reshape(x.shape[-1], -1)  # [I, O]
    bias = None if bias is None else bias.flatten()
    return functional.linear(x, matrix.T, bias).unflatten(-1, shape)


class Norm(_Weights):
  """RMSNorm of the residual stream."""

  def __init__(self, stack):
    super().__init__(stack, scale=(stack['width'],))

  def forward(self, x):
    return rms_norm(x, self.scale, self.stack)


class Table(_Weights):
  """Embedding table, or the table of a head."""

  def __init__(self, stack, eoi_token=-1):
    vector = {'eoi': (stack['width'],)} if eoi_token >= 0 else {}
    table = (stack['vocab_size'], stack['width'])
    super().__init__(stack, table=table, **vector)
    self.eoi_token = eoi_token

  def forward(self, tokens):
    """Returns the input states [B, L, D] of the first layer."""
    x = functional.embedding(tokens, self.table)
    # Rounds the factor to the dtype first, as in training.
    if self.stack['scale_embeddings']:
      x = x * torch.tensor(self.stack['width'] ** 0.5).type_as(x)
    # The end of an image (T5Gemma 2) has a separate, unscaled vector.
    if self.eoi_token >= 0:
      x = torch.where((tokens == self.eoi_token)[..., None], self.eoi, x)
    return x


class MLP(_Weights):
  """Gated feed-forward."""

  def __init__(self, stack):
    width, inner = stack['width'], stack['mlp_width']
    shapes = {name: (width, inner) for name in ('gate', 'up')}
    shapes['down'] = inner, width
    if stack['mlp_bias']:
      shapes |= {f'{name}_bias': shape[1:] for name, shape in shapes.items()}
    super().__init__(stack, **shapes)

  def forward(self, x):
    gate = _ACTIVATIONS[self.stack['activation']](self.project('gate', x))
    return self.project('down', gate * self.project('up', x))


class Attention(_Weights):
  """Attention with its projections."""

  def __init__(self, stack, source_width):
    width, head_dim = stack['width'], stack['head_dim']
    shapes = {'query': (width, stack['heads'], head_dim)}
    for name in ('key', 'value')[: 2 - stack['values_are_keys']]:
      shapes[name] = source_width, stack['kv_heads'], head_dim
    if stack['attention_bias'] != 'none':
      shapes |= {f'{name}_bias': shape[1:] for name, shape in shapes.items()}
    shapes['output'] = stack['heads'], head_dim, width
    if stack['attention_bias'] == 'qkvo':
      shapes['output_bias'] = (width,)
    if stack['qk_norm']:
      shapes |= {'query_norm': (head_dim,), 'key_norm': (head_dim,)}
    super().__init__(stack, **shapes)

  def _normed(self, name, x):
    if self.stack['qk_norm']:
      x = rms_norm(x, getattr(self, f'{name}_norm'), self.stack)
    return x

  def queries(self, x, angles=None):
    """Returns queries [B, N, T, H], rotated by angles if given."""
    q = self._normed('query', self.project('query', x))
    return (rotate(q, *angles) if angles else q).transpose(1, 2)

  def keys_values(self, x, angles=None):
    """Returns keys and values [B, K, L, H]; keys rotated by angles if given."""
    k = self.project('key', x)
    v = k if self.stack['values_are_keys'] else self.project('value', x)
    v = rms_norm(v, None, self.stack) if self.stack['value_norm'] else v
    k = self._normed('key', k)
    k = rotate(k, *angles) if angles else k
    return k.transpose(1, 2), v.transpose(1, 2)

  def forward(self, q, k, v, visible):
    """Computes attention; `visible` [B, 1, T or 1, C] masks keys per query."""
    batch, heads, length, head_dim = q.shape
    # Query heads of a key head share an axis: keys need no copies.
    q = q.reshape(batch, k.shape[1], -1, head_dim)
    scores = (q @ k.mT).float() * self.stack['query_scale'] ** -0.5
    scores = softcap(scores, self.stack['attention_softcap'])
    scores = scores.view(batch, heads, length, -1)
    weights = scores.masked_fill(~visible, _HIDDEN).softmax(-1)
    # Queries without a visible key return zeros.
    weights = weights.masked_fill(~visible, 0).type_as(v)
    out = weights.view(batch, k.shape[1], -1, k.shape[2]) @ v
    out = out.reshape(batch, heads, length, head_dim).transpose(1, 2)
    return self.project('output', out)


class Layer(nn.Module):
  """Self-attention, cross-attention if `cross_width` is set, feed-forward."""

  def __init__(self, stack, number):
    super().__init__()
    self.number = number
    self.kind = stack['pattern'][number % len(stack['pattern'])]
    self.stack = stack = of_kind(stack, self.kind)
    self.attention = Attention(stack, stack['width'])
    reads = stack['cross_width'] and stack['cross_layers'] in ('all', self.kind)
    self.merged = reads and stack['cross_merged']
    self.crosses = reads and not self.merged
    for part in ['attention', 'mlp'] + (['cross'] if self.crosses else []):
      setattr(self, f'pre_{part}_norm', Norm(stack))
      if stack['post_norms']:
        setattr(self, f'post_{part}_norm', Norm(stack))
    if self.crosses:
      self.cross_attention = Attention(stack, stack['cross_width'])
    self.mlp = MLP(stack)
    if stack['layer_scalar']:
      self.layer_scalar = _Weights(stack, scale=(1,))
      self.layer_scalar.scale.requires_grad_(False)

  def _add(self, x, part, update):
    if self.stack['post_norms']:
      update = getattr(self, f'post_{part}_norm')(update)
    return x + update

  def _memory(self, attention, states, cache):
    """Returns the encoder's keys and values, computed once."""
    if cache is None:
      return attention.keys_values(states)
    stored = cache.cross_attention_cache
    if not cache.is_updated.get(self.number):
      stored.update(*attention.keys_values(states), self.number)
      cache.is_updated[self.number] = True
    return stored.layers[self.number].keys, stored.layers[self.number].values

  def forward(self, x, context, memory, cache):
    """Returns the states [B, L, D] after the layer.

    Args:
      x: states before the layer, [B, L, D].
      context: rotation angles and visible keys by kind of layer.
      memory: encoder states [B, S, E] and their visibility, or None.
      cache: an `EncoderDecoderCache`, or None.
    """
    states, states_visible = memory or (None, None)
    angles, visible = context[self.kind]
    y = self.pre_attention_norm(x)
    q = self.attention.queries(y, angles)
    k, v = self.attention.keys_values(y, angles)
    if cache is not None:
      k, v = cache.self_attention_cache.update(k, v, self.number)
    if self.merged:
      # The encoder's unrotated keys follow the decoder's.
      more = self._memory(self.attention, states, cache)
      k, v = (torch.cat(x, 2) for x in zip((k, v), more, strict=True))
      shape = (-1, -1, visible.shape[2], -1)
      visible = torch.cat([visible, states_visible.expand(shape)], -1)
    x = self._add(x, 'attention', self.attention(q, k, v, visible))
    if self.crosses:
      cross = self.cross_attention
      k, v = self._memory(cross, states, cache)
      q = cross.queries(self.pre_cross_norm(x))
      x = self._add(x, 'cross', cross(q, k, v, states_visible))
    x = self._add(x, 'mlp', self.mlp(self.pre_mlp_norm(x)))
    return x * self.layer_scalar.scale if self.stack['layer_scalar'] else x


class Stack(nn.Module):
  """Maps token ids to states after the final norm."""

  main_input_name = 'input_ids'  # `generate` reads it from the encoder.

  def __init__(self, stack, eoi_token, embedder=None):
    super().__init__()
    self.stack = stack
    if embedder is None:
      self.embedder = Table(stack, eoi_token)
    # In a list, so that torch does not register the decoder's table twice.
    self._embedder = [embedder or self.embedder]
    self.layers = nn.ModuleList(Layer(stack, i) for i in range(stack['layers']))
    self.final_norm = Norm(stack)
    if not stack['tied']:
      self.head = Table(stack)

  def forward(
    self, input_ids, attention_mask=None, memory=None, cache=None, **options
  ):
    """Returns the states of tokens [B, L] that continue the cache.

    Args:
      input_ids: token ids.
      attention_mask: 0 at padding, [B, C], including cached tokens.
      memory: encoder states [B, S, E] and mask [B, S], for a decoder.
      cache: an EncoderDecoderCache, updated with the new keys and values.
      **options: see `_check`.
    """
    _check(options)
    start = 0 if cache is None else cache.get_seq_length()
    length, device = input_ids.shape[1], input_ids.device
    if attention_mask is None:
      attention_mask = input_ids.new_ones((len(input_ids), start + length))
    tokens = attention_mask[:, None, None].to(device) != 0
    positions = torch.arange(start, start + length, device=device)
    # Padding has positions too: only differences of positions matter.
    context = {
      kind: (
        rotation(self.stack, kind, positions),
        near(self.stack, kind, start, length, device) & tokens,
      )
      for kind in set(self.stack['pattern'])
    }
    if memory is not None:
      memory = memory[0], memory[1][:, None, None].to(device) != 0
    x = self._embedder[0](input_ids)
    for layer in self.layers:
      x = layer(x, context, memory, cache)
    return modeling_outputs.BaseModelOutput(self.final_norm(x))


class EncDecAdaptForConditionalGeneration(
  transformers.PreTrainedModel, transformers.GenerationMixin
):
  """An encoder and a decoder with cross-attention."""

  config_class = EncDecAdaptConfig
  accepts_loss_kwargs = False
  _no_split_modules = ['Layer']

  def __init__(self, config):
    super().__init__(config)
    model = config.model
    # Fields given by a stack's role in the pair.
    decoder = {k: model[k] for k in ('cross_merged', 'cross_layers')}
    decoder |= {'cross_width': model['encoder']['width']}
    decoder |= {'window_rule': 'causal', 'tied': model['head']['tied']}
    rule = 'causal' if model['causal_encoder'] else model['window_rule']
    encoder = {'cross_width': None, 'window_rule': rule, 'tied': True}
    decoder, encoder = model['decoder'] | decoder, model['encoder'] | encoder
    self.decoder = Stack(decoder, model['eoi_token'])
    embedder = self.decoder.embedder if model['shared_table'] else None
    self.encoder = Stack(encoder, model['eoi_token'], embedder)
    self.post_init()

  def _init_weights(self, module):
    """Initialises a module's parameters missing from the files."""
    for name, value in module.named_parameters(recurse=False):
      if name.endswith(('scale', '_norm')):
        direct = module.stack['norm_gain'] != 'one_plus'
        nn.init.constant_(value, float(direct))
      else:
        nn.init.normal_(value, std=0.0 if name.endswith('_bias') else 0.02)

  def prepare_decoder_input_ids_from_labels(self, labels):
    """Returns labels [B, T] shifted right, after the start token."""
    ids = self.generation_config
    if ids.decoder_start_token_id is None:
      raise ValueError(
        'generation_config.json has no decoder_start_token_id, which labels'
        ' follow; set it, or give decoder_input_ids.'
      )
    shifted = labels.roll(1, -1)
    shifted[:, 0] = ids.decoder_start_token_id
    return shifted.masked_fill(shifted == -100, ids.pad_token_id or 0)

  def forward(
    self,
    input_ids=None,
    attention_mask=None,
    decoder_input_ids=None,
    decoder_attention_mask=None,
    encoder_outputs=None,
    cache=None,
    past_key_values=None,
    labels=None,
    use_cache=False,
    **options,
  ):
    """Returns float32 logits [B, T, V], and the loss if labels are given."""
    _check(options)
    if encoder_outputs is None:
      encoder_outputs = self.encoder(input_ids, attention_mask)
    states = encoder_outputs[0]
    if attention_mask is None:
      attention_mask = states.new_ones(states.shape[:2])
    if decoder_input_ids is None:
      decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
    cache = past_key_values if cache is None else cache
    if use_cache and cache is None:
      cache = cache_utils.EncoderDecoderCache(
        cache_utils.DynamicCache(), cache_utils.DynamicCache()
      )
    memory = states, attention_mask
    inputs = decoder_input_ids, decoder_attention_mask
    hidden = self.decoder(*inputs, memory, cache)[0]
    decoder = self.decoder.stack
    head = self.decoder.embedder if decoder['tied'] else self.decoder.head
    logits = functional.linear(hidden, head.table).float()
    logits = softcap(logits, decoder['final_softcap'])
    loss = None
    if labels is not None:
      loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    outputs = {'encoder_last_hidden_state': states, _CACHE: cache}
    output = modeling_outputs.Seq2SeqLMOutput(loss, logits, **outputs)
    return output.to_tuple() if options.get('return_dict') is False else output


class EncDecAdaptModel(transformers.PreTrainedModel):
  """A single stack; embedding models pool its states."""

  config_class = EncDecAdaptConfig
  _no_split_modules = ['Layer']
  # The projections of embeddings are also in the folders of modules.
  _keys_to_ignore_on_load_unexpected = [r'decoder\.embedding\.']

  def __init__(self, config):
    super().__init__(config)
    model = config.model
    causal = model['kind'] == 'decoder_only'
    rule = 'causal' if causal else model['window_rule']
    role = {'cross_width': None, 'window_rule': rule, 'tied': True}
    self.decoder = Stack(model['decoder'] | role, model['eoi_token'])
    self.post_init()

  _init_weights = EncDecAdaptForConditionalGeneration._init_weights

  def forward(self, input_ids=None, attention_mask=None, **options):
    """Returns the states [B, L, D] of tokens [B, L]."""
    return self.decoder(input_ids, attention_mask, **options)
