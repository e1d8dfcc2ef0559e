"""Policies: sampled completions with rewards."""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
from typing import Any, ClassVar

import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.objectives import framing
from encdec_adapt.tokenizers import special_ids
from encdec_adapt.training.losses import loss as loss_lib
from encdec_adapt.training.losses import policy
from encdec_adapt.training.metrics import token_metrics
from encdec_adapt.training.recipes import preference_recipe, recipe
from encdec_adapt.training.sections import rollout_options

AXES = framing.GROUP_AXES | {
  'rewards': ('batch', None),
  'sampler_log_probs': ('batch', None, 'length'),
}


@dataclasses.dataclass(frozen=True)
class CompletionRows(recipe.Rows):
  """Rows with a prompt and a group of sampled completions."""

  def of_groups(
    self,
    groups: Sequence[Sequence[Sequence[framing.Pair]]],
    ids: special_ids.Framing,
    *,
    teacher: bool,
  ) -> framing.Batch:
    """Frames completions, with rewards and log-probabilities set to 0.

    Args:
      groups: a list with one pair for each completion of each prompt; an empty
        list gives padding.
      ids: special ids.
      teacher: whether to include the teacher's fields.
    """
    rows = [
      framing.frame_group(x, self.lengths, ids, teacher=teacher) for x in groups
    ]
    batch = framing.stack_rows(rows)
    zeros = np.zeros_like(batch['weights'])
    return batch | {'rewards': zeros[..., 0], 'sampler_log_probs': zeros}

  def padding(
    self, ids: special_ids.Framing, *, teacher: bool
  ) -> framing.Batch:
    return self.of_groups([[[]] * self.answers], ids, teacher=teacher)


@dataclasses.dataclass(frozen=True)
class Policies(recipe.Recipe):
  """Trains a policy on the rewards of its completions."""

  losses: ClassVar[type[loss_lib.Loss]] = policy.Policy
  reads_rewards: ClassVar[bool] = True
  allows_dropout: ClassVar[bool] = False

  @classmethod
  def reads_prompts(cls, options: Mapping[str, Any]) -> bool:
    """Returns True: every row is a prompt."""
    del options
    return True

  @classmethod
  def of(cls, sections: recipe.Sections) -> 'Policies':
    """Makes the recipe; see `recipe.Recipe.of`."""
    _check(sections)
    data = sections.data
    options = sections.train.rollouts
    tokens = options.tokens or data.decoder_length
    make = functools.partial(
      sections.make_loss, temperature=options.temperature
    )
    loss = make(measures_kl=options.max_kl > 0)
    # Evaluations read the start of the job even if the loss reads none: the KL
    # shows a reward that is gamed.
    reference = preference_recipe.reference(sections)
    evaluates = sections.evaluation.loss > 0 and bool(reference.path)
    measured = make(measures_kl=options.max_kl > 0 or evaluates)
    objective, lengths = sections.objectives[0], data.train.lengths
    return cls(
      loss,
      token_metrics.Completions(measured),
      sections.model,
      CompletionRows(
        objective.rows,
        dataclasses.replace(lengths, decoder=tokens),
        options.samples,
        tokens,
        objective.rows.axes | AXES,
      ),
      dict.fromkeys(measured.references, reference),
      recipe.Sampling(options.samples, tokens, options.temperature),
      sections.train.rewards,
    )


def _check(sections: recipe.Sections) -> None:
  """Checks the sampling options, and that rows have a single prompt.

  Raises:
    UserError: options or rows do not suit a policy.
  """
  options, label = sections.train.rollouts, rollout_options.LABEL
  if options.samples < 2:
    raise errors.UserError(
      f'{label}.samples is {options.samples} with {loss_lib.KIND}'
      f' {sections.loss.name!r}, which compares the completions of a prompt;'
      ' set it to at least 2.'
    )
  if options.filters:
    raise errors.UserError(
      f'{label}.top_k and top_p are not read with {loss_lib.KIND}'
      f' {sections.loss.name!r}: log-probabilities would not be those of the'
      ' distribution that was sampled from; leave them out.'
    )
  if any(
    x.rows.content != 'pair' or x.rows.answers > 1 or x.masks_inputs
    for x in sections.objectives
  ):
    raise errors.UserError(
      f'{sections.chosen}, whose rows have no prompt with a single answer, or'
      ' have masks (meap); choose the objective pairs or chat, without masks.'
    )
  if options.max_kl and sections.checkpoint.keep < 2:
    raise errors.UserError(
      f'config.checkpoint.keep is {sections.checkpoint.keep} with'
      f' {label}.max_kl, and the newest save may be over that budget; set it to'
      ' at least 2.'
    )
