"""Rows of JSONL in prompt templates."""

import json
import pathlib

import pytest

from encdec_adapt.base import errors
from encdec_adapt.data.sources import text_sources

TEMPLATES = """
dataset: tiny
templates:
  b: !Template
    name: second
    answer_choices: 'Yes ||| No'
    jinja: '{{a}}, {{b}}? ||| {% if label != -1 %}
      {{- answer_choices[label] }}{% endif %}'
    metadata: !TemplateMetadata
      languages: [en]
  a: !Template
    name: first
    answer_choices: null
    jinja: "{{ ['x', 'y'] | choice }} {{b}} |||
      {{ [1, 2, 2] | most_frequent | join }}"
"""
ROWS = [{'a': 'A', 'b': 'B', 'label': 1}, {'a': 'C', 'b': 'D', 'label': -1}]


@pytest.fixture
def files(tmp_path):
  (tmp_path / 't.yaml').write_text(TEMPLATES)
  (tmp_path / 'rows.jsonl').write_text('\n'.join(map(json.dumps, ROWS)))
  return f'prompts:{tmp_path}/rows.jsonl#{tmp_path}/t.yaml'


def test_every_row_in_every_template(files):
  source = text_sources.open_source(files)
  pairs = {doc.id: json.loads(doc.text) for doc in source.documents()}
  assert pairs.pop('rows.jsonl:0::second') == ['A, B?', 'No']
  # Label -1 gives no targets in the second template, so it is no example.
  assert set(pairs) == {'rows.jsonl:0::first', 'rows.jsonl:33::first'}
  inputs, targets = pairs['rows.jsonl:0::first']
  assert inputs in ('x B', 'y B') and targets == '2'
  reread = text_sources.open_source(files)
  assert [*reread.documents()] == [*source.documents()]
  assert source.fingerprint() == reread.fingerprint()


def test_bars_in_a_row_are_text(tmp_path):
  (tmp_path / 't.yaml').write_text(
    'templates: {a: {name: a, jinja: "{% if n %}{{q}} ||| {{nested[0].x}}, '
    '{{answer_choices[n]}}{% endif %}", '
    'answer_choices: \'{{choices | join("|||")}}\'}}'
  )
  row = {'n': 1, 'q': 'a|||b', 'nested': [{'x': 'c ||| d'}]}
  row['choices'] = ['no|||', 'x ||| yes']
  (tmp_path / 'a.jsonl').write_text(json.dumps(row))
  name = f'prompts:{tmp_path}/a.jsonl#{tmp_path}/t.yaml'
  (document,) = text_sources.open_source(name).documents()
  assert json.loads(document.text) == ['a|||b', 'c ||| d, x ||| yes']


def test_templates_and_rows_that_do_not_fit_are_named(files, tmp_path):
  (tmp_path / 'rows.jsonl').write_text('{"a": 1, "label": 0}')
  with pytest.raises(
    errors.UserError, match="line 1: the template 'first'.*'b'"
  ):
    list(text_sources.open_source(files).documents())
  (tmp_path / 't.yaml').write_text('templates: 3')
  with pytest.raises(errors.UserError, match='not a file of prompt templates'):
    text_sources.open_source(files)
  with pytest.raises(errors.UserError, match='must be a file of templates'):
    text_sources.open_source(files.partition('#')[0])


def test_published_templates_render(request, tmp_path):
  shared = pathlib.Path(request.config.rootpath).parent / 'shared' / 'data'
  templates = shared / 'templates_promptsource' / 'templates'
  rows = shared / 'eval_superglue' / 'RTE' / 'train.jsonl'
  files = sorted(templates.glob('super_glue__rte*.yaml'))
  if not files or not rows.is_file():
    pytest.skip('the published templates are not on this machine')
  # The templates take labels as numbers.
  labels = ('entailment', 'not_entailment')
  lines = [json.loads(line) for line in rows.read_text().splitlines()]
  numbered = [line | {'label': labels.index(line['label'])} for line in lines]
  file = tmp_path / 'rte.jsonl'
  file.write_text('\n'.join(map(json.dumps, numbered)))
  source = text_sources.open_source(f'prompts:{file}#{files[0]}')
  pairs = [json.loads(doc.text) for doc in source.documents()]
  assert len(pairs) == 32 * 10
  assert {pair[1].lower() for pair in pairs} >= {'yes', 'no'}
