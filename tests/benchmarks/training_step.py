"""Our training step against the same model in transformers on torch.

A step is forward pass, backward pass, clipping by the global norm and update,
on the same batch without padding, for models of the same shape (the numbers of
parameters are compared). The two run in processes of their own, so that each
has its own peak memory, and take turns step by step, so that noise of the
machine affects both. Ratios are ours over the peer's. Needs
`pip install -e .[peer]`.

The model is a T5Gemma, or with `--block=t5` a T5 1.1. `--pair=2b_2b` names a
shipped pair instead of sizes, and `--examples` is the number of examples in a
row. `--lora_rank` and `--lora_base` are keys of `config.train.lora`, against
PEFT. The default sizes are for a CPU; `gpu_step` and `gpu_tuning` run the same
workers on a GPU.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
import functools
import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

from tests.benchmarks import results

IMPLEMENTATIONS = ('ours', 'transformers')
LEARNING_RATE = 1e-4
CLIP_NORM = 1.0
Run = Callable[[], float]  # Runs something and returns the loss.
SIZES = {
  'layers': 6,
  'width': 256,
  'mlp_width': 1024,
  'heads': 4,
  'kv_heads': 2,
  'head_dim': 64,
  'vocab_size': 8192,
}
# Flags of the model and the batch, then of how ours is computed.
MODEL = {
  **SIZES,
  'pair': '',
  'block': 'gemma2',  # Or t5; or uncapped: global layers without soft-caps.
  'batch_size': 8,
  'encoder_length': 256,
  'decoder_length': 256,
  'examples': 1,
  'optimizer': 'adamw',
  'steps': 7,
  'lora_rank': 0,
  'lora_base': '',
  'microbatches': 1,
  'moment_dtype': 'float32',
  'scan_unroll': 1,
  'remat': 'none',
  'attention': 'chunked',
  'attention_chunk': 256,
  'loss_chunk': 1024,
}


def make_parser() -> argparse.ArgumentParser:
  """Makes the parser of this benchmark and of its workers."""
  return results.parser(
    __doc__,
    **MODEL,
    dtypes=['float32', 'bfloat16'],
    # transformers builds its attention without the soft-cap otherwise, and
    # sdpa cannot do it.
    peer_attention='eager',
    peer_device='cpu',
    peer_compile=False,
    peer_checkpointing=False,
    worker='',  # Implementation that this process runs.
  )


def make_batch(arguments: argparse.Namespace) -> dict[str, Any]:
  """Makes a batch with rows full of equally long examples."""
  import numpy as np

  from encdec_adapt.objectives import framing
  from tests import gemma_ids

  lengths = framing.Lengths(arguments.encoder_length, arguments.decoder_length)
  rng = np.random.default_rng(0)
  vocabulary = make_pair(arguments).decoder.vocab_size

  def draw(length: int) -> np.ndarray:
    """Returns random tokens."""
    return rng.integers(5, vocabulary, length, np.int32)

  inputs, targets = (
    length // arguments.examples
    for length in (lengths.encoder, lengths.decoder)
  )
  rows = []
  for _ in range(arguments.batch_size):
    pairs = [
      framing.Pair(draw(inputs - 1), draw(targets))
      for _ in range(arguments.examples)
    ]
    rows.append(framing.frame_row(pairs, lengths, gemma_ids.FRAMING))
  return framing.stack_rows(rows)


def make_pair(arguments: argparse.Namespace) -> Any:
  """Returns the model's `models.model_config.EncoderDecoderConfig`."""
  from encdec_adapt.models import model_config as configs
  from encdec_adapt.models import presets

  if arguments.pair:
    return presets.t5gemma(arguments.pair)
  sizes = {name: getattr(arguments, name) for name in SIZES}
  if arguments.block == 't5':
    sizes['kv_heads'] = sizes['heads']
    return presets.t5('t5_1.1_small', **sizes)
  if arguments.block == 'uncapped':
    sizes |= {'attention_softcap': None, 'final_softcap': None}
    sizes['pattern'] = ('global',)
  stack = configs.StackConfig(**sizes, query_scale=float(arguments.head_dim))
  return configs.encoder_decoder(stack, stack)


