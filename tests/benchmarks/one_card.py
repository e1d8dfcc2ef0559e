"""What fits one card, and how fast: the table of configs/one_card.md.

    python -m tests.benchmarks.one_card [--cards h200:1] [--jobs RLOO]

plans 2B-2B and 9B-9B on each of `--cards`, for jobs whose names contain one of
`--jobs`, with the first remat policy of `POLICIES` that fits. Numbers are
those of the compiled program, or, marked by ~, of the cost model: without the
GPUs' compiler, and where it finds that no policy fits.
"""

from collections.abc import Sequence
from typing import Any

from encdec_adapt import config as config_lib
from encdec_adapt import plan
from encdec_adapt.cli import command
from encdec_adapt.planning import (
  analytic_estimate,
  chips,
  program_plans,
  programs,
)
from tests.benchmarks import results

# The fastest first.
POLICIES = 'dots', 'narrow_dots', 'attention', 'full'
# Memory that a program may use in GiB, where `planning.chips` has no such card.
CARDS = {'l4:1': 0, 'a100:1': 36, 'h100:1': 0, 'h200:1': 0}
NAMES = {'l4:1': '24 GB, L4', 'a100:1': '40 GB, A100', 'h100:1': '80 GB, H100'}
NAMES['h200:1'] = '141 GB, H200'
_TUNING = {
  'data.objective': 'pairs',
  'init.mode': 'checkpoint',
  'data.encoder_length': 1024,
  'data.decoder_length': 256,
  'train.batch_size': 8,
  'loss.distillation': 0.0,
}
_FULL = {'optimizer.kind': 'adafactor', 'compute.dtype': 'bfloat16'}
_POLICY = _TUNING | {'loss.kind': 'rloo', 'train.rewards': 'answers'}
_LORA = 'rank=16,alpha=32'
# Name, pair, program, changes to configs/gemma2.py, and examples of a row.
JOBS = [
  (
    'all parameters, Adafactor, 4 rows of 4096 + 4096',
    *('2b_2b', 'train'),
    _FULL | {'train.batch_size': 4, 'loss.distillation': 0.0},
    8,
  ),
  (
    'all parameters, Adafactor, 8 rows of 1024 + 256',
    *('2b_2b', 'train', _FULL | _TUNING, 1),
  ),
  (
    'adaptation with a teacher, AdamW, a row of 4096 + 4096',
    *('2b_2b', 'train', {'train.batch_size': 1}, 1),
  ),
  *(
    (
      f'LoRA of {pair.replace("_", "-").upper()}, base {base or "bfloat16"},'
      ' 8 rows of 1024 + 256',
      *(pair, 'train'),
      _TUNING | {'train.lora': _LORA + f',base={base}' * bool(base)},
      1,
    )
    for pair in ('2b_2b', '9b_9b')
    for base in ('', 'int8', 'nf4')
  ),
  (
    'RLOO, Adafactor, update of 8 x 8 samples of 256',
    *('2b_2b', 'train', _FULL | _POLICY, 1),
  ),
  (
    'RLOO of adapters, base bfloat16, the same',
    *('2b_2b', 'train', _POLICY | {'train.lora': _LORA}, 1),
  ),
  (
    'decoding, 8 rows of 1024 + 256, a token of each',
    *('2b_2b', 'decode', _TUNING | {'train.eval_batch_size': 8}, 1),
  ),
]


def main(argv: Sequence[str] | None = None) -> str:
  """Prints the table, and returns it."""
  arguments = results.parser(
    __doc__, cards=[*CARDS], jobs=[''], pair=''
  ).parse_args(argv)
  jobs = [job for job in JOBS if any(part in job[0] for part in arguments.jobs)]
  lines = ['| job |' + ''.join(f' {NAMES[card]} |' for card in arguments.cards)]
  lines.append('|---|' + '---|' * len(arguments.cards))
  for name, pair, *job in jobs:
    cells = [
      _cell(arguments.pair or pair, card, *job) for card in arguments.cards
    ]
    lines.append(f'| {name} | {" | ".join(cells)} |')
    print(lines[-1], flush=True)
  table = '\n'.join(lines)
  print(f'\n{table}')
  return table


def _cell(
  pair: str, card: str, program: str, changes: dict[str, Any], examples: int
) -> str:
  """Returns memory, time and policy of the first policy that fits."""
  slices = chips.parse(card, hbm_gib=CARDS[card])
  is_hopper = card.startswith(('h100', 'h200'))
  changes = {
    'compute.attention': 'tokamax' if is_hopper else 'chunked',
    'train.microbatches': 1,
    **changes,
  }
  found = None
  for policy in POLICIES if program == 'train' else POLICIES[-1:]:
    flags = [f'--config=configs/gemma2.py:size={pair}']
    options = changes | {'compute.remat': policy}
    flags += [f'--config.{key}={value}' for key, value in options.items()]
    values = command.parse(plan.define_flags, flags)
    settings = config_lib.load(values.config, sources=False).on('gpu')
    mesh = program_plans.make_mesh(settings, slices)
    job = programs.Job.of(program, settings, mesh, examples)
    sizes = analytic_estimate.Arguments.of(job, job.program())
    found = analytic_estimate.describe(job, slices, sizes)
    if found['fits']:
      found = program_plans.plan(job, slices)
    if found['fits']:
      break
  about = '~' * (found['source'] == 'shapes')
  gib = found['memory']['peak'] / 2**30
  if not found['fits']:
    return f'no: {about}{gib:.0f} GiB'
  cell = f'{about}{gib:.1f} GiB, {about}{found["roofline"]["step_s"]:.3g} s'
  return cell + f', `{policy}`' * (program == 'train')


if __name__ == '__main__':
  main()
