"""Policies from the command line: rewards rise, budgets and errors end jobs."""

import gc
import json
import shutil

import jax
import pytest

from encdec_adapt import train as train_lib
from encdec_adapt.checkpoints import manager
from encdec_adapt.stored import model_on_disk
from encdec_adapt.telemetry import metrics, profiling
from encdec_adapt.training import remat_choice
from encdec_adapt.training.jobs import policy_batches
from tests import accelerator, tiny
from tests.e2e import folders

REWARD = """
def vowels(prompts, completions, fields):
  assert {f['kind'] for f in fields} <= {'a', 'b'}
  assert all(f['target'].startswith(' value') for f in fields)
  assert all(p.startswith('The name') for p in prompts)
  return [sum(c in 'aeiou' for c in x) / (1 + len(x)) for x in completions]
"""


def _records(workdir, kind):
  return [x for x in metrics.read_metrics(workdir) if x['kind'] == kind]


@pytest.fixture(scope='module')
def flags(tmp_path_factory):
  folder = tmp_path_factory.mktemp('policies')
  (folder / 'mine.py').write_text(REWARD)
  lines = [
    {'q': f'The name of number {i} is', 'a': f' value_{i}', 'kind': 'ab'[i % 2]}
    for i in range(120)
  ]
  file = folder / 'pairs.jsonl'
  file.write_text('\n'.join(map(json.dumps, lines)))
  return [
    f'--config=configs/sft.py:source={tiny.ROOT}/configs/decoders/small',
    '--config.loss.kind=rloo',
    '--config.loss.rloo.beta=0.01',
    f'--config.data.source=pairs:{file}#q,a,kind',
    f'--config.data.folder={folder}/records',
    '--config.data.encoder_length=16',
    '--config.data.decoder_length=16',
    '--config.data.eval_fraction=0.2',
    '--config.data.workers=1',
    f'--config.train.rewards.functions={folder}/mine.py#vowels',
    '--config.train.rollouts.samples=4',
    '--config.train.rollouts.tokens=8',
    '--config.train.batch_size=8',
    '--config.train.eval_batch_size=8',
    '--config.train.log_every=5',
    '--config.train.steps=15',
    '--config.evaluation.loss=15',
    '--config.evaluation.samples=0',
    '--config.checkpoint.every=5',
    '--config.checkpoint.keep_best=False',
    '--config.optimizer.schedule=constant',
    '--config.optimizer.warmup_steps=0',
    '--config.optimizer.learning_rate=1e-3',
    f'--config.compute.compile_cache={folder}/compiled',
  ]


@pytest.mark.long
@pytest.mark.e2e
def test_a_policy_learns_from_a_reward_of_the_user(
  tmp_path, flags, monkeypatch
):
  compiled, seen = [], []
  jax.monitoring.register_event_duration_secs_listener(
    lambda name, *_, **__: (
      compiled.append(name)
      if name.endswith('backend_compile_duration')
      else None
    )
  )
  call = policy_batches.PolicyBatches.next
  monkeypatch.setattr(
    policy_batches.PolicyBatches,
    'next',
    lambda *args: seen.append(len(compiled)) or call(*args),
  )
  workdir = tmp_path / 'run'
  assert tiny.call(train_lib, *flags, f'--workdir={workdir}') == 0
  # Two for the first step: its update, and eager operations.
  assert seen[1] > seen[0] and seen[2] == seen[-1], seen
  steps, evaluations = _records(workdir, 'train'), _records(workdir, 'eval')
  assert evaluations[-1]['reward'] > evaluations[0]['reward'] + 0.1
  assert evaluations[-1]['sampled_reward'] > evaluations[0]['sampled_reward']
  assert steps[0]['kl'] == pytest.approx(0, abs=1e-4)
  assert steps[-1]['kl'] > 0.1
  # Sampler and trainer agree to rounding of bfloat16 (at most 7e-4 measured).
  assert all(step['gap'] < 5e-3 for step in steps)
  shares = 'cut_short', 'without_spread', 'distinct', 'padding'
  assert all(0 <= step[name] <= 1 for step in steps for name in shares)
  assert steps[0]['length'] * 32 == steps[0]['sampled_tokens']
  # Ends are counted, once.
  assert steps[0]['weight'] == steps[0]['sampled_tokens']
  assert steps[0]['reward/vowels'] == steps[0]['reward']
  times = _records(workdir, 'time')[-1]
  for name in ('sample', 'reward', 'update'):
    assert times[f'sampled_tokens_per_second/{name}'] > 0
  job = _records(workdir, 'job')[-1]
  assert 0 < job['share/reward'] < job['share/sample'] < 1
  lines = (workdir / policy_batches.FILE).read_text().splitlines()
  lines = [json.loads(line) for line in lines]
  assert [(x['split'], x['step']) for x in lines[::8]] == [
    ('eval', 0),
    *(('train', step) for step in (5, 10, 15)),
    ('eval', 15),
  ]
  assert [x['greedy'] for x in lines[:8]] == [True, False, False, False] * 2
  assert {x['row'] for x in lines[:8]} == {0, 1}
  # So that no two lines are equal, of which a resumed job would drop one.
  assert [x['sample'] for x in lines[:8]] == [*range(4)] * 2
  group = [x['advantage'] for x in lines[8:12]]
  assert sum(group) == pytest.approx(0, abs=1e-6)
  assert 'The name of number' in lines[0]['prompt']


