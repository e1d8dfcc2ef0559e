"""Samples during training are what the saved model generates."""

import functools
import json
import os
import shutil

import numpy as np
import pytest

import encdec_adapt
from encdec_adapt import train
from encdec_adapt.checkpoints import manager
from encdec_adapt.data.records import record_sets
from encdec_adapt.evaluation.measures import samples
from encdec_adapt.inference import engine
from encdec_adapt.tokenizers import vocabulary_pair
from tests import event_files, tiny


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  os.chdir(tiny.ROOT)
  folder = tmp_path_factory.mktemp('samples')
  tiny.make_records(folder)
  return folder


def _train(folder, workdir, *flags):
  given = [
    *tiny.flags(folder, 'prefix_lm'),
    '--config.evaluation.loss=2',
    '--config.evaluation.samples=2',
    '--config.checkpoint.every=2',
    '--config.optimizer.learning_rate=0.03',
    *(f'--config.{flag}' for flag in flags),
  ]
  assert tiny.call(train, *given, f'--workdir={workdir}') == 0
  return (workdir / samples.FILE).read_bytes()


def _wanted(folder, workdir):
  """What `encdec_adapt.load` continues the same rows with."""
  held_out = record_sets.RecordSet.open(folder / 'prefix_lm' / 'eval')
  vocabulary = vocabulary_pair.open_vocabulary(folder / 'vocabulary.model')
  model = encdec_adapt.load(workdir)
  wanted = []
  for (pair,) in held_out.read(range(2)):
    prompt = np.append(vocabulary.bos, pair.inputs)
    request = engine.Request(prompt, max_tokens=16)
    ((_, found),) = model.engine(rows=1).run([request])
    wanted.append(
      tuple(
        vocabulary.decode(some, show_special=True, start=False)
        for some in (pair.inputs, pair.targets, found.tokens)
      )
    )
  return wanted


@pytest.mark.long
@pytest.mark.sharded
@pytest.mark.parametrize(
  'kind, mesh',
  [
    ('encoder_decoder', 'mesh.fsdp=-1'),
    pytest.param('prefix_decoder', 'mesh.tensor=2', marks=pytest.mark.slow),
    pytest.param('decoder_only', 'mesh.sequence=2', marks=pytest.mark.slow),
  ],
)
def test_samples_are_what_the_saved_model_generates(
  kind, mesh, folder, tmp_path, capsys
):
  heads = ['model.encoder.kv_heads=2', 'model.decoder.kv_heads=2']
  flags = [f'model.kind={kind}', mesh, 'train.steps=2', *heads]
  job = functools.partial(_train, folder, tmp_path, *flags)
  text = job()
  lines = [json.loads(line) for line in text.splitlines()]
  places = [(line['step'], line['row']) for line in lines]
  assert places == [(0, 0), (0, 1), (2, 0), (2, 1)]
  found = [
    tuple(line[name] for name in ('prompt', 'reference', 'output'))
    for line in lines[2:]
  ]
  assert found == _wanted(folder, tmp_path)
  assert 'step 2: sample 2 of 2' in capsys.readouterr().out
  # TensorBoard shows them, the configuration and the memory of the devices.
  shown = {
    value.tag: value
    for event in event_files.read(tmp_path)
    for value in event.summary.value
  }
  cells = b' '.join(shown['samples'].tensor.string_val).decode()
  assert all(text in cells for texts in found for text in texts)
  assert b'"learning_rate": 0.03' in shown['config'].tensor.string_val[1]
  assert shown['job/memory_peak_bytes'].simple_value > 2**24
  # As after a kill between the samples of step 2 and its save.
  shutil.rmtree(tmp_path / manager.FOLDER)
  (tmp_path / samples.FILE).write_bytes(text + b'{"step": 2, "ro')
  assert job() == text
