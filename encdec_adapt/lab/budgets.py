"""Training budgets in tokens or FLOPs, and models matched in size or cost.

FLOPs are counted by `models.forward_flops`. A budget becomes a number of steps
with a cost within 1 % of the budget. `match` finds the feed-forward width at
which a model has as many parameters, or costs as many FLOPs, as another.
"""

from collections.abc import Callable, Iterable
import dataclasses
import math
from typing import Literal

from encdec_adapt import config as config_lib
from encdec_adapt.base import errors
from encdec_adapt.models import forward_flops, model_config, parameters
from encdec_adapt.objectives import framing
from encdec_adapt.training import setup

TOLERANCE = 0.01  # Largest relative error of a budget or a match.
# Objectives that fill rows with target tokens until a document ends.
FULL_ROWS = 'causal_lm', 'full_lm', 'prefix_lm'

Model = model_config.ModelConfig
Count = Callable[[Model], int]


@dataclasses.dataclass(frozen=True)
class Step:
  """Cost of a training step, on all devices.

  Attributes:
    tokens: target tokens of full rows.
    flops: FLOPs of the model, its teacher's forward passes, and sampling.
  """

  tokens: float
  flops: float

  @classmethod
  def of(
    cls,
    settings: config_lib.Settings,
    references: Iterable[Model] = (),
  ) -> 'Step':
    """Returns the cost of a step of a configuration.

    Args:
      settings: the configuration.
      references: shapes of the loss's frozen models.
    """
    rows, batch_size = settings.recipe.rows, settings.train.batch_size
    flops = setup.job_flops(
      settings.recipe,
      batch_size,
      references,
      settings.adapters is not None,
    )
    lengths = rows.lengths
    row_tokens = rows.answers * (lengths.decoder or lengths.encoder)
    return cls(batch_size * row_tokens, flops)


@dataclasses.dataclass(frozen=True)
class Tokens:
  """A budget of target tokens, for an objective with full rows.

  Attributes:
    count: target tokens of all steps.
  """

  count: float

  def steps(self, step: Step, sources: float = 0.0) -> int:
    """Returns the number of steps.

    Args:
      step: tokens and FLOPs of a step.
      sources: FLOPs of the sources; ignored by a budget of tokens.

    Raises:
      UserError: the budget is below a step, or no whole number of steps spends
        it within 1 %.
    """
    del sources
    return _steps(f'{self.count:,.0f} target tokens', self.count, step.tokens)

  def check(self, settings: config_lib.Settings) -> None:
    """Rejects objectives with partly empty rows.

    Raises:
      UserError: names the objective and the remedy.
    """
    for objective in settings.data.objectives:
      if objective.text.partition(':')[0] not in FULL_ROWS:
        raise errors.UserError(
          f'a budget of {self.count:,.0f} target tokens needs the full rows of'
          f' {", ".join(FULL_ROWS)}, and those of {objective.text} have fewer'
          ' targets; give a number of steps.'
        )


@dataclasses.dataclass(frozen=True)
class FLOPs:
  """A budget of training FLOPs, teachers' forward passes included.

  Attributes:
    count: FLOPs of all steps.
    sources: whether the budget includes the cost of the initial models and
      teachers.
  """

  count: float
  sources: bool = False

  def steps(self, step: Step, sources: float = 0.0) -> int:
    """Returns the number of steps.

    Args:
      step: tokens and FLOPs of a step.
      sources: FLOPs of all sources and teachers and their sources, each once.

    Raises:
      UserError: the budget, less the sources if it includes them, is below a
        step, or no whole number of steps spends it within 1 %.
    """
    text, spent = f'{self.count:.4g} FLOPs', sources * self.sources
    if self.sources:
      text += f', of which the sources have cost {spent:.4g},'
    return _steps(text, self.count - spent, step.flops)


def _steps(text: str, available: float, step: float) -> int:
  exact = available / step
  steps = round(exact)
  if exact < 1 or abs(steps - exact) > TOLERANCE * exact:
    raise errors.UserError(
      f'a budget of {text} is {exact:.4g} steps of {step:.4g}; it must be at'
      f' least a step, and within {TOLERANCE:.0%} of a whole number of steps.'
      ' Raise it, or choose a smaller config.train.batch_size.'
    )
  return steps


def match(
  model: Model,
  like: Model,
  by: Literal['parameters', 'flops', 'published'],
  lengths: framing.Lengths | None = None,
  *,
  multiple: int = 8,
  layers: bool = False,
) -> Model:
  """Returns a model with its feed-forward width matched to another model.

  Args:
    model: the model; its width F is replaced. Different widths of its stacks
      keep their ratio.
    like: the model to match.
    by: 'parameters', with tables; 'flops', training FLOPs of a row with the
      loss on its targets; or 'published', inference FLOPs of a row as counted
      in the T5Gemma paper (`forward_flops.published`).
    lengths: tokens of a row, for FLOPs.
    multiple: F is a multiple of this number.
    layers: whether to first replace the numbers of layers with the best match
      at the model's F, in the ratio of its stacks.

  Raises:
    UserError: no F matches within 1 %; names the nearest.
  """

  def count(config: Model) -> int:
    if by == 'parameters':
      return parameters.count(config)
    sizes = lengths.encoder, lengths.decoder
    if by == 'published':
      return forward_flops.published(config, *sizes)
    return forward_flops.forward(config, *sizes, lengths.teacher)

  target = count(like)
  if layers:
    depth = model.decoder.layers
    below = max(1, math.floor(depth * _factor(model, 'layers', count, target)))
    candidates = [
      _scaled(model, 'layers', number / depth) for number in (below, below + 1)
    ]
    model = min(candidates, key=lambda x: abs(math.log(count(x) / target)))
  factor = _factor(model, 'mlp_width', count, target)
  matched = _scaled(model, 'mlp_width', factor, multiple)
  error = count(matched) / target - 1
  if abs(error) > TOLERANCE:
    shape = ', '.join(
      f'{name} {stack.layers} layers of F = {stack.mlp_width}'
      for name, stack in matched.stacks.items()
    )
    raise errors.UserError(
      f'no F that is a multiple of {multiple} has equal {by} within'
      f' {TOLERANCE:.0%}: the nearest, {shape}, has {count(matched):,} in place'
      f' of {target:,} ({error:+.1%}). Choose another number of layers, or a'
      ' smaller multiple.'
    )
  return matched


def _factor(model: Model, field: str, count: Count, target: int) -> float:
  """Returns the factor of a field of all stacks at which a count is met."""
  # Counts are linear in the width, and nearly so in the number of layers, where
  # the share of local layers may change.
  base = count(model)
  slope = count(_scaled(model, field, 2)) - base
  return 1 + (target - base) / slope if slope else 1.0


def _scaled(
  model: Model, field: str, factor: float, multiple: int = 1
) -> Model:
  stacks = {}
  for name, stack in model.stacks.items():
    size = round(factor * getattr(stack, field) / multiple)
    changes = {field: multiple * max(1, size)}
    stacks[name] = dataclasses.replace(stack, **changes)
  return dataclasses.replace(model, **stacks)
