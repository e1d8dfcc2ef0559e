"""Base class of recipes: loss, metrics, model, rows and frozen models.

A recipe opens no file: `training.jobs` opens its models and data, `train` runs
it, `planner` estimates its cost, and evaluators read its metrics.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
from typing import Any, ClassVar

from encdec_adapt.adaptation import init_section
from encdec_adapt.base import errors, keys
from encdec_adapt.checkpoints import checkpoint_section
from encdec_adapt.data import data_section
from encdec_adapt.models import architecture as architectures
from encdec_adapt.models import model_config
from encdec_adapt.objectives import (
  example_maker,
  framing,
  preferences,
  row_fields,
)
from encdec_adapt.tokenizers import special_ids
from encdec_adapt.training.losses import loss as loss_lib
from encdec_adapt.training.metrics import held_out_metrics
from encdec_adapt.training.sections import (
  evaluation_section,
  rewards_section,
  teacher_section,
  train_section,
)

Transform = Callable[[framing.Batch, special_ids.SideIds], framing.Batch]


@dataclasses.dataclass(frozen=True)
class Sections:
  """Configuration sections that determine a recipe.

  Attributes:
    loss: class of the loss selected by `config.loss.kind`.
    options: value of every key of that class.
    model: section `model`.
    data: section `data`.
    init: section `init`.
    teacher: section `teacher`.
    train: section `train`.
    checkpoint: section `checkpoint`.
    evaluation: section `evaluation`.
  """

  loss: type[loss_lib.Loss]
  options: Mapping[str, Any]
  model: model_config.ModelConfig
  data: data_section.DataConfig
  init: init_section.InitConfig
  teacher: teacher_section.TeacherConfig
  train: train_section.TrainConfig
  checkpoint: checkpoint_section.CheckpointConfig
  evaluation: evaluation_section.EvaluationConfig

  def make_loss(self, **fields: Any) -> Any:
    """Makes the loss of the configuration.

    Args:
      **fields: values of fields that are not keys.
    """
    return keys.make(self.loss, self.options, **fields)

  @property
  def objectives(self) -> Sequence[example_maker.Objective]:
    """The objectives of the training rows."""
    return self.data.objectives

  @property
  def chosen(self) -> str:
    """Names loss and objective, as the start of an error message."""
    texts = ' | '.join(map(str, self.objectives))
    return (
      f'{loss_lib.KIND} is {self.loss.name!r} and config.data.objective'
      f' {texts!r}'
    )

  def start(self) -> str:
    """Returns the path of the reference, by default the initial model."""
    if self.teacher.checkpoint or self.init.mode != 'checkpoint':
      return self.teacher.checkpoint
    return self.init.encoder


@dataclasses.dataclass(frozen=True)
class FrozenModel:
  """A frozen model of a loss.

  Attributes:
    path: a run, a folder or an address; '' if unspecified.
    accepts: accepted architectures.
    assumed: assumed shape, for plans without a path.
    is_start: whether training starts from it.
    reads_windows: whether it reads the uncorrupted text of span corruption.
  """

  path: str
  accepts: Sequence[architectures.Architecture]
  assumed: model_config.ModelConfig
  is_start: bool = False
  reads_windows: bool = False

  def without_path(self) -> 'FrozenModel':
    """Returns the model without its path: plans use the assumed shape."""
    return dataclasses.replace(self, path='')


@dataclasses.dataclass(frozen=True)
class Sampling:
  """Options of sampling completions during training.

  Attributes:
    samples: completions per prompt.
    tokens: maximum tokens of a completion, including the end token.
    temperature: divisor of the logits.
    top_k: number of most likely tokens to sample from; 0: all.
    top_p: probability mass of nucleus sampling.
    share: fraction of the rows of a batch with sampled completions.
  """

  samples: int
  tokens: int
  temperature: float
  top_k: int = 0
  top_p: float = 1.0
  share: float = 1.0

  def rows(self, batch_size: int) -> int:
    """Returns the number of rows of a batch with sampled completions."""
    return math.ceil(self.share * batch_size)


def _unchanged(rows: framing.Batch, ids: special_ids.SideIds) -> framing.Batch:
  del ids
  return rows


@dataclasses.dataclass(frozen=True)
class Rows:
  """Training rows of a step.

  Attributes:
    fields: fields of the rows of the records.
    lengths: tokens of a row.
    answers: answers per row.
    logits: positions of a row with logits.
    axes: logical axes of batch fields, see `placement.batch_axes`.
    transform: maps a batch of records on the host, given the special ids of the
      decoder's vocabulary.
    compared: whether the loss compares the rows of a batch, and so splits the
      batch into microbatches itself.
    stored_teacher: folder with stored teacher probabilities of the rows; ''
      for none.
  """

  fields: row_fields.RowFields
  lengths: framing.Lengths
  answers: int
  logits: int
  axes: Mapping[str, tuple[str | None, ...]]
  transform: Transform = _unchanged
  compared: bool = False
  stored_teacher: str = ''

  def padding(
    self, ids: special_ids.Framing, *, teacher: bool
  ) -> framing.Batch:
    """Returns a batch with one row of padding, for the shapes of the fields.

    Args:
      ids: special ids.
      teacher: whether to include the teacher's fields.
    """
    row = self.fields.frame((), self.lengths, ids, teacher=teacher)
    return self.transform(framing.stack_rows([row]), ids.decoder)


def rows_of(sections: Sections, rows: type[Rows] = Rows, **fields: Any) -> Rows:
  """Returns the rows of a configuration's records.

  Args:
    sections: sections of the configuration.
    rows: class of the rows.
    **fields: fields of `Rows` that override those of the records.
  """
  objective, lengths = sections.objectives[0], sections.data.train.lengths
  values = {
    'fields': objective.rows,
    'lengths': lengths,
    'answers': objective.rows.answers,
    'logits': lengths.decoder or lengths.encoder,
    'axes': objective.rows.axes,
  }
  return rows(**{**values, **fields})


@dataclasses.dataclass(frozen=True)
class Recipe:
  """Base class of recipes; `of` makes a complete recipe from a configuration.

  Attributes:
    losses: base class of its losses.
    reads_rewards: whether it reads `config.train.rewards`.
    allows_dropout: whether the trained model may have dropout; False if the
      loss compares log-probabilities or scores of answers.
    loss: the loss.
    metrics: the held-out metrics.
    model: the trained model, with its head.
    rows: the rows of a step.
    frozen: frozen models of loss and metrics, by name.
    sampling: options of sampling; None without sampling.
    rewards: `config.train.rewards`; None without rewards.
  """

  losses: ClassVar[type[loss_lib.Loss]]
  reads_rewards: ClassVar[bool] = False
  allows_dropout: ClassVar[bool] = True

  loss: loss_lib.Loss
  metrics: held_out_metrics.HeldOut
  model: model_config.ModelConfig
  rows: Rows
  frozen: Mapping[str, FrozenModel] = dataclasses.field(default_factory=dict)
  sampling: Sampling | None = None
  rewards: rewards_section.RewardsConfig | None = None

  @classmethod
  def reads_prompts(cls, options: Mapping[str, Any]) -> bool:
    """Returns whether a row is a single prompt for sampling.

    Args:
      options: value of every key of the loss.
    """
    del options
    return False

  @classmethod
  def of(cls, sections: Sections) -> 'Recipe':
    """Makes the recipe of a configuration.

    Args:
      sections: sections of the configuration.

    Raises:
      UserError: loss, model and objective are incompatible.
    """
    raise NotImplementedError


def require_comparisons(sections: Sections) -> None:
  """Checks that rows are preferences.

  Raises:
    UserError: rows are not preferences.
  """
  examples = {objective.rows.example for objective in sections.objectives}
  if examples != {preferences.Preference}:
    raise errors.UserError(
      f'{sections.chosen}, whose rows are not preferences; choose'
      ' the objective preferences or chat_preferences.'
    )
