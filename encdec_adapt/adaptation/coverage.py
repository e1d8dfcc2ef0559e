"""What became of every weight of an adaptation.

Every leaf of the new model says how it was filled; every leaf of every
source says where it went, or why it is unused. Leaves are named by layer
(`adaptation.leaves`).
"""

from collections.abc import Iterable, Mapping
import dataclasses
import math
from typing import Any, Literal

from encdec_adapt.adaptation import steps as steps_lib
from encdec_adapt.models import layer_leaves

Shapes = Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Fill:
  """How one leaf of the new model was filled.

  Attributes:
    how: 'copied' from a source, drawn 'fresh' as the model's own
      initialisation draws it, or set to the constant `value`.
    source: name of the source, if copied.
    leaf: leaf of the source, if copied.
    value: the constant, if constant.
    steps: what is done to a copy.
    note: what else is worth saying.
  """

  how: Literal['copied', 'fresh', 'constant']
  source: str | None = None
  leaf: str | None = None
  value: float | None = None
  steps: tuple[steps_lib.Step, ...] = ()
  note: str = ''

  def describe(self) -> str:
    """One phrase, as in 'copied from encoder_source decoder/...'."""
    text = {
      'copied': f'copied from {self.source} {self.leaf}',
      'fresh': 'fresh',
      'constant': f'constant {self.value}',
    }[self.how]
    notes = [self.note] if self.note else []
    notes += [step.describe() for step in self.steps]
    return f'{text} ({"; ".join(notes)})' if notes else text

  def to_json(self) -> dict[str, Any]:
    """The same as JSON types."""
    steps = [step.describe() for step in self.steps]
    return {**dataclasses.asdict(self), 'steps': steps}


@dataclasses.dataclass(frozen=True)
class Coverage:
  """The account of an adaptation.

  Attributes:
    target: shapes of the new model's leaves.
    filled: how each of them was filled.
    sources: shapes of each source's leaves, by name of the source.
    unused: by name of the source, leaf to the reason why it is not used.
    changes: settings in which the new model differs from its sources though
      its weights are theirs, such as a bidirectional encoder.
    padding: parameters of a leaf that no token has (`parameters.padding`);
      they are not counted.
    outside: by name of the source, tensors beside it that are no part of the
      model, such as a vision tower -> why.
  """

  target: Shapes
  filled: Mapping[str, Fill]
  sources: Mapping[str, Shapes]
  unused: Mapping[str, Mapping[str, str]]
  changes: tuple[str, ...] = ()
  padding: Mapping[str, int] = dataclasses.field(default_factory=dict)
  outside: Mapping[str, Mapping[str, str]] = dataclasses.field(
    default_factory=dict
  )

  def used(self, source: str) -> dict[str, list[str]]:
    """Leaf of `source` to the leaves of the new model that it filled."""
    used = {}
    for leaf, fill in self.filled.items():
      if fill.source == source:
        used.setdefault(fill.leaf, []).append(leaf)
    return used

  def parameters(self) -> dict[str, int]:
    """Numbers of parameters by how they were filled."""
    counts = {'copied': 0, 'fresh': 0, 'constant': 0}
    for leaf, fill in self.filled.items():
      size = math.prod(self.target[leaf]) - self.padding.get(leaf, 0)
      counts[fill.how] += size
    return counts

  def check(self) -> None:
    """Raises unless every leaf on both sides is accounted for.

    Raises:
      ValueError: an unfilled target leaf, a fill of no target leaf or from no
        source leaf, or a source leaf that is not exactly one of used and
        named unused.
    """
    _refuse('target leaves not filled', set(self.target) - set(self.filled))
    _refuse('fills of no target leaf', set(self.filled) - set(self.target))
    unknown = set(self.unused) - set(self.sources)
    _refuse('unused leaves of unknown sources', unknown)
    for source, shapes in self.sources.items():
      used = set(self.used(source))
      unused = set(self.unused.get(source, {}))
      _refuse(f'fills from no leaf of {source}', used - set(shapes))
      _refuse(f'unused leaves not in {source}', unused - set(shapes))
      _refuse(f'leaves of {source} both used and unused', used & unused)
      lost = set(shapes) - used - unused
      _refuse(f'leaves of {source} neither used nor named unused', lost)
    copied = {f.source for f in self.filled.values() if f.how == 'copied'}
    _refuse('copies from unknown sources', copied - set(self.sources))

  def table(self) -> str:
    """The account as text, layers with the same fate on one line."""
    counts = self.parameters()
    total = sum(counts.values())
    lines = [
      f'adaptation: {total:,} parameters, of which '
      + ', '.join(f'{count:,} {how}' for how, count in counts.items())
    ]
    rows = [
      (leaf, self.target[leaf], fill.describe())
      for leaf, fill in self.filled.items()
    ]
    lines += _columns(('target', 'shape', 'filled'), _by_layers(rows))
    for source in self.sources:
      used = len(self.used(source))
      unused = self.unused.get(source, {})
      lines.append(f'{source}: {used} leaves used, {len(unused)} unused')
      rows = [
        (leaf, self.sources[source][leaf], reason)
        for leaf, reason in unused.items()
      ]
      if rows:
        lines += _columns(('unused', 'shape', 'reason'), _by_layers(rows))
      lines += [
        f'  not part of the model: {line}'
        for line in by_reason(self.outside.get(source, {}))
      ]
    lines += [f'differs from its source: {change}' for change in self.changes]
    return '\n'.join(lines)

  def to_json(self) -> dict[str, Any]:
    """The account as JSON types, one entry per leaf."""
    sources = {}
    for source, shapes in self.sources.items():
      used, unused = self.used(source), self.unused.get(source, {})
      sources[source] = {
        leaf: {
          'shape': list(shape),
          'used': used.get(leaf, []),
          'unused': unused.get(leaf),
        }
        for leaf, shape in shapes.items()
      }
    return {
      'parameters': self.parameters(),
      'target': {
        leaf: {
          'shape': list(self.target[leaf]),
          **fill.to_json(),
        }
        for leaf, fill in self.filled.items()
      },
      'sources': sources,
      'not_part_of_the_model': {
        name: dict(some) for name, some in self.outside.items()
      },
      'changes': list(self.changes),
    }


