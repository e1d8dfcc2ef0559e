"""Runs the notebooks of this folder and stores them with their outputs.

    python launch/notebooks/execute.py [NAME ..]

Needs the extra `test`. Runs are made in a new temporary folder. What depends on
the machine is left out: lines with a time, a rate, memory or an absolute path,
and what is written to standard error.
"""

import base64
import os
import pathlib
import re
import sys
import tempfile

import nbclient
import nbformat

FOLDER = pathlib.Path(__file__).parent
MOST_BYTES = 100_000  # Of an image.
OF_MACHINE = re.compile(
  r'tok/s| left$|\d(s|ms)\b|iB\b|(^|[\s\'"(:=])/\w', re.MULTILINE
)


def execute(path: pathlib.Path, folder: str | os.PathLike[str]):
  """Runs a notebook, and returns it with the outputs to store.

  Args:
    path: path of the notebook.
    folder: working directory of its kernel.

  Raises:
    ValueError: an image is too large.
    nbclient.exceptions.CellExecutionError: a cell fails.
  """
  notebook = nbformat.read(path, as_version=4)
  resources = {'metadata': {'path': str(folder)}}
  client = nbclient.NotebookClient(notebook, timeout=3600, resources=resources)
  root = FOLDER.parent.parent
  client.execute(env=os.environ | {'PYTHONPATH': str(root)})
  for cell in notebook.cells:
    cell.metadata = {}
    if cell.cell_type == 'code':
      cell.outputs = [x for x in map(_clean, cell.outputs) if x]
  return notebook


def _clean(output):
  if output.output_type == 'stream':
    if output.name == 'stderr':
      return None
    lines = output.text.splitlines(keepends=True)
    output.text = ''.join(x for x in lines if not OF_MACHINE.search(x))
    return output if output.text else None
  output.metadata = {}
  if 'image/png' in output.data:
    output.data = {'image/png': output.data['image/png']}
    size = len(base64.b64decode(output.data['image/png']))
    if size > MOST_BYTES:
      raise ValueError(
        f'an image has {size:,} bytes, and at most {MOST_BYTES:,} are stored;'
        ' draw a smaller one.'
      )
  return output


def main(names: list[str]) -> None:
  paths = [FOLDER / f'{name}.ipynb' for name in names]
  for path in paths or sorted(FOLDER.glob('*.ipynb')):
    with tempfile.TemporaryDirectory() as folder:
      notebook = execute(path, folder)
    nbformat.write(notebook, path)
    print(f'wrote {path}')


if __name__ == '__main__':
  main(sys.argv[1:])
