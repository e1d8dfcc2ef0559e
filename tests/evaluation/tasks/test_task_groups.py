"""Tasks through lm-eval and prompt templates, on files made here."""

import dataclasses
import json
import pathlib
import time

import jax
import numpy as np
import pytest

from encdec_adapt.base import errors
from encdec_adapt.cluster import code_limits
from encdec_adapt.evaluation.results import results_store
from encdec_adapt.evaluation.tasks import task_groups as tasks
from encdec_adapt.inference import log_likelihoods
from encdec_adapt.objectives import objective_names
from encdec_adapt.stored import pretrained_files

_REASON = "needs lm-eval: pip install -e '.[eval]'"
instance = pytest.importorskip('lm_eval.api.instance', reason=_REASON)

from encdec_adapt.evaluation.tasks import lm_eval_adapter  # noqa: E402


def _content(task, data, kind, metric, **fields):
  """A task in the format of lm-eval."""
  return {
    'task': task,
    'dataset_path': 'json',
    'dataset_kwargs': {'data_files': {'test': f'{data}.jsonl'}},
    'test_split': 'test',
    'output_type': kind,
    'metric_list': [{'metric': metric}],
    'doc_to_target': '{{word}}',
    **fields,
  }


CHOICE = _content(
  *('colours', 'colours', 'multiple_choice', 'acc'),
  doc_to_text='The {{thing}} is',
  doc_to_choice='{{colours}}',
  doc_to_target='{{answer}}',
)
GENERATE = _content(
  *('echo', 'echo', 'generate_until', 'exact_match'),
  doc_to_text='Say {{word}}:',
  generation_kwargs={'until': ['\n'], 'max_gen_toks': 4},
  filter_list=[
    {'name': name, 'filter': [{'function': x} for x in (*how, 'take_first')]}
    for name, how in (('none', ()), ('upper', ('uppercase',)))
  ],
)
ROLLING = _content(
  'prose', 'echo', 'loglikelihood_rolling', 'bits_per_byte', doc_to_text=''
)
COLOURS = [
  {'thing': thing, 'colours': [' blue', ' green', ' red'], 'answer': i}
  for i, thing in enumerate(('sky', 'grass', 'rose'))
]
ECHO = [{'word': 'quick brown fox'}, {'word': 'lazy dog'}]
PROMPTED = {'task': 'wsc', 'data': 'rows.jsonl', 'templates': 'p3.yaml'}
PROMPTED['row'] = {'label': "{{ ['no', 'yes'].index(label) }}"}
TEMPLATES = """
templates:
  a: !Template
    answer_choices: No ||| Yes
    jinja: "{{text}} Is it true? ||| {{answer_choices[label]}}"
    name: left
  b: !Template
    answer_choices: wrong ||| right
    jinja: "{{text}} This is ||| {{answer_choices[label]}}"
    name: right
  c: !Template
    answer_choices: null
    jinja: "{{text}} Why? ||| Because."
    name: why
"""
ROWS = [{'text': 'The fox ||| is quick.', 'label': 'yes'}]
ROWS.append({'text': 'The dog is quick.', 'label': 'no'})


def _write(folder, **changes):
  """A folder of local tasks."""
  contents = {
    'colours.yaml': CHOICE,
    'echo.yaml': GENERATE,
    'prose.yaml': ROLLING,
    'wsc.yaml': PROMPTED,
    'p3.yaml': TEMPLATES,
    'colours.jsonl': COLOURS,
    'echo.jsonl': ECHO,
    'rows.jsonl': ROWS,
    **changes,
  }
  for name, content in contents.items():
    if isinstance(content, list):
      content = ''.join(json.dumps(row) + '\n' for row in content)
    elif not isinstance(content, str):
      content = json.dumps(content)  # JSON is YAML.
    (folder / name).write_text(content)
  return str(folder)


KINDS = ['encoder_decoder', 'decoder_only']


def _run(loaded, planned, rows=8, report=lambda done, total: None):
  """Scores of the tasks and groups of a plan, and generated answers."""
  found, answers = [], []
  for task in planned.tasks:
    for result in task.scores(loaded, rows, report):
      is_score = isinstance(result, results_store.Score)
      (found if is_score else answers).append(result)
  return [*found, *planned.group_scores(found)], answers


