"""Inference engine: a queue of prompts through a batch that stays full.

Two compiled programs share one state on the devices. `prefill` reads a group
of prompts (an encoder-decoder with its encoder, whose keys and values it
computes once) and puts them into free rows of the batch; `decode` generates
tokens until enough rows are free for the next group. Shapes are static:
prompts and caches are padded to a few lengths (`inference.lengths`), and a
program is compiled per length. Rows end on their own (EOS, number of tokens,
stop string) and are refilled while the others go on.

Every process of a job runs the same calls on the same requests.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
from jax import numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int
import numpy as np

from encdec_adapt.cli import errors
from encdec_adapt.inference import lengths, quantization
from encdec_adapt.inference import sampling as sampling_lib
from encdec_adapt.models import build, decoder_only, model_config
from encdec_adapt.models import cache as caches
from encdec_adapt.ops import partition
from encdec_adapt.sharding import compiler
from encdec_adapt.sharding import rules as rules_lib

UNLIMITED = 1 << 30  # More tokens than there are.

Ended = Literal['eos', 'length', 'stop']


@dataclasses.dataclass(frozen=True)
class SpecialIds:
  """Token ids that the engine needs.

  Attributes:
    bos: first token of an encoder-decoder's decoder.
    eos: tokens, any of which ends a row.
    pad: fills what is not read.
  """

  bos: int
  eos: tuple[int, ...]
  pad: int


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
  """A prompt and how to continue it.

  Attributes:
    tokens: token ids of the prompt, BOS first, int [n].
    max_tokens: most tokens to generate, at least 1, EOS included.
    sampling: how tokens are chosen.
    stop: texts that end the continuation, which does not contain them.
  """

  tokens: Int[np.ndarray, 'n']
  max_tokens: int = 64
  sampling: sampling_lib.SamplingConfig = sampling_lib.SamplingConfig()
  stop: tuple[str, ...] = ()

  def __post_init__(self):
    if not len(self.tokens):
      raise errors.UserError('the prompt has no tokens; begin it with BOS.')
    if self.max_tokens < 1:
      raise errors.UserError(
        f'max_tokens is {self.max_tokens}; at least 1 token is generated.'
      )
    if not all(self.stop):
      raise errors.UserError('a stop string is empty; leave it out.')


@dataclasses.dataclass(frozen=True, eq=False)
class Completion:
  """A continuation.

  Attributes:
    tokens: token ids [n], EOS included; with a stop string up to the token
      that completes it.
    log_probs: natural log of the probability of each token [n] under the
      model itself, before penalty, temperature and filters.
    ended: 'eos', 'length' (max_tokens) or 'stop'.
    text: the text, without special tokens and stop string; None without a
      function that decodes.
  """

  tokens: Int[np.ndarray, 'n']
  log_probs: Float[np.ndarray, 'n']
  ended: Ended
  text: str | None


class State(NamedTuple):
  """What the programs share, on the devices; [B] each unless stated.

  `count` tokens of a row are in `tokens` and `log_probs` [B, length]. `seen`
  [B, V] is None without repetition penalties.
  """

  cache: caches.Cache
  last: Int[Array, 'B']
  done: Bool[Array, 'B']
  count: Int[Array, 'B']
  limit: Int[Array, 'B']
  tokens: Int[Array, 'B length']
  log_probs: Float[Array, 'B length']
  options: sampling_lib.Options
  seen: Bool[Array, 'B V'] | None


class Group(NamedTuple):
  """Prompts to put into rows; [b] each unless stated.

  `rows` beyond the batch are dropped: they fill the group up.
  """

  tokens: Int[Array, 'b S']
  lengths: Int[Array, 'b']
  rows: Int[Array, 'b']
  limit: Int[Array, 'b']
  options: sampling_lib.Options


@dataclasses.dataclass
class _Active:
  """A row in use: the request's number, and how many tokens were reported."""

  number: int
  request: Request
  reported: int = 0


