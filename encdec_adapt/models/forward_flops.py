"""Model FLOPs of a forward pass, from a stated formula.

A multiply-add is 2 FLOPs. A forward pass counts, per token or pair of
positions:

- projections of self-attention: 2 D H (2N + 2K) per token, with the heads of
  the layer; 2 D H (2N + K) where values are keys;
- feed-forward: 2 * 3 D F per token, or 2 * 2 D F without a gate; with experts,
  a token's experts and the shared expert, and the router's 2 D X;
- cross-attention: 2 D H * 2N per target token (query, output; 0 in merged
  attention, where self-attention includes them), 2 E H * 2K per source token
  (key, value);
- inputs of layers from a second table: 2 * 3 D J per token and layer;
- scores and weighted sum: 2 * 2 N H per visible pair of positions: L * L pairs
  in a bidirectional layer (of each passage, if it reads some), L (L + 1) / 2 in
  a causal layer, the pairs inside the window in a local layer, T * S in
  cross-attention; a prefix decoder adds S (S - 1) / 2 pairs among its inputs to
  the causal pairs;
- logits: 2 D V per position with logits: the targets or, with
  `loss.on_inputs`, all positions. The layer before BERT's table is not
  counted.

A training step is 3 forward passes (the backward pass costs two), an evaluation
step is 1. A decoding step is a forward pass of a token per row over the keys of
a whole cache, which includes the source's. The prefill of a decoder only yields
keys and values: its last layer with keys has no queries, attention, output
projection or feed-forward, and layers after it cost nothing. Norms,
activations, soft-caps, the embedding lookup and rematerialisation are not
counted. Rows count as full, whatever their packing and padding.

Imports configs and `ops.masks`: no arrays, programs or chips.
"""

from collections.abc import Sequence
import dataclasses

from encdec_adapt.models import model_config as configs
from encdec_adapt.ops import masks

TRAINING = 3  # Cost of a training step in forward passes.


def forward(
  model: configs.ModelConfig,
  encoder: int,
  decoder: int,
  teacher: int,
  answers: int = 1,
  *,
  logits: int = 0,
) -> int:
  """Returns the FLOPs of a row.

  Args:
    model: the model.
    encoder: encoder length S, or 0 for a batch without inputs.
    decoder: decoder length T.
    teacher: length of a decoder-only model's row for a pair.
    answers: answers per row; an encoder reads their prompt once.
    logits: positions with logits per answer; 0 for its targets.
  """
  lengths = {'encoder': encoder, 'decoder': decoder, 'teacher': teacher}
  # Without a decoder length, an encoder predicts in place.
  positions = logits or decoder or encoder
  table = model.decoder.width, model.decoder.outputs
  total = answers * vocabulary(*table, positions)
  for name, side in model.architecture.sides(encoder > 0).items():
    stack = model.stacks[name]
    rows = 1 if side == 'encoder' else answers
    total += rows * stack_forward(stack, lengths[side], source_length=encoder)
  return total


def decoding(model: configs.ModelConfig, encoder: int, decoder: int) -> int:
  """Returns the FLOPs of the last decoding step of a row.

  Args:
    model: the model.
    encoder: encoder length S; its keys and values are cached.
    decoder: decoder length T, all of it in the cache after the step.
  """
  stack = model.decoder
  # Cross-attention sees the whole source at every step, but its keys and values
  # are cached: no source in `stack_forward`.
  seen = [
    min(decoder, window or decoder) + reads * encoder
    for window, reads in zip(layer_windows(stack), _reads(stack), strict=True)
  ]
  # Replaces the scores of a single-token row by scores over the cache.
  weights = stack_forward(stack, 1) - scores(stack, 1)
  total = weights + _of_pairs(stack, seen)
  return total + vocabulary(stack.width, stack.vocab_size, 1)


