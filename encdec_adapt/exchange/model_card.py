"""The model card (README.md) of an exported folder: metadata, shape, history.

Reads the JSON files of runs; opens no model besides the exported model.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
import itertools
import math
import pathlib
import re
from typing import Any

import huggingface_hub

from encdec_adapt import config as config_lib
from encdec_adapt.base import errors, saved_keys
from encdec_adapt.exchange import inspection
from encdec_adapt.files import append_log, atomic, hub, text_lines
from encdec_adapt.files import paths as paths_lib
from encdec_adapt.huggingface import torch_export
from encdec_adapt.models import model_config, parameters
from encdec_adapt.stored import model_on_disk, pretrained_files, work_directory
from encdec_adapt.telemetry import compute_cost, environment, timing
from encdec_adapt.training.metrics import held_out_metrics

# Fields of a stack in the card's table: sizes, without masks and norms.
_SIZES = (
  *('layers', 'width', 'mlp_width', 'heads', 'kv_heads', 'head_dim'),
  *('global_kv_heads', 'global_head_dim', 'experts', 'vocab_size'),
)
_DATASET = re.compile(r'hf://datasets/([\w.-]+/[\w.-]+)')
# Addresses, and folders of local files.
_LOCATION = re.compile(r'(hf://\S+)|[^\s:+@#,|]*/')
_TEMPLATE = pathlib.Path(__file__).with_name('model_card.jinja')
_GENERATION = 'text-generation'
# Head of a model that does not generate -> task of its results on the Hub.
_TASKS = {'tokens': 'fill-mask', 'embedding': 'sentence-similarity'}
_PROMPT = 'The quick brown fox'


def write(
  stored: model_on_disk.StoredModel,
  *,
  native: bool,
  dtype: str,
  notes: Sequence[str],
  tokenizers: Collection[str],
  languages: Sequence[str],
  evaluation: str | None,
) -> str:
  """Returns the model card of an exported model.

  Args:
    stored: the exported checkpoint or folder.
    native: whether it is written in the native layout.
    dtype: dtypes of the exported tensors.
    notes: notes printed by the command.
    tokenizers: names of the exported tokenizer files.
    languages: codes such as 'en'; by default those of the base models.
    evaluation: output folder of `evaluate` with results for the metadata; None
      for no results.

  Raises:
    UserError: a file of the run is damaged, or the evaluation has no results
      for this model.
  """
  model = stored.model
  has_class = not (native and torch_export.problem(model))
  generates = has_class and tokenizers and _task(model) == _GENERATION
  library = 'transformers' if has_class else 'encdec_adapt'
  if model.decoder.head.sizes(model.decoder.width):
    library = 'sentence-transformers'
  framing, subfolder = stored.framing, model_on_disk.DECODER_TOKENIZER
  prompt = repr(''.join(framing.prefixes[:1]) + _PROMPT)
  if native:
    prompt = f'model.config.prompt({_PROMPT!r})'
  if framing.chats:
    prompt = repr(_PROMPT)
  is_separate = any(x.startswith(f'{subfolder}/') for x in tokenizers)
  card = huggingface_hub.ModelCard.from_template(
    _metadata(stored, library, languages, evaluation),
    template_path=_TEMPLATE,
    name=model_on_disk.title(stored.name),
    count=f'{parameters.count(model):,}',
    kind=_kind(model.decoder.head.kind, model.architecture.name),
    dtype=dtype,
    # A single stack is a field 'decoder', also of an encoder-only model.
    stacks={stored.framing_side: model.decoder}
    if len(model.stacks) == 1
    else model.stacks,
    sizes=_SIZES,
    history='\n'.join(_history(stored.name, stored.path, stored.step)),
    notes=notes,
    has_sample=generates,
    native=native,
    model_class=(
      'AutoModelForSeq2SeqLM'
      if native
      else inspection.transformers_class(stored)
    ),
    folder='folder' + (', trust_remote_code=True' if native else ''),
    subfolder=subfolder if is_separate else '',
    prompt=prompt,
    chats=framing.chats,
    separator=framing.separator and repr(framing.separator),
  )
  return f'{card}\n'


def _task(model: model_config.ModelConfig) -> str:
  """Returns the model's task on the Hub."""
  if model.architecture.generates:
    return _GENERATION
  return _TASKS.get(model.decoder.head.kind, 'text-classification')


def _kind(head: str, architecture: str) -> str:
  return architecture if head == 'tokens' else f'{head} model, {architecture}'


