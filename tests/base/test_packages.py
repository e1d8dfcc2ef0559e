"""A missing extra is named before work, by the command that installs it."""

import sys

import pytest

from encdec_adapt import materialize
from encdec_adapt.base import errors, packages
from tests import tiny


@pytest.mark.parametrize(
  'source, module, extra',
  [
    ('seqio:a_task', 'seqio', 'seqio'),
    ('tfds:tales:train', 'tensorflow_datasets', 'seqio'),
    ('parquet:{folder}/text.parquet#text', 'pyarrow', 'data'),
    ('text:{folder}/text.zst', 'zstandard', 'data'),
  ],
)
def test_records_need_an_extra_before_anything_is_made(
  source, module, extra, tmp_path, monkeypatch
):
  for name in [x for x in sys.modules if x.split('.')[0] == module]:
    monkeypatch.delitem(sys.modules, name)
  monkeypatch.setitem(sys.modules, module, None)  # As if it were not there.
  files = {'text.parquet', 'text.zst'}
  for name in files:
    (tmp_path / name).write_bytes(b'PAR1 and more')
  flags = [
    '--config=base',
    f'--workdir={tmp_path}/run',
    f'--config.data.source={source.format(folder=tmp_path)}',
    f'--config.data.vocabulary={tmp_path}/new.model',
  ]
  with pytest.raises(errors.UserError) as error:
    tiny.call(materialize, *flags)
  command = packages.install_command(extra)
  assert f'needs {module}: {command}' in str(error.value)
  assert {path.name for path in tmp_path.iterdir()} == files


def test_the_command_is_of_the_checkout_from_any_folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tiny.ROOT)
  assert packages.install_command('eval') == "pip install -e '.[eval]'"
  monkeypatch.chdir(tmp_path)
  command = packages.install_command('eval')
  assert command == f"pip install -e '{tiny.ROOT}[eval]'"
