"""Needles, documents and chains in text; scores of models that find them."""

import collections
import dataclasses
import pydoc_data.topics
import re
import types

import numpy as np
import pytest

from encdec_adapt.base import errors
from encdec_adapt.evaluation.results import results_store
from encdec_adapt.evaluation.tasks import retrieval_scores, retrieval_tasks
from encdec_adapt.inference import log_likelihoods
from encdec_adapt.lab import html_report
from encdec_adapt.stored import pretrained_files
from encdec_adapt.tokenizers import vocabulary_pair

BYTES = vocabulary_pair.open_vocabulary('bytes')
TEXT = '\n'.join(list(pydoc_data.topics.topics.values())[:20])
FACT = re.compile(r' The code of the (\w+) is (?:that of the )?([\w-]+)\.\n')
KINDS = ['encoder_decoder', 'decoder_only']


def _examples(retrieval, reader=BYTES):
  """Examples by the name of their task."""
  found = collections.defaultdict(list)
  for example in retrieval.examples(reader):
    found[example.task].append(example)
  return found


def _answer(prompt):
  """What a reader who understands the text answers."""
  facts = dict(FACT.findall(prompt))
  # The things of the question stand again in the beginning of the answer.
  asked = re.findall(r'the (\w+)\b', prompt.rpartition('Answer:')[2])
  codes = []
  for thing in asked:
    while thing in facts:
      thing = facts[thing]
    codes.append(thing)
  return ' and '.join(code for code in codes if '-' in code)


@pytest.mark.parametrize(
  'depth, want',
  [
    (0, [7, 8, 1, 1, 9, 1, 1, 1, 1, 9, 1, 1]),
    # After the sentence that ends near the place, token 4.
    (0.4, [1, 1, 9, 7, 8, 1, 1, 1, 1, 9, 1, 1]),
    # None ends near token 6.
    (0.6, [1, 1, 9, 1, 1, 1, 7, 8, 1, 9, 1, 1]),
    (1, [1, 1, 9, 1, 1, 1, 1, 9, 1, 1, 7, 8]),
  ],
)
def test_a_needle_is_at_its_depth(depth, want):
  text = np.array([1, 1, 9, 1, 1, 1, 1, 9, 1, 1, 5, 5])
  ends = np.arange(10) == 9
  needle = np.array([7, 8])
  found = retrieval_tasks.hide(text, ends, 12, [needle], [depth])
  assert found.tolist() == want


def test_a_short_text_is_repeated():
  needles = [np.array([7]), np.array([8])]
  found = retrieval_tasks.hide(
    np.array([1, 2]), np.zeros(10, bool), 7, needles, [0, 1]
  )
  assert found.tolist() == [7, 1, 2, 1, 2, 1, 8]


def test_haystacks_have_the_tokens_that_are_asked_for():
  retrieval = retrieval_tasks.Retrieval(TEXT, [300, 700], 2)
  found = _examples(retrieval)
  for length in retrieval.lengths:
    for depth in retrieval_tasks.DEPTHS:
      for example in found[f'needle/{length}/{depth:g}']:
        assert len(example.context) == length
        text = BYTES.decode(example.context)
        (needle,) = FACT.finditer(text)
        assert needle[2] == example.codes[0]
        room = length - len(needle[0])
        assert abs(needle.start() - depth * room) <= length / 10
        rest = text.replace(needle[0], '')
        assert rest in (TEXT + TEXT) or not rest.isascii()
    for kind in ('chain', 'values'):
      for example in found[f'{kind}/{length}']:
        assert len(example.context) == length
        assert len(FACT.findall(BYTES.decode(example.context))) == 5


def test_the_gold_document_moves():
  for count, positions in retrieval_tasks.POSITIONS.items():
    retrieval = retrieval_tasks.Retrieval(TEXT, [400, count * 90], 2)
    found = _examples(retrieval)
    for position in positions:
      for example in found[f'documents_{count}/{position}']:
        text = BYTES.decode(example.context)
        documents = text.split('\nDocument ')[1:]
        assert [int(x.partition(':')[0]) for x in documents] == list(
          range(1, count + 1)
        )
        assert len(example.context) == count * 90
        gold = [i for i, x in enumerate(documents, 1) if example.codes[0] in x]
        assert gold == [position]
        # What is to choose from is in the context.
        assert all(choice in text for choice in example.choices)


def test_examples_are_a_function_of_text_lengths_and_seed():
  retrieval = retrieval_tasks.Retrieval(TEXT, [300], 2)
  plain = lambda x: [  # noqa: E731
    (e.task, e.context.tolist(), e.question, e.codes, e.choices)
    for e in x.examples(BYTES)
  ]
  first = plain(retrieval)
  assert first == plain(retrieval_tasks.Retrieval(TEXT, [300], 2))
  assert first != plain(retrieval_tasks.Retrieval(TEXT, [300], 2, seed=1))
  # More examples, and other lengths, leave the first ones as they are.
  more = plain(retrieval_tasks.Retrieval(TEXT, [300, 400], 3))
  assert all(x in more for x in first if 'documents' not in x[0])
  assert len({tuple(codes) for _, _, _, codes, _ in first}) == len(first)


