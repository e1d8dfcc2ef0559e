"""Materialising: bytes do not depend on workers and survive restarts."""

import json
import os
import pathlib
import pydoc_data.topics
import re
import signal
import time
import types

import numpy as np
import pytest

from encdec_adapt import materialize
from encdec_adapt.base import errors
from encdec_adapt.cli import command
from encdec_adapt.cluster import lock
from encdec_adapt.data.making import materialization
from encdec_adapt.data.records import loader, manifest_summary, record_sets
from encdec_adapt.objectives import framing, randomness
from encdec_adapt.tokenizers import vocabulary_pair, vocabulary_training
from tests import tiny
from tests.tokenizers import t5_files

DOCUMENTS = 40


@pytest.fixture(scope='module')
def text(tmp_path_factory):
  """A folder of small documents, and a vocabulary trained on them."""
  folder = tmp_path_factory.mktemp('text')
  topics = sorted(pydoc_data.topics.topics.items())[:DOCUMENTS]
  for i, (_, topic) in enumerate(topics):
    (folder / f'{i:02d}.txt').write_text(topic[:2000], encoding='utf-8')
  vocabulary_training.train_vocabulary(
    (topic for _, topic in topics), folder / 'vocabulary.model', 600
  )
  return folder


def make_spec(text, **changes):
  fields = dict(
    source=f'text:{text}/*.txt',
    split='train',
    objective='prefix_lm_uniform',
    encoder_length=24,
    decoder_length=16,
    passes=2,
    shards=3,
    seed=1,
    eval_fraction=0.2,
  )
  return record_sets.RecordSpec(**{**fields, **changes})


def fake_examples(job, tokens):
  """Examples of a known number.

  Document i of 40 is in shard i modulo the shards and gives four pairs; it
  kills its process where DIE_AT names its shard, once the pass before is made.
  """
  spec = job.spec
  job.first_losses['lossy_targets'] = f'shard {job.key.shard}'
  for document in range(job.key.shard, DOCUMENTS, spec.shards):
    if os.environ.get('DIE_AT') == f'{job.key.pass_index}/{job.key.shard}':
      before = pathlib.Path(job.folder) / f'pass-{job.key.pass_index - 1:05}'
      while len(list(before.rglob('*.json'))) < spec.shards:
        time.sleep(0.01)
      os.kill(os.getpid(), signal.SIGKILL)
    keyed = randomness.Keyed(spec.seed, job.key.pass_index, spec.source)
    rng = keyed(str(document))
    for _ in range(4):
      m, n = rng.integers(0, 12), rng.integers(1, 12)
      tokens = rng.integers(5, 600, m + n).astype(np.int32)
      tokens[0] = 10 + document
      job.counts['shared_sentinel_spans'] += 1
      yield framing.Pair(tokens[:m], tokens[m:])


def make(text, folder, workers=1, spec=None, read=fake_examples, **changes):
  (manifest,) = materialization.materialize_sets(
    [(spec or make_spec(text, **changes), folder)],
    vocabulary_pair.Choice(str(text / 'vocabulary.model')),
    workers=workers,
    reader=read,
  )
  return manifest


def contents(folder):
  """Bytes of everything but the lock, which names its last owner."""
  return {
    path.relative_to(folder).as_posix(): path.read_bytes()
    for path in folder.rglob('*')
    if path.is_file() and path.name != lock.FILE
  }


@pytest.fixture(scope='module')
def reference(text, tmp_path_factory):
  folder = tmp_path_factory.mktemp('reference')
  make(text, folder)
  return contents(folder)


@pytest.mark.multiproc
def test_any_number_of_workers_makes_the_same_bytes(text, reference, tmp_path):
  make(text, tmp_path, workers=3)
  assert contents(tmp_path) == reference
  assert len(reference) == 2 * 3 * 2 + 1  # shards and their .json, manifest


