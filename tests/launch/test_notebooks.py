"""The notebooks run to their ends, and are stored with their outputs."""

import base64

import pytest

from tests import tiny

NOTEBOOKS = sorted((tiny.ROOT / 'launch' / 'notebooks').glob('*.ipynb'))


@pytest.fixture
def script(monkeypatch):
  """The script that writes them."""
  pytest.importorskip('nbclient', reason="needs the extra 'test'")
  monkeypatch.syspath_prepend(str(NOTEBOOKS[0].parent))
  import execute

  return execute


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stored_without_what_depends_on_the_machine(path, script):
  import nbformat

  cells = nbformat.read(path, as_version=4).cells
  outputs = [x for cell in cells for x in cell.get('outputs', ())]
  assert any('image/png' in x.get('data', ()) for x in outputs)
  for output in outputs:
    assert output.output_type != 'error'
    text = output.get('text') or output.data.get('text/plain', '')
    assert not script.OF_MACHINE.search(text), text
    image = output.get('data', {}).get('image/png', '')
    assert len(base64.b64decode(image)) <= script.MOST_BYTES


@pytest.mark.slow
@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, script, tmp_path, monkeypatch):
  for name, value in tiny.environment().items():
    monkeypatch.setenv(name, value)
  notebook = script.execute(path, tmp_path)
  drawing = [x for x in notebook.cells if 'plt.subplots' in x.source]
  assert drawing
  for cell in drawing:
    assert any('image/png' in x.get('data', ()) for x in cell.outputs)