def test_who_understands_the_text_finds_every_code():
  """A chain is followed to its end, and no question has two answers."""
  retrieval = retrieval_tasks.Retrieval(TEXT, [400], 3)
  for examples in _examples(retrieval).values():
    for example in examples:
      answer = _answer(BYTES.decode(example.context) + example.question)
      assert answer == ' and '.join(example.codes)
      assert len(set(example.choices)) == len(example.choices) == 4
      right = example.choices[0]
      assert all(code in right for code in example.codes)
  chain, values = (
    _examples(retrieval)[name][0] for name in ('chain/400', 'values/400')
  )
  assert len(chain.codes) == 1 and len(values.codes) == 3
  links = FACT.findall(BYTES.decode(chain.context))
  assert sum('-' not in value for _, value in links) == 2
  # The wrong answers give the codes of other things, or in another order.
  assert {len(x) for x in values.choices} == {len(values.choices[0])}


@pytest.mark.long
@pytest.mark.parametrize('kind', KINDS)
def test_scores_of_a_model(kind, models):
  retrieval = retrieval_tasks.Retrieval(TEXT, [256], 1)
  progress = []
  evaluation = retrieval_scores.RetrievalEvaluation(retrieval)
  evaluation.check(models[kind].stored)
  results = evaluation.scores(
    models[kind], 8, lambda *args: progress.append(args)
  )
  found, answers = results[:-15], results[-15:]
  assert answers[0].references[0] in answers[0].input
  assert answers[0].scores.keys() == set(retrieval_scores.METRICS)
  counts = {score.task: score.n for score in found}
  assert counts == dict(
    needle=5, documents_10=3, documents_20=5, chain=1, values=1
  ) | dict.fromkeys(retrieval.tasks(), 1)
  assert [x.metric for x in found[:3]] == list(retrieval_scores.METRICS)
  for score in found:
    assert score.n == len(score.scores)
    assert score.value == pytest.approx(np.mean(score.scores))
    assert set(score.scores) <= {0, 1} or score.metric != 'choice'
  assert progress[-1] == (75, 75)


def test_scores_of_one_who_finds_and_one_who_does_not(models):
  loaded = models['encoder_decoder']
  reader = loaded.stored.open_vocabularies().encoder
  retrieval = retrieval_tasks.Retrieval(TEXT, [260], 2)

  def measure(respond, retrieval=retrieval):
    """Scores of a model that answers and prefers what `respond` returns."""

    def run(requests):
      for i, request in reversed(list(enumerate(requests))):
        assert request.tokens[0] == reader.bos
        text = respond(reader.decode(request.tokens))
        yield i, types.SimpleNamespace(text=text)

    def score(pairs, *_):
      for context, continuation in pairs:
        said = respond(reader.decode(context)).split(' and ')
        told = re.findall('[0-9-]+', reader.decode(continuation))
        yield log_likelihoods.Scored(-float(said != told), False)

    fake = types.SimpleNamespace(
      stored=loaded.stored,
      engine=lambda rows: types.SimpleNamespace(run=run),
      score_tokens=score,
    )
    evaluation = retrieval_scores.RetrievalEvaluation(retrieval)
    found = evaluation.scores(fake, 8, lambda *_: None)
    scores = (x for x in found if isinstance(x, results_store.Score))
    return {(x.task, x.metric): x.value for x in scores}

  assert set(measure(_answer).values()) == {1}
  assert set(measure(lambda _: 'nothing').values()) == {0}
  half = measure(lambda text: _answer(text).partition(' and ')[0])
  assert half['needle', 'found'] == half['chain', 'choice'] == 1
  assert half['values', 'found'] == pytest.approx(1 / 3)
  assert half['values', 'rouge1'] == pytest.approx(1 / 3)
  assert half['values', 'choice'] == 0
  parts = measure(lambda text: _answer(text)[:5])
  assert parts['needle', 'found'] == 0
  assert parts['needle', 'rouge1'] == pytest.approx(2 / 3)
  needles = dataclasses.replace(retrieval, kinds=('needle',))
  tasks = {task for task, _ in measure(_answer, needles)}
  assert tasks == {'needle', *needles.tasks()}
  assert {x.partition('/')[0] for x in needles.tasks()} == {'needle'}


