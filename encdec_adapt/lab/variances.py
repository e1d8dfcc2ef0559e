"""Variances of paired differences in earlier studies, for planned power.

`configs/studies/variances.json` maps 'KIND/EVALUATION/TASK/METRIC' to an entry
per study: variances over seeds, over groups of examples and of the residual,
for differences of two arms paired over both, with degrees of freedom. They are
pooled over the contrasts of a kind: `alike` contrasts have one architecture,
`unlike` two, and vary more from text to text. With `_random`, a model or an
ancestor of its seed started from random weights, and contrasts vary more from
seed to seed.
`python -m encdec_adapt.study --study=PAGE --variances` adds the entries of a
page's results. A page is never planned with its own results.

From the package, this module imports only `files`, `contrasts` and
`crossed_intervals`.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import itertools
import os
from typing import Any

import numpy as np

from encdec_adapt.evaluation.results import contrasts, crossed_intervals
from encdec_adapt.files import atomic, paths

# Below this, a variance is planned with an upper bound of this level.
_FREEDOM = 8
_BOUND = 0.8


@dataclasses.dataclass(frozen=True)
class Components:
  """Variances of the cells of paired differences.

  Attributes:
    seed: variance over seeds.
    group: variance over groups of examples.
    residual: residual variance.
    freedoms: degrees of freedom of the three.
    seeds: number of seeds of the estimate.
    groups: number of groups.
  """

  seed: float
  group: float
  residual: float
  freedoms: tuple[int, int, int]
  seeds: int
  groups: int


def origins(
  values: Mapping[str, Mapping[str, Any]], parents: Mapping[str, str]
) -> dict[str, tuple[str, bool]]:
  """Returns architectures, and whether models began at random, by name.

  Args:
    values: configuration of the runs of trained models by key.
    parents: see `pages.Study.parents`; a model that is made of others without
      training has the architecture of the first.
  """

  def origin(name: str) -> tuple[str, bool]:
    fields = values.get(name, {})
    kind, is_random = '', fields.get('init.mode') == 'random'
    if name in parents:
      kind, is_random = origin(parents[name])
    return fields.get('model.kind', kind), is_random

  return {name: origin(name) for name in {**values, **parents}}


def kind(origins: Iterable[tuple[str, bool] | None]) -> str:
  """Returns the kind of a contrast, by `origins`; None is unknown."""
  architectures, random = zip(*(x or ('', False) for x in origins), strict=True)
  name = 'unlike' if len({*architectures}) > 1 else 'alike'
  return f'{name}_random' if any(random) else name


def estimate(
  compared: Sequence[tuple[contrasts.Arm, contrasts.Arm]],
) -> Components:
  """Estimates the variances from pairs of arms with the same examples.

  The estimate uses the examples of reports (`contrasts.reported`).

  Args:
    compared: at least one pair of arms, with at least two seeds each.

  Raises:
    UserError: the arms differ in their examples or numbers of seeds.
  """
  from scipy.cluster import hierarchy

  pairs = [
    crossed_intervals.mean_squares(
      *contrasts.sums([[*map(contrasts.reported, arm)] for arm in pair])
    )
    for pair in compared
  ]
  # The mean over all pairs of k arms is twice the mean square of the
  # interaction with arms, with k - 1 times the degrees of freedom of a pair.
  arms = hierarchy.DisjointSet(id(arm) for pair in compared for arm in pair)
  for a, b in compared:
    arms.merge(id(a), id(b))
  count = len(arms) - arms.n_subsets
  freedoms = tuple(x * count for x in pairs[0].freedoms)
  seeds, groups = pairs[0].seeds, pairs[0].groups
  of_seeds, of_groups, residual = (
    float(np.mean([getattr(x, name) for x in pairs]))
    for name in ('of_seeds', 'of_groups', 'residual')
  )
  seed = max(of_seeds - residual, 0.0) / groups
  group = max(of_groups - residual, 0.0) / seeds
  return Components(seed, group, residual, freedoms, seeds, groups)


def planned(
  path: str | os.PathLike[str], metric: str, study: str, arms: int = 2
) -> Components | None:
  """Returns the variances for planning a study.

  Args:
    path: file of the variances.
    metric: 'KIND/EVALUATION/TASK/METRIC'.
    study: name of the planned study; its own entry is ignored.
    arms: arms of the contrast, 1, 2 or 4.

  Returns:
    Means over the other studies, weighted by degrees of freedom; with fewer
    than 8 degrees of freedom, the upper 80 % bound. None without an entry.
  """
  from scipy import stats

  entries = [
    Components(**fields)
    for name, fields in _read(path).get(metric, {}).items()
    if name != study
  ]
  if not entries:
    return None
  freedoms = np.array([x.freedoms for x in entries])
  values = np.array([(x.seed, x.group, x.residual) for x in entries])
  total = freedoms.sum(axis=0)
  # A difference of two differences has twice the variance.
  seed, group, residual = arms / 2 * (values * freedoms).sum(axis=0) / total
  # The layout with the most groups: the planned one is unknown.
  groups, seeds = max((x.groups, x.seeds) for x in entries)
  bounds = np.where(
    total < _FREEDOM, total / stats.chi2.ppf(1 - _BOUND, total), 1.0
  )
  # Bounds apply to mean squares, which include the residual.
  return Components(
    float((groups * seed + residual) * bounds[0] - residual) / groups,
    float((seeds * group + residual) * bounds[1] - residual) / seeds,
    float(residual * bounds[2]),
    tuple(total.tolist()),
    seeds,
    groups,
  )


def write(
  path: str | os.PathLike[str],
  study: str,
  arms: Mapping[str, Sequence[tuple[tuple[str, bool] | None, contrasts.Arm]]],
) -> None:
  """Replaces the entries of a study.

  Args:
    path: file of the variances; created if missing.
    study: name of the study.
    arms: 'EVALUATION/TASK/METRIC' -> origin and scores of its arms with the
      same examples; see `estimate`. Metrics without per-example values get no
      entry.
  """
  content = _read(path)
  for entries in content.values():
    entries.pop(study, None)
  for metric, scored in arms.items():
    by_kind: dict[str, list[Any]] = {}
    for pair in itertools.combinations(scored, 2):
      origins, scores = zip(*pair, strict=True)
      if scores[0][0].scores:
        by_kind.setdefault(kind(origins), []).append(scores)
    for name, compared in by_kind.items():
      components = dataclasses.asdict(estimate(compared))
      content.setdefault(f'{name}/{metric}', {})[study] = components
  atomic.write_json(
    paths.at(path), {name: x for name, x in sorted(content.items()) if x}
  )


def _read(path: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
  file = paths.at(path)
  return atomic.read_json(file) if file.exists() else {}
