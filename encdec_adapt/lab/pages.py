"""A study as data: arms, claims, evaluations and further commands.

The function `get_study(arg)` of a configuration file returns a `Study`;
`encdec_adapt.study` runs it. This module imports only `base` from the package,
to load pages fast.

An arm has a training stage per seed, an evaluation a stage per model; records,
shared by arms with equal data, are stages too. `{NAME}` in an argument expands
to the folder of the arm or command NAME (with the same seed, or its only one)
and makes it an input of the stage; the stage's own name expands to its output,
and `{root}` to the folder of the study.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import math
import re
from typing import Any

from encdec_adapt.base import errors

DIRECTIONS = ('greater', 'less', 'equal', 'no better')
# Most claims with a verdict: more would widen the intervals.
MOST_PRIMARY = 5
LOSS = 'held_out/loss'
# Share of the most frequent label, a floor that is the same for all models.
MAJORITY = 'held_out/majority'
# Records of an evaluation in the rows of each model; never the name of an arm.
EACH_MODEL = '*'
# Metric of a sweep of the learning rate -> key of its values in rates.json.
RATE_METRICS = {'loss': 'losses', 'reward': 'rewards'}
_NAME = re.compile(r'\w[\w.-]*')
_PLACEHOLDER = re.compile(r'\{(\w[\w.-]*)\}')
# Placeholders other than names of arms and commands.
RESERVED = ('root', 'seed', 'workdir')


def placeholders(text: str) -> list[str]:
  """Returns the names in braces in a text, without the reserved ones."""
  return [x for x in _PLACEHOLDER.findall(text) if x not in RESERVED]


def fill(text: str, values: Mapping[str, str]) -> str:
  """Replaces names in braces with their values, where given."""
  return _PLACEHOLDER.sub(lambda m: values.get(m[1], m[0]), text)


def _mapping() -> Any:
  return dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Claim:
  """A sentence tested by the study.

  Attributes:
    sentence: the claim.
    source: its paper and table.
    paper: the paper's numbers, as text; printed, not compared.
    contrast: names of arms: (a,) for a value of a, (a, b) for b - a,
      (a, b, c, d) for (b - a) - (d - c).
    metric: 'TASK/METRIC', a metric of an evaluation of these arms.
    direction: claimed direction of the contrast: 'greater', 'less', 'equal'
      or 'no better'.
    smallest: smallest relevant difference, above 0.
    reason: why a smaller difference does not matter.
    primary: whether the claim gets a verdict; at most 5 per study.
    paired: whether arms with equal seeds must read equal rows.
  """

  sentence: str
  source: str
  paper: str
  contrast: tuple[str, ...]
  metric: str
  direction: str
  smallest: float
  reason: str
  primary: bool = False
  paired: bool = False


@dataclasses.dataclass(frozen=True)
class Arm:
  """A training run, repeated for each seed.

  Attributes:
    name: name of the arm, unique in its study.
    config: value of --config: FILE[:ARG], or NAME[:ARG] of a shipped file.
    changes: values of configuration keys, such as {'train.dropout': 0.1}.
    starts: inputs by configuration key: the name of an arm or command, such as
      {'init.encoder': 'source'}, or text with such names, such as
      {'data.source': 'pairs:{samples}/pairs.jsonl#prompt,chosen'}.
    budget: length of training: a number of steps, or a budget of
      `lab.budgets`; None for `train.steps` of the configuration.
    rate: name of the `Rate` that chooses the learning rate; '' for the
      configuration's rate.
    seeds: seeds, if they differ from the study's.
  """

  name: str
  config: str
  changes: Mapping[str, Any] = _mapping()
  starts: Mapping[str, str] = _mapping()
  budget: Any = None
  rate: str = ''
  seeds: tuple[int, ...] | None = None

  @property
  def starts_texts(self) -> list[str]:
    """Values of `starts`, with names in braces."""
    return [x if '{' in x else f'{{{x}}}' for x in self.starts.values()]


@dataclasses.dataclass(frozen=True)
class Rate:
  """A sweep of the learning rate with runs of an arm, of its full length.

  The run with the best finite metric wins. While the winner is the lowest or
  highest rate, the sweep extends beyond it, by up to `extra` rates.

  Attributes:
    name: name of the stage.
    arm: arm of the runs.
    values: learning rates, ascending by a constant factor.
    seed: seed of the runs.
    extra: maximum number of rates beyond an edge.
    metric: metric of a job's held-out rows: loss (the lowest is best), or
      reward (the highest).
  """

  name: str
  arm: str
  values: tuple[float, ...]
  seed: int = 1000
  extra: int = 2
  metric: str = 'loss'

  @property
  def results(self) -> str:
    """Key of the metric at each rate in rates.json."""
    return RATE_METRICS[self.metric]

  def best(self, values: Mapping[Any, float | None]) -> Any:
    """Returns the rate with the best value; None if none is finite."""
    finite = [
      k for k, x in values.items() if x is not None and math.isfinite(x)
    ]
    choose = max if self.metric == 'reward' else min
    return choose(finite, key=values.get, default=None)


@dataclasses.dataclass(frozen=True)
class Command:
  """A command of a study besides training and evaluation.

  Attributes:
    name: name of the stage and of its folder; unique in its study.
    module: command to run, such as 'convert' or 'generate'.
    arguments: arguments of the command, with `{NAME}` for its inputs and its
      output, and `{seed}`.
    after: further input arms and commands.
    seeds: seeds of its stages; () for a single stage.
    seconds: expected time on two cores.
  """

  name: str
  module: str
  arguments: tuple[str, ...]
  after: tuple[str, ...] = ()
  seeds: tuple[int, ...] = ()
  seconds: float = 60.0


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """A stage that measures each model.

  Attributes:
    name: name of the evaluation; the stage of a model is NAME_MODEL.
    arguments: flags besides --checkpoint and --output; of `evaluate` also
      --cost= unless given.
    metrics: measured 'TASK/METRIC', as named by claims.
    records: arm of the held-out records; EACH_MODEL for all held-out examples,
      in rows as each arm was trained on; '' for none.
    models: arms and commands to evaluate; () for all arms.
    all_seeds: whether to evaluate every seed of a model, or only the first.
    seconds: expected time per model on two cores.
    floors: by metric, what a model that has learned nothing reaches: another
      metric of the evaluation, or a number, such as the chance of a choice. The
      floor of the loss is that with the inputs of other examples.
    module: command that adds the scores of --checkpoint to a results store in
      --output.
  """

  name: str
  arguments: tuple[str, ...] = ()
  metrics: tuple[str, ...] = (LOSS,)
  records: str = ''
  models: tuple[str, ...] = ()
  all_seeds: bool = True
  seconds: float = 10.0
  floors: Mapping[str, str | float] = dataclasses.field(
    default_factory=lambda: {LOSS: 'held_out/loss_shuffled_prefix'}
  )
  module: str = 'evaluate'


@dataclasses.dataclass(frozen=True)
class Study:
  """A page: trained arms, their evaluations and the claims to test.

  Attributes:
    name: name of the study.
    title: title of the report.
    size: name of the study's size.
    arms: the arms, in the order of the report.
    seeds: seeds of every arm.
    claims: the claims.
    evaluations: evaluations of the arms.
    commands: further stages, such as imports, merges and exports.
    rates: sweeps of learning rates.
    root: folder or bucket address; '' for runs/studies/NAME_SIZE.
    platform: 'gpu' or 'tpu' if models need such devices, '' for any.
    topology: chips, such as h100:64, for which steps are planned instead of
      measured on this machine; '' for none.
    readme: README into which the report of a study of studies writes the table
      of all claims; '' for none.
    picture: claims of the figure beside that table: paper -> page and contrast
      of a primary claim.
    best_of: maps a name in the report to arms; the report shows the arm with
      the lowest held-out loss under this name.
    samples: commands with continuations for the report, in samples.jsonl in
      their folders.
    note: paragraphs of the report, separated by empty lines: what arms are, and
      what is not controlled; '' for none.
    results: CSV file with its results (`lab.stored_results`), which outlives
      the folder; '' for none. `study` sets it for shipped pages of size cpu.
  """

  name: str
  title: str
  size: str
  arms: tuple[Arm, ...]
  seeds: tuple[int, ...] = (0,)
  claims: tuple[Claim, ...] = ()
  evaluations: tuple[Evaluation, ...] = ()
  commands: tuple[Command, ...] = ()
  rates: tuple[Rate, ...] = ()
  root: str = ''
  platform: str = ''
  topology: str = ''
  readme: str = ''
  picture: Mapping[str, Sequence[tuple[str, tuple[str, ...]]]] = _mapping()
  best_of: Mapping[str, tuple[str, ...]] = _mapping()
  samples: tuple[str, ...] = ()
  note: str = ''
  results: str = ''

  def __post_init__(self):
    names = [x.name for x in (*self.commands, *self.rates, *self.arms)]
    names += [x.name for x in self.evaluations]
    each = [x for x in self.evaluations if x.records == EACH_MODEL]
    names += {f'{arm}_all' for x in each for arm in self.measured(x)}
    for name in names:
      is_free = names.count(name) == 1 and name not in RESERVED
      if not (is_free and _NAME.fullmatch(name)):
        raise self.error(
          f'the name {name!r} is given twice or invalid; names must be unique,'
          f' match {_NAME.pattern} and be none of {", ".join(RESERVED)}'
        )
    for seeds in (self.seeds, *map(self.seeds_of, names)):
      if len({*seeds}) < len(seeds):
        raise self.error(
          f'the seeds {seeds} name one twice, and its run would count as two'
        )
    rates = {x.name for x in self.rates}
    for arm in self.arms:
      for text in arm.starts_texts:
        self._require(placeholders(text), f'arm {arm.name} starts from')
      if arm.rate and arm.rate not in rates:
        raise self.error(
          f'arm {arm.name} has the learning rate of {arm.rate!r}, which is not'
          f' among the rates{errors.nearest(arm.rate, rates)}'
        )
    for rate in self.rates:
      self._require([rate.arm], f'rate {rate.name} trains', self.arms)
      if rate.metric not in RATE_METRICS:
        raise self.error(
          f'rate {rate.name} has metric={rate.metric!r}, which must be one of'
          f' {", ".join(RATE_METRICS)}'
        )
    for command in self.commands:
      self._require(command.after, f'command {command.name} reads')
    for evaluation in self.evaluations:
      if not evaluation.metrics:
        raise self.error(f'evaluation {evaluation.name} names no metric')
      self._require(evaluation.models, f'evaluation {evaluation.name} is of')
      records = [evaluation.records] if evaluation.records else []
      if evaluation.records == EACH_MODEL:
        records = self.measured(evaluation)
      text = f'evaluation {evaluation.name} reads records of'
      self._require(records, text, self.arms)
    for name, arms in self.best_of.items():
      self._require(arms, f'{name} is the best of', self.arms)
    self._check_claims()

  def error(self, text: str) -> errors.UserError:
    """Returns an error with the name of the study."""
    return errors.UserError(f'study {self.name}: {text}.')

  @property
  def folder(self) -> str:
    """Folder of the study."""
    return self.root or f'runs/studies/{self.name}_{self.size}'

  @property
  def terms(self) -> dict[str, str]:
    """What each claim says, by sentence; recorded at the first start."""
    floors = [self.evaluation_for(x).floors for x in self.claims]
    return {
      x.sentence: f'{x.direction} by {x.smallest}: {x.metric} of'
      f' {", ".join(x.contrast)}, {self.planned_seeds(x)} seeds, floor'
      f' {floor.get(x.metric)}, primary: {x.primary}, paired: {x.paired}'
      for x, floor in zip(self.claims, floors, strict=True)
    }

  def seeds_of(self, name: str) -> tuple[int, ...]:
    """Returns the seeds of an arm or command; () without seeds."""
    for arm in self.arms:
      if arm.name == name:
        return self.seeds if arm.seeds is None else arm.seeds
    return next((x.seeds for x in self.commands if x.name == name), ())

  @property
  def parents(self) -> dict[str, str]:
    """Model -> the model that it starts from, or is made of, in each seed.

    Of a pair, the encoder's. Models with one source for all seeds have none.
    """
    texts = {x.name: x.starts.get('init.encoder', '') for x in self.arms}
    for command in self.commands:
      texts[command.name] = ' '.join(command.arguments)
    found = {}
    for name, text in texts.items():
      parent = (placeholders(text) or [text])[0]
      if parent != name and len(self.seeds_of(parent)) > 1:
        found[name] = parent
    return found

  def planned_seeds(self, claim: Claim) -> int:
    """Returns the number of seeds of a claim; 0 if no arm has seeds."""
    return max(len(self.seeds_of(name)) for name in claim.contrast)

  def measured(self, evaluation: Evaluation) -> tuple[str, ...]:
    """Returns the evaluated models."""
    return evaluation.models or tuple(arm.name for arm in self.arms)

  def origin(self, evaluation: Evaluation) -> tuple[str, str]:
    """Returns the page of an evaluation, and its name on that page.

    Evaluations of other pages' models are named PAGE.NAME.
    """
    page, _, name = evaluation.name.rpartition('.')
    return page or self.name, name

  def evaluation_of(
    self, metric: str, models: Iterable[str]
  ) -> Evaluation | None:
    """Returns the first evaluation with the metric for all of the models."""
    for evaluation in self.evaluations:
      is_complete = {*models} <= {*self.measured(evaluation)}
      if is_complete and metric in evaluation.metrics:
        return evaluation
    return None

  def evaluation_for(self, claim: Claim) -> Evaluation | None:
    """Returns the first evaluation with the metric and models of a claim."""
    return self.evaluation_of(claim.metric, claim.contrast)

  def stage_of(self, name: str, seed: int | None) -> str:
    """Returns the stage name of an input arm or command.

    Args:
      name: name of an arm, a command or a rate.
      seed: seed of the reader; None without one, which reads the first seed.

    Raises:
      UserError: the arm has several seeds, but not this one.
    """
    seeds = self.seeds_of(name)
    if seed not in seeds:
      if len(seeds) > 1 and seed is not None:
        raise self.error(
          f'{name} has the seeds {seeds}, and what reads it has {seed}; give'
          ' both the same seeds'
        )
      seed = seeds[0] if seeds else None
    return f'{name}_seed{seed}' if seed else name

  def _require(
    self,
    names: Sequence[str],
    text: str,
    among: Sequence[Arm | Command] | None = None,
  ) -> None:
    among = (*self.arms, *self.commands) if among is None else among
    valid = [x.name for x in among]
    for name in names:
      if name not in valid:
        raise self.error(
          f'{text} {name!r}, which is not among'
          f' {", ".join(valid)}{errors.nearest(name, valid)}'
        )

  def _check_claims(self) -> None:
    primary = [x for x in self.claims if x.primary]
    if len(primary) > MOST_PRIMARY:
      raise self.error(
        f'{len(primary)} claims are primary, and at most {MOST_PRIMARY} may be;'
        ' mark those that the study is made for'
      )
    for claim in self.claims:
      text = f'the claim {claim.sentence!r}'
      if len(claim.contrast) not in (1, 2, 4):
        raise self.error(f'{text} must have one, two or four arms')
      if claim.direction not in DIRECTIONS or not claim.smallest > 0:
        raise self.error(
          f'{text} has direction {claim.direction!r}, which must be one of'
          f' {", ".join(DIRECTIONS)}, and smallest={claim.smallest}, which must'
          ' be above 0'
        )
      self._require(claim.contrast, f'{text} names')
      if not self.evaluation_for(claim):
        metrics = [
          name
          for x in self.evaluations
          for name in x.metrics
          if self.evaluation_of(name, claim.contrast)
        ]
        raise self.error(
          f'{text} names the metric {claim.metric!r}, and the evaluations of'
          f' its arms have {", ".join(metrics) or "none"}'
          f'{errors.nearest(claim.metric, metrics)}'
        )
      # A single model is compared with every seed of the other arm.
      counts = {len(self.seeds_of(name)) for name in claim.contrast} - {0, 1}
      if len(counts) > 1:
        raise self.error(
          f'{text} compares arms of {sorted(counts)} seeds; give them equally'
          ' many'
        )
