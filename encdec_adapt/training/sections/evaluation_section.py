"""The configuration section `evaluation`: the evaluators of a job."""

import dataclasses

from encdec_adapt.base import errors, intervals, keys

# All other evaluators are tasks, or folders of tasks.
LOSS, SAMPLES = 'loss', 'samples'


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
  """Keys of `config.evaluation`."""

  loss: float = keys.key(
    50.0,
    'Steps between evaluations of the held-out rows, or below 1 a share of'
    " the job's steps; 0: nothing is evaluated. Scores go to"
    ' WORKDIR/results.jsonl and to trackers. All evaluators run at step 0 and'
    ' at the last step, too.',
    interval=True,
  )
  samples: float = keys.key(
    0.0,
    'Steps between answers to two of the held-out rows, a multiple of those of'
    ' `loss`, or a share; 0: none.',
    interval=True,
  )
  tasks: tuple[str, ...] = keys.key(
    (),
    'Local tasks (a folder), or tasks by name'
    ' (encdec_adapt/evaluation/README.md).',
    names=True,
  )
  tasks_every: float = keys.key(
    0.0, 'Steps between runs of the tasks, as for `samples`.', interval=True
  )

  def __post_init__(self):
    keys.check(self, 'config.evaluation.')
    if bool(self.tasks) != bool(self.tasks_every):
      raise errors.UserError(
        f'config.evaluation.tasks is {self.tasks!r} and'
        f' config.evaluation.tasks_every {self.tasks_every:g}; set both or'
        ' neither.'
      )
    names = (LOSS, SAMPLES, *self.tasks)
    if repeated := [x for x in self.tasks if names.count(x) > 1]:
      raise errors.UserError(
        f'config.evaluation.tasks is {self.tasks!r}, and {repeated[0]!r} is'
        f' there twice or is no task; a folder of that name is ./{repeated[0]}.'
      )
    for key in ('samples', 'tasks_every'):
      value = getattr(self, key)
      # Others run only at evaluation steps of the loss: fractions are rounded
      # to multiples of its interval.
      if value and not self.loss:
        raise errors.UserError(
          f'config.evaluation.{key} is {value:g} and config.evaluation.loss 0,'
          f' so that nothing is evaluated; set {key} to 0 (and tasks to ()), or'
          ' loss to a number of steps.'
        )
      if value >= 1 and (self.loss < 1 or value % self.loss):
        raise errors.UserError(
          f'config.evaluation.{key} is {value:g} and config.evaluation.loss'
          f' {self.loss:g}; it must be a multiple of the latter, or a share'
          ' of the steps, as in 0.1.'
        )

  def intervals(self, steps: int) -> dict[str, int]:
    """Returns the steps between two runs of each evaluator, by name.

    Args:
      steps: steps of the job; fractions have no meaning while unknown (0).
    """
    if not self.loss:
      return {}
    every = intervals.steps(self.loss, steps)
    values = {SAMPLES: self.samples}
    values |= dict.fromkeys(self.tasks, self.tasks_every)
    return {LOSS: every} | {
      name: intervals.steps(value, steps, every)
      for name, value in values.items()
      if value
    }