@pytest.mark.multiproc
def test_finished_shards_survive_a_killed_worker(
  text, reference, tmp_path, monkeypatch
):
  monkeypatch.setenv('DIE_AT', '1/0')
  with pytest.raises(errors.UserError, match='a worker .* died'):
    make(text, tmp_path, workers=2)
  assert not (tmp_path / 'manifest.json').exists()
  kept = sorted(tmp_path.glob('pass-00000/*/*.array_record'))
  assert len(kept) == 3
  times = [path.stat().st_mtime_ns for path in kept]
  monkeypatch.delenv('DIE_AT')
  make(text, tmp_path)
  assert contents(tmp_path) == reference
  assert [path.stat().st_mtime_ns for path in kept] == times


def test_finished_records_are_left_alone(text, tmp_path):
  first = make(text, tmp_path)
  before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob('*.array_record')}
  assert make(text, tmp_path, read=None) == first  # `reader` is not called.
  assert before == {p: p.stat().st_mtime_ns for p in before}


def test_added_passes_have_their_own_draws(text, reference, tmp_path):
  make(text, tmp_path, passes=1)
  first = contents(tmp_path)
  make(text, tmp_path, passes=2)
  files = contents(tmp_path)
  assert files == reference
  assert all(files[name] == first[name] for name in first if 'shard' in name)
  name = 'part-000/shard-00000-of-00003.array_record'
  assert files[f'pass-00000/{name}'] != files[f'pass-00001/{name}']


def test_a_damaged_shard_alone_is_made_again(text, reference, tmp_path):
  make(text, tmp_path)
  path = tmp_path / 'pass-00001/part-000/shard-00002-of-00003.array_record'
  path.write_bytes(path.read_bytes()[:1000])
  path.with_suffix('.999.tmp').write_bytes(b'of a killed worker')
  with pytest.raises(errors.UserError, match='materialise again'):
    record_sets.RecordSet.open(tmp_path)
  (tmp_path / 'manifest.json').unlink()
  make(text, tmp_path)
  assert contents(tmp_path) == reference


def test_the_manifest_says_what_was_made(text, tmp_path):
  manifest = make(text, tmp_path)
  vocabulary = vocabulary_pair.open_vocabulary(text / 'vocabulary.model')
  assert manifest['spec']['vocabulary'] == vocabulary.fingerprint
  assert len(manifest['spec']['source_fingerprint']) == 32
  for count in ('examples', 'pairs', 'shared_sentinel_spans'):
    assert manifest['totals'][count] == 2 * 4 * DOCUMENTS
  assert '320 spans share' in manifest_summary.describe(manifest)
  found = record_sets.RecordSet.open(tmp_path)
  rows = found.read(range(len(found)))
  targets = sum(len(pair.targets) for row in rows for pair in row)
  assert manifest['totals']['target_tokens'] == targets
  assert manifest['fill']['decoder'] == targets / (16 * len(found))


def test_max_rows_keeps_rows_from_all_over(text, tmp_path, monkeypatch):
  monkeypatch.chdir(text)  # The draws depend on the source's name.
  make(text, tmp_path, source='text:*.txt', pack=False, max_rows=20, passes=1)
  found = record_sets.RecordSet.open(tmp_path)
  assert len(found) == 20
  rows = found.read(range(20))
  assert all(len(row) == 1 for row in rows)
  first = [np.concatenate(row[0].parts)[0] - 10 for row in rows]
  # More than the beginning of each shard.
  assert found.manifest['passes'][0]['shards'][0]['rows'] == 6
  assert len(set(first)) > 12
  assert max(first) > 30
  assert first[:6] == sorted(first[:6])


def no_examples(job, tokens):
  return iter(())


def test_refusals_write_nothing(text, tmp_path):
  with pytest.raises(errors.UserError, match="no rows for split 'train'"):
    make(text, tmp_path / 'empty', read=no_examples)
  counts = dict(dropped=4, short_windows=5)
  dropping = lambda job, _: job.counts.update(counts) or ()  # noqa: E731
  words = 'all 12 examples .* row .*_length=24 .*_length=16.* too_long=truncate'
  with pytest.raises(errors.UserError, match=words):
    make(text, tmp_path / 'long', read=dropping)
  assert not list(tmp_path.glob('*/manifest.json'))
  with pytest.raises(errors.UserError, match='encoder_length=1 .* least 2 and'):
    make(text, tmp_path / 'short', read=None, encoder_length=1)
  assert not list(tmp_path.glob('short/*/*'))
  with pytest.raises(errors.UserError, match='no file matches'):
    make(text, tmp_path / 'new', source='text:/nowhere/*.txt')
  assert not (tmp_path / 'new').exists()
  make(text, tmp_path)
  before = contents(tmp_path)
  with pytest.raises(errors.UserError, match='seed is 1 in the records and 2'):
    make(text, tmp_path, seed=2)
  with lock.hold(tmp_path):
    with pytest.raises(errors.UserError, match='another job'):
      make(text, tmp_path)
  assert contents(tmp_path) == before


