"""The sources `packages` and `package_prompts`: pieces of docstrings of Python.

    config.data.source = 'packages'
    config.data.seqio_modules = ('encdec_adapt.configs.packages',)

Every 240 characters of the docstrings of a module are an example for
`classify`, labelled with the package that the module is in, one of eight; and,
in each template of configs/studies/packages.yaml, for `pairs`. A module is held
out as a whole: the part of an id before '::' is the module.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

from collections.abc import Iterator
import functools
import itertools
import json

from encdec_adapt import configs
from encdec_adapt.data.sources import (
  document_source,
  prompt_source,
  python_source,
)

PACKAGES = 'asyncio email http importlib logging unittest urllib xml'.split()
_LENGTH = 240  # Characters of a piece.


def package(document_id: str) -> str:
  """Returns the package of a document of the source `python`, '' if none."""
  name, _, end = document_id.partition('/')
  is_docstrings = end.endswith('::docstrings')
  return name if is_docstrings and name in PACKAGES else ''


def pieces(text: str) -> list[str]:
  """Returns the pieces of a text, without the last, which may be shorter."""
  starts = range(0, len(text) - _LENGTH, _LENGTH)
  return [text[i : i + _LENGTH] for i in starts]


@document_source.register('packages')
class PackageSource(python_source.PythonSource):
  """`packages`: pieces of docstrings, labelled with their package."""

  form = 'packages'
  document_kind = 'labels'

  def entries(
    self, shard_index: int = 0, num_shards: int = 1
  ) -> Iterator[document_source.Entry]:
    """Yields every n-th example; all shards read the docstrings."""
    entries = (
      entry
      for name, read in super().entries()
      if package(name)
      for number, text in enumerate(pieces(read()))
      for entry in self._examples(
        f'{document_source.group(name)}::{number}', text, package(name)
      )
    )
    return itertools.islice(entries, shard_index, None, num_shards)

  def _examples(
    self, example_id: str, text: str, label: str
  ) -> Iterator[document_source.Entry]:
    document = json.dumps([[text], label], ensure_ascii=False)
    yield example_id, functools.partial(str, document)


@document_source.register('package_prompts')
class PackagePromptSource(PackageSource):
  """`package_prompts`: examples of the same pieces, in each template."""

  form = 'package_prompts'
  document_kind = 'pairs'

  def __init__(self, name: str, max_bytes: int = 0):
    """Reads the templates; see `PythonSource`."""
    super().__init__(name, max_bytes)
    self._templates = prompt_source.read_templates(
      configs.path('studies/packages.yaml')
    )

  def _examples(
    self, example_id: str, text: str, label: str
  ) -> Iterator[document_source.Entry]:
    row = {'text': text, 'label': label}
    for template in self._templates:
      name = f'{example_id}:{template.name}'
      pair = template.render(row, name)
      yield name, functools.partial(json.dumps, pair, ensure_ascii=False)

  def _content(self) -> Iterator[object]:
    yield from super()._content()
    for template in self._templates:
      yield from (template.name, template.jinja, template.choices)
