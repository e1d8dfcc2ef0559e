r"""Continues prompts with a trained model: text in, text out.

    python -m encdec_adapt.generate --checkpoint=runs/adapted \
      --prompt='The quick' [--temperature=0.8 --top_p=0.95]
    python -m encdec_adapt.generate --checkpoint=runs/adapted \
      --prompts=prompts.jsonl --output=continuations.jsonl

The model is a Hugging Face folder, or the newest checkpoint of a run (the best
with `config.checkpoint.keep_best`). An encoder-decoder reads the prompt with
its encoder, as in PrefixLM training; a decoder-only model continues it, after
the `separator` of the run's objective, if any. The task prefix of the run's
objective precedes every prompt; --prefix sets another, and --prefix='' none.
--mode and --sentinels prompt a UL2 model, see inference/README.md. With --chat
a prompt is a user turn, and the model answers in the chat format of its
vocabulary. --embed writes pooled encoder states instead. --best_of=8
--reward=model:CHECKPOINT samples eight continuations of each prompt
(--temperature) and keeps the best by reward.

--output gets a JSON line per finished prompt, finally sorted by prompt: `index`
(from 0), `run`, `prompt`, and `continuation` (without special tokens), `tokens`
(their number including EOS), `log_prob` (the sum of their natural
log-probabilities under the model) and `ended` ('eos', 'length' for
--max_tokens, or 'stop'); with --best_of also `reward` and the `rewards` of all
samples; with --embed `embedding`, a list of floats. Repeating the command
resumes an incomplete file.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import functools
import hashlib
import json
import pathlib
import sys
import time
from typing import Any

from absl import flags
import numpy as np

from encdec_adapt.base import errors, option_strings
from encdec_adapt.cli import command
from encdec_adapt.cluster import distributed
from encdec_adapt.files import append_log, disk, paths, text_lines
from encdec_adapt.generation import (
  answer_encoding,
  model_in_memory,
  prompt_encoding,
  text_generation,
)
from encdec_adapt.inference import engine
from encdec_adapt.inference import rewards as scores
from encdec_adapt.models import heads
from encdec_adapt.objectives import framing
from encdec_adapt.stored import model_on_disk
from encdec_adapt.telemetry import progress
from encdec_adapt.tokenizers import chat_format
from encdec_adapt.training.jobs import completion_rewards
from encdec_adapt.training.sections import rewards_section

# Fields of a prompt's JSON line.
Result = dict[str, Any]

define_flags = command.define(
  command.string('checkpoint', 'A run, RUN@STEP, or a Hugging Face folder.'),
  command.flag(
    'multi_string',
    'prompt',
    'Text to continue; may be repeated.',
    default=[],
    agrees=False,  # The prompts must agree, not their file names.
  ),
  command.string(
    'prompts',
    'File with a prompt per line, - for standard input; with a JSON string per'
    ' line if it ends in .jsonl, or an object with "question" and "documents"'
    ' for a model that reads passages, or with --chat also a list of messages'
    ' ("role", "content").',
    agrees=False,
  ),
  command.options(text_generation.Options),
  command.choice(
    'embed',
    list(heads.POOLINGS),
    "Write the encoder's states instead, or an embedding model's vectors: the"
    ' mean, or that of the first or last token.',
  ),
  command.integer(
    'best_of',
    'Continuations drawn of a prompt, of which that of the highest --reward is'
    ' kept.',
    lower_bound=2,
  ),
  command.string(
    'reward',
    'Rewards by which --best_of chooses, with weights, as in'
    " 'model:CHECKPOINT + python:FILE#FUNCTION@0.5' (fields are `prompt` and"
    ' `ended`).',
  ),
  command.string(
    'output', 'File of JSON lines to write the results to.', agrees=False
  ),
  command.define_processes,
)


def main(values: flags.FlagValues) -> int:
  """Runs the command."""
  command.require(values, 'checkpoint')
  prompts = read_prompts(values.prompt, values.prompts, chat=values.chat)
  chosen = [field.name for field in dataclasses.fields(text_generation.Options)]
  generation = text_generation.Options(**{x: values[x].value for x in chosen})
  if values.embed and values.int8:
    raise errors.UserError('--embed does not work with --int8; leave out one.')
  _check_best_of(values, generation, prompts)
  if values.output:
    disk.require_output(values.output)
  # Options that affect the results; they must be equal to resume a file.
  options = command.agreed(values)
  # The batch size is free, as each prompt samples with a seed of its index.
  del options['batch_size']
  texts = json.dumps(list(prompts.values())).encode()
  with command.processes(values, prompts=hashlib.sha256(texts).hexdigest()):
    stored = model_on_disk.open_model(values.checkpoint)
    model_on_disk.require_head(stored)
    rewards = _open_rewards(values)
    # Embeddings need no room for generated tokens.
    generated = 0 if values.embed else values.max_tokens
    # Encode all prompts before reading parameters, to fail early.
    encoder, encoded = text_generation.encode(
      prompts, stored, generation, generated
    )
    # The resolved prefix, and the step: a run may have trained further.
    options |= {'prefix': encoder.prefix, 'step': stored.step}
    results = _Results(values.output, prompts, options)
    prompt_encoding.print_prefix(stored, encoder.prefix)
    if stored.framing.chats and not values.chat and distributed.is_lead():
      note = 'answers chats: with --chat, a prompt is a turn of the user'
      print(f'{stored.path}: {note}', file=sys.stderr)
    finished = distributed.from_lead(lambda: sorted(results.lines))
    pending = {i: ids for i, ids in enumerate(encoded) if i not in finished}
    if pending:
      loaded = model_in_memory.read_as_trained(stored)
      if values.embed:
        outputs = loaded.embed_tokens(
          pending, pooling=values.embed, batch_size=values.batch_size
        )
      elif rewards:
        complete = functools.partial(
          text_generation.complete, loaded, encoder=encoder, options=generation
        )
        chosen = list(prompts.values()), pending, values.best_of
        outputs = _best(rewards, complete, *chosen, values.batch_size)
      else:
        outputs = text_generation.complete(loaded, pending, encoder, generation)
      name = pathlib.Path(values.checkpoint).name
      for i, output in outputs:
        results.add(i, {'run': name, **_fields(output)})
    results.finish()
    distributed.barrier('results')
  return 0


def read_prompts(
  texts: Sequence[str], file: str | None, *, chat: bool = False
) -> text_generation.Prompts:
  """Reads the prompts of the flags, in order.

  Args:
    texts: values of --prompt.
    file: path of a file of prompts, '-' for standard input, or None.
    chat: whether a JSON line may be a conversation.

  Raises:
    UserError: both or neither are given, the file cannot be read, or a prompt
      is empty.
  """
  if bool(texts) == (file is not None):
    raise errors.UserError(
      'give either --prompt=TEXT or --prompts=FILE, and not both.'
    )
  if file is None:
    prompts = {f'--prompt number {i}': text for i, text in enumerate(texts, 1)}
  else:
    is_json = file.endswith('.jsonl')
    prompts = (text_lines.read_json if is_json else text_lines.read)(file)
  return text_generation.check(prompts, chat=chat)


def _check_best_of(
  values: flags.FlagValues,
  generation: text_generation.Options,
  prompts: text_generation.Prompts,
) -> None:
  if bool(values.best_of) != bool(values.reward):
    raise errors.UserError(
      f'--best_of is {values.best_of}, --reward {values.reward!r}; give both or'
      ' neither.'
    )
  if values.best_of and any(isinstance(x, dict) for x in prompts.values()):
    raise errors.UserError(
      f'--best_of={values.best_of} chooses by rewards of texts, and a prompt'
      ' has documents; leave out --best_of and --reward.'
    )
  if values.best_of and (values.embed or not generation.temperature):
    raise errors.UserError(
      f'--best_of={values.best_of} chooses among continuations that differ;'
      ' give --temperature, and leave out --embed and --beams.'
    )


def _open_rewards(
  values: flags.FlagValues,
) -> completion_rewards.Rewards | None:
  if not values.reward:
    return None

  def open_model(path):
    stored = model_on_disk.open_model(path)
    scores.require_reward_model(stored.model, path)
    read = functools.cache(lambda: model_in_memory.read_as_trained(stored))
    return lambda groups, _: answer_encoding.score_texts(
      read(),
      [group.fields['prompt'] for group in groups],
      [group.texts[0] for group in groups],
      [group.fields['ended'] != 'length' for group in groups],
      batch_size=values.batch_size,
    )[:, None]

  return completion_rewards.Rewards(
    _parse_rewards(values.reward), open_model, '--reward'
  )


def _parse_rewards(text: str) -> rewards_section.RewardsConfig:
  """Parses 'model:CHECKPOINT@WEIGHT + python:FILE#FUNCTION'."""
  names = {'model': 'model', 'python': 'function'}
  fields: dict[str, tuple[Any, ...]] = collections.defaultdict(tuple)
  for part, weight in option_strings.things('--reward', text, r' \+ '):
    kind, value = part.partition(':')
    if kind.text not in names or not value:
      raise part.error(
        'must be model:CHECKPOINT or python:FILE#FUNCTION: a prompt has no'
        ' answer or tests to compare with'
      )
    # Only the file of a function may be quoted.
    text = '#'.join(x.text for x in value.divide('#'))
    fields[f'{names[kind.text]}s'] += (text,)
    fields[f'{names[kind.text]}_weights'] += (weight or 1.0,)
  return rewards_section.RewardsConfig(**fields)


def _best(
  rewards: completion_rewards.Rewards,
  complete: Callable[..., Iterable[tuple[int, engine.Completion]]],
  prompts: Sequence[str | chat_format.Messages],
  pending: Mapping[int, np.ndarray],
  count: int,
  rows: int,
) -> Iterator[tuple[int, Result]]:
  """Samples continuations of prompts, and yields the fields of the best.

  `complete` continues token ids by index, which sets the seed; `pending` maps
  index -> token ids of a prompt. Samples `count` continuations per prompt, for
  `rows` prompts at a time.
  """
  indices = list(pending)
  for chunk in (indices[i : i + rows] for i in range(0, len(indices), rows)):
    ids = {i * count + k: pending[i] for i in chunk for k in range(count)}
    drawn = dict(complete(ids))
    # One group per completion, as `ended` is a field of the group.
    groups = [
      completion_rewards.Completions(
        str(prompts[number // count]),
        {'prompt': prompts[number // count], 'ended': drawn[number].ended},
        [drawn[number].text],
        framing.Pair(tokens, drawn[number].tokens),
        [drawn[number].tokens],
      )
      for number, tokens in ids.items()
    ]
    parts, _ = rewards(groups)
    total = sum(rewards.weights[name] * x for name, x in parts.items())
    for i, row in zip(chunk, total.reshape(-1, count).tolist(), strict=True):
      best = max(range(count), key=row.__getitem__)
      fields = _fields(drawn[i * count + best])
      yield i, {**fields, 'reward': row[best], 'rewards': row}


def _fields(output: engine.Completion | np.ndarray | Result) -> Result:
  if isinstance(output, dict):
    return output
  if not isinstance(output, engine.Completion):
    return {'embedding': [float(x) for x in output]}
  return {
    'continuation': output.text,
    'tokens': len(output.tokens),
    'log_prob': float(output.log_probs.sum()),
    'ended': output.ended,
  }


class _Results:
  """Prints results, or writes them to a resumable file.

  Attributes:
    lines: index -> JSON line of a finished prompt; only on process 0.
  """

  def __init__(
    self, output: str | None, prompts: text_generation.Prompts, options: Any
  ):
    """Reads the results of an interrupted command.

    Args:
      output: path of the file, or None.
      prompts: all prompts.
      options: values that affect the results.

    Raises:
      UserError: the file has other prompts or options.
    """
    self._texts = list(prompts.values())
    description = json.dumps([options, self._texts], sort_keys=True)
    # In every line instead of a header, so that each line identifies itself.
    self._digest = hashlib.sha256(description.encode()).hexdigest()[:12]
    self.lines: dict[int, Result] = {}
    self._log, self._printed = None, 0
    self._start = time.monotonic()
    self._progress = progress.CountProgress('generate')
    if output is None or not distributed.is_lead():
      return
    self._log = append_log.Log(paths.at(output))
    for line, _ in self._log.lines:
      if not isinstance(line, dict) or line.get('of') != self._digest:
        raise errors.UserError(
          f'--output={output} exists, and is of other prompts or options;'
          ' remove it, or name another file.'
        )
      self.lines[line['index']] = line
    self._resumed = len(self.lines)
    # Drops a line torn by a kill.
    self._log.keep(self.lines.values())
    if self.lines:
      print(f'{output}: {len(self.lines)} of {len(self._texts)} are done')

  def add(self, index: int, result: Result) -> None:
    """Prints a result, or writes it and prints progress every few seconds."""
    if not distributed.is_lead():
      return
    if self._log is None:
      self.lines[index] = result
      # Results arrive out of order: print them in the order of prompts.
      while self._printed in self.lines:
        self._print(self._printed)
        self._printed += 1
      return
    prompt = self._texts[index]
    line = {'index': index, **result, 'prompt': prompt, 'of': self._digest}
    self.lines[index] = line
    self._log.write(line)
    # Earlier results would inflate the rate.
    skipped = self._resumed
    self._progress(len(self.lines) - skipped, len(self._texts) - skipped)

  def _print(self, index: int) -> None:
    print(f'--- prompt {index + 1} of {len(self._texts)}\n{self._texts[index]}')
    print(_describe(self.lines[index]), flush=True)

  def finish(self) -> None:
    """Sorts the lines of the file by prompt."""
    if self._log is None:
      return
    # Close twice, as `keep` replaces the file and reopens it.
    self._log.close()
    self._log.keep(self.lines[i] for i in range(len(self._texts)))
    self._log.close()
    duration = progress.format_seconds(time.monotonic() - self._start)
    print(f'{len(self._texts)} results in {self._log.path} ({duration})')


def _describe(result: Result) -> str:
  if 'embedding' in result:
    numbers = ' '.join(f'{x:.4f}' for x in result['embedding'][:6])
    return f'--- embedding ({len(result["embedding"])} numbers)\n{numbers} ..'
  return (
    f'--- continuation ({result["tokens"]} tokens, ended by'
    f' {result["ended"]})\n{result["continuation"]}'
  )


if __name__ == '__main__':
  command.main(__doc__, define_flags, main)
