"""The commands that look at models: inspect, diff, verify."""

import re

import pytest

from encdec_adapt.models import parameters
from encdec_adapt.stored import model_on_disk
from tests import tiny

pytestmark = pytest.mark.e2e
convert_ = tiny.convert


def test_inspect(adapted, gemma, capsys):
  assert convert_('inspect', adapted) == 0
  shown = capsys.readouterr().out
  assert 'work directory, checkpoint of step 0' in shown
  assert 'T5GemmaForConditionalGeneration' in shown
  count = parameters.count(model_on_disk.open_model(adapted).model)
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


def test_verify_prints_how_far_two_models_differ(adapted, capsys):
  assert convert_('verify', adapted, adapted, '--rows=1', '--length=8') == 0
  shown = capsys.readouterr().out
  assert shown.startswith('8 predictions: largest difference of a logit 0.0')
  assert 'top-1 agreement 100.00%' in shown
