"""Jobs inherit the prompt framing of their source model.

An explicit prefix or separator of an objective takes precedence. Inherited
options are added to `config.data.objective`, and so to records, the saved
configuration and exports. Only the source's configuration is read.
"""

import ml_collections

from encdec_adapt import config as config_lib
from encdec_adapt.base import errors
from encdec_adapt.cluster import distributed
from encdec_adapt.files import atomic, hub, paths
from encdec_adapt.huggingface import tensor_folder
from encdec_adapt.models import architecture as architectures
from encdec_adapt.objectives import example_maker, objective_names
from encdec_adapt.stored import model_on_disk, prompt_framing


def inherit(
  config: ml_collections.ConfigDict, workdir: str
) -> ml_collections.ConfigDict:
  """Returns a configuration with the prompt framing of its source.

  Prints inherited options and differences between objective and source. Does
  nothing if the source does not exist yet. Must be called by all processes.

  Args:
    config: the configuration.
    workdir: work directory of the job.

  Raises:
    UserError: a text objective states no prefix, and the source was trained on
      conversations or has several prefixes; or the source's configuration is
      damaged.
  """
  source = config.init.encoder
  if config.init.mode == 'random' or not source:
    return config
  config = config.copy_and_resolve_references()
  config.data.objective = distributed.from_lead(
    lambda: _inherited(config.data.objective, source, workdir),
    'framing of prompts',
  )
  return config


def _inherited(text: str, source: str, workdir: str) -> str:
  objectives = objective_names.parse(text)
  file = paths.at(workdir) / config_lib.RUN_CONFIG
  saved = atomic.read_json(file) if workdir and file.exists() else {}
  if saved.get('init', {}).get('encoder') == source:
    # A resumed job: its source may no longer exist.
    framings = [
      prompt_framing.of_objectives([objective], architectures.CAUSAL_DECODER)
      for objective in objective_names.parse(saved['data']['objective'])
    ]
  else:
    framings = [_framing(source)] * len(objectives)
  if len(framings) != len(objectives):
    return text
  pairs = zip(objectives, framings, strict=True)
  return ' | '.join(_inheriting(x, framing, source) for x, framing in pairs)


def _framing(source: str) -> prompt_framing.PromptFraming:
  if hub.is_address(source):  # Without weights.
    path = hub.fetch(source, [tensor_folder.CONFIG])
  else:
    path, _ = model_on_disk.resolve(source)
  file = path / tensor_folder.CONFIG
  if not file.exists() or model_on_disk.is_folder(path):
    return prompt_framing.in_file(file)
  run = config_lib.load_run(str(path))
  return prompt_framing.of_objectives(
    run.data.objectives, run.model.architecture
  )


def _inheriting(
  objective: example_maker.Objective,
  framing: prompt_framing.PromptFraming,
  source: str,
) -> str:
  """Returns an objective with inherited options, and prints them.

  Raises:
    UserError: see `inherit`.
  """
  options, accepted = objective.options, objective.maker.options
  only_chats = framing.chats and not framing.prefixes
  if 'prefix' in accepted.keys() - options.keys() and (
    only_chats or len(framing.prefixes) > 1
  ):
    stated = prompt_framing.with_options(objective.text, {'prefix': ''})
    raise errors.UserError(
      f'config.data.objective is {objective.text!r}, which states no prefix,'
      f' and {source} was trained on {framing.describe()}; state the prefix, as'
      f' in {stated!r}, or use chat or chat_preferences.'
    )
  inherited = {}
  for name, texts in (
    ('prefix', framing.prefixes),
    ('separator', (framing.separator,)),
  ):
    if name in accepted.keys() - options.keys() and any(texts):
      inherited[name] = texts[0]
      print(f'objective {objective}: {name} {texts[0]!r} as in {source}')
    elif (
      framing
      and (any(texts) or name in options)
      and options.get(name, '') not in texts
    ):
      # Set by the objective, or a conversation (no prefix).
      print(
        f'objective {objective}: {name} {options.get(name, "")!r}, where'
        f' {source} was trained on {framing.describe()}'
      )
  return prompt_framing.with_options(objective.text, inherited)
