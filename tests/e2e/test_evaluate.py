"""The evaluate command: restart, comparison, cost, refusals."""

import importlib
import json

import pytest

from encdec_adapt import evaluate
from encdec_adapt.base import errors
from encdec_adapt.evaluation.results import predictions, results_store
from encdec_adapt.evaluation.tasks import task_groups
from encdec_adapt.generation import model_in_memory
from tests import tiny

pytestmark = pytest.mark.e2e


def _flags(folder, *models):
  return [
    *(f'--checkpoint={model}' for model in models),
    f'--records={folder}/prefix_lm/eval',
    f'--output={folder}/evaluation',
    '--batch_size=8',
    '--cost=16,4',
  ]


def _lines(folder):
  path = folder / 'evaluation' / results_store.FILE
  return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope='module')
def evaluated(folder, gemma, adapted):
  """A Hugging Face folder and a run, evaluated together."""
  assert tiny.call(evaluate, *_flags(folder, gemma, adapted)) == 0
  return _lines(folder)


@pytest.mark.long
def test_scores_of_folders_and_runs(folder, gemma, adapted, evaluated):
  found = {(x['run'], x['task'], x['metric']): x for x in evaluated}
  for model, step in ((gemma, None), (adapted, 0)):
    loss = found[str(model), 'held_out', 'loss']
    assert (loss['step'], loss['n'], len(loss['scores'])) == (step, 8, 8)
    assert loss['value'] == pytest.approx(sum(loss['scores']) / 8, rel=1e-5)
    assert loss['stderr'] > 0
    assert loss['groups'] == [f'text_{7 + i // 2}' for i in range(8)]
    assert len(loss['weights']) == 8
    for name in ('prefill_ms', 'decode_ms', 'prefill_bytes', 'decode_bytes'):
      assert found[str(model), 'cost', name]['value'] > 0
  tokens = [x['value'] for x in evaluated if x['metric'] == 'target_tokens']
  assert tokens == [tiny.target_tokens(folder / 'prefix_lm' / 'eval')] * 2


def test_the_report_compares_and_shows_the_cost(folder, evaluated):
  output = folder / 'evaluation'
  page = (output / 'report.html').read_text()
  assert '<td>adapted - gemma</td>' in page and '<td>4 groups</td>' in page
  assert 'data:image/png;base64,' in page and 'http' not in page
  tables = json.loads((output / 'report.json').read_text())['tables']
  assert [row['model'] for row in tables['Cost']] == ['gemma', 'adapted']


def test_what_is_there_is_not_evaluated_again(
  folder, gemma, adapted, evaluated, monkeypatch, capsys
):
  # As after a kill while the scores of the second model were written.
  path = folder / 'evaluation' / results_store.FILE
  content = path.read_text()
  half = len(evaluated) // 2
  cut = ''.join(content.splitlines(keepends=True)[: half + 2])
  path.write_text(cut + content[len(cut) :][:40])
  read = []
  load = model_in_memory.read_as_trained
  monkeypatch.setattr(
    model_in_memory,
    'read_as_trained',
    lambda stored: read.append(stored.path) or load(stored),
  )
  assert tiny.call(evaluate, *_flags(folder, gemma, adapted)) == 0
  assert read == [adapted]
  assert '[1/2] held_out' in capsys.readouterr().out
  again = _lines(folder)
  same = [x for x in again if x['task'] != 'cost']
  assert same == [x for x in evaluated if x['task'] != 'cost']
  # Weights that were replaced are evaluated again, and the others are not.
  (weights,) = gemma.glob('*.safetensors')
  weights.write_bytes(weights.read_bytes())
  assert tiny.call(evaluate, *_flags(folder, gemma, adapted)) == 0
  assert read == [adapted, gemma]


