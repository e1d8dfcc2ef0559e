"""Embedding tasks on local files: retrieval, text similarity, clustering.

| file                         | metrics                                       |
|------------------------------|-----------------------------------------------|
| FOLDER, the layout of BEIR:  | ndcg@10, recall@10, mrr@10                    |
| corpus.jsonl (_id, text,     |                                               |
| perhaps title), queries.jsonl|                                               |
| (_id, text, perhaps          |                                               |
| document_group of the        |                                               |
| intervals), qrels/test.tsv   |                                               |
| (query, document, relevance) |                                               |
| FILE.jsonl#TEXT,TEXT,SCORE   | spearman, cosine similarities and scores      |
| FILE.jsonl#TEXT,LABEL        | v_measure, k-means clusters and labels        |

Metrics are also computed for an embedding model's Matryoshka dimensions, as in
`ndcg@10/128`. For other models, the states of their prompt-reading stack are
mean-pooled. Queries and documents have the prefixes of the run; longer texts
are truncated to the model's context. As in BEIR's evaluation, a query does not
retrieve the document of equal id, which is the query itself (ArguAna), so
other ids must differ. From `evaluation`, this module imports only `results`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np

from encdec_adapt.base import errors, option_strings
from encdec_adapt.evaluation.results import results_store
from encdec_adapt.evaluation.tasks import prompted_task, task_groups
from encdec_adapt.files import paths
from encdec_adapt.generation import model_in_memory
from encdec_adapt.stored import model_on_disk, pretrained_files
from encdec_adapt.telemetry import progress

_DEPTH = 10  # Number of retrieved documents per query.
_RESTARTS = 10  # Runs of k-means; the run with the least inertia counts.

# Types of fields, and their names in errors.
_NUMBER, _LABEL = (int, float), (int, float, str)
_FORMS = {str: 'a text', _NUMBER: 'a number', _LABEL: 'a number or a text'}

Vectors = np.ndarray  # [n, E]
# Relevances of documents for a query; the document with its id.
Judgement = tuple[dict[int, float], int | None]
# Values of every query; or a value and the number of its examples.
Metrics = Mapping[str, list[float] | tuple[float, int]]


@dataclasses.dataclass(frozen=True)
class EmbeddingEvaluation:
  """Evaluates models on the texts of a file.

  Attributes:
    name: name of the task.
    texts: the texts by role, 'query' or 'document'.
    measure: computes metrics from the vectors of each role.
    content: all content of the file.
    groups: document group of every query; empty if each is a separate group.
  """

  name: str
  texts: Mapping[str, Sequence[str]]
  measure: Callable[..., Metrics]
  content: Any
  groups: Sequence[str] = ()

  def options(self) -> results_store.Options:
    """Returns all inputs of the scores."""
    content = results_store.digest(self.content)
    return {'embeddings': self.name, 'content': content}

  def check(self, stored: model_on_disk.StoredModel) -> None:
    """Checks that a model has vocabularies, and room for a text."""
    stored.require_vocabularies()
    pretrained_files.prompt_room(stored)

  def scores(
    self, model: model_in_memory.LoadedModel, rows: int, report: progress.Report
  ) -> Iterator[results_store.Score]:
    """Embeds the texts and yields metrics of the vectors.

    Args:
      model: the model.
      rows: texts at a time; divides over the model's devices.
      report: progress callback (roles done, all roles).
    """
    embedder, vectors = model.embedding_model(), {}
    for role, texts in self.texts.items():
      report(len(vectors), len(self.texts))
      vectors[role] = embedder.embed_texts(texts, role, rows)
    stack = embedder.config.decoder
    for i, size in enumerate(stack.head.sizes(stack.width)):
      parts = [x[:, :size] for x in vectors.values()]
      parts = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in parts]
      for metric, value in self.measure(*parts).items():
        metric += f'/{size}' if i else ''
        if isinstance(value, list):
          values = value, self.groups
          yield results_store.mean_score(self.name, metric, *values)
        else:
          mean, n = value
          yield results_store.Score(self.name, metric, mean, None, n)


def read(spec: str) -> EmbeddingEvaluation:
  """Reads a value of --embeddings; see the module's docstring.

  Raises:
    UserError: the file cannot be read, or lacks a field; names the line.
  """
  file, fields = option_strings.Part('--embeddings', spec).partition('#')
  names = [field.text for field in fields.divide(',')] if fields else []
  if not names:
    return _read_search(file.text)
  if len(names) not in (2, 3):
    raise fields.error('must be TEXT,TEXT,SCORE or TEXT,LABEL.')
  kinds = [str] * (len(names) - 1) + [_NUMBER if len(names) == 3 else _LABEL]
  rows = prompted_task.read_rows(file.text)
  first, *second, values = _columns(rows, names, kinds)
  task, content = paths.at(file.text).stem, (first, second, values)
  if second:
    scores = np.array(values, float)
    texts = {'query': [*first, *second[0]]}
    measure = lambda x: _similarity(x, scores)  # noqa: E731
  else:
    labels = np.unique([str(x) for x in values], return_inverse=True)[1]
    texts = {'document': first}
    measure = lambda x: _clustering(x, labels)  # noqa: E731
  return EmbeddingEvaluation(task, texts, measure, content)


def _columns(
  rows: Sequence[tuple[str, dict[str, Any]]],
  names: Sequence[str],
  kinds: Sequence[Any],
) -> list[list[Any]]:
  for line, row in rows:
    for name, kind in zip(names, kinds, strict=True):
      if not isinstance(row.get(name), kind):
        raise errors.UserError(
          f'{line}: {name} is {row.get(name)!r:.60}; it must be {_FORMS[kind]}.'
        )
  return [[row[name] for _, row in rows] for name in names]


def _read_search(folder: str) -> EmbeddingEvaluation:
  """Reads a folder of queries, documents and their relevances.

  Raises:
    UserError: a file cannot be read, lacks a field, names an unknown id, has no
      relevant document, or judges the document with the query's id.
  """
  names, kinds = ['_id', 'text'], [str, str]
  rows = prompted_task.read_rows(paths.join(folder, 'queries.jsonl'))
  ids, queries = _columns(rows, names, kinds)
  groups = [row.get(task_groups.GROUP) for _, row in rows]
  rows = prompted_task.read_rows(paths.join(folder, 'corpus.jsonl'))
  documents, texts = _columns(rows, names, kinds)
  titles = [row.get('title') for _, row in rows]
  texts = [f'{a} {b}' if a else b for a, b in zip(titles, texts, strict=True)]
  query_numbers = {name: i for i, name in enumerate(ids)}
  numbers = {name: i for i, name in enumerate(documents)}
  path, relevant = paths.at(folder) / 'qrels' / 'test.tsv', {}
  lines = path.read_text().splitlines()[1:] if path.exists() else []
  for line in lines:  # After the names of the columns.
    try:
      query, document, relevance = line.split('\t')
      if float(relevance) > 0:
        gains = relevant.setdefault(query_numbers[query], {})
        gains[numbers[document]] = float(relevance)
    except (ValueError, KeyError) as error:
      raise errors.UserError(
        f'{path}: {line!r:.80} is not the ids of a query and of a document, and'
        ' a relevance, between tabs.'
      ) from error
  if not relevant:
    raise errors.UserError(f'{path} has no relevant documents.')
  # Other queries have no relevant documents.
  texts = {'query': [queries[i] for i in relevant], 'document': texts}
  # With the document of the query's id; None for most.
  judgements = [(x, numbers.get(ids[i])) for i, x in relevant.items()]
  for gains, same in judgements:
    if same in gains:
      raise errors.UserError(
        f'{path} calls the document {documents[same]!r} relevant for the query'
        ' of that id, which does not find it (as in BEIR); give queries ids'
        ' that no document has.'
      )
  return EmbeddingEvaluation(
    paths.at(folder).name,
    texts,
    lambda *x: _search(*x, judgements),
    (texts, judgements),
    [groups[i] for i in relevant] if all(groups) else (),
  )


def _search(
  queries: Vectors, documents: Vectors, judgements: Sequence[Judgement]
) -> Metrics:
  """Returns metrics per query; gains are relevances, as in trec_eval."""
  rows = []
  discounts = 1 / np.log2(np.arange(_DEPTH) + 2)
  for query, (relevant, same) in zip(queries, judgements, strict=True):
    order = np.argsort(-(documents @ query), kind='stable')[: _DEPTH + 1]
    order = [i for i in order.tolist() if i != same][:_DEPTH]
    gains = np.array([relevant.get(i, 0.0) for i in order])
    ideal = np.sort([*relevant.values()])[::-1][:_DEPTH]
    ndcg = (gains @ discounts[: len(gains)]) / (ideal @ discounts[: len(ideal)])
    recall = np.count_nonzero(gains) / len(relevant)
    ranks = np.flatnonzero(gains)[:1] + 1
    rows.append((float(ndcg), recall, sum((1 / ranks).tolist())))
  names = (f'{name}@{_DEPTH}' for name in ('ndcg', 'recall', 'mrr'))
  return dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))


def _similarity(vectors: Vectors, scores: np.ndarray) -> Metrics:
  # scipy, a dependency of jax, is imported late as in `results`.
  from scipy import stats

  first, second = np.split(vectors, 2)
  cosines = np.sum(first * second, axis=1)
  correlation = float(stats.spearmanr(cosines, scores).statistic)
  return {'spearman': (correlation, len(scores))}


def _clustering(vectors: Vectors, labels: np.ndarray) -> Metrics:
  from scipy.cluster import vq

  def cluster(seed: int) -> tuple[float, np.ndarray]:
    centers, _ = vq.kmeans2(
      vectors, labels.max() + 1, minit='++', seed=seed, missing='warn'
    )
    clusters, distances = vq.vq(vectors, centers)
    return np.sum(distances**2), clusters

  best = min(map(cluster, range(_RESTARTS)), key=lambda result: result[0])
  return {'v_measure': (v_measure(labels, best[1]), len(labels))}


def v_measure(labels: np.ndarray, clusters: np.ndarray) -> float:
  """Returns the harmonic mean of homogeneity and completeness.

  Equals 2 I / (H(labels) + H(clusters)) (Rosenberg and Hirschberg 2007).

  Args:
    labels: label index of each example, from 0.
    clusters: cluster index of each example, from 0.
  """
  table = np.zeros((labels.max() + 1, clusters.max() + 1))
  np.add.at(table, (labels, clusters), 1 / len(labels))
  rows, columns, joint = (
    -np.sum(x[x > 0] * np.log(x[x > 0]))
    for x in (table.sum(1), table.sum(0), table)
  )
  total = rows + columns
  return max(0.0, float(2 * (total - joint) / total)) if total else 1.0
