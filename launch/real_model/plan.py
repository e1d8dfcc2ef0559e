"""Sizes, folders and flags that preparation and card share.

This module imports nothing of the package.
"""

import dataclasses
import json
import pathlib
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
MIB = 1 << 20
ARMS = ('pair', 'decoder')
# Held-out texts. Gemma may have read all but the last.
HELD_OUT = ('books', 'web', 'own')
# The pair's task and the decoder's: a line of input, then of output.
TASKS = ('summaries', 'translation')
SEPARATOR = r'separator="\n"'  # Between the two in the decoder's rows.


@dataclasses.dataclass(frozen=True)
class Size:
  """Sizes of a run.

  Attributes:
    source: folder of the source model.
    lengths: tokens of a row of text that encoder and decoder read.
    rows: rows of a step.
    held_out: held-out rows of each text.
    steps: steps of the pair; fewer if one pass has fewer.
    fewer_steps: steps of the pair on a slow card.
    slow: seconds of a step above which a card is slow.
    warmup: warm-up steps.
    every: steps between held-out losses.
    rates: learning rates to try for each arm; without trials the second.
    trial: steps, rows and length of a row's sides in a trial.
    task_rows: rows of a step of tuning.
    task_lengths: tokens of a row of each task.
    task_passes: passes over the examples of each task.
    task_steps: steps of tuning; 0 for all passes.
    answers: most answers of each task; 0 for all.
    answer_tokens: most tokens of an answer of each task.
    control: seconds that must be left for the control to be evaluated between
      its first and its last step.
    bytes: most bytes of each text; 0 for all.
    parts: folders that the weights are copied in.
    limits: seconds of the parts; the control may take more and the pair takes
      what is left, see `card`. Tuning and answers share what is left.
    end: seconds of the run.
  """

  source: str = 'runs/gemma3_270m/source'
  lengths: tuple[int, int] = (512, 512)
  rows: int = 64
  held_out: int = 96
  steps: int = 190
  fewer_steps: int = 120
  slow: float = 0.7
  warmup: int = 20
  every: int = 48
  rates: dict[str, tuple[float, ...]] = dataclasses.field(
    default_factory=lambda: {
      'pair': (1e-4, 3e-4, 1e-3),
      'decoder': (3e-5, 1e-4, 3e-4),
    }
  )
  trial: tuple[int, int, int] = (40, 4, 128)
  task_rows: int = 32
  task_lengths: tuple[tuple[int, int], ...] = ((256, 64), (256, 256))
  task_passes: tuple[int, int] = (3, 2)
  task_steps: int = 0
  answers: tuple[int, int] = (0, 512)
  answer_tokens: tuple[int, int] = (64, 192)
  control: float = 270
  bytes: int = 0
  parts: int = 5
  limits: dict[str, float] = dataclasses.field(
    default_factory=lambda: {
      'source': 60,
      'source_scores': 35,
      'decoder': 150,
      'scores': 45,
      'tuned': 30,
      'answers': 25,
    }
  )
  end: float = 590

  @property
  def is_rehearsal(self) -> bool:
    """Whether the run is on CPUs."""
    return self is REHEARSAL


CARD = Size()
# Every step is slow: the restart is rehearsed, too.
REHEARSAL = Size(
  source='configs/decoders/base',
  lengths=(64, 64),
  rows=4,
  held_out=6,
  steps=40,
  fewer_steps=24,
  slow=0,
  warmup=2,
  every=12,
  rates={'pair': (1e-3, 3e-3), 'decoder': (3e-4, 1e-3)},
  trial=(4, 4, 32),
  task_rows=4,
  task_lengths=((64, 32), (64, 64)),
  task_passes=(1, 1),
  task_steps=8,
  answers=(4, 4),
  answer_tokens=(64, 64),
  control=0,
  bytes=200_000,
  limits=dict.fromkeys(CARD.limits, 240),
  end=3600,
)


class Folders:
  """Paths below the folder of a run, as flags name them."""

  def __init__(self, folder: str, output: str = ''):
    """Takes the folder, and another one for what comes back."""
    self.root = pathlib.Path(folder)
    self.output = pathlib.Path(output or self.root / 'output')
    self.texts = self.root / 'texts'
    self.records = self.root / 'records'
    self.copies = self.root / 'copies'
    self.trials = self.root / 'trials'
    self.card = self.root / 'card'  # Made there.

  def copy(self, number: int) -> pathlib.Path:
    """Folder that is copied as a whole; the weights' are numbered from 1."""
    return self.copies / str(number)


def read_json(path: pathlib.Path) -> Any:
  """Returns the content of a JSON file."""
  return json.loads(path.read_text())


def flags(**values: Any) -> list[str]:
  """Returns flags of the configuration; `a__b` stands for config.a.b."""
  return [
    f'--config.{name.replace("__", ".")}={value}'
    for name, value in values.items()
  ]


def text_flags(size: Size, texts: str, held_out=HELD_OUT) -> list[str]:
  """Returns the flags of the records of text.

  Args:
    size: sizes of the rows.
    texts: folder of the texts when the records were made.
    held_out: held-out texts.
  """
  sources = [f'training:{texts}/train.jsonl']
  sources += [f'held_out:{texts}/{name}.jsonl' for name in held_out]
  encoder, decoder = size.lengths
  return flags(
    data__source=' + '.join(sources),
    data__seqio_modules='launch.real_model.texts',
    data__objective='prefix_lm',
    data__encoder_length=encoder,
    data__decoder_length=decoder,
    data__passes=1,
    # A source without held-out documents has a share of the rows as well.
    data__eval_rows=size.held_out * len(sources),
    # Held-out rows are sampled from a shard.
    data__shards=1,
  )


def task_flags(size: Size, task: str, examples: str) -> list[str]:
  """Returns the flags of the records of a task.

  Args:
    size: sizes of the rows.
    task: one of `TASKS`.
    examples: file of the examples when the records were made.
  """
  index = TASKS.index(task)
  encoder, decoder = size.task_lengths[index]
  return flags(
    data__source=f'pairs:{examples}#source,target',
    data__objective=f'pairs:too_long=truncate,{SEPARATOR}',
    data__encoder_length=encoder,
    data__decoder_length=decoder,
    data__passes=size.task_passes[index],
    data__eval_fraction=0.005,
    data__eval_rows=4,
    data__shards=2,
  )


def arm_flags(size: Size, arm: str, source: str) -> list[str]:
  """Returns the flags of an arm that starts from the source.

  Both arms read the same rows; the decoder reads inputs and targets in one row
  and learns from both, as it was pretrained.
  """
  config = 'gemma3_270m' if arm == 'pair' else 'pretrained'
  loss_flags = flags(loss__on_inputs=True) if arm == 'decoder' else []
  return [
    f'--config={config}:source={source}',
    *loss_flags,
    *flags(
      optimizer__warmup_steps=size.warmup,
      train__batch_size=size.rows,
      train__eval_batch_size=min(32, size.rows),
    ),
  ]


def decoder_steps(flops: dict[str, float], pair_steps: int) -> int:
  """Returns the decoder's steps of no more FLOPs than the pair's."""
  return max(1, int(pair_steps * flops['pair'] / flops['decoder']))
