"""Text sources, opened by name.

| name                     | documents                                      |
|--------------------------|------------------------------------------------|
| python                   | the text that this Python carries              |
|                          | (`python_source`)                              |
| python:FILE              | the same, with a list of held-out documents    |
| text:GLOB                | each file that matches is one document         |
| text:GLOB#paragraphs     | each paragraph (between empty lines)           |
| text:GLOB#lines          | each line that is not empty                    |
| jsonl:GLOB               | each line's field `text`                       |
| jsonl:GLOB#FIELD         | each line's field FIELD                        |
| parquet:GLOB[#FIELD]     | each row's column `text`, or FIELD             |
| pairs:GLOB#INPUTS,TARGETS| each line's fields INPUTS and TARGETS; further |
|   [,FIELD..]             | fields are kept for rewards                    |
| prompts:GLOB#FILE.yaml   | each line in each template of a promptsource   |
|                          | file (`prompt_source`)                         |
| preferences:GLOB#PROMPT, | each line's prompt and two answers             |
|   CHOSEN,REJECTED        | (`preference_source`)                          |
| labels:GLOB#TEXT,LABEL   | each line's field TEXT, or several, and the    |
|                          | last field, its label                          |
| embed:GLOB#QUERY,        | each line's query, the text that it should     |
|   POSITIVE[,NEGATIVE..]  | find, and texts that it should not; also       |
|                          | scores=FIELD, vectors=FIELD (`EmbedSource`)    |
| chat:GLOB                | each line's field `messages`: a list of objects|
|                          | with `role` and `content`                      |
| chat:GLOB#FIELD[,FIELD..]| each line's field FIELD; further fields are    |
|                          | kept for rewards                               |
| seqio:NAME[:SPLIT]       | a registered SeqIO task (`seqio_source`)       |
| tfds:NAME:SPLIT          | each example's feature `text`                  |
| tfds:NAME:SPLIT:FIELD    | each example's feature FIELD                   |

The text of a pair, a conversation or a labelled example is JSON: a list of two
texts, of the messages, or of a list of texts and a label. They feed the
objectives `pairs` and `chat` (`objectives/supervised.py`), and `classify` and
`tag` (`objectives/labelled.py`); `embed` feeds `embed`
(`objectives/embeddings.py`), preferences feed `preferences` and
`chat_preferences` (`objectives/preferences.py`), texts all other objectives.

The lines of `pairs`, `prompts`, `preferences`, `labels`, `embed` and `chat` are
rows where a file ends in .parquet; text and JSON lines may be compressed (.gz,
.zst).

A name with dividers (`#`, ` + `, a comma) is a JSON string in quotes, as in
text:"/data/a + b/*.txt" (`option_strings`). Columns of bytes are UTF-8.

A GLOB may be in a bucket, gs://BUCKET/FOLDER/*.jsonl, or in a repository of the
Hub, hf://datasets/ORG/NAME[@REVISION]/*.parquet, of which records keep the
commit and the files that match are downloaded. A shard of the records reads
its share of the files (`data/sources/file_sources.py`) or of a TFDS dataset.
The source `python`, and documents that are cut into pieces, are scanned by
every shard.

A user's module adds a source: a subclass of `document_source.Source` that it
registers under a new kind (`document_source.register`). It is named in
`config.data.seqio_modules`, and imported where a source of a kind that is not
known yet is opened, in worker processes too.

This module imports neither TensorFlow nor SeqIO nor jax. Opening a source
`tfds:..` or `seqio:..` imports TensorFlow, and needs the extra `seqio`; parquet
and .zst files need the extra `data`.
"""

import importlib

from encdec_adapt.base import errors, option_strings
from encdec_adapt.data.sources import (
  document_source,
  file_sources,
  preference_source,
  prompt_source,
  python_source,
  row_sources,
  tfds_source,
)

# Each registers its sources when it is imported.
_MODULES = (
  file_sources,
  preference_source,
  prompt_source,
  python_source,
  row_sources,
  tfds_source,
)
# SeqIO's tasks have no class among them: importing it would bring TensorFlow
# into training processes. Their features show only when they are read, so that
# either kind of documents is possible before.
SEQIO = 'seqio:'
_SEQIO_KINDS = frozenset(('text', 'pairs'))
_SEQIO_REVISIONS = ('ids of examples have the task, the split and the file',)


def open_source(
  name: str, max_bytes: int = 0, modules: tuple[str, ...] = ()
) -> document_source.Source:
  """Opens a source by its name (table in the module's docstring).

  Args:
    name: name of the source.
    max_bytes: cap, see `document_source.Source`; 0 for none.
    modules: the user's modules that register sources.

  Raises:
    UserError: the name has no known form, or the source cannot be opened.
  """
  return _find(name, modules)(name, max_bytes)


def document_kinds(name: str, modules: tuple[str, ...] = ()) -> frozenset[str]:
  """Returns the kinds of documents that a source has, see `document_source`.

  Raises:
    UserError: the name has no known form.
  """
  if name.startswith(SEQIO):
    return _SEQIO_KINDS
  return frozenset((_find(name, modules).document_kind,))


def named_fields(
  name: str, modules: tuple[str, ...] = ()
) -> frozenset[str] | None:
  """Returns the names of a source's fields, as `scores` of `scores=FIELD`.

  Returns:
    None for sources that do not tell.

  Raises:
    UserError: the name has no known form.
  """
  named = row_sources.NamedFieldSource
  if name.startswith(SEQIO) or not issubclass(_find(name, modules), named):
    return None
  fields = option_strings.Part('', name).partition('#')[1].divide(',')
  return frozenset(x.partition('=')[0].text for x in fields if '=' in x.raw)


def forms(kind: str) -> list[str]:
  """Returns how sources with documents of a kind are written."""
  sources = document_source.KINDS.values()
  return [source.form for source in sources if source.document_kind == kind]


def revisions(name: str, modules: tuple[str, ...] = ()) -> tuple[str, ...]:
  """Returns the changes to the documents of a source since record format 7."""
  if name.startswith(SEQIO):
    return _SEQIO_REVISIONS
  return _find(name, modules).revisions


def import_modules(modules: tuple[str, ...]) -> None:
  """Imports the user's modules that register sources or SeqIO tasks.

  Args:
    modules: `config.data.seqio_modules`.

  Raises:
    UserError: a module cannot be imported.
  """
  for module in modules:
    try:
      importlib.import_module(module)
    except ImportError as error:
      raise errors.UserError(
        f'config.data.seqio_modules: {module!r} cannot be imported ({error})'
      ) from error


def _find(name: str, modules: tuple[str, ...]) -> type[document_source.Source]:
  kinds = document_source.KINDS
  kind, _, details = name.partition(':')
  if kind not in kinds:
    # Only now, since modules of SeqIO tasks import TensorFlow.
    import_modules(modules)
  # A form such as 'text:GLOB' needs text behind the colon, 'python[:FILE]' not.
  if kind not in kinds or (
    not details and kinds[kind].form.startswith(f'{kind}:')
  ):
    forms = [source.form for source in kinds.values()]
    raise errors.UserError(
      f'source {name!r}: not a source; the forms are {", ".join(forms)} and'
      ' seqio:NAME[:SPLIT], and those of modules that'
      ' config.data.seqio_modules names'
    )
  return kinds[kind]
