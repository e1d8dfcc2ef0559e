"""Compiled programs of the inference engine, and their shared state.

`prefill` reads prompts into rows of the state, `decode` generates tokens for
all rows. Both are pure functions; `Programs` compiles them for a model on a
mesh. The engine manages requests and rows; this module must not import it.
"""

import collections
from collections.abc import Callable, Hashable
import functools
from typing import Any, NamedTuple

from flax import traverse_util
import jax
from jax import numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from encdec_adapt.inference import lengths, quantization
from encdec_adapt.inference import sampling as sampling_lib
from encdec_adapt.models import base_model, build, layers, layers_index
from encdec_adapt.models import kv_cache as caches
from encdec_adapt.ops import kernel_forms, partition
from encdec_adapt.sharding import compiler
from encdec_adapt.sharding import rules as rules_lib


class Top(NamedTuple):
  """Likeliest tokens of each step, descending."""

  ids: Int[Array, '*shape k']
  log_probs: Float[Array, '*shape k']


class State(NamedTuple):
  """On-device state of the batch.

  The first `count` entries per row of `tokens`, `log_probs` and `top` are
  valid, those of `top` in rows that ask for it (`SamplingConfig`). `seen` is
  None without repetition penalties.
  """

  cache: caches.Cache
  last: Int[Array, 'B']
  ended: Bool[Array, 'B']
  count: Int[Array, 'B']
  limit: Int[Array, 'B']
  tokens: Int[Array, 'B length']
  log_probs: Float[Array, 'B length']
  top: Top
  options: sampling_lib.Options
  seen: Bool[Array, 'B V'] | None


class Group(NamedTuple):
  """A group of prompts to prefill.

  Each prompt is read once and inserted into r / b consecutive entries of
  `rows`. Rows beyond the batch are dropped: they pad the group.
  """

  tokens: Int[Array, 'b S']
  lengths: Int[Array, 'b']
  rows: Int[Array, 'r']
  limit: Int[Array, 'r']
  options: sampling_lib.Options


# All programs of an engine with fixed sizes. A CPU program takes hundreds of
# memory maps; Linux allows 65,530 per process (vm.max_map_count).
MOST_PROGRAMS = 72
_FREE = sampling_lib.SamplingConfig()  # Options of rows that are not in use.
_CHUNK = 16  # Positions of a prompt with logits in memory at once.
# LRU cache of this process's compiled programs.
_COMPILED: collections.OrderedDict[Hashable, jax.stages.Compiled] = (
  collections.OrderedDict()
)


@functools.lru_cache(maxsize=16)
class Programs:
  """Compiled programs of a model on a mesh, shared between equal models."""

  def __init__(
    self,
    model: build.Model,
    mesh: Mesh,
    rules: rules_lib.Rules,
    shapes: Hashable,
    variants: int = 1,
  ):
    """Prepares the programs.

    Args:
      model: a model from `build.unroll`.
      mesh: the device mesh.
      rules: logical axis rules.
      shapes: `shapes_of` the prepared parameters, part of the cache key; None
        for programs without parameters.
      variants: number of parameter shapes in use; the cache keeps
        `MOST_PROGRAMS` programs for each.
    """
    self.model, self.mesh, self.rules = model, mesh, rules
    self._variants = variants
    # All variants share the programs without parameters.
    self._shared = self
    if shapes is not None:
      self._shared = Programs(model, mesh, rules, None, variants)

  def run(self, fn: Callable[..., Any], *args: Any, **static: Any) -> Any:
    """Runs a function of the model; arguments as in `get`."""
    return self.get(fn, *args, **static)(*args)

  def get(
    self, fn: Callable[..., Any], *args: Any, **static: Any
  ) -> jax.stages.Compiled:
    """Returns the program of `fn` for these shapes, compiled unless cached.

    Args:
      fn: function with the model as its first argument.
      *args: the other arguments, concrete or abstract arrays.
      **static: static arguments.
    """
    # Excludes parameters, the only dictionary: their shapes are in the key of
    # `Programs`, and hashing their many leaves at every step is slow.
    arrays = [x for x in args if not isinstance(x, dict)]
    owner = self if len(arrays) < len(args) else self._shared
    key = owner, fn, tuple(static.items()), shapes_of(arrays)
    if key in _COMPILED:
      _COMPILED.move_to_end(key)
      return _COMPILED[key]

    # A new function per program: jax keeps programs alive with their function,
    # so evicting a program would otherwise free nothing.
    @functools.wraps(fn)
    def run(*args):
      with partition.use(self.mesh, self.rules.as_dict()):
        return fn(self.model, *args, **static)

    program = jax.jit(
      run,
      # The state is updated in place.
      donate_argnums=_STATES.get(fn, ()),
      compiler_options=compiler.options(self.mesh),
    )
    compiled = _COMPILED[key] = program.lower(*args).compile()
    while len(_COMPILED) > MOST_PROGRAMS * self._variants:
      _COMPILED.popitem(last=False)
    return compiled