@pytest.mark.long
def test_predictions_are_kept(
  folder, gemma, adapted, tmp_path, monkeypatch, capsys
):
  pytest.importorskip('sacrebleu', reason="needs pip install -e '.[eval]'")
  pairs = [{'input': f'the fox {i}', 'target': ['a dog']} for i in range(25)]
  file, output = tmp_path / 'animals.jsonl', tmp_path / 'evaluation'
  file.write_text(''.join(json.dumps(pair) + '\n' for pair in pairs))
  flags = [f'--checkpoint={gemma}', f'--checkpoint={adapted}', '--cost=']
  flags += [f'--pairs={file}', '--max_tokens=4', f'--output={output}']
  assert tiny.call(evaluate, *flags) == 0
  kept = {
    path.name.rpartition('-')[0]: path
    for path in (output / predictions.FOLDER).iterdir()
  }
  assert kept.keys() == {'gemma', 'adapted'}
  for name, path in kept.items():
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line['input'] for line in lines] == [x['input'] for x in pairs]
    assert lines[0]['references'] == ['a dog']
    assert isinstance(lines[0]['answer'], str)
    found = {
      x['metric']: x
      for x in _lines(tmp_path)
      if x['run'].endswith(name) and x['task'] == 'animals'
    }
    rouge = [line['scores']['rougeLsum'] for line in lines]
    assert rouge == pytest.approx(found['rougeLsum']['scores'], rel=1e-5)
    assert len(found['chrf']['statistics']) == len(lines)
    cut = [line['cut'] for line in lines]
    assert sum(cut) / 25 == pytest.approx(found['cut_short']['value'])
  tables = json.loads((output / 'report.json').read_text())['tables']
  shown = [(row['input'], row['model']) for row in tables['Predictions']]
  assert shown[:2] == [('the fox 0', 'gemma'), ('the fox 0', 'adapted')]
  assert len(shown) == 40
  printed = capsys.readouterr().out
  assert 'the fox 0' not in printed
  assert ' of 25 answers of animals are cut at --max_tokens=4.' in printed

  beams = [*flags, '--beams=3', '--length_penalty=0']
  assert tiny.call(evaluate, *beams) == 0
  assert len(list((output / predictions.FOLDER).iterdir())) == 4
  # Nothing is read or generated where the answers could not be kept or scored.
  monkeypatch.setattr(model_in_memory, 'read_as_trained', None)
  kept['adapted'].write_text(kept['gemma'].read_text())
  with pytest.raises(
    errors.UserError, match='line 1 is of .*gemma, not of .*ad'
  ):
    tiny.call(evaluate, *flags)
  monkeypatch.setattr(importlib.util, 'find_spec', lambda _: None)
  with pytest.raises(errors.UserError, match='rouge_score.*eval'):
    tiny.call(evaluate, *flags, '--max_tokens=5')


@pytest.mark.parametrize(
  'flags, words',
  [
    ([], '--checkpoint'),
    (['--checkpoint=nowhere'], 'nowhere holds no model'),
    (['--checkpoint={gemma}', '--checkpoint={gemma}/'], 'is given twice'),
    (['--checkpoint={gemma}', '--records='], 'nothing to evaluate'),
    (['--checkpoint={gemma}', '--checkpoint=a,b'], 'arms of 1 and 2 runs'),
    (['--checkpoint={gemma}', '--cost=12'], "'12' at column 1 must be two"),
    (['--checkpoint={gemma}', '--output={gemma}/config.json'], 'written'),
    (['--checkpoint={gemma}', '--correlate=a,b'], 'at least 3 models'),
    (['--checkpoint={wide}'], 'wide has no tokenizer'),
    (
      ['--checkpoint={gemma}', '--tasks={gemma}'],
      'is a folder .* --task_folder=',
    ),
    (
      ['--checkpoint={gemma}', '--retrieval=python', '--retrieval_lengths=9'],
      'has 9 tokens, and 1 needles have',
    ),
  ],
)
def test_bad_input_before_any_work(
  folder, gemma, wide, flags, words, monkeypatch, tmp_path
):
  monkeypatch.setattr(model_in_memory, 'read_as_trained', None)
  given = [flag.format(gemma=gemma, wide=wide) for flag in flags]
  base = [
    f'--records={folder}/prefix_lm/eval',
    f'--output={tmp_path}',
    '--cost=',
  ]
  with pytest.raises(errors.UserError, match=words):
    tiny.call(evaluate, *base, *given)


def test_tasks_that_run_programs_need_a_flag(tmp_path, monkeypatch):
  pytest.importorskip('lm_eval', reason="needs pip install -e '.[eval]'")
  hub = frozenset({'humaneval', 'boolq'})
  monkeypatch.setattr(task_groups, '_hub_tasks', lambda: hub)
  base = f'--checkpoint={tmp_path}/none', f'--output={tmp_path}/out'
  with pytest.raises(errors.UserError, match='humaneval.*--allow_code'):
    tiny.call(evaluate, *base, '--tasks=boolq,humaneval')
  with pytest.raises(errors.UserError, match='none'):  # The model comes next.
    tiny.call(evaluate, *base, '--tasks=boolq,humaneval', '--allow_code')
