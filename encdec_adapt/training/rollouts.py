"""Rollouts: completions sampled from the model during training.

`Sampler` completes the prompts of a batch on the job's mesh, with the programs
of the inference engine and an in-memory copy of the parameters in the compute
dtype (sharded by `sharding.rules.Rules.for_sampling`). Shapes are fixed, so
nothing compiles after the first step. Completions depend only on the
parameters, the seed and (step, row, sample): a resumed job samples the same
completions as an uninterrupted job. All processes make the same calls and get
all completions.
"""

from collections.abc import Sequence
import functools
from typing import NamedTuple

import jax
from jaxtyping import Bool, Float, Int
import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.data.records import record_sets
from encdec_adapt.files import disk
from encdec_adapt.inference import decoding, lengths
from encdec_adapt.inference import sampling as sampling_lib
from encdec_adapt.models import base_model, build
from encdec_adapt.objectives import framing
from encdec_adapt.sharding import rules as rules_lib
from encdec_adapt.telemetry import environment
from encdec_adapt.tokenizers import chat_format, vocabulary
from encdec_adapt.training import state as state_lib
from encdec_adapt.training.recipes import recipe
from encdec_adapt.training.sections import rollout_options


class Samples(NamedTuple):
  """Completions of prompts, G of each, padded to T tokens.

  Attributes:
    tokens: token ids, including the end token.
    counts: number of tokens, at least 1.
    log_probs: log-probability of each token at the sampling temperature,
      without top-k and top-p.
    ended: whether the last token is an end token; else the completion is
      truncated.
  """

  tokens: Int[np.ndarray, 'P G T']
  counts: Int[np.ndarray, 'P G']
  log_probs: Float[np.ndarray, 'P G T']
  ended: Bool[np.ndarray, 'P G']

  def completion(self, prompt: int, sample: int) -> Int[np.ndarray, 'n']:
    """Returns the tokens of a completion."""
    return self.tokens[prompt, sample, : self.counts[prompt, sample]]


def sampling_rules(placement: state_lib.Placement) -> rules_lib.Rules:
  """Returns the sharding rules of the sampler's copy of the parameters."""
  counts = [
    count
    for stack in placement.model.config.stacks.values()
    for count in (
      stack.kv_heads,
      stack.global_kv_heads,
      stack.mlp_width,
      stack.table_rows,
    )
  ]
  return placement.rules.for_sampling(placement.mesh.shape, counts)