@pytest.mark.long
@pytest.mark.parametrize('kind', KINDS)
def test_scores_are_those_of_the_logits(kind, models):
  loaded = models[kind]
  rng = np.random.default_rng(0)
  pairs = [
    log_likelihoods.Pair(
      [2, *rng.integers(3, 300, n)], list(rng.integers(3, 300, m))
    )
    for n, m in ((4, 3), (20, 40), (1, 1), (9, 17), (60, 2))
  ]
  # Continuations of one context, which an encoder reads once.
  pairs += [log_likelihoods.Pair(pairs[0].context, [i, 7]) for i in (5, 6)]
  pairs += [log_likelihoods.Pair(pairs[3].context, [9])]
  found = loaded.score_tokens(pairs, batch_size=4)
  for i, (context, continuation) in enumerate(pairs):
    if kind == 'decoder_only':
      logits = loaded.logits(np.array([[*context, *continuation[:-1]]]))
      logits = logits[0, len(context) - 1 :]
    else:
      decoder = np.array([[2, *continuation[:-1]]])
      logits = loaded.logits(decoder, np.array([context]))[0]
    log_probs = np.asarray(jax.nn.log_softmax(logits))
    want = log_probs[np.arange(len(continuation)), continuation].sum()
    assert found[i].log_prob == pytest.approx(want, abs=1e-3)
    assert found[i].greedy == (log_probs.argmax(1) == continuation).all()
  # The likeliest continuation of one token is greedy.
  best = log_likelihoods.Pair(pairs[-1].context, [int(log_probs.argmax(1)[0])])
  assert loaded.score_tokens([best])[0].greedy


@pytest.mark.long
@pytest.mark.parametrize('kind', KINDS)
def test_a_folder_of_tasks(kind, models, tmp_path):
  progress = []
  planned = tasks.plan([], _write(tmp_path))
  scores, answers = _run(
    models[kind], planned, report=lambda *args: progress.append(args)
  )
  found = {(score.task, score.metric): score for score in scores}
  colours = found['colours', 'acc']
  assert colours.n == len(colours.scores) == 3
  assert colours.value == pytest.approx(np.mean(colours.scores))
  assert colours.stderr is not None
  assert found['echo', 'exact_match'].n == 2
  # Choices and whole texts are not generated.
  assert [(x.task, x.input, x.references) for x in answers] == [
    ('echo', f'Say {row["word"]}:', [row['word']]) for row in ECHO
  ]
  scores = {'exact_match': 0, 'exact_match,upper': 0}
  assert all(x.answer and x.scores == scores for x in answers)
  assert found['prose', 'bits_per_byte'].value > 0
  # Two templates have choices; one, in the middle, is both.
  accuracies = [found[f'wsc/{name}', 'acc'].value for name in ('right', 'left')]
  assert found['wsc', 'median'].value == np.median(accuracies)
  assert found['wsc', 'median'].n == len(ROWS)
  # The last of every task's requests.
  assert sum(done == total for done, total in progress) == 4
  assert (9, 9) in progress


def test_likelihoods_are_of_the_model(models, tmp_path):
  """The answer of a task is the likeliest choice by our own scores."""
  loaded = models['encoder_decoder']
  adapter = lm_eval_adapter.Adapter(loaded)
  texts = [('The sky is ', 'blue'), ('', 'green'), ('The rose is', ' red')]
  requests = [instance.Instance('loglikelihood', {}, t, 0) for t in texts]
  found = adapter.loglikelihood(requests, disable_tqdm=True)
  reader = loaded.stored.open_vocabularies().decoder
  # Spaces go to the continuation, and without a context there is BOS.
  framed = [('The sky is', ' blue'), ('', 'green'), ('The rose is', ' red')]
  pairs = [
    log_likelihoods.Pair([2, *reader.encode(a)], list(reader.encode(b)))
    for a, b in framed
  ]
  want = loaded.score_tokens(pairs)
  for i, (log_prob, greedy) in enumerate(found):
    assert log_prob == pytest.approx(want[i].log_prob, abs=1e-4)
    assert greedy == want[i].greedy


def _force(loaded, monkeypatch):
  """Makes the decoder write token 7 first."""
  opened = loaded.stored.require_vocabularies()
  ids = dataclasses.replace(opened.decoder.ids, forced=7)
  monkeypatch.setattr(opened.decoder, 'ids', ids)
  monkeypatch.setattr(
    type(loaded.stored), 'require_vocabularies', lambda _: opened
  )