def _metadata(
  stored: model_on_disk.StoredModel,
  library: str,
  languages: Sequence[str],
  evaluation: str | None,
) -> huggingface_hub.ModelCardData:
  config, summary = (
    _read(stored.path / file) if stored.checkpoint else {}
    for file in (config_lib.RUN_CONFIG, compute_cost.SUMMARY)
  )
  terms: dict[str, str] = {}
  bases = pretrained_files.base_models(stored.path)
  # A named license has the type 'other'.
  licenses = [x.get('license_name', x.get('license')) for x in bases]
  if len(set(licenses)) == 1:
    terms = {k: v for k, v in bases[0].items() if k.startswith('license')}
  elif licenses:
    names = [
      f'{license or "unknown"} ({base["name"]})'
      for license, base in zip(licenses, bases, strict=True)
    ]
    terms = {'license': 'other', 'license_name': ' and '.join(names)}
  stated = [x for base in bases for x in base.get('languages', ())]
  source = config.get('data', {}).get('source', '')
  scores = _evaluation(stored, evaluation) if evaluation else {}
  # Of the last step; JSON and the Hub do not support non-finite numbers.
  last = {x: y for x, (_, y) in _held_out(summary).items() if math.isfinite(y)}
  if last and summary['steps'] == stored.step:
    scores = {f'held-out {_sources(source)}': last, **scores}
  model = stored.model
  kind = _task(model)
  results = [
    huggingface_hub.EvalResult(kind, task, task, metric, value)
    for task, metrics in scores.items()
    for metric, value in metrics.items()
  ]
  return huggingface_hub.ModelCardData(
    library_name=library,
    tags=['encdec_adapt'],
    **terms,
    language=[*dict.fromkeys(languages or stated)] or None,
    base_model=[base['name'] for base in bases if base['on_hub']] or None,
    datasets=_DATASET.findall(source) or None,
    model_name=model_on_disk.title(stored.name) if results else None,
    eval_results=results or None,
  )


