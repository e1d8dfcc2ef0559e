"""Embeddings on local files: search, similarity of texts, clustering.

| file                         | metrics                                       |
|------------------------------|-----------------------------------------------|
| FOLDER, the layout of BEIR:  | ndcg@10, recall@10, mrr@10                    |
| corpus.jsonl (_id, text,     |                                               |
| perhaps title), queries.jsonl|                                               |
| (_id, text), qrels/test.tsv  |                                               |
| (query, document, relevance) |                                               |
| FILE.jsonl#TEXT,TEXT,SCORE   | spearman, of the cosines with the scores      |
| FILE.jsonl#TEXT,LABEL        | v_measure, of k-means with the labels         |

Each is also of the leading parts of the vectors that an embedding model has
(Matryoshka), as in `ndcg@10/128`. Other models are measured by the mean of the
states that read a prompt. Queries and documents have the prefixes of the run;
a text longer than the model's positions keeps its first tokens. Of the other
rooms of `evaluation`, `results` is imported.
"""

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses

from jaxtyping import Float
import numpy as np

from encdec_adapt.base import errors, option_strings
from encdec_adapt.conversion import (
  model_in_memory,
  model_on_disk,
  pretrained_files,
)
from encdec_adapt.evaluation.results import results_store
from encdec_adapt.evaluation.tasks import prompted_task
from encdec_adapt.files import paths
from encdec_adapt.telemetry import progress

_LABEL = '--embeddings'
_DEPTH = 10  # Documents that a query finds.
_RESTARTS = 10  # Of k-means; the clusters of least distances count.
_SMALLEST = 1e-12

Vectors = Float[np.ndarray, 'n E']
Metrics = Mapping[str, float | Sequence[float]]


@dataclasses.dataclass(frozen=True)
class EmbeddingEvaluation:
  """Evaluates models on the texts of a file.

  Attributes:
    name: name of the task.
    texts: the texts by role, 'query' or 'document'.
    measure: computes the metrics, or their values for every example, from the
      vectors by role.
    content: digest of the file.
  """

  name: str
  texts: Mapping[str, Sequence[str]]
  measure: Callable[[Mapping[str, Vectors]], Metrics]
  content: str

  def options(self) -> results_store.Options:
    """Returns the inputs of the scores."""
    return {'embeddings': self.name, 'content': self.content}

  def check(self, stored: model_on_disk.StoredModel) -> None:
    """Checks that a model has vocabularies, and room for a text."""
    stored.require_vocabularies()
    pretrained_files.prompt_room(stored)

  def scores(
    self, model: model_in_memory.LoadedModel, rows: int, report: progress.Report
  ) -> list[results_store.Score]:
    """Embeds the texts and measures the vectors.

    Args:
      model: the model.
      rows: texts at a time; divides over the model's devices.
      report: progress callback (texts done, all texts).
    """
    stored, embedder = model.stored, model.embedding_model()
    reader = stored.require_vocabularies().sides[stored.prompt_side]
    room = pretrained_files.prompt_room(stored)
    total, vectors = sum(map(len, self.texts.values())), {}
    done = 0
    for role, texts in self.texts.items():
      prefix = stored.prompts[role]
      tokens = {
        i: np.array([reader.bos, *reader.encode(prefix + text)][:room])
        for i, text in enumerate(texts)
      }
      found = {}
      embedded = embedder.embed_tokens(tokens, pooling=None, batch_size=rows)
      for i, vector in embedded:
        found[i] = vector
        done += 1
        report(done, total)
      vectors[role] = np.stack([found[i] for i in range(len(texts))])
    stack = embedder.config.decoder
    return [
      self._score(f'{metric}{suffix}', value)
      for suffix, size in _sizes(stack.embedding.sizes(stack.width))
      for metric, value in self.measure(
        {role: _normalised(x[:, :size]) for role, x in vectors.items()}
      ).items()
    ]

  def _score(
    self, metric: str, value: float | Sequence[float]
  ) -> results_store.Score:
    if isinstance(value, float):  # Not a mean over examples.
      n = sum(map(len, self.texts.values()))
      return results_store.Score(self.name, metric, value, None, n)
    return results_store.mean_score(self.name, metric, value)


def _sizes(sizes: Sequence[int]) -> Iterator[tuple[str, int]]:
  """Yields suffixes of metrics, '' for whole vectors, and sizes."""
  for i, size in enumerate(sizes):
    yield f'/{size}' * bool(i), size


def _normalised(x: Vectors) -> Vectors:
  norms = np.linalg.norm(x, axis=1, keepdims=True)
  return x / np.maximum(norms, _SMALLEST)


def read(spec: str) -> EmbeddingEvaluation:
  """Reads a value of --embeddings; see the module's docstring.

  Raises:
    UserError: the file cannot be read, or lacks a field; names the line.
  """
  file, fields = option_strings.Part(_LABEL, spec).partition('#')
  names = [field.text for field in fields.divide(',')] if fields else []
  name = paths.at(file.text).stem
  if not names:
    return _read_search(name, file.text)
  if len(names) not in (2, 3) or not all(names):
    raise fields.error('must be TEXT,TEXT,SCORE or TEXT,LABEL.')
  *texts, last = names
  rows = prompted_task.read_rows(file.text)
  kinds = dict.fromkeys(texts, str)
  kinds[last] = (int, float) if len(texts) > 1 else (str, int)
  _check(rows, kinds)
  columns = {x: [row[x] for _, row in rows] for x in names}
  content = results_store.digest(columns)
  if len(texts) > 1:
    both = columns[texts[0]] + columns[texts[1]]
    scores = np.array(columns[last])
    return EmbeddingEvaluation(
      name, {'query': both}, lambda x: _similarity(x['query'], scores), content
    )
  labels = np.unique([str(x) for x in columns[last]], return_inverse=True)[1]
  return EmbeddingEvaluation(
    name,
    {'document': columns[texts[0]]},
    lambda x: {'v_measure': _clustering(x['document'], labels)},
    content,
  )