def data_config(text, folder, **changes):
  """What config.DataConfig gives."""
  fields = dict(
    folder=str(folder),
    vocabularies=vocabulary_pair.Choice(str(text / 'vocabulary.model')),
    table_sizes={'decoder': 600},
    train_vocabulary=False,
    chat_format='',
    workers=1,
    samples=False,
    lossy_targets='fail',
    train=make_spec(text, passes=1),
    evaluation=make_spec(text, split='eval', passes=1, pack=False, max_rows=8),
  )
  return types.SimpleNamespace(rates='', **{**fields, **changes})


def test_vocabulary_and_records_are_made_from_text(text, tmp_path, capsys):
  data = data_config(
    text,
    tmp_path,
    vocabularies=vocabulary_pair.Choice(str(tmp_path / 'own.model')),
    train_vocabulary=True,
  )
  assert materialization.is_missing(data)
  materialization.materialize(data)
  assert not materialization.is_missing(data)
  assert capsys.readouterr().out.count('own.model does not exist') == 1
  opened = data.vocabularies.open()
  train_set, eval_set = materialization.open_sets(data, opened)
  assert 1 <= len(eval_set) <= 8
  assert train_set.manifest['fill']['decoder'] > 0.85  # it binds
  words = ''
  for fields in loader.Loader(train_set, 4, teacher=True):
    framing.check_framing(fields, train_set.framing)
    words += opened.encoder.decode(fields['encoder_tokens'].ravel())
  assert ' the ' in words


def test_conversations_in_a_vocabulary_of_their_own(text, tmp_path):
  topics = list(pydoc_data.topics.topics.values())[:DOCUMENTS]
  lines = [
    [{'role': 'user', 'content': 'Why?'}, {'role': 'assistant', 'content': x}]
    for x in ('No.', *topics)
  ]
  file = tmp_path / 'a.jsonl'
  file.write_text(''.join(json.dumps({'messages': x}) + '\n' for x in lines))
  changes = dict(
    source=f'chat:{file}', objective='chat', passes=1, pack=False, shards=1
  )
  data = data_config(
    text,
    tmp_path,
    vocabularies=vocabulary_pair.Choice(str(tmp_path / 'own.model')),
    train_vocabulary=True,
    chat_format='chatml',
    train=make_spec(text, **changes, eval_fraction=0.01),
    evaluation=make_spec(text, **changes, split='eval', eval_fraction=0.9),
  )
  materialization.materialize(data)
  decoder = data.vocabularies.open().decoder
  # Trained on what is said, not on the JSON that holds it.
  pieces = ''.join(map(decoder.piece, decoder.text_ids))
  assert 'role' not in pieces and 'content' not in pieces
  records = record_sets.RecordSet.open(tmp_path / 'train')
  ((pair,),) = records.read([0])
  assert [decoder.decode(ids, show_special=True) for ids in pair.parts] == [
    '<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n',
    'No.<|im_end|>',
  ]
  data.vocabularies = vocabulary_pair.Choice(str(text / 'vocabulary.model'))
  with pytest.raises(
    errors.UserError, match="'chatml'.* lacks <|im_end|> <|im"
  ):
    materialization.open_vocabularies(data)


