r"""Builds the vocabulary and records of a configuration ahead of training.

    python -m encdec_adapt.materialize --config=configs/quickstart.py \
      --workdir=runs/quickstart [--config.data.workers=4] [--show --n=8]

An interrupted command resumes and keeps finished shards. --runner=beam runs an
Apache Beam pipeline; its options follow a --: `--runner=beam --
--runner=DataflowRunner ..` (`launch/beam.md`). --show prints rows of the
records as text, with files and lines, sentinels, masks and weights;
--contamination=SOURCES prints the evaluation examples found in the training
text. --teacher=MODEL stores a teacher's probabilities of the targets, for
`--config.teacher.checkpoint=stored:FOLDER`.
`encdec_adapt/data/making/materialization.py` does the work.
"""

from collections.abc import Sequence
import sys

from absl import flags

from encdec_adapt import config as config_lib
from encdec_adapt.base import errors
from encdec_adapt.cli import command
from encdec_adapt.data.making import materialization
from encdec_adapt.data.records import row_display
from encdec_adapt.ops import sparse_teacher
from encdec_adapt.stored import inherited_framing
from encdec_adapt.training.jobs import teacher_storing

define_flags = command.define(
  command.define_config,
  command.string(
    'workdir',
    'Folder of the job; records go below it if config.data.folder is empty.',
    default='',
  ),
  command.choice(
    'runner',
    ('local', 'beam'),
    'What makes the shards: processes of this machine, or Apache Beam, whose'
    ' options follow a --.',
    default='local',
  ),
  command.boolean('show', 'Print rows of the records.', default=False),
  command.string(
    'contamination',
    'Sources of evaluation sets, as in config.data.source: report which of'
    ' their examples share 13 words with the training text.',
    default='',
  ),
  command.string(
    'teacher',
    'Teacher whose probabilities of the training targets are stored below the'
    ' folder of the records: a run, RUN@STEP, a Hugging Face folder or'
    ' hf://ORG/NAME.',
    default='',
  ),
  command.integer(
    'teacher_tokens',
    'Tokens that are stored for each target.',
    default=256,
    lower_bound=1,
  ),
  command.choice(
    'teacher_form',
    list(sparse_teacher.FORMS),
    "What is stored: 'counts' of draws from the teacher, whose expectation is"
    " its distribution; 'gemma3', the drawn tokens with renormalised"
    " probabilities (biased); or 'top', the likeliest, renormalised.",
    default='counts',
  ),
  command.integer(
    'n', 'Rows of each split to print.', default=4, lower_bound=1
  ),
)


def main(values: flags.FlagValues, options: Sequence[str] = ()) -> int:
  """Runs the command.

  Args:
    values: values of the flags.
    options: arguments after a --, for Apache Beam.
  """
  command.require(values, 'config')
  if not values.config.data.folder:
    command.require(values, 'workdir')
  # Records depend only on text and vocabularies; weight sources and the teacher
  # may not exist yet.
  config = config_lib.pinned(values.config, values.workdir, 'data')
  config = inherited_framing.inherit(config, values.workdir)
  settings = config_lib.load(config, values.workdir, sources=False)
  settings.data.require_source()
  on_beam = values.runner == 'beam'
  if options and not on_beam:
    raise errors.UserError(
      f'argument {options[0]!r}: options of a pipeline need --runner=beam'
    )
  # Storing a teacher does not need the sources.
  if not values.teacher or materialization.is_missing(settings.data):
    materialization.materialize(settings.data, options if on_beam else None)
  if values.teacher:
    teacher_storing.store(
      settings, values.teacher, values.teacher_form, values.teacher_tokens
    )
  if values.contamination:
    print(
      materialization.contamination_report(settings.data, values.contamination)
    )
  if values.show:
    opened = settings.data.vocabularies.open()
    locate = materialization.locator(settings.data.train)
    is_terminal = sys.stdout.isatty()  # No color escapes in a file.
    for split in materialization.open_sets(settings.data, opened):
      rows = range(min(values.n, len(split)))
      text = row_display.describe(
        split, opened, rows, colour=is_terminal, locate=locate
      )
      print(f'{split.folder}:\n{text}')
  return 0


if __name__ == '__main__':
  command.main(__doc__, define_flags, main, operands=True)
