"""Configurations: every file loads, and bad values are named."""

import dataclasses
import json
import re

from flax import traverse_util
import pytest

from encdec_adapt import config as config_lib
from encdec_adapt import configs, train
from encdec_adapt.base import errors
from encdec_adapt.cli import command
from encdec_adapt.configs import gemma2, t5
from encdec_adapt.models import heads, model_config, presets
from encdec_adapt.ops import rope
from encdec_adapt.planner import chips
from encdec_adapt.telemetry import environment
from encdec_adapt.training import schedules
from encdec_adapt.training.sections import evaluation_section
from tests.tokenizers import t5_files

BASE = '--config=configs/base.py'
SOURCE = ('--config.init.encoder=a', '--config.data.source=python')
TEACHER = (*SOURCE, '--config.teacher.checkpoint=b')
PREFIX_LM = '--config.data.objective=prefix_lm'
LORA = ('loss.kind=rloo', 'train.lora.rank=2', 'train.lora.dropout=0.1')
LORA += ('init.mode=checkpoint', 'init.encoder=a', 'data.encoder_length=8')
LORA += ('data.objective=pairs', 'data.source=pairs:x#q,a')
PREFERENCES = ('data.objective=preferences', 'data.encoder_length=8')
PREFERENCES += ('data.source=preferences:x#p,c,r',)
DISTILL = ('loss.kind=distill', 'data.encoder_length=8')
# A pair of two vocabularies.
PAIR = (
  'model.kind=encoder_decoder',
  'data.objective=prefix_lm',
  'data.encoder_length=8',
  'data.vocabulary={workdir}/vocabulary/decoder',
  'data.encoder_vocabulary=bytes',
  'data.add_sentinels=3',
)


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch, request):
  monkeypatch.chdir(request.config.rootpath)


def _load(*flags):
  values = command.parse(train.define_flags, flags)
  return config_lib.load(values.config, 'runs/x')


@pytest.mark.parametrize('steps, warmup', [(1001, 1000), (1000, 100), (50, 5)])
def test_a_warm_up_longer_than_the_job_is_shortened(steps, warmup):
  flags = '--config=configs/gemma2.py:size=9b_2b', *TEACHER
  settings = _load(*flags, f'--config.train.steps={steps}')
  assert settings.train.warmup == warmup
  # What the user chose is what is saved.
  assert settings.train.cross_attention_warmup == 1000


def test_training_starts_from_the_reference_that_is_not_named():
  flags = ('init.mode=checkpoint', 'init.encoder=a', 'loss.kind=dpo')
  flags += ('data.objective=preferences', 'data.encoder_length=8')
  flags += ('data.source=preferences:x#p,c,r', 'model.kind=decoder_only')
  load = lambda *more: _load(BASE, *(f'--config.{x}' for x in (*flags, *more)))  # noqa: E731
  assert load().recipe.frozen['teacher'].path == 'a'
  named = load('teacher.checkpoint=b').recipe.frozen['teacher']
  assert (named.path, named.is_start) == ('b', False)
  assert load('loss.kind=simpo').recipe.frozen == {}
  assert not load().data.train.pack and load().data.pack


def test_classifiers_of_trained_encoders_have_the_head_of_their_classes():
  flags = 'model.kind=encoder_only', 'model.decoder.first_norm=False'
  flags += 'data.encoder_length=8', 'data.source=labels:x#a,b'
  flags += ('data.decoder_length=0', 'data.objective={}:labels=a|b')
  mean = 'kind=labels', 'pooled=mean', 'layer=pooler'

  def head(objective, form=()):
    changes = [f'--config.{x.format(objective)}' for x in flags]
    changes += [f'--config.model.head.{x}' for x in form]
    return _load(BASE, *changes).model.decoder.head

  assert head('classify') == heads.Labels(2, 'first', 'transform')
  assert head('classify', mean) == heads.Labels(2, 'mean', 'pooler')
  assert head('tag') == heads.Labels(2)
  with pytest.raises(errors.UserError, match="pooled is 'mean', .*to ''"):
    head('tag', mean)
  with pytest.raises(errors.UserError, match="pooled is 'first', .*causal"):
    model_config.StackConfig(head=heads.Labels(2, 'first'))


