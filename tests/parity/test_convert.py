"""From a Gemma 2 folder of transformers to a T5Gemma folder, and back there.

The way of a user: import, adapt, export, load with transformers.
"""

import numpy as np
import pytest

import encdec_adapt
from encdec_adapt import convert
from encdec_adapt.runtime import command
from tests.parity import tiny_models

pytestmark = pytest.mark.parity

WIDTHS = {'balanced': (32, 32), 'unbalanced': (48, 32)}


def convert_(*argv) -> int:
  return command.run_subcommand('', convert.COMMANDS, [str(a) for a in argv])


@pytest.fixture(params=WIDTHS)
def exported(request, tmp_path):
  """A T5Gemma folder made of two Gemma 2 folders by the commands."""
  case = tiny_models.CASES['gemma2']
  sources = []
  for seed, width in enumerate(WIDTHS[request.param]):
    settings = case.settings()
    settings.update({'hidden_size': width, 'max_position_embeddings': 77})
    source, run = tmp_path / f'source{seed}', tmp_path / f'run{seed}'
    tiny_models.make(case, seed, settings).save_pretrained(source)
    convert_('import', f'--source={source}', f'--output={run}')
    sources.append(run)
  pair, output = tmp_path / 'pair', tmp_path / 'exported'
  flags = [f'--encoder={sources[0]}', f'--decoder={sources[1]}']
  assert convert_('adapt', *flags, f'--output={pair}') == 0
  assert convert_('export', f'--checkpoint={pair}', f'--output={output}') == 0
  return output


def test_gemma2_to_t5gemma(exported):
  theirs = tiny_models.load(exported)
  for part in (theirs.config.encoder, theirs.config.decoder):
    assert part.max_position_embeddings == 77
    ids = (part.pad_token_id, part.eos_token_id, part.bos_token_id)
    assert ids == (0, 1, 2)
  # transformers 5.23 with eager attention sees one key more on either side.
  ours = encdec_adapt.load(exported, encoder_window='inclusive')
  rows = tiny_models.batch(tiny_models.CASES['t5gemma'])
  np.testing.assert_allclose(
    tiny_models.our_logits(ours, rows),
    tiny_models.their_logits(theirs, rows),
    rtol=0,
    atol=tiny_models.TOLERANCE,
  )
  tiny_models.assert_same_text(ours, theirs, rows)
