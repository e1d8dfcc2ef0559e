"""The contrastive loss of two processes, over the texts of both."""

import jax
import numpy as np
import pytest

from encdec_adapt.models import build
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import placement
from encdec_adapt.training.recipes import embedding_recipe
from tests import tiny, toy_models
from tests.training import conftest, test_infonce

pytestmark = pytest.mark.multiproc

ROWS, STEPS, PARTS = 8, 3, 2

_MEMBER = """
import sys
from jax.experimental import multihost_utils
import numpy as np
from encdec_adapt.cluster import distributed
from encdec_adapt.sharding import mesh, placement
from tests.multiproc import test_embeddings
from tests.training import conftest

me = int(sys.argv[3])
distributed.initialize(sys.argv[1], 2, me)
losses, params = test_embeddings.train(mesh.MeshConfig(replica=2, fsdp=2))
params = multihost_utils.process_allgather(params, tiled=True)
np.savez(f'{sys.argv[4]}/{me}.npz', losses=losses, **conftest.host(params))
distributed.barrier('the end')
"""


def train(mesh):
  """Trains on the rows that this process holds; returns losses and params."""
  loss = conftest.make_loss(f'{test_infonce.ALL},learn_temperature=True')
  config = embedding_recipe.with_temperature(test_infonce.MODEL.config, loss)
  model = build.build(config)
  trainer = conftest.Trainer(
    mesh,
    loss=loss,
    model=model,
    axes=test_infonce.AXES,
    microbatches=PARTS,
  )
  params = trainer.where.place(
    lambda _: toy_models.params(model.config, scale=0.3), jax.random.key(0)
  )
  state = trainer.init(params)
  shards = placement.row_shards(trainer.mesh, trainer.where.rules)
  batch = test_infonce._batch(ROWS)
  batch = {name: x[shards.rows(ROWS)] for name, x in batch.items()}
  losses = []
  for _ in range(STEPS):
    state, metrics = trainer.step(state, batch)
    losses.append(float(metrics['loss']))
  return losses, state.params


@pytest.mark.long
def test_two_processes_equal_one(tmp_path):
  processes = tiny.start_programs(_MEMBER, tmp_path, 2, tmp_path, devices=2)
  codes = tiny.wait_all(processes)
  logs = [path.read_text() for path in sorted(tmp_path.glob('*.log'))]
  assert codes == [0, 0], logs
  losses, params = train(mesh_lib.MeshConfig(fsdp=1))
  for index in range(2):
    with np.load(tmp_path / f'{index}.npz') as arrays:
      np.testing.assert_allclose(arrays['losses'], losses, rtol=1e-5)
      for path, leaf in conftest.host(params).items():
        np.testing.assert_allclose(arrays[path], leaf, atol=2e-5, err_msg=path)
