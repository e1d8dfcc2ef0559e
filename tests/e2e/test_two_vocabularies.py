"""A Llama encoder with a Qwen decoder, from two folders to generated text."""

import json
import re

import pytest

import encdec_adapt
from encdec_adapt import config as config_lib
from encdec_adapt import generate, train
from encdec_adapt.base import errors
from encdec_adapt.checkpoints import manager
from encdec_adapt.cli import command
from encdec_adapt.data.records import record_sets
from encdec_adapt.models import heads
from encdec_adapt.tokenizers import vocabulary_pair
from tests import tiny, tiny_tokenizers
from tests.e2e import folders

pytestmark = [pytest.mark.e2e, pytest.mark.long]
# The encoder's source and the decoder's: shape, sort and size of tokenizer.
SOURCES = {
  'llama': (
    {**folders.LLAMA, 'kv_heads': 1, 'vocab_size': 320},
    *('llama3', 300),
  ),
  'qwen': (
    {
      **folders.LLAMA,
      'width': 24,
      'heads': 3,
      'kv_heads': 1,
      'vocab_size': 400,
      'qk_norm': True,
      'head': heads.Tokens(),
    },
    *('qwen', 380),
  ),
}


@pytest.fixture(scope='module')
def texts():
  return [text + 'Caf\u00e9 \U0001f600!' for text in tiny.text(40)]


@pytest.fixture(scope='module')
def folder(tmp_path_factory, texts):
  folder = tmp_path_factory.mktemp('two')
  (folder / 'text').mkdir()
  for i, text in enumerate(texts):
    (folder / 'text' / f'{i:02d}.txt').write_text(text, encoding='utf-8')
  for seed, (name, (shape, family, size)) in enumerate(SOURCES.items()):
    files = tiny_tokenizers.save(
      folder / f'{name}_tokenizer', family, texts, size
    )
    folders.make_folder(
      folder / name, shape, seed=seed, tokenizer=[*files.iterdir()]
    )
  return folder


def _flags(folder, **changes):
  """A job that names the two folders and no tokenizer."""
  values = {
    'data.source': f'text:{folder}/text/*.txt',
    'data.folder': folder / 'records',
    'data.encoder_length': 48,
    'data.decoder_length': 32,
    'data.shards': 2,
    'data.workers': 1,
    'data.repeat': True,
    'data.eval_fraction': 0.2,
    'data.eval_rows': 8,
    'compute.dtype': 'float32',
    'compute.remat': 'none',
    'train.batch_size': 8,
    'train.steps': 4,
    'train.log_every': 1,
    'evaluation.loss': 2,
    'train.eval_batch_size': 8,
    'train.cross_attention_warmup': 0,
    'checkpoint.every': 2,
    'optimizer.warmup_steps': 2,
    **changes,
  }
  source = f'encoder={folder}/llama,decoder={folder}/qwen'
  return [f'--config=configs/pretrained.py:{source}'] + [
    f'--config.{key}={value}' for key, value in values.items()
  ]


@pytest.fixture(scope='module')
def trained(folder):
  """A run of four steps with a teacher."""
  workdir = folder / 'pair'
  # The teacher is the decoder's source, and reads its vocabulary.
  teacher = {
    'teacher.checkpoint': folder / 'qwen',
    'loss.kind': 'distill',
    'loss.distill.share': 0.5,
  }
  # In a process of its own, which TensorFlow never enters.
  done = tiny.run('train', *_flags(folder, **teacher), f'--workdir={workdir}')
  assert done.returncode == 0, done.stdout + done.stderr
  return workdir, done.stdout


def test_a_teacher_reads_the_decoders_vocabulary(folder):
  config, *flags = _flags(folder)
  chosen = f'{config},teacher={folder}/qwen'
  values = command.parse(train.define_flags, [chosen, *flags]).config
  assert values.teacher.checkpoint == f'{folder}/qwen'
  assert values.loss.kind == 'distill'
  with pytest.raises(errors.UserError, match='teacher .*need one vocabulary'):
    tiny.call(train, f'{config},teacher={folder}/llama', *flags, '--dry_run')


def test_both_sides_read_the_same_text(folder, trained, texts):
  opened = vocabulary_pair.Choice(f'{folder}/qwen', f'{folder}/llama').open()
  found = record_sets.RecordSet.open(folder / 'records' / 'train')
  assert found.framing == opened.framing
  assert found.manifest['vocabularies'] == opened.describe()
  assert found.spec.encoder_vocabulary == opened.encoder.fingerprint
  whole = 0
  for row in found.read(range(len(found))):
    for pair in row:
      inputs = opened.encoder.decode(pair.inputs)
      assert inputs == opened.decoder.decode(pair.prefix)
      joined = opened.decoder.decode([*pair.prefix, *pair.targets])
      assert joined.startswith(inputs)
      whole += any(inputs and inputs in text for text in texts)
  assert whole > 20
  _, shown = trained
  assert '<|begin_of_text|>' in shown and '<|endoftext|>' in shown
  assert 'note: the vocabulary' in shown and 'Unicode NFC' in shown


