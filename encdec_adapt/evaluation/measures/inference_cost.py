"""Cost of generating with a model: FLOPs, latency, throughput, memory.

Prefill and decode are counted and measured separately, with the two compiled
programs of the inference engine. FLOPs come from `models.forward_flops`:
`generation`, and the published convention. Times are medians of repeats after
compilation and warm-up; single-prompt times have quartiles, and latencies rank
two models only if their interquartile ranges do not overlap. Memory is the
compiled program's on a device: arguments, results and temporaries. From
`evaluation`, this module imports only `results`.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import itertools
import math
import os
import statistics
import time
from typing import Any

import jax
import numpy as np

from encdec_adapt.evaluation.results import number_format as numbers
from encdec_adapt.evaluation.results import results_store
from encdec_adapt.files import disk
from encdec_adapt.generation import model_in_memory
from encdec_adapt.inference import decoding
from encdec_adapt.inference import engine as engine_lib
from encdec_adapt.models import forward_flops, parameters, presets
from encdec_adapt.stored import model_on_disk
from encdec_adapt.telemetry import environment

TASK = 'cost'
REPEATS = 20  # Per latency; quartiles give its spread.
_BATCH_REPEATS = 5  # The median ignores two slowed by other load.
_WARM_UP = 2  # Uncounted repeats, for caches and clocks to settle.
# Tolerated CPU share of other processes; a larger share is reported.
_LOADED = 0.1
LATENCY = 'ms at batch 1'  # Axis of a figure.
_QUARTILES = ('_low', '', '_high')  # Suffixes of metric names.

# Lower quartile, median and upper quartile; equal for exact costs.
Spread = tuple[float, float, float]


@dataclasses.dataclass(frozen=True)
class CostEvaluation:
  """Counts and measures the cost of a request.

  Attributes:
    prompt: tokens per prompt.
    generated: generated tokens per prompt.
    batch_size: prompts per batch for throughput, rounded up to divide over a
      model's devices.
    int8: whether to quantize kernels to int8.
  """

  prompt: int
  generated: int
  batch_size: int
  int8: bool = False
  name = TASK

  def options(self) -> results_store.Options:
    """Returns all inputs of the cost: lengths, batch, devices and formula."""
    device = jax.local_devices()[0]
    return {
      'prompt': self.prompt,
      'generated': self.generated,
      'rows': self.batch_size,
      'devices': f'{jax.device_count()} {device.device_kind}',
      # Formula 1 counted all of the last layer of a decoder's prefill, and 2
      # had no quartiles; their stored costs are recomputed.
      'formula': 3,
    }

  def check(self, stored: model_on_disk.StoredModel) -> None:
    """Checks that a model can generate.

    Raises:
      UserError: it cannot.
    """
    stored.model.architecture.require_generation(
      str(stored.path), 'give --cost= to measure no cost'
    )

  def scores(
    self, model: model_in_memory.LoadedModel, rows: int, report: Any = None
  ) -> list[results_store.Score]:
    """Counts and measures a model.

    Args:
      model: a model with a decoder.
      rows: prompts at a time; divides over the model's devices.
      report: not called, since the measurement is short.

    Returns:
      Metrics of the task `TASK`: `parameters`; `prefill_flops`, `decode_flops`
      and `published_flops` per prompt, and `paper_flops`: the same with the
      feed-forward widths of the T5Gemma paper; at batch 1 `prefill_ms`, and
      `decode_ms` per token, with their quartiles `.._low` and `.._high`;
      `other_load`, the CPU share of other processes meanwhile, NaN if unknown;
      with `rows` prompts `prefill_tokens_per_second` and
      `decode_tokens_per_second`, and `prefill_bytes` and `decode_bytes` of
      memory on a device.
    """
    del report
    config, prompt, generated = model.config, self.prompt, self.generated
    prefill, decode = forward_flops.generation(config, prompt, generated)
    paper = presets.with_paper_widths(config)
    # Latency is for a single prompt, but every device needs a row.
    began, foreign = time.monotonic(), environment.foreign_processor_seconds()
    single, _ = self._measure(model, model.rows(1), REPEATS)
    load = math.nan
    if foreign is not None:
      seconds = environment.foreign_processor_seconds() - foreign
      load = max(0.0, seconds) / (time.monotonic() - began) / os.cpu_count()
    quartiles = {
      f'{name}_ms{suffix}': 1e3 * value / tokens
      for name, tokens in (('prefill', 1), ('decode', generated))
      for suffix, value in zip(
        _QUARTILES, statistics.quantiles(single[name], n=4), strict=True
      )
    }
    batch, memory = self._measure(model, rows, _BATCH_REPEATS)
    batch = {name: statistics.median(times) for name, times in batch.items()}
    return [
      results_store.Score(TASK, name, float(value), None, 1)
      for name, value in {
        'parameters': parameters.count(config),
        'prefill_flops': prefill,
        'decode_flops': decode,
        'published_flops': forward_flops.published(config, prompt, generated),
        'paper_flops': forward_flops.published(paper, prompt, generated),
        **quartiles,
        'other_load': load,
        'prefill_tokens_per_second': rows * prompt / batch['prefill'],
        'decode_tokens_per_second': rows * generated / batch['decode'],
        **memory,
      }.items()
    ]

  def _measure(
    self, model: model_in_memory.LoadedModel, rows: int, repeats: int
  ) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Returns both programs' seconds per repeat, and their bytes."""
    # No token is -1, so no row ends before `generated` tokens.
    ids = engine_lib.SpecialIds(bos=0, eos=(-1,), pad=0)
    engine = model.engine(rows=rows, ids=ids, int8=self.int8)
    # Time is independent of the token values.
    tokens = np.random.default_rng(0).integers(
      model.config.prompt_reader.vocab_size,
      size=(rows, self.prompt),
      dtype=np.int32,
    )
    requests = [engine_lib.Request(row, self.generated) for row in tokens]
    arguments = engine.prefill_arguments(requests, rows)
    prefill = engine.programs.get(decoding.prefill, *arguments)
    # `eos`, `wake` and `steps` of `decoding.decode`: return once all rows have
    # their tokens.
    steps = np.int32(engine_lib.UNLIMITED)
    ends = np.array([-1], np.int32), np.int32(rows), steps
    state = prefill(*arguments)
    decode = engine.programs.get(decoding.decode, engine.params, state, *ends)
    seconds: dict[str, list[float]] = {'prefill': [], 'decode': []}
    for _ in range(_WARM_UP + repeats):
      # Both programs donate the state, so each run needs a new state.
      arguments = engine.prefill_arguments(requests, rows)
      state = _timed(seconds['prefill'], prefill, *arguments)
      _timed(seconds['decode'], decode, engine.params, state, *ends)
    return {name: times[_WARM_UP:] for name, times in seconds.items()}, {
      'prefill_bytes': _memory(prefill),
      'decode_bytes': _memory(decode),
    }


