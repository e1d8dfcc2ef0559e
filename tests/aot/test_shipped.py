"""Plans that the repository ships: they fit, and come out the same again."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

from configs import gemma2
from encdec_adapt import config as config_lib
from encdec_adapt import plan
from encdec_adapt.cli import command
from encdec_adapt.planning import calibration, chips, search, shapes, stored
from encdec_adapt.sharding import mesh as mesh_lib
from tests import tiny

FOLDER = tiny.ROOT / 'configs' / 'plans'
PATHS = sorted(FOLDER.glob('*.json'))
needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec('libtpu') is None,
  reason="libtpu is not installed: pip install -e '.[tpu]'",
)


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
  monkeypatch.chdir(tiny.ROOT)


def test_every_planned_configuration_has_its_plan():
  found = [json.loads(path.read_text())['config'] for path in PATHS]
  wanted = [f'configs/gemma2.py:{argument}' for argument in gemma2.PLANNED]
  assert sorted(found) == sorted(wanted)


@pytest.mark.parametrize('path', PATHS, ids=lambda path: path.stem)
def test_a_shipped_plan_fits(path):
  written = json.loads(path.read_text())
  assert written['program'] == 'train' and written['source'] == 'compiled'
  assert all(plan['fits'] for plan in stored.programs(written).values())
  memory = written['memory']
  where = chips.parse(written['topology'], written['num_slices'])
  assert memory['peak'] <= memory['budget'] == where.chip.hbm_bytes
  assert not written['replicated']
  # Of gradients only those are summed whole of kernels of attention of which a
  # chip has no multiple of 16 rows: most in 9B among 64 chips.
  whole, scattered = sums(written)
  assert whole < 0.7 * scattered
  values = command.parse(plan.define_flags, stored.flags(written, ['train']))
  settings = config_lib.load(values.config, sources=False)
  assert settings.mesh.sizes(where.devices)
  # The configuration still says what was compiled.
  assert stored.setup(settings) == written['job']


def test_the_readme_has_the_tables():
  table = stored.markdown(stored.read(str(FOLDER)))
  readme = (tiny.ROOT / 'README.md').read_text()
  assert table in readme
  assert calibration.text(calibration.table()) in readme


def test_estimates_of_published_runs_are_within_ten_points():
  rows = {row['name']: row for row in calibration.table()}
  assert set(rows) == set(calibration.RUNS)
  for name, row in rows.items():
    assert row['published'] == calibration.RUNS[name].mfu
    assert row['config'] == calibration.RUNS[name].config
    assert abs(row['estimated'] - row['published']) < 0.10, name


@needs_libtpu
@pytest.mark.aot
@pytest.mark.parametrize('path', PATHS, ids=lambda path: path.stem)
def test_an_estimate_by_shapes_is_near_what_was_compiled(path):
  written = json.loads(path.read_text())
  where = chips.parse(written['topology'], written['num_slices'])
  values = command.parse(plan.define_flags, stored.flags(written, ['train']))
  settings = config_lib.load(values.config, sources=False)
  mesh = mesh_lib.make_mesh(settings.mesh, plan.describe_devices(where))
  budget = where.chip.hbm_bytes
  found = shapes.describe('train', settings, mesh, where, budget)
  ratio = found['memory']['peak'] / written['memory']['peak']
  # A search may compile in vain what is estimated as too small, but must not
  # leave out what would fit.
  assert 0.87 < ratio < search.DOUBT
  assert found['fits']


def sums(plan):
  """Bytes that a chip sends to sum whole, and by parts, among all of fsdp."""
  return [
    sum(
      row['bytes']
      for row in plan['collectives']
      if row['kind'] == kind and 'fsdp' in row['axes']
    )
    for kind in ('all-reduce', 'reduce-scatter')
  ]


def small(size, width):
  """Flags of a pair's shapes, small: what divides and what overlaps stays."""
  shape = {
    'layers': 4,
    'width': width,
    'mlp_width': 2 * width,
    'heads': width // 128,
    'kv_heads': width // 128,
    'head_dim': 128,
    'vocab_size': 8192,
  }
  encoder, decoder = size.split('_')
  wider = {} if encoder == decoder else {'width': 2 * width}
  for side, changed in (('encoder', shape | wider), ('decoder', shape)):
    for key, value in changed.items():
      yield f'--config.model.{side}.{key}={value}'


def run(output, flags):
  done = subprocess.run(
    [sys.executable, '-m', 'encdec_adapt.plan', *flags, f'--output={output}'],
    capture_output=True,
    text=True,
    cwd=tiny.ROOT,
    env=tiny.environment(),
    timeout=3600,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return json.loads(pathlib.Path(output).read_text())


@needs_libtpu
@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize('path', PATHS, ids=lambda path: path.stem)
def test_a_shipped_plan_comes_out_again(path, tmp_path):
  before = json.loads(path.read_text())
  now = run(
    tmp_path / 'plan.json', stored.flags(before, stored.programs(before))
  )
  assert now['memory']['peak'] == pytest.approx(
    before['memory']['peak'], rel=0.02
  )
  assert now['flops'] == pytest.approx(before['flops'], rel=0.01)
  assert now['mfu'] == pytest.approx(before['mfu'], rel=0.03)


@needs_libtpu
@pytest.mark.aot
@pytest.mark.long
@pytest.mark.parametrize('argument', gemma2.PLANNED)
def test_a_small_model_of_every_recipe_compiles(argument, tmp_path):
  asked = dict(item.split('=') for item in argument.split(','))
  topology, slices = asked['topology'], int(asked.get('slices', 1))
  where = chips.parse(topology, slices)
  flags = [
    f'--config=configs/gemma2.py:{argument}',
    f'--topology={topology}',
    f'--num_slices={slices}',
    f'--config.train.batch_size={2 * where.devices}',
    '--config.train.microbatches=2',
    '--config.data.encoder_length=128',
    '--config.data.decoder_length=128',
  ]
  # A chip's part of a weight is 16 rows: of less, kernels of attention are not
  # scattered.
  width = max(256, 16 * gemma2.get_config(argument).mesh.fsdp)
  flags += small(asked['size'], width)
  found = run(tmp_path / 'plan.json', flags)
  assert found['fits'] and found['kernels'] and 0 < found['mfu'] < 1
  # Gradients of what the layers' products read, which are most of what is
  # summed, are scattered, never summed whole.
  whole, scattered = sums(found)
  assert whole < 0.5 * scattered
  # Parameters are gathered inside a slice, gradients summed between slices.
  axes = {row['axes'] for row in found['collectives']}
  assert 'fsdp' in axes and ('slices' in axes) == (slices > 1)