def generation(
  model: configs.ModelConfig, prompt: int, generated: int
) -> tuple[int, int]:
  """Returns the FLOPs of the prefill and of generation for a row.

  Args:
    model: a model with a decoder.
    prompt: prompt length; the encoder, if any, reads it.
    generated: number of generated tokens.

  Returns:
    FLOPs of the prefill, without logits, and of all decoding steps
    (`inference.decoding`). Their sum is `forward` on rows of these lengths for
    encoder-decoders. A decoder-only model reads the last token of the prompt
    twice: its states predict the first generated token.
  """
  stack = model.decoder
  lengths = model.architecture.positions(prompt, generated)
  # Prompt tokens in the decoder's row; 0 with an encoder.
  context = lengths.pop('decoder') - generated

  def decoder(length: int) -> int:
    # A step sees all earlier keys, including inputs in the decoder's row.
    return stack_forward(stack, length, source_length=prompt - context)

  # With a context of 0, these are the projections of the source's keys/values.
  prefill = stack_forward(stack, context, source_length=prompt)
  prefill -= _without_states(stack, context)
  for name, length in lengths.items():
    prefill += stack_forward(model.stacks[name], length)
  # Causal rows are additive: the steps cost the row minus its beginning. The
  # source's keys and values are part of both, and cancel.
  first = max(context - 1, 0)
  decode = decoder(first + generated) - decoder(first)
  return prefill, decode + vocabulary(stack.width, stack.vocab_size, generated)


def _without_states(stack: configs.StackConfig, length: int) -> int:
  """Returns the FLOPs of the layers whose keys and values nothing reads.

  Those of the last layer with keys and values, without them, and those of the
  layers after it, which share keys and values.
  """
  last = stack.owning - 1
  windows, kinds, total = layer_windows(stack), stack.kinds, 0
  for i in range(last, stack.layers):
    heads = stack.heads * kinds[i].head_dim
    weights = 2 * heads + _feed_forward(stack, i) + 3 * stack.layer_input_width
    (pairs,) = _pairs(stack, length, windows[i : i + 1], length)
    total += 2 * stack.width * weights * length + 4 * heads * pairs
  return total


def published(model: configs.ModelConfig, prompt: int, generated: int) -> int:
  """Returns inference FLOPs as counted in figure 3 of the T5Gemma paper.

  The convention (arXiv 2504.06225, inferred from its 13 numbers) counts each
  stack as a causal decoder with logits at all positions, without
  cross-attention and bidirectional scores; `generation` counts the actual
  computation.

  Args:
    model: the model.
    prompt: prompt length: the encoder's positions, or the first positions of a
      decoder-only model.
    generated: number of generated tokens.
  """

  def as_decoder(stack: configs.StackConfig, length: int) -> int:
    decoder = configs.without_cross_attention(stack).decoder
    causal = dataclasses.replace(decoder, role='causal')
    logits = vocabulary(stack.width, stack.vocab_size, length)
    return stack_forward(causal, length) + logits

  lengths = model.architecture.positions(prompt, generated)
  return sum(as_decoder(model.stacks[name], n) for name, n in lengths.items())


def vocabulary(width: int, vocabulary_size: int, tokens: int) -> int:
  """Returns the forward FLOPs of the logits of `tokens` target tokens."""
  return 2 * width * vocabulary_size * tokens


def stack_forward(
  stack: configs.StackConfig, length: int, *, source_length: int = 0
) -> int:
  """Returns the FLOPs of a stack on a row, without logits.

  Args:
    stack: shape of the stack.
    length: positions of the row.
    source_length: positions of the inputs: the encoder's, or the first
      positions of a prefix decoder's row.
  """
  total = 0
  for i, (layer, reads) in enumerate(
    zip(stack.kinds, _reads(stack), strict=True)
  ):
    states = 2 * layer.heads * layer.head_dim
    keys = layer.kv_heads * layer.head_dim * (2 - layer.values_are_keys)
    keys *= i < stack.owning
    weights = states + keys + _feed_forward(stack, i)
    weights += 3 * stack.layer_input_width  # And their projection.
    # Merged attention shares queries and output projection with self-attention,
    # which counts them.
    weights += states * (reads and not stack.cross_merged)
    total += 2 * stack.width * weights * length
    total += 2 * (stack.cross_width or 0) * keys * source_length * reads
  return total + scores(stack, length, source_length=source_length)


