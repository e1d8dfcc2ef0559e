"""Cross-entropy to the targets, the default loss.

`ops.vocabulary_loss` has the chunked kernels.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any, ClassVar

from encdec_adapt.base import keys
from encdec_adapt.ops import vocabulary_loss
from encdec_adapt.training.losses import loss


@dataclasses.dataclass(frozen=True)
class CrossEntropy(loss.Loss):
  """Cross-entropy to the data in nats, over the vocabulary or labels."""

  name: ClassVar[str] = 'cross_entropy'
  # `distillation` is the divergence from a teacher, 0 without it.
  metrics: ClassVar[Mapping[str, str]] = loss.Loss.metrics | {
    'cross_entropy': 'mean',
    'distillation': 'mean',
    'z_loss': 'mean',
    'accuracy': 'mean',
  }

  z_loss: float = keys.key(
    0.0, 'Weight of the squared log-normaliser.', at_least=0, shared=True
  )
  label_smoothing: float = keys.key(
    0.0,
    'Share of the target spread over the vocabulary.',
    at_least=0,
    below=1,
    shared=True,
  )
  on_inputs: bool = keys.key(
    False,
    'Causal decoders: predict the inputs of examples too, not targets only.',
    shared=True,
  )

  def terms(
    self,
    outputs: loss.Outputs,
    frozen: loss.Readers,
    batch: loss.Batch,
  ) -> loss.Terms:
    """Computes the sums of the loss and its parts; see `loss.Loss.terms`."""
    # A single chunked pass for both distributions, without full logits of
    # either in memory.
    sums = vocabulary_loss.cross_entropy(
      outputs.hidden,
      outputs.table,
      batch['targets'],
      batch['weights'],
      vocab_size=outputs.config.outputs,
      softcap=outputs.config.final_softcap,
      z_loss=self.z_loss,
      label_smoothing=self.label_smoothing,
      chunk=self.chunk,
      teacher=self._teacher(frozen, batch),
    )
    # Always reported, so that all runs log the same metrics.
    return {
      'loss': sums.total,
      'cross_entropy': sums.cross_entropy,
      'distillation': sums.divergence,
      'z_loss': sums.z_loss,
      'accuracy': sums.correct,
    }

  def _teacher(self, frozen: loss.Readers, batch: loss.Batch) -> Any:
    """Returns the teacher's distribution, None without a teacher."""
    del frozen, batch
