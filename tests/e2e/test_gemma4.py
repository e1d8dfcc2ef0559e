"""A Gemma 4 becomes a pair, is tuned on a mesh, and goes out to torch."""

import json

import numpy as np
import pytest

import encdec_adapt
from encdec_adapt.tokenizers import vocabulary_pair
from tests import tiny
from tests.e2e import folders, test_t5
from tests.parity import tiny_models

transformers = pytest.importorskip('transformers')
pytestmark = [pytest.mark.e2e, pytest.mark.parity, pytest.mark.long]


# Leaves of cross-attention that a pair has, and others that it has not: values
# that are keys, and keys and values of an earlier layer.
LEAVES = {
  'gemma4': (('1/value', '2/key'), ('2/value',)),
  'gemma4_shared': (('1/value', '6/query'), ('6/key',)),
  'gemma4_experts': (('1/key', '2/value'), ('1/value',)),
}


@pytest.mark.parametrize('name', LEAVES)
def test_a_pair_is_adapted_tuned_and_exported(name, tmp_path):
  folder, pair, run = (tmp_path / x for x in ('gemma4', 'pair', 'run'))
  tiny_models.save_tokenizer(folder, 'gemma')
  tokens = vocabulary_pair.open_vocabulary(folder)
  settings = tiny_models.CASES[name].settings().to_dict()
  by_layer = settings.pop('per_layer_config')
  for heads in by_layer.values():  # Divisible over the mesh.
    heads['num_key_value_heads'] = 2
  fields = settings | {'num_key_value_heads': 4, 'per_layer_config': by_layer}
  if name == 'gemma4_experts':
    fields['num_experts'] = 4
  settings = transformers.Gemma4TextConfig(
    **fields
    | {
      'vocab_size': tokens.size,
      'vocab_size_per_layer_input': tokens.size,
      'bos_token_id': tokens.bos,
      'eos_token_id': tokens.eos,
      'pad_token_id': tokens.pad,
    }
  )
  theirs = tiny_models.make(tiny_models.CASES[name], settings=settings)
  theirs.save_pretrained(folder)
  flags = f'--encoder={folder}', f'--output={pair}', '--vocab_multiple=8'
  assert tiny.convert('adapt', *flags) == 0
  report = (pair / 'coverage.json').read_text()
  for leaves, is_there in zip(LEAVES[name], (True, False), strict=True):
    for leaf in leaves:
      leaf = '/cross_attention/'.join(leaf.split('/'))
      assert (f'decoder/layers/{leaf}' in report) == is_there, leaf
  table = "the encoder reads the decoder's second table"
  assert (table in report) == (name == 'gemma4_shared')
  scalars = read_scalars(pair)
  assert len({*np.ravel(scalars)}) > 1

  lines = [{'q': f'the fox {i}', 'a': f'two cats {i % 9}'} for i in range(60)]
  (tmp_path / 'pairs.jsonl').write_text('\n'.join(map(json.dumps, lines)))
  source = f'--config.data.source=pairs:{tmp_path}/pairs.jsonl#q,a'
  decay = '--config.optimizer.weight_decay=0.1'
  config = f'sft.py:source={pair}'
  test_t5.job(config, (32, 16), run, source, decay, *test_t5.MESH)
  np.testing.assert_array_equal(read_scalars(run), scalars)
  tuned = encdec_adapt.load(run)
  (text,) = tuned.generate(['the fox 3'], max_tokens=8)
  exported = folders.export(run, tmp_path / 'exported')
  again = encdec_adapt.load(exported)
  assert again.generate(['the fox 3'], max_tokens=8) == [text]
  flags = [run, exported, '--tolerance=1e-3']
  flags += ['--with=transformers'] if name == 'gemma4' else []
  assert tiny.convert('verify', *flags) == 0


def read_scalars(run):
  """Returns the layer scalars of both stacks."""
  params = tiny.read_params(run)
  return [
    x
    for path, values in sorted(params.items())
    if 'layer_scalar' in path
    for x in np.ravel(values)
  ]
