"""Findings state what the numbers say, in either direction; the files."""

import json
import math

import pytest

from encdec_adapt.evaluation.reports import html_report, report_findings
from encdec_adapt.files import paths

REQUEST = {'FLOPs': 2e9, 'ms at batch 1': 31.0, 'prompt': 384}
REQUEST |= {'generated': 128, 'prefill_ms_low': 4.0, 'prefill_ms_high': 7.0}
REQUEST |= {'decode_ms_low': 0.1, 'decode_ms_high': 0.5, 'other_load': 0.0}
REQUEST |= {'prefill_ms': 5.4, 'decode_ms': 0.2}
REQUEST |= {'prefill_flops': 1.5e9, 'decode_flops': 5e8}


def _run(start, end, shuffled=None, **fields):
  cost = dict(total_tokens=819_200, target_tokens=409_600, flops=1.5e13)
  steps = [0, 50, 100]
  return {
    'kind': 'encoder_decoder',
    'parameters': 2_345_678,
    'steps': 100,
    'learning_rate': 1e-3,
    'seed': 0,
    'eval_loss': end,
    'exact_match': 0.25,
    'eval_loss_at_step_0': start,
    'eval_loss_in_training': end - 0.5,
    'eval_loss_shuffled_prefix': shuffled,
    'request': None,
    'curve': {
      'step': steps,
      'target_tokens': [step * 4096 for step in steps],
      'eval_loss': [start, (start + end) / 2, end],
    },
    'seconds': 75.0,
    **cost,
    'inclusive': {**cost, 'seconds': 150.0},
    **fields,
  }


@pytest.fixture
def report():
  runs = {
    'decoder_only': _run(8.3, 3.5, 3.75, kind='decoder_only'),
    'adapted': _run(4.6, 3.1, 3.7),
    'adapted_seed1': _run(4.7, 3.2, 3.8, seed=1),
    'scratch': _run(8.4, 3.9, 3.95),
    'scratch_seed1': _run(8.4, 4.1, 4.15, seed=1),
    'unbalanced': _run(8.0, 3.6),
  }
  stage = {'name': 'adapt', 'command': 'python -m train --workdir=<runs>'}
  return {
    'title': 'A study',
    'size': 'small',
    'text': {'documents': 1200, 'bytes': 5_000_000},
    'runs': runs,
    'stages': [{**stage, 'starts': 1, 'status': 'finished', 'seconds': 75.0}],
    'samples': [
      {'run': 'adapted', 'prompt': 'def f(x):\n', 'continuation': 'a < b'}
    ],
    'environment': {'python': '3.12.1', 'versions': {'jax': '0.10.2'}},
    'tuned': None,
    'note': 'More steps help.',
  }


def _about(report, *starts):
  """The findings that start so, one for each start."""
  found = report_findings.findings(report)
  lines = []
  for start in starts:
    (line,) = [text for text in found if text.startswith(start)]
    lines.append(line)
  return lines


def test_findings(report):
  start, end, scratch, decoder, control = _about(
    report,
    'At step 0',
    'After 100 steps',
    'scratch (',
    'decoder_only (',
    'unbalanced (',
  )
  assert '4.650 (mean of 2 seeds, 4.600 to 4.700)' in start
  assert 'adapted is 3.750 nats lower' in start
  assert '3.150 (mean of 2 seeds' in end
  # t of 1 degree of freedom is 12.706, the standard error 0.05.
  interval = '(95 % interval of the paired seeds -1.485 to -0.215)'
  assert f'adapted is 0.850 nats lower {interval}' in scratch
  assert 'adapted is 0.350 nats lower' in decoder
  assert 'adapted is 0.450 nats lower' in control
  # No interval where the seeds differ.
  report['runs']['scratch_seed2'] = report['runs'].pop('scratch_seed1')
  (scratch,) = _about(report, 'scratch (')
  assert 'lower' in scratch and 'interval' not in scratch


