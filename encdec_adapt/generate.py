r"""Continues prompts with a trained model: text in, text out.

    python -m encdec_adapt.generate --checkpoint=runs/adapted \
      --prompt='The quick' [--temperature=0.8 --top_p=0.95]
    python -m encdec_adapt.generate --checkpoint=runs/adapted \
      --prompts=prompts.jsonl --output=continuations.jsonl

The model is a Hugging Face folder, or the newest checkpoint of a run (the best
one with `config.checkpoint.keep_best`). An encoder-decoder reads the prompt
with its encoder, as in PrefixLM training; a decoder-only model continues it,
after the `separator` of the run's objective if it has one.
With --chat a prompt is a user's turn, and the model answers in the chat format
of its vocabulary. With --embed the encoder's states are written instead.

--output gets a line of JSON per prompt as it ends, in the order of the prompts
once all have: `index` (from 0), `run`, `prompt`, and `continuation` (without
special tokens), `tokens` (their number, EOS included), `log_prob` (the sum of
their natural log-probabilities under the model) and `ended` ('eos', 'length',
which is --max_tokens, or 'stop'); or `embedding`, a list of floats. The same
command again resumes a file that is not complete.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import hashlib
import json
import pathlib
import time
from typing import Any

from absl import flags
import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.cli import command
from encdec_adapt.cluster import distributed
from encdec_adapt.conversion import (
  model_in_memory,
  model_on_disk,
  pretrained_files,
)
from encdec_adapt.files import append_log, disk, paths, text_lines
from encdec_adapt.inference import (
  beam_search,
  engine,
  pooled_states,
)
from encdec_adapt.inference import sampling as sampling_lib
from encdec_adapt.telemetry import progress
from encdec_adapt.tokenizers import chat_format

# Where a prompt was given, for messages -> a text, or with --chat the messages
# of a conversation.
Prompts = Mapping[str, str | chat_format.Messages]
# What a prompt gave: fields of its line of JSON.
Result = dict[str, Any]


define_flags = command.define(
  command.string('checkpoint', 'Work directory of a run, or a HF folder.'),
  command.flag(
    'multi_string',
    'prompt',
    'Text to continue; may be repeated.',
    default=[],
    agrees=False,  # The prompts themselves must, wherever they are from.
  ),
  command.string(
    'prompts',
    'File with a prompt per line, - for standard input; with a JSON string per'
    ' line if it ends in .jsonl, or with --chat also a list of messages'
    ' ("role", "content").',
    agrees=False,
  ),
  command.integer(
    'max_tokens', 'Maximum generated tokens.', default=64, lower_bound=1
  ),
  command.integer(
    'max_prompt',
    'Maximum tokens of a prompt, BOS included; a longer one keeps BOS and its'
    ' last tokens. Without it, prompts longer than max_position_embeddings of'
    " the model's config.json are refused.",
    lower_bound=2,
  ),
  command.number('temperature', '0 is greedy.', default=0.0),
  command.integer('top_k', 'Draw among the k likeliest tokens only.'),
  command.number(
    'top_p',
    'Draw among the likeliest tokens that reach this probability only.',
  ),
  command.number(
    'min_p',
    'Draw among tokens with at least this share of the largest probability.',
  ),
  command.number(
    'repetition_penalty',
    'Divides positive logits, and multiplies negative ones, of tokens that the'
    ' decoder has read; 1 for none.',
    default=1.0,
  ),
  command.integer(
    'seed',
    'Seed of all draws; each prompt draws on its own.',
    default=0,
    lower_bound=0,
  ),
  command.integer(
    'beams',
    'Beams of a beam search; 1 for none.',
    default=1,
    lower_bound=1,
  ),
  command.number(
    'length_penalty',
    'Beams are compared by their log-probability divided by their length to'
    ' this power.',
    default=1.0,
  ),
  command.flag(
    'multi_string',
    'stop',
    'Text that ends a continuation, which does not contain it; may be'
    ' repeated.',
    default=[],
  ),
  command.integer(
    'batch_size',
    'Rows at a time: prompts, or the beams of prompts.',
    default=8,
    lower_bound=1,
  ),
  command.boolean('int8', 'Keep kernels as 8-bit integers.'),
  command.boolean('chat', "Take prompts as a user's turns and answer them."),
  command.choice(
    'embed',
    list(pooled_states.POOLINGS),
    "Write the encoder's states instead: their mean, or that of the last"
    ' token.',
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
  _check_options(values)
  if values.output:
    disk.require_output(values.output)
  # What decides the results: a file is resumed with the same values only.
  given = command.agreed(values)
  del given['batch_size']
  texts = json.dumps(list(prompts.values())).encode()
  with command.processes(values, prompts=hashlib.sha256(texts).hexdigest()):
    stored = model_on_disk.open_model(values.checkpoint)
    encoded = _encode(prompts, stored, values)
    results = _Results(values.output, prompts, {**given, 'step': stored.step})
    done = distributed.from_lead(lambda: sorted(results.done))
    left = [i for i in range(len(prompts)) if i not in done]
    if left:
      loaded = model_in_memory.read_as_trained(stored)
      run = _embed if values.embed else _continue
      for i, found in run(loaded, {i: encoded[i] for i in left}, values):
        results.add(i, {'run': pathlib.Path(values.checkpoint).name, **found})
    results.finish()
    distributed.barrier('results')
  return 0


def _check_options(values: flags.FlagValues) -> None:
  """Refuses options that do not go together, before anything is opened."""
  drawn = _sampling(values, 0)
  if values.beams > 1 and (drawn.temperature or drawn.repetition_penalty != 1):
    raise errors.UserError(
      f'--beams={values.beams} searches without drawing; leave out'
      ' --temperature and --repetition_penalty.'
    )
  if values.beams > 1 and values.stop:
    raise errors.UserError(
      f'--stop does not work with --beams={values.beams}; leave out one.'
    )
  if values.embed and values.int8:
    raise errors.UserError('--embed does not work with --int8; leave out one.')
  if not all(values.stop):
    raise errors.UserError('--stop is empty; give a text, or leave it out.')


def _sampling(
  values: flags.FlagValues, index: int
) -> sampling_lib.SamplingConfig:
  """Returns how tokens of a prompt are chosen."""
  return sampling_lib.SamplingConfig(
    values.temperature,
    values.top_k,
    values.top_p,
    values.min_p,
    values.repetition_penalty,
    sampling_lib.seed_of(values.seed, index),
  )


def read_prompts(
  texts: Sequence[str], file: str | None, *, chat: bool = False
) -> Prompts:
  """Reads the prompts of the flags, in order.

  Args:
    texts: prompts given one by one.
    file: path of a file of prompts, '-' for standard input, or None.
    chat: whether a line of JSON may be a conversation.

  Raises:
    UserError: both or neither are given, the file cannot be read, or a
      prompt is empty.
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
  for place, prompt in prompts.items():
    if chat and isinstance(prompt, list):
      continue
    if not isinstance(prompt, str):
      raise errors.UserError(f'{place} must be a JSON string: {prompt!r:.60}')
    if not prompt.strip():
      raise errors.UserError(
        f'{place}: the prompt is empty; there is nothing to continue.'
      )
  return prompts


