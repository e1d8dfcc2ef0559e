"""Cost of generating with a model: FLOPs, latency, throughput, memory.

Reading the prompt (prefill) and generating (decode) are counted and measured
apart, by the two compiled programs of the inference engine. FLOPs are those of
`models.forward_flops`: `generation`, and the published convention. Times are
medians after compilation. Memory is what the compiled program needs on one
device: arguments, results and temporaries.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import statistics
import time
from typing import Any

import jax
import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.conversion import model_in_memory, model_on_disk
from encdec_adapt.evaluation.results import number_format as numbers
from encdec_adapt.evaluation.results import results_store
from encdec_adapt.files import disk
from encdec_adapt.inference import decoding
from encdec_adapt.inference import engine as engine_lib
from encdec_adapt.models import (
  forward_flops,
  parameters,
  presets,
)

TASK = 'cost'
_REPEATS = 5


@dataclasses.dataclass(frozen=True)
class CostEvaluation:
  """Counts and measures what a request costs.

  Attributes:
    prompt: tokens of each prompt.
    generated: tokens generated for each prompt.
    batch_size: prompts of the batch that throughput is measured with, rounded
      up to divide over a model's devices.
    int8: whether to keep kernels as 8-bit integers.
  """

  prompt: int
  generated: int
  batch_size: int
  int8: bool = False
  name = TASK

  def options(self) -> results_store.Options:
    """Returns what decides the cost: lengths, batch, devices and formula."""
    device = jax.local_devices()[0]
    return {
      'prompt': self.prompt,
      'generated': self.generated,
      'rows': self.batch_size,
      'devices': f'{jax.device_count()} {device.device_kind}',
      # The first one counted the whole last layer of a decoder's prefill.
      'formula': 2,
    }

  def check(self, stored: model_on_disk.StoredModel) -> None:
    """Checks that a model can generate.

    Raises:
      UserError: it is encoder-only.
    """
    if not stored.model.architecture.generates:
      raise errors.UserError(
        f'{stored.path} is encoder-only and generates nothing; give --cost= to'
        ' measure no cost.'
      )

  def scores(
    self, loaded: model_in_memory.LoadedModel, rows: int, report: Any = None
  ) -> list[results_store.Score]:
    """Counts and measures a model.

    Args:
      loaded: a model with a decoder.
      rows: prompts at a time; divides over the model's devices.
      report: not called, as this takes a moment.

    Returns:
      Metrics of the task `TASK`: `parameters`; `prefill_flops`, `decode_flops`
      and `published_flops` of one prompt, and `paper_flops`: the same with the
      feed-forward widths of the T5Gemma paper; at batch 1 `prefill_ms`, and
      `decode_ms` of one token; with `rows` prompts `prefill_tokens_per_second`
      and `decode_tokens_per_second`, and `prefill_bytes` and `decode_bytes` of
      memory on one device.
    """
    del report
    config, prompt, generated = loaded.config, self.prompt, self.generated
    prefill, decode = forward_flops.generation(config, prompt, generated)
    paper = presets.with_paper_widths(config)
    one = self._measure(loaded, loaded.rows(1))
    many = self._measure(loaded, rows)
    return [
      results_store.Score(TASK, name, float(value), None, 1)
      for name, value in {
        'parameters': parameters.count(config),
        'prefill_flops': prefill,
        'decode_flops': decode,
        'published_flops': forward_flops.published(config, prompt, generated),
        'paper_flops': forward_flops.published(paper, prompt, generated),
        'prefill_ms': 1e3 * one['prefill'],
        'decode_ms': 1e3 * one['decode'] / generated,
        'prefill_tokens_per_second': rows * prompt / many['prefill'],
        'decode_tokens_per_second': rows * generated / many['decode'],
        'prefill_bytes': many['prefill_bytes'],
        'decode_bytes': many['decode_bytes'],
      }.items()
    ]

  def _measure(
    self, loaded: model_in_memory.LoadedModel, rows: int
  ) -> dict[str, float]:
    """Returns seconds and bytes of both programs on a batch of `rows`."""
    # No token ends a row, so that all have the same length.
    ids = engine_lib.SpecialIds(bos=0, eos=(-1,), pad=0)
    engine = loaded.engine(rows=rows, ids=ids, int8=self.int8)
    prompt_stack = loaded.config.stacks[loaded.model.architecture.prompt_stack]
    size = prompt_stack.vocab_size
    tokens = np.random.default_rng(0).integers(
      size, size=(rows, self.prompt), dtype=np.int32
    )
    requests = [engine_lib.Request(row, self.generated) for row in tokens]
    given = engine.prefill_arguments(requests, rows)
    prefill = engine.programs.get(decoding.prefill, *given)
    last = (
      np.array([-1], np.int32),
      np.int32(rows),
      np.int32(engine_lib.UNLIMITED),
    )
    state = prefill(*given)
    decode = engine.programs.get(decoding.decode, engine.params, state, *last)
    seconds: dict[str, list[float]] = {'prefill': [], 'decode': []}
    for _ in range(_REPEATS):
      given = engine.prefill_arguments(requests, rows)
      state = _timed(seconds['prefill'], prefill, *given)
      _timed(seconds['decode'], decode, engine.params, state, *last)
    return {
      **{name: statistics.median(times) for name, times in seconds.items()},
      'prefill_bytes': _memory(prefill),
      'decode_bytes': _memory(decode),
    }


def _timed(times: list[float], program: Callable[..., Any], *given: Any) -> Any:
  """Runs a program and adds its time in seconds."""
  jax.block_until_ready(given)
  began = time.perf_counter()
  found = jax.block_until_ready(program(*given))
  times.append(time.perf_counter() - began)
  return found


def _memory(program: jax.stages.Compiled) -> float:
  """Returns the bytes that a program needs on one device."""
  found = program.memory_analysis()
  return float(
    found.argument_size_in_bytes
    + found.output_size_in_bytes
    + found.temp_size_in_bytes
    - found.alias_size_in_bytes
  )


def per_query(values: Mapping[str, float], generated: int) -> dict[str, float]:
  """Returns the whole cost of one prompt, by the axis of a figure."""
  return {
    'FLOPs': values['prefill_flops'] + values['decode_flops'],
    'ms at batch 1': values['prefill_ms'] + generated * values['decode_ms'],
  }


def describe(values: Mapping[str, float]) -> dict[str, str]:
  """Formats the metrics of a model for a table."""
  total = values['prefill_flops'] + values['decode_flops']
  published = f'{values["published_flops"]:.3g}'
  if values['paper_flops'] != values['published_flops']:
    published += f" ({values['paper_flops']:.3g} with the paper's widths)"
  return {
    'parameters': numbers.count(values['parameters']),
    'FLOPs': f'{total:.3g}',
    'of prefill': f'{values["prefill_flops"] / total:.0%}',
    'FLOPs, published convention': published,
    'prefill, batch 1': f'{values["prefill_ms"]:.2f} ms',
    'decode, batch 1': f'{values["decode_ms"]:.3f} ms/token',
    'prefill': f'{numbers.count(values["prefill_tokens_per_second"])} tok/s',
    'decode': f'{numbers.count(values["decode_tokens_per_second"])} tok/s',
    'prefill memory': disk.format_bytes(values['prefill_bytes']),
    'decode memory': disk.format_bytes(values['decode_bytes']),
  }


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
  """Returns the points that no other one dominates, in the order of cost.

  Args:
    points: cost and quality of each model; less cost and more quality are
      better.
  """
  front, best = [], -np.inf
  for i in sorted(
    range(len(points)), key=lambda i: (points[i][0], -points[i][1])
  ):
    if points[i][1] > best:
      front.append(i)
      best = points[i][1]
  return front
