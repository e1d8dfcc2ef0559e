"""Sources that a user's module registers, as those of configs/."""

import collections
import json

import pytest

from encdec_adapt.base import errors
from encdec_adapt.data.making import process_pool
from encdec_adapt.data.sources import mixtures, text_sources

MODULE = ('encdec_adapt.configs.lookups',)


def first_document(name):
  """Opens a source as a shard does, with the modules of its record set."""
  (part,) = mixtures.open_parts(name, seqio_modules=MODULE, kind='pairs')
  return next(part.source.documents()).id


@pytest.mark.long
def test_worker_processes_import_the_module_of_a_source():
  # Two jobs, for which fresh processes start that have imported nothing.
  jobs = ['lookups', 'lookups@2']
  ids = dict(process_pool.run_jobs(first_document, jobs, workers=2))
  document = next(text_sources.open_source('lookups', 0, MODULE).documents())
  assert ids == dict.fromkeys(jobs, document.id)


def test_a_source_that_no_module_registers_is_refused():
  with pytest.raises(errors.UserError, match='forms are .*text:GLOB.*modules'):
    text_sources.open_source('ledgers', 0, MODULE)
  with pytest.raises(errors.UserError, match="'no_such' cannot be imported"):
    text_sources.open_source('ledgers', 0, ('no_such',))
  with pytest.raises(errors.UserError, match="'length=9' .*long, short"):
    text_sources.open_source('lookups:length=9', 0, MODULE)
  with pytest.raises(errors.UserError, match='table of all, asked, none'):
    text_sources.open_source('lookups:table=half', 0, MODULE)


@pytest.mark.long
@pytest.mark.parametrize(
  'name, shortest, longest',
  [('lookups', 180, 240), ('lookups:length=short', 90, 120)],
)
def test_the_answer_stands_in_the_table_behind_the_name_that_is_asked(
  name, shortest, longest
):
  source = text_sources.open_source(name, 0, MODULE)
  documents = list(source.documents())
  assert len(documents) > 1000
  groups = collections.Counter(d.id.rpartition('::')[0] for d in documents)
  assert set(groups.values()) == {4}
  answers = []
  for document in documents:
    inputs, answer = json.loads(document.text)
    *rows, question = inputs.splitlines()
    name = question.removeprefix('What is ').removesuffix('?')
    assert len(rows) == 4 and f'{name}: {answer}' in rows
    assert shortest <= len(answer) <= longest
    answers.append(answer)
  assert len(set(answers)) == len(answers)
  shard = [d.id for d in source.documents(shard_index=1, num_shards=3)]
  assert shard == [d.id for d in documents[1::3]]


@pytest.mark.long
@pytest.mark.parametrize('table', ['asked', 'none'])
def test_a_floor_has_the_questions_without_the_rest_of_the_table(table):
  name = 'lookups:length=short'
  sources = [
    text_sources.open_source(x, 0, MODULE)
    for x in (name, f'{name},table={table}')
  ]
  pairs = zip(*(list(x.documents()) for x in sources), strict=True)
  for whole, floor in pairs:
    assert whole.id == floor.id
    (inputs, answer), (shown, floor_answer) = (
      json.loads(x.text) for x in (whole, floor)
    )
    assert answer == floor_answer
    question = inputs.splitlines()[-1]
    row = f'{question.removeprefix("What is ").removesuffix("?")}: {answer}'
    rows = [row] if table == 'asked' else []
    assert shown.splitlines() == [*rows, question]


def test_a_question_on_documents_asks_for_the_code_in_one_of_them():
  module = ('encdec_adapt.configs.documents',)
  source, passages = (
    text_sources.open_source(x, 0, module)
    for x in ('documents', 'documents:passages')
  )
  pairs = list(zip(source.documents(), passages.documents(), strict=True))
  positions, answers = collections.Counter(), collections.Counter()
  for whole, apart in pairs:
    question, code, fields = json.loads(apart.text)
    thing = question.removeprefix('What is the code of ').removesuffix('?')
    facts = fields['documents']
    assert len(set(facts)) == 6
    positions[facts.index(f'The code of {thing} is {code}.')] += 1
    answers[code] += 1
    inputs = '\n'.join([*facts, question, ''])
    assert (whole.id, json.loads(whole.text)) == (apart.id, [inputs, code])
  assert len(pairs) == 12_000 and min(positions.values()) > 1800
  assert answers.most_common(1)[0][1] < 5
  shard = [x.id for x in source.documents(shard_index=1, num_shards=3)]
  assert shard == [x.id for x, _ in pairs[1::3]]
  assert source.fingerprint() != passages.fingerprint()
  with pytest.raises(errors.UserError, match="'4' at column 11 must be pass"):
    text_sources.open_source('documents:4', 0, module)