def _held_out(summary: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
  """Returns the held-out metrics at step 0 and at the last step."""
  ends = {x: f'{x}_at_step_0' for x in summary if x.startswith('eval_')}
  return {
    last.removeprefix('eval_'): (summary[first], summary[last])
    for last, first in ends.items()
    if first in summary
  }


def _evaluation(
  stored: model_on_disk.StoredModel, folder: str
) -> dict[str, dict[str, float]]:
  """Returns the results of a model: task -> metric -> value."""
  file = paths_lib.at(folder) / 'results.jsonl'
  records = text_lines.read_json(str(file)) if file.exists() else {}
  scores: dict[str, dict[str, float]] = {}
  for record in records.values():
    # Later lines replace earlier lines; non-finite values are null.
    is_ours = record['fingerprint'] == stored.fingerprint
    if is_ours and record['value'] is not None:
      task = scores.setdefault(record['task'], {})
      task[record['metric']] = record['value']
  if not scores:
    raise errors.UserError(
      f'--evaluation={folder} has no results of {stored.name} as it is now; run'
      f' `evaluate --checkpoint={stored.name} --output={folder}`.'
    )
  return scores


def _sources(source: str) -> str:
  """Returns `config.data.source` without the locations of local files."""
  return _LOCATION.sub(lambda match: match[1] or '', source)


def _history(
  name: str,
  path: paths_lib.Path,
  step: int | None,
  descendants: Sequence[paths_lib.Path] = (),
) -> Iterator[str]:
  """Yields the history of a run and its ancestors, newest first.

  `step` is None for a folder; `descendants` are absolute paths of runs.
  """
  lineage = (*descendants, paths_lib.absolute(path))
  if step is None:
    yield f'- A copy of {_names([name])}.'
    return
  summary = _read(path / compute_cost.SUMMARY)
  coverage = _read(path / work_directory.COVERAGE)
  # Only `convert` writes 'made_by'. A killed run has no summary, but always a
  # configuration.
  if made_by := summary.get('made_by'):
    sources = made_by['sources']
    weights = ', '.join(f'{weight:g}' for weight in made_by.get('weights', ()))
    start = made_by.get('start')
    yield (
      f'- Made by `encdec_adapt.convert {made_by["command"]}` of'
      f' {_names([x for x in sources if x != start])}'
      + (f', weighted {weights}' if weights else '')
      + (f', as differences from {_names([start])}' if start else '')
      + '.'
    )
  else:
    config = saved_keys.translate(_read(path / config_lib.RUN_CONFIG))
    init = config['init']
    sources = [path for path in (init['encoder'], init['decoder']) if path]
    yield from _training(path, config, summary, step, sources)
  # Only counts: the file lists every parameter.
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
    if hub.is_address(name):  # No history is downloaded.
      continue
    source, source_step = model_on_disk.resolve(name)
    # A descendant has overwritten its ancestor.
    if paths_lib.absolute(source) in lineage:
      continue
    # Only finished runs that still exist.
    if source_summary := _read(source / compute_cost.SUMMARY):
      yield f'- {_names([name])}:'
      if source_step is None:
        source_step = source_summary['steps']
      for line in _history(name, source, source_step, lineage):
        yield f'  {line}'  # Indented as a nested Markdown list.


def _names(paths: Iterable[str]) -> str:
  """Returns names without locations, as a card may become public."""
  return ' and '.join(f'`{model_on_disk.title(path)}`' for path in paths)


def _batch_sizes(path: paths_lib.Path, batch_size: int, end: int) -> str:
  """Returns the rows of a step, by range of steps if a resume changed them."""
  sizes = {0: batch_size}
  for start, _ in append_log.Log(path / timing.STARTS).lines:
    sizes = {step: n for step, n in sizes.items() if step < start['step']}
    sizes[start['step']] = start.get('batch_size', batch_size)
  used = {step: n for step, n in sizes.items() if step < max(end, 1)}
  groups = itertools.groupby(used.items(), lambda item: item[1])
  (_, first), *others = [(next(group)[0], n) for n, group in groups]
  texts = [f'{n} from step {step + 1}' for step, n in others]
  return ', '.join([f'{first} rows a step', *texts])


def _training(
  path: paths_lib.Path,
  config: dict[str, Any],
  summary: dict[str, Any],
  step: int,
  sources: Iterable[str],
) -> Iterator[str]:
  init, data = config['init'], config['data']
  if init['mode'] != 'random':
    yield f'- Started by `{init["mode"]}` from {_names(sources)}.'
  # 0 if the length of the records decided: then only the step is known.
  steps = config['train']['steps']
  yield (
    f'- Trained to step {step}{f" of {steps}" if steps else ""}, with'
    f' {_batch_sizes(path, config["train"]["batch_size"], step)}, objective'
    f' `{data["objective"]}`, {data["encoder_length"]} +'
    f' {data["decoder_length"]} tokens a row, {config["optimizer"]["kind"]} at'
    f' a peak rate of {config["optimizer"]["learning_rate"]:g}.'
  )
  yield f'- Data: `{_sources(data["source"]) or "records"}`.'
  # Non-default keys of the loss, and its frozen model.
  default = environment.flat(config_lib.defaults().loss.to_dict())
  kind = config['loss']['kind']
  changes = [] if kind == default['kind'] else [kind]
  for key, value in environment.flat(config['loss']).items():
    # The chunk affects only memory.
    if key not in ('kind', 'chunk') and value != default.get(key):
      name = key.removeprefix(f'{kind}.')
      changes.append(
        f'{name} {value:g}' if isinstance(value, float) else f'{name} {value}'
      )
  line = f'- Loss: {", ".join(changes) or "cross-entropy to the data"}'
  if teacher := config['teacher']['checkpoint']:
    line += f', which reads {_names([teacher])}'
  yield f'{line}.'
  if summary:
    # Not parsed: a later version may have removed an ancestor's objective.
    names = {'preferences': 'preference', 'embed': 'query'}
    units = [unit for x, unit in names.items() if x in data['objective']]
    texts, text_of = [], held_out_metrics.format_value
    for name, (first, last) in _held_out(summary).items():
      ends = f'{text_of(name, first)} at step 0, {text_of(name, last)} at step'
      text = f'{name} {ends} {summary["steps"]}'
      if name == 'loss':
        text += f' (nats per {(*units, "target token")[0]})'
      texts.append(text)
    if texts:
      yield f'- Held-out {"; ".join(texts)}.'
    yield (
      f'- Trained on {summary["target_tokens"]:,.0f} target tokens of'
      f' {summary["total_tokens"]:,.0f} tokens, {summary["flops"]:.3g} model'
      ' FLOPs; with all that it was made from'
      f' {summary["inclusive"]["target_tokens"]:,.0f} target tokens.'
    )


def _read(path: paths_lib.Path) -> dict[str, Any]:
  return atomic.read_json(path) if path.exists() else {}
