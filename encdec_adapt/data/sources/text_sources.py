"""Text sources, opened by name.

| name                     | documents                                      |
|--------------------------|------------------------------------------------|
| python                   | the text that this Python carries              |
|                          | (`python_source`)                              |
| python:FILE              | the same, with a list of held-out documents    |
| lookups                  | questions on tables made of its docstrings,    |
|                          | pairs (`data/lookup_source.py`)                |
| text:GLOB                | each file that matches is one document         |
| text:GLOB#paragraphs     | each paragraph (between empty lines) is one    |
| text:GLOB#lines          | each line that is not empty is one             |
| jsonl:GLOB               | each line's field `text`                       |
| jsonl:GLOB#FIELD         | each line's field FIELD                        |
| pairs:GLOB#INPUTS,TARGETS| each line's fields INPUTS and TARGETS          |
| prompts:GLOB#FILE.yaml   | each line in each template of a promptsource   |
|                          | file (`prompt_source`)                         |
| labels:GLOB#TEXT,LABEL   | each line's field TEXT, or several, and the    |
|                          | last field, its label                          |
| chat:GLOB                | each line's field `messages`: a list of objects|
|                          | with `role` and `content`                      |
| chat:GLOB#FIELD          | each line's field FIELD                        |
| seqio:NAME[:SPLIT]       | a registered SeqIO task (`seqio_source`)       |
| tfds:NAME:SPLIT          | each example's feature `text`                  |
| tfds:NAME:SPLIT:FIELD    | each example's feature FIELD                   |

The text of a pair, a conversation or a labelled example is JSON: a list of two
texts, of the messages, or of a list of texts and a label. They feed the
objectives `pairs` and `chat` (`objectives/supervised.py`), and `classify` and
`tag` (`objectives/labelled.py`), all others the rest.

A GLOB may be in a bucket: gs://BUCKET/FOLDER/*.jsonl. A shard of the records
reads its share of the files (`data/sources/file_sources.py`) or of a TFDS
dataset. The source `python`, and whatever is cut into pieces, is scanned by
every shard.

This module imports neither TensorFlow nor SeqIO nor jax; opening a source
`tfds:..` imports `tensorflow_datasets` (and with it TensorFlow).
"""

from encdec_adapt.base import errors
from encdec_adapt.data import lookup_source
from encdec_adapt.data.sources import (
  document_source,
  file_sources,
  python_source,
  tfds_source,
)

_FORMS = (
  'python[:FILE], lookups, text:GLOB[#paragraphs|#lines], jsonl:GLOB[#FIELD],'
  ' pairs:GLOB#INPUTS,TARGETS, prompts:GLOB#FILE.yaml, chat:GLOB[#FIELD],'
  ' labels:GLOB#TEXT,LABEL, seqio:NAME[:SPLIT], tfds:NAME:SPLIT[:FIELD]'
)
_SOURCES = {
  'python': python_source.PythonSource,
  'lookups': lookup_source.LookupSource,
  'text': file_sources.TextSource,
  'jsonl': file_sources.JsonlSource,
  'pairs': file_sources.PairSource,
  'chat': file_sources.ChatSource,
  'labels': file_sources.LabelSource,
  'tfds': tfds_source.TfdsSource,
}
# Changes to the documents of a kind of source since record format 7, in order;
# see `definition.ExampleMaker.revisions`.
_REVISIONS = {
  'prompts': ("'|||' in the fields of a row no longer divides its prompt",),
  'seqio': ('ids of examples have the task, the split and the file',),
}


def open_source(name: str, max_bytes: int = 0) -> document_source.Source:
  """Opens a source by its name (table in the module's docstring).

  Args:
    name: name of the source.
    max_bytes: cap, see `document_source.Source`; 0 for none.

  Raises:
    UserError: the name has no known form, or has no documents.
  """
  kind, _, rest = name.partition(':')
  if kind == 'prompts' and rest:
    from encdec_adapt.data.sources import prompt_source  # Only it needs Jinja.

    return prompt_source.PromptSource(name, max_bytes)
  if kind not in _SOURCES or (not rest and name not in ('python', 'lookups')):
    raise errors.UserError(
      f'source {name!r}: not a source; the forms are {_FORMS}'
    )
  return _SOURCES[kind](name, max_bytes)


def revisions(name: str) -> tuple[str, ...]:
  """Returns the changes to the documents of a source since record format 7."""
  return _REVISIONS.get(name.partition(':')[0], ())


def gives(name: str) -> str:
  """Returns what a source has: 'text', 'pairs', 'chat' or 'labels'."""
  kind = name.partition(':')[0]
  if kind in ('pairs', 'prompts', 'lookups'):
    return 'pairs'
  return kind if kind in ('chat', 'labels') else 'text'
