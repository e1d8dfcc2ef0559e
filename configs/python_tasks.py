r"""Local tasks made from the text that comes with Python.

    python -m encdec_adapt.configs.python_tasks --output=runs/python_tasks \
      --source=python:configs/decoders/held_out.txt

`continuation`: which of four pieces of documentation follows. `next_word`: the
next word, predicted greedily. docstring.jsonl, for `evaluate --pairs`: the rest
of a sentence, generated. These are of held-out documents only. packages.jsonl,
for `configs/classification.py`: pieces of docstrings and the package they are
from, one of eight; `package` asks generating models for it. The same Python
gives the same tasks.
"""

from collections.abc import Iterator, Mapping
import json
import re
from typing import Any

from absl import flags
import numpy as np

from encdec_adapt import configs
from encdec_adapt.base import errors
from encdec_adapt.cli import command
from encdec_adapt.configs import packages
from encdec_adapt.data.sources import document_source, python_source
from encdec_adapt.files import disk, paths

_CONTEXT = 240  # Characters before what is asked for.
_PIECES = 8  # Of which wrong continuations are chosen.
_PER_TEXT = 12  # Most examples of a document.
_WORD = re.compile(r' ([a-z]{3,12})(?=[ .,])')
_SENTENCE = re.compile(r'(?<=\.)\s+[A-Z][^.]{40,}\.(?=\s)')

define_flags = command.define(
  command.string('output', 'Folder of the task files.'),
  command.string(
    'source',
    'python:FILE, where FILE lists the held-out documents.',
    default=f'python:{configs.path("decoders/held_out.txt")}',
  ),
  command.integer(
    'examples', 'Examples of a task.', default=200, lower_bound=4
  ),
)

_TASKS = {
  'continuation': """
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
  'next_word': """
output_type: loglikelihood
doc_to_text: "{{context}}"
doc_to_target: "{{' ' + word}}"
metric_list: [{metric: acc}]
""",
  'package': f"""
output_type: multiple_choice
doc_to_text: "{{{{text}}}}\\n\\nThis is from the package"
doc_to_choice: {packages.PACKAGES}
doc_to_target: label
metric_list: [{{metric: acc}}]
""",
}


def main(values: flags.FlagValues) -> int:
  """Writes the tasks."""
  command.require(values, 'output')
  folder = disk.require_writable(values.output)
  source = python_source.PythonSource(values.source)
  documents = [
    (name, read)
    for name, read in source.entries()
    if name.endswith('::docstrings') or name.startswith('topic/')
  ]
  texts = {
    document_source.group(name): text
    for name, read in documents
    if source.in_split(name, 'eval', 0.04, 0)
    if len(text := read()) > 4 * _CONTEXT
  }
  makers = {
    'continuation': _continuations,
    'next_word': _next_words,
    'docstring': _docstrings,
  }
  tasks = {
    name: list(make(texts, np.random.default_rng(0)))
    for name, make in makers.items()
  }
  tasks['package'] = [
    {'text': text, 'label': label}
    for name, read in sorted(documents, key=lambda entry: entry[0])
    if (label := packages.package(name))
    for text in packages.pieces(read())
  ]
  _write(folder / 'packages.jsonl', tasks['package'])
  for name, rows in tasks.items():
    if not rows:
      raise errors.UserError(f'{values.source}: no example for {name}.')
    places = np.linspace(0, len(rows) - 1, min(len(rows), values.examples))
    _write(folder / f'{name}.jsonl', [rows[int(i)] for i in places])
    if name in _TASKS:
      (folder / f'{name}.yaml').write_text(
        f'task: {name}\ndataset_path: json\n'
        f'dataset_kwargs: {{data_files: {{test: {name}.jsonl}}}}\n'
        f'test_split: test\n{_TASKS[name].lstrip()}'
      )
  return 0


def _write(path: paths.Path, rows: list[dict[str, Any]]) -> None:
  lines = ''.join(json.dumps(row) + '\n' for row in rows)
  path.write_text(lines, encoding='utf-8')
  print(f'{path}: {len(rows)} examples')


def _continuations(
  texts: Mapping[str, str], rng: np.random.Generator
) -> Iterator[dict[str, Any]]:
  """Yields a context and four pieces of text, one of which follows it."""
  pieces = [
    (group, *piece)
    for group, text in texts.items()
    for piece in _sentences(text)
  ]
  if len(pieces) < _PIECES:
    raise errors.UserError(
      f'--source has {len(pieces)} sentences in its held-out modules, and'
      f' {_PIECES} are needed; hold out more modules.'
    )
  for group, context, right in pieces:
    others = [
      pieces[i][2] for i in rng.choice(len(pieces), _PIECES, replace=False)
    ]
    # Pieces of equal length differ only in content.
    wrong = [x for x in others if x != right]
    length = min(len(x) for x in [right, *wrong[:3]])
    choices = [x[:length] for x in [right, *wrong[:3]]]
    order = rng.permutation(4)
    yield {
      'context': context,
      'choices': [choices[i] for i in order],
      'answer': int(np.flatnonzero(order == 0)[0]),
      'document_group': group,
    }


def _next_words(
  texts: Mapping[str, str], rng: np.random.Generator
) -> Iterator[dict[str, Any]]:
  for group, text in texts.items():
    words = [m for m in _WORD.finditer(text) if m.start() >= _CONTEXT]
    for i in sorted(rng.permutation(len(words))[:_PER_TEXT]):
      start = words[i].start()
      context = text[start - _CONTEXT : start]
      yield {'context': context, 'word': words[i][1], 'document_group': group}


def _docstrings(
  texts: Mapping[str, str], rng: np.random.Generator
) -> Iterator[dict[str, Any]]:
  """Yields a text that ends within a sentence, and the rest of the sentence."""
  for text in texts.values():
    for context, sentence in _sentences(text):
      cut = sentence.find(' ', len(sentence) // 2)
      if cut > 0:
        # The end of a generation is not part of it.
        yield {
          'input': context + sentence[:cut],
          'target': sentence[cut:].rstrip('.').strip(),
        }


def _sentences(text: str) -> list[tuple[str, str]]:
  found = [
    (text[m.start() - _CONTEXT : m.start()], ' ' + m[0].lstrip())
    for m in _SENTENCE.finditer(text, _CONTEXT)
    if len(m[0]) < 2 * _CONTEXT
  ]
  return found[:: max(1, len(found) // _PER_TEXT)][:_PER_TEXT]


if __name__ == '__main__':
  command.main(__doc__, define_flags, main)