def _timed(times: list[float], program: Callable[..., Any], *args: Any) -> Any:
  # Dispatch is asynchronous: the time excludes building the arguments, and
  # includes the whole computation.
  jax.block_until_ready(args)
  start = time.perf_counter()
  result = jax.block_until_ready(program(*args))
  times.append(time.perf_counter() - start)
  return result


def _memory(program: jax.stages.Compiled) -> float:
  sizes = program.memory_analysis()
  return float(
    sizes.argument_size_in_bytes
    + sizes.output_size_in_bytes
    + sizes.temp_size_in_bytes
    # The donated state is both argument and result.
    - sizes.alias_size_in_bytes
  )


def per_query(values: Mapping[str, float], generated: int) -> dict[str, Spread]:
  """Returns the cost of a prompt and its answer, by figure axis.

  Memory is for the throughput batch.
  """
  exact = {
    'FLOPs': values['prefill_flops'] + values['decode_flops'],
    'FLOPs, published convention': values['published_flops'],
    'bytes of a batch': max(values['prefill_bytes'], values['decode_bytes']),
  }
  latencies = (
    values[f'prefill_ms{suffix}'] + generated * values[f'decode_ms{suffix}']
    for suffix in _QUARTILES
  )
  spreads = {name: (x, x, x) for name, x in exact.items()}
  return spreads | {LATENCY: tuple(latencies)}


