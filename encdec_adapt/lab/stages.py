"""Resolves a page into its stages, each identified by its content.

The identity of a stage is a digest of its resolved configuration (training and
records) or of its arguments, with the identities of its input stages in place
of their folders. The text of a page, names, and keys without effect on results
do not change it. Records are identified by their specs, with fingerprints of
text and vocabularies.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import hashlib
import json
from typing import Any

import ml_collections

from encdec_adapt import config as config_lib
from encdec_adapt import configs
from encdec_adapt.base import errors
from encdec_adapt.cli import command
from encdec_adapt.data import data_section
from encdec_adapt.data.making import materialization
from encdec_adapt.data.records import record_sets
from encdec_adapt.evaluation.results import contrasts
from encdec_adapt.files import atomic, hub, paths
from encdec_adapt.lab import budgets, pages, variances
from encdec_adapt.models import forward_flops
from encdec_adapt.telemetry import compute_cost, environment
from encdec_adapt.tokenizers import vocabulary_pair

# Keys of output paths and speed, without effect on results.
NO_EFFECT = ('compute.compile_cache', 'data.workers', 'train.trackers')
_RATE = 'optimizer.learning_rate'
_Config = tuple[config_lib.Settings, ml_collections.ConfigDict]


@dataclasses.dataclass(frozen=True)
class Stage:
  """A command and its inputs.

  Attributes:
    name: name of the stage, and of its folder unless another stage has it.
    module: command to run.
    arguments: arguments, with stage names in braces for folders, or for the
      chosen learning rate of a sweep.
    reads: names of the input stages.
    identity: digest of the content.
    model: name of the arm or command on the page, '' for records; for an
      evaluation, the evaluated model.
    seed: seed of the model; None without one.
    evaluation: name of the evaluation, '' for other stages.
    rate: the learning-rate sweep; None for other stages.
    settings: configuration of training or records; None for other stages.
    values: resolved configuration of training by key.
    flops: FLOPs of training on all devices; for an imported model, those in
      its summary.
    seconds: expected time on two cores, 0 if it is to be measured.
    longest: longest stack input, in tokens, that the model or an ancestor was
      trained on; 0 if unknown.
  """

  name: str
  module: str
  arguments: tuple[str, ...]
  reads: tuple[str, ...]
  identity: str
  model: str = ''
  seed: int | None = None
  evaluation: str = ''
  rate: pages.Rate | None = None
  settings: config_lib.Settings | None = None
  values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  flops: float = 0.0
  seconds: float = 0.0
  longest: int = 0


def resolve(study: pages.Study) -> dict[str, Stage]:
  """Returns the stages by name, in topological order.

  An evaluation follows its model: what a stopped study has trained is measured.

  Raises:
    UserError: a configuration is invalid, arms read each other, a name has no
      stage with the seed, rows are longer than those that their model was
      trained on, or arms of a paired claim read different rows.
  """
  resolver = _Resolver(study)
  # Start with the first seed of every arm: an early report has all arms.
  counts = [len(study.seeds_of(arm.name)) for arm in study.arms]
  for position in range(max(counts, default=0)):
    for arm in study.arms:
      for seed in study.seeds_of(arm.name)[position : position + 1]:
        resolver.stage(arm.name, seed)
  for evaluation in study.evaluations:
    resolver.evaluate(evaluation)
  # Commands not read by any stage.
  for item in study.commands:
    for seed in item.seeds or (None,):
      resolver.stage(item.name, seed)
  for claim in study.claims:
    if claim.paired:
      resolver.check_paired(claim)
  positions = {name: i for i, name in enumerate(resolver.stages)}

  def position(stage):
    names = stage.reads if stage.evaluation else ()
    return max((positions[x] for x in names), default=positions[stage.name])

  ordered = sorted(resolver.stages.values(), key=position)
  return {stage.name: stage for stage in ordered}


def origins(
  study: pages.Study, resolved: Mapping[str, Stage]
) -> dict[str, tuple[str, bool]]:
  """Returns `variances.origins` of trained models."""
  values = {x.model: x.values for x in resolved.values() if x.values}
  return variances.origins(values, study.parents)


class _Resolver:
  """Builds the stages of a study, inputs first."""

  def __init__(self, study: pages.Study):
    self.study = study
    self.stages: dict[str, Stage] = {}
    self._items = {
      x.name: x for x in (*study.arms, *study.commands, *study.rates)
    }
    self._entered: list[str] = []
    self._configs: dict[str, _Config] = {}
    # Takes seconds for large texts, which may change between studies.
    self._fingerprint = functools.cache(materialization.source_fingerprint)
    self._vocabularies = functools.cache(lambda x: x.open().fingerprints)

  def stage(self, name: str, seed: int | None) -> Stage:
    """Returns the stage of an arm, a command or a rate."""
    key = self.study.stage_of(name, seed)
    if key in self._entered:
      chain = ' reads '.join([*self._entered, key])
      raise self.study.error(f'stages read each other in a circle: {chain}')
    if key not in self.stages:
      self._entered.append(key)
      item = self._items[name]
      if isinstance(item, pages.Arm):
        stage = self._arm(item, key, seed)
      elif isinstance(item, pages.Rate):
        stage = self._rate(item)
      else:
        # Stages without seeds are the same for all readers.
        stage = self._command(item, key, seed if item.seeds else None)
      self._entered.pop()
      self.stages[key] = stage
    return self.stages[key]

  def evaluate(self, evaluation: pages.Evaluation) -> None:
    """Adds the stages of an evaluation."""
    flags = list(evaluation.arguments)
    has_cost = any(flag.startswith('--cost') for flag in flags)
    if evaluation.module == 'evaluate' and not has_cost:
      flags.append('--cost=')
    needles = [
      int(length)
      for flag in flags
      if flag.startswith('--retrieval_lengths=')
      for length in flag.partition('=')[2].split(',')
    ]
    for model in evaluation.models or [arm.name for arm in self.study.arms]:
      model_flags, lengths = list(flags), list(needles)
      if evaluation.records:
        arm = self._records_arm(evaluation, model)
        records = self._records(arm)
        model_flags.append(f'--records={{{records.name}}}/eval')
        spec = self._config(arm)[0].data.evaluation
        lengths.append(self._longest(spec, self._items[model]))
      seeds = self.study.seeds_of(model) or (None,)
      for seed in seeds if evaluation.all_seeds else seeds[:1]:
        name = f'{evaluation.name}_{self.study.stage_of(model, seed)}'
        item = pages.Command(
          name,
          evaluation.module,
          (*model_flags, f'--checkpoint={{{model}}}', f'--output={{{name}}}'),
          seconds=evaluation.seconds,
        )
        self.stages[name] = dataclasses.replace(
          self._command(item, name, seed),
          model=model,
          evaluation=evaluation.name,
          flops=self._evaluation_flops(evaluation, model),
        )
        title = f'study {self.study.name}: stage {name}'
        limit = self.stage(model, seed).longest
        contrasts.check_length(title, max(lengths, default=0), limit)

  def _records_arm(self, evaluation: pages.Evaluation, model: str) -> pages.Arm:
    """Returns the arm whose records a model is measured on."""
    if evaluation.records != pages.EACH_MODEL:
      return self._items[evaluation.records]
    arm = self._items[model]
    # All rows: samples of different records are of different examples.
    changes = {**arm.changes, 'data.eval_rows': 0}
    return dataclasses.replace(arm, name=f'{arm.name}_all', changes=changes)

  def _evaluation_flops(
    self, evaluation: pages.Evaluation, model: str
  ) -> float:
    """Returns the FLOPs of a held-out loss; 0 if its rows are not counted."""
    arm = self._items[model]
    if not (evaluation.records and isinstance(arm, pages.Arm)):
      return 0.0
    settings, _ = self._config(self._records_arm(evaluation, model))
    lengths, data = settings.data.evaluation.lengths, settings.data
    sizes = lengths.encoder, lengths.decoder, lengths.teacher
    shape = self._config(arm)[0].model
    return float(data.eval_rows * forward_flops.forward(shape, *sizes))

  def check_paired(self, claim: pages.Claim) -> None:
    """Rejects a paired claim if its arms read different rows."""
    rows = set()
    for name in claim.contrast:
      if isinstance(arm := self._items[name], pages.Arm):
        settings, _ = self._config(arm)
        rows.add(
          (
            self._records(arm).name,
            settings.train.batch_size,
            settings.data.rates,
            self.study.seeds_of(name),
          )
        )
    if len(rows) > 1:
      raise self.study.error(
        f'the claim {claim.sentence!r} is paired, but its arms'
        f' {", ".join(claim.contrast)} read different rows: records, batch'
        f' size, rates and seeds are {sorted(rows)}; make them equal, or leave'
        ' out paired'
      )

  def _command(self, item: pages.Command, name: str, seed: int | None) -> Stage:
    arguments, reads = self._filled(item.arguments, seed, item.name, name)
    reads += [self.stage(x, seed).name for x in item.after]
    reads = tuple(dict.fromkeys(reads))
    content = {
      'module': item.module,
      'arguments': arguments,
      'after': sorted(self.stages[x].identity for x in reads),
    }
    source, lengths = (
      _imported(arguments),
      [self.stages[x].longest for x in reads],
    )
    if source:  # Another model may be in the folder later.
      content['source'] = source
    return Stage(
      name,
      item.module,
      tuple(arguments),
      reads,
      self._identity(content, name),
      model=item.name,
      seed=seed,
      flops=source.get('inclusive', {}).get('flops', 0.0),
      seconds=item.seconds,
      longest=max(lengths, default=source.get('longest_row', 0)),
    )

  def _filled(
    self, texts, seed: int | None, own: str = '', name: str = ''
  ) -> tuple[list[str], list[str]]:
    """Returns texts with stage names in braces, and the names."""
    values, reads = {own: f'{{{name}}}', 'seed': str(seed)}, []
    for text in texts:
      for x in pages.placeholders(text):
        if x not in (own, *self.stages) and x not in self._items:
          known = [*self._items, *self.stages]
          raise self.study.error(
            f'{text!r} names {x!r}, which is not an arm or command'
            f'{errors.nearest(x, known)}'
          )
        if x != own:
          # Records have no item on the page.
          stage = self.stage(x, seed) if x in self._items else self.stages[x]
          values[x] = f'{{{stage.name}}}'
          reads.append(stage.name)
    return [pages.fill(text, values) for text in texts], reads

  def _arm(self, arm: pages.Arm, name: str, seed: int) -> Stage:
    rate = self.stage(arm.rate, None).name if arm.rate else ''
    return self._train(arm, name, seed, seed, rate)

  def _rate(self, rate: pages.Rate) -> Stage:
    arm = self._items[rate.arm]
    reader = self.study.seeds_of(arm.name)[0]
    stage = self._train(arm, rate.name, rate.seed, reader, '')
    values = _changed(stage.values)
    values.pop(_RATE, None)
    content = {'rates': rate.values, 'extra': rate.extra, 'config': values}
    if rate.metric != pages.Rate.metric:
      content['metric'] = rate.metric
    arguments = [
      x for x in stage.arguments if not x.startswith(f'--config.{_RATE}=')
    ]
    return dataclasses.replace(
      stage,
      arguments=tuple(arguments),
      identity=self._identity(content, rate.name),
      model=rate.name,
      seed=None,
      rate=rate,
      flops=stage.flops * len(rate.values),
    )

  def _train(
    self,
    arm: pages.Arm,
    name: str,
    seed: int,
    reader: int,
    rate: str,
  ) -> Stage:
    """Returns a training stage.

    `reader` is the seed for its input arms; `rate` is the stage of a
    learning-rate sweep, or ''.
    """
    config = self._config(arm)[1].copy_and_resolve_references()
    records = self._records(arm, reader)
    starts, reads = self._filled(arm.starts_texts, reader)
    changes = dict(zip(arm.starts, starts, strict=True))
    changes |= {'seed': seed, 'data.folder': f'{{{records.name}}}'}
    config.seed = seed
    if arm.budget is not None:
      step = self._step(arm, self._config(arm)[0])
      config.train.steps = self._steps(arm, step, reader)
      changes['train.steps'] = config.train.steps
    settings = config_lib.load(config, '{workdir}')
    if rate:
      changes[_RATE] = f'{{{rate}}}'
    values = environment.flat(config.to_dict()) | changes
    values = {k: v for k, v in values.items() if k not in NO_EFFECT}
    if not config.compute.compile_cache:
      changes['compute.compile_cache'] = '{root}/compiled'
    reads = dict.fromkeys([*reads, records.name, *([rate] if rate else [])])
    sources = [
      self.stages[x].longest
      for key, text in zip(arm.starts, starts, strict=True)
      if key.startswith('init.')
      for x in pages.placeholders(text)
    ]
    mode, title = config.init.mode, f'study {self.study.name}: stage {name}'
    length = self._longest(settings.data.train, arm)
    limit = max(sources, default=0) if all(sources) else 0
    # Adaptation makes another model, whose rows are its own.
    if mode == 'checkpoint':
      contrasts.check_length(title, length, limit)
    return Stage(
      name,
      'train',
      (
        *_flags(arm.config, {**arm.changes, **changes}),
        f'--workdir={{{name}}}',
      ),
      tuple(reads),
      self._identity({'module': 'train', 'config': _changed(values)}, name),
      model=arm.name,
      seed=seed,
      settings=settings,
      values=values,
      flops=self._step(arm, settings).flops * settings.train.steps,
      longest=length if mode == 'random' else limit and max(length, limit),
    )

  def _longest(
    self, rows: record_sets.RecordSpec, model: pages.Arm | pages.Command
  ) -> int:
    """Returns a model's longest stack input; a command's is a decoder's."""
    if isinstance(model, pages.Command):
      return rows.lengths.teacher
    has_inputs = rows.lengths.encoder > 0
    sides = self._config(model)[0].model.architecture.sides(has_inputs)
    return max(getattr(rows.lengths, side) for side in sides.values())

  def _config(self, arm: pages.Arm) -> _Config:
    if arm.name in self._configs:
      return self._configs[arm.name]
    flags = _flags(
      arm.config,
      {**arm.changes, **dict(zip(arm.starts, arm.starts_texts, strict=True))},
    )
    values = command.parse(command.define_config, flags)
    # Paths in braces exist once the stage runs.
    settings = config_lib.load(values.config, '{workdir}')
    self._configs[arm.name] = settings, values.config
    return self._configs[arm.name]

  def _records(self, arm: pages.Arm, seed: int | None = None) -> Stage:
    settings, _ = self._config(arm)
    texts = {
      key: text
      for key, text in zip(arm.starts, arm.starts_texts, strict=True)
      if key.startswith('data.')
    }
    starts, reads = self._filled(texts.values(), seed)
    specs = settings.data.train, settings.data.evaluation
    records = [self._spec_content(settings.data, spec) for spec in specs]
    content = {'records': records, 'reads': starts}
    identity = self._identity(content, '')
    for stage in self.stages.values():
      if stage.identity == identity:
        return stage
    name = 'records' if 'records' not in self.stages else f'records_{arm.name}'
    if name in self.stages:  # Records of another seed.
      name = f'records_{self.study.stage_of(arm.name, seed)}'
    changes = {**arm.changes, **dict(zip(texts, starts, strict=True))}
    changes['data.folder'] = f'{{{name}}}'
    self.stages[name] = Stage(
      name,
      'materialize',
      tuple(_flags(arm.config, changes)),
      tuple(reads),
      identity,
      settings=settings,
      seconds=60.0,
    )
    return self.stages[name]

  def _spec_content(
    self, data: data_section.DataConfig, spec: record_sets.RecordSpec
  ) -> dict[str, Any]:
    choice = data.vocabularies
    if pages.placeholders(f'{choice.decoder} {choice.encoder}'):
      # Made by a stage.
      fields = {
        'vocabulary': choice.decoder,
        'encoder_vocabulary': choice.encoder,
      }
    elif vocabulary_pair.exists(choice.decoder):
      fields = self._vocabularies(choice)
    else:
      fields = {'vocabulary': f'trained: {data.table_sizes} {data.chat_format}'}
    # Text written by a stage is identified by the stage in its name.
    if not pages.placeholders(spec.source):
      fields['source_fingerprint'] = self._fingerprint(spec)
    return {
      field.name: value
      for field in dataclasses.fields(spec)
      if (value := fields.get(field.name, getattr(spec, field.name)))
      != field.default
    }

  def _steps(self, arm: pages.Arm, step: budgets.Step, seed: int) -> int:
    if isinstance(arm.budget, int):
      return arm.budget
    _, reads = self._filled(arm.starts_texts, seed)
    spent = {}
    # Count each source and teacher stage once.
    while reads:
      stage = self.stages[reads.pop()]
      spent[stage.name] = stage.flops
      reads += [x for x in stage.reads if x not in spent and x != stage.name]
    try:
      if isinstance(arm.budget, budgets.Tokens):
        arm.budget.check(self._config(arm)[0])
      return arm.budget.steps(step, sum(spent.values()))
    except errors.UserError as error:
      text = str(error).rstrip('.')
      raise self.study.error(f'arm {arm.name}: {text}') from error

  def _step(
    self, arm: pages.Arm, settings: config_lib.Settings
  ) -> budgets.Step:
    source = self._items.get(arm.starts.get('teacher.checkpoint'))
    recipe = settings.recipe
    models = [recipe.frozen[name].assumed for name in recipe.loss.references]
    if models and isinstance(source, pages.Arm):
      models = [self._config(source)[0].model]
    return budgets.Step.of(settings, models)

  def _identity(self, content: Mapping[str, Any], name: str) -> str:
    """Returns the digest of a content, with identities for names in braces."""
    values = {key: stage.identity for key, stage in self.stages.items()}
    text = configs.portable(json.dumps(content, sort_keys=True, default=str))
    text = pages.fill(text, {**values, name: 'output', 'root': 'root'})
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _flags(config: str, changes: Mapping[str, Any]) -> list[str]:
  return [f'--config={config}'] + [
    f'--config.{key}={value}' for key, value in changes.items()
  ]


def _changed(values: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the non-default values.

  Keys added by later versions leave identities unchanged.
  """
  defaults = environment.flat(config_lib.defaults().to_dict())
  return {k: v for k, v in values.items() if v != defaults[k]}


def _imported(arguments: Sequence[str]) -> Mapping[str, Any]:
  """Returns the summary of an imported model; empty without one."""
  for text in arguments:
    source = text.removeprefix('--source=')
    if source != text and not source.startswith(hub.SCHEME):
      file = paths.at(source) / compute_cost.SUMMARY
      return atomic.read_json(file) if file.exists() else {}
  return {}
