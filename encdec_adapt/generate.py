r"""Continues prompts with a trained model: text in, text out.

    python -m encdec_adapt.generate --checkpoint=runs/adapted \
      --prompt='The quick' [--temperature=0.8 --top_p=0.95]

The model is a Hugging Face folder, or the newest checkpoint of a run (the best
one with `config.checkpoint.keep_best`). An encoder-decoder reads the prompt
with its encoder, as in PrefixLM training; a decoder-only model continues it.
With --chat a prompt is a user's turn, and the model answers in the chat format
of its vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
import json
import pathlib
from typing import Any

from absl import flags
import jax
from jax import numpy as jnp
import numpy as np

from encdec_adapt import config as config_lib
from encdec_adapt.cli import command, errors
from encdec_adapt.conversion import loaded_model, stored_model
from encdec_adapt.files import atomic, disk, paths
from encdec_adapt.inference import sampling as sampling_lib
from encdec_adapt.tokenizers import chat_format, vocabularies, vocabulary

# Where a prompt was given, for messages -> a text, or with --chat the messages
# of a conversation.
Prompts = Mapping[str, str | chat_format.Messages]
_SHORTEST = 16  # Rows are padded to a multiple of this and a power of two.


define_flags = command.define(
  command.string('checkpoint', 'Work directory of a run, or a HF folder.'),
  command.flag(
    'multi_string', 'prompt', 'Text to continue; may be repeated.', default=[]
  ),
  command.string(
    'prompts',
    'File with a prompt per line; with a JSON string per line if it ends in'
    ' .jsonl, or with --chat also a list of messages ("role", "content").',
  ),
  command.integer(
    'max_tokens', 'Maximum generated tokens.', default=64, lower_bound=1
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
  command.integer('seed', 'Seed of all draws.', default=0),
  command.integer('batch_size', 'Prompts at a time.', default=8, lower_bound=1),
  command.boolean('chat', "Take prompts as a user's turns and answer them."),
  command.string('output', 'JSON file to write the continuations to.'),
)


def main(values: flags.FlagValues) -> int:
  """Runs the command."""
  command.require(values, 'checkpoint')
  prompts = read_prompts(values.prompt, values.prompts, chat=values.chat)
  # Refuses bad options before anything is opened.
  sampling_lib.SamplingConfig(
    values.temperature, values.top_k, values.top_p, values.min_p
  )
  if values.output:
    disk.require_output(values.output)
  stored = stored_model.open_model(values.checkpoint)
  opened = _open_vocabularies(stored)
  encoded = _encode(prompts, stored, opened, chat=values.chat)
  done = []
  for samples in _continue(stored, opened, prompts, encoded, values):
    for sample in samples:
      done.append(sample)
      end = 'ended' if sample['ended'] else 'cut'
      print(f'--- prompt {len(done)} of {len(prompts)}\n{sample["prompt"]}')
      print(f'--- continuation ({sample["tokens"]} tokens, {end})')
      print(sample['continuation'])
    if values.output:  # Written after each batch, in case of an interruption.
      atomic.write_json(values.output, done)
  return 0


def read_prompts(
  texts: Sequence[str], file: str | None, *, chat: bool = False
) -> Prompts:
  """Reads the prompts of the flags, in order.

  Args:
    texts: prompts given one by one.
    file: path of a file of prompts, or None.
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
    try:
      # Not splitlines(), which also splits at form feeds and the like.
      content = paths.at(file).read_text(encoding='utf-8')
    except (OSError, UnicodeDecodeError) as error:
      raise errors.UserError(
        f'--prompts={file} cannot be read as UTF-8 text ({error}).'
      ) from error
    lines = enumerate(content.removesuffix('\n').split('\n'), 1)
    prompts = {f'--prompts={file}, line {i}': line for i, line in lines}
    if file.endswith('.jsonl'):
      prompts = {
        place: _json_prompt(line, place, chat)
        for place, line in prompts.items()
      }
  for place, prompt in prompts.items():
    if isinstance(prompt, str) and not prompt.strip():
      raise errors.UserError(
        f'{place}: the prompt is empty; there is nothing to continue.'
      )
  return prompts


def _json_prompt(
  line: str, place: str, chat: bool
) -> str | chat_format.Messages:
  """Parses a prompt from a line of JSON."""
  try:
    prompt = json.loads(line)
  except json.JSONDecodeError as error:
    raise errors.UserError(
      f'{place} is not JSON ({error}); write one JSON string per line.'
    ) from error
  if not isinstance(prompt, str) and not (chat and isinstance(prompt, list)):
    raise errors.UserError(f'{place} must be a JSON string: {line[:60]}')
  return prompt


