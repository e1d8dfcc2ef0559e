"""Embedding models from the command line: train, resume, evaluate, export."""

import json

import numpy as np
import pytest

import encdec_adapt
from encdec_adapt import evaluate as evaluate_lib
from encdec_adapt.evaluation.results import results_store
from encdec_adapt.evaluation.tasks import embedding_tasks
from tests import tiny
from tests.e2e import folders

WORDS = 'red green blue one two three four five six seven'.split()


def _line(rng):
  """A query of three words, a text with them in another order, and one not."""
  words = rng.choice(WORDS, 3, replace=False)
  others = rng.choice(WORDS, 3)
  return {
    'q': ' '.join(words),
    'p': ' '.join(reversed(words)),
    'n': [' '.join(others)],
  }


@pytest.fixture(scope='module')
def run(tmp_path_factory, request):
  folder = tmp_path_factory.mktemp('embeddings')
  rng = np.random.default_rng(0)
  for name in ('a', 'b'):
    lines = [json.dumps(_line(rng)) for _ in range(200)]
    (folder / f'{name}.jsonl').write_text('\n'.join(lines))
  source = request.config.rootpath / 'configs' / 'decoders' / 'small'
  pair = folders.adapt(folder / 'pair', f'--encoder={source}')
  files = ' + '.join(f'embed:{folder}/{x}.jsonl#q,p,n' for x in 'ab')

  def train(steps):
    return tiny.run(
      'train',
      f'--config=configs/embeddings.py:source={pair}',
      '--config.model.head.projections=(64,32)',
      '--config.model.head.dimensions=(16,)',
      f'--workdir={folder}/run',
      f'--config.data.source={files}',
      '--config.data.objective=embed:texts=6,query=find: ',
      '--config.data.rates=batches:1,1',
      '--config.data.encoder_length=64',
      '--config.data.eval_fraction=0.1',
      '--config.data.workers=1',
      '--config.data.passes=8',
      '--config.train.batch_size=16',
      '--config.train.microbatches=4',
      '--config.train.eval_batch_size=8',
      f'--config.train.steps={steps}',
      '--config.evaluation.loss=20',
      '--config.checkpoint.every=20',
      '--config.compute.remat=none',
      '--config.compute.dtype=float32',
      '--config.optimizer.learning_rate=1e-3',
      '--config.optimizer.warmup_steps=5',
    )

  for steps in (20, 40):  # The second job resumes the first.
    done = train(steps)
    assert done.returncode == 0, done.stdout + done.stderr
  assert 'resuming at step 20' in done.stdout
  return folder


def _scores(folder, *specs):
  output = folder / 'scores'
  flags = [f'--embeddings={spec}' for spec in specs]
  checkpoints = [f'--checkpoint={folder}/{x}' for x in ('pair', 'run')]
  flags += [*checkpoints, f'--output={output}', '--cost=']
  assert tiny.call(evaluate_lib, *flags) == 0
  lines = (output / results_store.FILE).read_text().splitlines()
  return {
    (x['run'].rpartition('/')[2], x['task'], x['metric']): x['value']
    for x in map(json.loads, lines)
  }