def by_reason(reasons: Mapping[str, str]) -> list[str]:
  """Names with reasons as text, a line for each reason."""
  names: dict[str, list[str]] = {}
  for name, reason in reasons.items():
    names.setdefault(reason, []).append(name)
  more = {r: f' and {len(some) - 1} more' for r, some in names.items()}
  return [
    f'{some[0]}{more[reason] * (len(some) > 1)} ({reason})'
    for reason, some in names.items()
  ]


def _refuse(what: str, leaves: Iterable[str]) -> None:
  leaves = sorted(leaves)
  if leaves:
    raise ValueError(f'{what}: {", ".join(leaves)}')


def _by_layers(
  rows: Iterable[tuple[str, tuple[int, ...], str]],
) -> list[tuple[str, str, str]]:
  """Joins rows that differ in their layer number only."""
  groups: dict[tuple[str, str, str], list[int]] = {}
  for leaf, shape, text in rows:
    layer = layer_leaves.layer_of(leaf)
    if layer is not None:
      leaf = layer_leaves.with_layer(leaf, '*')
      text = text.replace(f'/layers/{layer}/', '/layers/*/')
    group = groups.setdefault((leaf, str(list(shape)), text), [])
    if layer is not None:
      group.append(layer)
  return [
    (leaf.replace('*', _ranges(layers)), shape, text)
    for (leaf, shape, text), layers in groups.items()
  ]


def _ranges(numbers: list[int]) -> str:
  """[0, 1, 2, 5] -> '0-2,5'."""
  runs: list[list[int]] = []
  for number in sorted(numbers):
    if runs and number == runs[-1][1] + 1:
      runs[-1][1] = number
    else:
      runs.append([number, number])
  return ','.join(str(a) if a == b else f'{a}-{b}' for a, b in runs)


def _columns(
  header: tuple[str, str, str], rows: list[tuple[str, str, str]]
) -> list[str]:
  widths = [max(len(row[i]) for row in [header, *rows]) for i in range(2)]
  return [
    f'  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}' for a, b, c in [header, *rows]
  ]