def scores(
  stack: configs.StackConfig, length: int, *, source_length: int = 0
) -> int:
  """Returns the part of `stack_forward` for scores and weighted sums."""
  pairs = _pairs(stack, length, layer_windows(stack), source_length)
  return _of_pairs(
    stack,
    [
      count + reads * length * source_length
      for count, reads in zip(pairs, _reads(stack), strict=True)
    ],
  )


def _of_pairs(stack: configs.StackConfig, pairs: Sequence[int]) -> int:
  """Returns the FLOPs of the query-key pairs of each layer."""
  # 2 FLOPs for each of two products: scores and the weighted sum of values.
  return sum(
    4 * layer.heads * layer.head_dim * count
    for layer, count in zip(stack.kinds, pairs, strict=True)
  )


def _pairs(
  stack: configs.StackConfig,
  length: int,
  windows: Sequence[int | None],
  inputs: int,
) -> list[int]:
  """Returns the query-key pairs of layers with these windows."""
  passage = stack.passages.length or max(length, 1)
  by_window = {
    window: sum(
      count
      * visible_pairs(
        part,
        causal=stack.role != 'bidirectional',
        window=window,
        window_rule=stack.window_rule,
        prefix=inputs if stack.role == 'prefix' else 0,
      )
      for count, part in ((length // passage, passage), (1, length % passage))
      if part
    )
    for window in set(windows)
  }
  return [by_window[window] for window in windows]


def _feed_forward(stack: configs.StackConfig, layer: int) -> int:
  """Returns the feed-forward weights used per token, divided by D."""
  dense = (3 if stack.mlp_gated else 2) * stack.mlp_width_of(layer)
  if not stack.experts or layer < stack.dense_layers:
    return dense
  routed = stack.experts_per_token * stack.expert_width
  shared = stack.shared_expert_width
  experts = 3 * (routed + shared) + stack.experts + stack.shared_expert_gate
  return experts + dense * stack.experts_beside_mlp


def visible_pairs(
  length: int,
  *,
  causal: bool,
  window: int | None = None,
  window_rule: str = 'exclusive',
  prefix: int = 0,
) -> int:
  """Returns the number of visible (query, key) pairs in self-attention.

  Args:
    length: positions L of the row.
    causal: whether queries see only keys at or before them.
    window: window W in positions; None for no window.
    window_rule: rule of a bidirectional window (`ops.masks.MaskSpec`).
    prefix: number of bidirectional positions at the start of a causal row.
  """
  # A causal window has W keys, including the query's, like the past side of the
  # exclusive rule; other rules apply to bidirectional windows.
  past, future = masks.sides(window, 'exclusive' if causal else window_rule)
  ahead = prefix if causal else length
  return length + _pairs_within(past, length) + _pairs_within(future, ahead)


def _pairs_within(reach: int | None, length: int) -> int:
  """Returns the pairs at distances 1 to `reach` (L - d at distance d)."""
  reach = length - 1 if reach is None else min(reach, length - 1)
  return reach * length - reach * (reach + 1) // 2


def layer_windows(stack: configs.StackConfig) -> list[int | None]:
  """Returns each layer's window in positions, or None."""
  return [
    stack.window if stack.layer_kind(i) == 'local' else None
    for i in range(stack.layers)
  ]


def cross_layers(stack: configs.StackConfig) -> int:
  """Returns the number of layers that attend to the encoder."""
  return sum(_reads(stack))


def _reads(stack: configs.StackConfig) -> list[bool]:
  """Returns whether each layer attends to the encoder."""
  kinds = map(stack.layer_kind, range(stack.layers))
  return [stack.reads_encoder(kind) for kind in kinds]


def head_widths(stack: configs.StackConfig) -> tuple[float, float]:
  """Returns N H and 2 K H of a layer, means over the layers."""
  layers = stack.kinds
  queries = sum(x.heads * x.head_dim for x in layers)
  own = layers[: stack.owning]
  keys_values = sum(2 * x.kv_heads * x.head_dim for x in own)
  return queries / stack.layers, keys_values / stack.layers
