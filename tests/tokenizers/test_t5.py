"""T5's tokenizers: framing, sentinels, what they lose, and transformers'."""

import json

import numpy as np
import pytest

from encdec_adapt.base import errors
from encdec_adapt.stored import pretrained_files
from encdec_adapt.tokenizers import (
  special_ids,
  tokenizer_writer,
  vocabulary_pair,
)
from tests.tokenizers import t5_files

SIZE = t5_files.PIECES + 100
NAMES = ' '.join(['<pad> </s> <unk>', '<extra_id_0>', '\u2581<extra_id_7>'])
TEXTS = [
  '  The  value\nof \ufb01ve A\u030a names.\t\n',
  'a\n\nb',
  'x',
  '',
  ' ',
  'Caf\u00e9 \u4f60\u597d \U0001f600 end',
]


@pytest.fixture(scope='module')
def path(tmp_path_factory):
  return t5_files.train(tmp_path_factory.mktemp('t5') / 'spiece.model')


@pytest.fixture(scope='module')
def t5(path):
  return vocabulary_pair.open_vocabulary(path.parent)


def test_framing_is_declared_and_kept(t5):
  assert (t5.pad, t5.eos, t5.unk, t5.bos, t5.mask) == (0, 1, 2, 0, None)
  described = json.loads(json.dumps({'encoder': t5.describe()}))
  described['decoder'] = described['encoder']
  kept = special_ids.Framing.from_description(described)
  assert kept.encoder == t5.ids
  assert kept.encoder.frame([7, 8], 'encoder') == [7, 8, 1]
  assert kept.encoder.frame(np.array([7, 8]), 'decoder') == [0, 7, 8]
  # Manifests of before have no framing: it was Gemma's.
  del described['encoder']['ends_with_eos']
  old = special_ids.Framing.from_description(described)
  assert old.encoder.frame([7, 8], 'encoder') == [0, 7, 8]


def test_sentinels_count_down_from_the_last_token(t5, tmp_path):
  assert t5.size == SIZE and t5.mode_ids == {}
  assert t5.sentinels == list(range(SIZE - 1, t5_files.PIECES - 1, -1))
  assert t5.piece(SIZE - 1) == '<extra_id_0>'
  ids = [0, SIZE - 1, *t5.encode('of a'), SIZE - 2, 1]
  assert t5.decode_generated(ids) == 'of a'
  shown = t5.decode(ids, show_special=True)
  assert shown == '<pad><extra_id_0>of a<extra_id_1></s>'
  # mT5's are in its file, whatever is beside it.
  t5_files.train(tmp_path / 'mt5' / 'spiece.model', 20, byte_fallback=True)
  (tmp_path / 'mt5' / 'tokenizer_config.json').write_text('{"extra_ids": 0}')
  mt5 = vocabulary_pair.open_vocabulary(tmp_path / 'mt5')
  assert mt5.size == t5_files.PIECES
  last = t5_files.PIECES - 1
  assert mt5.sentinels == list(range(last, last - 20, -1))
  for vocab in (t5, mt5):  # Spelled out, they are their characters.
    spelled = vocab.encode(NAMES)
    assert not set(spelled) & {*vocab.specials.values()} - {vocab.unk}
  plain = ' '.join(NAMES.replace('\u2581', ' ').split())
  assert mt5.decode(mt5.encode(NAMES)) == plain


def test_extra_ids_of_the_config_beside_count(path, t5, tmp_path):
  (tmp_path / 'spiece.model').write_bytes(path.read_bytes())
  (tmp_path / 'tokenizer_config.json').write_text('{"extra_ids": 300}')
  umt5 = vocabulary_pair.open_vocabulary(tmp_path)
  assert umt5.size == t5_files.PIECES + 300 and len(umt5.sentinels) == 300
  assert umt5.fingerprint != t5.fingerprint


def test_what_is_lost_is_noted(t5):
  assert 'merges spaces and drops line breaks' in t5.note
  text = '  The  value\nof x '
  assert t5.decode(t5.encode(text)) == 'The value of x'
  ids, bounds = t5.encode_with_boundaries(text)
  assert ids.tolist() == t5.encode(text).tolist()
  for i, start, end in zip(ids, bounds, bounds[1:], strict=False):
    assert t5.piece(i).strip('\u2581') == text[start:end].strip()