@pytest.mark.parametrize('kind', KINDS)
def test_the_opening_of_targets_is_read_and_not_scored(
  kind, models, monkeypatch
):
  loaded, context = models[kind], [2, 5, 6]
  pairs = [log_likelihoods.Pair(context, x) for x in ([7, 8, 9], [7])]
  total, opening = loaded.score_tokens(pairs)
  read = ([[*context, 7]],) if kind == 'decoder_only' else ([[2, 7]], [context])
  best = int(loaded.logits(*map(np.array, read))[0, -1].argmax())
  _force(loaded, monkeypatch)
  pairs = [log_likelihoods.Pair(context, x) for x in ([8, 9], [best])]
  rest, greedy = loaded.score_tokens(pairs)
  want = total.log_prob - opening.log_prob
  assert rest.log_prob == pytest.approx(want, abs=1e-4)
  assert greedy.greedy and not opening.greedy


@pytest.mark.parametrize('kind', KINDS)
def test_a_separator_joins_context_and_choice(kind, models):
  loaded = models[kind]
  reader = loaded.stored.open_vocabularies().decoder
  texts = [('Is it so? ', 'Yes'), ('Is it so? ', 'No')]
  is_pair = kind == 'encoder_decoder'
  between = [] if is_pair else reader.encode('\n')
  # Encoders have contexts without the space at their end, as lm-eval does.
  split = [(a.rstrip(), ' ' + b) if is_pair else (a, b) for a, b in texts]
  pairs = [
    log_likelihoods.Pair(
      [2, *reader.encode(a), *between], list(reader.encode(b))
    )
    for a, b in split
  ]
  want = loaded.score_tokens(pairs)
  objectives = objective_names.parse(r'pairs:separator="\n"')
  stored = dataclasses.replace(loaded.stored, objectives=objectives)
  of_run = dataclasses.replace(loaded, stored=stored)
  for model, separator in ((loaded, '\n'), (of_run, None)):
    adapter = lm_eval_adapter.Adapter(model)
    for i, (log_prob, _) in enumerate(adapter.score_choices(texts, separator)):
      assert log_prob == pytest.approx(want[i].log_prob, abs=1e-4)


@pytest.mark.parametrize('kind', KINDS)
def test_tasks_have_the_prefix_of_the_run_where_it_is_wanted(kind, models):
  objectives = objective_names.parse('pairs:prefix=Say: ')
  stored = dataclasses.replace(models[kind].stored, objectives=objectives)
  loaded = dataclasses.replace(models[kind], stored=stored)
  question = tasks.prompted_task.Question('a fox', [' is', ' was'], 0)
  longer = dataclasses.replace(question, context='Say: a fox')

  def measure(question, prefix):
    """Log-likelihoods of the choices, and the options of the results."""
    content = tasks.prompted_task.PromptedTask('t', {'p': [question]}, None)
    task, found = tasks.Task('t', content, prefix=prefix), []
    with pytest.MonkeyPatch.context() as patch:
      kept = lambda _, scores: found.extend(scores) or []  # noqa: E731
      patch.setattr(tasks.prompted_task.PromptedTask, 'score', kept)
      task.scores(loaded, 8, lambda *_: None)
    return found, task.options()

  (plain, options), (want, _) = measure(question, ''), measure(longer, '')
  found, of_run = measure(question, None)
  assert found == pytest.approx(want, abs=1e-4)
  assert plain != pytest.approx(want, abs=1e-4)
  assert 'prefix' not in options and of_run == options | {'prefix': None}
  several = objective_names.parse('pairs:prefix=a | pairs:prefix="b, c: "')
  several = dataclasses.replace(stored, objectives=several)
  with pytest.raises(errors.UserError, match="--prefix=a, --prefix='b, c: '"):
    tasks.Task('t', None, prefix=None).check(several)
  tasks.Task('t', None, prefix='').check(several)


