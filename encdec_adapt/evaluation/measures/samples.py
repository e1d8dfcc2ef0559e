"""Samples of a model in training: greedy answers to held-out inputs.

Samples are printed and appended to `samples.jsonl`, one line each, with `step`,
`row` (of the held-out records), `prompt`, `reference` and `output`: text with
special tokens by name. Long prompts are truncated to their end. This module
imports nothing from `evaluation`.
"""

from typing import Any

import numpy as np

from encdec_adapt.cluster import distributed
from encdec_adapt.files import append_log, paths
from encdec_adapt.generation import model_in_memory
from encdec_adapt.inference import engine
from encdec_adapt.tokenizers import chat_format
from encdec_adapt.training import setup

FILE = 'samples.jsonl'
_COUNT = 2  # Number of continued held-out rows, from the first.
_LONGEST = 1000  # Maximum characters of a written prompt.
_SHOWN = 160  # Maximum characters of a printed text.


class Sampler:
  """Continues the inputs of some held-out rows."""

  def __init__(self, workdir: str, data: setup.Data, evaluated: int | None):
    """Reads the rows, and drops samples of repeated steps.

    Args:
      workdir: folder of `samples.jsonl`.
      data: vocabularies and held-out rows, with a single pair each.
      evaluated: last evaluated step, or None; samples of later steps are
        dropped.
    """
    if distributed.is_lead():
      last = -1 if evaluated is None else evaluated
      self._log = append_log.Log(paths.at(workdir) / FILE)
      self._log.keep(
        sample
        for sample, _ in self._log.lines
        if sample and sample['step'] <= last
      )
    # The same rows at every step, so that answers can be compared.
    held_out, self._sides = data.evaluation, data.vocabularies.sides
    self._rows = held_out.read(range(min(_COUNT, len(held_out))))
    # Inputs start with the prefix; a printed prompt only shows its end.
    objective = held_out.spec.objectives[0]
    prefix = objective.options.get('prefix')
    if prefix and distributed.is_lead():
      print(f'samples: prompts begin with {prefix!r}')
    self._max_tokens, framing = held_out.spec.decoder_length, held_out.framing
    ends = [framing.decoder.eos]
    # A chat answer ends with its turn, before EOS.
    if objective.rows.ends_turns:
      ends.append(chat_format.end_of_turn(self._sides['decoder']))
    self._ids = engine.SpecialIds(
      framing.decoder.bos,
      tuple(ends),
      framing.decoder.pad,
      self._sides['decoder'].size,
      framing.decoder.forced,
    )

  def __call__(
    self, step: int, loaded: model_in_memory.LoadedModel
  ) -> list[dict[str, Any]]:
    """Prints and appends samples; every process takes part.

    Args:
      step: step of the model.
      loaded: a model of pairs.

    Returns:
      The appended lines; empty except on process 0.
    """
    # A decoder-only model reads the inputs like a teacher: their vocabulary may
    # differ from the encoder's.
    side = loaded.stored.prompt_side
    pairs = [pair for pair, *_ in self._rows]
    inputs = [
      pair.inputs if side == 'encoder' else pair.teacher_inputs
      for pair in pairs
    ]
    frame = self._sides[side].ids.frame
    requests = [
      engine.Request(np.array(frame(ids, side), np.int32), self._max_tokens)
      for ids in inputs
    ]
    # The engine's copy of the parameters is freed after sampling.
    outputs = dict(
      loaded.engine(
        rows=loaded.rows(len(self._rows)),
        ids=self._ids,
        decode=self._sides['decoder'].decode_generated,
      ).run(requests)
    )
    if not distributed.is_lead():
      return []
    samples = []
    for row, (pair, ids) in enumerate(zip(pairs, inputs, strict=True)):
      sample = {
        'prompt': self._text(side, ids)[-_LONGEST:],
        'reference': self._text('decoder', pair.targets),
        'output': self._text('decoder', outputs[row].tokens),
      }
      print(f'step {step}: sample {row + 1} of {len(self._rows)}')
      for name, text in sample.items():
        if len(text) > _SHOWN:
          # Keep the end: it is next to the answer.
          is_prompt = name == 'prompt'
          text = (
            f'... {text[-_SHOWN:]}' if is_prompt else f'{text[:_SHOWN]} ...'
          )
        print(f'  {name:<9} {text!r}')
      samples.append({'step': step, 'row': row, **sample})
    self._log.write(*samples)
    self._log.flush()
    return samples

  def _text(self, side: str, tokens: np.ndarray) -> str:
    return self._sides[side].decode_generated(tokens, show_special=True)
