"""Generation and evaluation of a job of two processes equal one's."""

import json

import pytest

from tests import tiny, toy_models

pytestmark = pytest.mark.multiproc
PROMPTS = ['The quick', 'two cats and a dog', 'again', 'a' * 40, 'x y z']
TASK = {
  'task': 'animals',
  'dataset_path': 'json',
  'dataset_kwargs': {'data_files': {'test': 'rows.jsonl'}},
  'test_split': 'test',
  'output_type': 'multiple_choice',
  'doc_to_text': 'A {{name}} is',
  'doc_to_choice': '{{[" small", " large"]}}',
  'doc_to_target': '{{answer}}',
  'metric_list': [{'metric': 'acc'}],
}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A T5Gemma of random weights."""
  place = tmp_path_factory.mktemp('models') / 'pair'
  # One key head: the devices divide the rows.
  stack = toy_models.stack(vocab_size=toy_models.GEMMA_SIZE, kv_heads=1)
  config = toy_models.pair_and_decoder(stack)['encoder_decoder']
  toy_models.save(place, config, scale=0.3)
  return place


def _run(count, folder, *command):
  """Runs a command of so many processes to its end."""
  started = tiny.start_several(count, *command, logs=folder)
  assert tiny.wait_all(started) == [0] * count, tiny.read_logs(folder)


@pytest.mark.long
def test_two_processes_generate_what_one_does(folder, tmp_path):
  prompts = tmp_path / 'prompts.jsonl'
  prompts.write_text(''.join(json.dumps(p) + '\n' for p in PROMPTS))
  flags = [f'--checkpoint={folder}', f'--prompts={prompts}', '--max_tokens=6']
  found = []
  for count in (1, 2):
    output = tmp_path / f'{count}.jsonl'
    _run(count, tmp_path, 'generate', *flags, f'--output={output}')
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    found.append([(line['prompt'], line['continuation']) for line in lines])
  assert found[0] == found[1]
  output = tmp_path / 'embedded.jsonl'
  _run(2, tmp_path, 'generate', *flags, '--embed=mean', f'--output={output}')
  assert len(output.read_text().splitlines()) == len(PROMPTS)
  assert [prompt for prompt, _ in found[0]] == PROMPTS


@pytest.mark.slow
def test_two_processes_evaluate_as_one_does(folder, tmp_path):
  pytest.importorskip('lm_eval', reason="needs pip install -e '.[eval]'")
  (tmp_path / 'task.yaml').write_text(json.dumps(TASK))
  rows = [{'name': name, 'answer': i % 2} for i, name in enumerate(PROMPTS)]
  (tmp_path / 'rows.jsonl').write_text(
    ''.join(json.dumps(row) + '\n' for row in rows)
  )
  flags = [f'--checkpoint={folder}', f'--task_folder={tmp_path}', '--cost=8,4']
  flags += [f'--pairs={tmp_path}/rows.jsonl#name,name', '--max_tokens=4']
  found = []
  for count in (1, 2):
    output = tmp_path / str(count)
    _run(count, tmp_path, 'evaluate', *flags, f'--output={output}')
    assert (output / 'report.html').exists()
    lines = (output / 'results.jsonl').read_text().splitlines()
    kept = [x for x in map(json.loads, lines) if x['task'] != 'cost']
    assert len(kept) < len(lines)
    found.append([(x['task'], x['metric'], x['scores']) for x in kept])
  assert found[0] == found[1]
  assert {task for task, *_ in found[0]} == {'animals', 'rows'}
