"""Small files that appear whole or not at all."""

import json
import os
import pathlib
from typing import Any


def write_json(path: str | os.PathLike[str], content: Any) -> None:
  """Writes JSON under a temporary name, syncs it, and renames it.

  Args:
    path: of the file; what was there is replaced. Its folder is made.
    content: what JSON can hold.
  """
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  draft = path.with_name(path.name + '.tmp')
  with open(draft, 'w', encoding='utf-8') as file:
    json.dump(content, file, indent=2)
    file.write('\n')
    file.flush()
    os.fsync(file.fileno())
  os.replace(draft, path)