@pytest.mark.parametrize('kind', KINDS)
def test_continuations_have_at_most_the_positions_of_the_model(
  kind, models, monkeypatch
):
  text, loaded = ' a lazy dog', models[kind]
  limit = len(loaded.stored.open_vocabularies().decoder.encode(text))
  stated = {'decoder': {'max_position_embeddings': limit}}
  if kind == 'encoder_decoder':
    stated['encoder'] = {'max_position_embeddings': 64}
  monkeypatch.setattr(pretrained_files, 'config_fields', lambda _: stated)
  adapter = lm_eval_adapter.Adapter(loaded)
  longest, too_long, rolling = (
    instance.Instance('loglikelihood', {}, texts, 0)
    for texts in (('The sky is', text), ('', f'{text}s'), (text * 3,))
  )
  assert len(adapter.loglikelihood([longest])) == 1
  assert len(adapter.loglikelihood_rolling([rolling])) == 1
  with pytest.raises(errors.UserError, match="' a lazy dogs' has .* positions"):
    adapter.loglikelihood([too_long])
  # The opening of targets takes a position.
  _force(loaded, monkeypatch)
  adapter = lm_eval_adapter.Adapter(loaded)
  with pytest.raises(errors.UserError, match="' a lazy dog' has .* positions"):
    adapter.loglikelihood([longest])
  sizes = []

  def score(pairs):
    sizes.extend(len(x.continuation) for x in pairs)
    return [log_likelihoods.Scored(0.0, False)] * len(pairs)

  monkeypatch.setattr(adapter, '_score', score)
  adapter.loglikelihood_rolling([rolling])
  # A decoder-only model also reads the context.
  assert max(sizes) == (limit - 1) // (1 if kind == 'encoder_decoder' else 2)


def test_rolling_scores_every_token_once(models, monkeypatch):
  monkeypatch.setattr(lm_eval_adapter, 'WINDOW', 7)
  text = 'The quick brown fox jumps over the lazy dog.'
  for loaded in models.values():
    adapter = lm_eval_adapter.Adapter(loaded)
    seen = []

    def score(pairs, seen=seen):
      seen += pairs
      return [
        log_likelihoods.Scored(-1.0 * len(p.continuation), False) for p in pairs
      ]

    monkeypatch.setattr(adapter, '_score', score)
    request = instance.Instance('loglikelihood_rolling', {}, (text,), 0)
    (total,) = adapter.loglikelihood_rolling([request])
    tokens = adapter.tok_encode(text, add_special_tokens=False)
    assert [t for pair in seen for t in pair.continuation] == tokens
    assert total == -len(tokens)
    assert seen[0].context == [2]
    assert seen[2].context == [2, *tokens[7:14]]


def test_generated_programs_are_a_local_task(models, tmp_path):
  """A task file may name a function of the user's, which runs programs."""
  (tmp_path / 'code.py').write_text(
    'from encdec_adapt.cluster import code_limits\n'
    'def check(doc, answers):\n'
    '  program = doc["start"] + "\\n" + doc["test"]\n'
    '  return {"pass": float(code_limits.passes(program))}\n'
  )
  content = _content(
    *('code', 'code', 'generate_until', 'pass'),
    doc_to_text='{{start}}',
    doc_to_target='{{test}}',
    generation_kwargs=GENERATE['generation_kwargs'],
    metric_list=[{'metric': 'pass', 'aggregation': 'mean'}],
  )
  (tmp_path / 'code.yaml').write_text(
    json.dumps(content)[:-1] + ', "process_results": !function code.check}'
  )
  rows = [{'start': 'x = 1', 'test': f'assert x == {i}'} for i in range(2)]
  (tmp_path / 'code.jsonl').write_text(
    ''.join(json.dumps(row) + '\n' for row in rows)
  )
  loaded = models['encoder_decoder']
  (score,), _ = _run(loaded, tasks.plan([], str(tmp_path), allow_code=True))
  assert (score.metric, score.scores) == ('pass', (0, 1))
  with pytest.raises(errors.UserError, match='give --allow_code'):
    _run(loaded, tasks.plan([], str(tmp_path)))


def test_a_filter_is_a_part_of_a_metric():
  answer = {
    'results': {'gsm8k': {'exact_match,strict-match': 0.5, 'alias': 'x'}},
    'groups': {'mmlu': {'acc,none': 0.25}},
  }
  found = {(s.task, s.metric): s.value for s in tasks._scores(answer)}
  assert found == {
    ('gsm8k', 'exact_match,strict-match'): 0.5,
    ('mmlu', 'acc'): 0.25,
  }
  asked = {(m.task, m.metric) for m in tasks.GROUPS['pt']}
  assert asked >= set(found)


