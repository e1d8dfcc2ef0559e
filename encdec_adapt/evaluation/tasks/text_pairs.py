"""Text to text: a model's answers to the inputs of pairs, and their metrics.

From `evaluation`, this module imports `measures` and `results`.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

from encdec_adapt.base import errors, packages
from encdec_adapt.evaluation.measures import text_metrics
from encdec_adapt.evaluation.results import predictions, results_store
from encdec_adapt.evaluation.tasks import prompted_task
from encdec_adapt.files import paths
from encdec_adapt.generation import (
  model_in_memory,
  prompt_encoding,
  text_generation,
)
from encdec_adapt.inference import row_batches
from encdec_adapt.stored import model_on_disk, pretrained_files
from encdec_adapt.telemetry import progress

# Generation options with an effect on scores.
OPTIONS = ('max_tokens', 'beams', 'length_penalty', 'prefix')
CUT = 'cut_short'  # Share of answers that end at `max_tokens`.


@dataclasses.dataclass(frozen=True)
class Pairs:
  """Evaluates models on the pairs of a file.

  Attributes:
    name: name of the task.
    inputs: input texts of the model, or questions with documents.
    targets: references for each text, at least one.
    generation: options of the answers.
    tokenizers: tokenizers of BLEU and ROUGE.
  """

  name: str
  inputs: Sequence[prompt_encoding.Prompt]
  targets: Sequence[Sequence[str]]
  generation: text_generation.Options
  tokenizers: tuple[str, str]

  def options(self) -> results_store.Options:
    """Returns all inputs of the scores."""
    return {
      'pairs': self.name,
      'content': results_store.digest([self.inputs, self.targets]),
      **{name: getattr(self.generation, name) for name in OPTIONS},
      'tokenizers': list(self.tokenizers),
      # BLEU and chrF with statistics; ROUGE-Lsum; cut answers.
      'revision': 2,
    }

  def check(self, stored: model_on_disk.StoredModel) -> None:
    """Checks that a model has vocabularies, a prefix, and room for a prompt."""
    prompts = {}
    if not isinstance(self.inputs[0], str):
      prompts = {'input 0': self.inputs[0]}
    text_generation.encode(
      prompts, stored, self.generation, self.generation.max_tokens
    )

  def scores(
    self, model: model_in_memory.LoadedModel, rows: int, report: progress.Report
  ) -> list[predictions.Result]:
    """Generates answers and compares them with the references.

    Args:
      model: the model.
      rows: prompts at a time; divides over the model's devices.
      report: progress callback (answers done, all answers).
    """
    stored, longest = model.stored, self.generation.max_tokens
    # Long prompts keep their last tokens, as in lm-eval.
    room = pretrained_files.prompt_room(stored, longest)
    if not isinstance(self.inputs[0], str):
      room = None  # Documents are cut one by one.
    options = dataclasses.replace(
      self.generation, max_prompt=room, batch_size=rows
    )
    prompts = {f'input {i}': text for i, text in enumerate(self.inputs)}
    encoder, encoded = text_generation.encode(prompts, stored, options, longest)
    completions = text_generation.complete(
      model, dict(enumerate(encoded)), encoder, options
    )
    ordered = list(
      row_batches.in_order(
        completions, lambda count: report(count, len(prompts))
      )
    )
    answers = [completion.text.strip() for completion in ordered]
    # References as in the file: models are compared on the same references,
    # even if their vocabularies lose text.
    scores, values = text_metrics.score(
      self.name, answers, self.targets, self.tokenizers
    )
    cut = [completion.ended == 'length' for completion in ordered]
    scores.append(results_store.mean_score(self.name, CUT, cut))
    inputs = [x if isinstance(x, str) else x['question'] for x in self.inputs]
    examples = zip(inputs, self.targets, answers, values, cut, strict=True)
    return scores + [
      predictions.Prediction(self.name, *example) for example in examples
    ]


def read(
  spec: str, limit: int | None = None, tokenizers: str = '', **options: Any
) -> Pairs:
  """Reads FILE[#INPUT,TARGET[,DOCUMENTS]].

  Args:
    spec: path of a file (`prompted_task.read_rows`), and the fields of the
      texts, by default input and target. A target may be a list of references.
      With a third field, inputs are questions about its documents.
    limit: maximum number of pairs to read.
    tokenizers: names for `text_metrics.choose`.
    **options: `OPTIONS` of the answers.

  Raises:
    UserError: the extra `eval` is not installed, the file cannot be read or has
      no pairs, a line lacks a field (names the line), or a tokenizer does not
      exist.
  """
  # Fail before hours of generation without a scorer.
  packages.require('a metric of texts', 'eval', 'rouge_score', 'sacrebleu')
  form = 'input,target', 'documents'
  path, names = prompted_task.file_fields('--pairs', spec, *form)
  inputs, targets = [], []
  for line, row in prompted_task.read_rows(path)[:limit]:
    source, target, *documents = (row.get(name) for name in names)
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
    if documents:
      if not isinstance(documents[0], list) or not documents[0]:
        raise errors.UserError(
          f'{line}: {names[2]} is {documents[0]!r:.60}; it must be a list of'
          ' documents, and not empty.'
        )
      source = {'question': source, 'documents': documents[0]}
    inputs.append(source)
    targets.append(references)
  generation = text_generation.Options(**options)
  chosen = text_metrics.choose(targets, tokenizers)
  return Pairs(paths.at(path).stem, inputs, targets, generation, chosen)