def test_it_trains_evaluates_and_continues(folder, trained, capsys):
  workdir, shown = trained
  losses = [float(x) for x in re.findall(r'held-out loss ([\d.]+) per', shown)]
  assert len(losses) == 3 and losses[-1] < losses[0]
  # Continued for two more steps, without the teacher.
  flags = _flags(folder, **{'train.steps': 6})
  assert tiny.call(train, *flags, f'--workdir={workdir}') == 0
  assert 'resuming at step 4' in capsys.readouterr().out
  summary = folders.read(workdir / 'summary.json')
  assert summary['steps'] == 6
  found = manager.open_latest(workdir)
  opened = vocabulary_pair.Choice(f'{folder}/qwen', f'{folder}/llama').open()
  assert found.read_meta()['vocabularies'] == opened.describe()
  result = folders.evaluate(workdir, folder / 'records' / 'eval')
  assert result['loss'] == pytest.approx(summary['eval_loss'], rel=1e-5)


def test_it_generates_and_chats(trained, tmp_path, capsys):
  workdir, _ = trained
  output = tmp_path / 'out.json'
  flags = [f'--checkpoint={workdir}', '--max_tokens=8', f'--output={output}']
  text = 'the quick caf\u00e9'
  assert tiny.call(generate, *flags, f'--prompt={text}') == 0
  plain = json.loads(output.read_text())
  assert plain['ended'] == 'eos' or plain['tokens'] == 8
  output.unlink()
  file = tmp_path / 'chats.jsonl'
  file.write_text(json.dumps([{'role': 'user', 'content': text}]) + '\n')
  assert tiny.call(generate, *flags, f'--prompts={file}', '--chat') == 0
  answer = json.loads(output.read_text())
  assert answer['continuation'] != plain['continuation']
  assert '<|' not in answer['continuation']


def test_a_decoder_is_measured_through_its_own_tokens(
  folder, trained, tmp_path
):
  """On the pair's rows."""
  del trained  # The records are there.
  output = folders.import_folder(folder / 'qwen', tmp_path / 'qwen')
  held_out = folder / 'records' / 'eval'
  assert folders.evaluate(output, held_out)['target_tokens'] > 0
  # The encoder's vocabulary is none of its own.
  other = folders.import_folder(folder / 'llama', tmp_path / 'llama')
  with pytest.raises(errors.UserError, match='of the decoder, the model with'):
    folders.evaluate(other, held_out)


def test_a_converted_pair_keeps_both_tokenizers(
  folder, tmp_path, capsys, monkeypatch
):
  sources = [f'--encoder={folder}/llama', f'--decoder={folder}/qwen']
  output = folders.adapt(tmp_path / 'pair', *sources)
  assert 'have different tokenizers' in capsys.readouterr().out
  moved = output.rename(tmp_path / 'moved')
  opened = config_lib.load_run(str(moved)).data.vocabularies.open()
  for side, name in (('encoder', 'llama'), ('decoder', 'qwen')):
    own = vocabulary_pair.open_vocabulary(folder / name)
    assert opened.sides[side].fingerprint == own.fingerprint
    assert opened.sides[side].path.startswith(str(moved))
  # Out and in again: each side's files are where they belong.
  exported = folders.export(moved, tmp_path / 'exported')
  top = vocabulary_pair.open_vocabulary(exported)
  assert top.fingerprint == opened.encoder.fingerprint
  assert (exported / 'decoder_tokenizer' / 'tokenizer.json').exists()
  again = folders.import_folder(exported, tmp_path / 'again')
  assert config_lib.load_run(str(again)).data.vocabularies.open().differ
  copied = folders.export(again, tmp_path / 'copied')
  for file in exported.rglob('tokenizer*.json'):
    copy = copied / file.relative_to(exported)
    assert copy.read_bytes() == file.read_bytes()
  # Its encoder alone has one of them.
  embeds = folders.export(moved, tmp_path / 'encoder', '--embedding=mean')
  assert not (embeds / 'decoder_tokenizer').exists()
  own = encdec_adapt.load(embeds).stored.open_vocabularies()
  text = 'the quick brown'
  ids = opened.encoder.encode(text).tolist()
  assert own.decoder.encode(text).tolist() == ids
  assert own.decoder.size == opened.encoder.size != opened.decoder.size
  pytest.importorskip('transformers')
  capsys.readouterr()
  tokens = folders.run_card(exported, monkeypatch)['tokens'][0].numpy()
  assert capsys.readouterr().out == opened.decoder.decode(tokens) + '\n'
  loaded = encdec_adapt.load(exported)
  assert loaded.special_ids.eos == (opened.decoder.eos,)
  assert tiny.generate(exported, 'the quick', tmp_path / 'out.json') == 0