def _check(rows: Sequence[tuple[str, Mapping]], kinds: Mapping) -> None:
  """Refuses rows that lack a field, or have one of another kind."""
  for line, row in rows:
    for name, kind in kinds.items():
      if not isinstance(row.get(name), kind):
        raise errors.UserError(
          f'{line}: {name} is {row.get(name)!r:.60}; it must be'
          f' {"a text" if kind is str else "a number or label"}.'
        )


def _read_search(name: str, folder: str) -> EmbeddingEvaluation:
  """Reads a folder of queries, documents and their relevances."""
  ids, texts = {}, {}
  for role, file in (('query', 'queries'), ('document', 'corpus')):
    rows = prompted_task.read_rows(paths.join(folder, f'{file}.jsonl'))
    _check(rows, {'_id': str, 'text': str})
    ids[role] = {row['_id']: i for i, (_, row) in enumerate(rows)}
    titles = (row.get('title', '') for _, row in rows)
    texts[role] = [
      f'{title} {row["text"]}'.strip()
      for title, (_, row) in zip(titles, rows, strict=True)
    ]
  path = paths.at(folder) / 'qrels' / 'test.tsv'
  if not path.exists():
    raise errors.UserError(f'{path} is missing; {_LABEL} needs relevances.')
  relevant: dict[int, dict[int, float]] = collections.defaultdict(dict)
  # The first line has names.
  for number, line in enumerate(path.read_text().splitlines()[1:], start=2):
    parts = line.split('\t')
    try:
      query, document, relevance = parts
      pair = ids['query'][query], ids['document'][document]
      if float(relevance) > 0:
        relevant[pair[0]][pair[1]] = float(relevance)
    except (ValueError, KeyError) as error:
      raise errors.UserError(
        f'{path}, line {number}: {line!r:.80} is not the ids of a query and of a'
        ' document, and a number, between tabs.'
      ) from error
  if not relevant:
    raise errors.UserError(f'{path} has no document that is relevant.')
  # Other queries have nothing to find.
  texts['query'] = [texts['query'][i] for i in relevant]
  relevances = list(relevant.values())
  return EmbeddingEvaluation(
    name,
    texts,
    lambda x: _search(x['query'], x['document'], relevances),
    results_store.digest([texts, relevances]),
  )


def _search(
  queries: Vectors,
  documents: Vectors,
  relevances: Sequence[Mapping[int, float]],
) -> Metrics:
  """Returns metrics of every query; gains are relevances, as in trec_eval."""
  metrics = {f'{x}@{_DEPTH}': [] for x in ('ndcg', 'recall', 'mrr')}
  discounts = 1 / np.log2(np.arange(2, _DEPTH + 2))
  for query, relevant in zip(queries, relevances, strict=True):
    order = np.argsort(-(documents @ query), kind='stable')[:_DEPTH].tolist()
    gains = np.array([relevant.get(i, 0.0) for i in order])
    ideal = np.sort([*relevant.values()])[::-1][:_DEPTH]
    found = np.flatnonzero(gains)
    ndcg = gains @ discounts[: len(gains)] / (ideal @ discounts[: len(ideal)])
    ranks = 1 / (found[0] + 1) if len(found) else 0.0
    values = ndcg, len(found) / len(relevant), ranks
    for scores, value in zip(metrics.values(), values, strict=True):
      scores.append(float(value))
  return metrics


def _similarity(vectors: Vectors, scores: np.ndarray) -> Metrics:
  """Returns the rank correlation of cosines with scores."""
  from scipy import stats

  first, second = np.split(vectors, 2)
  cosines = np.sum(first * second, axis=1)
  return {'spearman': float(stats.spearmanr(cosines, scores).statistic)}


def _clustering(vectors: Vectors, labels: np.ndarray) -> float:
  """Returns the V-measure of as many clusters as there are labels."""
  from scipy.cluster import vq

  def cluster(seed: int) -> tuple[float, np.ndarray]:
    centers, _ = vq.kmeans2(
      vectors, labels.max() + 1, minit='++', seed=seed, missing='warn'
    )
    clusters, distances = vq.vq(vectors, centers)
    return float(np.sum(distances**2)), clusters

  best = min(map(cluster, range(_RESTARTS)), key=lambda result: result[0])[1]
  return v_measure(labels, best)


def v_measure(labels: np.ndarray, clusters: np.ndarray) -> float:
  """Returns the mean of homogeneity and completeness (harmonic).

  It is 2 I / (H(labels) + H(clusters)) (Rosenberg and Hirschberg 2007).

  Args:
    labels: number of each example's label, from 0.
    clusters: number of its cluster, from 0.
  """
  table = np.zeros((labels.max() + 1, clusters.max() + 1))
  np.add.at(table, (labels, clusters), 1 / len(labels))

  def entropy(shares: np.ndarray) -> float:
    shares = shares[shares > 0]
    return float(-np.sum(shares * np.log(shares)))

  both = entropy(table.sum(1)) + entropy(table.sum(0))
  return 2 * (both - entropy(table.ravel())) / both if both else 1.0
