"""Verbs of launch/real_model.sh, which has their documentation."""

import argparse
import pathlib
import sys

from launch import commands
from launch.real_model import card, plan, prepare, report

_VERBS = ('prepare', 'rates', 'run', 'report')


def main(argv: list[str]) -> int:
  """Runs a verb; returns the exit status."""
  parser = argparse.ArgumentParser(
    prog='bash launch/real_model.sh', allow_abbrev=False
  )
  # `source` is the first part of `run`.
  parser.add_argument('verb', choices=(*_VERBS, 'source'), nargs='?')
  parser.add_argument('--folder', default='')
  parser.add_argument('--output', default='')
  parser.add_argument('--data', default='../shared/data')
  parser.add_argument('--rehearsal', action='store_true')
  options = parser.parse_args(argv)
  if not (options.verb or options.rehearsal):
    parser.error('give a verb; see --help')
  size = plan.REHEARSAL if options.rehearsal else plan.CARD
  default = 'runs/real_model' + ('_rehearsal' if options.rehearsal else '')
  folders = plan.Folders(options.folder or default, options.output)
  verbs = {
    'prepare': lambda: prepare.prepare(
      size, folders, pathlib.Path(options.data)
    ),
    'rates': lambda: prepare.try_rates(size, folders),
    'run': lambda: card.run(size, folders),
    'source': lambda: card.unpack(size, folders),
    'report': lambda: report.report(size, folders),
  }
  try:
    for verb in [options.verb] if options.verb else _VERBS:
      verbs[verb]()
  except commands.LaunchError as error:
    print(f'Error: {error}', file=sys.stderr)
    return commands.USER_ERROR
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
