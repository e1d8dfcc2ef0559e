"""Model FLOPs by a stated formula, and what the hardware could do.

A multiplication and its addition are 2 FLOPs. Counted, per token or pair of
positions, in one forward pass:

- projections of self-attention: 2 D H (2N + 2K) per token;
- gated feed-forward: 2 * 3 D F per token; with experts, those that a token
  takes and a shared one, and the router's 2 D X;
- cross-attention: 2 D H * 2N per target token (query, output; none of its own
  where it is merged), 2 E H * 2K per source token (key, value);
- scores and weighted sum: 2 * 2 N H per visible pair of positions, where a
  bidirectional layer sees L * L pairs, a causal one L (L + 1) / 2, a windowed
  one those inside its window, and cross-attention T * S;
- the vocabulary product: 2 D V per target token.

A training step is 3 forward passes (a backward pass costs two), an evaluation
step is one. A step of decoding is a forward pass of one token a row, which
sees the keys of a whole cache; its source's keys and values are there. Norms,
activations, soft-caps, the embedding lookup and rematerialisation are not
counted, and rows count as full: packing and padding do not change the number.
"""

from collections.abc import Sequence
import dataclasses
import time

import jax
import jax.numpy as jnp

TRAINING = 3  # Forward passes that a training step costs.

# What `device_kind` contains, the first of them; the chip's name in
# `planning.chips`, where what is said there is true of it; dense bf16 FLOP/s
# by the vendors' data sheets.
KINDS = (
  ('TPU v6', 'v6e', 918e12),
  ('TPU v5 lite', 'v5e', 197e12),
  ('TPU v5e', 'v5e', 197e12),
  ('TPU v5', 'v5p', 459e12),
  ('TPU v4', 'v4', 275e12),
  ('H100 PCIe', None, 756e12),
  ('H100 NVL', None, 835e12),
  ('H100', 'h100', 989e12),
  ('GH200', None, 989e12),
  ('H200', 'h200', 989e12),
  ('A100-SXM4-40', None, 312e12),
  ('A100-PCIE-40', None, 312e12),
  ('A100', 'a100', 312e12),
)


@dataclasses.dataclass(frozen=True)
class StackShape:
  """The numbers of a transformer stack that FLOPs depend on.

  Attributes:
    width: D.
    mlp: F.
    query_heads: N.
    kv_heads: K.
    head_dim: H.
    windows: per layer, the window in positions or None; its length is the
      number of layers.
    causal: whether self-attention is causal.
    window_rule: of a bidirectional one (`ops.masks.MaskSpec`).
    cross_width: E, the source's width; None without cross-attention.
    cross_layers: how many layers have it; None for all.
    cross_merged: it is a part of self-attention.
    sparse_layers: layers with experts.
    sparse_mlp: width of the feed-forwards that a token takes in one of them,
      together.
    router_outputs: columns of products that route a token there.
  """

  width: int
  mlp: int
  query_heads: int
  kv_heads: int
  head_dim: int
  windows: tuple[int | None, ...]
  causal: bool
  window_rule: str = 'exclusive'
  cross_width: int | None = None
  cross_layers: int | None = None
  cross_merged: bool = False
  sparse_layers: int = 0
  sparse_mlp: int = 0
  router_outputs: int = 0


