"""Which parameters move when: groups of parameters that thaw at a step.

Unbalanced pairs warm their fresh cross-attention up alone for K steps
(Encoder-Decoder Gemma: K = 1000; 0 for balanced pairs). A frozen group has
no optimizer state and no gradients; when it thaws it starts with a fresh
optimizer, count and learning-rate warm-up of its own. Thawing against a
shared count would multiply its first updates.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import re

from encdec_adapt.cli import errors
from encdec_adapt.models import block

_CROSS = rf'.*/({"|".join(block.CROSS)})/.*'


@dataclasses.dataclass(frozen=True)
class Group:
  """Parameters that start to move at one step.

  Attributes:
    name: key of the group's optimizer state.
    pattern: regular expression that a whole parameter path matches.
    start: step of the first update.
  """

  name: str
  pattern: str
  start: int


def cross_attention_warmup(steps: int) -> tuple[Group, ...]:
  """Only cross-attention and its norms move for the first `steps` steps."""
  if steps < 0:
    raise errors.UserError(
      f'config.train.cross_attention_warmup is {steps}; it must be at least 0.'
    )
  if steps == 0:
    return (Group('all', '.*', 0),)
  return (Group('cross_attention', _CROSS, 0), Group('rest', '.*', steps))


def assign(paths: Iterable[str], groups: Sequence[Group]) -> dict[str, str]:
  """Group name of every parameter path; the first match wins.

  Raises:
    UserError: a group matches no parameter.
  """
  assignment = {}
  for path in paths:
    for group in groups:
      if re.fullmatch(group.pattern, path):
        assignment[path] = group.name
        break
  for group in groups:
    if group.name not in assignment.values():
      raise errors.UserError(
        f'parameter group {group.name!r} matches no parameter of this model;'
        ' config.train.cross_attention_warmup is for encoder-decoders whose'
        ' cross-attention has weights of its own; set it to 0.'
      )
  return assignment


def active(groups: Sequence[Group], step: int) -> tuple[str, ...]:
  """Names of the groups that move at `step`."""
  return tuple(group.name for group in groups if group.start <= step)


def paths_of(assignment: Mapping[str, str], group: str) -> list[str]:
  """Sorted paths of one group."""
  return sorted(path for path, name in assignment.items() if name == group)
