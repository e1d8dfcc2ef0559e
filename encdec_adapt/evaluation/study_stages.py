"""Definition of a study: its stages, and the runs that its report compares.

A configuration file builds a `Study`; `encdec_adapt.study` runs it. This module
imports nothing of the package, so that a configuration file is read quickly.
"""

from collections.abc import Mapping
import dataclasses


@dataclasses.dataclass(frozen=True)
class Stage:
  """A command of a study.

  Attributes:
    name: name of the stage in the report; unique in its study.
    module: command that it runs, such as 'train' or 'convert'.
    arguments: arguments of the command.
    budget_seconds: expected time on two cores.
    rate_of: run folders below the study's root; the command gets the learning
      rate of the run with the lowest held-out loss.
  """

  name: str
  module: str
  arguments: tuple[str, ...]
  budget_seconds: float
  rate_of: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Study:
  """The stages of a study and the content of its report.

  Attributes:
    root: folder of the study.
    title: title of the report.
    size: name of the study's size.
    stages: the stages, in order.
    runs: run folders below the root, in the order of the report.
    best_of: maps a name in the report to run folders; the run with the lowest
      held-out loss is shown under that name.
    results: folder of the results that an `evaluate` stage writes.
    samples: path of the continuations that a `generate` stage writes; '' for
      none.
    tuned: root of the study that a stage fine-tunes the runs in; its report is
      part of this one; '' for none.
    note: sentence at the end of the findings; '' for none.
    table: path of a JSON object with `rows`, a table of its own that a stage
      writes for the report; '' for none.
  """

  root: str
  title: str
  size: str
  stages: tuple[Stage, ...]
  runs: tuple[str, ...]
  results: str
  best_of: Mapping[str, tuple[str, ...]] = dataclasses.field(
    default_factory=dict
  )
  samples: str = ''
  tuned: str = ''
  note: str = ''
  table: str = ''