def place(arguments: argparse.Namespace) -> Any:
  """Returns the `training.state.Placement` of our model or its adapters."""
  import jax

  from encdec_adapt.models import adapters, execution
  from encdec_adapt.sharding import mesh, rules
  from encdec_adapt.training import setup

  names = ('remat', 'attention', 'attention_chunk', 'scan_unroll')
  compute = execution.ComputeConfig(
    dtype=arguments.dtypes[0],
    **{name: getattr(arguments, name) for name in names},
  ).on(jax.default_backend())
  pair = make_pair(arguments)
  return setup.place_model(
    pair,
    compute,
    mesh.make_mesh(mesh.MeshConfig()),
    rules.RULES['fsdp'],
    adapters.make(pair, _lora(arguments)),
  )


def _lora(arguments: argparse.Namespace) -> Any:
  from encdec_adapt.models import adapters

  return adapters.Options(arguments.lora_rank, base=arguments.lora_base)


def schedule() -> Any:
  """Returns the learning rate of a job, which is constant."""
  from encdec_adapt.training import schedules

  config = schedules.ScheduleConfig('constant', LEARNING_RATE, 0)
  return schedules.make_schedule(config, 1000)


def make_job(
  where: Any, recipe: Any, arguments: argparse.Namespace, **options: Any
) -> Any:
  """Returns the `training.phases.Phases` of our job, as `train.py` makes it.

  Args:
    where: the placement.
    recipe: the recipe.
    arguments: flags of the optimizer and the batch.
    **options: further arguments of `Phases`.
  """
  from encdec_adapt.training import optimizers, phases, schedules
  from encdec_adapt.training.sections import train_section

  optimizer = optimizers.OptimizerConfig(
    arguments.optimizer,
    schedules.ScheduleConfig('constant', LEARNING_RATE, 0),
    clip_norm=CLIP_NORM,
    moment_dtype=arguments.moment_dtype,
    second_moment_dtype=arguments.moment_dtype,
  )
  config = train_section.TrainConfig(
    batch_size=arguments.batch_size, microbatches=arguments.microbatches
  )
  return phases.Phases(where, recipe, optimizer, config, **options)


def make_recipe(model: Any, arguments: argparse.Namespace) -> Any:
  """Returns the recipe of cross-entropy over pairs, a `recipes.recipe.Recipe`.

  Args:
    model: configuration of the model.
    arguments: flags of the batch.
  """
  from encdec_adapt.objectives import framing, row_fields
  from encdec_adapt.training.losses import cross_entropy
  from encdec_adapt.training.metrics import token_metrics
  from encdec_adapt.training.recipes import recipe

  target = arguments.decoder_length
  lengths = framing.Lengths(arguments.encoder_length, target)
  return recipe.Recipe(
    cross_entropy.CrossEntropy(chunk=arguments.loss_chunk),
    token_metrics.TargetTokens(),
    model,
    recipe.Rows(row_fields.PAIRS, lengths, 1, target, {}),
  )


def by_memory(
  job: Any, recipe: Any, arguments: argparse.Namespace, *loaded: Any
) -> Any:
  """Returns the phases with the policy that memory decides, if none is stated.

  Args:
    job: the phases.
    recipe: the recipe.
    arguments: flags of the batch.
    *loaded: state, batch, references and base.
  """
  import jax

  from encdec_adapt.models import execution
  from encdec_adapt.training import remat_choice, workload
  from encdec_adapt.training.sections import train_section

  where = job.placement
  if where.model.compute.remat != execution.AUTO:
    return job
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
    loaded,
  )
  config = train_section.TrainConfig(
    batch_size=arguments.batch_size, microbatches=arguments.microbatches
  )
  references = [where.model.config] * len(loaded[2])
  choice = remat_choice.for_job(
    lambda x: job.with_remat(x).make_step(schedule()).lower(*shapes),
    workload.of_step(where, recipe, config, references),
    shapes,
    loaded,
    (),
    functools.partial(print, file=sys.stderr),
  )
  return job.with_remat(choice.policy, choice.program)


def _draw_base(where: Any) -> Any:
  """Returns a random frozen base; no second copy of it is in memory."""
  import jax

  from encdec_adapt.training import state

  base, dtype = {}, where.model.compute.dtype
  for path in where.adapters.frozen:
    shape = where.model.table[path].shape

    def draw(path=path, shape=shape):
      kernel = 0.02 * jax.random.normal(jax.random.key(0), shape, dtype)
      return where.adapters.freeze(path, kernel, dtype)

    base[path] = jax.jit(draw)()
  return state.unflatten(base)