@pytest.mark.parametrize('size', ['s_s', '2b_2b', '9b_2b', '9b_9b', '27b_27b'])
@pytest.mark.parametrize('objective', ['prefixlm', 'ul2'])
def test_gemma2_configs_are_the_presets(size, objective):
  settings = _load(
    f'--config=configs/gemma2.py:size={size},objective={objective}',
    *(TEACHER if objective == 'prefixlm' else SOURCE),
  )
  assert settings.model == presets.t5gemma(size, vocab_multiple=128)
  length = 4096 if objective == 'prefixlm' else 8192
  assert settings.data.train.encoder_length == length
  assert settings.train.batch_size * 2 * length == 4_194_304
  balanced = settings.model.encoder.width == settings.model.decoder.width
  assert settings.train.cross_attention_warmup == (0 if balanced else 1000)


@pytest.mark.parametrize(
  'size, objective, lengths',
  [
    ('t5_1.1_base', 'span_corruption', (512, 114)),
    ('mt5_small', 'span_corruption', (1024, 229)),
    ('byt5_small', 'denoise:-:20:0.15', (1024, 189)),
  ],
)
def test_t5_configs_are_the_presets(size, objective, lengths):
  settings = _load(f'--config=configs/t5.py:size={size}', SOURCE[1])
  assert settings.model == presets.t5(size, vocab_multiple=128)
  data, optimizer = settings.data.train, settings.optimizer
  assert (data.encoder_length, data.decoder_length) == lengths
  assert settings.data.objective == objective
  assert settings.train.batch_size * lengths[0] == 2**20
  assert (optimizer.kind, optimizer.clip_norm) == ('adafactor', 0)
  rate = schedules.make_schedule(optimizer.schedule, settings.train.steps)
  assert rate(0, 0) == rate(9999, 9999) == pytest.approx(0.01)
  assert rate(10**6, 10**6) == pytest.approx(1e-3)


def test_the_page_of_t5_says_how_ul2_is_trained(tmp_path):
  page = t5.__doc__.partition("UL2's mixture")[2]
  flags = re.findall(r'--config\.data\.\S+', page) + [SOURCE[1]]
  file = t5_files.train(tmp_path / 'spiece.model')
  flags.append(f'--config.data.vocabulary={file}')
  data = _load('--config=t5:size=t5_1.1_small', *flags).data
  (objective,), opened = data.objectives, data.vocabularies.open()
  opened.check_tables(data.table_sizes)
  assert objective.text == 'ul2'
  objective.make(
    data.train.lengths, opened.decoder, sentinel_policy=data.sentinels
  )


def test_a_quoted_path_reaches_the_configuration(tmp_path):
  folder = tmp_path / 'a,b "c'
  folder.symlink_to(configs.FOLDER / 'decoders' / 'small')
  for key in 'sft:source post_training:source t5:source laptop:encoder'.split():
    flag = f'--config={key}={json.dumps(str(folder))}'
    values = command.parse(train.define_flags, [flag])
    assert values.config.init.encoder == str(folder)


SHIPPED = [f'gemma2.py:{x}' for x in gemma2.SHIPPED]
SHIPPED += [f't5.py:{x}' for x in t5.SHIPPED]


@pytest.mark.parametrize('arg', SHIPPED)
def test_a_shipped_recipe_divides_over_its_chips(arg):
  is_pair = 'objective=pairs' in arg or 'objective=rloo' in arg
  source = 'pairs:README.md' if is_pair else 'python'
  flags = [f'--config.data.source={source}']
  if 'objective=rloo' not in arg:
    flags.append('--config.loss.kind=cross_entropy')
  flags += SOURCE[:1] * arg.startswith('gemma2')
  settings = _load(f'--config=configs/{arg}', *flags)
  assert settings.data.samples == ('objective=rloo' in arg)
  options = arg.partition(':')[2].split(',')
  arguments = dict(item.split('=') for item in options)
  slices = chips.parse(arguments['topology'], int(arguments.get('slices', 1)))
  assert settings.mesh.sizes(slices.devices)
  groups = slices.devices // settings.mesh.tensor
  shards = groups * settings.train.microbatches
  assert settings.train.batch_size % shards == 0
  assert settings.train.eval_batch_size % slices.devices == 0


