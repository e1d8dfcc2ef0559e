"""Folders that transformers saves, in every form, and their round trip."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

import encdec_adapt
from encdec_adapt.adaptation import weight_plan
from encdec_adapt.huggingface import config_json, export, tensor_folder
from encdec_adapt.huggingface import folder as folder_lib
from encdec_adapt.models import model_config, parameters
from tests import toy_models
from tests.parity import tiny_models

pytestmark = pytest.mark.parity


def assert_comes_back(source, folder, may_miss=None):
  """Exports a folder: tensors are bit-equal, and the class loads them all."""
  opened = folder_lib.ModelFolder(source)
  raw = json.loads((source / tensor_folder.CONFIG).read_text())
  ids = {name: raw[name] for name in config_json.TOKEN_IDS if name in raw}
  fields = {'decoder': ids}
  export.write(folder, opened.config, opened.arrays(), fields=fields)
  before, after = (tensor_folder.TensorFolder(x) for x in (source, folder))
  kept = set(before.tensors) - set(opened.unused)
  assert set(after.tensors) == kept
  for name in kept:
    one, other = before.read(name), after.read(name)
    assert one.dtype == other.dtype
    assert one.tobytes() == other.tobytes(), name
  return tiny_models.load(folder, may_miss)


@pytest.mark.long
@pytest.mark.parametrize(
  'name', [x for x in tiny_models.CASES if not x.endswith('_images')]
)
def test_export_loads_and_predicts_the_same(name, saved, tmp_path):
  theirs, folder, _ = saved(name)
  # The model alone has no vision part.
  may_miss = 'model.encoder.' if name == 't5gemma2' else None
  again = assert_comes_back(folder, tmp_path / 'again', may_miss)
  rows = tiny_models.batch(tiny_models.CASES[name])
  np.testing.assert_array_equal(
    tiny_models.their_logits(theirs, rows),
    tiny_models.their_logits(again, rows),
  )


def _fours(raw):
  """Returns a config.json, or a part of one, as transformers 4 spells it."""
  old = {
    key: _fours(value)
    if key in ('encoder', 'decoder', 'text_config')
    else value
    for key, value in raw.items()
    if key not in ('rope_parameters', 'layer_types', 'dtype')
  }
  old['torch_dtype'] = raw.get('dtype', 'float32')
  rope = raw.get('rope_parameters')
  if not rope:
    return old
  if raw['model_type'] == 'modernbert':
    old['global_rope_theta'] = rope['full_attention']['rope_theta']
    old['local_rope_theta'] = rope['sliding_attention']['rope_theta']
    return old
  if 'full_attention' in rope:
    old['rope_local_base_freq'] = rope['sliding_attention']['rope_theta']
    old['sliding_window_pattern'] = 3
    rope = rope['full_attention']
  scaling = {k: v for k, v in rope.items() if k != 'rope_theta'}
  old['rope_theta'] = rope['rope_theta']
  old['rope_scaling'] = scaling if rope['rope_type'] != 'default' else None
  return old


@pytest.mark.parametrize(
  'name', [x for x in tiny_models.CASES if 'gemma4' not in x]
)
def test_configs_of_transformers_4(name, saved, tmp_path):
  """We read them alike, and so does transformers, so they are valid."""
  theirs, folder, _ = saved(name)
  shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
  expected = folder_lib.ModelFolder(folder).config
  file = tmp_path / tensor_folder.CONFIG
  old = _fours(json.loads(file.read_text()))
  file.write_text(json.dumps(old))
  assert folder_lib.ModelFolder(tmp_path).config == expected
  settings = tiny_models.transformers.AutoConfig.from_pretrained(tmp_path)
  for part in ('encoder', 'decoder', 'text_config'):
    if hasattr(settings, part):
      ours, its = (getattr(x, part) for x in (settings, theirs.config))
      ours, its = (getattr(x, 'text_config', x) for x in (ours, its))
      assert ours.rope_parameters == its.rope_parameters
      assert ours.layer_types == its.layer_types
  assert getattr(settings, 'rope_parameters', None) == (
    getattr(theirs.config, 'rope_parameters', None)
  )


@pytest.mark.parametrize('dtype', ['float16', 'bfloat16'])
@pytest.mark.parametrize('name', ['qwen2', 't5gemma_unbalanced'])
def test_weights_in_half_precision_and_shards(name, dtype, tmp_path):
  case = tiny_models.CASES[name]
  theirs = tiny_models.make(case).to(getattr(tiny_models.torch, dtype))
  theirs.save_pretrained(tmp_path / 'model', max_shard_size='20KB')
  assert (tmp_path / 'model' / tensor_folder.INDEX).exists()
  ours = encdec_adapt.load(
    tmp_path / 'model', encoder_window=case.encoder_window
  )
  rows = tiny_models.batch(case)
  theirs = tiny_models.load(tmp_path / 'model', dtype=tiny_models.torch.float32)
  tiny_models.assert_same_logits(ours, theirs, rows)
  assert_comes_back(tmp_path / 'model', tmp_path / 'again')


def test_towers_and_keys_that_gemma_4_does_not_read_are_unused(saved, tmp_path):
  """As in the released files: a multimodal config, and keys of every layer."""
  _, folder, ours = saved('gemma4_shared')
  shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
  raw = json.loads((tmp_path / tensor_folder.CONFIG).read_text())

  def released(tensors):
    renamed = {
      name.replace('model.', 'model.language_model.', 1): x
      for name, x in tensors.items()
    }
    key = 'model.language_model.layers.{}.self_attn.k_proj.weight'
    renamed[key.format(7)] = renamed[key.format(0)]
    towers = 'vision_tower', 'embed_vision', 'audio_tower', 'embed_audio'
    return renamed | {f'model.{x}.weight': np.zeros(1) for x in towers}

  toy_models.change(
    tmp_path, released, model_type='gemma4', text_config=raw, architectures=None
  )
  opened = folder_lib.ModelFolder(tmp_path)
  assert opened.config == ours.config
  assert len(opened.unused) == 5
  rows = tiny_models.batch(tiny_models.CASES['gemma4_shared'])
  np.testing.assert_array_equal(
    tiny_models.our_logits(encdec_adapt.load(tmp_path), rows),
    tiny_models.our_logits(ours, rows),
  )


def test_a_folder_of_bart_without_a_head_is_read(saved, tmp_path):
  _, folder, ours = saved('mbart')
  shutil.copytree(folder, tmp_path, dirs_exist_ok=True)

  def without_head(tensors):
    del tensors['final_logits_bias']
    return {name.removeprefix('model.'): x for name, x in tensors.items()}

  toy_models.change(tmp_path, without_head, architectures=['MBartModel'])
  rows = tiny_models.batch(tiny_models.CASES['mbart'])
  np.testing.assert_array_equal(
    tiny_models.our_logits(encdec_adapt.load(tmp_path), rows),
    tiny_models.our_logits(ours, rows),
  )
  # Of an encoder alone, positions are its own and the table is the decoder's.
  encoder = model_config.DecoderOnlyConfig(ours.config.encoder)
  filled = weight_plan.make_plan(encoder, ours.config).filled
  for leaf, side in (('positions', 'encoder'), ('table', 'decoder')):
    leaf = f'embedder/{leaf}'
    assert filled[f'decoder/{leaf}'].leaf == f'{side}/{leaf}'


def test_an_encoder_of_a_pair_is_taken_with_the_shared_table(saved):
  stack = saved('gemma4_shared')[2].config.decoder
  pair = model_config.encoder_decoder(stack, stack)
  paths = parameters.parameter_table(pair)
  assert 'encoder/layer_inputs/table' not in paths
  encoder = dataclasses.replace(stack, role='bidirectional')
  plan = weight_plan.make_plan(model_config.DecoderOnlyConfig(encoder), pair)
  fill = plan.filled['decoder/layer_inputs/table']
  assert (fill.how, fill.leaf) == ('copied', 'decoder/layer_inputs/table')
  padded = model_config.with_vocab_multiple(pair, 64)
  columns = stack.layers * stack.layer_input_width
  rows = stack.table_rows, padded.decoder.table_rows
  counted = parameters.padding(padded)['decoder/layer_inputs/table']
  assert counted == (rows[1] - rows[0]) * columns
