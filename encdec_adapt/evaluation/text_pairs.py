"""Text to text: a model's answers to the inputs of pairs, and their metrics."""

from collections.abc import Callable, Sequence
import dataclasses
import hashlib
import json
from typing import Any

import numpy as np

from encdec_adapt.cli import errors
from encdec_adapt.conversion import loaded_model, source_files
from encdec_adapt.evaluation import prompted_task, results, text_metrics
from encdec_adapt.files import paths
from encdec_adapt.inference import engine as engine_lib
from encdec_adapt.models import model_config


@dataclasses.dataclass(frozen=True)
class Pairs:
  """Pairs of a file.

  Attributes:
    name: name of the task.
    inputs: texts that the model reads.
    targets: references of each, at least one.
  """

  name: str
  inputs: Sequence[str]
  targets: Sequence[Sequence[str]]

  def options(self, max_tokens: int) -> results.Options:
    """Returns what decides the scores of a model."""
    content = json.dumps([self.inputs, self.targets]).encode()
    digest = hashlib.blake2b(content, digest_size=8).hexdigest()
    return {'pairs': self.name, 'content': digest, 'max_tokens': max_tokens}


def read(spec: str, limit: int | None = None) -> Pairs:
  """Reads FILE.jsonl[#INPUT,TARGET].

  Args:
    spec: path of a file of JSON lines, and the fields of the texts, by default
      input and target. A target may be a list of references.
    limit: most pairs to read.

  Raises:
    UserError: the file cannot be read or has no pairs, or a line lacks a
      field; names the line.
  """
  path, _, fields = spec.partition('#')
  names = fields.split(',') if fields else ['input', 'target']
  if len(names) != 2:
    raise errors.UserError(f'--pairs={spec} must be FILE.jsonl#INPUT,TARGET.')
  inputs, targets = [], []
  for place, row in prompted_task.read_rows(path)[:limit]:
    source, target = (row.get(name) for name in names)
    references = [target] if isinstance(target, str) else target
    is_list = isinstance(references, list) and references
    if not isinstance(source, str) or not (
      is_list and all(isinstance(x, str) for x in references)
    ):
      raise errors.UserError(
        f'{place}: {names[0]} must be a text and {names[1]} a text or a list of'
        f' texts; its fields are {sorted(row)}.'
      )
    inputs.append(source)
    targets.append(references)
  return Pairs(name_of(spec), inputs, targets)


def name_of(spec: str) -> str:
  """Returns the name of the task of FILE.jsonl[#INPUT,TARGET]."""
  return paths.at(spec.partition('#')[0]).stem


def scores(
  loaded: loaded_model.LoadedModel,
  pairs: Pairs,
  *,
  rows: int,
  max_tokens: int,
  report: Callable[[int, int], Any],
) -> list[results.Score]:
  """Generates greedily and compares with the references.

  Args:
    loaded: the model.
    pairs: result of `read`.
    rows: prompts at a time; divides over the model's devices.
    max_tokens: most tokens of an answer.
    report: called with the number of answers done and of all.
  """
  opened = loaded.stored.require_vocabularies()
  reader = opened.sides[loaded.stored.prompt_side]
  longest = source_files.max_positions(source_files.folders(loaded.stored.path))
  room = longest or engine_lib.UNLIMITED
  if not isinstance(loaded.config, model_config.EncoderDecoderConfig):
    room -= max_tokens
  if room < 2:
    raise errors.UserError(
      f'--max_tokens={max_tokens} leaves no room for a prompt in the {longest}'
      ' positions of the model; lower it.'
    )
  requests = [
    engine_lib.Request(
      # A prompt that is too long keeps BOS and its last tokens.
      np.array([reader.bos, *reader.encode(text)[1 - room :]], np.int32),
      max_tokens,
    )
    for text in pairs.inputs
  ]
  answers = [''] * len(requests)
  engine = loaded.engine(rows=rows)
  for done, (i, completion) in enumerate(engine.run(requests), 1):
    answers[i] = completion.text.strip()
    report(done, len(requests))
  return text_metrics.score(pairs.name, answers, pairs.targets)
