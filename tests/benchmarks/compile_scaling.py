"""How the training step's program grows with layers and with devices.

Compiles a small pair ahead of time for TPUs (libtpu). Layers are scanned
over and every device runs the same program, so that neither the traced text
nor the time to compile should grow with either; ratios are to the first row.
"""

from collections.abc import Iterator, Sequence
import time
from typing import Any

import jax

from encdec_adapt import config as config_lib
from encdec_adapt import plan
from encdec_adapt.cli import command
from encdec_adapt.planning import chips, programs
from encdec_adapt.sharding import mesh as mesh_lib
from tests.benchmarks import results

_SHAPE = {
  'width': 512,
  'mlp_width': 1024,
  'heads': 4,
  'kv_heads': 2,
  'head_dim': 128,
  'vocab_size': 8192,
}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Measures and prints."""
  arguments = results.parser(
    __doc__,
    layers=[4, 8, 16, 32],
    topologies=['v5e:2x2', 'v5e:4x4', 'v5e:8x8'],
  ).parse_args(argv)
  rows = list(_rows(arguments.layers, arguments.topologies))
  for row in rows:
    row['text ratio'] = row['traced KiB'] / rows[0]['traced KiB']
    row['time ratio'] = row['compiled s'] / rows[0]['compiled s']
  return results.report('compile_scaling', rows, arguments)


def _rows(layers: list[int], topologies: list[str]) -> Iterator[dict[str, Any]]:
  """Every number of layers on the first topology, the fewest on the others."""
  cases = [(count, topologies[0]) for count in layers]
  cases += [(layers[0], topology) for topology in topologies[1:]]
  for count, topology in cases:
    where = chips.parse(topology)
    flags = [
      '--config=configs/gemma2.py',
      '--config.compute.attention=splash',
      '--config.compute.remat=attention',
      '--config.loss.distillation=0',
      '--config.data.encoder_length=512',
      '--config.data.decoder_length=512',
      f'--config.train.batch_size={where.devices}',
      f'--config.train.eval_batch_size={where.devices}',
    ]
    for side in ('encoder', 'decoder'):
      shape = {**_SHAPE, 'layers': count}
      flags += [f'--config.model.{side}.{k}={v}' for k, v in shape.items()]
    values = command.parse(plan.define_flags, flags)
    settings = config_lib.load(values.config, sources=False)
    mesh = mesh_lib.make_mesh(settings.mesh, chips.devices_of(where))
    began = time.perf_counter()
    lowered = programs.Job.of('train', settings, mesh).program().lower(mesh)
    traced = time.perf_counter()
    with jax.set_mesh(mesh):
      lowered.compile()
    yield {
      'layers': f'{count} + {count}',
      'devices': where.devices,
      'traced KiB': len(lowered.as_text()) / 1024,
      'traced s': traced - began,
      'compiled s': time.perf_counter() - traced,
    }


if __name__ == '__main__':
  main()
