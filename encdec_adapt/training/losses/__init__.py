"""Losses: one module each, discovered automatically.

A loss is a frozen dataclass, a subclass of `loss.Loss`. Its keys (`keys.key`)
are keys of `config.loss`; several losses may share a key by inheritance. To add
a loss, write a module here with its class, and nothing else in the package:

- `forms` has the names of `config.loss.kind` that choose it, or `is_chosen`
  says by which other keys, or for which models, a job has it;
- `shape` changes the model of the configuration if it needs another head;
- `check` refuses models and objectives that it does not suit;
- `references` names the frozen models that it reads. `config.teacher` has their
  path, which with `starts_from_reference` may be that of the job's source;
  `accepts` has their possible architectures, and `assumed_reference` the shape
  that a plan counts while no path is given;
- `frame` changes a batch of the objective on the host, if it has to;
- `predict` computes the states of a model, by default as its architecture
  reads the batch; the answers of a group, [P, G, T], are rows, [P * G, T, D];
- `weight` is the divisor: by default the weights of the targets, and the number
  of examples where the loss compares the rows of an example;
- `terms` computes sums over the batch, `loss` with the gradient among them,
  and `metrics` marks those that are divided by the weight; a loss with a term
  of another divisor overrides `divisors` and `objective`;
- a loss that compares the rows of a batch with each other (`joins_rows`)
  divides it into microbatches itself, its `parts`;
- a loss of completions that the model samples says so (`samples`), whether it
  needs their rewards (`reads_rewards`), and which rows it reads (`row_shape`,
  `pad_batch`, `axes`);
- `row_ratios` computes the metrics `held_out` of held-out rows, for which it
  may need `held_out_references`. A run records `curves`, and `keep_best` and
  `patience` follow the metric that it `selects`.

Terms are sums so that microbatches, hosts and rows of unequal weight add up to
a large batch: the step divides them by the weight of the whole batch.

Losses import `models`, `objectives` and `ops`, and no step, phase or optimizer.
"""

from collections.abc import Mapping
import itertools
import sys
from typing import Any

from encdec_adapt.base import discovery, errors, keys, option_strings
from encdec_adapt.models import model_config
from encdec_adapt.training.losses import cross_entropy, loss

CLASSES: tuple[type[loss.Loss], ...] = tuple(
  value
  for module in discovery.modules_of(sys.modules[__name__])
  for value in vars(module).values()
  if isinstance(value, type)
  and issubclass(value, loss.Loss)
  and hasattr(value, 'name')  # Bases have none.
  # A loss that extends another imports its module, not the class.
  and value.__module__ == module.__name__
)


def from_section(
  values: Mapping[str, Any], model: model_config.ModelConfig
) -> loss.Loss:
  """Makes the loss that `config.loss` describes; cross-entropy by default.

  Args:
    values: value of every key of the section.
    model: the model that is trained.

  Raises:
    UserError: a value is out of bounds, or several losses are chosen.
  """
  # All are made, so that a value out of bounds is refused in any of them.
  candidates = [keys.make(section, values) for section in CLASSES]
  chosen = [entry for entry in candidates if entry.is_chosen(model)]
  if len(chosen) > 1:
    raise errors.UserError(
      'config.loss and config.data.objective choose several losses,'
      f' {" and ".join(entry.name for entry in chosen)}; a job has one loss.'
    )
  if values['kind']:
    _check_kind(candidates[0])
    _check_unread(values, type(chosen[0]))
  return (*chosen, keys.make(cross_entropy.CrossEntropy, values))[0]


def _check_kind(candidate: loss.Loss) -> None:
  names = [*itertools.chain(*(x.forms for x in CLASSES))]
  name = candidate.kind_name
  if name not in names:
    part = option_strings.Part(loss.KIND, candidate.kind, 0, len(name))
    hint = errors.nearest(name, names)
    raise part.error(f'must be one of {", ".join(names)}{hint}')


def _check_unread(values: Mapping[str, Any], section: type[loss.Loss]) -> None:
  """Refuses keys that the loss of `kind` does not read.

  Raises:
    UserError: such a key differs from its default.
  """
  for other in CLASSES:
    for name, default in keys.defaults(other).items():
      if name not in keys.defaults(section) and values[name] != default:
        raise errors.UserError(
          f'config.loss.{name} is {values[name]!r}, which the loss'
          f' {values["kind"]!r} (config.loss.kind) does not read; set it to'
          f' {default!r}.'
        )
