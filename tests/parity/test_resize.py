"""`convert resize`: new tokens of a model, read alike by transformers."""

import ml_dtypes
import numpy as np
import pytest

import encdec_adapt
from encdec_adapt.base import errors
from encdec_adapt.stored import model_on_disk
from encdec_adapt.tokenizers import vocabulary_pair
from tests import tiny, toy_models
from tests.parity import tiny_models
from tests.tokenizers import t5_files

pytestmark = pytest.mark.parity
torch, transformers = tiny_models.torch, tiny_models.transformers

# Model -> its tokenizer, and its tables and heads.
CASES = {
  'gemma2': ('gemma', 1),
  'llama3': ('llama3', 2),
  'qwen2': ('qwen', 2),
  't5gemma_unbalanced': ('gemma', 3),
  't5': ('t5', 1),
  'umt5': ('t5', 2),
  'bart': ('llama3', 1),
}
DRAWN, COPIED, SPECIAL = 'kinase', 'zorp', '<|tool|>'
TEXT = 'a kinase of zorpkinase'


def _save(folder, name, more=0):
  """Saves a model with `more` rows than its tokenizer has tokens."""
  case, family = tiny_models.CASES[name], CASES[name][0]
  if family == 't5':
    tiny_models.save_t5_tokenizer(folder)
  else:
    tiny_models.save_tokenizer(folder, family)
  tokens = vocabulary_pair.open_vocabulary(folder)
  size = tokens.size + more
  settings = case.settings()
  parts = [settings, getattr(settings, 'encoder', None)]
  for part in [*parts, getattr(settings, 'decoder', None)]:
    if part is not None:
      part.vocab_size = size
      if family != 't5':
        part.bos_token_id, part.eos_token_id = tokens.bos, tokens.eos
        part.pad_token_id = tokens.pad
      if name == 'bart':
        part.decoder_start_token_id = tokens.bos
  model = tiny_models.make(case, settings=settings)
  model.save_pretrained(folder)
  return model


def _write(path, *lines):
  path.write_text('\n'.join(lines) + '\n')
  return f'--tokens={path}'


@pytest.mark.parametrize('name', CASES)
def test_tokens_are_added(tmp_path, name):
  folder, run, out = (tmp_path / x for x in ('model', 'run', 'export'))
  case = tiny_models.CASES[name]
  more = 2 if name == 't5' else 0  # T5 itself has rows without tokens.
  theirs = _save(folder, name, more)
  vocab = vocabulary_pair.open_vocabulary(folder)
  source, size = int(vocab.text_ids[-1]), vocab.size
  copied = f'{COPIED}\t{vocab.piece(source)}'
  tokens = _write(tmp_path / 'tokens', DRAWN, copied, SPECIAL)
  flags = f'--checkpoint={folder}', f'--output={run}', '--vocab_multiple=8'
  assert tiny.convert('resize', *flags, tokens) == 0

  stored = model_on_disk.open_model(run)
  vocab = stored.require_vocabularies().decoder
  ids = {x: size + i for i, x in enumerate((DRAWN, COPIED, SPECIAL))}
  read = vocab.encode(TEXT).tolist()
  new = [ids[x] for x in (DRAWN, COPIED, DRAWN)]
  assert [i for i in read if i >= size] == new
  assert max(vocab.encode(SPECIAL)) < size == vocab.specials[SPECIAL] - 2
  before = model_on_disk.open_model(folder).arrays()
  tables = {k: v for k, v in stored.arrays().items() if k.endswith('/table')}
  assert len(tables) == CASES[name][1]
  for path, table in tables.items():
    old, table = np.asarray(before[path])[:size], np.asarray(table)
    np.testing.assert_array_equal(table[:size], old)
    np.testing.assert_array_equal(table[ids[COPIED]], old[source])
    drawn = table[[ids[DRAWN], ids[SPECIAL]]]
    deviations = (drawn - old.mean(0)) / old.std(0)
    assert 0.6 < deviations.std() < 1.4
    assert len(table) % 8 == 0
    assert not table[size + 3 :].any()
  if name == 'bart':  # Its bias is not trained.
    bias = np.asarray(stored.arrays()['decoder/bias/logits_bias'])
    new = bias[[*ids.values()]]
    assert bias[:size].all() and new.tolist() == [0, bias[source], 0]

  assert tiny.convert('export', f'--checkpoint={run}', f'--output={out}') == 0
  tokenizer = transformers.AutoTokenizer.from_pretrained(out)
  assert tokenizer(TEXT, add_special_tokens=False).input_ids == read
  assert tokenizer.convert_tokens_to_ids(SPECIAL) == ids[SPECIAL]
  rows = tiny_models.batch(case)
  exported = tiny_models.load(out)
  np.testing.assert_allclose(
    tiny_models.their_logits(exported, rows)[:, :size],
    tiny_models.their_logits(theirs, rows)[:, :size],
    rtol=0,
    atol=1e-6,
  )
  rows.decoder[0, 2:5] = [*ids.values()]
  ours = encdec_adapt.load(run, encoder_window=case.encoder_window)
  tiny_models.assert_same_logits(ours, exported, rows)


