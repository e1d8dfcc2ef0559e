"""Inference engine with continuous batching.

Two compiled programs share a state on the devices. `prefill` reads a group of
prompts (with the encoder of an encoder-decoder, which also computes the keys
and values of cross-attention once) into free rows of the batch; `decode`
generates tokens until enough rows are free for the next group. Shapes are
static: prompts and caches are padded to a few lengths (`inference.lengths`),
with one program compiled per length and a bounded cache of programs
(`decoding.Programs`). Rows end independently (EOS, token limit, stop string)
and are refilled while the others continue.

Every process of a job makes the same calls with the same requests. The programs
are in `decoding`; tokenizers and chat templates are up to the caller.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import functools
import itertools
import math
import types
from typing import Literal, NamedTuple

import jax
from jax.sharding import Mesh
from jaxtyping import Float, Int
import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.inference import decoding, lengths
from encdec_adapt.inference import sampling as sampling_lib
from encdec_adapt.models import base_model, build
from encdec_adapt.sharding import rules as rules_lib

UNLIMITED = 1 << 30  # Above any number of tokens.

Ended = Literal['eos', 'length', 'stop']


@dataclasses.dataclass(frozen=True)
class SpecialIds:
  """Special token ids of the engine.

  Attributes:
    bos: decoder start token of an encoder-decoder.
    eos: tokens that end a row.
    pad: padding token, never read.
    vocab_size: size of the decoder's vocabulary; ids beyond it, in a larger
      embedding table, are never generated. None allows all ids.
    forced: token that every row generates first; None for a free choice.
  """

  bos: int
  eos: tuple[int, ...]
  pad: int
  vocab_size: int | None = None
  forced: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
  """A prompt with its generation options.

  Attributes:
    tokens: framed token ids of the prompt, int [n].
    max_tokens: maximum tokens to generate, at least 1, EOS included.
    sampling: sampling options.
    stop: strings that end the completion; not part of it.
    adapters: name of the engine's adapters; '' for none.
  """

  tokens: Int[np.ndarray, 'n']
  max_tokens: int = 64
  sampling: sampling_lib.SamplingConfig = sampling_lib.SamplingConfig()
  stop: tuple[str, ...] = ()
  adapters: str = ''

  def __post_init__(self):
    if not len(self.tokens):
      raise errors.UserError('the prompt has no tokens; give at least BOS.')
    if self.max_tokens < 1:
      raise errors.UserError(
        f'max_tokens is {self.max_tokens}; at least 1 token is generated.'
      )
    if not all(self.stop):
      raise errors.UserError('a stop string is empty; leave it out.')


class Tokens(NamedTuple):
  """Tokens with their log-probabilities; fields of `Completion`."""

  tokens: Int[np.ndarray, 'n']
  log_probs: Float[np.ndarray, 'n']
  top: decoding.Top | None = None

  def part(self, start: int, stop: int | None = None) -> 'Tokens':
    """Returns copies of a slice: views would keep the whole batch."""
    return jax.tree.map(lambda x: x[start:stop].copy(), self)


@dataclasses.dataclass(frozen=True, eq=False)
class Completion:
  """A generated completion.

  Attributes:
    tokens: token ids [n], EOS included; with a stop string, up to the token
      that completes it.
    log_probs: log-probability of each token [n] under the model, before
      penalties, temperature and filters.
    ended: 'eos', 'length' (max_tokens) or 'stop'.
    text: the text, without special tokens and stop string; None if the engine
      has no `decode`.
    top: likeliest tokens in the place of each, if `top_log_probs` of the
      request asks for them.
  """

  tokens: Int[np.ndarray, 'n']
  log_probs: Float[np.ndarray, 'n']
  ended: Ended
  text: str | None
  top: decoding.Top | None = None


@dataclasses.dataclass
class _Active:
  """A row in use, with its number of reported tokens."""

  number: int
  request: Request
  reported: int = 0


class Engine:
  """Generates completions of prompts; see the module."""

  def __init__(
    self,
    model: build.Model,
    params: base_model.Params,
    ids: SpecialIds,
    *,
    rows: int = 8,
    decode: Callable[[np.ndarray], str] | None = None,
    mesh: Mesh,
    rules: rules_lib.Rules,
    int8: bool = False,
    steps: int = 16,
    sizes: Sequence[lengths.Size] = (),
    adapters: Mapping[str, base_model.Params] = types.MappingProxyType({}),
  ):
    """Prepares parameters; programs are compiled on first use.

    Args:
      model: a model with a decoder.
      params: its parameters, copied with kernels in the compute dtype and
        unrolled decoder layers.
      ids: special tokens.
      rows: batch size, at least 1.
      decode: decodes token ids; required for stop strings.
      mesh: mesh of the parameters.
      rules: logical axis rules; 'batch' must divide `rows`.
      int8: whether to quantize kernels to int8.
      steps: tokens between checks for stop strings and reports of tokens.
      sizes: allowed state sizes (`lengths.state_sizes`). The state grows with
        the requests in progress, shrinks when idle, and longer requests are
        rejected. Without sizes it follows the requests.
      adapters: parameters of `decoding.with_adapters` by name. Requests with
        different adapters run in sequence, in order.

    Raises:
      UserError: the model predicts no next tokens, or `rows` is not divisible.
    """
    model.architecture.require_generation('the model', 'use a language model')
    # A decoding step has a single token per row: nothing to shard over a
    # sequence axis.
    rules = dataclasses.replace(rules, length=())
    self.shards = shards = rules.on(mesh).size('batch')
    if rows < 1 or rows % shards:
      raise errors.UserError(
        f'{rows} rows of the batch do not divide over {shards} devices; choose'
        f' a multiple of {shards}.'
      )
    self.ids, self.rows, self._decode, self._steps = ids, rows, decode, steps
    # Prompts per prefill: few, so rows do not stay free for long, and a
    # multiple of the shards.
    self.group = max(shards, rows // 8 // shards * shards)
    params = decoding.prepare(model, params, int8=int8, mesh=mesh, rules=rules)
    variants = {'': params} | {
      name: decoding.with_adapters(model, params, tree)
      for name, tree in adapters.items()
    }
    # Unrolled: a scan would copy each layer's cache for every token.
    unrolled = build.unroll(model)
    # Computed once: hashing the shapes of many parameters is slow.
    shapes = {name: decoding.shapes_of(tree) for name, tree in variants.items()}
    count = len({*shapes.values()})
    self._variants = {
      name: (
        tree,
        decoding.Programs(unrolled, mesh, rules, shapes[name], count),
      )
      for name, tree in variants.items()
    }
    self._use('')
    rows_of_table = model.config.decoder.vocab_size
    self.vocab_size = min(ids.vocab_size or rows_of_table, rows_of_table)
    self._architecture, stacks = model.architecture, model.config.stacks
    # Positions restart with every passage.
    self._positions = {
      name: math.inf if x.passages.length else x.positions.limit
      for name, x in stacks.items()
    }
    self._reader = model.config.prompt_reader
    self._queue: collections.deque[tuple[int, Request]] = collections.deque()
    self._active: list[_Active | None] = [None] * rows
    self._state: decoding.State | None = None
    self._submitted = 0
    self.sizes = tuple(sizes)

  def _use(self, adapters: str) -> None:
    """Switches adapters; no row may be in use."""
    self._adapters = adapters
    self.params, self.programs = self._variants[adapters]

  @property
  def choice(self) -> dict[str, int | None]:
    """Options of choosing a token; see `decoding.advance`."""
    return {'vocab_size': self.vocab_size, 'forced': self.ids.forced}

  def _next_group(self) -> int:
    first = itertools.islice(self._queue, self.group)
    same = itertools.takewhile(
      lambda queued: queued[1].adapters == self._adapters, first
    )
    return sum(1 for _ in same)

  @property
  def busy(self) -> bool:
    """Whether requests are waiting or in progress."""
    return bool(self._queue) or any(self._active)

  @property
  def load(self) -> tuple[int, int]:
    """Numbers of active and waiting requests."""
    return sum(row is not None for row in self._active), len(self._queue)

  def submit(self, request: Request) -> int:
    """Queues a request.

    Returns:
      Its number, counted from 0.

    Raises:
      UserError: it has stop strings but the engine no `decode`, unknown
        adapters, tokens outside the vocabulary, or exceeds the largest state.
    """
    self.require_tokens(request.tokens)
    self._size([request])
    if request.adapters not in self._variants:
      names = ', '.join(filter(None, self._variants)) or 'none'
      raise errors.UserError(
        f'adapters {request.adapters!r}: the engine has {names}.'
      )
    if request.stop and self._decode is None:
      raise errors.UserError(
        'stop strings need a tokenizer; the engine has no `decode`.'
      )
    number, self._submitted = self._submitted, self._submitted + 1
    self._queue.append((number, request))
    return number

  def require_tokens(self, tokens: Int[np.ndarray, 'n']) -> None:
    """Checks the tokens of a prompt.

    Raises:
      UserError: one is not in the vocabulary, or a passage is too long.
    """
    self._reader.passages.require_fits(tokens)
    lowest, highest = int(tokens.min()), int(tokens.max())
    # A gather from the embedding table would clamp them silently.
    if lowest < 0 or highest >= self._reader.vocab_size:
      raise errors.UserError(
        f'tokens of the prompt are {lowest} to {highest}; the vocabulary has'
        f' the ids 0 to {self._reader.vocab_size - 1}.'
      )

  def cancel(self, number: int) -> None:
    """Cancels a request and frees its row."""
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
    on_tokens: Callable[[int, Tokens], None] | None = None,
  ) -> Iterator[tuple[int, Completion]]:
    """Generates completions and yields them, with the request's index.

    Completions are yielded as they end. The longest prompts come first, so
    prompts of a group have similar lengths and caches shrink.

    Args:
      requests: the prompts.
      on_tokens: called with a request's index and its newly generated tokens.

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

    def report(number: int, tokens: Tokens) -> None:
      on_tokens(indices[number], tokens)

    # Without a callback or stop strings, devices decode until rows end.
    callback = None if on_tokens is None else report
    while self.busy:
      for number, completion in self.step(callback):
        yield indices[number], completion

  def step(
    self, on_tokens: Callable[[int, Tokens], None] | None = None
  ) -> list[tuple[int, Completion]]:
    """Fills free rows, decodes, and returns finished completions by number.

    Args:
      on_tokens: called with a request's number and its new tokens.
    """
    self._fill()
    if not any(self._active):
      return []
    requests = [row.request for row in self._active if row is not None]
    checks = on_tokens is not None or any(x.stop for x in requests)
    has_top = any(x.sampling.top_log_probs for x in requests)
    steps = self._steps if checks else UNLIMITED
    self._state = self.programs.run(
      decoding.decode,
      *self._decode_arguments(self._state, steps),
      **self.choice,
    )
    state, completions = self._state, []
    # A single transfer: each blocks on the devices.
    outputs = Tokens(state.tokens, state.log_probs, state.top)
    outputs = outputs if has_top else outputs._replace(top=None)
    ended, count, outputs = jax.device_get((state.ended, state.count, outputs))
    for row, active in enumerate(self._active):
      if active is None or not (checks or ended[row]):
        continue
      new = jax.tree.map(lambda x: x[row, : count[row]], outputs)  # noqa: B023
      if not active.request.sampling.top_log_probs:
        new = new._replace(top=None)
      completion = self._complete(active.request, new, ended[row])
      total = len(new.tokens if completion is None else completion.tokens)
      if on_tokens is not None and total > active.reported:
        on_tokens(active.number, new.part(active.reported, total))
        active.reported = total
      if completion is not None:
        completions.append((active.number, completion))
        self._active[row] = None
        # Stop strings end a row on the host only; also ends it on the devices.
        if not ended[row]:
          self._stop(row)
    return completions

  def _complete(
    self,
    request: Request,
    tokens: Tokens,
    has_ended: bool,
  ) -> Completion | None:
    if not (has_ended or request.stop):
      return None
    completion = self.complete(*tokens)
    if not any(stop in completion.text for stop in request.stop):
      return completion if has_ended else None
    # The completion ends with the first token that completes a stop string.
    # Decodes every prefix: tokens decoded together may differ from their parts.
    count, text = next(
      (n, text)
      for n in range(1, len(tokens.tokens) + 1)
      if any(
        stop in (text := self._decode(tokens.tokens[:n]))
        for stop in request.stop
      )
    )
    text = text[: min(text.find(stop) for stop in request.stop if stop in text)]
    ids, log_probs, top = tokens.part(0, count)
    return Completion(ids, log_probs, 'stop', text, top)

  def complete(
    self,
    tokens: Int[np.ndarray, 'n'],
    log_probs: Float[np.ndarray, 'n'],
    top: decoding.Top | None = None,
  ) -> Completion:
    """Returns the completion of tokens that ended with EOS or at the limit."""
    is_eos = len(tokens) > 0 and int(tokens[-1]) in self.ids.eos
    text = self._decode and self._decode(tokens[: len(tokens) - is_eos])
    ended: Ended = 'eos' if is_eos else 'length'
    ids, log_probs, top = Tokens(tokens, log_probs, top).part(0)
    return Completion(ids, log_probs, ended, text, top)

  def score_prompt(self, request: Request) -> Tokens:
    """Returns the tokens of a prompt with their log-probabilities.

    Raises:
      UserError: the model is not a causal decoder, or see `submit`.
    """
    self._architecture.require_prompt_scores()
    self.require_tokens(request.tokens)
    params, programs = self._variants[request.adapters]
    prompts = [request.tokens]
    largest = max([self._size([request]), *self.sizes])
    width = lengths.width(len(prompts[0]), largest.length)
    arguments = lengths.pad(prompts, self.shards, self.ids.pad, width)
    size_of = {'vocab_size': self.vocab_size}
    values = programs.run(decoding.score_prompt, params, *arguments, **size_of)
    # The first token has no predecessors.
    first = lambda x: np.insert(x, 0, np.nan if x.ndim == 1 else 0, axis=0)  # noqa: E731
    values = jax.tree.map(first, jax.device_get(values))
    return Tokens(arguments[0][0], *values).part(0, len(request.tokens))

  def prefill_arguments(
    self,
    requests: Sequence[Request],
    size: int,
    rows: Sequence[int] | None = None,
    state: decoding.State | None = None,
  ) -> tuple[base_model.Params, decoding.State, decoding.Group, np.int32]:
    """Returns the arguments of `decoding.prefill`.

    Args:
      requests: the prompts.
      size: prompts per group; it is padded with requests without a row.
      rows: rows of the state for the requests; the first rows by default.
      state: the state; a new state of `size` rows by default.
    """
    if state is None:
      state = self._start(self._size(requests), size)
    fill = size - len(requests)
    rows = [*(rows or range(len(requests))), *[len(state.ended)] * fill]
    requests = [*requests, *[Request(np.array([self.ids.pad]), 1)] * fill]
    prompts = [request.tokens for request in requests]
    room = state.cache.source or state.cache.length
    width = lengths.width(max(map(len, prompts)), room)
    tokens, counts = lengths.pad(prompts, size, self.ids.pad, width)
    group = decoding.Group(
      tokens=tokens,
      lengths=counts,
      rows=np.array(rows, np.int32),
      limit=np.array([request.max_tokens for request in requests], np.int32),
      options=sampling_lib.stack([request.sampling for request in requests]),
    )
    return self.params, state, group, np.int32(self.ids.bos)

  def state_bytes(self) -> list[int]:
    """Returns the per-device bytes of the state for each of the `sizes`."""
    programs = [
      self.programs.get(decoding.start, rows=self.rows, **size._asdict())
      for size in self.sizes
    ]
    return [p.memory_analysis().output_size_in_bytes for p in programs]

  def programs_to_compile(self) -> list[Callable[[], jax.stages.Compiled]]:
    """Returns calls that compile the programs of all `sizes`, smallest first.

    They may be made between steps; programs that exist are not compiled again.
    """
    calls = []
    for params, programs in self._variants.values():
      partial = functools.partial(functools.partial, programs.get)
      for size in self.sizes:
        state = programs.get(
          decoding.start, rows=self.rows, **size._asdict()
        ).out_info
        _, *arguments = self._decode_arguments(state, 1)
        calls.append(
          partial(decoding.decode, params, *arguments, **self.choice)
        )
        for width in size.widths():
          prompt = [Request(np.full(width, self.ids.pad), 1)]
          _, *arguments = self.prefill_arguments(prompt, self.group, [0], state)
          calls.append(partial(decoding.prefill, params, *arguments))
        calls += [
          partial(decoding.resize, state, **larger._asdict())
          for larger in self.sizes
          if larger != size and larger.holds(size)
        ]
      calls.append(partial(decoding.stop, state.ended, np.int32(0)))
    return calls

  def _start(self, size: lengths.Size, rows: int) -> decoding.State:
    return self.programs.run(decoding.start, rows=rows, **size._asdict())

  def _stop(self, row: int) -> None:
    ended = self.programs.run(decoding.stop, self._state.ended, np.int32(row))
    self._state = self._state._replace(ended=ended)

  def _size(
    self, requests: Sequence[Request], least: lengths.Size = lengths.NOTHING
  ) -> lengths.Size:
    """Returns the smallest size for the requests, at least `least`."""
    positions = [
      self._architecture.positions(len(request.tokens), request.max_tokens)
      for request in requests
    ]
    for side, learned in self._positions.items():
      longest = max(stacks.get(side, 0) for stacks in positions)
      if longest > learned:
        raise errors.UserError(
          f'the request needs {longest} positions in the {side}, which has'
          f' {learned} learned ones; shorten it, or lower max_tokens.'
        )
    size = lengths.Size(
      max(stacks['decoder'] for stacks in positions),
      max(stacks.get('encoder', 0) for stacks in positions),
    )
    if not self.sizes:
      return size.bucket()
    size = lengths.Size(*map(max, size, least))
    # Sizes are sorted in ascending order.
    fits = [candidate for candidate in self.sizes if candidate.holds(size)]
    if not fits:
      raise errors.UserError(
        f'the request needs a state of {tuple(size)} tokens (decoder,'
        ' encoder); the largest has'
        f' {tuple(self.sizes[-1])}. Shorten it, or lower max_tokens.'
      )
    return fits[0]

  def _fill(self) -> None:
    free = [row for row, active in enumerate(self._active) if active is None]
    is_used = len(free) < self.rows
    if self._queue and not is_used:
      self._use(self._queue[0][1].adapters)
    # Waits for a full group, or all remaining requests with these adapters:
    # `prefill` costs the same for a partial group.
    while 0 < (count := self._next_group()) <= len(free):
      chosen = [self._queue.popleft() for _ in range(count)]
      rows, free = free[:count], free[count:]
      for row, (number, request) in zip(rows, chosen, strict=True):
        self._active[row] = _Active(number, request)
      requests = [active.request for active in self._active if active]
      self._fit(requests, is_used)
      arguments = self.prefill_arguments(
        [request for _, request in chosen], self.group, rows, self._state
      )
      self._state = self.programs.run(decoding.prefill, *arguments)
      is_used = True

  def _fit(self, requests: Sequence[Request], is_used: bool) -> None:
    current = lengths.NOTHING
    if self._state is not None:
      current = lengths.Size(self._state.cache.length, self._state.cache.source)
    # With fixed sizes, a state in use only grows: `warm_up` compiles no
    # programs for shrinking.
    grows = bool(self.sizes) and is_used
    size = self._size(requests, current if grows else lengths.NOTHING)
    if size != current and is_used:
      self._state = self.programs.run(
        decoding.resize, self._state, **size._asdict()
      )
    elif size != current:
      # Frees the old state before allocating the new state.
      self._state = None
      self._state = self._start(size, self.rows)
    # [B, V] is large: allocated for the first request with a penalty.
    penalised = any(r.sampling.repetition_penalty != 1 for r in requests)
    if penalised and self._state.seen is None:
      self._state = self.programs.run(decoding.track_seen, self._state)

  def _decode_arguments(self, state: decoding.State, steps: int) -> tuple:
    # Decodes until this many rows are free for the next group, else all rows.
    wake = self._next_group() or self.rows
    eos = np.array(self.ids.eos, np.int32)
    return self.params, state, eos, np.int32(wake), np.int32(steps)