def test_encoder_use_needs_a_clear_rise_and_finite_losses(report):
  adapted, scratch, decoder = _about(
    report,
    *('adapted uses its encoder', 'scratch does not clearly use its encoder'),
    'decoder_only reads prefixes without an encoder',
  )
  assert '(+0.600)' in adapted and '(+0.050)' in scratch
  assert '(+0.250)' in decoder
  report['runs']['scratch']['eval_loss'] = math.nan
  _about(report, 'scratch ended with a loss that is not finite')
  found = report_findings.findings(report)
  assert not [text for text in found if text.startswith('scratch (')]
  # Its loss with the prefixes of other examples was not measured.
  assert not [text for text in found if text.startswith('unbalanced uses')]


def test_every_finding_names_its_model(report):
  runs = report['runs']
  runs['decoder_only_continued'] = _run(8.3, 3.15, kind='decoder_only')
  runs['adapted']['label_accuracy'] = 0.5
  runs['adapted']['request'] = REQUEST
  *found, note = report_findings.findings({**report, 'best': ['adapted']})
  assert (len(found), note) == (14, report['note'])
  for text in found:
    assert any(name in text.split(':')[0] for name in report['runs']), text
  (more,) = (x for x in found if x.startswith('decoder_only_continued ('))
  assert 'that decoder' not in more and 'adapted does not differ' in more
  (cost,) = (x for x in found if x.startswith('A request'))
  assert '384 + 128 tokens costs adapted 2e+09 FLOPs and 31.0 ms' in cost
  assert 'ms (quartiles 16.8 to 71.0)' in cost


def test_the_crossing_and_the_control_are_stated_either_way(report):
  runs = report['runs']
  # Means of two seeds: 4.65, 3.9 and 3.15.
  runs['decoder_only']['eval_loss'] = 4.0
  assert report_findings.crossing(runs) == (50, 50 * 4096)
  runs['decoder_only']['eval_loss'] = 3.0
  assert report_findings.crossing(runs) is None
  assert report_findings.verdict(runs) == ''
  for loss, text in (
    (3.155, 'does not tell adapted from its control'),
    (3.25, 'adapted ends 0.100 nats below its control'),
    (3.05, 'adapted ends 0.100 nats above its control'),
  ):
    runs['decoder_only_continued'] = _run(8.3, loss, kind='decoder_only')
    assert text in report_findings.verdict(runs)


def test_poor_continuations_are_explained_by_the_size(report):
  (text,) = report_findings.explain_continuations(report)
  assert '2.35 M parameters and 819 k tokens' in text
  report['runs']['adapted']['parameters'] = 2_600_000_000
  assert report_findings.explain_continuations(report) == []


def test_write(report, bucket, tmp_path):
  runs = report['runs']
  runs['scratch']['curve']['eval_loss'][0] = math.inf
  # An imported model.
  runs['decoder_only'] |= dict(learning_rate=None, seed=None)
  runs['decoder_only'] |= dict(eval_loss_at_step_0=None, steps=0)
  runs['decoder_only']['curve'] = dict(step=[], target_tokens=[], eval_loss=[])
  # The study that tunes the models.
  tuned = {m: _run(3.0, 1.5, request=REQUEST) for m in ('adapted', 'scratch')}
  report['tuned'] = {'runs': tuned, 'findings': ['adapted has 1.500.']}
  found = html_report.write(report, tmp_path)
  assert 'After fine-tuning: adapted has 1.500.' in found
  assert found == report_findings.findings(report)
  assert (tmp_path / 'curves.png').read_bytes().startswith(b'\x89PNG')
  text = (tmp_path / 'report.html').read_text()
  for name in runs:
    assert f'<td>{name}</td>' in text
  assert 'data:image/png;base64,' in text
  assert 'http' not in text  # Nothing outside the page.
  assert '2.35 M parameters and 819 k tokens' in text
  assert '<td>2.600</td>' in text  # Of adapted, in its own training.
  assert 'a &lt; b' in text and '--workdir=&lt;runs&gt;' in text
  saved = json.loads((tmp_path / 'report.json').read_text())
  assert saved['findings'] == found
  assert saved['runs']['adapted'] == runs['adapted']
  assert saved['runs']['scratch']['curve']['eval_loss'][0] is None
  html_report.write(report, f'{bucket}/study')
  assert paths.tree(paths.at(f'{bucket}/study')) == paths.tree(tmp_path)
