"""What configurations mean, as stored in table.json.

    python -m tests.golden.test_settings

rewrites the table after an intended change. An entry has digests of shapes and
records, the learning rate and the steps at which something is due; entries of
the saved runs (`jobs`) have the values of their losses on a batch, too.
"""

import dataclasses
import functools
import hashlib
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

from encdec_adapt import config as config_lib
from encdec_adapt import study as study_lib
from encdec_adapt import train
from encdec_adapt.base import saved_keys
from encdec_adapt.cli import command
from encdec_adapt.configs import gemma2, t5
from encdec_adapt.lab import stages
from encdec_adapt.planner import programs
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import placement
from encdec_adapt.training import losses, phases, schedules
from encdec_adapt.training.metrics import held_out_metrics
from tests import tiny
from tests.golden import jobs

FOLDER = pathlib.Path(__file__).parent
SAVED = {path.stem: path for path in sorted(FOLDER.glob('saved/*.json'))}
TOTALS = 7, 97, 1000, 0
SOURCE = f'source={jobs.SMALL}'
# Arguments that the pages, launchers and tests give to files of configs/.
CONFIGURATIONS = (
  'base',
  *(f'quickstart:run={x}' for x in ('decoder_only', 'adapted', 'unbalanced')),
  'quickstart:size=smoke,run=unbalanced',
  'laptop',
  f'laptop:encoder={jobs.SMALL},task=pairs',
  'laptop:vocabulary_size=4096',
  f'pretrained:{SOURCE}',
  f'sft:{SOURCE}',
  f'sft:{SOURCE},format=chat',
  *(f'sft:{SOURCE},meap={x}' for x in ('separate', 'concat', 'inputs')),
  f'sft:{SOURCE},lora=16',
  *(f'post_training:recipe={x},{SOURCE}' for x in ('dpo', 'rloo', 'grpo')),
  f'post_training:recipe=reward,{SOURCE}',
  f'post_training:recipe=distill,{SOURCE},teacher={jobs.SMALL}',
  f'classification:{SOURCE}',
  f'embeddings:{SOURCE}',
  f'embeddings:{SOURCE},lora=4 --config.model.head.projections=(24,16)'
  ' --config.model.head.dimensions=(8,)',
  *(f'presets:objective={x}' for x in ('prefixlm', 'ul2')),
  'presets:encoder=toy',
  'presets:objective=ul2,encoder=llama3.2_1b,decoder=qwen3_0.6b',
  'presets:encoder=gemma3_1b,target=t5gemma2',
  'gemma2:size=s_s,objective=ul2',
  't5:size=mt5_small',
  't5:size=byt5_small',
  *(f'gemma2:{x}' for x in gemma2.SHIPPED),
  *(f't5:{x}' for x in t5.SHIPPED),
)
STUDIES = sorted(
  path.stem
  for path in (tiny.ROOT / 'configs' / 'studies').glob('*.py')
  if 'def get_study' in path.read_text() and path.stem != 'post_training'
)


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
  monkeypatch.chdir(tiny.ROOT)


def read_configuration(spec: str) -> config_lib.Settings:
  """The settings of FILE:ARG of configs/, with flags behind it."""
  values = command.parse(train.define_flags, f'--config={spec}'.split())
  return config_lib.load(values.config, sources=False)


def read_saved(name: str) -> config_lib.Settings:
  """The settings of a saved run, without the models that it read."""
  content = saved_keys.translate(json.loads(SAVED[name].read_text()))
  content.pop('made_by', None)
  content['teacher']['checkpoint'] = ''
  return config_lib.load(ml_collections.ConfigDict(content), sources=False)


def describe_study(name: str) -> dict[str, str]:
  """Digests of a study's stages of training, by name."""
  resolved = stages.resolve(study_lib.load(f'configs/studies/{name}.py'))
  jobs = {x: s.settings for x, s in resolved.items() if s.settings}
  return {x: digest(describe(settings)) for x, settings in jobs.items()}