def make_ours(arguments: argparse.Namespace) -> tuple[Run, int, str]:
  """Makes our step, as `train.py` runs it.

  Returns:
    Function that runs a step, the number of parameters that train, and
    `compute.remat`.
  """
  import jax

  from encdec_adapt.training import step

  where = place(arguments)
  recipe = make_recipe(where.model.config, arguments)
  job = make_job(where, recipe, arguments)
  base = _draw_base(where) if where.adapters else {}
  init = (where.adapters or where.model).init
  params = where.place(init, jax.random.key(0))
  current = job.create(params)
  batch = step.place_batch(make_batch(arguments), where)
  job = by_memory(job, recipe, arguments, current, batch, {}, base)
  train = job.make_step(schedule())

  count = sum(leaf.size for leaf in jax.tree.leaves(params))
  del params  # Donated.

  def run() -> float:
    nonlocal current
    current, metrics = train(current, batch, {}, base)
    return float(metrics['loss'])

  return run, count, job.placement.model.compute.remat


def make_transformers(arguments: argparse.Namespace) -> tuple[Run, int]:
  """Makes the peer's step; returns it and the number of parameters."""
  import torch
  import transformers

  from encdec_adapt.huggingface import config_json

  torch.manual_seed(0)
  device = arguments.peer_device
  raw, _ = config_json.raw_from_model(make_pair(arguments))
  if arguments.block == 't5':
    raw['dropout_rate'] = 0.0
  with torch.device(device):
    model = transformers.AutoModelForSeq2SeqLM.from_config(
      transformers.AutoConfig.for_model(**raw),
      attn_implementation=arguments.peer_attention,
      # A frozen base in the compute dtype, as ours.
      dtype=arguments.dtypes[0] if arguments.lora_rank else 'float32',
    )
    if arguments.block == 't5':
      # transformers 5 ties the head of every T5 that is built from a config.
      head = model.get_input_embeddings().weight.detach().clone()
      model.lm_head.weight = torch.nn.Parameter(head)
  if arguments.lora_rank:
    model = _with_peft(model, _lora(arguments))
  model.train()
  if arguments.peer_checkpointing:
    model.gradient_checkpointing_enable({'use_reentrant': False})
  options = {'lr': LEARNING_RATE, 'weight_decay': 0.0}
  trained = [p for p in model.parameters() if p.requires_grad]
  if arguments.optimizer == 'adamw':
    options |= {'betas': (0.9, 0.95), 'fused': True}
    optimizer = torch.optim.AdamW(trained, **options)
  else:
    optimizer = torch.optim.Adafactor(trained, **options)
  batch = {
    name: torch.from_numpy(value).long().to(device)
    for name, value in make_batch(arguments).items()
    if name in ('encoder_tokens', 'decoder_tokens', 'targets')
  }
  apply = torch.compile(model) if arguments.peer_compile else model
  mixed = arguments.dtypes == ['bfloat16']

  def run() -> float:
    with torch.autocast(device, torch.bfloat16, enabled=mixed):
      loss = apply(
        input_ids=batch['encoder_tokens'],
        decoder_input_ids=batch['decoder_tokens'],
        labels=batch['targets'],
        use_cache=False,
      ).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trained, CLIP_NORM)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss)

  return run, sum(p.numel() for p in trained)


def _with_peft(model: Any, options: Any) -> Any:
  """Returns the model with adapters of PEFT on all projections."""
  import peft

  return peft.get_peft_model(
    model,
    peft.LoraConfig(
      r=options.rank,
      lora_alpha=options.numerator,
      target_modules=[f'{x}_proj' for x in (*'qkvo', 'gate', 'up', 'down')],
    ),
  )


def _work(arguments: argparse.Namespace) -> None:
  """Runs a step for each line of standard input; answers in JSON lines."""
  if arguments.worker == 'ours':
    from encdec_adapt.cluster import host_memory
    from encdec_adapt.telemetry import peak_flops

    host_memory.share_arena()  # As `train` does.
    run, parameters, policy = make_ours(arguments)
    host_memory.keep_freed(parameters)
    peak = peak_flops.peak(sys.modules['jax'].devices())
  else:
    run, parameters = make_transformers(arguments)
    peak = policy = None

  def measure() -> dict[str, Any]:
    start = time.perf_counter()
    loss = run()
    seconds = time.perf_counter() - start
    answer = {'seconds': seconds, 'loss': loss, 'parameters': parameters}
    return answer | {'peak_flops': peak, 'remat': policy}

  answer_steps(measure)


