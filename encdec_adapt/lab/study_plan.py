"""Cost of a study: tokens, FLOPs, hours, memory, passes, planned power.

Hours follow from the step time of each shape, cached in the study's folder:
measured on this machine, or planned for the topology of the study. Those of a
trial of minutes are estimated from FLOPs.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import hashlib
import json
import time
from typing import Any

import jax
import jax.numpy as jnp

from encdec_adapt import config as config_lib
from encdec_adapt.evaluation.results import number_format as numbers
from encdec_adapt.files import disk, paths
from encdec_adapt.lab import (
  claim_results,
  pages,
  plan_results,
  score_tables,
  stage_states,
  stages,
  text_passes,
)
from encdec_adapt.models import execution
from encdec_adapt.planner import chips, program_plans, programs
from encdec_adapt.telemetry import environment
from encdec_adapt.training import remat_choice, setup

_STEPS = 'steps.json'
_REPEATS = 3
# Assumed FLOPs per second of a core, for small models.
_CORE = 4e10
# Most FLOPs of a trial of minutes, which is not measured.
_TRIAL = 3e13
# Sections and keys with an effect on a step's time and memory.
_SHAPE = ('model.', 'compute.', 'loss.', 'mesh.', 'train.batch_size')
_SHAPE += ('train.microbatches', 'train.dropout', 'train.lora')
_SHAPE += ('data.encoder_length', 'data.decoder_length', 'optimizer.kind')
_SHAPE += ('teacher.',)


def describe(study: pages.Study, states: stage_states.States) -> str:
  """Describes the cost of unfinished stages; measures steps without a time.

  A trial is estimated from FLOPs: to measure its steps would take longer.

  Args:
    study: the study.
    states: states of its stages.

  Returns:
    Lines of text: a table of the models, then the sums, then claims.
  """
  trained = [x for x in states.unfinished if x.module == 'train']
  is_rough = sum(x.flops for x in trained) <= _TRIAL and not study.topology
  if is_rough:
    steps = _from_flops(study, trained)
  else:
    steps = _steps(study, states, trained)
  passes = text_passes.Passes.of(states, () if is_rough else trained)
  rows = _models(study, passes, trained, steps)
  costs = _costs(study, states.unfinished, steps)
  for row in rows:
    row['runs'], row['steps'] = str(row['runs']), f'{row["steps"]:,}'
    row['FLOPs'] = f'{row["FLOPs"]:.3g}'
    row['hours'] = f'{row["hours"]:.2f}' if row['ms/step'] else ''
  lines = [score_tables.text(rows)] if rows else []
  finished = len(states.stages) - costs.stages
  note = f'; {finished} finished stages are not counted' * bool(finished)
  lines.append(costs.line + note)
  if any(not x.settings.train.steps for x in trained):
    lines.append(
      'arms of 0 steps train for config.data.passes passes over their records:'
      ' their FLOPs and hours are not counted here'
    )
  lines += passes.notes(trained)
  if sizes := [x['bytes'] for x in steps.values() if 'bytes' in x]:
    lines.append(f'largest training step: {disk.format_bytes(max(sizes))}')
  elif steps:
    lines.append('times are estimates from FLOPs')
  lines += _claims(study, states)
  if study.topology:
    count = chips.parse(study.topology).chips
    lines.append(
      f'planned on {study.topology}, {count} chips; memory is of a chip'
    )
  return '\n'.join(lines)


def describe_pages(
  parts: Mapping[str, tuple[pages.Study, stage_states.States]],
) -> str:
  """Describes the cost of pages; a shared stage counts for the first page.

  Args:
    parts: each page and the states of its stages, by name.
  """
  rows, total, seen = [], Costs(), set()
  for name, (study, states) in parts.items():
    stages_ = {
      x.identity: x for x in states.unfinished if x.identity not in seen
    }
    seen |= stages_.keys()
    trained = [x for x in stages_.values() if x.module == 'train']
    costs = _costs(study, stages_.values(), _steps(study, states, trained))
    total += costs
    rows.append(
      {
        'page': name,
        'stages': str(costs.stages),
        'FLOPs': f'{costs.flops:.3g}',
        'hours': f'{costs.hours:.2f}{"+" if costs.unknown else ""}',
      }
    )
  return f'{score_tables.text(rows)}\n{total.line}'


@dataclasses.dataclass(frozen=True)
class Costs:
  """Cost of stages.

  Attributes:
    stages: number of stages.
    flops: FLOPs of training and held-out losses.
    evaluated: FLOPs of held-out losses alone.
    hours: hours, without unmeasured training steps.
    further_flops: maximum FLOPs of learning rates beyond an edge of a sweep.
    further_hours: maximum hours of these.
    unknown: whether any step is unmeasured.
  """

  stages: int = 0
  flops: float = 0.0
  evaluated: float = 0.0
  hours: float = 0.0
  further_flops: float = 0.0
  further_hours: float = 0.0
  unknown: bool = False

  def __add__(self, other: 'Costs') -> 'Costs':
    values = zip(
      dataclasses.astuple(self), dataclasses.astuple(other), strict=True
    )
    *numbers, unknown = (a + b for a, b in values)
    return Costs(*numbers, bool(unknown))

  @property
  def line(self) -> str:
    """The costs, as a line of text."""
    line = (
      f'{self.stages} stages, {self.flops:.3g} FLOPs'
      f' ({self.evaluated:.2g} of them for held-out losses),'
      f' {self.hours:.2f} hours'
    )
    line += ' and more, as steps are not measured' if self.unknown else ''
    if self.further_flops:
      line += (
        f'; up to {self.further_flops:.3g} FLOPs and {self.further_hours:.2f}'
        ' hours more for learning rates beyond an edge'
      )
    return line


def _costs(
  study: pages.Study,
  chosen: Iterable[stages.Stage],
  steps: Mapping[str, Mapping[str, float]],
) -> Costs:
  total = Costs()
  for stage in chosen:
    # Sweeps and arms train; other stages have their expected times.
    if stage.module != 'train':
      flops = stage.flops if stage.evaluation else 0.0
      total += Costs(1, flops, flops, stage.seconds / 3600)
      continue
    step, runs = steps.get(_shape(study, stage)), _runs(stage)
    hours, further = _hours(stage, step), 0.0
    if runs > 1:
      further = stage.rate.extra / runs
    total += Costs(
      *(1, stage.flops, 0.0, hours),
      *(further * stage.flops, further * hours, step is None),
    )
  return total


def _runs(stage: stages.Stage) -> int:
  return len(stage.rate.values) if stage.rate else 1


def _hours(stage: stages.Stage, step: Mapping[str, float] | None) -> float:
  seconds = step['seconds'] if step else 0.0
  return _runs(stage) * stage.settings.train.steps * seconds / 3600


def _models(
  study: pages.Study,
  passes: text_passes.Passes,
  trained: Sequence[stages.Stage],
  steps: Mapping[str, Mapping[str, float]],
) -> list[dict[str, Any]]:
  """Returns a row per model: sums over its training stages.

  `steps` maps the digest of a shape to the time and memory of a step.
  """
  rows: dict[str, dict[str, Any]] = {}
  for stage in trained:
    step = steps.get(_shape(study, stage))
    train, lengths = stage.settings.train, stage.settings.data.train.lengths
    row = rows.setdefault(
      stage.model,
      {'model': stage.model, 'runs': 0, 'steps': train.steps, 'tokens': ''}
      | {'FLOPs': 0.0, 'passes': passes.describe(stage), 'ms/step': ''}
      | {'memory': '', 'hours': 0.0},
    )
    row['runs'] += _runs(stage)
    row_tokens = lengths.decoder or lengths.encoder
    row['tokens'] = numbers.count(train.steps * train.batch_size * row_tokens)
    row['FLOPs'] += stage.flops
    row['hours'] += _hours(stage, step)
    if step:
      row['ms/step'] = f'{1000 * step["seconds"]:.0f}'
      if 'bytes' in step:
        row['memory'] = disk.format_bytes(step['bytes'])
      row['memory'] += '' if step.get('fits', True) else ', does not fit'
  return list(rows.values())


def _claims(study: pages.Study, states: stage_states.States) -> list[str]:
  lines, origins = [], stages.origins(study, states.stages)
  for claim in study.claims:
    level = claim_results.level(claim, study)
    count = study.planned_seeds(claim)
    text = (
      f'no planned power: no other page has variances of {claim.metric} in'
      ' variances.json (--variances adds those of a finished one)'
    )
    if count < 2:
      text = f'{count} seed: no interval over seeds, no verdict'
    elif power := claim_results.power(claim, study, origins):
      text = power.describe()
    mark = f'primary, level {level:.3g}' if claim.primary else 'no verdict'
    lines.append(f'{claim.sentence} ({mark}): {text}')
  return lines


def _shape(study: pages.Study, stage: stages.Stage) -> str:
  values = {k: v for k, v in stage.values.items() if k.startswith(_SHAPE)}
  text = json.dumps(values, sort_keys=True, default=str) + study.topology
  return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _steps(
  study: pages.Study,
  states: stage_states.States,
  trained: Sequence[stages.Stage],
) -> Mapping[str, Mapping[str, float]]:
  shapes = {_shape(study, x): x.settings for x in trained}
  function = plan if study.topology else measure
  target = study.topology or study.platform
  return plan_results.find(states, _STEPS, shapes, function, target)


def _from_flops(
  study: pages.Study, trained: Sequence[stages.Stage]
) -> Mapping[str, Mapping[str, float]]:
  rate = _CORE * environment.fingerprint()['cores']
  return {
    _shape(study, x): {
      'seconds': x.flops / (_runs(x) * max(x.settings.train.steps, 1) * rate)
    }
    for x in trained
  }


def _job(
  settings: config_lib.Settings, platform: str, mesh: jax.sharding.Mesh
) -> programs.Job:
  """Returns a training step, without its frozen models."""
  frozen = settings.recipe.frozen.items()
  assumed = {name: model.without_path() for name, model in frozen}
  return programs.Job.of('train', settings, platform, mesh, frozen=assumed)


def measure(
  path: str, jobs: Mapping[str, config_lib.Settings], platform: str
) -> None:
  """Adds time and memory of steps to a file, if the platform matches.

  Args:
    path: file of the measurements.
    jobs: configurations by the digest of their shape.
    platform: required platform, '' for any.
  """
  if platform and jax.default_backend() != platform:
    print(f'steps are not measured: the study needs a {platform}')
    return

  def measured(settings):
    cache = settings.compute.compile_cache
    cache = cache or str(paths.at(path).parent / 'compiled')
    mesh = setup.make_mesh(settings.mesh, cache)
    return _time(settings, mesh)

  plan_results.add(path, 'compiling and measuring a step', jobs, measured)


def plan(
  path: str, jobs: Mapping[str, config_lib.Settings], topology: str
) -> None:
  """Adds planned time and memory of steps (`encdec_adapt.plan`) to a file.

  Args:
    path: file of the steps.
    jobs: configurations by the digest of their shape.
    topology: the chips.
  """
  hardware = chips.parse(topology)

  def planned(settings):
    mesh = program_plans.make_mesh(settings, hardware)
    job = _job(settings, hardware.chip.kind, mesh)
    _, estimate = program_plans.choose_and_plan(job, hardware)
    # No roofline if the program does not fit in memory.
    return estimate['roofline'] and {
      'seconds': estimate['roofline']['step_s'],
      'bytes': estimate['memory']['peak'],
      'fits': estimate['fits'],
    }

  plan_results.add(path, 'compiling a step', jobs, planned)


def _time(
  settings: config_lib.Settings, mesh: jax.sharding.Mesh
) -> dict[str, Any]:
  """Compiles a training step and runs it on zeros."""
  job = _job(settings, mesh.devices.flat[0].platform, mesh)
  program = job.program()
  with jax.set_mesh(mesh):
    shapes = program.call(program.arguments)

    def lower(policy):
      return job.with_remat(policy).program().function.lower(*shapes)

    remat, compiled = job.resolved.compute.remat, None
    if remat == execution.AUTO:
      beside = program.beside
      choice = remat_choice.for_job(lower, job.work, shapes, (), beside, print)
      remat, compiled = choice.policy, choice.program
    compiled = compiled or lower(remat).compile()
    state, *others = jax.tree.map(_zeros, shapes)
    memory = compiled.memory_analysis()
    seconds = []
    for _ in range(_REPEATS + 1):
      start = time.perf_counter()
      state, metrics = compiled(state, *others)
      jax.block_until_ready((state, metrics))
      seconds.append(time.perf_counter() - start)
  used = memory.argument_size_in_bytes + memory.temp_size_in_bytes
  return {
    'seconds': min(seconds[1:]),
    'bytes': used,
    **{k: environment.fingerprint()[k] for k in ('device_kind', 'cores')},
  }


def _zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
  if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
    key = jax.random.key(0)  # Dropout has a single key.
    return jax.random.split(key, shape.shape) if shape.shape else key
  return jax.device_put(jnp.zeros(shape.shape, shape.dtype), shape.sharding)