@pytest.mark.parametrize('fallback', [False, True])
def test_ids_are_those_of_transformers(fallback, tmp_path):
  transformers = pytest.importorskip('transformers')
  t5_files.train(tmp_path / 'spiece.model', byte_fallback=fallback)
  own = vocabulary_pair.open_vocabulary(tmp_path)
  out = tmp_path / 'out'
  out.mkdir()
  assert tokenizer_writer.write(out, own) == ''
  tokenizer_writer.check(out, own, [*TEXTS, NAMES])
  tokenizer_writer.check_convertible(own)
  (out / 'config.json').write_text('{"model_type": "t5"}')
  readers = [transformers.AutoTokenizer.from_pretrained(out)]
  if not fallback:  # transformers' T5Tokenizer has none.
    theirs = transformers.T5Tokenizer.from_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path / 'theirs')
    readers.append(theirs)
    saved = vocabulary_pair.open_vocabulary(tmp_path / 'theirs')
    for text in (*TEXTS, NAMES):
      assert saved.encode(text).tolist() == own.encode(text).tolist()
    assert (saved.ids, saved.sentinels) == (own.ids, own.sentinels)
    assert saved.tokens_digest == own.tokens_digest
  for reader in readers:
    assert len(reader) == own.size
    for text in TEXTS:
      ids = reader(text)['input_ids']
      assert ids == own.ids.frame(own.encode(text), 'encoder')
      assert reader.decode(ids, skip_special_tokens=True) == own.decode(ids)
    spelled = reader('The <extra_id_0> x')['input_ids']
    parts = own.encode('The').tolist(), own.encode('x').tolist()
    assert spelled == [*parts[0], SIZE - 1, *parts[1], 1]
  again = vocabulary_pair.open_vocabulary(out)
  assert again.fingerprint == own.fingerprint


@pytest.mark.parametrize(
  'template, forced', [(False, ''), (True, ''), (True, '<extra_id_3>')]
)
def test_codet5_is_framed_by_its_post_processor(template, forced, tmp_path):
  """So is mBART, whose targets begin with the language to write."""
  folder = t5_files.train_code_t5(tmp_path / 'folder', template=template)
  own = vocabulary_pair.open_vocabulary(folder)
  assert own.ids.target_opening == own.ids.opening
  if forced:
    others, language = own, own.specials[forced]
    generation = json.dumps({'forced_bos_token_id': language})
    (folder / 'generation_config.json').write_text(generation)
    own = vocabulary_pair.open_vocabulary(folder)
    assert own.ids.target_opening == (language,)
    assert own.fingerprint != others.fingerprint
    # Ids mean the same text, whichever language is written.
    assert own.tokens_digest == others.tokens_digest
    # Without a generation config, config.json decides.
    (folder / 'generation_config.json').unlink()
    fields = json.loads((folder / 'config.json').read_text())
    fields['forced_bos_token_id'] = language
    (folder / 'config.json').write_text(json.dumps(fields))
    own = vocabulary_pair.open_vocabulary(folder)
    assert own.ids.target_opening == (language,)
  assert own.ids.frame([7], 'encoder') == [own.specials['<s>'], 7, own.eos]
  assert own.ids.frame([7], 'decoder') == [own.pad, 7]
  described = dict.fromkeys(('encoder', 'decoder'), own.describe())
  kept = special_ids.Framing.from_description(described)
  assert kept.encoder == own.ids
  # The config.json of another class need not state the start.
  out = tmp_path / 'out'
  out.mkdir()
  tokenizer_writer.write(out, own)
  (out / 'config.json').write_text('{"model_type": "t5"}')
  again = vocabulary_pair.open_vocabulary(out)
  assert (again.fingerprint, again.ids) == (own.fingerprint, own.ids)
  transformers = pytest.importorskip('transformers')
  reader = transformers.AutoTokenizer.from_pretrained(out)
  for text in TEXTS:
    ids = own.ids.frame(own.encode(text), 'encoder')
    assert reader(text)['input_ids'] == ids


@pytest.mark.parametrize('generation', [{}, {'forced_bos_token_id': None}])
def test_a_generation_config_decides_alone(generation, tmp_path):
  fields = {'model_type': 'bart', 'forced_bos_token_id': 3}
  folder = t5_files.train_code_t5(tmp_path, **fields)
  file = folder / 'generation_config.json'
  file.write_text(json.dumps({'max_length': 9, **generation}))
  own = vocabulary_pair.open_vocabulary(folder)
  assert own.ids.forced is None
  assert file in own.files  # A copy reads the same.
  opened = vocabulary_pair.Opened(own, own)
  sources = {'decoder': folder}
  for vocabularies in (opened, None):
    ids = pretrained_files.special_ids(sources, vocabularies)
    assert ids['forced'] is None
    fields = pretrained_files.config_fields(sources, vocabularies)
    content, _ = pretrained_files.generation_config(
      sources, fields, vocabularies, is_pair=True
    )
    assert content.get('forced_bos_token_id') is None


