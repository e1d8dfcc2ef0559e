"""Inference engine: a queue of prompts through a batch that stays full.

Two compiled programs share one state on the devices. `prefill` reads a group
of prompts (an encoder-decoder with its encoder, whose keys and values it
computes once) and puts them into free rows of the batch; `decode` generates
tokens until enough rows are free for the next group. Shapes are static:
prompts and caches are padded to a few lengths (`inference.lengths`), and a
program is compiled per length; few of them are held (`decoding.Programs`). Rows
end on their own (EOS, number of tokens, stop string) and are refilled while the
others continue.

Every process of a job runs the same calls on the same requests.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
import concurrent.futures
import dataclasses
from typing import Literal

import jax
from jax.sharding import Mesh
from jaxtyping import Float, Int
import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.inference import decoding, lengths
from encdec_adapt.inference import sampling as sampling_lib
from encdec_adapt.models import base_model, build
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
      sizes: sizes that the state may have (`lengths.state_sizes`). It grows to
        what the requests in progress need, shrinks when there are none, and
        longer requests are refused. Without them it follows the requests.

    Raises:
      UserError: the model is encoder-only, or `rows` does not divide.
    """
    if not model.architecture.generates:
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
    self.params = decoding.prepare(model, params, int8=int8)
    self.programs = decoding.Programs(
      build.unroll(model), mesh, rules, decoding.shapes_of(self.params)
    )
    self.vocab_size = model.config.decoder.vocab_size
    self._architecture = model.architecture
    prompt_stack = model.config.stacks[model.architecture.prompt_stack]
    self._prompt_size = prompt_stack.vocab_size
    self._queue: collections.deque[tuple[int, Request]] = collections.deque()
    self._active: list[_Active | None] = [None] * rows
    self._state: decoding.State | None = None
    self._submitted = 0
    self.sizes = tuple(sizes)

  @property
  def busy(self) -> bool:
    """Whether requests are waiting or in progress."""
    return bool(self._queue) or any(self._active)

  @property
  def load(self) -> tuple[int, int]:
    """Numbers of requests in progress, and waiting."""
    return sum(row is not None for row in self._active), len(self._queue)

  def submit(self, request: Request) -> int:
    """Queues a request.

    Returns:
      Its number, which counts from 0.

    Raises:
      UserError: it has stop strings and the engine cannot decode, or tokens
        outside the vocabulary, or it is longer than the largest state.
    """
    self.require_tokens(request.tokens)
    self._size([request])
    if request.stop and self._decode is None:
      raise errors.UserError(
        'stop strings need a tokenizer; the engine has no `decode`.'
      )
    number, self._submitted = self._submitted, self._submitted + 1
    self._queue.append((number, request))
    return number

  def require_tokens(self, tokens: Int[np.ndarray, 'n']) -> None:
    """Refuses a prompt with tokens outside the vocabulary.

    Raises:
      UserError: there are such tokens.
    """
    least, most = int(tokens.min()), int(tokens.max())
    if least < 0 or most >= self._prompt_size:
      raise errors.UserError(
        f'tokens of the prompt are {least} to {most}; the vocabulary has the'
        f' ids 0 to {self._prompt_size - 1}.'
      )

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
    checks = on_tokens is not None or any(
      row.request.stop for row in self._active if row is not None
    )
    steps = self._steps if checks else UNLIMITED
    self._state = self.programs.run(
      decoding.decode, *self._decode_arguments(self._state, steps)
    )
    state, ended = self._state, []
    done, count, tokens, log_probs = jax.device_get(
      (state.done, state.count, state.tokens, state.log_probs)
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

  def prefill_arguments(
    self, requests: Sequence[Request], rows: int
  ) -> tuple[base_model.Params, decoding.State, decoding.Group, np.int32]:
    """Returns arguments of `decoding.prefill` for a state of its own.

    Args:
      requests: prompts, in the order of the rows.
      rows: rows of the state, at least as many.
    """
    state = self._start(self._size(requests), rows)
    return self._prefill_arguments(requests, range(len(requests)), rows, state)

  def state_bytes(self) -> list[int]:
    """Returns the bytes on a device of a state of each of the `sizes`."""
    programs = [
      self.programs.get(decoding.start, rows=self.rows, **size._asdict())
      for size in self.sizes
    ]
    return [p.memory_analysis().output_size_in_bytes for p in programs]

  def warm_up(self) -> int:
    """Compiles the programs for all `sizes`; returns their number."""
    get, programs, futures = self.programs.get, set(), []
    with concurrent.futures.ThreadPoolExecutor() as pool:
      for size in self.sizes:
        programs.add(get(decoding.start, rows=self.rows, **size._asdict()))
        state = jax.tree.map(
          lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
          self._start(size, self.rows),
        )
        programs.add(get(decoding.stop, state.done, np.int32(0)))
        arguments = self._decode_arguments(state, 1)
        futures.append(pool.submit(get, decoding.decode, *arguments))
        for width in size.widths():
          prompt = Request(np.full(width, self.ids.pad), 1)
          arguments = self._prefill_arguments([prompt], [0], self.group, state)
          futures.append(pool.submit(get, decoding.prefill, *arguments))
        for larger in self.sizes:
          if larger != size and larger.holds(size):
            fields = larger._asdict()
            futures.append(pool.submit(get, decoding.resize, state, **fields))
    return len(programs) + len([future.result() for future in futures])

  def _start(self, size: lengths.Size, rows: int) -> decoding.State:
    """Makes a state without requests."""
    return self.programs.run(decoding.start, rows=rows, **size._asdict())

  def _stop(self, row: int) -> None:
    """Ends a row on the devices."""
    done = self.programs.run(decoding.stop, self._state.done, np.int32(row))
    self._state = self._state._replace(done=done)

  def _size(
    self, requests: Sequence[Request], least: lengths.Size = lengths.NOTHING
  ) -> lengths.Size:
    """Returns the size of a state for requests.

    Args:
      requests: the requests.
      least: size that it has at least.

    Raises:
      UserError: none of the `sizes` holds them.
    """
    positions = [
      self._architecture.positions(len(request.tokens), request.max_tokens)
      for request in requests
    ]
    needed = lengths.Size(
      max(stacks['decoder'] for stacks in positions),
      max(stacks.get('encoder', 0) for stacks in positions),
    )
    if not self.sizes:
      return needed.bucket()
    needed = lengths.Size(*map(max, needed, least))
    fits = [size for size in self.sizes if size.holds(needed)]
    if not fits:
      raise errors.UserError(
        f'the request needs a state of {tuple(needed)} tokens (decoder,'
        ' encoder); the largest has'
        f' {tuple(self.sizes[-1])}. Shorten it, or lower max_tokens.'
      )
    return fits[0]

  def _fill(self) -> None:
    """Puts queued prompts into free rows, a group at a time."""
    free = [row for row, active in enumerate(self._active) if active is None]
    is_used = len(free) < self.rows
    while self._queue and len(free) >= min(self.group, len(self._queue)):
      count = min(self.group, len(self._queue))
      chosen = [self._queue.popleft() for _ in range(count)]
      rows, free = free[:count], free[count:]
      for row, (number, request) in zip(rows, chosen, strict=True):
        self._active[row] = _Active(number, request)
      requests = [active.request for active in self._active if active]
      self._fit(requests, is_used)
      arguments = self._prefill_arguments(
        [request for _, request in chosen], rows, self.group, self._state
      )
      self._state = self.programs.run(decoding.prefill, *arguments)
      is_used = True

  def _fit(self, requests: Sequence[Request], is_used: bool) -> None:
    """Gives the state the size that these requests need.

    Args:
      requests: all requests in progress.
      is_used: whether the state has rows of some of them.
    """
    current = lengths.NOTHING
    if self._state is not None:
      current = lengths.Size(self._state.cache.length, self._state.cache.source)
    grows = bool(self.sizes) and is_used
    size = self._size(requests, current if grows else lengths.NOTHING)
    if size != current and is_used:
      self._state = self.programs.run(
        decoding.resize, self._state, **size._asdict()
      )
    elif size != current:
      self._state = None  # Its memory is free before the next one is made.
      self._state = self._start(size, self.rows)
    penalised = any(r.sampling.repetition_penalty != 1 for r in requests)
    if penalised and self._state.seen is None:
      self._state = self.programs.run(decoding.track_seen, self._state)

  def _decode_arguments(self, state: decoding.State, steps: int) -> tuple:
    """Returns the arguments of `decoding.decode`."""
    # Rows that are free when the next group is read; all at the end.
    wake = min(self.group, len(self._queue)) or self.rows
    eos = np.array(self.ids.eos, np.int32)
    return self.params, state, eos, np.int32(wake), np.int32(steps)

  def _prefill_arguments(
    self,
    requests: Sequence[Request],
    rows: Sequence[int],
    size: int,
    state: decoding.State,
  ) -> tuple[base_model.Params, decoding.State, decoding.Group, np.int32]:
    """Returns the arguments of `decoding.prefill`.

    Prompts are padded to a group of this size, whose rest is for no row.
    """
    fill = size - len(requests)
    prompts = [request.tokens for request in requests]
    room = state.cache.source or state.cache.length
    width = lengths.width(max(map(len, prompts)), room)
    tokens, counts = lengths.pad(prompts, size, self.ids.pad, width)
    none = [sampling_lib.SamplingConfig()] * fill
    group = decoding.Group(
      tokens=tokens,
      lengths=counts,
      rows=np.array([*rows, *[len(state.done)] * fill], np.int32),
      limit=np.array([r.max_tokens for r in requests] + [1] * fill, np.int32),
      options=sampling_lib.stack(
        [request.sampling for request in requests] + none
      ),
    )
    return self.params, state, group, np.int32(self.ids.bos)
