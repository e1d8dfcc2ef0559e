"""A training step of a pair on a GPU, ours and transformers' on torch.

    python -m tests.benchmarks.gpu_step --output=gpu_step.json

The whole step (forward, backward, clipping, Adafactor) of the 2B-2B pair at
4096 + 4096 tokens in bf16, by the workers of `training_step`. Parameters,
gradients and AdamW's fp32 moments would take 83 GiB, more than an H100 has;
`--optimizer=adamw` measures them on a larger GPU, and with
`--moment_dtype=bfloat16` takes 62 GiB. For every attention backend of ours,
with one example a row and with several, and for the peer (which cannot pack)
with every attention that it has: every batch that fits, tokens/s and MFU by the
formula of
`models.model_flops`. The parts of ours are programs of their own: the
loss, and the loss with its gradient; the rest is the optimizer. Every row
says which attention it ran. `speed ratio` is over the peer's best row;
without torch and transformers there is none. `gpu_kernels` has attention and
loss alone.
"""

import argparse
from collections.abc import Sequence
import importlib.util
import statistics
from typing import Any

from tests.benchmarks import results, training_step

# Nearly all memory for one process.
_ENVIRONMENT = {
  'XLA_PYTHON_CLIENT_MEM_FRACTION': '0.95',
  'PYTORCH_CUDA_ALLOC_CONF': 'expandable_segments:True',
}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Measures and prints."""
  parser = results.parser(__doc__)
  parser.add_argument('--platform', default='cuda', help="of torch; or 'cpu'")
  parser.add_argument('--dtype', default='bfloat16')
  parser.add_argument('--remat', default='attention')
  parser.add_argument('--optimizer', default='adafactor')
  parser.add_argument('--moment_dtype', default='float32')
  parser.add_argument('--steps', type=int, default=5)
  parser.add_argument(
    '--batches',
    type=int,
    nargs='+',
    default=[1, 2, 4, 8, 16],
    help='rows a step, tried in this order until one does not fit',
  )
  parser.add_argument('--encoder_length', type=int, default=4096)
  parser.add_argument('--decoder_length', type=int, default=4096)
  parser.add_argument(
    '--examples', type=int, nargs='+', default=[1, 8], help='in each row'
  )
  parser.add_argument(
    '--backends', nargs='+', default=['triton', 'chunked'], help='ours'
  )
  parser.add_argument(
    '--peer_attentions',
    nargs='*',
    default=['flex_attention', 'eager'],
    help='of transformers; sdpa has no soft-cap',
  )
  parser.add_argument('--peer_eager_mode', action='store_true')
  arguments, model = parser.parse_known_args(argv)
  model = model or ['--pair=2b_2b']  # Or the sizes of `training_step`.

  rows = []
  for examples in arguments.examples:
    for backend in arguments.backends:
      flags = [f'--attention={backend}', f'--examples={examples}']
      rows += _every_batch('ours', backend, examples, flags + model, arguments)
  if importlib.util.find_spec('transformers'):
    flags = [f'--peer_device={arguments.platform}', '--peer_checkpointing']
    flags += [] if arguments.peer_eager_mode else ['--peer_compile']
    for attention in arguments.peer_attentions:
      peer = [f'--peer_attention={attention}', *flags, *model]
      rows += _every_batch('transformers', attention, 1, peer, arguments)
  if not rows:
    raise SystemExit('no step could be run; the errors stand above')
  peers = [r['tokens/s'] for r in rows if r['implementation'] != 'ours']
  # Only our process knows what its device can do.
  peaks = [row['peak FLOP/s'] for row in rows if row['peak FLOP/s']]
  for row in rows:
    row['peak FLOP/s'] = peaks[0] if peaks else float('nan')
    row['MFU'] = row['FLOP/s'] / row['peak FLOP/s']
    row['speed ratio'] = row['tokens/s'] / max(peers) if peers else float('nan')
  return results.report('gpu_step', rows, arguments)


def _every_batch(
  implementation: str,
  attention: str,
  examples: int,
  flags: Sequence[str],
  arguments: argparse.Namespace,
) -> list[dict[str, Any]]:
  """A row of every batch size that fits."""
  found = []
  for batch in arguments.batches:
    try:
      row = _measure(implementation, batch, flags, arguments)
    except training_step.WorkerError:
      print(f'{implementation}, {attention}: no batch of {batch} rows')
      break
    names = {
      'implementation': implementation,
      'attention': attention,
      'examples': examples,
    }
    found.append(names | row)
  return found


def _measure(
  implementation: str,
  batch: int,
  flags: Sequence[str],
  arguments: argparse.Namespace,
) -> dict[str, Any]:
  """Numbers of one batch size.

  Raises:
    WorkerError: it does not fit, or cannot be run.
  """
  flags = [
    *flags,
    f'--batch_size={batch}',
    f'--remat={arguments.remat}',
    f'--optimizer={arguments.optimizer}',
    f'--moment_dtype={arguments.moment_dtype}',
    f'--encoder_length={arguments.encoder_length}',
    f'--decoder_length={arguments.decoder_length}',
  ]
  worker = training_step.Worker(
    implementation, arguments.dtype, flags, _ENVIRONMENT
  )
  try:
    first = worker.step()
    seconds = _median(worker, 'step', arguments.steps)
    peak = worker.answers[-1]['peak_mib']
    parts = {'forward s': float('nan'), 'backward s': float('nan')}
    if implementation == 'ours':
      parts['forward s'] = _median(worker, 'forward', arguments.steps)
      gradient = _median(worker, 'gradient', arguments.steps)
      parts['backward s'] = gradient - parts['forward s']
  finally:
    worker.close()
  return {
    'batch': batch,
    'tokens/s': batch
    * (arguments.encoder_length + arguments.decoder_length)
    / seconds,
    'FLOP/s': _step_flops(batch, flags, arguments) / seconds,
    'peak FLOP/s': worker.peak_flops,
    'step s': seconds,
    **parts,
    'update s': seconds - parts['forward s'] - parts['backward s'],
    'peak GiB': peak / 2**10,
    'compile s': first['seconds'] - seconds,
    'loss': first['loss'],
  }


def _median(worker: training_step.Worker, part: str, steps: int) -> float:
  """Seconds of a part, after one run that may compile."""
  worker.step(part)
  return statistics.median(worker.step(part)['seconds'] for _ in range(steps))


def _step_flops(
  batch: int, flags: Sequence[str], arguments: argparse.Namespace
) -> int:
  """Model FLOPs of a step."""
  from encdec_adapt.models import model_flops

  pair = training_step.make_pair(training_step.make_parser().parse_args(flags))
  lengths = arguments.encoder_length, arguments.decoder_length
  row = model_flops.forward(pair, *lengths, teacher=0)
  return batch * model_flops.TRAINING * row


if __name__ == '__main__':
  main()