def _encode(
  prompts: Prompts,
  stored: model_on_disk.StoredModel,
  values: flags.FlagValues,
) -> list[np.ndarray]:
  """Encodes each prompt as token ids, int32 [n], BOS first.

  Raises:
    UserError: a vocabulary has no chat template and one is needed, or a
      prompt cannot be encoded or is too long; names the prompt.
  """
  opened = stored.require_vocabularies()
  reader = opened.sides[stored.prompt_side]
  if values.chat:
    for one in opened.sides.values():
      chat_format.template_of(one)
  generated = 0 if values.embed else values.max_tokens
  longest = pretrained_files.prompt_room(stored, generated)
  separator = opened.decoder.encode(stored.separator)
  encoded = []
  for place, prompt in prompts.items():
    try:
      if values.chat:
        messages = prompt
        if isinstance(prompt, str):
          messages = [{'role': 'user', 'content': prompt}]
        ids = chat_format.encode(messages, reader, open_turn=True).ids
      else:
        ids = reader.encode(prompt)
    except errors.UserError as error:
      raise errors.UserError(f'{place}: {error}') from error
    ids = np.append(ids, separator)
    if values.max_prompt:
      ids = ids[-(values.max_prompt - 1) :]
    elif longest is not None and len(ids) + 1 > longest:
      raise errors.UserError(
        f'{place} has {len(ids) + 1} tokens, and the model has room for'
        f' {longest} (max_position_embeddings of its config.json, in a'
        ' decoder-only model without --max_tokens); give'
        f' --max_prompt={longest} to keep the last ones, or shorten it.'
      )
    encoded.append(np.array([reader.bos, *ids], np.int32))
  return encoded


