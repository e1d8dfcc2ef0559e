"""`train --print_config` and `--dry_run`, which run no job."""

import functools
import re

import pytest

from encdec_adapt import train
from tests import tiny

pytestmark = pytest.mark.e2e
_train = functools.partial(tiny.call, train)
GEMMA = (
  '--config=configs/gemma2.py:size=2b_2b,objective=ul2',
  '--config.init.encoder=a',
  '--config.mesh.fsdp=8',
)


def test_print_config_shows_what_flags_have_changed(capsys):
  assert _train(*GEMMA, '--print_config') == 0
  shown = capsys.readouterr().out
  assert re.search(r"^config.data.objective = 'ul2'$", shown, re.MULTILINE)
  assert re.search(r"^config.init.encoder = 'a'$", shown, re.MULTILINE)
  assert re.search(r'^config.mesh.fsdp = 8$', shown, re.MULTILINE)
  assert 'config.loss.dpo' not in shown and 'rollouts.' not in shown
  assert _train(*GEMMA, '--print_config=all') == 0
  shown = capsys.readouterr().out
  assert 'config.loss.dpo.beta' in shown and 'rollouts.samples' in shown


def test_dry_run_counts_the_parameters_of_a_released_pair(capsys):
  assert _train(*GEMMA, '--dry_run') == 0
  shown = capsys.readouterr().out
  # Those of the pair less its two tables, and the tables.
  encoder, decoder, table = 2_024_517_888, 2_392_687_872, 589_824_000
  assert f'encoder: {encoder + table:,} parameters' in shown
  assert f'decoder: {decoder + table:,} parameters' in shown
  # fp32 on each of eight devices.
  parameters = (encoder + decoder + 2 * table) * 4 / 8 / 2**30
  found = re.search(r'^  parameters +([\d.]+) GiB', shown, re.MULTILINE)
  assert float(found.group(1)) == pytest.approx(parameters, abs=0.06)
  assert 'decoder/blocks/layer_0/cross_attention/key' in shown
  assert 'sources: a does not exist' in shown
  assert 'without activations' in shown


_DPO = (
  '--config.loss.kind=dpo',
  '--config.loss.distill.share=1',
  '--config.data.objective=preferences',
  '--config.data.source=preferences:x#p,c,r',
)


@pytest.mark.parametrize(
  'given, problem, shape, loss',
  [
    ('', 'is not given', 'decoder', ['--config.loss.kind=distill']),
    ('', 'is not given', 'model', _DPO),
    ('runs/nobody', 'does not exist', 'model', _DPO),
  ],
)
def test_dry_run_needs_no_source_and_no_teacher(
  capsys, given, problem, shape, loss
):
  flags = [
    '--config=configs/quickstart.py:size=smoke,run=unbalanced',
    f'--config.teacher.checkpoint={given}',
    f'--config.init.encoder={given}',
    '--config.train.batch_size=64',
    *loss,
  ]
  assert _train(*flags, '--dry_run') == 0
  shown = capsys.readouterr().out
  name = '(config.)?{}' if not given else given
  teacher, source = map(name.format, ('teacher.checkpoint', 'init.encoder'))
  assert re.search(
    f"{teacher} {problem}: a teacher of the {shape}'s shape is", shown
  )
  assert re.search(f'sources: {source} {problem}', shown)
  assert re.search(r'without activations.*encdec_adapt\.plan', shown)


def test_dry_run_counts_a_reward_model_that_is_not_there(capsys):
  flags = [
    '--config=configs/quickstart.py:size=smoke,run=unbalanced',
    '--config.train.batch_size=64',
    '--config.loss.kind=rloo',
    '--config.loss.distill.share=1',
    '--config.train.rewards.models=runs/nobody',
    '--config.data.objective=pairs',
    '--config.data.source=pairs:x#a,b',
  ]
  assert _train(*flags, '--dry_run') == 0
  shown = capsys.readouterr().out
  assert 'runs/nobody does not exist: a reward model of the policy' in shown
  assert re.search('^  reward model 1 +[0-9]', shown, re.MULTILINE)
