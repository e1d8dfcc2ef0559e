"""The command for GPUs, whose programs cannot be compiled everywhere."""

import json
import subprocess
import sys

import pytest

from encdec_adapt import plan
from encdec_adapt.cli import errors
from encdec_adapt.planning import calibration, chips, stored
from tests import tiny
from tests.planning import toy

# Of every program, null where unknown.
FLAGS = [
  '--config=configs/presets.py:encoder=toy',
  '--config.data.encoder_length=64',
  '--config.data.decoder_length=64',
  '--config.train.batch_size=64',
  '--topology=h100:16',
]


def run(*flags):
  return subprocess.run(
    [sys.executable, '-m', 'encdec_adapt.plan', *FLAGS, *flags],
    capture_output=True,
    text=True,
    cwd=tiny.ROOT,
    env=tiny.environment(),
    timeout=300,
  )


def test_a_plan_from_shapes_says_so(tmp_path):
  output = tmp_path / 'plan.json'
  done = run(
    f'--output={output}',
    '--config.mesh.replica=2',
    '--programs=train,eval,decode',
  )
  assert done.returncode == 0, done.stderr
  assert 'h100:16 x 1: 16 chips' in done.stdout
  assert 'from shapes alone: nothing was compiled' in done.stdout
  assert 'Llama 2 7B, H100 x 8' in done.stdout
  written = json.loads(output.read_text())
  assert written['overrides']['mesh.replica'] == 2
  assert written['program'] == 'train'
  assert set(written['others']) == {'eval', 'decode'}
  for one in stored.programs(written).values():
    assert one['source'] == 'shapes' and 0 < one['mfu'] < 1
    assert toy.KEYS < set(one)
    assert one['kernels'] == [] and one['compile_s'] is None
  assert written['calibration'] == calibration.table()
  table = run(f'--table={tmp_path}')
  assert table.returncode == 0, table.stderr
  rows = [r for r in table.stdout.splitlines() if 'h100:16' in r]
  for row, of in zip(rows, ('', ', eval', ', decode'), strict=True):
    assert row.startswith(f'| `encoder=toy`{of} | h100:16 |')
    assert row.endswith('- |')


def test_over_the_budget_it_says_what_would_fit():
  done = run('--hbm_gib=0.02', '--config.compute.remat=none')
  assert done.returncode == plan.DOES_NOT_FIT, done.stdout + done.stderr
  assert 'DOES NOT FIT' in done.stdout
  assert 'would fit by shapes: --config.mesh.replica=' in done.stdout


def test_a_search_ranks_what_fits(tmp_path):
  output = tmp_path / 'search.json'
  done = run('--search=4', f'--output={output}')
  assert done.returncode == 0, done.stdout + done.stderr
  assert calibration.text(calibration.table()) in done.stdout
  written = json.loads(output.read_text())
  assert written['calibration'] == calibration.table()
  rows = written['candidates']
  assert len(rows) == 4
  assert all(row['plan']['fits'] and row['flags'] for row in rows)
  assert all(toy.KEYS < set(row['plan']) for row in rows)


def test_a_search_finds_what_is_slower_but_fits(tmp_path):
  output = tmp_path / 'search.json'
  done = run('--search=4', '--hbm_gib=0.011', f'--output={output}')
  assert done.returncode == 0, done.stdout + done.stderr
  rows = json.loads(output.read_text())['candidates']
  assert rows and all(row['plan']['fits'] for row in rows)


@pytest.mark.parametrize(
  'flags, words',
  [
    (['--config.compute.attention=splash'], 'can run chunked, reference, tri'),
    (['--programs=serve'], 'serve is not known; choose of train, eval, dec'),
    (['--search=2', '--hbm_gib=0.0001'], 'nothing fits into h100:16'),
    (['--table=nowhere'], '--table=nowhere has no plans'),
  ],
)
def test_bad_questions(flags, words):
  done = run(*flags)
  assert done.returncode == 2, done.stdout + done.stderr
  assert words in done.stderr


def test_no_program_is_refused():
  asked = [f'--config={tiny.ROOT}/configs/base.py', '--topology=h100:8']
  words = '--programs= names none; choose of train, eval, decode'
  with pytest.raises(errors.UserError, match=words):
    tiny.call(plan, *asked, '--programs=')


@pytest.mark.parametrize(
  'flags, words',
  [
    (['--output=file/plan.json'], 'file cannot be written'),
    (['--output=.'], '--output=. cannot be written .it is a folder'),
    (['--output=x', '--sharding'], '--output=x gets nothing of --sharding'),
    (['--output=x', '--table=y'], 'gets nothing of --table'),
    (['--search', '--sharding'], '--search=6 .* --sharding asks for'),
    (['--search=2', '--programs=eval'], '--search=2 .* --programs asks for'),
    (['--output=x', '--calibrate=all'], 'gets nothing of --calibrate'),
    (['--calibrate=H100,Lama'], '--calibrate=Lama .* Llama 2 7B, H100 x 8'),
  ],
)
def test_what_would_be_lost_is_refused_before_anything_is_planned(
  flags, words, tmp_path, monkeypatch
):
  def planned(*_):
    raise AssertionError('something is planned')

  monkeypatch.chdir(tmp_path)
  (tmp_path / 'file').write_text('')
  for module, name in ((chips, 'parse'), (stored, 'read')):
    monkeypatch.setattr(module, name, planned)
  asked = [f'--config={tiny.ROOT}/configs/base.py', '--topology=h100:8']
  with pytest.raises(errors.UserError, match=words):
    tiny.call(plan, *asked, *flags)