def test_a_job_that_continues_prompts_refuses_long_ones(text, tmp_path):
  file = tmp_path / 'a.jsonl'
  lines = [{'q': 'Why?' * n, 'a': 'No.'} for n in (1, 2, 3, 1, 2, 3, 40)]
  file.write_text(''.join(json.dumps(x) + '\n' for x in lines))

  def write(objective, samples):
    folder = tmp_path / f'{objective}-{samples}'
    changes = dict(source=f'pairs:{file}#q,a', objective=objective, passes=1)
    changes |= dict(pack=False, shards=1)
    data = data_config(
      text,
      folder,
      samples=samples,
      train=make_spec(text, **changes, eval_fraction=0.01),
      evaluation=make_spec(text, **changes, split='eval', eval_fraction=0.9),
    )
    materialization.materialize(data)
    ((shard,),) = (
      x['shards'] for x in record_sets.read_manifest(folder / 'train')['passes']
    )
    return shard['examples'], shard['dropped']

  with pytest.raises(errors.UserError, match='a.jsonl, line 7: its prompt has'):
    write('pairs', True)
  # Unless the objective says what to do with them, and in other jobs.
  counts = {write('pairs:too_long=drop', True), write('pairs', False)}
  assert counts == {(6, 1)}


@pytest.mark.parametrize(
  'target, count, message',
  [
    (
      '日本 a fox',
      1,
      "of 50 .* 1 targets lose .*: '日本 a fox' becomes 'a fox'",
    ),
    ('', 26, 'of 50 examples, 26 targets are empty'),
  ],
)
def test_lossy_and_empty_targets_are_trained_on_if_allowed(
  text, tmp_path, target, count, message
):
  file, vocabulary = tmp_path / 'a.jsonl', tmp_path / 'spiece.model'
  lines = [{'q': 'a', 'a': target if i < count else 'of'} for i in range(50)]
  file.write_text(''.join(json.dumps(x) + '\n' for x in lines))
  changes = dict(source=f'pairs:{file}#q,a', objective='pairs', passes=1)
  choice = vocabulary_pair.Choice(str(t5_files.train(vocabulary)))
  data = data_config(
    text,
    tmp_path,
    vocabularies=choice,
    train=make_spec(text, **changes, eval_fraction=1e-9),
    evaluation=make_spec(text, **changes, split='eval', eval_fraction=0.9),
  )
  for _ in range(2):  # Made, and read again.
    with pytest.raises(errors.UserError, match=message):
      materialization.materialize(data)
  with pytest.raises(errors.UserError, match=message):
    materialization.open_sets(data, choice.open())
  before = contents(tmp_path)
  data.lossy_targets = 'allow'
  materialization.materialize(data)
  assert len(materialization.open_sets(data, choice.open())[0]) > 0
  assert contents(tmp_path) == before


def test_records_of_another_vocabulary_are_refused(text, tmp_path):
  data = data_config(text, tmp_path)
  for part, (spec, folder) in materialization.set_folders(data).items():
    assert folder == tmp_path / part
    make(text, folder, spec=spec)
  materialization.open_sets(data, data.vocabularies.open())
  topics = pydoc_data.topics.topics.values()
  other = tmp_path / 'other.model'
  vocabulary_training.train_vocabulary(topics, other, 500)
  data.vocabularies = vocabulary_pair.Choice(str(other))
  with pytest.raises(errors.UserError, match='vocabulary is .* in the records'):
    materialization.open_sets(data, data.vocabularies.open())
  data.vocabularies = vocabulary_pair.Choice('byt5')
  words = 'frame inputs as `BOS p`, .* byt5 of the encoder as `p EOS`; make'
  with pytest.raises(errors.UserError, match=words):
    materialization.open_sets(data, data.vocabularies.open())
  data.vocabularies = vocabulary_pair.Choice(str(other))
  data.table_sizes = {'decoder': 400}
  with pytest.raises(errors.UserError, match='has 500 tokens.* table 400 rows'):
    materialization.open_vocabularies(data)
  data.vocabularies = vocabulary_pair.Choice(str(tmp_path / 'none.model'))
  with pytest.raises(
    errors.UserError, match='none.model does.*data.vocabulary to'
  ):
    materialization.open_vocabularies(data)


