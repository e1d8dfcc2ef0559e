"""Tiny model folders for conversions, without torch.

Made by our own exporter; that transformers reads and writes the same is the
business of tests/parity.
"""

import json
import re

from flax import traverse_util
import jax
import numpy as np

from encdec_adapt import evaluate as evaluate_lib
from encdec_adapt.evaluation.results import results_store
from encdec_adapt.files import paths
from encdec_adapt.huggingface import export as exporter
from encdec_adapt.models import model_config, parameters
from encdec_adapt.stored import model_on_disk
from tests import tiny, toy_models

# The model of `tiny.flags`.
GEMMA = {**tiny.STACK, 'query_scale': 32.0}
_SIZES = dict(mlp_width=24, kv_heads=2, vocab_size=50, pattern=('global',))
LLAMA = {
  **tiny.STACK,
  **_SIZES,
  'query_scale': 8.0,
  'norm_gain': 'direct',
  'post_norms': False,
  'scale_embeddings': False,
  'attention_softcap': None,
  'final_softcap': None,
  'activation': 'silu',
  'head': toy_models.UNTIED,
}
# Tables padded otherwise are summed in another order.
ROUNDED = '--tolerance=1e-5'
IDS = {'bos_token_id': 2, 'eos_token_id': 1, 'pad_token_id': 0}
# How text is generated; what else such a file has is of software.
GENERATION = {**IDS, 'eos_token_id': [1, 5], 'repetition_penalty': 1.05}
FIELDS = {'decoder': {**IDS, 'max_position_embeddings': 77}}


def read(file):
  """Returns the content of a JSON file."""
  return json.loads(file.read_text())


def arrays(path):
  """Returns every parameter of a model, by its stored path."""
  opened = model_on_disk.open_model(path, vocab_multiple=128)
  return {path: np.asarray(array) for path, array in opened.arrays().items()}


def evaluate(run, held_out):
  """Returns the scores of a model on records, by metric."""
  output = paths.join(run, 'evaluation')
  flags = [f'--checkpoint={run}', f'--records={held_out}', f'--output={output}']
  assert tiny.call(evaluate_lib, *flags, '--cost=', '--batch_size=8') == 0
  with results_store.Store(output) as store:
    scores = [score for _, score in store.entries()]
  return {x.metric: x.value for x in scores if x.task == 'held_out'}


def import_folder(source, output, *flags):
  argv = [f'--source={source}', f'--output={output}', *flags]
  assert tiny.convert('import', *argv) == 0
  return output


def small_rows(records):
  """Flags of a job with a few short rows."""
  return (
    f'--config.data.folder={records}',
    '--config.data.encoder_length=32',
    '--config.data.decoder_length=32',
    '--config.data.eval_fraction=0.2',
    '--config.data.workers=1',
    '--config.train.batch_size=8',
    '--config.train.eval_batch_size=8',
  )


def adapt(output, *flags):
  assert tiny.convert('adapt', *flags, f'--output={output}') == 0
  return output


def export(checkpoint, output, *flags):
  argv = [f'--checkpoint={checkpoint}', f'--output={output}', *flags]
  assert tiny.convert('export', *argv) == 0
  return output


def run_card(folder, monkeypatch):
  """Runs the Python of a model card in its folder; returns its names."""
  monkeypatch.chdir(folder)
  names = {}
  blocks = re.findall(
    r'```python\n(.*?)```', (folder / 'README.md').read_text(), re.S
  )
  assert blocks
  for block in blocks:
    exec(block, names)
  return names


def make_folder(path, shape, vocabulary=None, seed=0, tokenizer=()):
  """A Hugging Face folder with random weights and what comes with them.

  Args:
    path: folder to write.
    shape: fields of the stack.
    vocabulary: tokenizer.model to put into the folder, or None.
    seed: seed of the weights.
    tokenizer: files of a tokenizer with other ids than `IDS`; then the folder
      has no other files.
  """
  generation = {
    **GENERATION,
    'cache_implementation': 'hybrid',
    'transformers_version': '4.42.0',
    '_from_model_config': True,
  }
  config = model_config.DecoderOnlyConfig(model_config.StackConfig(**shape))
  params = traverse_util.flatten_dict(
    parameters.init(config, jax.random.key(seed)), sep='/'
  )
  draws = np.random.default_rng(seed)
  exporter.write(
    path,
    config,
    {
      name: np.asarray(p) + draws.normal(0, 0.1, p.shape).astype(np.float32)
      for name, p in params.items()
    },
    fields={'decoder': {}} if tokenizer else FIELDS,
    files={
      'chat_template.json': json.dumps({'of': path.name}).encode(),
      'generation_config.json': json.dumps(generation).encode(),
      **({'tokenizer.model': vocabulary} if vocabulary else {}),
    }
    if not tokenizer
    else {file.name: file for file in tokenizer},
  )
  return path
