"""Results of a study in a CSV file, which outlives the folders of its runs.

    stage,task,metric,group,value,weight,facts
    ,,,,,,"{""study"": ""small"", ""claims"": {..}, ""digest"": ""5be0..""}"
    loss_pair,,,,,,"{""state"": {..}, ""digest"": ""c0d1..""}"
    loss_pair,held_out,loss,asyncio/queues.py,1834.2271484375,612.0,
    rate,rate,0.003,,3.4112603664,,

A line of facts precedes the values of the study, and of each stage: its state
with identity, seconds, commit, versions and date, its chosen rate, and the
training and curve of a model. A metric is the sum of `value` over the sum of
`weight` of the groups of a report (`contrasts.reported`), or a single value
without a weight. Numbers have all digits. The digest of a stage covers its
facts and values, that of the study its claims and the digests of its stages.

From the package, this module imports only `base.errors`, `configs`, `files`,
`contrasts` and `results_store`.
"""

from collections.abc import Mapping, Sequence
import csv
import dataclasses
import io
import json
import math
import os
from typing import Any

import numpy as np

from encdec_adapt import configs
from encdec_adapt.base import errors
from encdec_adapt.evaluation.results import contrasts, results_store
from encdec_adapt.files import atomic, paths

COLUMNS = 'stage', 'task', 'metric', 'group', 'value', 'weight', 'facts'


@dataclasses.dataclass(frozen=True)
class Stored:
  """Results of a stage, or of a study.

  Attributes:
    facts: JSON values; 'digest' is that of the others and of the rows.
    rows: task, metric, group, value and weight of each value; for a study, the
      name and the digest of each stage.
  """

  facts: Mapping[str, Any]
  rows: Sequence[Sequence[str]]

  @property
  def digest(self) -> str:
    """Digest of the facts and rows."""
    facts = {key: x for key, x in self.facts.items() if key != 'digest'}
    return results_store.digest([facts, self.rows])

  @property
  def scores(self) -> list[results_store.Score]:
    """Scores of an evaluation or choice of rates (`study_results.scores`)."""
    cells: dict[tuple[str, str], list[Sequence[str]]] = {}
    for task, metric, *cell in self.rows:
      cells.setdefault((task, metric), []).append(cell)
    return [_score(*name, *zip(*x, strict=True)) for name, x in cells.items()]


def _score(task, metric, groups, values, weights) -> results_store.Score:
  if not weights[0]:
    return results_store.Score(task, metric, float(values[0]), None, 1)
  sums = (np.array(x, np.float64) for x in (values, weights))
  names = groups if groups[0] else ()
  return results_store.ratio_score(task, metric, *sums, names)


def rows(score: results_store.Score) -> list[tuple[str, ...]]:
  """Returns the rows of a score."""
  name = score.task, score.metric
  if not (score.scores and math.isfinite(score.value)):
    return [(*name, '', repr(score.value), '')]
  score = contrasts.reported(score)
  (values,), weights = contrasts.sums([[score]])
  groups = score.groups or [''] * len(values)
  cells = zip(groups, values.tolist(), weights.tolist(), strict=True)
  return [(*name, group, repr(x), repr(y)) for group, x, y in cells]


def read(path: str | os.PathLike[str]) -> tuple[Stored, dict[str, Stored]]:
  """Returns the results of a study, and of its stages by name.

  Raises:
    UserError: the file is damaged, or was edited.
  """
  stages: dict[str, Stored] = {}
  try:
    text = paths.at(path).read_text(encoding='utf-8')
    _, *lines = csv.reader(io.StringIO(text))
    for name, *row, facts in lines:
      if facts:
        stages[name] = Stored(json.loads(facts), [])
      else:
        stages[name].rows.append(row)
    digests = [[name, x.facts['digest']] for name, x in stages.items() if name]
    study = stages.pop('')
    study.rows.extend(digests)
    for name, x in {**stages, '': study}.items():
      if x.facts['digest'] != x.digest:
        part = f'stage {name}' if name else 'the stages and claims'
        raise errors.UserError(
          f'{path}: the results of {part} of study {study.facts["study"]} do'
          ' not match their digest, as they were edited. Restore the file from'
          ' git, or remove it and run the study again.'
        )
  except (KeyError, TypeError, ValueError) as error:
    raise atomic.damaged(path, f'not results of a study ({error})') from error
  return study, stages


def write(
  path: str | os.PathLike[str],
  facts: Mapping[str, Any],
  stages: Mapping[str, Stored],
) -> None:
  """Writes the results of a study.

  Args:
    path: file to create or replace.
    facts: `study` and `claims` (`pages.Study.terms` at the first start).
    stages: results of its stages by name.
  """
  stages = {
    name: Stored({**x.facts, 'digest': x.digest}, x.rows)
    for name, x in stages.items()
  }
  digests = [[name, x.facts['digest']] for name, x in stages.items()]
  study = Stored({**facts, 'digest': Stored(facts, digests).digest}, [])
  text = io.StringIO()
  lines = csv.writer(text, lineterminator='\n')
  lines.writerow(COLUMNS)
  for name, x in {'': study, **stages}.items():
    lines.writerow([name, *[''] * 5, json.dumps(x.facts)])
    lines.writerows([name, *row, ''] for row in x.rows)
  paths.write(path, text.getvalue().encode())


def find(path: str) -> tuple[dict[str, str], dict[str, Stored]]:
  """Reads the results of a study, and those of other pages in its folder.

  Args:
    path: file of the study, which may not exist; '' for a study without one,
      which reads the shipped results.

  Returns:
    The claims in the file, and the results of all stages by identity.
  """
  file = paths.at(path or configs.path('studies/results/none.csv'))
  claims: dict[str, str] = {}
  stored: dict[str, Stored] = {}
  for other in sorted(
    file.parent.glob('*.csv'), key=lambda x: (x == file, x.name)
  ):
    study, stages = read(other)
    if other == file:
      claims = study.facts['claims']
    for x in stages.values():
      # Hours count once; the shape of a model is missing where it is only read.
      facts = x.facts | {'own': other == file and x.facts['own']}
      identity = facts['state']['identity']
      earlier = stored[identity].facts if identity in stored else {}
      stored[identity] = Stored({**earlier, **facts}, x.rows)
  return claims, stored