def shapes_of(tree: Any) -> Hashable:
  """Returns the structure, shapes, dtypes and shardings of a pytree."""
  leaves, structure = jax.tree.flatten(tree)
  return structure, *(
    (x.shape, x.dtype, getattr(x, 'sharding', None)) for x in leaves
  )


def start(model: build.Model, rows: int, length: int, source: int) -> State:
  """Creates the state of an empty batch.

  Args:
    model: a model from `build.unroll`.
    rows: batch size.
    length: decoder positions per row.
    source: encoder tokens per row.
  """
  integers = jnp.zeros(rows, jnp.int32)
  likeliest = jnp.zeros((rows, length, sampling_lib.MOST_TOP), jnp.float32)
  free = sampling_lib.stack([_FREE] * rows)
  state = State(
    cache=model.init_cache(rows, length, source),
    last=integers,
    # Free rows count as ended: `decode` does not wait for them.
    ended=jnp.ones(rows, bool),
    count=integers,
    limit=integers,
    tokens=jnp.zeros((rows, length), jnp.int32),
    log_probs=jnp.zeros((rows, length), jnp.float32),
    top=Top(likeliest.astype(jnp.int32), likeliest),
    options=jax.tree.map(jnp.asarray, free),
    seen=None,
  )
  return _replicate(state)


def _replicate(state: State) -> State:
  """Constrains a state to the common sharding of all programs.

  Every process reads the fields other than the cache, which are small. A
  sharding chosen by XLA could differ from the next program's.
  """
  fields = jax.tree.map(
    lambda x: partition.shard(x, *[None] * x.ndim), state._replace(cache=None)
  )
  return fields._replace(cache=caches.shard(state.cache))


def resize(model: build.Model, state: State, length: int, source: int) -> State:
  """Resizes the state; rows in use must fit."""

  def fit(x: jax.Array) -> jax.Array:
    x = x[:, :length]
    rest = [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, [(0, 0), (0, length - x.shape[1]), *rest])

  cache = caches.resize(model.config.decoder, state.cache, length, source)
  outputs = state.tokens, state.log_probs, state.top
  tokens, log_probs, top = jax.tree.map(fit, outputs)
  return _replicate(
    state._replace(cache=cache, tokens=tokens, log_probs=log_probs, top=top)
  )


def track_seen(model: build.Model, state: State) -> State:
  """Adds an empty `seen` to the state, for repetition penalties."""
  shape = len(state.last), model.config.decoder.vocab_size
  return _replicate(state._replace(seen=jnp.zeros(shape, bool)))


def stop(
  model: build.Model, ended: Bool[Array, 'B'], row: Int[Array, '']
) -> Bool[Array, 'B']:
  """Ends a row and returns the new `ended` of the state."""
  del model
  return partition.shard(ended.at[row].set(True), None)