class Sampler:
  """Samples completions of the prompts of a batch; see the module's docstring.

  Attributes:
    options: options of sampling.
    prompt_side: stack and vocabulary of the prompts.
  """

  def __init__(
    self,
    placement: state_lib.Placement,
    records: record_sets.RecordSet,
    decoder: vocabulary.Vocabulary,
    options: recipe.Sampling,
    seed: int,
  ):
    """Prepares the sampler; programs are compiled at the first call.

    Args:
      placement: the model in training, and its mesh.
      records: rows with a single pair each.
      decoder: vocabulary of the completions.
      options: options of sampling.
      seed: seed of the job.
    """
    self.options = options
    self._model, self._mesh = placement.model, placement.mesh
    # SeedSequence takes no negative numbers.
    self._rules, self._seed = sampling_rules(placement), seed % 2**32
    self._lengths, framing_ids = records.spec.lengths, records.framing
    self.prompt_side = placement.model.architecture.prompt_stack
    self._prompt_ids = getattr(framing_ids, self.prompt_side)
    self._bos = np.int32(framing_ids.decoder.bos)
    ends = [framing_ids.decoder.eos]
    # The answer of a chat ends with its turn, before EOS.
    if any(x.rows.ends_turns for x in records.spec.objectives):
      ends.append(chat_format.end_of_turn(decoder))
    self._ends = np.array(ends, np.int32)
    forced = framing_ids.decoder.forced
    self._choice = {'vocab_size': decoder.size, 'forced': forced}
    # Check memory once per program.
    self._require_memory = functools.cache(_require_memory)

  def prompt(self, pair: framing.Pair) -> Int[np.ndarray, 'm']:
    """Returns a pair's prompt tokens in the vocabulary of `prompt_side`."""
    by_encoder = self.prompt_side == 'encoder'
    return pair.inputs if by_encoder else pair.teacher_inputs

  def __call__(
    self,
    params: base_model.Params,
    pairs: Sequence[framing.Pair | None],
    rows: Sequence[int],
    step: int,
    *,
    greedy: bool = False,
  ) -> Samples:
    """Samples completions; every process calls it with the same arguments.

    Args:
      params: parameters of the model in training.
      pairs: pairs with the prompts, the same number at every call; None for
        filler rows.
      rows: record row of each pair, which with the step seeds its samples.
      step: step of the parameters.
      greedy: whether to decode the first completion of each prompt greedily.

    Raises:
      UserError: the devices have too little memory (at the first call).
    """
    options = self.options
    count, longest = len(pairs) * options.samples, self._lengths.encoder
    prompts = [
      self._prompt_ids.frame(
        () if pair is None else self.prompt(pair), self.prompt_side
      )
      for pair in pairs
    ]
    tokens, used = lengths.pad(
      prompts, len(pairs), self._prompt_ids.pad, longest
    )
    group = decoding.Group(
      tokens=tokens,
      lengths=used,
      rows=np.arange(count, dtype=np.int32),
      limit=np.full(count, options.tokens, np.int32),
      options=sampling_lib.stack(self._configs(rows, step, greedy)),
    )
    # Freed when this call returns, because the step needs the memory.
    params = decoding.prepare(
      self._model, params, int8=False, mesh=self._mesh, rules=self._rules
    )
    model, shapes = build.unroll(self._model), decoding.shapes_of(params)
    get = decoding.Programs(model, self._mesh, self._rules, shapes).get
    size = model.architecture.positions(longest, options.tokens)
    source = size.get('encoder', 0)
    start = get(
      decoding.start, rows=count, length=size['decoder'], source=source
    )
    limits = self._ends, np.int32(count), np.int32(options.tokens)
    static = {'tempered': True, **self._choice}
    state = start.out_info
    prefill = get(decoding.prefill, params, state, group, self._bos)
    decode = get(decoding.decode, params, state, *limits, **static)
    self._require_memory(options, start, (prefill, decode))
    state = prefill(params, start(), group, self._bos)
    state = decode(params, state, *limits)
    ids, counts, log_probs = jax.device_get(
      (state.tokens, state.count, state.log_probs)
    )
    last = np.take_along_axis(ids, counts[:, None] - 1, axis=1)[:, 0]
    shape = len(pairs), options.samples
    fold = lambda x: x[:, : options.tokens].reshape(*shape, -1)  # noqa: E731
    return Samples(
      fold(ids),
      counts.reshape(shape),
      fold(log_probs),
      np.isin(last, self._ends).reshape(shape),
    )

  def _configs(
    self, rows: Sequence[int], step: int, greedy: bool
  ) -> list[sampling_lib.SamplingConfig]:
    drawn = functools.partial(
      sampling_lib.SamplingConfig,
      temperature=self.options.temperature,
      top_k=self.options.top_k or None,
      top_p=self.options.top_p if self.options.top_p < 1 else None,
    )
    return [
      sampling_lib.SamplingConfig()
      if greedy and not sample
      # Filler rows have number -1.
      else drawn(seed=sampling_lib.seed_of(self._seed, step, row + 1, sample))
      for row in rows
      for sample in range(self.options.samples)
    ]


def _require_memory(options, start, steps) -> None:
  """Checks the device memory for caches (`start`) and temporaries (`steps`)."""
  needed = start.memory_analysis().output_size_in_bytes
  needed += max(x.memory_analysis().temp_size_in_bytes for x in steps)
  free = environment.memory_free()
  if free is not None and needed > free:
    raise errors.UserError(
      f'{rollout_options.LABEL}.tokens is {options.tokens}, and caches of a'
      f' step of them need {disk.format_bytes(needed)} of a device, of which'
      f' {disk.format_bytes(free)} are free; lower tokens, samples or'
      ' config.train.batch_size.'
    )