def test_presets_by_name():
  prefix = '--config=configs/presets.py:objective=ul2'
  settings = _load(f'{prefix},encoder=llama3.2_1b,decoder=qwen3_0.6b', *SOURCE)
  assert settings.model == model_config.encoder_decoder(
    presets.stack('llama3.2_1b', vocab_multiple=128),
    presets.stack('qwen3_0.6b', vocab_multiple=128),
  )
  assert settings.train.cross_attention_warmup == 1000
  settings = _load(f'{prefix},encoder=gemma3_1b,target=t5gemma2', *SOURCE)
  assert settings.model == presets.t5gemma2('1b_1b', vocab_multiple=128)
  assert settings.train.cross_attention_warmup == 0


@pytest.mark.parametrize(
  'arg, words',
  [
    ('encoder=gemma3_3b', "no model size 'gemma3_3b'.*qwen3_8b"),
    ('encoder=qwen3_4b,target=t5gemma', 'made of gemma2 stacks: '),
    ('encoder=2b,target=t5gemma2', 'made of gemma3_text stacks: '),
    ('encoder=2b,target=t5', 'one of t5gemma, t5gemma2, or empty'),
  ],
)
def test_presets_that_cannot_be(arg, words):
  with pytest.raises(errors.UserError, match=words):
    _load(f'--config=configs/presets.py:{arg},objective=ul2', *SOURCE)


def test_an_override_of_any_leaf():
  settings = _load(
    BASE,
    '--config.model.decoder.final_softcap=0',
    "--config.model.decoder.pattern=('global',)",
    '--config.optimizer.learning_rate=3',
  )
  assert isinstance(settings.model, model_config.DecoderOnlyConfig)
  assert settings.model.decoder.final_softcap is None
  assert settings.model.decoder.pattern == ('global',)
  assert settings.optimizer.schedule.peak == 3.0


OTHERS = dict(
  attention_softcap=None,
  final_softcap=None,
  rope_scaling=rope.Scaling('llama3'),
  norm_gain='direct',
  qk_norm=True,
  activation='silu',
  attention_bias='qkv',
  scale_embeddings=False,
)
EXPERTS = dict(
  experts=8,
  experts_per_token=2,
  expert_mlp_width=512,
  shared_expert_width=256,
  dense_layers=1,
)


@pytest.mark.parametrize('merged', [False, True])
def test_any_model_is_said_by_a_configuration(merged):
  fields = {**OTHERS, **(EXPERTS if merged else {}), 'eoi_token': 0}
  stack = presets.stack('2b', vocab_multiple=64, **fields)
  pair = model_config.encoder_decoder(
    dataclasses.replace(stack, window_rule='centered'),
    stack,
    causal_encoder=not merged,
    shared_table=merged,
    cross_merged=merged,
    cross_layers='all' if merged else 'global',
  )
  for model in (pair, model_config.DecoderOnlyConfig(stack)):
    config = config_lib.defaults()
    config_lib.set_model(config.model, model)
    if model is pair:
      config.data.objective = 'prefix_lm'
      config.data.encoder_length = 8
    assert config_lib.load(config).model == model


