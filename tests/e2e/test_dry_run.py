"""`train --print_config` and `--dry_run`, which run no job."""

import functools
import json
import math
import re

import pytest

from encdec_adapt import train
from tests import tiny

pytestmark = pytest.mark.e2e
_train = functools.partial(tiny.call, train)
GEMMA = (
  '--config=configs/gemma2.py:size=2b_2b,objective=ul2',
  '--config.init.encoder=a',
  '--config.mesh.fsdp=8',
)


def test_print_config_shows_what_flags_have_changed(capsys):
  assert _train(*GEMMA, '--print_config') == 0
  shown = capsys.readouterr().out
  assert re.search(r"^config.data.objective = 'ul2'$", shown, re.MULTILINE)
  assert re.search(r"^config.init.encoder = 'a'$", shown, re.MULTILINE)
  assert re.search(r'^config.mesh.fsdp = 8$', shown, re.MULTILINE)
  assert 'config.loss.dpo' not in shown and 'rollouts.' not in shown
  assert _train(*GEMMA, '--print_config=all') == 0
  shown = capsys.readouterr().out
  assert 'config.loss.dpo.beta' in shown and 'rollouts.samples' in shown


def test_dry_run_counts_the_parameters_of_a_released_pair(capsys):
  assert _train(*GEMMA, '--dry_run') == 0
  shown = capsys.readouterr().out
  # Those of the pair less its two tables, and the tables.
  encoder, decoder, table = 2_024_517_888, 2_392_687_872, 589_824_000
  assert f'encoder: {encoder + table:,} parameters' in shown
  assert f'decoder: {decoder + table:,} parameters' in shown
  # fp32 on each of eight devices.
  parameters = (encoder + decoder + 2 * table) * 4 / 8 / 2**30
  found = re.search(r'^  parameters +([\d.]+) GiB', shown, re.MULTILINE)
  assert float(found.group(1)) == pytest.approx(parameters, abs=0.06)
  assert 'decoder/blocks/layer_0/cross_attention/key' in shown
  assert 'sources: a does not exist' in shown
  assert 'without activations' in shown


def _gemma3_270m(folder):
  """Writes config.json and the header of the weights, whose data are a hole."""
  config = {'architectures': ['Gemma3ForCausalLM'], 'model_type': 'gemma3_text'}
  config |= {'vocab_size': 262144, 'hidden_size': 640, 'head_dim': 256}
  config |= {'num_attention_heads': 4, 'num_key_value_heads': 1}
  config |= {'intermediate_size': 2048, 'num_hidden_layers': 18}
  config['sliding_window'] = 512
  (folder / 'config.json').write_text(json.dumps(config))
  shapes = {'embed_tokens': (262144, 640), 'norm': (640,)}
  norms = 'input_layernorm', 'post_attention_layernorm'
  norms += 'pre_feedforward_layernorm', 'post_feedforward_layernorm'
  for i in range(18):
    layer = {**dict.fromkeys(norms, (640,)), 'mlp.down_proj': (640, 2048)}
    layer |= dict.fromkeys(('mlp.gate_proj', 'mlp.up_proj'), (2048, 640))
    layer |= {'self_attn.q_proj': (1024, 640), 'self_attn.o_proj': (640, 1024)}
    heads = {'k_proj': (256, 640), 'v_proj': (256, 640)}
    heads |= {'q_norm': (256,), 'k_norm': (256,)}
    layer |= {f'self_attn.{name}': shape for name, shape in heads.items()}
    shapes |= {f'layers.{i}.{name}': shape for name, shape in layer.items()}
  header, end = {}, 0
  for name, shape in shapes.items():
    start, end = end, end + 2 * math.prod(shape)
    header[f'model.{name}.weight'] = {
      **{'dtype': 'BF16', 'shape': shape, 'data_offsets': [start, end]},
    }
  text = json.dumps(header).encode()
  with open(folder / 'model.safetensors', 'wb') as file:
    file.write(len(text).to_bytes(8, 'little') + text)
    file.truncate(8 + len(text) + end)


def test_the_page_of_gemma3_270m_has_the_numbers_of_its_pairs(capsys, tmp_path):
  _gemma3_270m(tmp_path)
  page = (tiny.ROOT / 'configs' / 'gemma3_270m.md').read_text()
  for target in ('', ',target=t5gemma2'):
    config = f'--config=gemma3_270m:source={tmp_path}{target}'
    assert _train(config, '--dry_run') == 0
    shown = capsys.readouterr().out
    count = re.search(r'^together: ([\d,]+) parameters', shown, re.M)[1]
    step = r'64 rows of 512 \+ 512 tokens, ([\d.]+e)\+(\d+) model FLOPs'
    flops = ''.join(re.search(step, shown).groups())
    assert f' {count} | {flops} |' in page


_DPO = (
  '--config.loss.kind=dpo',
  '--config.loss.distill.share=1',
  '--config.data.objective=preferences',
  '--config.data.source=preferences:x#p,c,r',
)


@pytest.mark.parametrize(
  'given, problem, shape, loss',
  [
    ('', 'is not given', 'decoder', ['--config.loss.kind=distill']),
    ('', 'is not given', 'model', _DPO),
    ('runs/nobody', 'does not exist', 'model', _DPO),
  ],
)
def test_dry_run_needs_no_source_and_no_teacher(
  capsys, given, problem, shape, loss
):
  flags = [
    '--config=configs/quickstart.py:size=smoke,run=unbalanced',
    f'--config.teacher.checkpoint={given}',
    f'--config.init.encoder={given}',
    '--config.train.batch_size=64',
    *loss,
  ]
  assert _train(*flags, '--dry_run') == 0
  shown = capsys.readouterr().out
  name = '(config.)?{}' if not given else given
  teacher, source = map(name.format, ('teacher.checkpoint', 'init.encoder'))
  assert re.search(
    f"{teacher} {problem}: a teacher of the {shape}'s shape is", shown
  )
  assert re.search(f'sources: {source} {problem}', shown)
  assert re.search(r'without activations.*encdec_adapt\.plan', shown)


def test_dry_run_counts_a_reward_model_that_is_not_there(capsys):
  flags = [
    '--config=configs/quickstart.py:size=smoke,run=unbalanced',
    '--config.train.batch_size=64',
    '--config.loss.kind=rloo',
    '--config.loss.distill.share=1',
    '--config.train.rewards.models=runs/nobody',
    '--config.data.objective=pairs',
    '--config.data.source=pairs:x#a,b',
  ]
  assert _train(*flags, '--dry_run') == 0
  shown = capsys.readouterr().out
  assert 'runs/nobody does not exist: a reward model of the policy' in shown
  assert re.search('^  reward model 1 +[0-9]', shown, re.MULTILINE)