def notes(
  costs: Mapping[str, Mapping[str, float]], generated: int
) -> list[str]:
  """Returns sentences on overlapping latencies and on other load.

  Args:
    costs: metrics by model name.
    generated: tokens of an answer.
  """
  spreads = {x: per_query(v, generated)[LATENCY] for x, v in costs.items()}
  unranked: dict[str, list[str]] = {}
  for a, b in itertools.combinations(spreads, 2):
    if _overlap(spreads[a], spreads[b]):
      unranked.setdefault(a, []).append(b)
  sentences = []
  if unranked:
    pairs = (f'{a} and {", ".join(names)}' for a, names in unranked.items())
    sentences.append(
      f'Not ranked by latency, as the quartiles of {REPEATS} repeats overlap:'
      f' {"; ".join(pairs)}.'
    )
  # An unknown load is NaN: all comparisons are false.
  return sentences + [
    f'The machine was loaded while {name} was measured: other processes took'
    f' {values["other_load"]:.0%} of its processors; latencies are too long.'
    for name, values in costs.items()
    if values['other_load'] > _LOADED
  ]


def _overlap(a: Spread, b: Spread) -> bool:
  return max(a[0], b[0]) <= min(a[-1], b[-1])


def describe(values: Mapping[str, float]) -> dict[str, str]:
  """Formats the metrics of a model for a table."""

  def times(name: str, form: str) -> str:
    low, middle, high = (values[f'{name}{x}'] for x in _QUARTILES)
    return f'{middle:{form}} ms ({low:{form}} to {high:{form}})'

  total = values['prefill_flops'] + values['decode_flops']
  # The released S to XL have feed-forwards twice as wide as the paper's table.
  published = f'{values["published_flops"]:.3g}'
  if values['paper_flops'] != values['published_flops']:
    published += f" ({values['paper_flops']:.3g} with the paper's widths)"
  return {
    'parameters': numbers.count(values['parameters']),
    'FLOPs': f'{total:.3g}',
    'of prefill': f'{values["prefill_flops"] / total:.0%}',
    'FLOPs, published convention': published,
    'prefill, batch 1': times('prefill_ms', '.2f'),
    'decode, batch 1': times('decode_ms', '.3f') + ' a token',
    'prefill': f'{numbers.count(values["prefill_tokens_per_second"])} tok/s',
    'decode': f'{numbers.count(values["decode_tokens_per_second"])} tok/s',
    'prefill memory': disk.format_bytes(values['prefill_bytes']),
    'decode memory': disk.format_bytes(values['decode_bytes']),
  }


def pareto_front(points: Sequence[tuple[Spread, Spread]]) -> list[int]:
  """Returns the indices of non-dominated points, by ascending cost.

  Args:
    points: cost and quality of each model; lower cost and higher quality are
      better. Different costs with overlapping quartiles are not ranked, nor are
      different qualities with overlapping intervals: neither point dominates.
  """

  def is_ranked(a: Spread, b: Spread) -> bool:
    return a == b or not _overlap(a, b)

  def dominates(i: int, j: int) -> bool:
    (cost, quality), (other_cost, other_quality) = points[i], points[j]
    if not (is_ranked(cost, other_cost) and is_ranked(quality, other_quality)):
      return False
    # The first of equal points represents all.
    differs = points[i] != points[j] or i < j
    return (
      differs and cost[1] <= other_cost[1] and quality[1] >= other_quality[1]
    )

  indices = range(len(points))
  front = [j for j in indices if not any(dominates(i, j) for i in indices)]
  return sorted(front, key=lambda i: points[i][0][1])
