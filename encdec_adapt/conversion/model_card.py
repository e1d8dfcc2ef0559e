"""The model card (README.md) of an exported folder: shape and history.

Reads the JSON files that runs leave; opens no model besides the exported one.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from encdec_adapt import config as config_lib
from encdec_adapt.conversion import inspection, model_on_disk, work_directory
from encdec_adapt.files import atomic, hub
from encdec_adapt.files import paths as paths_lib
from encdec_adapt.models import model_config, parameters
from encdec_adapt.telemetry import compute_cost

# Fields of a stack in the card's table: its sizes, without masks and norms.
_SIZES = (
  *('layers', 'width', 'mlp_width', 'heads', 'kv_heads', 'head_dim'),
  *('experts', 'vocab_size'),
)
_CARD = """---
library_name: {library}
tags: [encdec_adapt]
---
# {name}

A model with {count:,} parameters ({kind}), exported in {dtype} by encdec_adapt.

{shape}

## What was done

{history}

{notes}## Loading

    import encdec_adapt
    model = encdec_adapt.load({arguments})

{layout}
## Licence

Weights that were made from others are under the terms of those others.
"""
_NATIVE = """No class of transformers can express this model. The folder is in
the layout of encdec_adapt: config.json has `model_type` `encdec_adapt` and, as
`model`, the keys of `config.model`; the tensors are named
`<stack>.layers.<number>.<part>`, kernels are stored as [in, out] with heads
apart ([D, N, H] of a query, [N, H, D] of an output), and token tables without
padding rows.
"""
_TRANSFORMERS = """or with transformers:

    from transformers import AutoTokenizer, {name}
    tokenizer = AutoTokenizer.from_pretrained('PATH')
    model = {name}.from_pretrained('PATH')
"""


def write(
  stored: model_on_disk.StoredModel,
  *,
  native: bool,
  dtype: str,
  notes: Sequence[str] = (),
) -> str:
  """Returns the model card of an exported model.

  Args:
    stored: the exported checkpoint or folder.
    native: whether it is written in the native layout.
    dtype: dtypes of the exported tensors.
    notes: notes that the command printed.

  Raises:
    UserError: a file of the run is damaged.
  """
  model = stored.model
  arguments = "'PATH'"
  rule = getattr(model.stacks.get('encoder'), 'window_rule', None)
  # The example names it, as the authors' rule for a T5Gemma is 'exclusive'.
  if rule == 'inclusive' and not native:
    arguments += ", encoder_window='inclusive'"
  layout = _NATIVE
  if not native:
    layout = _TRANSFORMERS.format(name=inspection.transformers_class(model))
  lines = ''.join(f'- {note}\n' for note in notes)
  return _CARD.format(
    library='encdec_adapt' if native else 'transformers',
    name=model_on_disk.title(stored.name),
    count=parameters.count(model),
    kind=model.architecture.name,
    dtype=dtype,
    shape='\n'.join(_shape(model)),
    history='\n'.join(_history(stored.name, stored.path, stored.step)),
    notes=f'## Notes\n\n{lines}\n' * bool(notes),
    arguments=arguments,
    layout=layout,
  )


def _shape(model: model_config.ModelConfig) -> Iterator[str]:
  """Yields the lines of a table with a column for each stack."""
  yield '| | ' + ' | '.join(model.stacks) + ' |'
  yield '|---|' + '---|' * len(model.stacks)
  for name in _SIZES:
    values = [str(getattr(stack, name)) for stack in model.stacks.values()]
    yield f'| {name} | ' + ' | '.join(values) + ' |'


def _history(
  name: str, path: paths_lib.Path, step: int | None
) -> Iterator[str]:
  """Yields lines on how a run and its ancestors were made, newest first.

  Args:
    name: name of the run or folder.
    path: where it is.
    step: step of the checkpoint, None for a folder.
  """
  if step is None:
    yield f'- A copy of {_names([name])}.'
    return
  summary = _read(path / compute_cost.SUMMARY)
  coverage = _read(path / work_directory.COVERAGE)
  # Only `convert` writes 'made_by'. A run that was killed has no summary, but
  # always a configuration.
  if made_by := summary.get('made_by'):
    sources = made_by['sources']
    weights = ', '.join(f'{weight:g}' for weight in made_by.get('weights', ()))
    yield (
      f'- Made by `encdec_adapt.convert {made_by["command"]}` of'
      f' {_names(sources)}' + f', weighted {weights}' * bool(weights) + '.'
    )
  else:
    config = _read(path / config_lib.RUN_CONFIG)
    init = config['init']
    sources = [path for path in (init['encoder'], init['decoder']) if path]
    yield from _training(config, summary, step, sources)
  # Counts only: the file has an entry for every parameter.
  if coverage:
    counts = coverage['parameters']
    yield (
      '- Adapted: '
      + ', '.join(f'{n:,} parameters {how}' for how, n in counts.items() if n)
      + '.'
    )
    for change in coverage['changes']:
      yield f'  - Differs from its source: {change}.'
  for name in dict.fromkeys(sources):
    if hub.is_address(name):  # Its history is not downloaded.
      continue
    source, source_step = model_on_disk.resolve(name)
    # Sources that are finished runs and still exist.
    if source_summary := _read(source / compute_cost.SUMMARY):
      yield f'- {_names([name])}:'
      if source_step is None:
        source_step = source_summary['steps']
      for line in _history(name, source, source_step):
        yield f'  {line}'  # Indented: Markdown nests the list of an ancestor.


def _names(paths: Iterable[str]) -> str:
  """Names folders without their locations: a card may become public."""
  return ' and '.join(f'`{model_on_disk.title(path)}`' for path in paths)


def _training(
  config: dict[str, Any],
  summary: dict[str, Any],
  step: int,
  sources: Iterable[str],
) -> Iterator[str]:
  """Yields lines on the training of a run."""
  init, data = config['init'], config['data']
  if init['mode'] != 'random':
    yield f'- Started by `{init["mode"]}` from {_names(sources)}.'
  # 0 where the records decided the length: then only the step is known.
  steps = config['train']['steps']
  yield (
    f'- Trained to step {step}{f" of {steps}" * bool(steps)}, with'
    f' {config["train"]["batch_size"]} rows a step, objective'
    f' `{data["objective"]}`, {data["encoder_length"]} +'
    f' {data["decoder_length"]} tokens a row, {config["optimizer"]["kind"]} at'
    f' a peak rate of {config["optimizer"]["learning_rate"]:g}.'
  )
  if config['loss']['distillation']:
    yield (
      f'- {config["loss"]["distillation"]:.0%} of the loss was to the'
      f' distribution of {_names([config["teacher"]["checkpoint"]])}.'
    )
  if summary:
    yield (
      f'- Held-out loss {summary["eval_loss_at_step_0"]:.4f} at step 0,'
      f' {summary["eval_loss"]:.4f} at step {summary["steps"]}, in nats per'
      ' target token;'
      f' {summary["target_tokens"]:,.0f} target tokens,'
      f' {summary["flops"]:.3g} model FLOPs.'
    )


def _read(path: paths_lib.Path) -> dict[str, Any]:
  """Reads a JSON file of a run; empty if it is missing."""
  return atomic.read_json(path) if path.exists() else {}
