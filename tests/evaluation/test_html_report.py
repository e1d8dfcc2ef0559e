"""Findings follow the numbers, whichever way they went; files are whole."""

import copy
import json
import math

import pytest

from encdec_adapt.evaluation import html_report, report_figures
from encdec_adapt.evaluation import report_numbers as numbers
from encdec_adapt.files import paths


def _run(start, end, shuffled=None, **fields):
  steps = [0, 50, 100]
  losses = [start, (start + end) / 2, end]
  run = {
    'kind': 'encoder_decoder',
    'parameters': 2_345_678,
    'steps': 100,
    'target_tokens': 409_600,
    'total_tokens': 819_200,
    'flops': 1.5e13,
    'seconds': 75.0,
    'learning_rate': 1e-3,
    'seed': 0,
    'eval_loss': end,
    'eval_loss_at_step_0': start,
    'eval_loss_shuffled_prefix': shuffled,
    'curve': {
      'step': steps,
      'target_tokens': [step * 4096 for step in steps],
      'eval_loss': losses,
      'train_step': steps,
      'train_loss': losses,
    },
    'inclusive': {
      'target_tokens': 819_200,
      'total_tokens': 1_638_400,
      'flops': 3e13,
      'seconds': 150.0,
    },
  }
  return {**run, **fields}


@pytest.fixture
def report():
  runs = {
    'decoder_only': _run(8.3, 3.5, 3.75, kind='decoder_only'),
    'decoder_only_continued': _run(3.5, 3.3, kind='decoder_only'),
    'adapted': _run(4.6, 3.1, 3.7),
    'adapted_seed1': _run(4.7, 3.2, 3.8, seed=1),
    'scratch': _run(8.4, 3.9, 3.95),
    'scratch_seed1': _run(8.4, 4.1, 4.15, seed=1),
    'adapted_embeddings': _run(8.0, 3.6, 3.9),
    'unbalanced': _run(5.0, 3.3, 3.8, parameters=3_000_000),
    'adapted_lr_0.0003': _run(4.6, 3.4, 3.5, learning_rate=3e-4),
    'adapted_lr_0.001': _run(4.6, 3.1, 3.7),
    'adapted_lr_0.003': _run(4.6, 3.2, 3.6, learning_rate=3e-3),
    'scratch_lr_0.001': _run(8.4, 3.9, 3.95),
    'scratch_lr_0.003': _run(8.4, 3.8, 3.85, learning_rate=3e-3),
  }
  return {
    'title': 'A study',
    'size': 'small',
    'text': {'documents': 1200, 'bytes': 5_000_000},
    'runs': runs,
    'stages': [
      {
        'name': 'adapt',
        'command': 'python -m encdec_adapt.train --workdir=<runs>',
        'budget_seconds': 60,
        'seconds': 75.0,
      }
    ],
    'samples': [
      {'run': 'adapted', 'prompt': 'def f(x):\n', 'continuation': 'a < b'}
    ],
    'environment': {'python': '3.12.1', 'versions': {'jax': '0.10.2'}},
  }


def _swap(report, first, second):
  swapped = copy.deepcopy(report)
  runs = swapped['runs']
  for a, b in zip(first, second, strict=True):
    runs[a], runs[b] = runs[b], runs[a]
  return swapped


def _about(found, start):
  matching = [text for text in found if text.startswith(start)]
  assert len(matching) == 1, f'{start!r} in {found}'
  return matching[0]


def test_adapted_against_scratch(report):
  found = html_report.findings(report)
  start = _about(found, 'Adapted starts below scratch')
  assert '4.650 (mean of 2 seeds, 4.600 to 4.700)' in start
  assert 'adapted is 3.750 nats lower' in start
  end = _about(found, 'Adapted ends below scratch')
  assert 'adapted is 0.850 nats lower' in end
  assert 'The seeds do not overlap.' in end
  course = _about(found, 'Adapted is below scratch at each of the 3')
  # Halfway, adapted is at 3.85, below 3.9.
  assert "reached scratch's last loss by step 50 of 100" in course


def test_the_opposite_is_said_as_plainly(report):
  swapped = _swap(
    report,
    ['adapted', 'adapted_seed1'],
    ['scratch', 'scratch_seed1'],
  )
  found = html_report.findings(swapped)
  assert 'adapted is 3.750 nats higher' in _about(
    found, 'Adapted does not start below scratch'
  )
  assert 'adapted is 0.850 nats higher' in _about(
    found, 'Adapted does not end below scratch'
  )
  course = _about(found, 'Adapted is not below scratch at 3 of the 3')
  assert "never reaches scratch's last loss" in course


def test_overlapping_seeds_and_no_difference(report):
  report['runs']['scratch']['eval_loss'] = 3.1
  report['runs']['scratch_seed1']['eval_loss'] = 3.2
  end = _about(html_report.findings(report), 'Adapted does not end below')
  assert 'no difference (less than 0.01 nats)' in end
  assert 'The seeds overlap' in end


