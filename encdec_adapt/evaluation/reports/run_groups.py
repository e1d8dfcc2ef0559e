"""Groups the runs of a study into models by the names of the runs.

Repetitions with another seed are named `<model>_seed<n>`. Of the package only
`models` is imported.
"""

from collections.abc import Mapping
import re
from typing import Any

from encdec_adapt.models import architecture

Runs = Mapping[str, Mapping[str, Any]]

_SEED = re.compile(r'(.+)_seed\d+')


def model_of(name: str) -> str:
  """Returns the name of the model that a run repeats."""
  match = _SEED.fullmatch(name)
  return match[1] if match else name


def seeds(runs: Runs, model: str) -> list[str]:
  """Returns the runs of a model, the plain name first."""
  # The plain name is a prefix of the others, so it sorts before them.
  return sorted(name for name in runs if model_of(name) == model)


def seed_names(runs: Runs, model: str) -> list[str]:
  """Returns the suffixes of the names in `seeds`: '', '_seed1'."""
  return [name.removeprefix(model) for name in seeds(runs, model)]


def models(runs: Runs) -> list[str]:
  """Returns the models in the order of their first run."""
  return list(dict.fromkeys(map(model_of, runs)))


def has_encoder(run: Mapping[str, Any]) -> bool:
  """Returns whether the model of a run is an encoder-decoder."""
  return architecture.BY_NAME[run['kind']].encodes_prompt
