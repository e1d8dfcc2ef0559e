"""Cost of generating with a model: FLOPs, latency, throughput, memory.

Reading the prompt (prefill) and generating (decode) are counted and measured
separately, by the two compiled programs of the inference engine. FLOPs are
those of `models.forward_flops`: `generation`, and the published convention.
Times are medians after compilation. Memory is that of the compiled program on a
device: arguments, results and temporaries. Of the other rooms of `evaluation`,
only `results` is imported.
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
from encdec_adapt.models import forward_flops, parameters, presets

TASK = 'cost'
_REPEATS = 5  # The median ignores two runs that something else slowed down.


@dataclasses.dataclass(frozen=True)
class CostEvaluation:
  """Counts and measures the cost of a request.

  Attributes:
    prompt: tokens of each prompt.
    generated: tokens generated for each prompt.
    batch_size: prompts of the batch for throughput, rounded up to divide over
      a model's devices.
    int8: whether to keep kernels as 8-bit integers.
  """

  prompt: int
  generated: int
  batch_size: int
  int8: bool = False
  name = TASK

  def options(self) -> results_store.Options:
    """Returns the inputs of the cost: lengths, batch, devices and formula."""
    device = jax.local_devices()[0]
    return {
      'prompt': self.prompt,
      'generated': self.generated,
      'rows': self.batch_size,
      'devices': f'{jax.device_count()} {device.device_kind}',
      # Formula 1 counted all of the last layer of a decoder's prefill; costs
      # that a store holds of it are computed again.
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
    self,
    model: model_in_memory.LoadedModel,
    rows: int,
    report: Any = None,
    keep: Any = None,
  ) -> list[results_store.Score]:
    """Counts and measures a model.

    Args:
      model: a model with a decoder.
      rows: prompts at a time; divides over the model's devices.
      report: not called, as the measurement takes a moment.
      keep: not called, as the answers mean nothing.

    Returns:
      Metrics of the task `TASK`: `parameters`; `prefill_flops`, `decode_flops`
      and `published_flops` of a prompt, and `paper_flops`: the same with the
      feed-forward widths of the T5Gemma paper; at batch 1 `prefill_ms`, and
      `decode_ms` of a token; with `rows` prompts `prefill_tokens_per_second`
      and `decode_tokens_per_second`, and `prefill_bytes` and `decode_bytes` of
      memory on a device.
    """
    del report, keep
    config, prompt, generated = model.config, self.prompt, self.generated
    prefill, decode = forward_flops.generation(config, prompt, generated)
    paper = presets.with_paper_widths(config)
    # Latency is that of a prompt alone, but every device has to get a row.
    single = self._measure(model, model.rows(1))
    batch = self._measure(model, rows)
    return [
      results_store.Score(TASK, name, float(value), None, 1)
      for name, value in {
        'parameters': parameters.count(config),
        'prefill_flops': prefill,
        'decode_flops': decode,
        'published_flops': forward_flops.published(config, prompt, generated),
        'paper_flops': forward_flops.published(paper, prompt, generated),
        'prefill_ms': 1e3 * single['prefill'],
        'decode_ms': 1e3 * single['decode'] / generated,
        'prefill_tokens_per_second': rows * prompt / batch['prefill'],
        'decode_tokens_per_second': rows * generated / batch['decode'],
        'prefill_bytes': batch['prefill_bytes'],
        'decode_bytes': batch['decode_bytes'],
      }.items()
    ]

  def _measure(
    self, model: model_in_memory.LoadedModel, rows: int
  ) -> dict[str, float]:
    """Returns seconds and bytes of both programs on a batch of `rows`."""
    # No token is -1, so that no row ends before it has `generated` tokens.
    ids = engine_lib.SpecialIds(bos=0, eos=(-1,), pad=0)
    engine = model.engine(rows=rows, ids=ids, int8=self.int8)
    prompt_stack = model.config.stacks[model.config.architecture.prompt_stack]
    # Time does not depend on the tokens, so any will do.
    tokens = np.random.default_rng(0).integers(
      prompt_stack.vocab_size, size=(rows, self.prompt), dtype=np.int32
    )
    requests = [engine_lib.Request(row, self.generated) for row in tokens]
    arguments = engine.prefill_arguments(requests, rows)
    prefill = engine.programs.get(decoding.prefill, *arguments)
    # `eos`, `wake` and `steps` of `decoding.decode`: it returns when all rows
    # have their tokens.
    steps = np.int32(engine_lib.UNLIMITED)
    ends = np.array([-1], np.int32), np.int32(rows), steps
    state = prefill(*arguments)
    decode = engine.programs.get(decoding.decode, engine.params, state, *ends)
    seconds: dict[str, list[float]] = {'prefill': [], 'decode': []}
    for _ in range(_REPEATS):
      # Both programs donate the state, so each run needs a new one.
      arguments = engine.prefill_arguments(requests, rows)
      state = _timed(seconds['prefill'], prefill, *arguments)
      _timed(seconds['decode'], decode, engine.params, state, *ends)
    return {
      **{name: statistics.median(times) for name, times in seconds.items()},
      'prefill_bytes': _memory(prefill),
      'decode_bytes': _memory(decode),
    }


def _timed(times: list[float], program: Callable[..., Any], *args: Any) -> Any:
  """Runs a program and appends its time in seconds."""
  # Dispatch is asynchronous: neither the making of the arguments may count nor
  # the computation be missed.
  jax.block_until_ready(args)
  start = time.perf_counter()
  result = jax.block_until_ready(program(*args))
  times.append(time.perf_counter() - start)
  return result


def _memory(program: jax.stages.Compiled) -> float:
  """Returns the bytes that a program needs on a device."""
  sizes = program.memory_analysis()
  return float(
    sizes.argument_size_in_bytes
    + sizes.output_size_in_bytes
    + sizes.temp_size_in_bytes
    # The donated state is both argument and result.
    - sizes.alias_size_in_bytes
  )


def per_query(values: Mapping[str, float], generated: int) -> dict[str, float]:
  """Returns the cost of a prompt and its answer, by the axis of a figure."""
  return {
    'FLOPs': values['prefill_flops'] + values['decode_flops'],
    'ms at batch 1': values['prefill_ms'] + generated * values['decode_ms'],
  }


def describe(values: Mapping[str, float]) -> dict[str, str]:
  """Formats the metrics of a model for a table."""
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
    'prefill, batch 1': f'{values["prefill_ms"]:.2f} ms',
    'decode, batch 1': f'{values["decode_ms"]:.3f} ms/token',
    'prefill': f'{numbers.count(values["prefill_tokens_per_second"])} tok/s',
    'decode': f'{numbers.count(values["decode_tokens_per_second"])} tok/s',
    'prefill memory': disk.format_bytes(values['prefill_bytes']),
    'decode memory': disk.format_bytes(values['decode_bytes']),
  }


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
  """Returns the indices of points that no other dominates, by rising cost.

  Args:
    points: cost and quality of each model; less cost and more quality are
      better.
  """
  front, best = [], -np.inf
  # Of points of equal cost the best comes first and excludes the others.
  order = sorted(
    range(len(points)), key=lambda i: (points[i][0], -points[i][1])
  )
  for i in order:
    if points[i][1] > best:
      front.append(i)
      best = points[i][1]
  return front
