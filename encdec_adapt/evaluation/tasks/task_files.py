"""Reads and checks the tasks of a folder: YAML files and their JSONL.

A task is in lm-eval's format or has prompt templates (`prompted_task`).
lm-eval is imported only for tasks in its format.
"""

from collections.abc import Mapping
from typing import Any

import jinja2
from jinja2 import meta
import yaml

from encdec_adapt.base import errors
from encdec_adapt.evaluation.tasks import prompted_task
from encdec_adapt.files import paths

_TEXTS = ('doc_to_text', 'doc_to_target', 'doc_to_choice')


def read_folder(folder: str, limit: int | None = None) -> dict[str, Any]:
  """Reads and checks the local tasks of a folder.

  Args:
    folder: the folder.
    limit: maximum number of rows for tasks with prompt templates.

  Returns:
    Name -> a `PromptedTask`, or the content of a file in lm-eval's format with
    absolute paths.

  Raises:
    UserError: the folder has no task, or a file is invalid; names the file and
      the line.
  """
  tasks: dict[str, Any] = {}
  for file in map(str, sorted(paths.at(folder).glob('*.yaml'))):
    content = _read_yaml(file)
    if 'task' not in content:
      continue  # Prompt templates, or a file included by tasks.
    name = content['task']
    if not isinstance(name, str):
      raise errors.UserError(f'{file}: task is {name!r}; it must be a name.')
    if name in tasks:
      raise errors.UserError(f'{file}: a second task is named {name!r}.')
    if 'templates' in content:
      tasks[name] = prompted_task.read(file, content, limit)
    else:
      tasks[name] = _check_lm_eval(file)
  if not tasks:
    raise errors.UserError(
      f'{folder} has no task: no YAML file with a field `task`'
      ' (encdec_adapt/evaluation/README.md shows one).'
    )
  return tasks


def _read_yaml(file: str) -> dict[str, Any]:
  # Subclass, since constructors are class state: changing SafeLoader would
  # affect all YAML readers.
  class Loader(yaml.SafeLoader):
    """Accepts any tag."""

  # lm-eval's loader would import functions even for files without tasks.
  Loader.add_multi_constructor(
    '!', lambda loader, suffix, node: f'!{suffix} {getattr(node, "value", "")}'
  )
  try:
    content = yaml.load(paths.at(file).read_text(), Loader)
  except (OSError, yaml.YAMLError) as error:
    raise errors.UserError(f'{file} is not YAML ({error}).') from error
  if not isinstance(content, dict):
    raise errors.UserError(f'{file} must have fields, `task` among them.')
  return content


def _check_lm_eval(file: str) -> dict[str, Any]:
  """Checks a task in lm-eval's format and makes its paths absolute."""
  from lm_eval.tasks import _yaml_loader

  # Private: lm-eval has no public function to resolve included files and
  # named functions.
  content = _yaml_loader.load_yaml(file)
  required = ('dataset_path', 'doc_to_text', 'doc_to_target', 'dataset_kwargs')
  missing = [name for name in required if name not in content]
  files = (content.get('dataset_kwargs') or {}).get('data_files')
  files = {'test': files} if isinstance(files, str) else files
  # Rows are checked before a model is read, so the files must exist now.
  is_local = isinstance(files, dict) and content.get('dataset_path') == 'json'
  if missing or not is_local or {str} != {*map(type, files.values())}:
    raise errors.UserError(
      f'{file}: fields {missing} are missing, or the data are not local; a'
      ' local task has `dataset_path: json`, `dataset_kwargs: {data_files:'
      ' {test: FILE.jsonl}}`, doc_to_text and doc_to_target.'
    )
  # Otherwise, lm-eval resolves them against the current folder.
  folder = paths.at(file).parent
  files = {split: str(folder / name) for split, name in files.items()}
  tested = content.get('test_split') or content.get('validation_split')
  if tested not in files:
    raise errors.UserError(
      f'{file}: test_split is {tested!r}; it must be one of {sorted(files)},'
      ' the names in data_files.'
    )
  for rows in map(prompted_task.read_rows, files.values()):
    for line, row in rows:
      # A function may add fields to rows.
      for field in () if 'process_docs' in content else _TEXTS:
        _check_fields(f'{file}: {field}', content.get(field), line, row)
  kwargs = {**content['dataset_kwargs'], 'data_files': files}
  return {**content, 'dataset_kwargs': kwargs}


def _check_fields(
  name: str, template: Any, line: str, row: Mapping[str, Any]
) -> None:
  """Checks that a row has the fields of a Jinja template.

  Accepts any number, list or function as `template`.
  """
  if not isinstance(template, str) or template.startswith('!'):
    return
  try:
    parsed = jinja2.Environment().parse(template)
  except jinja2.TemplateError as error:
    raise errors.UserError(f'{name} is not a template ({error}).') from error
  for field in sorted(meta.find_undeclared_variables(parsed) - row.keys()):
    raise errors.UserError(
      f'{line} has no field {field!r}, which {name} uses; its fields are'
      f' {sorted(row)}.'
    )
