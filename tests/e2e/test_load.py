"""`encdec_adapt.load` and `generate` on Hugging Face folders."""

import json
import shutil

import jax
import numpy as np
import pytest

import encdec_adapt
from encdec_adapt import generate
from encdec_adapt.base import errors
from encdec_adapt.checkpoints import manager
from encdec_adapt.inference import engine, sampling
from encdec_adapt.sharding import mesh as mesh_lib
from tests import tiny
from tests.e2e import folders

pytestmark = pytest.mark.e2e

ROWS = np.arange(24, dtype=np.int32).reshape(2, 12) + 3


@pytest.fixture(scope='module')
def odd(folder):
  """A folder with a vocabulary that divides over no mesh."""
  shape = {**folders.GEMMA, 'vocab_size': 397, 'kv_heads': 2}
  return folders.make_folder(folder / 'odd', shape)


@pytest.fixture(scope='module')
def loaded(adapted):
  return encdec_adapt.load(adapted)


def _mesh(**axes):
  config = mesh_lib.MeshConfig(**axes)
  return mesh_lib.make_mesh(config, jax.devices()[:4])


@pytest.mark.long
@pytest.mark.sharded
def test_a_mesh_changes_no_logits(odd):
  alone = encdec_adapt.load(odd)
  meshed = encdec_adapt.load(odd, mesh=_mesh(fsdp=2, tensor=2))
  table = meshed.params['decoder']['embedder']['table']
  assert table.shape == (400, 16)
  assert table.addressable_shards[0].data.shape == (100, 16)
  logits = meshed.logits(ROWS)
  assert logits.shape == (2, 12, 397)
  np.testing.assert_allclose(logits, alone.logits(ROWS), atol=2e-5)
  texts = (_continue(model, *ROWS, max_tokens=4) for model in (meshed, alone))
  np.testing.assert_array_equal(*texts)


@pytest.mark.sharded
def test_a_mesh_over_which_heads_do_not_divide_is_refused(odd):
  words = "'kv_heads' of size 2.*another mesh"
  with pytest.raises(errors.UserError, match=words):
    encdec_adapt.load(odd, mesh=_mesh(tensor=4))


def _continue(model, *prompts, **options):
  requests = [engine.Request(prompt, **options) for prompt in prompts]
  completions = dict(model.engine(rows=len(prompts)).run(requests))
  return [completions[i].tokens for i in range(len(prompts))]


def _generate(output, *argv):
  flags = [*map(str, argv), '--max_tokens=9', f'--output={output}']
  output.unlink(missing_ok=True)
  assert tiny.call(generate, *flags) == 0
  (line,) = output.read_text().splitlines()
  sample = json.loads(line)
  del sample['of']
  return sample


def test_generate_reads_a_folder_and_ends_as_it_says(gemma, imported, tmp_path):
  """The same of a folder and of the run that was imported from it."""
  copy = shutil.copytree(gemma, tmp_path / 'copy')
  file = copy / 'generation_config.json'
  file.write_text('{}')
  output = tmp_path / 'out.json'
  drawn = ['--prompt=the quick', '--temperature=1']
  loaded = encdec_adapt.load(copy)
  assert loaded.special_ids.eos == (1,)
  reader = loaded.stored.open_vocabularies().decoder
  prompt = np.array([reader.bos, *reader.encode('the quick')])
  drawn_alike = sampling.SamplingConfig(1.0, seed=sampling.seed_of(0, 0))
  (text,) = _continue(loaded, prompt, max_tokens=9, sampling=drawn_alike)
  # A token that does not come up before it ends it, once the folder says so.
  at = next(n for n in range(1, 9) if text[n] not in text[:n])
  end = int(text[at])
  file.write_text(json.dumps({'eos_token_id': [1, end]}))
  ended = _generate(output, f'--checkpoint={copy}', *drawn)
  assert (ended['tokens'], ended['ended']) == (at + 1, 'eos')
  run = shutil.copytree(imported, tmp_path / 'run')
  kept = run / 'hugging_face' / 'decoder' / 'generation_config.json'
  kept.write_text(file.read_text())
  config = json.loads((run / 'config.json').read_text())
  config['compute']['dtype'] = 'float32'  # As folders compute.
  (run / 'config.json').write_text(json.dumps(config))
  sample = _generate(output, f'--checkpoint={run}', *drawn)
  assert sample == {**ended, 'run': 'run'}


