"""Plans training whose speed was published again, and stores the estimates.

    python -m tests.benchmarks.calibration [--runs H100 'Llama 2 70B'] [--fit]

compiles `configs/published.py` for the chips of each run and writes the
estimates into `encdec_adapt/planner/calibration.json`, whose errors every
plan prints. --fit prints the shares of a GPU's peaks that fit all of the runs
(`roofline.GPU_PRODUCTS` and `GPU_MEMORY`), and writes the estimates of each
with the shares that fit the other runs (`left_out`).
"""

from collections.abc import Sequence
import itertools
import json

import jax
import numpy as np

from encdec_adapt import config as config_lib
from encdec_adapt import plan
from encdec_adapt.cli import command
from encdec_adapt.planner import (
  calibration,
  chips,
  hlo,
  plan_report,
  program_plans,
  programs,
  roofline,
)
from encdec_adapt.sharding import mesh as mesh_lib
from tests import tiny
from tests.benchmarks import results

_FILE = tiny.ROOT / 'encdec_adapt/planner/calibration.json'


def main(argv: Sequence[str] | None = None) -> None:
  """Plans the runs whose names contain one of --runs."""
  parser = results.parser(__doc__, runs=[''])
  parser.add_argument('--fit', action='store_true')
  arguments = parser.parse_args(argv)
  rows = calibration.table()
  chosen = [
    row for row in rows if any(part in row['name'] for part in arguments.runs)
  ]
  slices = [chips.parse(row['topology']) for row in chosen]
  # Stand-ins for the most GPUs come first.
  gpus = [where for where in slices if where.chip.kind == 'gpu']
  if gpus:
    chips.devices_of(max(gpus, key=lambda where: where.devices))
  if arguments.fit:
    _fit(chosen, slices)
  else:
    for row, where in zip(chosen, slices, strict=True):
      plans = program_plans.make(
        _settings(row), where, ['train'], row.get('examples', 1)
      )
      found = plans['train']
      print(f'[{row["name"]}]\n{plan_report.text(found)}', flush=True)
      row['estimated'], row['by'] = found['mfu'], found['source']
      row['gib'] = found['memory']['peak'] / 2**30
      _write(rows)
  _write(rows)
  print(calibration.text(rows))


def _settings(row) -> config_lib.Settings:
  changes = row.get('changes', {}).items()
  flags = [
    f'--config={row["config"]}',
    *(f'--config.{k}={v}' for k, v in changes),
  ]
  values = command.parse(plan.define_flags, flags)
  return config_lib.load(values.config, sources=False)


def _write(rows) -> None:
  _FILE.write_text(json.dumps(rows, indent=2) + '\n')


def _fit(rows, slices) -> None:
  """Compiles runs on GPUs once, and estimates them with all pairs of shares."""
  shares = list(itertools.product(np.arange(0.5, 1, 0.02), (0.7, 0.8, 0.9)))
  estimates = np.zeros((len(shares), len(rows)))
  for column, (row, where) in enumerate(zip(rows, slices, strict=True)):
    settings = _settings(row)
    mesh = mesh_lib.make_mesh(settings.mesh, chips.devices_of(where))
    examples = row.get('examples', 1)
    job = programs.Job.of('train', settings, 'gpu', mesh, examples)
    program = job.program()
    lowered = program.lower(mesh)
    with jax.set_mesh(mesh):
      totals = hlo.totals(lowered.compile().as_text(), 1 / examples)
    for index, pair in enumerate(shares):
      roofline.GPU_PRODUCTS, roofline.GPU_MEMORY = pair
      work = plan_report.work(totals, job, where, program)
      estimates[index, column] = work['mfu']
    print(f'compiled {row["name"]}', flush=True)
  errors = np.abs(estimates - [row['published'] for row in rows])
  best = shares[errors.mean(axis=1).argmin()]
  print(f'GPU_PRODUCTS = {best[0]:.2f}, GPU_MEMORY = {best[1]:.2f}')
  for column, row in enumerate(rows):
    others = np.delete(errors, column, axis=1).mean(axis=1).argmin()
    row['left_out'] = estimates[others, column]


if __name__ == '__main__':
  main()
