"""The commands that look at models: inspect, diff, verify."""

import re

import pytest

from encdec_adapt.cli import errors
from encdec_adapt.conversion import stored_model
from encdec_adapt.models import parameters
from tests import tiny

pytestmark = [
  pytest.mark.e2e,
  pytest.mark.usefixtures('in_the_repository'),
]
convert_ = tiny.convert


def test_inspect(adapted, gemma, capsys):
  assert convert_('inspect', adapted) == 0
  shown = capsys.readouterr().out
  assert 'work directory, checkpoint of step 0' in shown
  assert 'T5GemmaForConditionalGeneration' in shown
  count = parameters.count(stored_model.open_model(adapted).model)
  assert f'parameters: {count:,}' in shown
  assert re.search(r'^window +8 +8 *$', shown, re.MULTILINE)
  assert convert_('inspect', gemma) == 0
  assert 'stored in float32' in capsys.readouterr().out


def test_diff_names_what_only_one_has(adapted, imported, capsys):
  assert convert_('diff', adapted, imported) == 1
  shown = capsys.readouterr().out
  assert re.search(r'cross_attention/key .* -> absent .*not comparable', shown)
  assert 'decoder/layers/1/mlp/up' not in shown
  convert_('diff', adapted, imported, '--all')
  assert re.search(r'decoder/layers/1/mlp/up .* equal', capsys.readouterr().out)


def test_verify_on_tokens_of_a_file(adapted, imported, tmp_path, capsys):
  rows = tmp_path / 'rows.jsonl'
  rows.write_text('{"encoder": [2, 9], "decoder": [2, 7, 8]}\n'
                  '{"encoder": [2, 9, 9], "decoder": [2]}\n')  # fmt: skip
  assert convert_('verify', adapted, adapted, f'--tokens={rows}') == 0
  shown = capsys.readouterr().out
  assert shown.startswith('4 predictions: largest difference of a logit 0.0')
  with pytest.raises(errors.UserError, match='line 1: write a list of ids'):
    convert_('verify', imported, imported, f'--tokens={rows}')
  rows.write_text('[2, 400]')
  with pytest.raises(
    errors.UserError, match='400 of decoder is not an id below'
  ):
    convert_('verify', imported, imported, f'--tokens={rows}')