def prefill(
  model: build.Model,
  params: base_model.Params,
  state: State,
  group: Group,
  bos: Int[Array, ''] | int,
) -> State:
  """Prefills prompts into rows of the state.

  The first step of `decode` reads the last token of a decoder-only prompt, or
  the BOS of an encoder-decoder.

  Args:
    model: a model from `build.unroll`.
    params: its parameters from `prepare`.
    state: the state.
    group: the prompts.
    bos: decoder start token of an encoder-decoder.
  """
  params = quantization.dequantize(params, model.compute.dtype)
  positions, segments = lengths.positions_and_mask(group.tokens, group.lengths)
  entries, tokens = model.architecture.prefill(
    model, params, (group.tokens, segments, positions), bos
  )
  copies = len(group.rows) // len(group.tokens)
  if copies > 1:
    entries, tokens = jax.tree.map(
      lambda x: jnp.repeat(x, copies, axis=0), (entries, tokens)
    )

  def put(old: jax.Array, new: Any) -> jax.Array:
    return old.at[group.rows].set(new, mode='drop')

  seen = state.seen
  if seen is not None:
    # Padding marks no further token: it repeats the last token in `tokens`.
    count = len(tokens)
    group_seen = jnp.zeros((count, seen.shape[1]), bool)
    group_seen = group_seen.at[jnp.arange(count)[:, None], tokens].set(True)
    seen = put(seen, group_seen)
  return _replicate(
    state._replace(
      cache=caches.insert(
        model.config.decoder, state.cache, group.rows, **entries
      ),
      last=put(state.last, tokens[:, -1]),
      ended=put(state.ended, False),
      count=put(state.count, 0),
      limit=put(state.limit, group.limit),
      options=jax.tree.map(put, state.options, group.options),
      seen=seen,
    )
  )


def decode(
  model: build.Model,
  params: base_model.Params,
  state: State,
  eos: Int[Array, 'k'],
  wake: Int[Array, ''],
  steps: Int[Array, ''],
  **options: Any,
) -> State:
  """Generates tokens until enough rows are free.

  Args:
    model: a model from `build.unroll`.
    params: its parameters from `prepare`.
    state: the state.
    eos: tokens that end a row.
    wake: number of free rows at which to return.
    steps: maximum tokens to generate per row.
    **options: options of `advance`.
  """

  def may_generate(carry: tuple[jax.Array, State]) -> jax.Array:
    step, state = carry
    return (step < steps) & (jnp.sum(state.ended) < wake)

  _, state = jax.lax.while_loop(
    may_generate,
    lambda carry: (
      carry[0] + 1,
      advance(model, params, carry[1], eos, **options),
    ),
    (jnp.zeros((), jnp.int32), state),
  )
  return _replicate(state)


