"""Our training step against the same T5Gemma in transformers on torch, CPU.

A step is forward pass, backward pass, clipping by the global norm and AdamW,
on the same batch without padding, for the same shapes of model (the numbers
of parameters are compared). The two run in processes of their own, so that
peak memory is each one's, and take turns step by step, so that whatever else
the machine does disturbs both; it should do nothing else all the same. Ratios
are ours over the peer's. Needs `pip install -e .[peer]`.
"""

import argparse
from collections.abc import Callable, Sequence
import json
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
  ours = parser.add_argument_group('how ours is computed')
  ours.add_argument('--scan_unroll', type=int, default=1)
  ours.add_argument('--remat', default='none')
  ours.add_argument('--attention_chunk', type=int, default=256)
  ours.add_argument('--loss_chunk', type=int, default=1024)


def _parser() -> argparse.ArgumentParser:
  parser = results.parser(__doc__)
  add_model(parser)
  parser.add_argument('--dtypes', nargs='+', default=['float32', 'bfloat16'])
  parser.add_argument(
    '--worker', choices=IMPLEMENTATIONS, help=argparse.SUPPRESS
  )
  return parser


def make_batch(arguments: argparse.Namespace) -> dict[str, Any]:
  """A batch of full rows of one pair each, in our framing."""
  import numpy as np

  from encdec_adapt.data import batch
  from tests import framing

  lengths = batch.Lengths(arguments.encoder_length, arguments.decoder_length)
  rng = np.random.default_rng(0)
  rows = []
  for _ in range(arguments.batch_size):
    tokens = [
      rng.integers(5, arguments.vocab_size, length, dtype=np.int32)
      for length in (lengths.encoder - 1, lengths.decoder)
    ]
    rows.append(
      batch.frame_row([batch.Pair(*tokens)], lengths, framing.FRAMING)
    )
  return batch.stack_rows(rows)


def make_ours(
  arguments: argparse.Namespace,
) -> tuple[Callable[[], float], int]:
  """Our step, as `train.py` runs it, and the number of parameters.

  In a job of several processes, each takes its share of the batch.
  """
  import jax

  from encdec_adapt.models import build
  from encdec_adapt.models import config as configs
  from encdec_adapt.sharding import mesh, rules
  from encdec_adapt.training import (
    objectives,
    optimizers,
    phases,
    schedules,
    state,
    step,
  )

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
  model = build.build(
    configs.encoder_decoder(stack, stack),
    dtype=arguments.dtypes[0],
    remat=arguments.remat,
    attention_chunk=arguments.attention_chunk,
    scan_unroll=arguments.scan_unroll,
  )
  where = state.Placement(
    model, mesh.make_mesh(mesh.MeshConfig()), rules.named('fsdp')
  )
  optimizer = optimizers.Optimizer(
    optimizers.OptimizerConfig(
      'adamw',
      schedules.ScheduleConfig('constant', LEARNING_RATE, 0, 1000),
      clip_norm=CLIP_NORM,
    )
  )
  groups = phases.cross_attention_warmup(0)
  assignment = phases.assign(model.table, groups)
  active = phases.active(groups, 0)
  params = where.place(model.init, jax.random.key(0))
  current = state.create(params, optimizer, assignment, active, where)
  train = step.make_train_step(
    where,
    objectives.LossConfig(chunk=arguments.loss_chunk),
    optimizer,
    assignment,
    active,
    step.StepConfig(clip_norm=CLIP_NORM),
  )
  share = arguments.batch_size // jax.process_count()
  mine = slice(share * jax.process_index(), share * (jax.process_index() + 1))
  batch = step.place_batch(
    {name: rows[mine] for name, rows in make_batch(arguments).items()}, where
  )

  def run() -> float:
    nonlocal current
    current, metrics = train(current, batch, None)
    return float(metrics['loss'])

  return run, sum(leaf.size for leaf in jax.tree.leaves(params))


