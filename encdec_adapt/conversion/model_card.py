"""The model card (README.md) of an exported folder: metadata, shape, history.

Reads the JSON files that runs leave; opens no model besides the exported one.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
import dataclasses
import math
import re
from typing import Any

import yaml

from encdec_adapt import config as config_lib
from encdec_adapt.base import errors
from encdec_adapt.conversion import (
  inspection,
  model_on_disk,
  pretrained_files,
  work_directory,
)
from encdec_adapt.files import atomic, hub, text_lines
from encdec_adapt.files import paths as paths_lib
from encdec_adapt.huggingface import torch_export
from encdec_adapt.models import model_config, parameters
from encdec_adapt.telemetry import compute_cost

# Fields of a stack in the card's table: its sizes, without masks and norms.
_SIZES = (
  *('layers', 'width', 'mlp_width', 'heads', 'kv_heads', 'head_dim'),
  *('experts', 'vocab_size'),
)
_DATASET = re.compile(r'hf://datasets/([\w.-]+/[\w.-]+)')
# Addresses, and folders of local files.
_LOCATION = re.compile(r'(hf://\S+)|[^\s:+@#,|]*/')
_CARD = """---
{metadata}---
# {name}

A model with {count:,} parameters ({kind}), exported in {dtype} by encdec_adapt.

{shape}

## What was done

{history}

{notes}## Use

{snippet}With encdec_adapt:

```python
import encdec_adapt

model = encdec_adapt.load({arguments})
```

{layout}## Upload

From this folder; only you can read the model, unless `--public` is added:

```
python -m encdec_adapt.convert push . --repo=ORG/NAME
```

## License

{license}
"""
_NATIVE = """The folder is in the layout of encdec_adapt, for models of any
families: config.json has `model_type` `encdec_adapt` and, as `model`, the keys
of `config.model`; the tensors are named `<stack>.layers.<number>.<part>`,
kernels are stored as [in, out] with heads apart ([D, N, H] of a query,
[N, H, D] of an output), and token tables without padding rows. {code}

"""
_CODE = """`modeling_encdec_adapt.py` is the torch code that transformers runs;
`trust_remote_code=True` allows that."""
# Runs in the folder, as a test does it.
_SNIPPET = """With transformers, here or by the name on the Hub:

```python
from transformers import AutoTokenizer, {name}

folder = '.'  # Or ORG/NAME.
model = {name}.from_pretrained({folder})
tokenizer = AutoTokenizer.from_pretrained({folder})
{decoder}inputs = tokenizer('The quick brown fox', return_tensors='pt')
tokens = model.generate(
  inputs.input_ids, attention_mask=inputs.attention_mask, max_new_tokens=32
)
print({prefix}tokenizer.decode(tokens[0], skip_special_tokens=True))
```

