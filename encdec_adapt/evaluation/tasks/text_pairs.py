"""Text to text: a model's answers to the inputs of pairs, and their metrics.

Of the other rooms of `evaluation`, `measures` and `results` are imported.
"""

from collections.abc import Sequence
import dataclasses

import numpy as np

from encdec_adapt.base import errors, option_strings
from encdec_adapt.conversion import (
  model_in_memory,
  model_on_disk,
  pretrained_files,
)
from encdec_adapt.evaluation.measures import text_metrics
from encdec_adapt.evaluation.results import results_store
from encdec_adapt.evaluation.tasks import prompted_task
from encdec_adapt.files import paths
from encdec_adapt.inference import engine as engine_lib
from encdec_adapt.telemetry import progress


@dataclasses.dataclass(frozen=True)
class Pairs:
  """Evaluates models on the pairs of a file.

  Attributes:
    name: name of the task.
    inputs: texts that the model reads.
    targets: references of each text, at least one.
    max_tokens: most tokens of an answer.
  """

  name: str
  inputs: Sequence[str]
  targets: Sequence[Sequence[str]]
  max_tokens: int

  def options(self) -> results_store.Options:
    """Returns the inputs of the scores."""
    return {
      'pairs': self.name,
      'content': results_store.digest([self.inputs, self.targets]),
      'max_tokens': self.max_tokens,
    }

  def check(self, stored: model_on_disk.StoredModel) -> None:
    """Checks that a model has vocabularies, and room for a prompt."""
    stored.require_vocabularies()
    pretrained_files.prompt_room(stored, self.max_tokens)

  def scores(
    self, model: model_in_memory.LoadedModel, rows: int, report: progress.Report
  ) -> list[results_store.Score]:
    """Generates greedily and compares with the references.

    Args:
      model: the model.
      rows: prompts at a time; divides over the model's devices.
      report: progress callback (answers done, all answers).
    """
    opened = model.stored.require_vocabularies()
    reader = opened.sides[model.stored.prompt_side]
    room = pretrained_files.prompt_room(model.stored, self.max_tokens)
    # A prompt that is too long is cut to BOS and its last tokens, as lm-eval
    # cuts contexts.
    first = 1 - (room or engine_lib.UNLIMITED)
    # Empty for all runs but decoders that were tuned with a separator.
    separator = opened.decoder.encode(model.stored.separator)
    requests = []
    for text in self.inputs:
      prompt = np.append(reader.encode(text), separator)[first:]
      tokens = np.array([reader.bos, *prompt], np.int32)
      requests.append(engine_lib.Request(tokens, self.max_tokens))
    answers = [''] * len(requests)
    completions = model.engine(rows=rows).run(requests)
    for count, (i, completion) in enumerate(completions, 1):
      answers[i] = completion.text.strip()
      report(count, len(requests))
    return text_metrics.score(self.name, answers, self.targets)


def read(spec: str, max_tokens: int, limit: int | None = None) -> Pairs:
  """Reads FILE.jsonl[#INPUT,TARGET].

  Args:
    spec: path of a JSONL file, and the fields of the texts, by default input
      and target. A target may be a list of references.
    max_tokens: most tokens of an answer.
    limit: most pairs to read.

  Raises:
    UserError: the file cannot be read or has no pairs, or a line lacks a
      field; names the line.
  """
  file, fields = option_strings.Part('--pairs', spec).partition('#')
  path, names = file.text, ['input', 'target']
  if fields:
    names = [field.text for field in fields.divide(',')]
  if len(names) != 2:
    raise fields.error('must be two fields, as in FILE.jsonl#INPUT,TARGET.')
  inputs, targets = [], []
  for line, row in prompted_task.read_rows(path)[:limit]:
    source, target = (row.get(name) for name in names)
    references = [target] if isinstance(target, str) else target
    # All lines are checked before a model is read.
    is_list = isinstance(references, list) and references
    if not is_list or not all(
      isinstance(x, str) for x in [source, *references]
    ):
      raise errors.UserError(
        f'{line}: {names[0]} must be a text and {names[1]} a text or a list of'
        f' texts; its fields are {sorted(row)}.'
      )
    inputs.append(source)
    targets.append(references)
  return Pairs(paths.at(path).stem, inputs, targets, max_tokens)
