"""`import encdec_adapt`: its names, and what its functions refuse."""

import pytest

import encdec_adapt
from encdec_adapt.base import errors
from tests import test_imports, tiny


def test_no_function_has_the_name_of_a_command():
  assert not {*encdec_adapt.__all__} & test_imports.COMMANDS
  assert issubclass(errors.UserError, ValueError)
  assert encdec_adapt.UserError is errors.UserError
  both = [
    'from encdec_adapt import convert, evaluate, generate, train',
    'from encdec_adapt import load, run_training, UserError',
  ]
  for first, second in (both, both[::-1]):
    done = tiny.run_code(
      f'{first}\n{second}\nprint(train.main, run_training.__name__)'
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
  'arguments, words',
  [
    ((None, 'run'), 'config is None, and must be a ConfigDict'),
    (('configs/base.py', 'run'), "config is 'configs/base.py', and must be"),
  ],
)
def test_training_without_a_configuration_is_refused(arguments, words):
  with pytest.raises(encdec_adapt.UserError, match=words):
    encdec_adapt.run_training(*arguments)


def test_options_that_a_command_lacks_are_named(tmp_path):
  with pytest.raises(encdec_adapt.UserError, match='recrods'):
    encdec_adapt.evaluate_checkpoints(['run'], tmp_path, recrods='x')
  with pytest.raises(encdec_adapt.UserError, match='encoder.kv_haeds'):
    model = {'encoder.kv_haeds': 2}
    encdec_adapt.adapt_checkpoint('run', tmp_path / 'pair', model=model)