def make_transformers(
  arguments: argparse.Namespace,
) -> tuple[Callable[[], float], int]:
  """The peer's step, and the number of parameters."""
  import torch
  import transformers

  def module(**fields):
    return transformers.T5GemmaModuleConfig(
      num_hidden_layers=arguments.layers,
      hidden_size=arguments.width,
      intermediate_size=arguments.mlp_width,
      num_attention_heads=arguments.heads,
      num_key_value_heads=arguments.kv_heads,
      head_dim=arguments.head_dim,
      vocab_size=arguments.vocab_size,
      query_pre_attn_scalar=arguments.head_dim,
      # transformers builds its attention without the soft-cap otherwise.
      attn_implementation='eager',
      **fields,
    )

  torch.manual_seed(0)
  model = transformers.T5GemmaForConditionalGeneration(
    transformers.T5GemmaConfig(
      encoder=module(),
      decoder=module(),
      vocab_size=arguments.vocab_size,
      attn_implementation='eager',
    )
  )
  model.train()
  optimizer = torch.optim.AdamW(
    model.parameters(),
    lr=LEARNING_RATE,
    betas=(0.9, 0.95),
    weight_decay=0.0,
    fused=True,
  )
  batch = {
    name: torch.from_numpy(value).long()
    for name, value in make_batch(arguments).items()
    if name in ('encoder_tokens', 'decoder_tokens', 'targets')
  }

  mixed = arguments.dtypes == ['bfloat16']

  def run() -> float:
    with torch.autocast('cpu', torch.bfloat16, enabled=mixed):
      loss = model(
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

  return run, sum(p.numel() for p in model.parameters())


def _work(arguments: argparse.Namespace) -> None:
  """Runs one step per line of standard input; answers in JSON lines."""
  if arguments.worker == 'ours':
    run, parameters = make_ours(arguments)
  else:
    run, parameters = make_transformers(arguments)
  print(json.dumps({'parameters': parameters}), flush=True)
  for _ in sys.stdin:
    start, processor = time.perf_counter(), time.process_time()
    loss = run()
    answer = {
      'seconds': time.perf_counter() - start,
      'processor_seconds': time.process_time() - processor,
      'loss': loss,
      'peak_mib': _peak_mib(),
    }
    print(json.dumps(answer), flush=True)


def _peak_mib() -> float:
  """Largest resident memory of this process so far."""
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak / 2**20 if sys.platform == 'darwin' else peak / 2**10


class _Worker:
  """One implementation in a process of its own."""

  def __init__(self, implementation: str, dtype: str, flags: Sequence[str]):
    command = [sys.executable, '-m', 'tests.benchmarks.training_step', *flags]
    command += [f'--worker={implementation}', '--dtypes', dtype]
    self._process = subprocess.Popen(
      command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    self.parameters = self._answer()['parameters']
    self.answers: list[dict[str, float]] = []

  def step(self) -> None:
    """Runs one step."""
    self._process.stdin.write('step\n')
    self._process.stdin.flush()
    self.answers.append(self._answer())

  def close(self) -> None:
    """Ends the process."""
    self._process.stdin.close()
    self._process.wait()

  def _answer(self) -> dict[str, float]:
    line = self._process.stdout.readline()
    if not line:
      raise SystemExit('a worker of the benchmark failed; see its error above')
    return json.loads(line)


def _compare(dtype: str, arguments, flags) -> list[dict[str, Any]]:
  """Rows of both implementations with products in `dtype`."""
  workers = {name: _Worker(name, dtype, flags) for name in IMPLEMENTATIONS}
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
  arguments = _parser().parse_args(flags)
  if arguments.worker:
    _work(arguments)
    return None
  rows = []
  for dtype in arguments.dtypes:
    rows += _compare(dtype, arguments, flags)
  return results.report('training_step', rows, arguments)


if __name__ == '__main__':
  main()