@pytest.mark.long
@pytest.mark.e2e
def test_it_finds_texts_and_is_exported(run):
  data = run / 'search'
  (data / 'qrels').mkdir(parents=True)
  rng = np.random.default_rng(1)
  lines = [_line(rng) for _ in range(40)]
  for name, key in (('queries', 'q'), ('corpus', 'p')):
    rows = [{'_id': f'{key}{i}', 'text': x[key]} for i, x in enumerate(lines)]
    (data / f'{name}.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  pairs = ''.join(f'q{i}\tp{i}\t1\n' for i in range(40))
  (data / 'qrels/test.tsv').write_text(f'query-id\tcorpus-id\tscore\n{pairs}')
  rows = [
    {'a': x['q'], 'b': x[key], 's': score, 'l': score}
    for x in lines
    for key, score in (('p', 1), ('q', 2))
  ]
  (run / 'sts.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  scores = _scores(run, data, f'{run}/sts.jsonl#a,b,s', f'{run}/sts.jsonl#a,l')
  for metric in ('ndcg@10', 'recall@10', 'mrr@10'):
    key = 'search', metric
    assert scores['run', *key] > scores['pair', *key] > 0
    assert 0 < scores['run', 'search', f'{metric}/16'] <= 1
  assert scores['run', 'search', 'recall@10'] > 0.8
  assert scores['run', 'sts', 'spearman'] > 0.5
  assert 0 <= scores['run', 'sts', 'v_measure/16'] < 0.1  # Each text has both.
  output = folders.export(run / 'run', run / 'exported')
  card = (output / 'README.md').read_text()
  assert '(embedding model, ' in card and 'type: sentence-similarity' in card
  assert 'nats per query' in card
  fields = folders.read(output / 'config_sentence_transformers.json')
  assert fields['prompts'] == {'document': '', 'query': 'find: '}
  assert encdec_adapt.load(output).stored.prompts == fields['prompts']
  sentence_transformers = pytest.importorskip('sentence_transformers')
  theirs = sentence_transformers.SentenceTransformer(
    str(output), device='cpu', trust_remote_code=True
  )
  ours = encdec_adapt.load(run / 'run')
  queries = ours.embed(['red one'], prefix=ours.stored.prompts['query'])
  np.testing.assert_allclose(
    theirs.encode(['red one'], prompt_name='query'), queries, atol=1e-5
  )


def test_measures_of_literal_vectors():
  documents = np.array([[1, 0], [0.8, 0.6], [0, 1], [-1, 0]])
  judgements = [({0: 1.0, 2: 3.0}, None)]
  found = embedding_tasks._search(documents[1:2], documents, judgements)
  # In the order 1, 0, 2, 3: gains of 0, 1, 3, 0.
  ideal = 3 + 1 / np.log2(3)
  assert found['ndcg@10'] == [
    pytest.approx((1 / np.log2(3) + 3 / 2) / ideal, rel=1e-6)
  ]
  assert (found['recall@10'], found['mrr@10']) == ([1], [0.5])
  # The query is document 1, and does not find itself.
  judgements = [({0: 1.0, 2: 3.0}, 1)]
  found = embedding_tasks._search(documents[1:2], documents, judgements)
  assert found['ndcg@10'] == [pytest.approx((1 + 3 / np.log2(3)) / ideal)]
  assert found['mrr@10'] == [1]
  labels = np.array([0, 0, 1, 1])
  assert embedding_tasks.v_measure(labels, 1 - labels) == pytest.approx(1)
  assert embedding_tasks.v_measure(labels, np.array([0, 1, 0, 1])) == 0
  # H(labels) = ln 2, H(clusters) = 1.5 ln 2, and I = ln 2.
  value = embedding_tasks.v_measure(labels, np.array([0, 0, 1, 2]))
  assert value == pytest.approx(0.8)
  tight = np.array([[1, 0], [1, 0.01], [0, 1], [0.01, 1]])
  clusters = embedding_tasks._clustering(tight, labels)['v_measure']
  assert clusters == (pytest.approx(1), 4)


@pytest.mark.parametrize(
  'name, text, message',
  [
    (
      'a.jsonl#a,b,c',
      '{"a": "x", "b": 5, "c": 1}',
      'b is 5; it must be a text',
    ),
    (
      'a.jsonl#a,b,c',
      '{"a": "x", "b": "y", "c": "high"}',
      "c is 'high'; it must be a number",
    ),
    ('a.jsonl#a', '{"a": "x"}', 'must be TEXT,TEXT,SCORE or TEXT,LABEL'),
  ],
)
def test_bad_files_are_named(name, text, message, tmp_path):
  (tmp_path / 'a.jsonl').write_text(text)
  with pytest.raises(encdec_adapt.UserError, match=message):
    embedding_tasks.read(f'{tmp_path}/{name}')


def test_searches_are_of_queries_with_a_relevant_document(tmp_path):
  folder = tmp_path / 'nq.v2'
  (folder / 'qrels').mkdir(parents=True)
  for name, text in (('queries', 'which'), ('corpus', 'that')):
    rows = [{'_id': f'{name}{i}', 'text': f'{text} {i}'} for i in range(3)]
    (folder / f'{name}.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  qrels = folder / 'qrels' / 'test.tsv'
  qrels.write_text(
    'query-id\tcorpus-id\tscore\nqueries2\tcorpus0\t1\nqueries0\tgone\t0\n'
  )
  search = embedding_tasks.read(str(folder))
  assert search.name == 'nq.v2' and search.texts['query'] == ['which 2']
  assert search.groups == ()
  text = '{"_id": "queries2", "text": "which 2"}\n'
  corpus = folder / 'corpus.jsonl'
  corpus.write_text(text + corpus.read_text())
  search = embedding_tasks.read(str(folder))
  vectors = np.eye(4)
  assert search.measure(vectors[:1], vectors)['mrr@10'] == [1]
  rows = [
    {'_id': f'queries{i}', 'text': f'{i}', 'document_group': f'module {i}'}
    for i in range(3)
  ]
  text = '\n'.join(map(json.dumps, rows))
  (folder / 'queries.jsonl').write_text(text)
  assert embedding_tasks.read(str(folder)).groups == ['module 2']
  for line, problem in (
    ('none\tcorpus0', 'is not the ids of a query'),
    ('queries2\tqueries2', 'relevant for the query of that id'),
  ):
    qrels.write_text(f'query-id\tcorpus-id\tscore\n{line}\t1\n')
    with pytest.raises(encdec_adapt.UserError, match=problem):
      embedding_tasks.read(str(folder))
