"""Runs of adapters: checkpoints, resuming, the base, all that reads them."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

import encdec_adapt
from encdec_adapt import serve, train
from encdec_adapt.base import errors
from encdec_adapt.checkpoints import checksums, manager
from encdec_adapt.inference import engine as engine_lib
from encdec_adapt.server import served_adapters
from encdec_adapt.stored import model_on_disk, prompt_framing
from encdec_adapt.telemetry import metrics
from tests import tiny
from tests.e2e import folders

pytestmark = [pytest.mark.e2e, pytest.mark.long]
LORA = {'rank': 2, 'alpha': 8, 'dropout': 0.1}
LORA |= {'full': ('cross_attention', 'norms')}


def _flags(pairs, base, lora=LORA, **values):
  values = {'init.mode': 'checkpoint', 'init.encoder': base} | values
  values = {'optimizer.learning_rate': 1e-2} | values
  values = {'optimizer.schedule': 'constant'} | values
  values = {f'train.lora.{k}': v for k, v in lora.items()} | values
  return [*pairs, *(f'--config.{k}={v}' for k, v in values.items())]


def _train(flags, workdir, *more):
  assert tiny.call(train, *flags, f'--workdir={workdir}', *more) == 0
  return workdir


@pytest.fixture(scope='module')
def base(folder, pairs):
  """A pair, as a Hugging Face folder would be imported."""
  tokens = folder / 'vocabulary.model'
  source = folders.make_folder(folder / 'source', folders.GEMMA, tokens)
  imported = folders.import_folder(
    source, folder / 'decoder', '--vocab_multiple=8'
  )
  return folders.adapt(
    folder / 'base', f'--encoder={imported}', '--vocab_multiple=8'
  )


@pytest.fixture(scope='module')
def tuned(folder, pairs, base):
  return _train(_flags(pairs, base), folder / 'tuned')


def _losses(workdir):
  records = metrics.read_metrics(workdir / metrics.FILE)
  return {r['step']: r['loss'] for r in records if r['kind'] == 'eval'}


@pytest.mark.long
def test_a_checkpoint_holds_what_trains_and_names_its_base(tuned, base):
  losses = _losses(tuned)
  assert losses[12] < losses[0] - 0.05
  step = manager.open_latest(tuned)
  names = step.open_state().arrays
  assert all(
    'lora_' in x or 'cross' in x or 'norm' in x
    for x in names
    if x.startswith('params/')
  )
  assert step.read_meta()['base']['name'] == f'{base.resolve()}@0'
  params = [x for x in names if x.startswith('params/')]
  whole = manager.open_latest(base).open_state().arrays
  count, every = (
    sum(int(np.prod(arrays[x][0])) for x in keys)
    for arrays, keys in ((names, params), (whole, whole))
  )
  assert count < every / 5


@pytest.mark.long
def test_resuming_is_exact_and_refuses_a_changed_base(
  folder, pairs, base, tuned
):
  flags = _flags(pairs, base)
  part = _train(flags, folder / 'part', '--config.train.steps=6')

  def change(key, value):
    """Changes what the last checkpoint says of its base."""
    step = manager.open_latest(part).path
    meta = step / 'meta' / 'metadata'
    text = json.loads(meta.read_text())
    text['base'][key] = value
    meta.write_text(json.dumps(text))
    checksums.write(step)

  # As if it had been moved: `init.encoder` of the flags names it.
  change('name', 'moved/base')
  _train(flags, part, '--config.train.steps=12')
  tiny.assert_same_params(part, tuned)
  # Something else is there now, or the run without the step.
  for name in (folder / 'decoder', f'{base}@7'):
    change('name', str(name))
    assert encdec_adapt.load(part).stored.base.path == base
  for option, value in (('alpha', 4.0), ('base', 'int8')):
    changed = _flags(pairs, base, LORA | {option: value})
    words = f'{option} {value!r}.* trained with rank 2'
    with pytest.raises(errors.UserError, match=words):
      _train(changed, part, '--config.train.steps=14')
  change('digest', '0' * 16)
  with pytest.raises(errors.UserError, match='is another model now'):
    _train(flags, part, '--config.train.steps=14')
  with pytest.raises(errors.UserError, match='is another model now'):
    encdec_adapt.load(part)


def test_merged_adapters_are_the_run(folder, tuned, base, capsys):
  held_out = folder / 'prefix_lm' / 'eval'
  run = folders.evaluate(tuned, held_out)
  assert run['loss'] == pytest.approx(_losses(tuned)[12], abs=1e-5)
  merged = folder / 'merged'
  flags = [f'--checkpoint={tuned}', f'--output={merged}']
  assert tiny.convert('merge-lora', *flags) == 0
  # It reads prompts as the run did.
  ours, theirs = map(model_on_disk.open_model, (str(merged), str(tuned)))
  assert ours.objectives == theirs.objectives
  whole, start = folders.arrays(merged), folders.arrays(base)
  for path, value in folders.arrays(tuned).items():
    np.testing.assert_array_equal(whole[path], value, path)
  path = 'decoder/blocks/layer_0/attention/query'
  assert np.abs(whole[path] - start[path]).max() > 1e-3
  path = 'decoder/embedder/table'
  np.testing.assert_array_equal(whole[path], start[path])
  # Adapters average as whole models.
  flags = [str(tuned), str(base), f'--output={folder}/averaged']
  assert tiny.convert('merge', *flags) == 0
  assert tiny.generate(tuned, 'the quick', folder / 'text.jsonl') == 0
  exported = folders.export(tuned, folder / 'exported')
  assert tiny.convert('diff', str(exported), str(merged)) == 0
  with pytest.raises(errors.UserError, match='is a whole model'):
    flags = [f'--checkpoint={base}', f'--output={folder}/nothing']
    tiny.convert('merge-lora', *flags)


def test_a_merged_policy_of_preferences_reads_prompts_as_it_did(
  tuned, tmp_path
):
  run = tmp_path / 'run'
  shutil.copytree(tuned, run)
  config = json.loads((run / 'config.json').read_text())
  config['data']['objective'] = 'preferences:separator="|"'
  config['data']['source'] = 'preferences:rows.jsonl#p,c,r'
  config['loss']['kind'] = 'dpo'
  (run / 'config.json').write_text(json.dumps(config))
  flags = [f'--checkpoint={run}', f'--output={tmp_path}/merged']
  assert tiny.convert('merge-lora', *flags) == 0
  [objective] = model_on_disk.open_model(str(tmp_path / 'merged')).objectives
  assert str(objective) == 'pairs:separator="|"'


def test_adapters_of_peft_keep_the_prompts_of_their_run_or_base(
  folder, base, tuned, tmp_path, monkeypatch
):
  def asking(source, name, objective):
    """A copy of a run of pairs behind a task prefix."""
    run = shutil.copytree(source, tmp_path / name)
    config = json.loads((run / 'config.json').read_text())
    config['data'] |= {'objective': objective, 'source': ''}
    (run / 'config.json').write_text(json.dumps(config))
    return run

  run = asking(tuned, 'run', 'pairs:prefix=a: ')
  reading = asking(base, 'reading', 'pairs:prefix=b: ')
  config = 'adapter_config.json'
  for cwd, name in ((base.parent, f'{base.name}@0'), (tmp_path, f'{base}@0')):
    monkeypatch.chdir(cwd)
    exported = folders.export(run, tmp_path / 'peft', '--layout=peft')
    assert folders.read(exported / config)['base_model_name_or_path'] == name
    if cwd != tmp_path:
      shutil.rmtree(exported)
  for prefix in ('a: ', 'b: '):
    output = tmp_path / prefix[0]
    folders.import_folder(exported, output, f'--base={reading}')
    assert model_on_disk.open_model(output).framing.prefixes == (prefix,)
    # As PEFT itself writes a folder.
    (exported / prompt_framing.PEFT).unlink(missing_ok=True)


def test_loaded_adapters_train_further_over_the_same_base(
  folder, pairs, base, tuned
):
  flags = _flags(pairs, tuned, **{'train.steps': 4})
  further = _train(flags, folder / 'further')
  assert _losses(further)[0] == pytest.approx(_losses(tuned)[12], abs=1e-6)
  meta = manager.open_latest(further).read_meta()
  assert meta['base'] == manager.open_latest(tuned).read_meta()['base']
  with pytest.raises(errors.UserError, match='give their'):
    lora = {'rank': 3, 'alpha': 8}
    _train(_flags(pairs, tuned, lora), folder / 'refused')


def test_a_server_reads_several_runs_over_one_base(
  folder, tuned, base, tmp_path
):
  loaded = encdec_adapt.load(base)
  runs = served_adapters.open_runs(loaded.stored, [str(tuned)])
  adapters = {k: served_adapters.read(loaded, run) for k, run in runs.items()}
  engine = loaded.engine(rows=2, adapters=adapters)
  prompt = loaded.tokenizer.encode('the quick brown')
  merged = encdec_adapt.load(tuned).engine(rows=1)
  for name, expected in (('', loaded.engine(rows=1)), ('tuned', merged)):
    request = engine_lib.Request(np.array([2, *prompt]), 8, adapters=name)
    [(_, completion)] = engine.run([request])
    request = dataclasses.replace(request, adapters='')
    [(_, wanted)] = expected.run([request])
    np.testing.assert_array_equal(completion.tokens, wanted.tokens)
    np.testing.assert_allclose(
      completion.log_probs, wanted.log_probs, atol=5e-5
    )
  [run] = runs.values()
  decoder = dataclasses.replace(run.model.decoder, rope_theta=9.0)
  changed = dataclasses.replace(run.model, decoder=decoder)
  with pytest.raises(errors.UserError, match='rope_theta is 9.0 and 10000.0'):
    served_adapters.read(loaded, dataclasses.replace(run, model=changed))
  for runs, words in (
    ([base], 'rename its folder'),
    ([tuned, tmp_path / 'tuned'], 'rename its folder'),
    ([folder / 'decoder'], 'not a run of adapters over'),
  ):
    with pytest.raises(errors.UserError, match=words):
      served_adapters.open_runs(loaded.stored, [*map(str, runs)])


def test_a_server_reads_prompts_as_each_run_did(
  tuned, base, tmp_path, monkeypatch
):
  pytest.importorskip('uvicorn', reason='needs pip install -e .[serve]')
  from starlette import testclient

  from encdec_adapt.server import http_app

  # A run of the same adapters, of pairs behind a task prefix.
  asking = shutil.copytree(tuned, tmp_path / 'asking')
  config = json.loads((asking / 'config.json').read_text())
  config['data'] |= {
    'objective': 'pairs:prefix=over the lazy ',
    'source': 'pairs:none#a,b',
  }
  (asking / 'config.json').write_text(json.dumps(config))
  answers = {}

  def ask(service, host, port):
    client = testclient.TestClient(service.app, 'http://localhost')
    for name in ('base', 'tuned', 'asking'):
      body = {'prompt': 'the fox', 'temperature': 0, 'model': name}
      answers[name] = client.post('/v1/completions', json=body).json()
    service.thread.close()
    return 0

  monkeypatch.setattr(http_app, 'run', ask)
  flags = f'--checkpoint={base}', f'--adapters={tuned},{asking}'
  flags += '--max_prompt=32', '--max_tokens=16', '--batch_size=1'
  port = f'--port={tiny.free_port()}'
  assert tiny.call(serve, *flags, '--nowarm_up', port) == 0
  for name, run, text in (
    ('base', base, 'the fox'),
    ('tuned', tuned, 'the fox'),
    ('asking', tuned, 'over the lazy the fox'),
  ):
    model = encdec_adapt.load(run)
    count = answers[name]['usage']['prompt_tokens']
    assert count == 1 + len(model.tokenizer.encode(text)), name  # And BOS.
    [expected] = model.generate([text], max_tokens=16)
    assert answers[name]['choices'][0]['text'] == expected, name


@pytest.mark.long
@pytest.mark.parametrize('kind', ['int8', 'nf4'])
def test_a_quantised_base_is_close_to_the_base(
  folder, pairs, base, tuned, kind
):
  run = _train(_flags(pairs, base, LORA | {'base': kind}), folder / kind)
  losses, plain = _losses(run), _losses(tuned)
  assert losses[0] == pytest.approx(plain[0], abs=0.05)
  assert losses[0] != plain[0]
  assert losses[12] == pytest.approx(plain[12], abs=0.2)


@pytest.mark.parametrize(
  'values, words',
  [
    ({'train.cross_attention_warmup': 2}, 'adapters train'),
    ({'init.mode': 'adapt'}, 'need a base on disk'),
    ({'train.lora.rank': 99}, 'at most 8'),
  ],
)
def test_refusals(pairs, base, tmp_path, values, words):
  with pytest.raises(errors.UserError, match=words):
    _train(_flags(pairs, base, **values), tmp_path / 'run')


@pytest.mark.long
def test_the_reference_of_preferences_is_the_start(tmp_path):
  """Adapters off for new ones, and a frozen copy of loaded ones."""
  lines = [
    {'prompt': f'Number {i} is', 'chosen': f' value_{i}', 'rejected': ' no'}
    for i in range(60)
  ]
  file = tmp_path / 'preferences.jsonl'
  file.write_text('\n'.join(map(json.dumps, lines)))

  def tune(source, workdir):
    return _train(
      [
        f'--config=configs/sft.py:source={source},lora=2',
        '--config.loss.kind=dpo',
        '--config.data.objective=preferences',
        f'--config.data.source=preferences:{file}#prompt,chosen,rejected',
        *folders.small_rows(tmp_path / 'records'),
        '--config.train.steps=6',
        '--config.evaluation.loss=6',
        '--config.evaluation.samples=0',
        '--config.compute.dtype=float32',
      ],
      workdir,
    )

  # The loss of a policy that is its reference is ln 2.
  first = tune(tiny.ROOT / 'configs/decoders/small', tmp_path / 'first')
  second = tune(first, tmp_path / 'second')
  for run in (first, second):
    losses = _losses(run)
    assert losses[0] == pytest.approx(np.log(2), abs=1e-6)
    assert losses[6] < losses[0] - 0.01
