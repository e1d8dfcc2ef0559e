"""Our training step against the same T5Gemma in transformers on torch.

A step is forward pass, backward pass, clipping by the global norm and update,
on the same batch without padding, for the same shapes of model (the numbers
of parameters are compared). The two run in processes of their own, so that
peak memory is each one's, and take turns step by step, so that whatever else
the machine does disturbs both; it should do nothing else all the same. Ratios
are ours over the peer's. Needs `pip install -e .[peer]`.

The sizes are those of a CPU; `gpu_step` runs the same workers on a GPU.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

from tests.benchmarks import results

IMPLEMENTATIONS = ('ours', 'transformers')
LEARNING_RATE = 1e-4
CLIP_NORM = 1.0
Run = Callable[[], float]  # Runs something and gives the loss.


def add_model(parser: argparse.ArgumentParser) -> None:
  """Adds flags of the model, the batch, and how ours is computed."""
  sizes = {
    'layers': 6,
    'width': 256,
    'mlp_width': 1024,
    'heads': 4,
    'kv_heads': 2,
    'head_dim': 64,
    'vocab_size': 8192,
    'batch_size': 8,
    'encoder_length': 256,
    'decoder_length': 256,
    'steps': 7,
  }
  for name, default in sizes.items():
    parser.add_argument(f'--{name}', type=int, default=default)
  parser.add_argument(
    '--pair', default='', help='such as 2b_2b, in the place of the sizes'
  )
  parser.add_argument(
    '--examples', type=int, default=1, help='packed in each row'
  )
  parser.add_argument(
    '--optimizer', choices=['adamw', 'adafactor'], default='adamw'
  )
  ours = parser.add_argument_group('how ours is computed')
  ours.add_argument('--moment_dtype', default='float32')
  ours.add_argument('--scan_unroll', type=int, default=1)
  ours.add_argument('--remat', default='none')
  ours.add_argument('--attention', default='chunked')
  ours.add_argument('--attention_chunk', type=int, default=256)
  ours.add_argument('--loss_chunk', type=int, default=1024)


def make_parser() -> argparse.ArgumentParser:
  """The flags of this benchmark and of its workers."""
  parser = results.parser(__doc__)
  add_model(parser)
  parser.add_argument('--dtypes', nargs='+', default=['float32', 'bfloat16'])
  peer = parser.add_argument_group('how the peer is computed')
  # transformers builds its attention without the soft-cap otherwise, and
  # sdpa cannot do it.
  peer.add_argument('--peer_attention', default='eager')
  peer.add_argument('--peer_device', default='cpu')
  peer.add_argument('--peer_compile', action='store_true')
  peer.add_argument('--peer_checkpointing', action='store_true')
  parser.add_argument(
    '--worker', choices=IMPLEMENTATIONS, help=argparse.SUPPRESS
  )
  return parser


def make_batch(arguments: argparse.Namespace) -> dict[str, Any]:
  """A batch of full rows of so many examples each, in our framing."""
  import numpy as np

  from encdec_adapt.data import batch
  from tests import framing

  lengths = batch.Lengths(arguments.encoder_length, arguments.decoder_length)
  rng = np.random.default_rng(0)

  def cut(length: int) -> np.ndarray:
    """Lengths of the row's examples, each at least two."""
    places = rng.permutation(length // 2 - 1)[: arguments.examples - 1] + 1
    return np.diff([0, *sorted(2 * places), length])

  rows = []
  for _ in range(arguments.batch_size):
    pairs = [
      batch.Pair(
        *(
          rng.integers(
            5, make_pair(arguments).decoder.vocab_size, size, np.int32
          )
          for size in (inputs - 1, targets)
        )
      )
      for inputs, targets in zip(
        cut(lengths.encoder), cut(lengths.decoder), strict=True
      )
    ]
    rows.append(batch.frame_row(pairs, lengths, framing.FRAMING))
  return batch.stack_rows(rows)


def make_pair(arguments: argparse.Namespace) -> Any:
  """The shape of the model, a `models.model_config.EncoderDecoderConfig`."""
  from encdec_adapt.models import model_config as configs
  from encdec_adapt.models import presets

  if arguments.pair:
    return presets.t5gemma(arguments.pair)
  stack = configs.StackConfig(
    layers=arguments.layers,
    width=arguments.width,
    mlp_width=arguments.mlp_width,
    heads=arguments.heads,
    kv_heads=arguments.kv_heads,
    head_dim=arguments.head_dim,
    vocab_size=arguments.vocab_size,
    query_scale=float(arguments.head_dim),
  )
  return configs.encoder_decoder(stack, stack)


def make_ours(arguments: argparse.Namespace) -> tuple[dict[str, Run], int]:
  """Our step, as `train.py` runs it, its parts, and how many parameters.

  In a job of several processes, each takes its share of the batch.
  """
  import jax

  from encdec_adapt.models import build, execution
  from encdec_adapt.ops import partition
  from encdec_adapt.sharding import mesh, placement, rules
  from encdec_adapt.training import (
    losses,
    optimizers,
    phases,
    schedules,
    state,
    step,
    train_section,
  )

  model = build.build(
    make_pair(arguments),
    execution.ComputeConfig(
      dtype=arguments.dtypes[0],
      remat=arguments.remat,
      attention=arguments.attention,
      attention_chunk=arguments.attention_chunk,
      scan_unroll=arguments.scan_unroll,
    ),
  )
  where = state.Placement(
    model, mesh.make_mesh(mesh.MeshConfig()), rules.named('fsdp')
  )
  optimizer = optimizers.OptimizerConfig(
    arguments.optimizer,
    schedules.ScheduleConfig('constant', LEARNING_RATE, 0, 1000),
    clip_norm=CLIP_NORM,
    moment_dtype=arguments.moment_dtype,
    second_moment_dtype=arguments.moment_dtype,
  )
  loss = losses.LossConfig(chunk=arguments.loss_chunk)
  only = phases.Phases(where, loss, optimizer, train_section.TrainConfig())
  params = where.place(model.init, jax.random.key(0))
  current = only.create(params)
  train = only.make_step()
  shards = placement.row_shards(where.mesh, where.rules)
  mine = shards.rows(arguments.batch_size)
  batch = step.place_batch(
    {name: rows[mine] for name, rows in make_batch(arguments).items()}, where
  )

  count = sum(leaf.size for leaf in jax.tree.leaves(params))
  del params  # Donated.

  def run() -> float:
    nonlocal current
    current, metrics = train(current, batch, None)
    return float(metrics['loss'])

  @jax.jit
  def forward(params, batch):
    with partition.use(where.mesh, where.rules.as_dict()):
      sums = losses.loss_sums(model, params, batch, loss, None)
      return sums.total / sums.weight

  @jax.jit
  def backward(params, batch):
    return jax.value_and_grad(forward)(params, batch)

  runs = {
    'step': run,
    'forward': lambda: float(forward(current.params, batch)),
    'gradient': lambda: float(
      jax.block_until_ready(backward(current.params, batch))[0]
    ),
  }
  return runs, count


def make_transformers(
  arguments: argparse.Namespace,
) -> tuple[dict[str, Run], int]:
  """The peer's step, and the number of parameters."""
  import torch
  import transformers

  pair = make_pair(arguments)

  def module(stack):
    return transformers.T5GemmaModuleConfig(
      num_hidden_layers=stack.layers,
      hidden_size=stack.width,
      intermediate_size=stack.mlp_width,
      num_attention_heads=stack.heads,
      num_key_value_heads=stack.kv_heads,
      head_dim=stack.head_dim,
      vocab_size=stack.vocab_size,
      query_pre_attn_scalar=int(stack.query_scale),
      sliding_window=stack.window,
      attn_implementation=arguments.peer_attention,
    )

  torch.manual_seed(0)
  device = arguments.peer_device
  with torch.device(device):
    model = transformers.T5GemmaForConditionalGeneration(
      transformers.T5GemmaConfig(
        encoder=module(pair.encoder),
        decoder=module(pair.decoder),
        vocab_size=pair.decoder.vocab_size,
        attn_implementation=arguments.peer_attention,
      )
    )
  model.train()
  if arguments.peer_checkpointing:
    model.gradient_checkpointing_enable({'use_reentrant': False})
  options = {'lr': LEARNING_RATE, 'weight_decay': 0.0}
  if arguments.optimizer == 'adamw':
    options |= {'betas': (0.9, 0.95), 'fused': True}
    optimizer = torch.optim.AdamW(model.parameters(), **options)
  else:
    optimizer = torch.optim.Adafactor(model.parameters(), **options)
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
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss)

  return {'step': run}, sum(p.numel() for p in model.parameters())