@pytest.mark.parametrize(
  'flags, words',
  [
    (['train.stepz=3'], "no key 'train.stepz' .did you mean 'steps'"),
    (['model.width=3'], "no key 'model.width'.*--print_config"),
    (['train.steps=many'], 'train.steps=many: .*invalid literal'),
    (['train=3'], 'config.train=3: .*is not a dict'),
    (['model.decoder.pattern[0]=3'], r'model.decoder.pattern\[0\]'),
    (['train.steps=-1'], 'train.steps is -1; it must be at least 0'),
    (['train.steps=0', 'data.repeat=True'], 'train.steps is 0.*never end'),
    (['evaluation.samples=50'], "'causal_lm', .*no inputs"),
    (
      ['evaluation.tasks=a'],
      r"tasks is \('a',\) and .*tasks_every 0; set both",
    ),
    (['evaluation.tasks_every=50'], 'set both or neither'),
    (['evaluation.tasks=a,b'], r"write \"\('a', 'b'\)\""),
    (['evaluation.tasks='], 'no name may be empty'),
    (['evaluation.tasks=7'], r"tasks is \('7',\) and .*tasks_every 0"),
    (['evaluation.tasks=loss', 'evaluation.tasks_every=50'], 'is no task'),
    (['evaluation.loss=0', 'evaluation.samples=2'], 'loss 0, .*samples to 0'),
    (['evaluation.loss=0', 'train.patience=2'], 'loss is 0, .*patience=2'),
    (['evaluation.loss=0', 'checkpoint.keep_best=True'], 'keep_best=True'),
    (['train.trackers=wnadb'], "trackers has 'wnadb'.*did you mean 'wandb'"),
    (['train.trackers=a,b'], r"write \"\('a', 'b'\)\""),
    (['data.eval_pack=True', 'data.development_rows=8'], 'development_rows=8'),
    (['evaluation.loss=2', 'evaluation.samples=3'], 'must be a multiple'),
    (['evaluation.loss=.05', 'evaluation.samples=9'], 'must be a multiple'),
    (['evaluation.loss=2.5'], 'loss is 2.5; it must be 0, a share'),
    (['checkpoint.every=0'], 'every is 0.0; it must be a share of the steps'),
    (['checkpoint.every=ten'], 'every=ten: .*could not convert'),
    (['train.dropout=1'], 'train.dropout is 1.0; it must be below 1'),
    (['train.dropout=-0.1'], 'train.dropout is -0.1; .*at least 0'),
    (
      ['loss.kind=orpo', *PREFERENCES, 'train.dropout=0.1'],
      'is 0.1 .* the loss orpo ',
    ),
    ([*LORA, 'train.rewards.answers=1'], 'lora.dropout 0.1, .*loss rloo'),
    (LORA, 'train.rewards has no reward with config.loss.kind='),
    (['train.lora.alpha=8'], 'lora.alpha is 8.0, .*lora.rank is 0'),
    (['train.lora.targets=mlp,up'], r"write \"\('mlp', 'up'\)\""),
    (['optimizer.eps=0'], 'optimizer.eps is 0.0; .*above 0'),
    (['optimizer.kind=adam'], "'adam'.*adamw"),
    (['optimizer.learning_rate=nan'], 'learning_rate is nan.*finite'),
    (['model.decoder.rope_scaling.factor=-inf'], 'scaling.factor is -inf; .*'),
    (['model.head.pooling=last'], "pooling is 'last', .*kind is 'tokens'"),
    (
      ['model.head.kind=labels', 'model.head.labels=2'],
      "kind is 'labels', and .* give the model 'tokens'",
    ),
    (['model.head.kind=reward'], "'reward', and .* give the model 'tokens'"),
    (
      ['model.decoder.rope_scaling.low=2'],
      "low is 2.0, .* is 'none'",
    ),
    (['model.decoder.positions.buckets=8'], "buckets is 8, .* is 'rotary'"),
    (['model.decoder.kv_heads=3'], 'model.decoder: heads .4.'),
    (['model.kind=encoder_decoder'], 'feeds models of kind decoder_only'),
    (
      [
        *('model.kind=encoder_decoder', 'data.objective=tag:labels=a|b'),
        *('data.encoder_length=64', 'data.decoder_length=0'),
        'data.source=labels:a#b,c',
      ],
      "pooled is '', and a pair classifies whole texts",
    ),
    (['init.encoder=a'], "init.encoder is 'a'"),
    (['init.cross_attention=fresh'], "'fresh', .*mode is 'random'; .*'auto'"),
    (['init.mode=checkpoint'], 'init.encoder is empty'),
    (['init.mode=embeddings', 'init.encoder=a'], 'decoder_only'),
    (['init.mode=adapt', 'init.encoder=a', 'init.decoder=b'], 'two stacks'),
    (['init.optimizer=source'], "optimizer is 'source', .*mode is 'random'"),
    (
      ['init.mode=checkpoint', 'init.encoder=a', 'init.optimizer=source'],
      "schedule 'cosine'.*'rsqrt' or 'constant'",
    ),
    (
      ['init.mode=embeddings', 'init.encoder=a', 'init.post_norm_gain=zero'],
      "init.post_norm_gain is 'zero', .*mode is 'embeddings'; .*'one'",
    ),
    (['teacher.checkpoint=a'], "teacher.checkpoint is 'a'"),
    ([*DISTILL, PREFIX_LM[9:]], 'teacher.checkpoint is empty'),
    (['loss.kind=dpo', *PREFERENCES], "empty .config.init.mode is 'random'"),
    (['loss.kind=dpo', 'teacher.checkpoint=a'], 'rows are not preferences'),
    (
      ['loss.kind=orpo', *PREFERENCES, 'teacher.checkpoint=a'],
      'which reads no such model',
    ),
    (['loss.kind=dpp'], "is 'dpp'; .*dpo"),
    (['loss.dpo.beta=1'], "loss.dpo.beta is 1.0, .*kind is 'cross_entropy'"),
    (['loss.kind=dpo', 'loss.z_loss=1'], "loss.z_loss is 1.0, .*kind is 'dpo'"),
    (
      ['loss.kind=ipo', *PREFERENCES, 'loss.ipo.beta=0'],
      'ipo.beta is 0.0; .*above',
    ),
    (['loss.kind=distill', 'teacher.checkpoint=a'], "'causal_lm'; .*prefix_"),
    (['train.microbatches=3'], 'batch_size .16. .*microbatches .3.'),
    (['data.source='], 'data.source is empty.*text:GLOB'),
    (['data.objective=prefix_lm'], 'encoder_length is 0'),
    (['data.objective=foo', 'data.encoder_length=8'], "is 'foo'.*prefix_lm"),
    ([*PAIR, 'data.objective=ul2'], 'needs one vocabulary for both sides'),
    ([*PAIR, 'model.kind=decoder_only'], 'which has no encoder'),
    ([*PAIR, 'model.shared_table=True'], 'one table for both sides'),
  ],
)
def test_bad_input_is_named(flags, words):
  with pytest.raises(errors.UserError, match=words):
    _load(BASE, *(f'--config.{flag}' for flag in flags))