@pytest.mark.long
@pytest.mark.e2e
def test_lines_of_a_policy_have_a_kl_to_its_start(tmp_path, flags, capsys):
  """Without a KL in the loss, evaluations read it."""
  flags = [x for x in flags if 'rloo' not in x]
  more = ('--config.loss.kind=grpo', '--config.train.steps=6')
  more += ('--config.evaluation.loss=3', '--config.train.log_every=3')
  run = tmp_path / 'run'
  assert tiny.call(train_lib, *flags, *more, f'--workdir={run}') == 0
  assert not any('kl' in x for x in _records(run, 'train'))
  first, *_, last = _records(run, 'eval')
  assert first['kl'] == pytest.approx(0, abs=1e-4) and last['kl'] > 0.1
  assert 1 <= last['length'] <= 8 and last['entropy'] > 0
  lines = capsys.readouterr().out.splitlines()
  (line,) = (x for x in lines if x.startswith('step 6/6'))
  names = [x.split()[0] for x in line.split('  ')[1:6]]
  assert names == ['reward', 'kl', 'length', 'entropy', 'grad']
  assert '(held-out, step 3)' in line
  shown = {x: [first[x], last[x]] for x in names[:4]}
  summary = folders.read(run / 'summary.json')
  for name, ends in shown.items():
    assert [summary[f'eval_{name}{x}'] for x in ('_at_step_0', '')] == ends
  texts = [f'{x} {a:.4g} -> {b:.4g}' for x, (a, b) in shown.items()]
  (line,) = (x for x in lines if x.startswith(f'{run}: 6 steps'))
  assert f' held-out {", ".join(texts)}, ' in line


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.parametrize('loss', ['rloo', 'grpo'])
def test_an_update_finds_in_memory_what_was_counted(
  tmp_path, flags, loss, monkeypatch
):
  # The choice of `compute.remat` counts no caches: none last until the update.
  # A step of rloo reads the reference; of grpo, the evaluations alone do.
  def in_use():
    gc.collect()
    shards = [s for x in jax.live_arrays() for s in x.addressable_shards]
    here = [s.data for s in shards if s.device == jax.devices()[0]]
    return sum({x.unsafe_buffer_pointer(): x.nbytes for x in here}.values())

  counted, found = [], []
  estimates, begin = remat_choice.estimates, profiling.Profiler.begin_step
  compile_trial = remat_choice.compile_trial

  def estimated(work, held, *rest):
    counted.append(held)
    return estimates(work, held, *rest)

  def tried(*args):
    trial = compile_trial(*args)
    counted.append(trial.bytes)
    return trial

  def began(*args):
    found.append(in_use())
    return begin(*args)

  accelerator.stand_in(lambda: 2**30, monkeypatch.setattr, in_use)
  monkeypatch.setattr(remat_choice, 'estimates', estimated)
  monkeypatch.setattr(remat_choice, 'compile_trial', tried)
  monkeypatch.setattr(profiling.Profiler, 'begin_step', began)
  more = '--config.train.steps=4', '--config.evaluation.loss=2'
  more += (f'--config.loss.kind={loss}',)
  flags = [x for x in flags if loss == 'rloo' or 'rloo' not in x]
  assert tiny.call(train_lib, *flags, *more, f'--workdir={tmp_path}/run') == 0
  assert len(found) == 4 and len(counted) == 2
  # Metrics of the step before and keys are a few bytes more.
  assert max(found) < 1.005 * min(counted)


