"""Plans training whose speed was published again, and stores the estimates.

    python -m tests.benchmarks.calibration [--runs H100 'Llama 2 70B']

compiles `configs/published.py` for the chips of each run and writes the
estimates into `encdec_adapt/planning/calibration.json`, whose errors every
plan prints.
"""

from collections.abc import Sequence
import json

from encdec_adapt import config as config_lib
from encdec_adapt import plan
from encdec_adapt.cli import command
from encdec_adapt.planning import calibration, chips, plan_report
from tests import tiny
from tests.benchmarks import results

_FILE = tiny.ROOT / 'encdec_adapt/planning/calibration.json'


def main(argv: Sequence[str] | None = None) -> None:
  """Plans the runs whose names contain one of --runs."""
  arguments = results.parser(__doc__, runs=['']).parse_args(argv)
  rows = calibration.table()
  chosen = [
    row for row in rows if any(part in row['name'] for part in arguments.runs)
  ]
  slices = [chips.parse(row['topology']) for row in chosen]
  # Stand-ins for the most GPUs come first.
  gpus = [where for where in slices if where.chip.kind == 'gpu']
  if gpus:
    chips.devices_of(max(gpus, key=lambda where: where.devices))
  for row, where in zip(chosen, slices, strict=True):
    values = command.parse(plan.define_flags, [f'--config={row["config"]}'])
    settings = config_lib.load(values.config, sources=False)
    found = plan.make(settings, where, ['train'])['train']
    print(f'[{row["name"]}]\n{plan_report.text(found)}', flush=True)
    row['estimated'], row['by'] = found['mfu'], found['source']
    row['gib'] = found['memory']['peak'] / 2**30
    _FILE.write_text(json.dumps(rows, indent=2) + '\n')
  print(calibration.text(rows))


if __name__ == '__main__':
  main()