def digest(value) -> str:
  text = json.dumps(value, sort_keys=True, default=str)
  return hashlib.sha256(text.encode()).hexdigest()[:12]


def describe(settings: config_lib.Settings) -> dict:
  """Returns what a configuration decides, without names of classes."""
  data, steps = settings.data, settings.train.steps
  schedule = settings.optimizer.schedule
  rate = schedules.make_schedule(schedule, steps)
  points = 0, 1, schedule.warmup(steps), steps // 2, max(steps - 1, 0)
  specs = {x: getattr(data, x) for x in ('train', 'evaluation')}
  return {
    'kind': settings.model.architecture.name,
    'records': digest({x: dataclasses.asdict(s) for x, s in specs.items()}),
    'rates': [f'{rate(step, step):.6g}' for step in points],
    'due': {str(total): step_intervals(settings, total) for total in TOTALS},
    'programs': digest(shapes(settings)),
  }


def step_intervals(settings: config_lib.Settings, total: int) -> list:
  """Steps between evaluators and saves of a job of so many steps."""
  intervals = settings.evaluation.intervals(total)
  saves = settings.checkpoint.interval(total)
  return [dict(sorted(intervals.items())), saves]


def job_of(settings: config_lib.Settings, name: str = 'train') -> programs.Job:
  # Of the shape that the recipe assumes, as the teacher's files are not here.
  frozen = {
    name: dataclasses.replace(model, path='')
    for name, model in settings.recipe.frozen.items()
  }
  if settings.compute.dtype == 'auto':  # The same on every CPU.
    compute = dataclasses.replace(settings.compute, dtype='bfloat16')
    settings = dataclasses.replace(settings, compute=compute)
  mesh = mesh_lib.make_mesh(mesh_lib.MeshConfig(), jax.devices()[:1])
  return programs.Job.of(name, settings, 'cpu', mesh, frozen=frozen)


def shapes(settings: config_lib.Settings) -> dict:
  """Arguments of a job's programs, and the groups that train."""
  names = 'train', 'eval', *['sample'] * (settings.recipe.sampling is not None)
  result = {}
  for name in names:
    arguments = job_of(settings, name).program().arguments
    leaves = jax.tree_util.tree_leaves_with_path(arguments)
    result[name] = sorted(
      [placement.path_string(path), x.shape, str(x.dtype)] for path, x in leaves
    )
  job = job_of(settings)
  groups = phases.Phases(
    job.placed_model, job.recipe, settings.optimizer, settings.train
  ).groups
  result['groups'] = [dataclasses.asdict(group) for group in groups]
  result['frozen'] = sorted(job.references)
  return result


def values(settings: config_lib.Settings) -> dict:
  """Values of the loss on a batch of two rows, and the gradient's norm."""
  train = dataclasses.replace(settings.train, batch_size=2, microbatches=1)
  job = job_of(dataclasses.replace(settings, train=train))
  loss, metrics = job.recipe.loss, job.recipe.metrics
  device_model = job.placed_model
  arguments = job.program().arguments
  params, base, *frozen = (
    random_tree(tree, seed)
    for seed, tree in enumerate(
      [arguments['parameters'], arguments.get('base', {})]
      + [x.abstract_params() for x in job.placed_references.values()]
    )
  )
  models = [x.model for x in job.placed_references.values()]
  references = {
    name: losses.loss.Frozen(*pair)
    for name, *pair in zip(job.references, models, frozen, strict=True)
  }
  batch = fill(arguments['batch'], settings.model)

  divisors = losses.loss.divisors_of(loss, batch)

  def objective(params):
    model_params = device_model.attach(base, params)
    terms = losses.loss.sums(
      loss, device_model.model, model_params, batch, references
    )
    return loss.objective(terms, divisors), terms

  (total, terms), grads = jax.value_and_grad(objective, has_aux=True)(params)
  squares = [jnp.sum(jnp.square(x)) for x in jax.tree.leaves(grads)]
  held_out = fill(
    job_of(settings, 'eval').program().arguments['batch'], settings.model
  )
  ratios = held_out_metrics.ratios(
    metrics,
    device_model.model,
    device_model.attach(base, params),
    held_out,
    references,
  )
  numbers = {'objective': total, 'gradient': math.sqrt(sum(squares))}
  numbers |= {f'term {x}': value for x, value in terms.items()}
  numbers |= {f'divisor {x}': value for x, value in divisors.items()}
  for name, ratio in zip(metrics.names, ratios, strict=True):
    numbers[f'held-out {name}'] = jnp.sum(ratio[0]) / jnp.sum(ratio[1])
  return {name: float(value) for name, value in numbers.items()}