@pytest.mark.parametrize(
  'features, dtype',
  [
    ('avx512f', 'float32'),
    ('avx512_bf16', 'bfloat16'),
    ('amx_bf16', 'bfloat16'),
  ],
)
def test_auto_follows_the_devices_and_the_job_that_is_resumed(
  features, dtype, monkeypatch
):
  fields = {'flags': f'sse {features}'}
  monkeypatch.setattr(environment, '_cpu_fields', lambda: fields)
  settings = _load(BASE)
  cpu, tpu = settings.compute.on('cpu'), settings.compute.on('tpu')
  assert (cpu.dtype, cpu.remat) == (dtype, 'none')
  assert (tpu.dtype, tpu.remat) == ('bfloat16', 'auto')
  saved = {'dtype': 'float32', 'remat': 'dots'}
  resumed = settings.compute.on('tpu', saved)
  assert (resumed.dtype, resumed.remat) == ('float32', 'dots')
  stated = _load(BASE, '--config.compute.remat=attention').compute
  assert stated.on('tpu', saved).remat == 'attention'


def test_shares_of_the_steps_follow_the_flags():
  shares = 'loss=0.05', 'samples=.1', 'tasks=a', 'tasks=b/', 'tasks_every=.97'
  flags = [BASE, *(f'--config.evaluation.{x}' for x in shares), PREFIX_LM]
  flags += ['--config.data.encoder_length=8', '--config.checkpoint.every=0.1']
  kind = '--config.model.kind=encoder_decoder'
  settings = _load(*flags, kind, '--config.train.steps=130')
  # Multiples of the loss's, and none behind the last step.
  intervals = settings.evaluation.intervals
  assert intervals(130) == {'loss': 6, 'samples': 12, 'a': 126, 'b/': 126}
  assert settings.checkpoint.interval(130) == 13
  assert intervals(100) == {'loss': 5, 'samples': 10, 'a': 95, 'b/': 95}
  mixed = evaluation_section.EvaluationConfig(loss=8.0, samples=0.1)
  assert mixed.intervals(150) == {'loss': 8, 'samples': 8}


