"""Reads and checks the tasks of a folder: YAML files and their JSONL.

A task is in lm-eval's own format or has prompt templates (`prompted_task`).
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
    limit: most rows of tasks with prompt templates.

  Returns:
    By name a `PromptedTask`, or the content of a file in lm-eval's format, with
    absolute paths.

  Raises:
    UserError: the folder has no task, or a file is wrong; names the file and
      the line.
  """
  files = sorted(paths.at(folder).glob('*.yaml'))
  found: dict[str, Any] = {}
  for file in files:
    place = str(file)
    content = _read_yaml(place)
    if 'task' not in content:
      continue  # Prompt templates, or something else.
    name = content['task']
    if not isinstance(name, str):
      raise errors.UserError(f'{place}: task is {name!r}; it must be a name.')
    if name in found:
      raise errors.UserError(f'{place}: a second task is named {name!r}.')
    if 'templates' in content:
      found[name] = prompted_task.read(place, content, limit)
    else:
      found[name] = _check_lm_eval(place)
  if not found:
    raise errors.UserError(
      f'{folder} has no task: no YAML file with a field `task`'
      ' (encdec_adapt/evaluation/README.md shows one).'
    )
  return found


def _read_yaml(place: str) -> dict[str, Any]:
  """Reads a YAML file; functions and other tagged values stay text."""

  class Loader(yaml.SafeLoader):
    """Takes any tag."""

  Loader.add_multi_constructor(
    '!', lambda loader, suffix, node: f'!{suffix} {getattr(node, "value", "")}'
  )
  try:
    content = yaml.load(paths.at(place).read_text(), Loader)
  except (OSError, yaml.YAMLError) as error:
    raise errors.UserError(f'{place} is not YAML ({error}).') from error
  if not isinstance(content, dict):
    raise errors.UserError(f'{place} must have fields, `task` among them.')
  return content


def _check_lm_eval(place: str) -> dict[str, Any]:
  """Checks a task in lm-eval's format and makes its paths absolute."""
  from lm_eval.tasks import _yaml_loader

  # With what the file includes, and the functions that it names.
  content = _yaml_loader.load_yaml(place)
  needed = ('dataset_path', 'doc_to_text', 'doc_to_target', 'dataset_kwargs')
  missing = [name for name in needed if name not in content]
  files = (content.get('dataset_kwargs') or {}).get('data_files')
  files = {'test': files} if isinstance(files, str) else files
  is_local = isinstance(files, dict) and content.get('dataset_path') == 'json'
  if missing or not is_local or {str} != {*map(type, files.values())}:
    raise errors.UserError(
      f'{place}: fields {missing} are missing, or the data are not local; a'
      ' local task has `dataset_path: json`, `dataset_kwargs: {data_files:'
      ' {test: FILE.jsonl}}`, doc_to_text and doc_to_target.'
    )
  folder = paths.at(place).parent
  files = {split: str(folder / file) for split, file in files.items()}
  tested = content.get('test_split') or content.get('validation_split')
  if tested not in files:
    raise errors.UserError(
      f'{place}: test_split is {tested!r}; it must be one of {sorted(files)},'
      ' the names in data_files.'
    )
  for file in files.values():
    for where, row in prompted_task.read_rows(file):
      # A function may add fields to rows.
      for field in () if 'process_docs' in content else _TEXTS:
        _check_fields(f'{place}: {field}', content.get(field), where, row)
  kwargs = {**content['dataset_kwargs'], 'data_files': files}
  return {**content, 'dataset_kwargs': kwargs}


def _check_fields(
  what: str, template: Any, where: str, row: Mapping[str, Any]
) -> None:
  """Checks that a row has the fields that a template uses."""
  if not isinstance(template, str) or template.startswith('!'):
    return
  try:
    parsed = jinja2.Environment().parse(template)
  except jinja2.TemplateError as error:
    raise errors.UserError(f'{what} is not a template ({error}).') from error
  for name in sorted(meta.find_undeclared_variables(parsed)):
    if name not in row:
      raise errors.UserError(
        f'{where} has no field {name!r}, which {what} uses; its fields are'
        f' {sorted(row)}.'
      )
