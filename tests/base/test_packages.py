"""A missing extra is named before work, by the command that installs it."""

import sys

import pytest

from encdec_adapt import materialize
from encdec_adapt.base import errors, packages
from tests import tiny


def test_records_need_the_extra_before_anything_is_made(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'seqio', None)  # As if it were not there.
  (tmp_path / 'text.txt').write_text('A text.\n' * 100)
  flags = [
    '--config=base',
    f'--workdir={tmp_path}/run',
    f'--config.data.source=text:{tmp_path}/text.txt#lines',
    f'--config.data.vocabulary={tmp_path}/new.model',
  ]
  with pytest.raises(errors.UserError) as error:
    tiny.call(materialize, *flags)
  command = packages.install_command('data')
  assert str(error.value) == f'making records needs seqio: {command}'
  assert {path.name for path in tmp_path.iterdir()} == {'text.txt'}


def test_the_command_is_of_the_checkout_from_any_folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tiny.ROOT)
  assert packages.install_command('eval') == "pip install -e '.[eval]'"
  monkeypatch.chdir(tmp_path)
  command = packages.install_command('eval')
  assert command == f"pip install -e '{tiny.ROOT}[eval]'"
