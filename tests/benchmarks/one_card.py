"""What fits one card, and how fast: the table of configs/one_card.md.

    python -m tests.benchmarks.one_card [--cards h200:1] [--jobs RLOO]

plans jobs whose names contain one of `--jobs` on each of `--cards`, with the
policy that a job would choose there (`compute.remat=auto`). Numbers are those
of the compiled program, or, marked by ~, of the cost model, without the GPUs'
compiler. Its times, half of the compiled ones for such short rows, are left
out.
"""

from collections.abc import Sequence

from encdec_adapt import config as config_lib
from encdec_adapt import plan
from encdec_adapt.cli import command
from encdec_adapt.planner import chips, program_plans, programs
from tests.benchmarks import results

CARDS = {
  'l4:1': '24 GB, L4',
  'a100:1': '40 GB, A100',
  'h100:1': '80 GB, H100',
  'h200:1': '141 GB, H200',
}
# Memory of a program in GiB, where `planner.chips` has a larger card.
_GIB = {'a100:1': 36}
_FULL = 'optimizer.kind=adafactor compute.dtype=bfloat16'
# Argument of configs/gemma2.py, and changes to its keys.
JOBS = {
  'all parameters, 4 rows of 4096 + 4096': (
    f'size=2b_2b {_FULL} train.batch_size=4 loss.kind=cross_entropy'
  ),
  'all parameters, 8 rows of 1024 + 256': f'size=2b_2b,objective=pairs {_FULL}',
  'adaptation with a teacher, AdamW, a row of 4096 + 4096': (
    'size=2b_2b train.batch_size=1'
  ),
  **{
    f'LoRA, {pair}, base {base or "bfloat16"}, 8 rows of 1024 + 256': (
      f'size={pair.lower().replace("-", "_")},objective=pairs,lora=16'
      f' train.lora.base={base}'
    )
    for pair in ('2B-2B', '9B-9B')
    for base in ('', 'int8', 'nf4')
  },
  'RLOO, update by 8 x 8 samples of 256': f'size=2b_2b,objective=rloo {_FULL}',
  'decoding, 8 rows of 1024 + 256, a token of each': (
    'size=2b_2b,objective=pairs train.eval_batch_size=8'
  ),
}


def main(argv: Sequence[str] | None = None) -> list[str]:
  """Prints the table, and returns its lines."""
  parser = results.parser(__doc__, cards=[*CARDS], jobs=[''])
  arguments = parser.parse_args(argv)
  cards = arguments.cards
  lines = [f'| job | {" | ".join(CARDS[x] for x in cards)} |']
  lines.append('|---|' + '---|' * len(cards))
  for name, text in JOBS.items():
    if any(part in name for part in arguments.jobs):
      cells = [_cell(name, *text.split(), card=card) for card in cards]
      lines.append(f'| {name} | {" | ".join(cells)} |')
  print('\n'.join(lines))
  return lines


def _cell(name: str, argument: str, *changes: str, card: str) -> str:
  """Returns memory, time and policy of a job with the first that fits."""
  slices = chips.parse(card, hbm_gib=_GIB.get(card, 0))
  is_hopper = card.startswith(('h100', 'h200'))
  program = 'decode' if 'decoding' in name else 'train'
  defaults = ['train.batch_size=8', 'train.microbatches=1']
  defaults.append(f'compute.attention={"tokamax" if is_hopper else "chunked"}')
  flags = [*defaults, *changes, 'compute.remat=auto']
  flags = [f'--config=gemma2:{argument}', *(f'--config.{x}' for x in flags)]
  values = command.parse(plan.define_flags, flags)
  settings = config_lib.load(values.config, sources=False)
  mesh = program_plans.make_mesh(settings, slices)
  examples = 8 if '4 rows' in name else 1  # As measured.
  job = programs.Job.of(program, settings, 'gpu', mesh, examples)
  job, estimate = program_plans.choose_and_plan(job, slices)
  gib = f'{estimate["memory"]["peak"] / 2**30:.0f} GiB'
  if not estimate['fits']:
    return f'no: ~{gib}'
  cell = f'~{gib}'
  if estimate['source'] == 'compiled':
    cell = f'{gib}, {estimate["roofline"]["step_s"]:.3g} s'
  return cell + f', `{job.resolved.compute.remat}`' * job.trains


if __name__ == '__main__':
  main()