def _continue(
  loaded: model_in_memory.LoadedModel,
  encoded: Mapping[int, np.ndarray],
  values: flags.FlagValues,
) -> Iterator[tuple[int, Result]]:
  """Continues prompts and yields results as they end.

  Args:
    loaded: the model.
    encoded: token ids of each prompt, by its index.
    values: the flags of the command.
  """
  indices, ids = list(encoded), loaded.special_ids
  if values.chat:
    writer = loaded.stored.require_vocabularies().decoder
    ends = *ids.eos, chat_format.end_of_turn(writer)
    ids = dataclasses.replace(ids, eos=ends)
  rows = loaded.rows(min(values.batch_size, len(encoded) * values.beams))
  made = loaded.engine(rows=rows, int8=values.int8, ids=ids)
  if values.beams > 1:
    completions = beam_search.search(
      made,
      list(encoded.values()),
      beams=values.beams,
      max_tokens=values.max_tokens,
      length_penalty=values.length_penalty,
    )
  else:
    completions = made.run(
      engine.Request(
        tokens, values.max_tokens, _sampling(values, i), tuple(values.stop)
      )
      for i, tokens in encoded.items()
    )
  for number, found in completions:
    yield (
      indices[number],
      {
        'continuation': found.text,
        'tokens': len(found.tokens),
        'log_prob': float(found.log_probs.sum()),
        'ended': found.ended,
      },
    )


def _embed(
  loaded: model_in_memory.LoadedModel,
  encoded: Mapping[int, np.ndarray],
  values: flags.FlagValues,
) -> Iterator[tuple[int, Result]]:
  """Embeds prompts and yields results; arguments as `_continue`."""
  indices = list(encoded)
  found = pooled_states.embed(
    loaded.model,
    loaded.params,
    list(encoded.values()),
    mesh=loaded.where.mesh,
    rules=loaded.rules,
    pooling=values.embed,
    rows=loaded.rows(min(values.batch_size, len(encoded))),
  )
  for number, states in found:
    yield indices[number], {'embedding': [float(x) for x in states]}


class _Results:
  """Prints results, or writes them to a file that can be continued."""

  def __init__(self, output: str | None, prompts: Prompts, given: Any):
    """Reads what an earlier run left.

    Args:
      output: path of the file, or None.
      prompts: all prompts.
      given: what decides the results.

    Raises:
      UserError: the file is of other prompts or options.
    """
    self._texts = list(prompts.values())
    described = json.dumps([given, self._texts], sort_keys=True)
    self._of = hashlib.sha256(described.encode()).hexdigest()[:12]
    self.done: dict[int, Result] = {}
    self._log = None
    self._began = time.monotonic()
    self._told = progress.CountProgress('generate')
    if output is None or not distributed.is_lead():
      return
    self._log = append_log.Log(paths.at(output))
    for line, _ in self._log.lines:
      if not isinstance(line, dict) or line.get('of') != self._of:
        raise errors.UserError(
          f'--output={output} exists, and is of other prompts or options;'
          ' remove it, or name another file.'
        )
      self.done[line['index']] = line
    self._before = len(self.done)
    self._log.keep(self.done.values())
    if self.done:
      print(f'{output}: {len(self.done)} of {len(self._texts)} are done')

  def add(self, index: int, found: Result) -> None:
    """Prints a result, or writes it and prints progress now and then."""
    if not distributed.is_lead():
      return
    prompt = self._texts[index]
    if self._log is None:
      print(f'--- prompt {index + 1} of {len(self._texts)}\n{prompt}')
      print(_describe(found), flush=True)
      return
    line = {'index': index, **found, 'prompt': prompt, 'of': self._of}
    self.done[index] = line
    self._log.write(line)
    done, total = len(self.done), len(self._texts)
    self._told(done - self._before, total - self._before)

  def finish(self) -> None:
    """Brings the lines into the order of the prompts."""
    if self._log is None:
      return
    self._log.close()
    self._log.keep(self.done[i] for i in range(len(self._texts)))
    self._log.close()
    took = progress.format_seconds(time.monotonic() - self._began)
    print(f'{len(self._texts)} results in {self._log.path} ({took})')


def _describe(found: Result) -> str:
  """Describes a result for the screen."""
  if 'embedding' in found:
    shown = ' '.join(f'{x:.4f}' for x in found['embedding'][:6])
    return f'--- embedding ({len(found["embedding"])} numbers)\n{shown} ..'
  return (
    f'--- continuation ({found["tokens"]} tokens, ended by {found["ended"]})\n'
    f'{found["continuation"]}'
  )


if __name__ == '__main__':
  command.main(__doc__, define_flags, main)