def visible_pairs(
  length: int,
  *,
  causal: bool,
  window: int | None = None,
  window_rule: str = 'exclusive',
) -> int:
  """Pairs (query, key) of one row that self-attention looks at.

  Args:
    length: L.
    causal: keys at or before the query only.
    window: see `StackShape.windows`.
    window_rule: see `StackShape.window_rule`.
  """
  # Keys before the query, itself included, and those after it.
  before, after = length, length - 1
  if window is not None:
    before, after = {
      'exclusive': (window, window - 1),
      'inclusive': (window + 1, window),
      'centered': ((window + 1) // 2, window // 2),
    }['exclusive' if causal else window_rule]

  def pairs(distances: int) -> int:
    """Pairs at distances 0 .. distances - 1, of which L - d have d."""
    reach = min(distances, length)
    return reach * length - reach * (reach - 1) // 2

  return pairs(before) + (0 if causal else pairs(after + 1) - length)


def forward(stack: StackShape, length: int, *, source_length: int = 0) -> int:
  """FLOPs of a stack on one row, without the vocabulary product.

  Args:
    stack: its shape.
    length: positions of the row.
    source_length: positions of the source, with cross-attention.
  """
  heads = stack.query_heads * stack.head_dim
  kv_heads = stack.kv_heads * stack.head_dim
  projections = 2 * stack.width * (2 * heads + 2 * kv_heads)
  layers = len(stack.windows)
  dense = 3 * stack.mlp * (layers - stack.sparse_layers)
  routed = (3 * stack.sparse_mlp + stack.router_outputs) * stack.sparse_layers
  total = length * (layers * projections + 2 * stack.width * (dense + routed))
  if stack.cross_width is not None:
    own = 0 if stack.cross_merged else 2 * stack.width * 2 * heads * length
    total += _cross_layers(stack) * (
      own + 2 * stack.cross_width * 2 * kv_heads * source_length
    )
  return total + scores(stack, length, source_length=source_length)


def scores(stack: StackShape, length: int, *, source_length: int = 0) -> int:
  """The part of `forward` that is scores and weighted sums of attention."""
  pairs = sum(
    visible_pairs(
      length,
      causal=stack.causal,
      window=window,
      window_rule=stack.window_rule,
    )
    for window in stack.windows
  )
  if stack.cross_width is not None:
    pairs += _cross_layers(stack) * length * source_length
  return 4 * stack.query_heads * stack.head_dim * pairs


def decoding(stack: StackShape, keys: int, *, source_length: int = 0) -> int:
  """FLOPs of a causal stack on one more token of a row, as `forward`.

  Args:
    stack: its shape.
    keys: positions that the token sees, its own included, where no window
      hides them.
    source_length: positions of the source, with cross-attention.
  """
  seen = sum(min(keys, window or keys) for window in stack.windows)
  if stack.cross_width is not None:
    seen += _cross_layers(stack) * source_length
  weights = forward(stack, 1) - scores(stack, 1)
  return weights + 4 * stack.query_heads * stack.head_dim * seen


def _cross_layers(stack: StackShape) -> int:
  known = stack.cross_layers
  return len(stack.windows) if known is None else known


def vocabulary(width: int, vocabulary_size: int, tokens: int) -> int:
  """FLOPs of the logits of `tokens` target tokens, forward."""
  return 2 * width * vocabulary_size * tokens


def peak(devices: Sequence[jax.Device]) -> float | None:
  """FLOP/s of the devices together: data sheet, or measured for the CPU.

  Args:
    devices: all of one kind. CPU devices share the host's cores, so they
      count once however many there are.

  Returns:
    None for a device that the table does not know.
  """
  if devices[0].platform == 'cpu':
    return measured_peak()
  for known, _, value in KINDS:
    if known in devices[0].device_kind:
      return value * len(devices)
  return None


def measured_peak(size: int = 1024, repeats: int = 5) -> float:
  """FLOP/s of a square fp32 product on the first local device; best of some.

  Args:
    size: rows and columns; large enough to keep all cores busy.
    repeats: how often it is timed.
  """
  device = jax.local_devices()[0]
  matrix = jax.device_put(jnp.ones((size, size), jnp.float32), device)
  product = jax.jit(jnp.matmul).lower(matrix, matrix).compile()
  best = float('inf')
  for _ in range(repeats + 1):  # The first one warms up.
    start = time.perf_counter()
    product(matrix, matrix).block_until_ready()
    best = min(best, time.perf_counter() - start)
  return 2 * size**3 / best