@pytest.mark.long
@pytest.mark.e2e
def test_adapters_are_a_policy_over_their_base(tmp_path, flags):
  workdir = tmp_path / 'run'
  lora = '--config.train.lora.rank=4', '--config.train.lora.base=int8'
  adapters = *lora, '--config.train.steps=5'
  more = (
    '--config.optimizer.learning_rate=1e-2',
    '--config.compute.dtype=float32',
  )
  command = [*flags, *adapters, *more, f'--workdir={workdir}']
  assert tiny.call(train_lib, *command) == 0
  steps = _records(workdir, 'train')
  # At first the policy is its reference, the base without adapters.
  assert steps[0]['kl'] == pytest.approx(0, abs=1e-6) and steps[-1]['kl'] > 0.1
  # The sampler reads the adapters of each step.
  assert all(step['gap'] < 1e-4 for step in steps)
  arrays = manager.open_latest(workdir).open_state().arrays
  params = [x for x in arrays if x.startswith('params/')]
  assert params and all('lora_' in x for x in params)


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.parametrize('keep_best', tiny.slow_except([True], [False, True]))
def test_a_budget_of_kl_ends_the_job(tmp_path, flags, keep_best):
  """At the last save within it, also where the job is started again."""
  run = tmp_path / 'run'
  flags = [
    *flags,
    '--config.train.rollouts.max_kl=0.1',
    '--config.checkpoint.every=1',
    f'--config.checkpoint.keep_best={keep_best}',
    '--config.optimizer.learning_rate=1e-4',
    f'--workdir={run}',
  ]
  texts = []
  for _ in range(2):
    done = tiny.run('train', *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    texts.append(next(x for x in done.stdout.splitlines() if 'commands' in x))
    opened = model_on_disk.open_model(run).step
    assert texts[-1].endswith(f' commands open the save of step {opened}')
    assert folders.read(run / 'summary.json')['steps'] == opened
    kl = [x['kl'] for x in _records(run, 'train')]
    assert len(kl) < 15 and kl[-1] > 0.1 >= max(kl[:-1])
    # The policy of the step before is over the budget: the save before is not.
    assert manager.open_latest(run).step == len(kl) - 2
    assert keep_best or opened == len(kl) - 2
  assert f'resuming at step {len(kl) - 2}' in done.stdout
  assert texts[0] == texts[1]


@pytest.mark.long
@pytest.mark.e2e
def test_a_budget_that_the_start_is_over_is_refused(tmp_path, flags):
  reference = f'{tiny.ROOT}/configs/decoders/base'
  flags = [
    *flags,
    f'--config.teacher.checkpoint={reference}',
    '--config.train.rollouts.max_kl=0.1',
    f'--workdir={tmp_path}/run',
  ]
  with pytest.raises(ValueError, match=r'at step 0 is above .*\(0.1\)'):
    tiny.call(train_lib, *flags)


@pytest.mark.e2e
@pytest.mark.parametrize('kind', ['grpo', 'rloo'])
def test_completions_longer_than_the_model_are_refused(tmp_path, flags, kind):
  folder = tiny.ROOT / 'configs' / 'decoders' / 'small'
  file = shutil.copytree(folder, tmp_path / 'small') / 'config.json'
  limit = '{"max_position_embeddings": 64,'
  file.write_text(file.read_text().replace('{', limit, 1))
  flags = [f'--config=configs/sft.py:source={tmp_path}/small', *flags[1:]]
  flags += [f'--config.loss.kind={kind}', '--config.loss.rloo.beta=0.05']
  flags += [f'--workdir={tmp_path}/run']
  message = 'small has 64 positions .* read 65: .*rollouts.tokens .49.'
  with pytest.raises(ValueError, match=message):
    tiny.call(train_lib, *flags, '--config.train.rollouts.tokens=49')


@pytest.mark.e2e
@pytest.mark.parametrize(
  'changes, message',
  [
    (['train.rewards.code=1'], 'give --allow_code'),
    (
      ['train.rewards.code=1', '--allow_code'],
      "reads the field 'tests'; rows of",
    ),
    (
      ['loss.kind=cross_entropy', 'loss.rloo.beta=0.05'],
      'train.rollouts.samples is 4, which is not read',
    ),
    (
      ['train.rollouts.max_kl=1', 'checkpoint.keep=1'],
      'config.checkpoint.keep is 1 with config.train.rollouts.max_kl',
    ),
    (['train.rollouts.samples=1'], 'samples is 1'),
  ],
)
def test_bad_input(tmp_path, flags, capsys, changes, message):
  changes = [x if x[:2] == '--' else f'--config.{x}' for x in changes]
  with pytest.raises(ValueError, match=message):
    tiny.call(train_lib, *flags, *changes, f'--workdir={tmp_path}/run')