@pytest.mark.parametrize('name', ['MBart50Tokenizer', 'MBartTokenizer'])
def test_mbart_is_framed_as_its_classes_do(name, tmp_path):
  transformers = pytest.importorskip('transformers')
  is_first = name == 'MBartTokenizer'
  vocabulary = [(x, 0.0) for x in ('<s>', '<pad>', '</s>', '<unk>', '\u2581')]
  vocabulary += [(x, -1.0) for x in 'abcdefghijklmnopqrstuvwxyz']
  theirs = getattr(transformers, name)(
    vocab=vocabulary, src_lang='de_DE', tgt_lang='en_XX'
  )
  theirs.save_pretrained(tmp_path)
  language = theirs.convert_tokens_to_ids('en_XX')
  config = {'decoder_start_token_id': language if is_first else 2}
  (tmp_path / 'config.json').write_text(json.dumps(config))
  forced = json.dumps({'forced_bos_token_id': None if is_first else language})
  (tmp_path / 'generation_config.json').write_text(forced)
  own = vocabulary_pair.open_vocabulary(tmp_path)
  tokens, ids = own.encode('two cats').tolist(), own.ids
  assert ids.frame(tokens, 'encoder') == theirs('two cats').input_ids
  # The first mBART's labels also have the language, after EOS.
  labels = theirs(text_target='two cats').input_ids[: -1 if is_first else None]
  assert [*ids.target_opening, *tokens, own.eos] == labels
  assert own.bos == config['decoder_start_token_id']
  described = dict.fromkeys(('encoder', 'decoder'), own.describe())
  assert special_ids.Framing.from_description(described).encoder == ids
  # Which language to write?
  message = 'forced_bos_token_id in .*generation_config.json'
  if is_first:
    message = 'name the decoder_start_token'
    (tmp_path / 'config.json').write_text('{}')
  (tmp_path / 'generation_config.json').write_text('{}')
  with pytest.raises(errors.UserError, match=message):
    vocabulary_pair.open_vocabulary(tmp_path)


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'decoder_start_token_id': 999}, 'config.json has decoder_start_token_id'),
    ({'decoder_start_token_id': 40}, 'decoder_start_token_id 40, and the tok'),
    ({'eos_token_id': 3}, 'config.json has eos_token_id 3, and the tokenizer'),
    ({'forced_bos_token_id': 3}, 'config.json has forced_bos_token_id 3'),
    ({'pad_token_id': 3}, 'config.json has pad_token_id 3, and the tokenizer'),
  ],
)
def test_framings_that_disagree_are_refused(fields, message, tmp_path):
  folder = t5_files.train_code_t5(tmp_path, **fields)
  with pytest.raises(errors.UserError, match=message):
    vocabulary_pair.open_vocabulary(folder)


def test_t5s_sentencepiece_may_have_bos(tmp_path):
  t5_files.train(tmp_path / 'spiece.model', bos_id=3)
  config = tmp_path / 'tokenizer_config.json'
  config.write_text('{"extra_ids": 0}')
  own = vocabulary_pair.open_vocabulary(tmp_path)
  assert own.ids.frame([7], 'encoder') == [7, 1] and own.bos == own.pad
  assert config in own.files  # A copy reads it again.
  (tmp_path / 'config.json').write_text('{"decoder_start_token_id": 3}')
  assert vocabulary_pair.open_vocabulary(tmp_path).bos == 3


@pytest.mark.parametrize(
  'options',
  [{'add_dummy_prefix': False}, {'normalization_rule_name': 'identity'}],
)
def test_other_normalisation_is_refused_before_training(options, tmp_path):
  t5_files.train(tmp_path / 'spiece.model', **options)
  own = vocabulary_pair.open_vocabulary(tmp_path)
  with pytest.raises(errors.UserError, match='encodes a text differently'):
    tokenizer_writer.check_convertible(own)


def test_byt5_has_no_file(tmp_path):
  own = vocabulary_pair.open_vocabulary('byt5')
  assert own.size == 384 and own.note == ''
  assert own.encode('\u00e9 ').tolist() == [198, 172, 35]
  assert own.sentinels == list(range(258, 158, -1))
  assert own.ids.frame(own.encode('a'), 'encoder') == [100, 1]
  assert own.decode(own.encode('\u00e9\n  ')) == '\u00e9\n  '
  assert own.decode([258, 100, 1], show_special=True) == '<extra_id_0>a</s>'
  assert own.decode([258, 100, 1]) == 'a'
  transformers = pytest.importorskip('transformers')
  tokenizer_writer.write(tmp_path, own)
  tokenizer_writer.check(tmp_path, own, TEXTS)
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
  assert len(theirs) == own.size
  for text in TEXTS:
    assert theirs(text)['input_ids'] == [*own.encode(text), 1]
  again = vocabulary_pair.open_vocabulary(tmp_path)
  assert again.fingerprint == own.fingerprint
