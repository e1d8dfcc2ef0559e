"""A training step of a pair on a GPU, ours and transformers' on torch.

    python -m tests.benchmarks.gpu_step --output=gpu_step.json

The whole step (forward, backward, clipping, Adafactor) of the 2B-2B pair at
4096 + 4096 tokens in bf16, by the workers of `training_step`. Parameters,
gradients and AdamW's fp32 moments would take 83 GiB, more than an H100 has;
`--optimizer=adamw` measures them on a larger GPU, and with
`--moment_dtype=bfloat16` takes 62 GiB. For each of our attention backends,
with one example a row and with several, and for the peer (which cannot pack)
with every attention that it has: every batch that fits, tokens/s and MFU by
the formula of `models.forward_flops`. `--batches` are rows of a step, tried in
order until one does not fit; `--examples` are examples of a row; memory decides
`--remat` unless it is named; `--platform` is torch's device. `speed ratio` is
over the peer's best row, if torch and transformers are installed. `gpu_kernels`
measures attention and loss alone.
"""

import argparse
from collections.abc import Sequence
import importlib.util
from typing import Any

from tests.benchmarks import results, training_step

# Nearly all memory for one process.
ENVIRONMENT = {
  'XLA_PYTHON_CLIENT_MEM_FRACTION': '0.95',
  'PYTORCH_CUDA_ALLOC_CONF': 'expandable_segments:True',
}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Measures and prints."""
  parser = results.parser(
    __doc__,
    platform='cuda',
    dtype='bfloat16',
    remat='auto',
    optimizer='adafactor',
    moment_dtype='float32',
    steps=5,
    batches=[1, 2, 4, 8, 16],
    encoder_length=4096,
    decoder_length=4096,
    examples=[1, 8],
    backends=['tokamax', 'chunked'],
    # sdpa has no soft-cap.
    peer_attentions=['flex_attention', 'eager'],
    peer_eager_mode=False,
  )
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
    raise SystemExit('no step could be run; see the errors above')
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
  """Returns a row for every batch size that fits."""
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
  """Returns the numbers of one batch size.

  Raises:
    WorkerError: it does not fit, or cannot be run.
  """
  flags = [*flags, f'--batch_size={batch}']
  for name in (
    *('remat', 'optimizer', 'moment_dtype'),
    *('encoder_length', 'decoder_length'),
  ):
    flags.append(f'--{name}={getattr(arguments, name)}')
  worker = training_step.Worker(
    implementation, arguments.dtype, flags, ENVIRONMENT
  )
  first, *steps = training_step.measured(worker, arguments.steps)
  model = training_step.make_parser().parse_args(flags)
  seconds = results.median(steps, 'seconds')
  return {
    'batch': batch,
    'remat': first['remat'],
    'tokens/s': training_step.tokens_of(model) / seconds,
    'FLOP/s': _step_flops(model) / seconds,
    'peak FLOP/s': first['peak_flops'],
    'step s': seconds,
    'peak GiB': steps[-1]['peak_mib'] / 2**10,
    'compile s': first['seconds'] - seconds,
    'loss': first['loss'],
    'loss, last': steps[-1]['loss'],
  }


def _step_flops(model: argparse.Namespace) -> int:
  """Returns the model FLOPs of a step."""
  from encdec_adapt.models import forward_flops

  lengths = model.encoder_length, model.decoder_length
  pair = training_step.make_pair(model)
  row = forward_flops.forward(pair, *lengths, teacher=0)
  return model.batch_size * forward_flops.TRAINING * row


if __name__ == '__main__':
  main()