"""
_DECODER = """decoder_tokenizer = AutoTokenizer.from_pretrained(
  {folder}, subfolder='{subfolder}'
)
"""


@dataclasses.dataclass(frozen=True)
class Options:
  """Contents of a card that the model's files do not state.

  Attributes:
    native: whether the folder is in the native layout.
    dtype: dtypes of the tensors.
    notes: notes that the command printed.
    tokenizers: names of the tokenizer files.
    languages: codes such as 'en'; without any, those of the base models.
    evaluation: output folder of `evaluate` whose results of this model go into
      the metadata; '' for none.
  """

  native: bool
  dtype: str
  notes: Sequence[str]
  tokenizers: Collection[str]
  languages: Sequence[str] = ()
  evaluation: str = ''


def write(stored: model_on_disk.StoredModel, options: Options) -> str:
  """Returns the model card of an exported model.

  Args:
    stored: the exported checkpoint or folder.
    options: the other contents.

  Raises:
    UserError: a file of the run is damaged, or the evaluation has no results of
      this model.
  """
  model = stored.model
  arguments, layout, native = "'.'", '', options.native
  rule = getattr(model.stacks.get('encoder'), 'window_rule', None)
  # The example names it, as the authors' rule for a T5Gemma is 'exclusive'.
  if rule == 'inclusive' and not native:
    arguments += ", encoder_window='inclusive'"
  problem = torch_export.problem(model) if native else ''
  if native:
    code = f'No code for transformers comes with it: {problem}.'
    layout = _NATIVE.format(code=code if problem else _CODE)
  lines = ''.join(f'- {note}\n' for note in options.notes)
  bases = pretrained_files.base_models(stored.path)
  metadata = {
    'library_name': 'encdec_adapt' if problem else 'transformers',
    'tags': ['encdec_adapt'],
    **_metadata(stored, bases, options),
  }
  return _CARD.format(
    # YAML, as the Hub reads it.
    metadata=yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True),
    name=model_on_disk.title(stored.name),
    count=parameters.count(model),
    kind=model.architecture.name,
    dtype=options.dtype,
    shape='\n'.join(_shape(model)),
    history='\n'.join(_history(stored.name, stored.path, stored.step)),
    notes=f'## Notes\n\n{lines}\n' * bool(lines),
    snippet='' if problem else _snippet(model, options),
    arguments=arguments,
    layout=layout,
    license=_license(bases),
  )


def _snippet(model: model_config.ModelConfig, options: Options) -> str:
  """Returns the code that generates text; '' without a tokenizer."""
  if not (options.tokenizers and model.architecture.generates):
    return ''
  folder = 'folder' + ', trust_remote_code=True' * options.native
  name = inspection.transformers_class(model)
  subfolder = model_on_disk.DECODER_TOKENIZER
  is_separate = any(x.startswith(f'{subfolder}/') for x in options.tokenizers)
  decoder = _DECODER.format(folder=folder, subfolder=subfolder)
  return _SNIPPET.format(
    name='AutoModelForSeq2SeqLM' if options.native else name,
    folder=folder,
    decoder=decoder * is_separate,
    prefix='decoder_' * is_separate,
  )


def _license(bases: Iterable[Mapping[str, Any]]) -> str:
  """Returns a sentence for each base model."""
  lines = [
    f'- `{base["name"]}`: {base["license"]}.'
    if 'license' in base
    else f'- `{base["name"]}`: its folder has no README.md that states one.'
    for base in bases
  ]
  if not lines:
    return 'Trained from random weights; state a license in the metadata above.'
  terms = 'Weights are under the terms of those they are from:'
  return '\n'.join([terms, '', *lines])


def _metadata(
  stored: model_on_disk.StoredModel,
  bases: Sequence[Mapping[str, Any]],
  options: Options,
) -> dict[str, Any]:
  """Returns the fields that the Hub reads, without those that are empty."""
  path = stored.path
  config, summary = (
    _read(path / file) if stored.checkpoint else {}
    for file in (config_lib.RUN_CONFIG, compute_cost.SUMMARY)
  )
  licenses = {base.get('license'): base for base in bases}
  fields: dict[str, Any] = {}
  # None where it is unknown, which no other license stands for.
  if len(licenses) == 1 and None not in licenses:
    names = 'license', 'license_name', 'license_link'
    fields = {name: bases[0][name] for name in names if name in bases[0]}
  elif licenses and None not in licenses:
    fields = {'license': 'other', 'license_name': ' and '.join(licenses)}
  languages = [x for base in bases for x in base.get('languages', ())]
  fields['language'] = [*dict.fromkeys(options.languages or languages)]
  fields['base_model'] = [base['name'] for base in bases if base['on_hub']]
  source = config.get('data', {}).get('source', '')
  fields['datasets'] = _DATASET.findall(source)
  results = []
  loss = summary.get('eval_loss', math.nan)
  # Of the last step; YAML has numbers that JSON and the Hub have not.
  if math.isfinite(loss) and summary['steps'] == stored.step:
    results.append(_result(f'held-out {_sources(source)}', {'loss': loss}))
  for task, metrics in _evaluation(stored, options.evaluation).items():
    results.append(_result(task, metrics))
  if results:
    name = model_on_disk.title(stored.name)
    fields['model-index'] = [{'name': name, 'results': results}]
  return {name: value for name, value in fields.items() if value}


def _result(dataset: str, metrics: Mapping[str, float]) -> dict[str, Any]:
  """Returns the metrics of a data set as the Hub's model-index has them."""
  return {
    'task': {'type': 'text-generation'},
    'dataset': {'name': dataset, 'type': dataset},
    'metrics': [{'type': k, 'value': v} for k, v in metrics.items()],
  }


def _evaluation(
  stored: model_on_disk.StoredModel, folder: str
) -> dict[str, dict[str, float]]:
  """Reads the results of a model: task -> metric -> value.

  Raises:
    UserError: there are none in the folder; names the models that it has.
  """
  scores: dict[str, dict[str, float]] = {}
  runs = set()
  file = f'{folder}/results.jsonl'
  for record in text_lines.read_json(file).values() if folder else ():
    runs.add(record['run'])
    # Later lines replace earlier ones; a value that is not finite is null.
    if (
      record['fingerprint'] == stored.fingerprint
      and record['value'] is not None
    ):
      task = scores.setdefault(record['task'], {})
      task[record['metric']] = record['value']
  if folder and not scores:
    raise errors.UserError(
      f'--evaluation={folder} has no results of {stored.name} as it is now, but'
      f' those of {", ".join(sorted(runs))}. Run `evaluate'
      f' --checkpoint={stored.name} --output={folder}`.'
    )
  return scores


def _sources(source: str) -> str:
  """Returns `config.data.source` without the locations of local files."""
  return _LOCATION.sub(lambda match: match[1] or '', source)


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
  yield f'- Data: `{_sources(data["source"]) or "records"}`.'
  # Of any loss: its keys that were set, and the model that it reads.
  default = config_lib.defaults().loss.to_dict()
  changes = [
    f'{name} {value:g}' if isinstance(value, float) else f'{name} {value}'
    for name, value in config['loss'].items()
    # The chunk changes memory only.
    if name != 'chunk' and value != default.get(name)
  ]
  line = f'- Loss: {", ".join(changes) or "cross-entropy to the data"}'
  if teacher := config['teacher']['checkpoint']:
    line += f', which reads {_names([teacher])}'
  yield f'{line}.'
  if summary:
    yield (
      f'- Held-out loss {summary["eval_loss_at_step_0"]:.4f} at step 0,'
      f' {summary["eval_loss"]:.4f} at step {summary["steps"]}, in nats per'
      ' target token;'
      f' {summary["target_tokens"]:,.0f} target tokens of'
      f' {summary["total_tokens"]:,.0f} tokens, {summary["flops"]:.3g} model'
      ' FLOPs; with all that it was made from'
      f' {summary["inclusive"]["target_tokens"]:,.0f} target tokens.'
    )


def _read(path: paths_lib.Path) -> dict[str, Any]:
  """Reads a JSON file of a run; empty if it is missing."""
  return atomic.read_json(path) if path.exists() else {}