def random_tree(tree, seed: int):
  """Small random numbers in the place of shapes, the same on every run."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  arrays = []
  for path, leaf in leaves:
    key = f'{seed} {placement.path_string(path)}'.encode()
    rng = np.random.default_rng(list(hashlib.sha256(key).digest()[:8]))
    if jnp.issubdtype(leaf.dtype, jnp.floating):
      array = 0.1 * rng.standard_normal(leaf.shape)
    else:
      array = rng.integers(0, 100, leaf.shape)
    arrays.append(jnp.asarray(array, leaf.dtype))
  return jax.tree.unflatten(jax.tree.structure(tree), arrays)


def fill(fields, model):
  """A batch of rows of one example each, the same on every run."""
  batch = {}
  for name, field in fields.items():
    rng = np.random.default_rng(len(name) * 100 + sum(map(ord, name)))
    if name.endswith('segments'):
      value = np.ones(field.shape)
    elif name.endswith(('positions', 'index')):
      value = np.broadcast_to(np.arange(field.shape[-1]), field.shape)
    elif jnp.issubdtype(field.dtype, jnp.integer):
      top = max(2, min(model.decoder.head.outputs(2**31) or 2**31, 200))
      value = rng.integers(0, top, field.shape)
    else:
      value = rng.uniform(0.1, 1.0, field.shape)
    batch[name] = jnp.asarray(value, field.dtype)
  return batch


@functools.cache
def table() -> dict:
  return json.loads((FOLDER / 'table.json').read_text())


@pytest.mark.parametrize(
  'spec',
  [
    pytest.param(x, marks=[pytest.mark.long] * ('topology=' in x))
    for x in CONFIGURATIONS
  ],
)
def test_a_configuration_means_what_it_did(spec):
  assert describe(read_configuration(spec)) == table()[spec]


@pytest.mark.long
@pytest.mark.parametrize('name', SAVED)
def test_a_saved_run_means_what_it_did(name):
  settings, stored = read_saved(name), dict(table()[f'saved {name}'])
  # CPUs differ in the order of sums, and int8 amplifies the difference.
  rounds = {'gradient': 2e-2} if name == 'lora_over_int8' else {}
  assert values(settings) == {
    key: pytest.approx(x, rel=rounds.get(key, 2e-5), abs=1e-6)
    for key, x in stored.pop('values').items()
  }
  assert describe(settings) == stored


@pytest.mark.long
@pytest.mark.parametrize(
  'name', tiny.slow_except(['adaptation', 'tuning', 'understanding'], STUDIES)
)
def test_the_arms_of_a_study_mean_what_they_did(name):
  assert describe_study(name) == table()[f'study {name}']


def test_every_kind_of_job_has_a_saved_run():
  assert SAVED.keys() == jobs.JOBS.keys()


def main() -> None:
  entries = {x: describe(read_configuration(x)) for x in CONFIGURATIONS}
  for name in SAVED:
    settings = read_saved(name)
    entry = describe(settings) | {'values': values(settings)}
    entries[f'saved {name}'] = entry
  for name in STUDIES:
    entries[f'study {name}'] = describe_study(name)
  text = json.dumps(entries, indent=1, sort_keys=True)
  (FOLDER / 'table.json').write_text(text + '\n')


if __name__ == '__main__':
  main()
