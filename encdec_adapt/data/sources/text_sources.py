"""Text sources, opened by name.

| name                     | documents                                      |
|--------------------------|------------------------------------------------|
| python                   | text shipped with this Python                    |
|                          | (`python_source`)                              |
| python:FILE              | the same, with a list of held-out documents    |
| text:GLOB                | each matching file is one document             |
| text:GLOB#paragraphs     | each paragraph (between empty lines)           |
| text:GLOB#lines          | each non-empty line                            |
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
| embed:GLOB#QUERY,        | each line's query, its positive text and its   |
|   POSITIVE[,NEGATIVE..]  | negative texts; also                           |
|                          | scores=FIELD, vectors=FIELD (`EmbedSource`)    |
| chat:GLOB                | each line's field `messages`: a list of objects|
|                          | with `role` and `content`                      |
| chat:GLOB#FIELD[,FIELD..]| each line's field FIELD; further fields are    |
|                          | kept for rewards                               |
| seqio:NAME[:SPLIT]       | a registered SeqIO task (`seqio_source`)       |
| tfds:NAME:SPLIT          | each example's feature `text`                  |
| tfds:NAME:SPLIT:FIELD    | each example's feature FIELD                   |

Pairs, conversations and labelled examples are JSON: a list of two texts, a list
of messages, or a list of a list of texts and a label. They feed the objectives
`pairs` and `chat` (`objectives/supervised.py`), and `classify` and `tag`
(`objectives/labelled.py`). `embed` feeds `embed` (`objectives/embeddings.py`),
preferences feed `preferences` and `chat_preferences`
(`objectives/preferences.py`), and texts feed all other objectives.

In .parquet files, the lines of `pairs`, `prompts`, `preferences`, `labels`,
`embed` and `chat` are rows. Text and JSON lines may be compressed (.gz, .zst).
Files, lines and texts that are empty are left out.

A name with separators (`#`, ` + `, a comma) is a quoted JSON string, as in
text:"/data/a + b/*.txt" (`option_strings`). Bytes columns are UTF-8.

A GLOB may be in a bucket, gs://BUCKET/FOLDER/*.jsonl, or in a Hub repository,
hf://datasets/ORG/NAME[@REVISION]/*.parquet: records store its commit, and
matching files are downloaded. Each shard of the records reads its share of the
files (`data/sources/file_sources.py`) or of a TFDS dataset. Every shard scans
the source `python` and documents split into pieces.

Users add sources in separate modules, as subclasses of
`document_source.Source` registered under a new kind
(`document_source.register`). Opening a source of an unknown kind imports the
modules in `config.data.seqio_modules`, in worker processes too.

This module imports neither TensorFlow nor SeqIO nor jax. Opening a source
`tfds:..` or `seqio:..` imports TensorFlow and needs the extra `seqio`; parquet
and .zst files need the extra `data`.
"""

from collections.abc import Mapping
import functools
import importlib
import sys

from encdec_adapt.base import discovery, errors, option_strings
from encdec_adapt.data.sources import document_source, row_sources

# SeqIO tasks are not registered as a class, which would import TensorFlow in
# training jobs. Their features are unknown until read, so either kind of
# documents is possible.
SEQIO = 'seqio:'
_SEQIO_KINDS = frozenset(('text', 'pairs'))
_SEQIO_REVISIONS = ('ids of examples have the task, the split and the file',)


def open_source(
  name: str, max_bytes: int = 0, modules: tuple[str, ...] = ()
) -> document_source.Source:
  """Opens a source by name (see the table in the module's docstring).

  Args:
    name: name of the source.
    max_bytes: cap, see `document_source.Source`; 0 for none.
    modules: users' modules that register sources.

  Raises:
    UserError: the name has no known form, or the source cannot be opened.
  """
  return _find(name, modules)(name, max_bytes)


def document_kinds(name: str, modules: tuple[str, ...] = ()) -> frozenset[str]:
  """Returns the kinds of a source's documents; see `document_source`.

  Raises:
    UserError: the name has no known form.
  """
  if name.startswith(SEQIO):
    return _SEQIO_KINDS
  return frozenset((_find(name, modules).document_kind,))


def named_fields(
  name: str, modules: tuple[str, ...] = ()
) -> frozenset[str] | None:
  """Returns the names of a source's named fields (`scores` in `scores=FIELD`).

  Returns:
    The names; None for SeqIO and sources without named fields.

  Raises:
    UserError: the name has no known form.
  """
  named = row_sources.NamedFieldSource
  if name.startswith(SEQIO) or not issubclass(_find(name, modules), named):
    return None
  fields = option_strings.Part('', name).partition('#')[1].divide(',')
  return frozenset(x.partition('=')[0].text for x in fields if '=' in x.raw)


def forms(kind: str) -> list[str]:
  """Returns the syntax of all sources with documents of a kind."""
  sources = _sources().values()
  return [source.form for source in sources if source.document_kind == kind]


def revisions(name: str, modules: tuple[str, ...] = ()) -> tuple[str, ...]:
  """Returns the changes to a source's documents since record format 7."""
  if name.startswith(SEQIO):
    return _SEQIO_REVISIONS
  return _find(name, modules).revisions


def import_modules(modules: tuple[str, ...]) -> None:
  """Imports users' modules that register sources or SeqIO tasks.

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


@functools.cache
def _sources() -> Mapping[str, type[document_source.Source]]:
  """Returns the registered sources by kind."""
  # Importing a module of this package registers its sources. Not at import, as
  # some of them import this module.
  list(discovery.modules_of(sys.modules[__package__]))
  return document_source.KINDS


def _find(name: str, modules: tuple[str, ...]) -> type[document_source.Source]:
  kinds = _sources()
  kind, _, details = name.partition(':')
  if kind not in kinds:
    # Only if needed: modules of SeqIO tasks import TensorFlow.
    import_modules(modules)
  # Forms such as 'text:GLOB' need text after the colon; 'python[:FILE]' does
  # not.
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