def test_recall_is_that_of_rouge_score():
  scorers = pytest.importorskip(
    'rouge_score.rouge_scorer', reason="needs pip install -e '.[eval]'"
  )
  scorer = scorers.RougeScorer(['rouge1'])
  for text, reference in (
    ('It is 12-34-56.', '12-34-56'),
    ('12-34, or 34-34', '34-12-34 34'),
    ('', '12-34-56'),
    ('The RED house', 'the red-brown house, the'),
  ):
    found = retrieval_scores.rouge1_recall(text, reference)
    assert found == scorer.score(reference, text)['rouge1'].recall


def test_the_report_has_heat_maps_and_a_table(tmp_path):
  values = {'needle/64/0': 0.0, 'needle/64/1': 1.0, 'needle/128/0': 0.25}
  values |= {'needle/128/1': 0.5, 'documents_10/5': 0.75, 'needle': 0.4}
  scores = {
    name: [
      results_store.Score(task, metric, value, None, 1)
      for task, value in values.items()
      for metric in retrieval_scores.METRICS
    ]
    for name in ('a', 'b')
  }
  scores['b'].append(results_store.Score('wsc/right', 'acc', 0.5, None, 1))
  kept = retrieval_scores.without_cells(scores)
  assert {x.task for x in kept['b']} == {'needle', 'wsc/right'}
  (first, *_, last) = rows = retrieval_scores.rows(scores)
  assert len(rows) == 5 and first['task'] == 'needle/64/0'
  assert last['a: found, rouge1, choice'] == '0.75, 0.75, 0.75'
  needles = retrieval_scores.grids(scores)
  assert needles['b']['choice'] == {
    '64/0': 0.0,
    '64/1': 1.0,
    '128/0': 0.25,
    '128/1': 0.5,
  }
  report = dict(title='x', notes=[], environment={}, quality=('', {}))
  report |= dict(
    per_query={},
    needles=needles,
    attention={},
    calibration={},
    tables={'Retrieval': rows},
  )
  html_report.write_evaluation(report, tmp_path)
  assert (tmp_path / 'needles.png').read_bytes().startswith(b'\x89PNG')
  page = (tmp_path / 'report.html').read_text()
  assert 'alt="needles by depth and length"' in page
  assert '<td>documents_10/5</td>' in page


@pytest.mark.parametrize('kind', KINDS)
def test_lengths_are_checked_before_a_model_is_read(kind, models, monkeypatch):
  stored = models[kind].stored
  retrieval = retrieval_tasks.Retrieval(TEXT, [12, 500], 1)
  with pytest.raises(errors.UserError, match='has 12 tokens, and 1 needles'):
    retrieval_scores.RetrievalEvaluation(retrieval).check(stored)
  retrieval = retrieval_tasks.Retrieval(TEXT, [300, 700], 1)
  # Its files state no limit.
  retrieval_scores.RetrievalEvaluation(retrieval).check(stored)
  # The longest prompt has 2077; a decoder-only model answers at positions
  # after it.
  retrieval = retrieval_tasks.Retrieval(TEXT, [300, 1940], 1)
  stated = {'max_position_embeddings': 2100}
  monkeypatch.setattr(
    pretrained_files, 'config_fields', lambda _: {'decoder': stated}
  )
  if kind == 'encoder_decoder':
    retrieval_scores.RetrievalEvaluation(retrieval).check(stored)
    return
  message = 'values/1940 needs.*room for 2052'
  with pytest.raises(errors.UserError, match=message):
    retrieval_scores.RetrievalEvaluation(retrieval).check(stored)


@pytest.mark.parametrize(
  'source, lengths, message',
  [
    ('text:{folder}/*.txt', '256,x', "'x' at column 5 must be a number"),
    ('text:{folder}/*.txt', '0', "'0' at column 1 must be a number"),
    ('text:{folder}/*.md', '256', 'no file matches'),
    ('text:{folder}/empty.txt', '256', 'empty.txt is empty'),
    ('chat:{folder}/*.txt', '256', 'has no plain text'),
    ('{folder}/a.txt', '256', 'not a source; the forms are'),
  ],
)
def test_bad_input(source, lengths, message, tmp_path):
  (tmp_path / 'a.txt').write_text('Some text.')
  (tmp_path / 'empty.txt').write_text(' \n')
  with pytest.raises(errors.UserError, match=message):
    retrieval_tasks.read(source.format(folder=tmp_path), lengths, 'needle')
  source = f'text:{tmp_path}/*.txt'
  with pytest.raises(errors.UserError, match="'needles' at column 7 must be o"):
    retrieval_tasks.read(source, '300', 'chain,needles')
  read = retrieval_tasks.read(source, '300,200', 'chain,documents_20', 4)
  assert (read.lengths, read.count) == ([200, 300], 4)
  assert read.kinds == ('chain', 'documents_20')
  same = retrieval_tasks.read(source, '200,300', 'documents_20,chain,chain', 4)
  assert same.options() == read.options()
  assert 'kinds' not in retrieval_tasks.Retrieval('text', [300]).options()
  assert read.text.startswith('Some text.')
