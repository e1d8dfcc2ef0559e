"""Cross-entropy to the targets, the default loss.

The kernels that compute it chunk by chunk are in `ops.vocabulary_loss`.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any, ClassVar

from encdec_adapt.base import errors, keys
from encdec_adapt.models import model_config
from encdec_adapt.objectives import framing
from encdec_adapt.ops import vocabulary_loss
from encdec_adapt.tokenizers import special_ids
from encdec_adapt.training.losses import loss


@dataclasses.dataclass(frozen=True)
class CrossEntropy(loss.Loss):
  """Cross-entropy to the data in nats, over a whole vocabulary."""

  name: ClassVar[str] = 'cross_entropy'
  # `distillation` is the divergence from a teacher, 0 without it.
  metrics: ClassVar[Mapping[str, str]] = loss.Loss.metrics | {
    'cross_entropy': 'mean',
    'distillation': 'mean',
    'z_loss': 'mean',
    'accuracy': 'mean',
  }

  z_loss: float = keys.key(
    0.0, 'Weight of the squared log-normaliser.', at_least=0
  )
  label_smoothing: float = keys.key(
    0.0, 'Share of the target spread over the vocabulary.', at_least=0, below=1
  )
  on_inputs: bool = keys.key(
    False,
    'Causal decoders on pairs: predict the inputs too, not the targets only.',
  )

  def check(
    self, model: model_config.ModelConfig, objectives: loss.Objectives
  ) -> None:
    """Checks the rows, and whether the model can predict their inputs.

    Raises:
      UserError: rows have several answers or texts, or `on_inputs` is set and
        the model reads the inputs before it predicts, or they have masks.
    """
    if any(x.answers > 1 or x.rows == 'texts' for x in objectives):
      raise errors.UserError(
        f'the loss is {self.name} and config.data.objective is'
        f' {" | ".join(map(str, objectives))!r}, whose rows have several'
        ' answers or texts; choose a loss that compares them (config.loss), or'
        ' another objective.'
      )
    # The objectives of a mixture all feed the same fields.
    kind, feeds = model.architecture, objectives[0].feeds
    if self.on_inputs and not (kind.predicts_inputs and feeds == 'pair'):
      raise errors.UserError(
        f'config.loss.on_inputs is set with config.model.kind {kind.name} and'
        f' objective {" | ".join(map(str, objectives))!r}; only a causal'
        ' decoder (decoder_only) on pairs can predict the inputs: others read'
        ' them before.'
      )
    if self.on_inputs and any(x.masks_inputs for x in objectives):
      raise errors.UserError(
        'config.loss.on_inputs is set with objective'
        f' {" | ".join(map(str, objectives))!r}, of which inputs are masks that'
        ' the model would learn to predict; leave out on_inputs, or the masks.'
      )

  def frame(self, rows: loss.Rows, ids: special_ids.SideIds) -> loss.Rows:
    """Makes the inputs targets, too, if `on_inputs` is set."""
    return framing.on_all_tokens(rows, ids.pad) if self.on_inputs else rows

  def logits(self, lengths: framing.Lengths) -> int:
    """Returns the number of targets, or with `on_inputs` of all positions."""
    return lengths.teacher if self.on_inputs else super().logits(lengths)

  def terms(
    self,
    outputs: loss.Outputs,
    references: Mapping[str, loss.Outputs],
    batch: loss.Batch,
  ) -> loss.Terms:
    """Computes the sums of the loss and its parts; see `loss.Loss.terms`."""
    # A single pass for both distributions: chunk by chunk, so that the logits
    # of neither are in memory whole.
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
      teacher=self.teacher(references, batch),
    )
    # Always reported, so that the records of all runs have the same names.
    return {
      'loss': sums.total,
      'cross_entropy': sums.cross_entropy,
      'distillation': sums.divergence,
      'z_loss': sums.z_loss,
      'accuracy': sums.correct,
    }

  def teacher(
    self, references: Mapping[str, loss.Outputs], batch: loss.Batch
  ) -> Any:
    """Returns the distribution to learn besides the targets, or None."""
    del references, batch