def test_neither_source_nor_teacher_is_asked_for(text, tmp_path, monkeypatch):
  made = []
  monkeypatch.setattr(
    materialization, 'materialize', lambda data, _: made.append(data)
  )
  arguments = [
    '--config=configs/gemma2.py:size=s_s',
    f'--config.data.folder={tmp_path}',
    f'--config.data.vocabulary={text}/vocabulary.model',
  ]
  values = command.parse(materialize.define_flags, arguments)
  # No default: Python's own text would be trained on without a word.
  with pytest.raises(errors.UserError, match='data.source is empty.*text:GLOB'):
    materialize.main(values)
  values.config.data.source = f'text:{text}/*.txt'
  assert materialize.main(values) == 0
  monkeypatch.undo()
  assert materialization.open_vocabularies(made[0]).decoder.size == 600
  # What records are of is asked for.
  values.config.data.vocabulary = f'{tmp_path}/absent.model'
  with pytest.raises(errors.UserError, match='absent.model'):
    materialize.main(values)
  values.config.data.vocabulary = f'{text}/vocabulary.model'
  values.config.model.decoder.vocab_size = 500
  with pytest.raises(errors.UserError, match='600 tokens.*500 rows'):
    materialize.main(values)


def test_rows_and_contamination_are_shown(text, tmp_path, capsys):
  (tmp_path / 'copies').mkdir()
  for name in ('00.txt', '01.txt', '02.txt'):
    copy = tmp_path / 'copies' / name
    copy.write_text((text / '00.txt').read_text())
  flags = {
    'model.kind': 'encoder_decoder',
    'model.encoder.vocab_size': 600,
    'model.decoder.vocab_size': 600,
    'data.folder': tmp_path / 'records',
    'data.vocabulary': text / 'vocabulary.model',
    'data.source': f'text:{text}/*.txt + text:{tmp_path}/copies/*.txt',
    'data.objective': 'mask_tokens:share=0.5,shortest=40',
    'data.encoder_length': 48,
    'data.decoder_length': 48,
    'data.shards': 1,
    'data.workers': 1,
    'data.deduplicate': True,
  }
  arguments = [
    '--config=configs/base.py',
    '--show',
    '--n=1',
    f'--contamination=text:{text}/0[0-4].txt',
    *(f'--config.{key}={value}' for key, value in flags.items()),
  ]
  values = command.parse(materialize.define_flags, arguments)
  assert materialize.main(values) == 0
  shown = capsys.readouterr().out
  assert 'data: 3 documents are duplicates' in shown
  # All but those that are held out.
  assert ' of 5 examples share 13 words' in shown
  assert shown.count('row 0: ') == 2 and '<mask>' in shown
  # The second time finds the records, and tells the same of them.
  assert re.search(r'copies/\*.txt: 3\d documents, .* target tokens', shown)
  assert re.search(r'\d+ last windows shorter than .* were dropped\n', shown)
  made = {line for line in shown.splitlines() if ' documents, ' in line}
  values.show, values.contamination = False, ''
  assert materialize.main(values) == 0
  assert made <= set(capsys.readouterr().out.splitlines())


def test_the_texts_of_a_laptop_are_long_or_short(tmp_path, capsys):
  for name, unit, text, words in (
    ('long', '', 'Word.\n\n' * 20_000, r'\d passages, .*; 1 documents'),
    ('short', '#lines', 'Go.\n' * 800, r'(\d\d) documents, \d r.* \1 ex'),
  ):
    (tmp_path / name).write_text(text)
    flags = f'source=text:{tmp_path}/{name}{unit} vocabulary=bytes'.split()
    flags = [f'--config.data.{x}' for x in [*flags, 'max_bytes=100_000']]
    flags = ['--config=laptop', f'--workdir={tmp_path}/{name}_run', *flags]
    assert materialize.main(command.parse(materialize.define_flags, flags)) == 0
    assert re.search(f'eval: .*: {words}', capsys.readouterr().out)


@pytest.mark.multiproc
def test_a_bad_document_ends_the_command_with_one_paragraph(tmp_path):
  (tmp_path / 'a.jsonl').write_text('{"text": "fine"}\n{"body": 1}\n' * 2)
  flags = f'source=jsonl:{tmp_path}/a.jsonl vocabulary=bytes eval_fraction=0.5'
  ended = tiny.run(
    'materialize',
    '--config=configs/base.py',
    f'--workdir={tmp_path}',
    *(f'--config.data.{flag}' for flag in flags.split()),
  )
  assert ended.returncode == 2
  assert ended.stderr.count('\n') == 1, ended.stderr
  assert 'a.jsonl, line ' in ended.stderr