def test_scores_have_the_groups_of_their_documents():
  samples = [
    {'doc_id': i, 'doc': {'document_group': x}, 'acc': i % 2}
    for i, x in enumerate('aab')
  ]
  answer = {
    'results': {'ours': {'acc,none': 1 / 3}},
    'samples': {'ours': samples},
  }
  (score,) = tasks._scores(answer)
  assert (score.scores, score.groups) == ((0, 1, 0), ('a', 'a', 'b'))
  del samples[0]['doc']['document_group']
  (score,) = tasks._scores(answer)
  assert score.groups == ()


def test_groups_are_of_local_tasks_first(models, tmp_path, monkeypatch):
  monkeypatch.setattr(tasks, '_hub_tasks', frozenset)
  folder = _write(tmp_path)
  planned = tasks.plan(['t0'], folder)
  assert [task.name for task in planned.tasks] == ['wsc']
  assert 'cb' in planned.absent
  scores, _ = _run(models['encoder_decoder'], planned)
  assert scores[-1].task == 't0' and scores[-1].metric == 'mean of 1'
  sizes = {name: len(group) for name, group in tasks.GROUPS.items()}
  assert sizes == {'pt': 22, 'it': 10, 'eai': 31, 't0': 11}


def test_a_task_of_the_hub_is_not_lost_to_one_with_templates(monkeypatch):
  everywhere = {m.task for group in tasks.GROUPS.values() for m in group}
  monkeypatch.setattr(tasks, '_hub_tasks', lambda: frozenset(everywhere))
  alone, both = tasks.plan(['eai']), tasks.plan(['eai', 't0'])
  assert len(alone.tasks) == 31 and not alone.absent
  assert both.tasks == alone.tasks
  assert both.absent == sorted(m.task for m in tasks.GROUPS['t0'])
  planned = tasks.plan(['hellaswag', 't0'])
  assert [task.name for task in planned.tasks] == ['hellaswag']
  with pytest.raises(errors.UserError, match="there is no task 'anli_r1'"):
    tasks.plan(['t0'])


def test_programs_run_apart_and_only_when_asked_for(tmp_path):
  with pytest.raises(errors.UserError, match='give --allow_code'):
    code_limits.passes('pass')
  with code_limits.allowed(True):
    assert code_limits.passes('assert sum([1, 2]) == 3')
    assert not code_limits.passes('assert sum([1, 2]) == 4')
    assert not code_limits.passes('while True: pass', seconds=1)
    assert not code_limits.passes('x = bytearray(1 << 31)', megabytes=512)
    place = tmp_path / 'written'
    code_limits.passes(f'open({str(place)!r}, "wb").write(b"x" * (2 << 20))')
    assert place.stat().st_size <= 1 << 20
    # Neither an early exit nor a child outlives the tests.
    assert not code_limits.passes('import sys; sys.exit(0)')
    assert not code_limits.passes('import os; os._exit(0)')
    late = tmp_path / 'late'
    child = f'import time; time.sleep(1); open({str(late)!r}, "w")'
    code_limits.passes(
      f'import subprocess, sys; subprocess.Popen([sys.executable, "-c",'
      f' {child!r}])'
    )
    time.sleep(1.5)
    assert not late.exists()
    # Not within this process's folder or environment.
    program = 'import os; assert not os.listdir() and len(os.environ) < 4'
    assert code_limits.passes(program)