def _work(arguments: argparse.Namespace) -> None:
  """Runs what each line of standard input names; answers in JSON lines."""
  if arguments.worker == 'ours':
    runs, parameters = make_ours(arguments)
    import jax

    from encdec_adapt.telemetry import peak_flops

    peak_flops = peak_flops.peak(jax.devices())
  else:
    runs, parameters = make_transformers(arguments)
    peak_flops = None
  about = {'parameters': parameters, 'peak_flops': peak_flops}
  print(json.dumps(about), flush=True)
  for line in sys.stdin:
    start, processor = time.perf_counter(), time.process_time()
    loss = runs[line.strip()]()
    answer = {
      'seconds': time.perf_counter() - start,
      'processor_seconds': time.process_time() - processor,
      'loss': loss,
      'peak_mib': _peak_mib(),
    }
    print(json.dumps(answer), flush=True)


def _peak_mib() -> float:
  """Largest memory of this process so far: of its GPU where it has one."""
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

  Attributes:
    parameters: number of parameters of the model.
    peak_flops: peak FLOP/s of its devices; only for our implementation.
    answers: measurements of each run.

  Raises:
    WorkerError: the process ended, here or in a method.
  """

  def __init__(
    self,
    implementation: str,
    dtype: str,
    flags: Sequence[str],
    environment: Mapping[str, str] | None = None,
  ):
    command = [sys.executable, '-m', 'tests.benchmarks.training_step', *flags]
    command += [f'--worker={implementation}', '--dtypes', dtype]
    self._process = subprocess.Popen(
      command,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      env={**os.environ, **(environment or {})},
    )
    about = self._answer()
    self.parameters = about['parameters']
    self.peak_flops = about['peak_flops']
    self.answers: list[dict[str, float]] = []

  def step(self, part: str = 'step') -> dict[str, float]:
    """Runs one step, or a part of it."""
    self._process.stdin.write(part + '\n')
    self._process.stdin.flush()
    self.answers.append(self._answer())
    return self.answers[-1]

  def close(self) -> None:
    """Ends the process."""
    self._process.stdin.close()
    self._process.wait()

  def _answer(self) -> dict[str, float]:
    line = self._process.stdout.readline()
    if not line:
      raise WorkerError('a worker of the benchmark failed; see its error above')
    return json.loads(line)


def _compare(dtype: str, arguments, flags) -> list[dict[str, Any]]:
  """Rows of both implementations with products in `dtype`."""
  workers = {name: Worker(name, dtype, flags) for name in IMPLEMENTATIONS}
  counts = {name: worker.parameters for name, worker in workers.items()}
  if len(set(counts.values())) > 1:
    raise SystemExit(f'the two models differ in parameters: {counts}')
  for _ in range(1 + arguments.steps):
    for worker in workers.values():
      worker.step()
  tokens = arguments.batch_size * (
    arguments.encoder_length + arguments.decoder_length
  )
  rows = []
  for name, worker in workers.items():
    worker.close()
    first, *rest = worker.answers
    seconds = statistics.median(answer['seconds'] for answer in rest)
    rows.append(
      {
        'dtype': dtype,
        'implementation': name,
        'tokens/s': tokens / seconds,
        'peak MiB': rest[-1]['peak_mib'],
        'first step s': first['seconds'],
        'step s': seconds,
        'step processor s': statistics.median(
          answer['processor_seconds'] for answer in rest
        ),
        'loss, first': first['loss'],
        'loss, last': rest[-1]['loss'],
      }
    )
  peer = rows[1]
  for row in rows:
    row['speed ratio'] = row['tokens/s'] / peer['tokens/s']
    row['memory ratio'] = row['peak MiB'] / peer['peak MiB']
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
