"""Jobs frame prompts as the model that they start from did.

An objective that states its own prefix, separator or prompts of embeddings
keeps them. What a job inherits becomes part of `config.data.objective`, so that
its records, saved configuration and exports state it. Only the source's
configuration is read here.
"""

from collections.abc import Mapping

import ml_collections

from encdec_adapt import config as config_lib
from encdec_adapt.base import errors
from encdec_adapt.cluster import distributed
from encdec_adapt.conversion import model_on_disk, prompt_framing
from encdec_adapt.files import atomic, hub, paths
from encdec_adapt.huggingface import embedding_files, tensor_folder
from encdec_adapt.objectives import example_maker, objective_names


def inherit(
  config: ml_collections.ConfigDict, workdir: str
) -> ml_collections.ConfigDict:
  """Returns a configuration that frames prompts as its source does.

  Prints what is inherited, and where the objective states another framing. A
  job that is resumed inherits its own framing, since its source may be gone. A
  source that does not exist yet has nothing to inherit. All processes call it
  together.

  Args:
    config: the configuration.
    workdir: work directory of the job.

  Raises:
    UserError: the objective reads texts and the source was trained on
      conversations, or the source has several prefixes, and the objective
      states no prefix; or the source's configuration is damaged.
  """
  source = config.init.encoder
  if config.init.mode == 'random' or not source:
    return config
  stated = distributed.from_lead(
    lambda: _framing(_origin(source, workdir)), 'framing of prompts'
  )
  config = config.copy_and_resolve_references()
  if stated is not None:
    config.data.objective = ' | '.join(
      _inheriting(objective, *stated, source)
      for objective in objective_names.parse(config.data.objective)
    )
  return config


def _origin(source: str, workdir: str) -> str:
  """Returns the resumed job, or else its source."""
  file = paths.at(workdir) / config_lib.RUN_CONFIG
  saved = atomic.read_json(file) if workdir and file.exists() else {}
  is_same = saved.get('init', {}).get('encoder') == source
  return workdir if is_same else source


def _framing(
  name: str,
) -> tuple[prompt_framing.PromptFraming, Mapping[str, str]] | None:
  """Reads the framing and the prompts of embeddings; None without a model."""
  if hub.is_address(name):  # Without the weights.
    path = hub.fetch(name, (tensor_folder.CONFIG, embedding_files.PROMPTS))
  else:
    path, _ = model_on_disk.resolve(name)
  if not (path / tensor_folder.CONFIG).exists():
    return None
  if model_on_disk.is_folder(path):
    framing = prompt_framing.in_file(path / tensor_folder.CONFIG)
    return framing, model_on_disk.embedding_prompts(path, ())
  run = config_lib.load_run(str(path))
  framing = prompt_framing.of_objectives(
    run.data.objectives, encodes_prompt=run.model.architecture.encodes_prompt
  )
  return framing, model_on_disk.embedding_prompts(path, run.data.objectives)


def _inheriting(
  objective: example_maker.Objective,
  framing: prompt_framing.PromptFraming,
  prompts: Mapping[str, str],
  source: str,
) -> str:
  """Returns the text of an objective with what it inherits, and prints that.

  Args:
    objective: an objective of the job.
    framing: framing of the source's prompts.
    prompts: the source's prompts of embeddings, by role.
    source: name of the source.

  Raises:
    UserError: see `inherit`.
  """
  log = print if distributed.is_lead() else lambda *_: None
  options, accepted, inherited = objective.options, objective.maker.options, {}
  texts = {'prefix': framing.prefixes or ('',)}
  texts |= {'separator': (framing.separator,)}
  texts |= {role: (text,) for role, text in prompts.items()}
  is_unstated = 'prefix' in accepted and 'prefix' not in options
  only_chats = framing.chats and not framing.prefixes
  if is_unstated and (only_chats or len(framing.prefixes) > 1):
    forms = [
      prompt_framing.with_options(objective.text, {'prefix': prefix})
      for prefix in texts['prefix']
    ]
    raise errors.UserError(
      f'config.data.objective is {objective.text!r}, which states no prefix,'
      f' and {source} was trained on {framing.describe()}; state the prefix, as'
      f' in {" or ".join(map(repr, forms))}, or use chat or chat_preferences.'
    )
  for name, values in texts.items():
    value, choices = options.get(name, ''), ' or '.join(map(repr, values))
    if name in accepted.keys() - options.keys():
      if any(values):
        inherited[name] = values[0]
        log(f'objective {objective}: {name} {choices} as in {source}')
    # Conversations have no prefix.
    elif name in accepted or (name == 'prefix' and objective.ends_turns):
      if value not in values:
        log(f'objective {objective}: {name} {value!r}; {source} has {choices}')
  return prompt_framing.with_options(objective.text, inherited)
