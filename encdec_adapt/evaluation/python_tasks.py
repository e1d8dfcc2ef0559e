r"""Three local tasks made from the text that comes with Python.

    python -m encdec_adapt.evaluation.python_tasks --output=runs/python_tasks \
      --source=python:configs/decoders/held_out.txt

`continuation`: which of four pieces of documentation follows. `next_word`:
the next word, predicted greedily. `docstring`: the rest of a sentence of a
docstring, generated and compared by chrF. Only held-out documents are used, and
the same Python gives the same tasks.
"""

from collections.abc import Iterator
import json
import re
from typing import Any

from absl import flags
import numpy as np

from encdec_adapt.cli import command, errors
from encdec_adapt.data import python_source
from encdec_adapt.files import disk

_CONTEXT = 240  # Characters before what is asked for.
_LEAST, _MOST = 30, 90  # Characters of a continuation.
_WORD = re.compile(r' ([a-z]{3,12})(?=[ .,])')
_SENTENCE = re.compile(r'[^.]{40,}\.(?=\s)')

define_flags = command.define(
  command.string('output', 'Folder of the task files.'),
  command.string(
    'source',
    'python:FILE, where FILE lists the held-out documents.',
    default='python:configs/decoders/held_out.txt',
  ),
  command.integer('examples', 'Examples of a task.', default=200, lower_bound=4),
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
doc_to_target: "{{word}}"
target_delimiter: " "
metric_list: [{metric: acc}]
""",
  'docstring': """
output_type: generate_until
doc_to_text: "{{context}}"
doc_to_target: "{{rest}}"
target_delimiter: ""
generation_kwargs: {until: ["."], max_gen_toks: 24}
metric_list: [{metric: chrf}]
""",
}


def main(values: flags.FlagValues) -> int:
  """Writes the tasks."""
  command.require(values, 'output')
  folder = disk.require_writable(values.output)
  source = python_source.PythonSource(values.source)
  texts = [
    text
    for name, read in source.entries()
    if name.endswith('::docstrings') or name.startswith('topic/')
    if source.in_split(name, 'eval', 0.04, 0)
    if len(text := read()) > 4 * _CONTEXT
  ]
  makers = {
    'continuation': _continuations,
    'next_word': _next_words,
    'docstring': _docstrings,
  }
  for name, make in makers.items():
    rows = list(make(texts, np.random.default_rng(0)))
    rows = [rows[i] for i in np.linspace(0, len(rows) - 1, values.examples).astype(int)] if len(rows) > values.examples else rows
    if not rows:
      raise errors.UserError(f'{values.source}: no example for {name}.')
    lines = ''.join(json.dumps(row) + '\n' for row in rows)
    (folder / f'{name}.jsonl').write_text(lines, encoding='utf-8')
    (folder / f'{name}.yaml').write_text(
      f'task: {name}\ndataset_path: json\n'
      f'dataset_kwargs: {{data_files: {{test: {name}.jsonl}}}}\n'
      f'test_split: test\n{_TASKS[name].lstrip()}'
    )
    print(f'{folder / name}.yaml: {len(rows)} examples')
  return 0