@pytest.mark.parametrize(
  'flags, words',
  [
    (['--wrokdir=x'], 'wrokdir'),
    (['stray'], "'stray'"),
    (['--config=configs/nothing.py'], 'nothing.py'),
    (['--config=configs/gemma2.py:size=3b'], "'3b'.*9b"),
    (['--config=configs/gemma2.py:sizes=2b_2b'], "'sizes=2b_2b'.*size"),
    (['--config=configs/gemma2.py:topology=v5e:2x4'], 'not in .*--search'),
    (['--config=configs/t5.py:size=t5_base,topology=v5e:8x8'], 't5_11b,.*'),
    (['--config=configs/t5.py:size=large'], "'large'; sizes: t5_small"),
    (['--config=configs/gemma2.py:slices=2'], 'slices=2 is not in .*v5e:4x4; '),
    (['--config=configs/quickstart.py:run=x'], 'run=x.*adapted'),
    (['--config=configs/base.py:x'], 'follows the colon: TypeError.* 0 po'),
  ],
)
def test_bad_flags_are_named(flags, words):
  with pytest.raises(errors.UserError, match=words):
    _load(*flags)


def test_a_config_file_that_fails_is_named_with_the_line(tmp_path):
  file = tmp_path / 'mine.py'
  file.write_text("def get_config():\n  raise ValueError('too few')\n")
  with pytest.raises(errors.UserError) as caught:
    _load(f'--config={file}')
  assert f'{file}:2: ValueError: too few.' in str(caught.value)
  assert '\n' not in str(caught.value)


def test_a_saved_run_is_read_back(tmp_path):
  values = command.parse(
    train.define_flags, ['--config=configs/quickstart.py:run=unbalanced']
  )
  config_lib.save(values.config, str(tmp_path))
  settings = config_lib.load(values.config, str(tmp_path))
  assert config_lib.load_run(str(tmp_path)) == settings
  with pytest.raises(errors.UserError, match='config.json'):
    config_lib.load_run(str(tmp_path / 'nothing'))


def test_a_saved_run_of_an_earlier_version(tmp_path, capsys):
  config = config_lib.defaults()
  config.evaluation.loss = 20
  saved = config.to_dict()
  del saved['data']['pack'], saved['loss'], saved['model']['encoder']['layers']
  del saved['evaluation']
  saved['train']['evaluators'] = 'loss=20'
  file = tmp_path / config_lib.RUN_CONFIG
  file.write_text(json.dumps(saved))
  settings = config_lib.load(config, str(tmp_path))
  capsys.readouterr()
  assert config_lib.load_run(str(tmp_path)) == settings
  (line,) = capsys.readouterr().out.splitlines()
  assert 'data.pack = True, loss.' in line
  assert line.endswith(', model.encoder.layers = 4')
  saved['train']['unknown'] = 1
  file.write_text(json.dumps(saved))
  with pytest.raises(errors.UserError, match='train.unknown, which'):
    config_lib.load_run(str(tmp_path))
  del saved['train']['unknown']
  saved['data']['objective'] = 'prefix_lm | mass'
  file.write_text(json.dumps(saved))
  with pytest.raises(errors.UserError, match='mass.* 0.1.0 is the last'):
    config_lib.load_run(str(tmp_path))


def test_vocabularies_are_where_the_configuration_says():
  choice = _load(BASE).data.vocabularies
  assert choice.decoder == 'runs/x/records/vocabulary.model'
  assert choice.path('encoder') == choice.decoder
  choice = _load(BASE, *(f'--config.{flag}' for flag in PAIR)).data.vocabularies
  assert choice.decoder == 'runs/x/vocabulary/decoder'
  assert choice.path('encoder') == 'bytes' and choice.added_sentinels == 3


def test_a_mistyped_key_in_a_file_or_in_python_is_refused(tmp_path):
  with pytest.raises(AttributeError, match='Did you mean "steps"'):
    config_lib.defaults().train.stepz = 3
  file = tmp_path / 'mistyped.py'
  file.write_text(
    'from encdec_adapt import config\n'
    'def shorten(values):\n'
    '  values.train.stepz = 3\n'
    'def get_config():\n'
    '  values = config.defaults()\n'
    '  shorten(values)\n'
    '  return values\n'
  )
  with pytest.raises(
    errors.UserError, match="mistyped.py:3: .*'stepz'.*mean 'steps'"
  ):
    _load(f'--config={file}')


def test_every_key_is_on_the_page():
  values = traverse_util.flatten_dict(config_lib.defaults().to_dict(), sep='.')
  leaves = [f'config.{name} = {value!r}' for name, value in values.items()]
  lines = config_lib.page().splitlines()
  assert sorted(leaves) == sorted(x for x in lines if x and x[0] != '#')