def _open_vocabularies(stored: stored_model.StoredModel) -> vocabularies.Opened:
  """Opens the vocabularies of a model.

  Raises:
    UserError: there is none, or it has ids that the model has no row for.
  """
  opened = stored.open_vocabularies()
  if opened is None:
    raise errors.UserError(
      f'{stored.path} has no tokenizer to read prompts with; put its'
      ' tokenizer.model or tokenizer.json into the folder of the weights.'
    )
  for side, stack in stored.model.stacks.items():
    vocabularies.check_size(opened.sides[side], stack.vocab_size, side)
  return opened


def _reader(
  stored: stored_model.StoredModel, opened: vocabularies.Opened
) -> vocabulary.Vocabulary:
  """Returns the vocabulary that prompts are read with."""
  return opened.sides[next(iter(stored.model.stacks))]


def _encode(
  prompts: Prompts,
  stored: stored_model.StoredModel,
  opened: vocabularies.Opened,
  *,
  chat: bool,
) -> list[np.ndarray]:
  """Encodes each prompt as token ids, int32 [n], without BOS.

  Raises:
    UserError: a vocabulary has no chat template and one is needed, or a
      prompt cannot be encoded; names the prompt.
  """
  reader = _reader(stored, opened)
  if chat:
    for one in opened.sides.values():
      chat_format.template_of(one)
  encoded = []
  for place, prompt in prompts.items():
    try:
      if not chat:
        encoded.append(reader.encode(prompt))
        continue
      messages = prompt
      if isinstance(prompt, str):
        messages = [{'role': 'user', 'content': prompt}]
      encoded.append(chat_format.encode(messages, reader, open_turn=True).ids)
    except errors.UserError as error:
      raise errors.UserError(f'{place}: {error}') from error
  return encoded


def _continue(
  stored: stored_model.StoredModel,
  opened: vocabularies.Opened,
  prompts: Prompts,
  encoded: Sequence[np.ndarray],
  values: flags.FlagValues,
) -> Iterator[list[dict[str, Any]]]:
  """Reads the parameters and yields samples batch by batch, in order.

  A sample has `run`, `prompt`, `continuation` (its text, without special
  tokens), `tokens` (their number, EOS included) and `ended` (whether the model
  ended it; otherwise --max_tokens did).

  Args:
    stored: the model.
    opened: vocabularies of the model.
    prompts: the prompts.
    encoded: token ids of each prompt.
    values: the flags of the command.
  """
  dtype = jnp.float32
  if stored.step is not None:
    dtype = jnp.dtype(config_lib.load_run(str(stored.path)).compute.dtype)
  loaded = loaded_model.read(stored, dtype=dtype)
  reader, writer = _reader(stored, opened), opened.decoder
  ends = list(loaded.special_ids['eos'])
  if values.chat:
    ends.append(chat_format.end_of_turn(writer))
  texts, name = list(prompts.values()), pathlib.Path(values.checkpoint).name
  size = min(values.batch_size, len(texts))
  for start in range(0, len(texts), size):
    ids = encoded[start : start + size]
    result = loaded.generate(
      *frame_prompts([*ids, *[None] * (size - len(ids))], reader),
      rows=np.arange(start, start + size, dtype=np.int32),
      max_tokens=values.max_tokens,
      temperature=values.temperature,
      top_k=values.top_k,
      top_p=values.top_p,
      min_p=values.min_p,
      seed=values.seed,
      eos=ends,
    )
    result = jax.device_get(result)
    samples = []
    for row in range(len(ids)):
      tokens = result.tokens[row, : result.lengths[row]]
      # A table may have more rows than the vocabulary has tokens; no text has
      # those ids.
      known = np.where(tokens < writer.size, tokens, writer.pad)
      samples.append(
        {
          'run': name,
          'prompt': texts[start + row],
          'continuation': writer.decode(known, start=False),
          'tokens': len(tokens),
          'ended': bool(tokens[-1] in ends),
        }
      )
    yield samples


def frame_prompts(
  prompts: Sequence[np.ndarray | None], reader: vocabulary.Vocabulary
) -> tuple[np.ndarray, np.ndarray]:
  """Frames prompts as rows [B, S]: BOS and the prompt, then padding.

  Args:
    prompts: token ids [n] of each row, None for a row of padding only.
    reader: the vocabulary of the prompts.

  Returns:
    Tokens, int32, and a mask, True at tokens; S is a power of two, so that few
    lengths are compiled.
  """
  longest = max(len(ids) + 1 for ids in prompts if ids is not None)
  length = _SHORTEST
  while length < longest:
    length *= 2
  tokens = np.full((len(prompts), length), reader.pad, np.int32)
  mask = np.zeros(tokens.shape, bool)
  for row, ids in enumerate(prompts):
    if ids is not None:
      tokens[row, : len(ids) + 1] = [reader.bos, *ids]
      mask[row, : len(ids) + 1] = True
  return tokens, mask


if __name__ == '__main__':
  command.main(__doc__, define_flags, main)