@pytest.mark.parametrize(
  'names, changes, message',
  [
    (['nothing'], {}, "there is no task 'nothing'; put a task file"),
    ([], {'echo.jsonl': ''}, 'echo.jsonl is empty'),
    (
      [],
      {'echo.jsonl': '{"word": "a"}\n{"wort": 1}'},
      "line 2 has no field 'wo",
    ),
    ([], {'echo.jsonl': '{"word": "a"}\n{'}, 'echo.jsonl, line 2 is not JSON'),
    ([], {'echo.jsonl': '3'}, 'line 1 must be a JSON object'),
    (
      [],
      {'echo.yaml': {'task': 'echo'}},
      r"fields \['dataset_path', 'doc_to_t",
    ),
    ([], {'echo.yaml': {**GENERATE, 'test_split': 'x'}}, "test_split is 'x'"),
    ([], {'echo.yaml': {**GENERATE, 'dataset_path': 'x'}}, 'not local'),
    ([], {'two.yaml': CHOICE}, "a second task is named 'colours'"),
    ([], {'wsc.yaml': {'task': 'w', 'templates': 'p3.yaml'}}, r"\['data'\]"),
    ([], {'rows.jsonl': '{"text": "a"}'}, 'line 1: the template .* rendered'),
    ([], {'p3.yaml': 'x: 1'}, 'is not a file of prompt templates'),
    ([], {'p3.yaml': 'templates: {}'}, 'no template gives a question'),
    ([], {'colours.yaml': '{'}, 'colours.yaml is not YAML'),
  ],
)
def test_bad_tasks_are_named(names, changes, message, tmp_path, monkeypatch):
  monkeypatch.setattr(tasks, '_hub_tasks', frozenset)
  with pytest.raises(errors.UserError, match=message):
    tasks.plan(names, _write(tmp_path, **changes))
  with pytest.raises(errors.UserError, match='empty has no task'):
    tasks.plan([], str(tmp_path / 'empty'))


def test_data_of_the_hub_need_a_folder(models, monkeypatch):
  class Manager:
    """A task manager without a network."""

    def load(self, _):
      raise ConnectionError('no route to the hub')

  planned = tasks.Plan([tasks.Task('boolq', None, 0)])
  monkeypatch.setattr('lm_eval.tasks.TaskManager', lambda **_: Manager())
  with pytest.raises(errors.UserError, match='boolq.*no route.*folder'):
    _run(models['encoder_decoder'], planned)


DATA = pathlib.Path(__file__).resolve().parents[4] / 'shared' / 'data'
# Fields of P3's templates from those of the local files.
LOCAL = {
  'cb': (
    'eval_superglue/CB/val.jsonl',
    'super_glue__cb',
    {'label': "{{ ['entailment','contradiction','neutral'].index(label) }}"},
    15,
  ),
  'copa': ('eval_superglue/COPA/val.jsonl', 'super_glue__copa', {}, 12),
  'rte': (
    'eval_superglue/RTE/val.jsonl',
    'super_glue__rte',
    {'label': "{{ ['entailment', 'not_entailment'].index(label) }}"},
    10,
  ),
  'wsc': (
    'eval_superglue/WSC/val.jsonl',
    'super_glue__wsc.fixed',
    {
      'label': '{{ label | int }}',
      **{
        f'span{i}_{part}': f'{{{{ target.span{i}_{part} }}}}'
        for i in (1, 2)
        for part in ('text', 'index')
      },
    },
    10,
  ),
  'hellaswag': (
    'eval_hellaswag/hellaswag_val_1500.jsonl',
    'hellaswag',
    {
      'ctx_a': '{{ ctx }}',
      'ctx_b': '{{ "" }}',
      'label': '{{ label | string }}',
      'activity_label': '{{ ctx.split(":")[0] }}',
    },
    4,
  ),
  'winogrande': (
    'eval_commonsense/winogrande.jsonl',
    'winogrande__winogrande_xl',
    {
      'sentence': '{{ question }}',
      'option1': '{{ choices[0] }}',
      'option2': '{{ choices[1] }}',
      'answer': '{{ (answer + 1) | string }}',
    },
    5,
  ),
}


@pytest.mark.slow
@pytest.mark.skipif(not DATA.exists(), reason='needs ../shared/data')
def test_real_sets_with_all_prompts(models, tmp_path, monkeypatch):
  monkeypatch.setattr(tasks, '_hub_tasks', frozenset)
  for name, (file, templates, row, _) in LOCAL.items():
    content = {
      'task': name,
      'data': str(DATA / file),
      'templates': str(
        DATA / f'templates_promptsource/templates/{templates}.yaml'
      ),
      'row': row,
    }
    (tmp_path / f'{name}.yaml').write_text(json.dumps(content))
  planned = tasks.plan(['t0'], str(tmp_path), limit=6)
  for task in planned.tasks:
    # The counts of prompts that the paper's code has.
    assert len(task.content.questions) == LOCAL[task.name][-1], task.name
  found, _ = _run(models['encoder_decoder'], planned, rows=16)
  assert found[-1].metric == 'mean of 6'
