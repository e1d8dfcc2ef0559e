r"""Serves a model over HTTP, with an OpenAI-compatible API.

    python -m encdec_adapt.serve --checkpoint=runs/adapted

Endpoints: POST /v1/completions and /v1/chat/completions, streamed or not; GET
/v1/models, /health, /metrics, and / for a page to try the model. For an
embedding model: POST /v1/embeddings, GET /v1/models and /health. There is no
authentication: by default, only programs on this machine can connect. Requires
pip install 'encdec_adapt[serve]'.

A first signal completes the requests in progress and exits with status 0. The
status is 1 if the port is in use, the engine fails, or a second signal arrives.
"""

from collections.abc import Iterator
import dataclasses
import time

from absl import flags

from encdec_adapt.base import errors, packages
from encdec_adapt.cli import command
from encdec_adapt.files import disk
from encdec_adapt.generation import (
  model_in_memory,
  prompt_encoding,
  text_generation,
)
from encdec_adapt.inference import engine as engine_lib
from encdec_adapt.inference import lengths
from encdec_adapt.server import protocol, served_adapters
from encdec_adapt.stored import model_on_disk, pretrained_files
from encdec_adapt.telemetry import environment
from encdec_adapt.tokenizers import chat_format

# Cap of the default, as the largest state holds the longest prompt, and some
# models have 128 K positions.
_MAX_PROMPT = 4096
_PROGRESS = 10  # Seconds between lines about programs.
STEPS = 4  # Decode steps between queue polls, and per stream event.

define_flags = command.define(
  command.string('checkpoint', 'A run, RUN@STEP, or a Hugging Face folder.'),
  command.flag(
    'list',
    'adapters',
    'Runs of adapters over the checkpoint, divided by commas: the `model` of a'
    ' request names one by the name of its folder.',
    default=[],
  ),
  command.string('host', 'Address to listen on.', default='127.0.0.1'),
  command.integer(
    'port', 'Port.', default=8000, lower_bound=1, upper_bound=65535
  ),
  command.integer(
    'batch_size', 'Requests at a time.', default=8, lower_bound=1
  ),
  command.options(text_generation.Options, 'prefix', 'int8'),
  command.integer(
    'max_prompt',
    "Maximum tokens of a prompt, BOS included; by default the model's positions"
    f' (max_position_embeddings or learned), at most {_MAX_PROMPT}.',
    lower_bound=2,
  ),
  command.integer(
    'max_tokens',
    'Maximum generated tokens of a request.',
    default=1024,
    lower_bound=1,
  ),
  command.boolean(
    'run_prefix', 'Put the prefix before prompts of token ids, too.'
  ),
  command.boolean(
    'warm_up',
    'Compile all programs while no request is in progress; otherwise only those'
    ' that requests are the first to need, and wait for.',
    default=True,
  ),
  command.integer(
    'max_queue',
    'Requests that may wait; further ones get status 429.',
    default=64,
    lower_bound=0,
  ),
  command.number(
    'timeout',
    'Seconds that a request may take (status 504).',
    default=300.0,
    lower_bound=0.001,
    upper_bound=86400,
  ),
)