def answer_steps(measure: Callable[[], dict[str, Any]]) -> None:
  """Answers each line of standard input by a measured step and the memory."""
  for _ in sys.stdin:
    answer = measure() | {'peak_mib': _peak_mib()}
    print(json.dumps(answer), flush=True)


def _peak_mib() -> float:
  """Returns the peak memory of this process: of its GPU if it has one."""
  torch, jax = sys.modules.get('torch'), sys.modules.get('jax')
  if torch is not None and torch.cuda.is_available():
    return torch.cuda.max_memory_allocated() / 2**20
  if torch is None and jax.default_backend() == 'gpu':
    return jax.local_devices()[0].memory_stats()['peak_bytes_in_use'] / 2**20
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak / 2**20 if sys.platform == 'darwin' else peak / 2**10


class WorkerError(SystemExit):
  """A worker's process ended."""


class Worker:
  """One implementation in a process of its own.

  Raises:
    WorkerError: in a method, the process has ended.
  """

  def __init__(
    self,
    implementation: str,
    dtype: str,
    flags: Sequence[str],
    environment: Mapping[str, str] | None = None,
    module: str = 'training_step',
  ):
    """Starts the process, of a module in this folder."""
    command = [sys.executable, '-m', f'tests.benchmarks.{module}', *flags]
    command += [f'--worker={implementation}', '--dtypes', dtype]
    self._process = subprocess.Popen(
      command,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      env={**os.environ, **(environment or {})},
    )

  def step(self) -> dict[str, float]:
    """Runs a step; returns its measurements."""
    self._process.stdin.write('step\n')
    self._process.stdin.flush()
    answer = self._process.stdout.readline()
    if not answer:
      raise WorkerError('a worker of the benchmark failed; see its error above')
    return json.loads(answer)

  def close(self) -> None:
    """Ends the process."""
    self._process.stdin.close()
    self._process.wait()


def measured(worker: Worker, steps: int) -> list[dict[str, float]]:
  """Returns the measurements of a first step and of `steps` more.

  Raises:
    WorkerError: it does not fit, or cannot be run.
  """
  try:
    return [worker.step() for _ in range(1 + steps)]
  finally:
    worker.close()


def tokens_of(arguments: argparse.Namespace) -> int:
  """Returns the tokens of a batch."""
  return arguments.batch_size * (
    arguments.encoder_length + arguments.decoder_length
  )


def _compare(dtype: str, arguments, flags) -> list[dict[str, Any]]:
  """Returns the rows of both implementations with products in `dtype`."""
  workers = {name: Worker(name, dtype, flags) for name in IMPLEMENTATIONS}
  found = results.take_turns(
    {name: worker.step for name, worker in workers.items()}, arguments.steps
  )
  counts = {name: one[0]['parameters'] for name, one in found.items()}
  if len(set(counts.values())) > 1:
    raise SystemExit(f'the two models differ in parameters: {counts}')
  rows = []
  for name, (first, *rest) in found.items():
    workers[name].close()
    seconds = results.median(rest, 'seconds')
    rows.append(
      {
        'dtype': dtype,
        'implementation': name,
        'tokens/s': tokens_of(arguments) / seconds,
        'peak MiB': rest[-1]['peak_mib'],
        'first step s': first['seconds'],
        'step s': seconds,
        'loss, first': first['loss'],
        'loss, last': rest[-1]['loss'],
      }
    )
  for row in rows:
    row['speed ratio'] = row['tokens/s'] / rows[1]['tokens/s']
    row['memory ratio'] = row['peak MiB'] / rows[1]['peak MiB']
  return rows


def main(argv: Sequence[str] | None = None) -> dict[str, Any] | None:
  """Measures and prints; ratios are ours over the peer's."""
  flags = list(sys.argv[1:] if argv is None else argv)
  arguments = make_parser().parse_args(flags)
  if arguments.worker:
    _work(arguments)
    return None
  rows = []
  for dtype in arguments.dtypes:
    rows += _compare(dtype, arguments, flags)
  return results.report('training_step', rows, arguments)


if __name__ == '__main__':
  main()
