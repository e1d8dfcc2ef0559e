"""The sharding report: bytes, dimensions, replicas."""

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
    'up': _array((1024, 48), ('replica', 'fsdp')),
    'table': _array((2**20, 16)),
  },
  'optimizer': [
    _array((1024, 48), 'fsdp', memory_kind=memory.HOST),
    _array((), dtype=jnp.int32),
  ],
  'caches': (_array((8, 4), 'fsdp', dtype=jnp.bfloat16), None),
}
AXES = {
  'parameters': {'up': ('embed', 'mlp'), 'table': ('vocab', None)},
  'optimizer': [('embed', 'mlp'), ()],
  'caches': (('batch', 'kv_length'), None),
}


def test_rows_replicas_and_text():
  rows = layout_report.describe(ARGUMENTS, AXES)
  assert {row.name: row.bytes for row in rows} == {
    'parameters/up': 1024 * 48 * 4 // 8,
    'parameters/table': 2**20 * 16 * 4,
    'optimizer/0': 1024 * 48 * 4 // 4,
    'optimizer/1': 4,
    'caches/0': 8 * 4 * 2 // 4,
  }
  assert [row.name for row in rows if row.host] == ['optimizer/0']
  table = {'name': 'parameters/table', 'bytes': 2**26}
  assert layout_report.replicated(rows) == [table]
  lines = layout_report.text(rows).splitlines()
  assert any('embed 1024/replica.fsdp, mlp 48' in line for line in lines)
  assert 'optimizer on the host: 0.0 MiB per device' in lines
  assert lines[-1].startswith('REPLICATED: parameters/table, 64.0 MiB')