def test_the_window_is_as_stored_unless_it_is_given(
  adapted, cross_family, tmp_path
):
  for path in (adapted, folders.export(cross_family, tmp_path / 'own_layout')):
    for given, rule in ((None, 'exclusive'), ('inclusive', 'inclusive')):
      loaded = encdec_adapt.load(path, encoder_window=given)
      assert loaded.config.encoder.window_rule == rule


@pytest.mark.parametrize(
  'flags, window, words',
  [
    (None, 'foo', "'foo'; it must be one of excl"),
    (None, 'exclusive', 'no bidirectional encoder'),
    (['--model.cross_merged'], 'inclusive', 'has merged attention'),
  ],
)
def test_unknown_and_unfit_windows(gemma, flags, window, words, tmp_path):
  path = gemma
  if flags:
    path = folders.adapt(tmp_path / 'pair', f'--encoder={gemma}', *flags)
  with pytest.raises(errors.UserError, match=words):
    encdec_adapt.load(path, encoder_window=window)


@pytest.mark.parametrize(
  'change, words',
  [
    (dict(decoder_tokens=ROWS + 390), r'decoder are 393 to 416; .* 0 to 399'),
    (dict(encoder_tokens=-ROWS), 'encoder are -26 to -3'),
    (dict(encoder_tokens=ROWS[0]), r'encoder are int32 of shape \[12\]'),
    (dict(decoder_tokens=ROWS / 2), r'decoder are float64 of shape \[2, 12\]'),
    (dict(encoder_mask=np.ones((2, 11), bool)), r'2, ?11.*2, ?12'),
  ],
  ids=str,
)
def test_inputs_that_are_refused(change, words, loaded):
  inputs = dict(decoder_tokens=ROWS, encoder_tokens=ROWS) | change
  with pytest.raises((errors.UserError, ValueError), match=words):
    loaded.logits(**inputs)


def test_a_mask_is_true_where_it_is_not_zero(loaded):
  mask = np.ones(ROWS.shape, bool)
  mask[0, 7:] = False
  expected = loaded.logits(ROWS, ROWS, mask)
  for other in (2 * mask, mask * 0.5, mask.tolist()):
    logits = loaded.logits(ROWS.tolist(), ROWS, other)
    np.testing.assert_array_equal(logits, expected)
  assert np.abs(expected - loaded.logits(ROWS, ROWS)).max() > 1e-6


def test_generate_needs_a_tokenizer(wide):
  flags = [f'--checkpoint={wide}', '--prompt=x']
  with pytest.raises(errors.UserError, match='has no tokenizer'):
    tiny.call(generate, *flags)


def test_a_step_that_its_job_deletes_is_chosen_again(
  imported, tmp_path, monkeypatch
):
  run = tmp_path / 'run'
  shutil.copytree(imported, run)
  step, choose = run / manager.FOLDER / '0', manager._open_first

  def choose_late(*arguments):
    checkpoint = choose(*arguments)
    if step.exists():  # The job has saved step 1 meanwhile.
      step.rename(step.with_name('1'))
    return checkpoint

  monkeypatch.setattr(manager, '_open_first', choose_late)
  folders.export(run, tmp_path / 'output')
  step.with_name('1').rename(step)
  with pytest.raises(FileNotFoundError):  # A step that the user named.
    folders.export(f'{run}@0', tmp_path / 'named')


def test_importing_the_package_is_light():
  done = tiny.run_code(
    'import sys, encdec_adapt; print(*sorted({"jax", "flax", "tensorflow",'
    ' "torch", "transformers", "seqio"} & set(sys.modules)))'
  )
  assert (done.returncode, done.stdout.strip()) == (0, '')