def main(values: flags.FlagValues) -> int:
  """Runs the command."""
  command.require(values, 'checkpoint')
  packages.require('serving', 'serve', 'starlette', 'uvicorn')
  # After the check, as it imports the packages of the extra `serve`.
  from encdec_adapt.server import http_app

  # Before reading parameters, which takes minutes for large models.
  if not http_app.is_free(values.host, values.port):
    return 1
  stored = model_on_disk.open_model(values.checkpoint)
  model_on_disk.require_head(stored)
  opened = stored.require_vocabularies()
  if stored.model.decoder.head.sizes(stored.model.decoder.width):
    if values.adapters:
      raise errors.UserError(
        f'--adapters is {",".join(values.adapters)}, and an embedding model is'
        ' served without; give their run as --checkpoint, which merges them.'
      )
    for name in ('int8', 'prefix', 'run_prefix'):
      if values[name].present:
        raise errors.UserError(
          f'--{name} is for models that generate, and {stored.name} embeds;'
          ' leave it out.'
        )
    from encdec_adapt.server import embedding_app

    loaded = model_in_memory.read_as_trained(stored)
    rows = loaded.rows(values.batch_size)
    name = model_on_disk.title(stored.name)
    service = embedding_app.EmbeddingService(loaded, name, rows, values.host)
    return http_app.run(service, values.host, values.port)
  runs = served_adapters.open_runs(stored, values.adapters)
  models, prompts = {model_on_disk.title(stored.name): stored, **runs}, {}
  for name, model in models.items():  # Each with its run's framing.
    prompts[name] = prompt_encoding.PromptEncoder(model, prefix=values.prefix)
    prompt_encoding.print_prefix(model, values.prefix)
  longest = pretrained_files.prompt_room(stored)
  loaded = model_in_memory.read_as_trained(stored)
  adapters = {k: served_adapters.read(loaded, x) for k, x in runs.items()}
  ids = loaded.special_ids
  # Requests may be chats or plain text; both end at any of these ids.
  if chat_format.find_template(opened.decoder):
    ends = *ids.eos, chat_format.end_of_turn(opened.decoder)
    ids = dataclasses.replace(ids, eos=tuple(dict.fromkeys(ends)))
  encodes_prompt = stored.model.architecture.encodes_prompt
  rows = loaded.rows(values.batch_size)
  limits = protocol.Limits(
    values.max_prompt or min(longest or _MAX_PROMPT, _MAX_PROMPT),
    values.max_tokens,
    rows,
    # In a decoder-only model, prompt and completion share the context.
    None if encodes_prompt else longest,
  )
  engine = loaded.engine(
    rows=rows,
    int8=values.int8,
    ids=ids,
    steps=STEPS,
    adapters=adapters,
    sizes=_state_sizes(limits, encodes_prompt),
  )
  _require_memory(engine)
  # Fail early if the parameters do not fit.
  empty = next(iter(prompts.values())).frame([])
  list(engine.run([engine_lib.Request(empty, 2)]))
  served = http_app.Served(
    name=model_on_disk.title(stored.name),
    step=stored.step,
    opened=opened,
    prompts=prompts,
    limits=limits,
    trained_on_chats=stored.framing.chats,
    run_prefix=values.run_prefix,
    max_queue=values.max_queue,
    timeout=values.timeout,
    host=values.host,
  )
  service = http_app.Service(
    engine, served, _compile(engine) if values.warm_up else ()
  )
  return http_app.run(service, values.host, values.port)


def _compile(engine: engine_lib.Engine) -> Iterator[int]:
  """Compiles the engine's programs, one for each number, and prints them."""
  programs, seconds, printed = engine.programs_to_compile(), 0.0, 0.0
  for number, program in enumerate(programs, 1):
    start = time.monotonic()
    program()
    seconds += time.monotonic() - start
    text = f'compiled {number}/{len(programs)} programs in {seconds:.0f} s'
    if seconds - printed > _PROGRESS or number == len(programs):
      print(f'{text}, about {seconds / number:.1f} s each')
      printed = seconds
    yield number


def _state_sizes(
  limits: protocol.Limits, reads_encoder: bool
) -> list[lengths.Size]:
  generated = limits.max_tokens
  # The longest prompt leaves fewer positions for generated tokens.
  if limits.context is not None:
    generated = min(generated, limits.context - limits.max_prompt)
  return lengths.state_sizes(
    limits.max_prompt, generated, reads_encoder=reads_encoder
  )


def _require_memory(engine: engine_lib.Engine) -> None:
  """Checks that the state sizes fit into memory.

  Raises:
    UserError: the two largest sizes, which coexist when the state grows, need
      more than the free memory.
  """
  nbytes, free = engine.state_bytes(), environment.memory_free()
  if free is not None and sum(sorted(nbytes)[-2:]) > free:
    states = ', '.join(
      f'{size.length} + {size.source} tokens: {disk.format_bytes(n)}'
      for size, n in zip(engine.sizes, nbytes, strict=True)
    )
    raise errors.UserError(
      f'the states of {engine.rows} rows need more memory than the'
      f' {disk.format_bytes(free)} that are free on a device (decoder +'
      f' encoder {states}; two exist when the state grows). Lower --max_prompt,'
      ' --max_tokens or --batch_size.'
    )


if __name__ == '__main__':
  command.main(__doc__, define_flags, main)
