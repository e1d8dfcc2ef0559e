"""The coverage report: what an adaptation does with every weight.

Each leaf of the new model has a `Fill`; each leaf of a source is used, or
listed as unused with a reason. Leaves are named by layer
(`models.layer_leaves`).
"""

from collections.abc import Iterable, Mapping
import dataclasses
import math
from typing import Any, Literal

from encdec_adapt.adaptation import transforms as transforms_lib
from encdec_adapt.models import layer_leaves

Shapes = Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Fill:
  """How a leaf of the new model is filled.

  Attributes:
    how: 'copied' from a source, 'fresh' from the model's initializer, or set to
      the constant `value`.
    source: name of the source, if copied.
    leaf: leaf of the source, if copied.
    value: the constant, if constant.
    transforms: transforms of a copy, in order.
    note: remark for the report.
  """

  how: Literal['copied', 'fresh', 'constant']
  source: str | None = None
  leaf: str | None = None
  value: float | None = None
  transforms: tuple[transforms_lib.Transform, ...] = ()
  note: str = ''

  def describe(self) -> str:
    """Returns text such as 'copied from encoder_source decoder/...'."""
    text = {
      'copied': f'copied from {self.source} {self.leaf}',
      'fresh': 'fresh',
      'constant': f'constant {self.value}',
    }[self.how]
    notes = [self.note] if self.note else []
    notes += [transform.describe() for transform in self.transforms]
    return f'{text} ({"; ".join(notes)})' if notes else text

  def to_json(self) -> dict[str, Any]:
    """Returns the fields as JSON types."""
    transforms = [transform.describe() for transform in self.transforms]
    return {**dataclasses.asdict(self), 'transforms': transforms}


@dataclasses.dataclass(frozen=True)
class Coverage:
  """The coverage report of an adaptation.

  Attributes:
    target: shapes of the new model's leaves.
    filled: leaf of the new model -> how it is filled.
    sources: source name -> shapes of its leaves.
    unused: source name -> unused leaf -> reason.
    changes: settings different from the sources despite equal weights, such as
      a bidirectional encoder.
    padding: leaf -> uncounted parameters in padding rows
      (`parameters.padding`).
    outside: source name -> tensors on disk outside the model, such as a vision
      tower -> reason.
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
    """Returns each used leaf of `source` -> the target leaves it fills."""
    used = {}
    for leaf, fill in self.filled.items():
      if fill.source == source:
        used.setdefault(fill.leaf, []).append(leaf)
    return used

  def parameters(self) -> dict[str, int]:
    """Counts parameters by how they are filled."""
    counts = {'copied': 0, 'fresh': 0, 'constant': 0}
    for leaf, fill in self.filled.items():
      # Without padding, the sum is the parameter count stated in papers.
      size = math.prod(self.target[leaf]) - self.padding.get(leaf, 0)
      counts[fill.how] += size
    return counts

  def summary(self) -> str:
    """Formats the report in at most five lines, for two sources."""
    lines = [self._counts()]
    for source in self.sources:
      unused = self.unused.get(source, {})
      line = f'{source}: {len(self.used(source))} leaves used, {len(unused)}'
      reasons = by_reason(unused) + by_reason(self.outside.get(source, {}))
      lines.append(
        f'{line} unused' + (f': {"; ".join(reasons)}' if reasons else '')
      )
    if self.changes:
      lines.append(f'differs from its source: {"; ".join(self.changes)}')
    lines.append('coverage.json in the work directory has every weight')
    return '\n'.join(lines)

  def table(self) -> str:
    """Formats the report, grouping layers with equal treatment."""
    filled = (
      (leaf, self.target[leaf], fill.describe())
      for leaf, fill in self.filled.items()
    )
    lines = [self._counts(), *_columns(('target', 'shape', 'filled'), filled)]
    for source, shapes in self.sources.items():
      unused = self.unused.get(source, {})
      lines.append(
        f'{source}: {len(self.used(source))} leaves used, {len(unused)} unused'
      )
      if unused:
        rows = ((leaf, shapes[leaf], reason) for leaf, reason in unused.items())
        lines += _columns(('unused', 'shape', 'reason'), rows)
      lines += [
        f'  not part of the model: {line}'
        for line in by_reason(self.outside.get(source, {}))
      ]
    lines += [f'differs from its source: {change}' for change in self.changes]
    return '\n'.join(lines)

  def _counts(self) -> str:
    counts = self.parameters()
    return (
      f'adaptation: {sum(counts.values()):,} parameters, of which '
      + ', '.join(f'{count:,} {how}' for how, count in counts.items())
    )

  def to_json(self) -> dict[str, Any]:
    """Returns the report as JSON types: table and one entry per leaf."""
    sources = {}
    for source, shapes in self.sources.items():
      used, unused = self.used(source), self.unused.get(source, {})
      sources[source] = {
        # A leaf may fill several targets (self- and cross-attention).
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
        leaf: {'shape': list(self.target[leaf]), **fill.to_json()}
        for leaf, fill in self.filled.items()
      },
      'sources': sources,
      'not_part_of_the_model': {k: dict(v) for k, v in self.outside.items()},
      'changes': list(self.changes),
      'table': self.table().splitlines(),
    }


def by_reason(reasons: Mapping[str, str]) -> list[str]:
  """Formats names with reasons as text, one line per reason."""
  names: dict[str, list[str]] = {}
  for name, reason in reasons.items():
    names.setdefault(reason, []).append(name)
  # A vision tower has hundreds of tensors: show one name and the count.
  return [
    f'{first}{f" and {len(more)} more" if more else ""} ({reason})'
    for reason, (first, *more) in names.items()
  ]


def _columns(
  header: tuple[str, str, str], rows: Iterable[tuple[str, tuple[int, ...], str]]
) -> list[str]:
  groups: dict[tuple[str, str, str], list[int]] = {}
  for leaf, shape, text in rows:
    layer = layer_leaves.layer_of(leaf)
    if layer is not None:
      leaf = layer_leaves.with_layer(leaf, '*')
      # Lines of all layers are equal without the number of the source's layer,
      # which `changes` states where it differs.
      text = layer_leaves.with_layer(text, '*')
    group = groups.setdefault((leaf, str(list(shape)), text), [])
    if layer is not None:
      group.append(layer)
  lines = [header] + [
    (leaf.replace('*', _ranges(layers)), shape, text)
    for (leaf, shape, text), layers in groups.items()
  ]
  widths = [max(len(line[i]) for line in lines) for i in range(2)]
  return [f'  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}' for a, b, c in lines]


def _ranges(numbers: list[int]) -> str:
  runs: list[list[int]] = []
  for number in numbers:
    if runs and number == runs[-1][1] + 1:
      runs[-1][1] = number
    else:
      runs.append([number, number])
  return ','.join(str(a) if a == b else f'{a}-{b}' for a, b in runs)