@pytest.mark.parametrize('name', ['qwen2', 't5'])
def test_rows_for_tokens_that_transformers_added(tmp_path, name):
  folder, run = tmp_path / 'model', tmp_path / 'run'
  _save(folder, name)
  if name == 't5':  # As transformers 4 saved it.
    t5_files.train(folder / vocabulary_pair.T5)
  size = vocabulary_pair.open_vocabulary(folder).size
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  tokenizer.add_tokens(['kinase', 'zorp'])
  tokenizer.save_pretrained(folder)
  flags = f'--output={run}', '--vocab_multiple=1'
  with pytest.raises(errors.UserError, match="'kinase'.*`convert resize`"):
    tiny.convert('import', f'--source={folder}', *flags)
  assert tiny.convert('resize', f'--checkpoint={folder}', *flags) == 0
  stored = model_on_disk.open_model(run)
  assert stored.model.decoder.vocab_size == size + 2
  text = 'a kinase of zorp'
  ids = tokenizer(text, add_special_tokens=False).input_ids
  assert stored.open_vocabularies().decoder.encode(text).tolist() == ids
  again = f'--checkpoint={run}', f'--output={tmp_path}/again'
  with pytest.raises(errors.UserError, match='nothing to add'):
    tiny.convert('resize', *again)


def test_a_run_in_bfloat16_with_two_tokenizers(tmp_path):
  sources = tmp_path / 'gemma2', tmp_path / 'qwen2'
  for folder in sources:
    _save(folder, folder.name)
    toy_models.change(
      folder, lambda t: {k: v.astype(ml_dtypes.bfloat16) for k, v in t.items()}
    )
  pair, run = tmp_path / 'pair', tmp_path / 'run'
  flags = f'--encoder={sources[0]}', f'--decoder={sources[1]}'
  assert tiny.convert('adapt', *flags, f'--output={pair}') == 0
  tokens = _write(tmp_path / 'tokens', DRAWN, 'zorp')
  flags = f'--checkpoint={pair}', f'--output={run}'
  assert tiny.convert('resize', *flags, tokens) == 0
  old, new = (model_on_disk.open_model(x) for x in (pair, run))
  opened = new.require_vocabularies()
  assert opened.differ
  for side, vocab in opened.sides.items():
    before, after = (x.arrays()[f'{side}/embedder/table'] for x in (old, new))
    (i,) = set(vocab.encode(f'x {DRAWN} x').tolist()) - set(
      old.open_vocabularies().sides[side].encode('x x').tolist()
    ) - {*range(vocab.size - 2)}  # fmt: skip
    assert i == vocab.size - 2 == old.model.stacks[side].vocab_size
    np.testing.assert_array_equal(np.asarray(after)[:i], np.asarray(before)[:i])
    assert np.asarray(after)[i : i + 2].all()
    # A part that begins after the old rows.
    part = after.read_part((slice(i + 1, i + 2), slice(0, 4)))
    np.testing.assert_array_equal(part[0], np.asarray(after)[i + 1, :4])


@pytest.mark.parametrize(
  'lines, words',
  [
    (['the'], "the token 'the' exists already, with the id"),
    (['kinase', 'kinase'], "line 2 of .*'kinase', is a token of an earlier"),
    (['kinase', ''], 'line 2 of .* must be a token without spaces'),
    (['kinase\tzzzz'], "copies 'zzzz', and the model has no row for it"),
    ([], 'line 1 of .* must be a token'),
    (['\u00fcber'], "with the token '\u00fcber' .* take ASCII"),
    (['<sentinel_0>', 'kinase'], 'sentinels must be its last tokens'),
  ],
)
def test_lines_are_refused(tmp_path, lines, words):
  folder = tmp_path / 'model'
  _save(folder, 'qwen2')
  flags = f'--checkpoint={folder}', f'--output={tmp_path}/run'
  with pytest.raises(errors.UserError, match=words):
    tiny.convert('resize', *flags, _write(tmp_path / 'tokens', *lines))
  assert not (tmp_path / 'run').exists()
