"""T5 and BART, from pretraining to a tuned model in transformers."""

import json

import numpy as np
import pytest

import encdec_adapt
from encdec_adapt import train
from encdec_adapt.base import errors
from encdec_adapt.configs import t5
from encdec_adapt.data.records import record_sets
from encdec_adapt.huggingface import tensor_folder
from encdec_adapt.objectives import framing
from tests import tiny, tiny_tokenizers
from tests.e2e import folders, test_transformers
from tests.parity import tiny_models
from tests.tokenizers import t5_files

transformers = pytest.importorskip('transformers')
pytestmark = [pytest.mark.e2e, pytest.mark.parity, pytest.mark.long]
SHAPE = dict(layers=2, width=16, mlp_width=24, heads=2, kv_heads=2, head_dim=8)
ROWS = 12
MESH = (
  '--config.mesh.replica=2',
  '--config.mesh.fsdp=2',
  '--config.mesh.tensor=2',
)
JOB = (
  '--config.compute.dtype=float32',
  '--config.compute.remat=none',
  '--config.data.eval_fraction=0.2',
  '--config.data.shards=1',
  '--config.data.workers=1',
  '--config.train.batch_size=8',
  '--config.train.eval_batch_size=8',
  '--config.train.steps=2',
  '--config.evaluation.loss=2',
  '--config.evaluation.samples=0',
  '--config.checkpoint.every=2',
)


def job(config, lengths, workdir, *flags):
  """Trains two steps and returns the work directory."""
  sides = zip(('encoder', 'decoder'), lengths, strict=True)
  flags += tuple(f'--config.data.{side}_length={n}' for side, n in sides)
  flags = f'--config=configs/{config}', f'--workdir={workdir}', *JOB, *flags
  assert tiny.call(train, *flags) == 0
  return workdir


@pytest.fixture(scope='module')
def pairs(tmp_path_factory):
  """The flag of a source of pairs."""
  file = tmp_path_factory.mktemp('pairs') / 'pairs.jsonl'
  lines = [{'q': f'the fox {i}', 'a': f'two cats {i % 9}'} for i in range(60)]
  file.write_text('\n'.join(map(json.dumps, lines)))
  return f'--config.data.source=pairs:{file}#q,a'


def assert_transformers_agrees(run, tmp_path):
  """Exports a run, and compares logits and greedy text with its own."""
  import torch

  ours = encdec_adapt.load(run)
  exported = folders.export(run, tmp_path / 'exported')
  theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(exported)
  assert type(theirs).__name__ in (
    'T5ForConditionalGeneration', 'BartForConditionalGeneration'
  )  # fmt: skip
  tokens = np.random.default_rng(0).integers(3, ROWS, (2, ROWS), np.int32)
  inputs = torch.tensor(tokens).long()
  with torch.no_grad():
    expected = theirs(input_ids=inputs, decoder_input_ids=inputs).logits
  real = np.ones(tokens.shape, bool)
  got = np.asarray(ours.logits(tokens, tokens, real, real))
  expected = expected.numpy()[..., : got.shape[-1]]
  np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)
  prompts = test_transformers.PROMPTS[:1]
  found = test_transformers._ours(
    run, tmp_path / 'out.json', f'--prompt={prompts[0]}'
  )
  assert found == test_transformers._theirs(
    exported, prompts, lambda one, prompt: one(prompt, return_tensors='pt')
  )


