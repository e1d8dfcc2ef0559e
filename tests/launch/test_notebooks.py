"""The notebooks run to their ends, and are kept without outputs."""

import pytest

from tests import tiny

NOTEBOOKS = sorted((tiny.ROOT / 'launch' / 'notebooks').glob('*.ipynb'))


@pytest.mark.slow
@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path):
  nbclient = pytest.importorskip('nbclient', reason="needs the extra 'test'")
  nbformat = pytest.importorskip('nbformat', reason="needs the extra 'test'")
  notebook = nbformat.read(path, as_version=4)
  assert not any(cell.get('outputs') for cell in notebook.cells)
  client = nbclient.NotebookClient(
    notebook, timeout=1800, resources={'metadata': {'path': str(tmp_path)}}
  )
  client.execute(env=tiny.environment() | {'PYTHONPATH': str(tiny.ROOT)})
  drawing = [x for x in notebook.cells if 'plt.subplots' in x.source]
  assert drawing
  for cell in drawing:
    assert any('image/png' in x.get('data', ()) for x in cell.outputs)