class Engine:
  """Continues prompts; see the module."""

  def __init__(
    self,
    model: build.Model,
    params: decoder_only.Params,
    ids: SpecialIds,
    *,
    rows: int = 8,
    decode: Callable[[np.ndarray], str] | None = None,
    mesh: Mesh,
    rules: rules_lib.Rules,
    int8: bool = False,
    steps: int = 16,
  ):
    """Prepares parameters; programs are compiled when they are first needed.

    Args:
      model: a model with a decoder.
      params: its parameters, which are copied: kernels in the dtype of the
        model's computation, the decoder's layers apart.
      ids: special tokens.
      rows: rows of the batch, at least 1.
      decode: turns token ids into text; needed for stop strings.
      mesh: mesh of the parameters.
      rules: meaning of logical axes on it; rows must divide over 'batch'.
      int8: whether to keep kernels as 8-bit integers.
      steps: tokens after which stop strings are looked for and tokens are
        reported.

    Raises:
      UserError: the model is encoder-only, or `rows` does not divide.
    """
    if getattr(model.config, 'is_encoder', False):
      raise errors.UserError(
        'an encoder-only model predicts masked tokens and generates no text;'
        ' use a decoder or an encoder-decoder.'
      )
    # A step has one token per row, which does not divide over a sequence axis.
    rules = dataclasses.replace(rules, length=())
    self.shards = shards = rules.on(mesh).size('batch')
    if rows < 1 or rows % shards:
      raise errors.UserError(
        f'{rows} rows of the batch do not divide over {shards} devices; choose'
        f' a multiple of {shards}.'
      )
    self.ids, self.rows, self._decode, self._steps = ids, rows, decode, steps
    # Prompts that are read together: few, so that a row is not free for long.
    self.group = max(shards, rows // 8 // shards * shards)
    self.programs = Programs(build.unroll(model), mesh, rules)
    self._prepare = functools.partial(_prepare, model, int8=int8)
    self.params = self._prepare(params)
    self.vocab_size = model.config.decoder.vocab_size
    self._prompt_size = next(iter(model.config.stacks.values())).vocab_size
    self._reads_encoder = isinstance(
      model.config, model_config.EncoderDecoderConfig
    )
    self._queue: collections.deque[tuple[int, Request]] = collections.deque()
    self._active: list[_Active | None] = [None] * rows
    self._state: State | None = None
    self._submitted = 0

  def update(self, params: decoder_only.Params) -> None:
    """Replaces the parameters, between requests."""
    self.params = self._prepare(params)

  @property
  def busy(self) -> bool:
    """Whether requests are waiting or in progress."""
    return bool(self._queue) or any(self._active)

  def submit(self, request: Request) -> int:
    """Queues a request.

    Returns:
      Its number, which counts from 0.

    Raises:
      UserError: it has stop strings and the engine cannot decode, or tokens
        outside the vocabulary.
    """
    least, most = int(request.tokens.min()), int(request.tokens.max())
    if least < 0 or most >= self._prompt_size:
      raise errors.UserError(
        f'tokens of the prompt are {least} to {most}; the vocabulary has the'
        f' ids 0 to {self._prompt_size - 1}.'
      )
    if request.stop and self._decode is None:
      raise errors.UserError(
        'stop strings need a tokenizer; the engine has no `decode`.'
      )
    number, self._submitted = self._submitted, self._submitted + 1
    self._queue.append((number, request))
    return number

  def cancel(self, number: int) -> None:
    """Drops a request; a row in progress is freed."""
    self._queue = collections.deque(
      queued for queued in self._queue if queued[0] != number
    )
    for row, active in enumerate(self._active):
      if active is not None and active.number == number:
        self._active[row] = None
        self._stop(row)

  def run(
    self,
    requests: Iterable[Request],
    on_tokens: Callable[[int, np.ndarray], None] | None = None,
  ) -> Iterator[tuple[int, Completion]]:
    """Continues prompts and yields them as they end.

    The longest prompts come first, so that those of a group are about equally
    long and caches shrink; results carry the index of their request.

    Args:
      requests: the prompts.
      on_tokens: called with a request's index and its new tokens [n] whenever
        some were generated.

    Raises:
      UserError: see `submit`.
    """
    requests = list(requests)
    order = sorted(
      range(len(requests)),
      key=lambda i: (
        -lengths.bucket(len(requests[i].tokens)),
        -requests[i].max_tokens,
      ),
    )
    indices = {self.submit(requests[i]): i for i in order}

    def report(number: int, tokens: np.ndarray) -> None:
      """Passes on the tokens of one request."""
      if on_tokens is not None:
        on_tokens(indices[number], tokens)

    while self.busy:
      for number, completion in self.step(report):
        yield indices[number], completion

  def step(
    self, on_tokens: Callable[[int, np.ndarray], None] | None = None
  ) -> list[tuple[int, Completion]]:
    """Fills free rows, decodes, and returns the requests that ended.

    Args:
      on_tokens: called with a request's number and its new tokens.
    """
    self._fill()
    if not any(self._active):
      return []
    active = [row for row in self._active if row is not None]
    configs = [row.request.sampling for row in active]
    checks = on_tokens is not None or any(row.request.stop for row in active)
    self._state = self.programs.decode(
      self.params,
      self._state,
      np.array(self.ids.eos, np.int32),
      # Rows that are free when the next group is read; all at the end.
      np.int32(min(self.group, len(self._queue)) or self.rows),
      np.int32(self._steps if checks else UNLIMITED),
      sampled=any(config.temperature > 0 for config in configs),
    )
    done, count = jax.device_get((self._state.done, self._state.count))
    ended = []
    if checks or any(
      done[row] and active is not None
      for row, active in enumerate(self._active)
    ):
      tokens, log_probs = jax.device_get(
        (self._state.tokens, self._state.log_probs)
      )
    for row, active in enumerate(self._active):
      if active is None or not (checks or done[row]):
        continue
      new = tokens[row, : count[row]]
      completion = self._complete(
        active.request, new, log_probs[row], done[row]
      )
      if completion is not None:
        new = completion.tokens
      if on_tokens is not None and len(new) > active.reported:
        on_tokens(active.number, new[active.reported :])
        active.reported = len(new)
      if completion is not None:
        ended.append((active.number, completion))
        self._active[row] = None
        if not done[row]:
          self._stop(row)
    return ended

  def _complete(
    self,
    request: Request,
    tokens: np.ndarray,
    log_probs: np.ndarray,
    done: bool,
  ) -> Completion | None:
    """Returns the completion of a row that has ended, None for others."""
    if not (done or request.stop):
      return None
    whole = self.complete(tokens, log_probs[: len(tokens)])
    if not any(stop in whole.text for stop in request.stop):
      return whole if done else None
    # The first token that completes a stop string is the last.
    count, text = next(
      (n, text)
      for n in range(1, len(tokens) + 1)
      if any(
        stop in (text := self._decode(tokens[:n])) for stop in request.stop
      )
    )
    text = text[: min(text.find(stop) for stop in request.stop if stop in text)]
    return Completion(
      whole.tokens[:count], whole.log_probs[:count], 'stop', text
    )

  def complete(
    self, tokens: Int[np.ndarray, 'n'], log_probs: Float[np.ndarray, 'n']
  ) -> Completion:
    """Returns the completion of tokens that end with EOS or at their limit."""
    is_eos = len(tokens) > 0 and int(tokens[-1]) in self.ids.eos
    text = None
    if self._decode is not None:
      text = self._decode(tokens[: len(tokens) - is_eos])
    ended: Ended = 'eos' if is_eos else 'length'
    return Completion(tokens.copy(), log_probs.copy(), ended, text)

  def read(self, requests: Sequence[Request], rows: int) -> State:
    """Returns a state of its own with prompts that were read, for a search.

    Args:
      requests: prompts, in the order of the rows.
      rows: rows of the state, at least as many.
    """
    return self.programs.prefill(*self.prefill_arguments(requests, rows))

  def prefill_arguments(
    self, requests: Sequence[Request], rows: int
  ) -> tuple[decoder_only.Params, State, Group, int]:
    """Returns the arguments with which `read` calls `programs.prefill`.

    Args:
      requests: prompts, in the order of the rows.
      rows: rows of the state, at least as many.
    """
    state = self.programs.start(rows, *self._lengths(requests))
    group = self._frame(requests, range(len(requests)), rows, rows)
    return self.params, state, group, self.ids.bos

  def _stop(self, row: int) -> None:
    """Ends a row on the devices."""
    done = self._state.done.at[row].set(True)
    self._state = self._state._replace(done=done)

  def _lengths(self, requests: Sequence[Request]) -> tuple[int, int]:
    """Returns the positions that requests need: of the decoder, the encoder."""
    prompt = max(len(request.tokens) for request in requests)
    if self._reads_encoder:
      most = max(request.max_tokens for request in requests)
      return lengths.bucket(most), lengths.bucket(prompt)
    most = max(len(request.tokens) + request.max_tokens for request in requests)
    return lengths.bucket(most), 0

  def _fill(self) -> None:
    """Puts queued prompts into free rows, a group at a time."""
    free = [row for row, active in enumerate(self._active) if active is None]
    while self._queue and len(free) >= min(self.group, len(self._queue)):
      count = min(self.group, len(self._queue))
      chosen = [self._queue.popleft() for _ in range(count)]
      rows, free = free[:count], free[count:]
      for row, (number, request) in zip(rows, chosen, strict=True):
        self._active[row] = _Active(number, request)
      requests = [active.request for active in self._active if active]
      self._fit(requests)
      group = self._frame(
        [request for _, request in chosen], rows, self.group, self.rows
      )
      self._state = self.programs.prefill(
        self.params, self._state, group, self.ids.bos
      )

  def _fit(self, requests: Sequence[Request]) -> None:
    """Gives the state the lengths that these requests need."""
    length, source = self._lengths(requests)
    penalised = any(r.sampling.repetition_penalty != 1 for r in requests)
    if self._state is None:
      self._state = self.programs.start(self.rows, length, source)
    cache = self._state.cache
    if (cache.length, cache.source) != (length, source):
      self._state = self.programs.resize(self._state, length, source)
    if penalised and self._state.seen is None:
      self._state = self.programs.track_seen(self._state)

  def _frame(
    self,
    requests: Sequence[Request],
    rows: Sequence[int],
    size: int,
    beyond: int,
  ) -> Group:
    """Pads prompts to a group of this size; the rest is for rows `beyond`."""
    fill = size - len(requests)
    prompts = [request.tokens for request in requests]
    tokens, counts = lengths.pad(prompts, size, self.ids.pad)
    none = [sampling_lib.SamplingConfig()] * fill
    return Group(
      tokens=tokens,
      lengths=counts,
      rows=np.array([*rows, *[beyond] * fill], np.int32),
      limit=np.array([r.max_tokens for r in requests] + [1] * fill, np.int32),
      options=sampling_lib.stack(
        [request.sampling for request in requests] + none
      ),
    )


@functools.lru_cache(maxsize=16)
class Programs:
  """The compiled programs of a model on a mesh; equal models share them."""

  def __init__(self, model: build.Model, mesh: Mesh, rules: rules_lib.Rules):
    """Prepares the programs.

    Args:
      model: a model from `build.unroll`.
      mesh: the device mesh.
      rules: meaning of logical axes on it.
    """
    self.model, self.mesh, self.rules = model, mesh, rules
    # The state is updated in place.
    self.prefill = self.compile(prefill, donate_argnums=1)
    self.decode = self.compile(
      decode, donate_argnums=1, static_argnames='sampled'
    )
    self.start = self.compile(start, static_argnums=(0, 1, 2))
    self.resize = self.compile(resize, static_argnums=(1, 2))
    self.track_seen = self.compile(track_seen, donate_argnums=0)

  @functools.cache  # noqa: B019  Programs live as long as their cache.
  def compile(self, fn: Callable[..., Any], **options: Any) -> Any:
    """Returns `fn` of the model, compiled under the mesh; equal calls share it.

    Args:
      fn: takes the model first.
      **options: of `jax.jit`, for the other arguments.
    """

    @functools.wraps(fn)
    def run(*args, **kwargs):
      with partition.use(self.mesh, self.rules.as_dict()):
        return fn(self.model, *args, **kwargs)

    return jax.jit(run, compiler_options=compiler.options(self.mesh), **options)


def start(model: build.Model, rows: int, length: int, source: int) -> State:
  """Makes the state of a batch without requests.

  Args:
    model: a model from `build.unroll`.
    rows: rows of the batch.
    length: positions of the decoder per row.
    source: tokens of the encoder per row.
  """
  integers = jnp.zeros(rows, jnp.int32)
  free = sampling_lib.stack([sampling_lib.SamplingConfig()] * rows)
  return State(
    cache=model.init_cache(rows, length, source),
    last=integers,
    done=jnp.ones(rows, bool),
    count=integers,
    limit=integers,
    tokens=jnp.zeros((rows, length), jnp.int32),
    log_probs=jnp.zeros((rows, length), jnp.float32),
    options=jax.tree.map(jnp.asarray, free),
    seen=None,
  )


def resize(model: build.Model, state: State, length: int, source: int) -> State:
  """Gives the state other lengths, which its rows in use must fit."""

  def fit(x: jax.Array) -> jax.Array:
    """Cuts or pads [B, length]."""
    x = x[:, :length]
    return jnp.pad(x, [(0, 0), (0, length - x.shape[1])])

  return state._replace(
    cache=caches.resize(model.config.decoder, state.cache, length, source),
    tokens=fit(state.tokens),
    log_probs=fit(state.log_probs),
  )


def track_seen(model: build.Model, state: State) -> State:
  """Adds the tokens that each row has read, for repetition penalties."""
  shape = len(state.last), model.config.decoder.vocab_size
  return state._replace(seen=jnp.zeros(shape, bool))


def prefill(
  model: build.Model,
  params: decoder_only.Params,
  state: State,
  group: Group,
  bos: Int[Array, ''] | int,
) -> State:
  """Reads prompts and puts them into rows of the state.

  The last token of a decoder-only prompt is read again by the first step of
  `decode`, as an encoder-decoder's BOS is.

  Args:
    model: a model from `build.unroll`.
    params: its parameters, of `prepare`.
    state: the state.
    group: the prompts.
    bos: first token of an encoder-decoder's decoder.
  """
  params = quantization.dequantize(params, model.compute.dtype)
  positions = jnp.broadcast_to(
    jnp.arange(group.tokens.shape[1]), group.tokens.shape
  )
  segments = (positions < group.lengths[:, None]).astype(jnp.int32)
  insert = functools.partial(
    caches.insert, model.config.decoder, state.cache, group.rows
  )
  if isinstance(model.config, model_config.EncoderDecoderConfig):
    encoded = model.encode(params, group.tokens, segments, positions)
    cache = insert(
      cross=model.prefill_cross(params, encoded), encoder_segments=segments
    )
    read = jnp.full((len(group.rows), 1), bos)
    last = read[:, 0]
  else:
    entries = model.prefill(params, group.tokens, segments, positions)
    cache = insert(prompt=entries, lengths=group.lengths)
    read = group.tokens
    last = jnp.take_along_axis(read, group.lengths[:, None] - 1, axis=1)[:, 0]
    read = jnp.where(segments > 0, read, last[:, None])

  def put(old: jax.Array, new: Any) -> jax.Array:
    """Replaces the rows of the group."""
    return old.at[group.rows].set(new, mode='drop')

  seen = state.seen
  if seen is not None:
    group_seen = jnp.zeros((len(read), seen.shape[1]), bool)
    group_seen = group_seen.at[jnp.arange(len(read))[:, None], read].set(True)
    seen = put(seen, group_seen)
  return state._replace(
    cache=cache,
    last=put(state.last, last),
    done=put(state.done, False),
    count=put(state.count, 0),
    limit=put(state.limit, group.limit),
    options=jax.tree.map(put, state.options, group.options),
    seen=seen,
  )


def decode(
  model: build.Model,
  params: decoder_only.Params,
  state: State,
  eos: Int[Array, 'k'],
  wake: Int[Array, ''],
  steps: Int[Array, ''],
  *,
  sampled: bool,
) -> State:
  """Generates tokens until rows are free.

  Args:
    model: a model from `build.unroll`.
    params: its parameters, of `prepare`.
    state: the state.
    eos: tokens that end a row.
    wake: number of free rows at which to return.
    steps: most tokens to generate per row.
    sampled: whether any row has a temperature above 0.
  """

  def is_going_on(carry: tuple[jax.Array, State]) -> jax.Array:
    """Returns whether to generate another token."""
    step, state = carry
    return (step < steps) & (jnp.sum(state.done) < wake)

  def generate(carry: tuple[jax.Array, State]) -> tuple[jax.Array, State]:
    """Generates one token per row."""
    step, state = carry
    return step + 1, advance(model, params, state, eos, sampled=sampled)

  _, state = jax.lax.while_loop(
    is_going_on, generate, (jnp.zeros((), jnp.int32), state)
  )
  # Every process reads these.
  return state._replace(
    **{
      name: partition.shard(leaf, *[None] * leaf.ndim)
      for name, leaf in state._asdict().items()
      if name in ('done', 'count', 'tokens', 'log_probs')
    }
  )


def advance(
  model: build.Model,
  params: decoder_only.Params,
  state: State,
  eos: Int[Array, 'k'],
  *,
  sampled: bool,
) -> State:
  """Generates one token per row; arguments as `decode`."""
  rows = jnp.arange(len(state.last))
  # Inside the loop, so that no kernels in the dtype of the computation are
  # kept beside the integers.
  weights = quantization.dequantize(params, model.compute.dtype)
  hidden, cache = model.decode_step(weights, state.last, state.cache)
  logits = model.logits(weights, hidden[:, None])[:, 0]  # [B, V]
  adjusted, seen, options = logits, state.seen, state.options
  if seen is not None:
    adjusted = sampling_lib.penalise(logits, seen, options.repetition_penalty)
  chosen = sampling_lib.choose_likeliest(adjusted)
  if sampled:
    keys = jax.vmap(lambda seed, i: jax.random.fold_in(jax.random.key(seed), i))
    chosen = sampling_lib.draw(
      adjusted, keys(options.seed, state.count), options
    )
  log_probs = jnp.take_along_axis(
    jax.nn.log_softmax(logits), chosen[:, None], axis=1
  )[:, 0]
  going = ~state.done
  # Rows that are done write beyond the end, which is dropped.
  place = jnp.where(going, state.count, state.tokens.shape[1])
  if seen is not None:
    seen = seen.at[rows, chosen].set(True)
  return state._replace(
    cache=cache,
    last=jnp.where(going, chosen, state.last),
    done=state.done | jnp.isin(chosen, eos) | (state.count + 1 >= state.limit),
    count=state.count + going,
    tokens=state.tokens.at[rows, place].set(chosen, mode='drop'),
    log_probs=state.log_probs.at[rows, place].set(log_probs, mode='drop'),
    seen=seen,
  )


@functools.partial(jax.jit, static_argnums=0, static_argnames='int8')
def _prepare(
  model: build.Model, params: decoder_only.Params, *, int8: bool
) -> decoder_only.Params:
  """Returns parameters of a model as its programs take them."""
  params = quantization.cast(params, model.table, model.compute.dtype)
  if int8:
    params = quantization.quantize(params, model.table)
  return build.unroll_params(model, params)
