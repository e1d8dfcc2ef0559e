"""The sharding report: bytes, dimensions, what is replicated."""

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from encdec_adapt.sharding import layout_report, memory

MESH = AbstractMesh(
  (2, 4), ('replica', 'fsdp'), axis_types=(AxisType.Auto,) * 2
)


def _array(shape, *spec, dtype=jnp.float32, memory_kind=None):
  sharding = NamedSharding(MESH, PartitionSpec(*spec))
  if memory_kind:
    sharding = sharding.with_memory_kind(memory_kind)
  return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


ARGUMENTS = {
  'parameters': {
    'mlp': {'up': _array((1024, 48), ('replica', 'fsdp'))},
    'table': _array((2**20, 16)),
    'scale': _array((16,)),
  },
  'optimizer': [
    _array((1024, 48), 'fsdp', memory_kind=memory.HOST),
    _array((), dtype=jnp.int32),
  ],
  'caches': (_array((8, 4), 'fsdp', dtype=jnp.bfloat16), None),
}
AXES = {
  'parameters': {
    'mlp': {'up': ('embed', 'mlp')},
    'table': ('vocab', 'table_embed'),
    'scale': ('embed',),
  },
  'optimizer': [('embed', 'mlp'), ()],
  'caches': (('batch', 'kv_length'), None),
}


def test_every_array_has_a_row():
  rows = {row.name: row for row in layout_report.describe(ARGUMENTS, AXES)}
  assert {name: row.bytes for name, row in rows.items()} == {
    'parameters/mlp/up': 1024 * 48 * 4 // 8,
    'parameters/scale': 16 * 4,
    'parameters/table': 2**20 * 16 * 4,
    'optimizer/0': 1024 * 48 * 4 // 4,
    'optimizer/1': 4,
    'caches/0': 8 * 4 * 2 // 4,
  }
  assert rows['parameters/mlp/up'].axes == ('embed', 'mlp')
  assert not rows['optimizer/0'].replicated and rows['optimizer/0'].host


def test_only_what_is_large_and_whole_is_pointed_out():
  rows = layout_report.describe(ARGUMENTS, AXES)
  assert [row.name for row in rows if row.replicated] == [
    'parameters/scale',
    'parameters/table',
    'optimizer/1',
  ]
  assert [row.name for row in rows if row.wasteful] == ['parameters/table']


def test_copies_along_axes_are_summed(monkeypatch):
  monkeypatch.setattr(layout_report, 'LARGE', 64)
  assert layout_report.copies(layout_report.describe(ARGUMENTS, AXES)) == [
    {
      'part': 'parameters',
      'axes': 'replica+fsdp',
      'arrays': 2,
      'bytes': 2**20 * 16 * 4 + 16 * 4,
    }
  ]
  monkeypatch.setattr(layout_report, 'LARGE', 4)
  rows = layout_report.describe(ARGUMENTS, AXES)
  assert [
    (c['part'], c['axes'], c['bytes']) for c in layout_report.copies(rows)
  ][1:] == [
    ('caches', 'replica', 16),
    ('optimizer', 'replica+fsdp', 4),  # What the host holds is not counted.
  ]


def test_text_names_dimensions_sums_and_the_replicated():
  lines = layout_report.text(
    layout_report.describe(ARGUMENTS, AXES)
  ).splitlines()
  assert 'embed 1024/replica.fsdp, mlp 48' in lines[0]
  assert 'scalar' in lines[4] and 'on the host' in lines[3]
  assert 'optimizer on the host: 0.0 MiB per device' in lines
  assert lines[-1] == ('REPLICATED: parameters/table, 64.0 MiB on every device')