def advance(
  model: build.Model,
  params: base_model.Params,
  state: State,
  eos: Int[Array, 'k'],
  *,
  tempered: bool = False,
  vocab_size: int | None = None,
  forced: int | None = None,
) -> State:
  """Generates one token per row.

  Args:
    model: a model from `build.unroll`.
    params: parameters of the model, from `prepare`.
    state: the state.
    eos: tokens that end a row.
    tempered: whether to apply the temperature to the log-probabilities of
      sampled rows.
    vocab_size: vocabulary size, see `engine.SpecialIds`.
    forced: first token of every row; None for a free choice.
  """
  rows = jnp.arange(len(state.last))
  # Inside the loop, so dequantized kernels are not kept in memory along with
  # the integers.
  weights = quantization.dequantize(params, model.compute.dtype)
  hidden, cache = model.decode_step(weights, state.last, state.cache)
  logits = model.logits(weights, hidden[:, None])[:, 0]  # [B, V]
  going, free = ~state.ended, sampling_lib.stack([_FREE])
  # Options that only ended rows have cost nothing.
  options = jax.tree.map(
    lambda x, y: jnp.where(going, x, y), state.options, free
  )
  # Completions report the model's log-probabilities, so the original
  # logits are kept along with the penalised and masked logits.
  adjusted, seen = logits, state.seen
  if seen is not None:
    adjusted = sampling_lib.penalise(logits, seen, options.repetition_penalty)
  adjusted = sampling_lib.penalise_generated(
    adjusted, state.tokens, state.count, options
  )
  adjusted = sampling_lib.keep_vocabulary(adjusted, vocab_size)
  chosen = sampling_lib.choose(adjusted, state.count, options)
  if forced is not None:
    chosen = jnp.where(state.count == 0, forced, chosen)
  if tempered:
    temperature = options.temperature[:, None]
    logits = logits / jnp.where(temperature > 0, temperature, 1)
  # Not log_softmax, which writes [B, V].
  log_total = jax.nn.logsumexp(logits, axis=1, keepdims=True)
  log_probs = jnp.take_along_axis(logits, chosen[:, None], axis=1) - log_total
  # Shapes are static, so ended rows are computed too; they write out of bounds,
  # which is dropped.
  slot = jnp.where(going, state.count, state.tokens.shape[1])

  def put(old: jax.Array, new: jax.Array) -> jax.Array:
    return old.at[rows, slot].set(new, mode='drop')

  likeliest = jax.lax.cond(
    jnp.any(options.top_log_probs > 0),
    lambda: _likeliest(logits - log_total, vocab_size),
    lambda: jax.tree.map(lambda x: x[:, 0], state.top),  # Any value.
  )
  if seen is not None:
    seen = seen.at[rows, chosen].max(going)
  return state._replace(
    cache=cache,
    last=jnp.where(going, chosen, state.last),
    ended=state.ended
    | jnp.isin(chosen, eos)
    | (state.count + 1 >= state.limit),
    count=state.count + going,
    tokens=put(state.tokens, chosen),
    log_probs=put(state.log_probs, log_probs[:, 0]),
    top=jax.tree.map(put, state.top, likeliest),
    seen=seen,
  )


def _likeliest(
  log_probs: Float[Array, '*shape V'], vocab_size: int | None
) -> Top:
  kept = sampling_lib.keep_vocabulary(log_probs, vocab_size)
  # Not `sampling.top_k`, whose barrier XLA cannot compile for sharded axes.
  return Top(*jax.lax.top_k(kept, sampling_lib.MOST_TOP)[::-1])


def score_prompt(
  model: build.Model,
  params: base_model.Params,
  tokens: Int[Array, 'B S'],
  counts: Int[Array, 'B'],
  *,
  vocab_size: int,
) -> tuple[Float[Array, 'n'], Top]:
  """Computes the log-probabilities of a prompt under a causal decoder.

  Args:
    model: a model from `build.unroll`.
    params: its parameters from `prepare`.
    tokens: the prompt in the first row; others are not scored.
    counts: number of tokens of each row.
    vocab_size: vocabulary size, see `engine.SpecialIds`.

  Returns:
    The log-probability of each token but the first, n = S - 1, and the
    likeliest tokens in its place.
  """
  params = quantization.dequantize(params, model.compute.dtype)
  positions, segments = lengths.positions_and_mask(tokens, counts)
  hidden = model.decode(params, tokens, segments, positions)

  def score(args: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, Top]:
    states, token = args  # [B, D], []
    logits = model.logits(params, states[:, None])[0, 0]
    log_probs = jax.nn.log_softmax(logits)  # [V]
    return log_probs[token], _likeliest(log_probs, vocab_size)

  # In chunks: the logits of all positions would be large.
  pairs = jnp.swapaxes(hidden, 0, 1)[:-1], tokens[0, 1:]
  scored = jax.lax.map(score, pairs, batch_size=_CHUNK)
  return jax.tree.map(lambda x: partition.shard(x, *[None] * x.ndim), scored)


