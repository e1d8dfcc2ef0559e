"""Pairs from JSONL rows and prompt templates in P3 format.

`prompts:GLOB#TEMPLATES.yaml` renders every row of the files (JSON lines or
parquet) with every template of a promptsource file (arXiv:2202.01279), the
format of T0's training mixture (P3). Templates are Jinja; '|||' separates
inputs from targets, and the choices in `answer_choices`. In the fields of a
row, '|||' is text. Empty targets give no example. Draws of the `choice` filter
depend on the example alone.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

from collections.abc import Iterator
import dataclasses
import functools
import json
import random
import statistics
from typing import Any

import yaml

from encdec_adapt.base import errors, option_strings
from encdec_adapt.data.sources import document_source, file_sources, row_sources
from encdec_adapt.files import paths

_BETWEEN = '|||'
# Replaces '|||' of templates during rendering, because a row's fields may
# contain '|||'. Unicode noncharacters, reserved for internal use: filters such
# as `upper` do not change them.
_MARK = '\ufdd0\ufdd1\ufdd0'
# Raised for missing files, invalid YAML and missing template fields.
_ERRORS = (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError)


@dataclasses.dataclass(frozen=True)
class Template:
  """A template of a promptsource file.

  Attributes:
    name: name of the template.
    jinja: text with the inputs, '|||' and the targets.
    choices: answer choices, separated by '|||'; '' for none.
    original: whether it poses the data set's original task.
  """

  name: str
  jinja: str
  choices: str
  original: bool = True

  def render(self, row: dict[str, Any], example_id: str) -> list[str]:
    """Returns inputs and targets of a row; [] without targets.

    Args:
      row: fields of the row.
      example_id: seed of the draws of `choice`.

    Raises:
      jinja2.TemplateError: the template cannot be rendered.
    """
    environment = _environment()
    # Seeded by the id: a row's text is the same in every shard and run.
    environment.filters['choice'] = random.Random(example_id).choice
    if self.choices:
      row = row | {'answer_choices': self.render_choices(row)}
    parts = _render_parts(environment, self.jinja, row)
    return parts[:2] if len(parts) > 1 and parts[1] else []

  def render_choices(self, row: dict[str, Any]) -> list[str]:
    """Returns the answer choices of a row; the template must have `choices`."""
    return _render_parts(_environment(), self.choices, row)


def _environment() -> Any:
  """Returns a Jinja environment without access to Python's internals."""
  import jinja2  # Not needed for training from records.
  from jinja2 import sandbox

  environment = sandbox.SandboxedEnvironment(undefined=jinja2.StrictUndefined)
  # promptsource adds these to Jinja, and published templates use them.
  environment.globals['zip'] = zip
  environment.filters['most_frequent'] = statistics.multimode
  return environment


def _render_parts(
  environment: Any, jinja: str, row: dict[str, Any]
) -> list[str]:
  template = environment.from_string(jinja.replace(_BETWEEN, _MARK))
  return [part.strip() for part in template.render(row).split(_MARK)]


class _Loader(yaml.SafeLoader):
  """Reads the tagged objects of a promptsource file as mappings."""


for _tag in ('!Template', '!TemplateMetadata'):
  _Loader.add_constructor(
    _tag, lambda loader, node: loader.construct_mapping(node, deep=True)
  )


def read_templates(path: str) -> list[Template]:
  """Reads the templates of a promptsource file, ordered by name.

  Raises:
    UserError: the file cannot be read, or has no templates.
  """
  try:
    content = yaml.load(paths.at(path).read_text(), _Loader)
    templates = [
      Template(
        fields['name'],
        fields['jinja'],
        # Files have `answer_choices: null` for none.
        fields.get('answer_choices') or '',
        bool(fields.get('metadata', {}).get('original_task', True)),
      )
      for fields in content['templates'].values()
    ]
  except _ERRORS as error:
    raise errors.UserError(
      f'{path} is not a file of prompt templates ({error!r:.200}); it must have'
      ' templates with a name and jinja, as promptsource writes them'
    ) from error
  # Files are keyed by random identifiers.
  return sorted(templates, key=lambda template: template.name)


@document_source.register('prompts')
class PromptSource(row_sources.RowSource):
  """`prompts:GLOB#TEMPLATES.yaml`; see the module's docstring."""

  form = 'prompts:GLOB#FILE.yaml'
  document_kind = 'pairs'
  revisions = ("'|||' in the fields of a row no longer divides its prompt",)

  def _take_fields(self, fields: option_strings.Part) -> None:
    if not fields:
      raise fields.error(
        'must be a file of templates, as in prompts:GLOB#TEMPLATES.yaml'
      )
    self._templates = read_templates(fields.text)

  def _documents(
    self, unit: file_sources.Unit
  ) -> Iterator[document_source.Entry]:
    for template in self._templates:
      # The split hashes the part before '::': a line is held out in all
      # templates or none.
      name = f'{unit.id}::{template.name.replace("::", ":_:")}'
      yield name, functools.partial(self._render, template, unit, name)

  def _render(
    self, template: Template, unit: file_sources.Unit, example_id: str
  ) -> str:
    try:
      pair = template.render(self._row(unit), example_id)
    except Exception as error:  # Templates are user code.
      location = self._line_location(unit.path, unit.offset)
      raise errors.UserError(
        f'source {self.name!r}: {location}: the template {template.name!r}'
        f' cannot be rendered ({error})'
      ) from error
    # `documents` drops empty documents.
    text = json.dumps(pair, ensure_ascii=False) if pair else ''
    return document_source.encodable(text)

  def _content(self) -> Iterator[object]:
    yield from super()._content()
    for template in self._templates:
      yield from (template.name, template.jinja, template.choices)
