"""Batches of on-policy distillation (GKD, arXiv:2306.13649, algorithm 1).

The first rows of a batch, whose order is shuffled, get a completion that the
student samples in the place of their targets: their number is a share of the
batch. Samples are data, through which no gradient passes.
"""

from collections.abc import Callable
import contextlib

from encdec_adapt.data.records import row_order
from encdec_adapt.models import base_model
from encdec_adapt.objectives import framing
from encdec_adapt.sharding import placement as placement_lib
from encdec_adapt.training import policy_batches, rollouts, setup
from encdec_adapt.training import state as state_lib
from encdec_adapt.training.recipes import recipe as recipe_lib
from encdec_adapt.training.sections import train_section


class OnPolicyBatches:
  """Samples and frames batches in which completions replace targets."""

  def __init__(
    self,
    placement: state_lib.Placement,
    recipe: recipe_lib.Recipe,
    data: setup.Data,
    spent: Callable[[int, str], contextlib.AbstractContextManager],
    train: train_section.TrainConfig,
    seed: int,
    teacher: bool,
  ):
    """Prepares the sampler.

    Args:
      placement: the student, and its mesh.
      recipe: the kind of training, with its sampling.
      data: vocabularies and records.
      spent: context of a phase of a step: 'sample'.
      train: section `train` of the configuration.
      seed: seed of the job.
      teacher: whether to make the teacher's fields.
    """
    self._rows, self._data, self._spent = recipe.rows, data, spent
    self._batch_size, self._teacher = train.batch_size, teacher
    shards = placement_lib.row_shards(placement.mesh, placement.rules)
    self._count = recipe.sampling.rows(train.batch_size)
    # Prompts have to divide over the mesh, too.
    self._filler = [None] * (-self._count % shards.total)
    self._local = shards.rows(train.batch_size)
    self._sampler = rollouts.Sampler(
      placement,
      data.train,
      data.vocabularies.decoder,
      recipe.sampling,
      seed,
    )

  def __call__(
    self,
    step: int,
    params: base_model.Params,
    order: row_order.Order,
    position: int,
  ) -> tuple[framing.Batch, dict[str, float]]:
    """Makes the batch of a step; every process calls it together.

    Args:
      step: step of the parameters, from 0.
      params: parameters of the student.
      order: order of the rows.
      position: position of the first row of the batch in it.

    Returns:
      This process's rows of the batch, and metrics of all completions.
    """
    numbers = [order.row(position + i) for i in range(self._batch_size)]
    records, count = self._data.train, self._count
    pairs = policy_batches.read_pairs(records, numbers)
    prompts = pairs[:count] + self._filler
    with self._spent(step, 'sample'):
      samples = self._sampler(
        params,
        prompts,
        numbers[:count] + [row_order.FILLER] * len(self._filler),
        step,
      )
    chosen = [i for i, pair in enumerate(pairs[:count]) if pair is not None]
    for i in chosen:
      pairs[i] = pairs[i]._replace(targets=samples.completion(i, 0))
    rows = framing.stack_rows(
      [
        framing.frame_row(
          [pairs[i]] if pairs[i] else [],
          self._rows.lengths,
          records.framing,
          teacher=self._teacher,
        )
        for i in self._local
      ]
    )
    # Some were drawn: rows of filler follow the last row of a job.
    drawn, divisor = samples.counts[chosen].sum(), len(chosen)
    metrics = {
      'sampled_tokens': float(drawn),
      'length': float(drawn / divisor),
      'cut_short': float((~samples.ended[chosen]).sum() / divisor),
    }
    return self._rows.frame(rows, records.framing.decoder), metrics