@functools.partial(
  jax.jit, static_argnums=0, static_argnames=('int8', 'mesh', 'rules')
)
def prepare(
  model: build.Model,
  params: base_model.Params,
  *,
  int8: bool,
  mesh: Mesh,
  rules: rules_lib.Rules,
) -> base_model.Params:
  """Prepares a model's parameters for the programs.

  Args:
    model: the model.
    params: parameters of the model, with any sharding.
    int8: whether to quantize kernels to int8.
    mesh: mesh of the parameters.
    rules: sharding rules of the result.

  Returns:
    Parameters of `build.unroll(model)`, with merged kernels (`merge_kernels`).
  """
  params = quantization.merge(params, model.table)
  params = quantization.cast(params, model.table, model.compute.dtype)
  flat = traverse_util.flatten_dict(params, sep='/')
  with partition.use(mesh, rules.as_dict()):
    # After the cast, so no fp32 copy is sent between devices.
    flat = {
      p: partition.shard(x, *model.table[p].axes) for p, x in flat.items()
    }
  params = traverse_util.unflatten_dict(flat, sep='/')
  if int8:
    params = quantization.quantize(params, model.table)
  params = build.unroll_params(model, params)
  with partition.use(mesh, rules.as_dict()):
    return merge_kernels(model, params)


def merge_kernels(
  model: build.Model, params: base_model.Params
) -> base_model.Params:
  """Merges decoder kernels that share their input.

  A decoding step then has fewer matmuls. Query kernels stay separate if the
  active partition shards query and key heads differently.

  Args:
    model: the model.
    params: unrolled parameters of the model, nested.

  Returns:
    The parameters, with merged kernels of `layers.merge` under joined names.
  """
  active = partition.active()
  alike = active.mesh_axes('heads') == active.mesh_axes('kv_heads')
  last = dict.fromkeys(('mlp/up', 'shared/up'), 'gate_up')
  last['attention/value'] = 'query_key_value' if alike else 'key_value'
  stack = layers_index.unroll(model.config.decoder)
  flat = traverse_util.flatten_dict(params['decoder'], sep='/')
  for path in [*flat]:
    name = last.get('/'.join(path.split('/')[-2:]))
    module = path.rpartition('/')[0]
    names = [f'{module}/{x}' for x in name.split('_')] if name else []
    # A feed-forward may have no gate.
    if names and flat.keys() >= {*names}:
      kernels = [flat.pop(x) for x in names]
      count = active.size('mlp')
      if name != 'gate_up':
        kind = layers_index.block_kind(stack, '/'.join(path.split('/')[:2]))
        count = stack.of_kind(kind).kv_heads
      flat[f'{module}/{name}'] = layers.merge(name, kernels, count)
  return {**params, 'decoder': traverse_util.unflatten_dict(flat, sep='/')}


def with_adapters(
  model: build.Model, params: base_model.Params, adapters: base_model.Params
) -> base_model.Params:
  """Adds adapters to prepared parameters; base arrays are shared.

  Args:
    model: the base model.
    params: parameters of the base from `prepare`.
    adapters: nested parameters: `kernel_forms.Adapted` without a kernel for
      adapters, arrays for fully trained parameters, None for the base's.
  """
  flat = traverse_util.flatten_dict(params, sep='/')
  new = build.unroll_params(model, adapters)
  for path, leaf in traverse_util.flatten_dict(new, sep='/').items():
    if isinstance(leaf, kernel_forms.Adapted):
      # None for a merged kernel: the adapter adds to its output.
      flat[path] = leaf.replace(kernel=flat.get(path))
    elif leaf is not None:
      flat[path] = leaf
  return traverse_util.unflatten_dict(flat, sep='/')


# Index of the donated state among the arguments passed by `Programs`. `resize`
# donates nothing: its result has other shapes.
_STATES = {prefill: 1, decode: 1, track_seen: 0}