def test_decoders_and_controls(report):
  found = html_report.findings(report)
  decoder = _about(found, 'The decoder it was made from')
  assert 'is better; adapted is 0.350 nats lower' in decoder
  control = _about(found, 'Control, every weight fresh')
  assert 'the gain is not of the embeddings alone' in control

  report['runs']['decoder_only']['eval_loss'] = 2.5
  report['runs']['adapted_embeddings']['eval_loss'] = 2.5
  found = html_report.findings(report)
  decoder = _about(found, 'The decoder it was made from')
  assert 'is not better; adapted is 0.650 nats higher' in decoder
  control = _about(found, 'Control, every weight fresh')
  assert 'copying more than the embeddings has not helped' in control


def test_encoder_use_needs_a_clear_rise(report):
  found = html_report.findings(report)
  assert 'by +0.600 (used' in _about(found, 'adapted, the encoder is used')
  assert 'by +0.050 (used' in _about(
    found, 'scratch, the encoder does not count as used'
  )
  # A decoder's own rise is beside it; where it was not measured, nothing is.
  assert 'by +0.250.' in _about(found, 'decoder_only, what a prefix is worth')
  assert not [text for text in found if text.startswith('decoder_only_cont')]


def test_learning_rates(report):
  found = html_report.findings(report)
  adapted = _about(found, 'Learning rate of adapted')
  assert adapted.endswith(
    'best of 0.0003, 0.001, 0.003 on the same held-out text is 0.001.'
  )
  scratch = _about(found, 'Learning rate of scratch')
  assert 'is 0.003, at the edge of what was tried' in scratch
  assert 'the run shown used 0.001' in scratch


def test_a_broken_run_is_named_and_not_compared(report):
  report['runs']['scratch']['eval_loss'] = math.nan
  found = html_report.findings(report)
  _about(found, 'scratch ended with a loss that is not finite')
  assert not [text for text in found if 'end below scratch' in text]
  assert not [text for text in found if 'nan' in text.split()]


def test_runs_that_are_absent_are_not_spoken_of(report):
  report['runs'] = {'decoder_only': report['runs']['decoder_only']}
  (only,) = html_report.findings(report)
  assert only.startswith('decoder_only, what a prefix is worth')


def test_write(report, tmp_path):
  report['runs']['scratch']['curve']['train_loss'][0] = math.inf
  page = html_report.write(report, tmp_path / 'out')
  assert page == tmp_path / 'out' / 'report.html'
  picture = (tmp_path / 'out' / 'curves.png').read_bytes()
  assert picture.startswith(b'\x89PNG') and len(picture) > 10_000
  text = page.read_text()
  for name in report['runs']:
    assert f'<td>{name}</td>' in text
  assert 'data:image/png;base64,' in text
  assert 'http' not in text  # nothing outside the page
  assert 'a &lt; b' in text and '--workdir=&lt;runs&gt;' in text
  assert '1m15s (over)' in text

  saved = json.loads((tmp_path / 'out' / 'report.json').read_text())
  assert saved['findings'] == html_report.findings(report)
  assert saved['runs']['adapted'] == report['runs']['adapted']
  assert saved['runs']['scratch']['curve']['train_loss'][0] is None


def test_write_to_a_bucket(report, bucket, tmp_path):
  page = html_report.write(report, f'{bucket}/study')
  here = html_report.write(report, tmp_path).parent
  assert str(page) == f'{bucket}/study/report.html'
  assert paths.tree(page.parent) == paths.tree(here)
  assert page.read_bytes() == (here / 'report.html').read_bytes()


@pytest.mark.parametrize(
  'got, expected',
  [
    (numbers.count(999), '999'),
    (numbers.count(999_900), '1.00 M'),
    (numbers.count(12_345), '12.3 k'),
    (numbers.scientific(1.5e13), '1.50e13'),
    (numbers.scientific(0), '0'),
    (numbers.model_of('adapted_lr_0.001'), 'adapted'),
    (numbers.model_of('adapted_seed12'), 'adapted'),
    (numbers.model_of('adapted_embeddings'), 'adapted_embeddings'),
  ],
)
def test_numbers(got, expected):
  assert got == expected


def test_the_mean_of_seeds_is_by_step_where_their_tokens_differ():
  steps = [[0, 10, 20], [0, 10, 20, 25]]
  curves = [([0, 100, 200], [4.0, 3.0, 2.0])]
  curves += [([0, 104, 210, 260], [6.0, 4.0, 3.0, 2.9])]
  assert report_figures.mean_curve(steps, curves) == (
    [0, 102, 205],
    [5.0, 3.5, 2.5],
  )
