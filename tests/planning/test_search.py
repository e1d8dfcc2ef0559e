"""A search keeps what it has, whatever the compiler says of one candidate."""

import importlib.util
import json
import math

import jax
import pytest

from encdec_adapt import plan
from encdec_adapt.cli import command, errors
from encdec_adapt.planning import chips, hlo, search, shapes
from encdec_adapt.sharding import mesh as mesh_lib
from tests import tiny
from tests.planning import toy

GIB = 2**30
needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec('libtpu') is None,
  reason="libtpu is not installed: pip install -e '.[tpu]'",
)


@pytest.fixture
def answers(monkeypatch):
  """Three candidates, of which the compiler makes what is put in here."""
  monkeypatch.chdir(tiny.ROOT)
  asked = toy.settings()
  mesh = mesh_lib.make_mesh(asked.mesh, jax.devices()[:8])
  shape = shapes.describe('train', asked, mesh, chips.parse('h100:8'), GIB)
  found = [search.Candidate(asked, (f'--flag={n}',), shape) for n in range(3)]
  monkeypatch.setattr(search, 'ranked', lambda *_: found)
  monkeypatch.setattr(plan, 'describe_devices', lambda _: jax.devices()[:8])
  answers = []

  def compiled(*_):
    answer = answers.pop(0)
    if isinstance(answer, BaseException):
      raise answer
    return shape | answer

  monkeypatch.setattr(plan, '_compiled', compiled)
  return answers


def test_a_candidate_that_does_not_compile_is_left_out(
  answers, tmp_path, capsys
):
  refused = jax.errors.JaxRuntimeError('vector memory\nand much more')
  answers += [{'fits': False}, refused, {'fits': True}]
  output = tmp_path / 'search.json'
  flags = ['--config=configs/base.py', '--topology=v5e:2x4', '--search=3']
  values = command.parse(plan.define_flags, [*flags, f'--output={output}'])
  assert plan.main(values) == 0
  shown = capsys.readouterr().out
  assert ', does not fit, 0 s: --flag=0' in shown
  assert '2/3: no plan (vector memory), 0 s: --flag=1' in shown
  (row,) = json.loads(output.read_text())['candidates']
  assert row['flags'] == ['--flag=2']


def test_what_was_compiled_before_an_interruption_is_kept(answers, tmp_path):
  answers += [{'fits': True}, KeyboardInterrupt()]
  output = tmp_path / 'search.json'
  flags = ['--config=configs/base.py', '--topology=v5e:2x4', '--search=3']
  values = command.parse(plan.define_flags, [*flags, f'--output={output}'])
  with pytest.raises(KeyboardInterrupt):
    plan.main(values)
  (row,) = json.loads(output.read_text())['candidates']
  assert row['flags'] == ['--flag=0']


@needs_libtpu
def test_a_compiler_that_fails_is_named(answers):
  answers.append(jax.errors.JaxRuntimeError('INTERNAL: Bitcast\nand more'))
  flags = ['--config=configs/base.py', '--topology=v5e:2x4']
  values = command.parse(plan.define_flags, flags)
  with pytest.raises(errors.UserError, match='INTERNAL: Bitcast. .* libtpu'):
    plan.main(values)


@needs_libtpu
def test_a_program_that_is_not_understood_is_named(answers):
  answers.append(hlo.UnknownProgramError("kernel 'fly' is not known"))
  flags = ['--config=configs/base.py', '--topology=v5e:2x4']
  values = command.parse(plan.define_flags, flags)
  words = "'train' for v5e:2x4 x 1 .*: kernel 'fly' is not known.* report it"
  with pytest.raises(errors.UserError, match=words):
    plan.main(values)


@pytest.mark.parametrize(
  'topology, slices, halves',
  [
    # The second where two devices share a row.
    ('v5e:4x4', 1, [(8, 1), (4, 2)]),
    ('v5e:8x8', 1, [(32, 1), (16, 2)]),
    ('v5e:4x4', 2, []),
    ('v5e:16x16', 1, []),
    ('h100:16', 1, []),
  ],
)
def test_meshes_that_shard_alike_are_tried_once(topology, slices, halves):
  """Shapes cannot tell them apart; a TPU's compiler likes two halves best."""
  where = chips.parse(topology, slices)
  job = toy.settings(data__encoder_length=1024, data__decoder_length=1024)
  shards, whole = [], []
  for asked, _ in search.on_meshes(job, where):
    mesh, rules = asked.mesh, asked.rules
    devices = [
      math.prod(getattr(mesh, axis) for axis in axes)
      for axes in (rules.length, rules.heads, rules.embed, rules.vocab)
    ]
    shards.append(tuple(devices))
    if rules.summed_first:
      assert mesh.replica == 2 and mesh.tensor == 1
      whole.append((mesh.fsdp, mesh.sequence))
  assert len(set(shards)) == len(shards)
  assert whole == halves
