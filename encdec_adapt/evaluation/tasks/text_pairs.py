"""Text to text: a model's answers to the inputs of pairs, and their metrics.

Of the other rooms of `evaluation`, `measures` and `results` are imported.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

from encdec_adapt.base import errors, option_strings
from encdec_adapt.conversion import (
  model_in_memory,
  model_on_disk,
  pretrained_files,
  prompt_encoding,
)
from encdec_adapt.evaluation.measures import text_metrics
from encdec_adapt.evaluation.results import predictions, results_store
from encdec_adapt.evaluation.tasks import prompted_task
from encdec_adapt.files import paths
from encdec_adapt.inference import beam_search
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
    beams: beams of a beam search; 1 for greedy answers.
    length_penalty: see `beam_search.search`.
    prefix: text before every input; None for the run's task prefix.
  """

  name: str
  inputs: Sequence[str]
  targets: Sequence[Sequence[str]]
  max_tokens: int
  beams: int = 1
  length_penalty: float = 1.0
  prefix: str | None = None

  def options(self) -> results_store.Options:
    """Returns the inputs of the scores."""
    return {
      'pairs': self.name,
      'content': results_store.digest([self.inputs, self.targets]),
      'max_tokens': self.max_tokens,
      'beams': self.beams,
      'length_penalty': self.length_penalty,
      'prefix': self.prefix,
    }

  def check(self, stored: model_on_disk.StoredModel) -> None:
    """Checks that a model has vocabularies, a prefix, and room for a prompt."""
    prompt_encoding.PromptEncoder(stored, prefix=self.prefix)
    pretrained_files.prompt_room(stored, self.max_tokens)

  def scores(
    self,
    model: model_in_memory.LoadedModel,
    rows: int,
    report: progress.Report,
    keep: predictions.Keep = predictions.discard,
  ) -> list[results_store.Score]:
    """Generates answers and compares them with the references.

    Args:
      model: the model.
      rows: prompts at a time; divides over the model's devices.
      report: progress callback (answers done, all answers).
      keep: called with every prediction.
    """
    encoder = prompt_encoding.PromptEncoder(model.stored, prefix=self.prefix)
    room = pretrained_files.prompt_room(model.stored, self.max_tokens)
    # A prompt that is too long keeps its last tokens, as lm-eval cuts contexts.
    prompts = [encoder.encode(text, room) for text in self.inputs]
    engine = model.engine(rows=rows)
    if self.beams > 1:
      completions = beam_search.search(
        engine,
        prompts,
        beams=self.beams,
        max_tokens=self.max_tokens,
        length_penalty=self.length_penalty,
      )
    else:
      completions = engine.run(
        engine_lib.Request(prompt, self.max_tokens) for prompt in prompts
      )
    answers = [''] * len(prompts)
    for count, (i, completion) in enumerate(completions, 1):
      answers[i] = completion.text.strip()
      report(count, len(prompts))
    scores = text_metrics.score(self.name, answers, self.targets)
    examples = zip(self.inputs, self.targets, answers, strict=True)
    for i, example in enumerate(examples):
      values = {score.metric: score.scores[i] for score in scores}
      keep(predictions.Prediction(self.name, *example, values))
    return scores


def read(
  spec: str, max_tokens: int, limit: int | None = None, **options: Any
) -> Pairs:
  """Reads FILE.jsonl[#INPUT,TARGET].

  Args:
    spec: path of a JSONL file, and the fields of the texts, by default input
      and target. A target may be a list of references.
    max_tokens: most tokens of an answer.
    limit: most pairs to read.
    **options: `beams`, `length_penalty` and `prefix` of `Pairs`.

  Raises:
    UserError: the extra `eval` is not installed, the file cannot be read or has
      no pairs, or a line lacks a field; names the line.
  """
  # Before hours of generation, whose answers could not be scored.
  text_metrics.require_packages()
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
  return Pairs(paths.at(path).stem, inputs, targets, max_tokens, **options)
