"""Look-ups made from the standard library."""

import collections
import json

from encdec_adapt.data.sources import text_sources


def test_the_answer_stands_in_the_table_behind_the_name_that_is_asked():
  source = text_sources.open_source('lookups')
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
    assert 180 <= len(answer) <= 240
    answers.append(answer)
  assert len(set(answers)) == len(answers)
  shard = [d.id for d in source.documents(shard_index=1, num_shards=3)]
  assert shard == [d.id for d in documents[1::3]]