def test_from_pretraining_to_transformers(pairs, tmp_path):
  texts = tmp_path / 'texts.jsonl'
  lines = [{'text': x} for x in tiny_tokenizers.TEXTS[:60]]
  texts.write_text('\n'.join(map(json.dumps, lines)))
  sizes = SHAPE | {'vocab_size': t5_files.PIECES + 100}
  pretrained = job(
    't5.py:size=t5_1.1_small',
    (64, 24),
    tmp_path / 'pretrained',
    f'--config.data.source=jsonl:{texts}',
    f'--config.data.vocabulary={t5_files.train(tmp_path / "spiece.model")}',
    *(
      f'--config.model.{side}.{name}={size}'
      for side in ('encoder', 'decoder')
      for name, size in sizes.items()
    ),
  )
  on = t5.get_config(f'source={pretrained}')
  assert (on.optimizer.kind, on.optimizer.schedule) == ('adafactor', 'constant')
  assert (on.init.mode, on.init.encoder) == ('checkpoint', str(pretrained))
  assert on.data.objective == 'span_corruption'
  assert on.model.encoder.width == SHAPE['width']
  (tmp_path / 'tokens').write_text('zorp\n')
  flags = f'--checkpoint={pretrained}', f'--output={tmp_path}/resized'
  assert tiny.convert('resize', *flags, f'--tokens={tmp_path}/tokens') == 0
  source = f'sft.py:source={tmp_path}/resized'
  tuned = job(source, (32, 16), tmp_path / 'run', pairs, *MESH)
  model = encdec_adapt.load(tuned).config.decoder
  assert (bool(model.relative), model.vocab_size) == (
    True, sizes['vocab_size'] + 1
  )  # fmt: skip
  assert_transformers_agrees(tuned, tmp_path)
  tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / 'exported')
  assert tokenizer.convert_tokens_to_ids('zorp') == sizes['vocab_size']


def save_folder(kind, folder):
  """Saves a tiny model of transformers with a tokenizer; returns the latter."""
  save = tiny_models.save_t5_tokenizer
  (save if kind == 'flan' else t5_files.train_code_t5)(folder)
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  roles = 'bos_token_id', 'eos_token_id', 'pad_token_id'
  fields = tiny_models.T5 | {
    'vocab_size': len(tokenizer),
    'feed_forward_proj': 'gated-gelu',
    'tie_word_embeddings': False,
    'decoder_start_token_id': tokenizer.pad_token_id,
    **{role: getattr(tokenizer, role) for role in roles},
  }
  case, settings = tiny_models.CASES['t5_v1_1'], transformers.T5Config(**fields)
  if kind == 'bart':
    case = tiny_models.CASES['bart']
    settings, start = case.settings(), tokenizer.eos_token_id
    fields |= {'decoder_start_token_id': start}
    for name in ('vocab_size', 'decoder_start_token_id', *roles):
      setattr(settings, name, fields[name])
  theirs = tiny_models.make(case, settings=settings)
  theirs.save_pretrained(folder)
  return tokenizer


@pytest.mark.parametrize('kind', ['flan', 'codet5', 'bart'])
def test_a_folder_of_transformers_is_tuned_on_a_mesh(kind, pairs, tmp_path):
  folder = tmp_path / kind
  tokenizer = save_folder(kind, folder)
  tuned = job(
    f'sft.py:source={folder}', (32, 16), tmp_path / 'run', pairs, *MESH
  )
  assert encdec_adapt.load(tuned).config.decoder.head.tied == (kind == 'bart')
  assert_transformers_agrees(tuned, tmp_path)
  # Records are framed as transformers' users frame inputs and labels.
  rows = record_sets.RecordSet.open(tuned / 'records' / 'train')
  (row,) = rows.read([0])
  row = framing.frame_row(row, rows.spec.lengths, rows.framing)
  for name, side in (('encoder_tokens', 'encoder'), ('targets', 'decoder')):
    count = (row[f'{side}_segments'] == 1).sum()
    ids = row[name][:count].tolist()
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert tokenizer(text).input_ids == ids
  flags = tuned, tmp_path / 'exported', '--with=transformers'
  assert tiny.convert('verify', *flags, '--tolerance=1e-3') == 0
  if kind == 'bart':  # A buffer.
    before, after = (
      tensor_folder.TensorFolder(x).read('final_logits_bias')
      for x in (folder, tmp_path / 'exported')
    )
    np.testing.assert_array_equal(before, after)
    assert before.any()
  changes = {
    'generation_config.json': ({'decoder_start_token_id': 5}, 'continues'),
    'tokenizer.json': ({'post_processor': None}, "encodes ''"),
  }
  for name, (change, verb) in changes.items():
    file = tmp_path / 'exported' / name
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    if kind != 'flan':  # The class of T5 ignores parts of the file.
      with pytest.raises(errors.UserError, match=f'transformers {verb}'):
        tiny.convert('verify', *flags)
