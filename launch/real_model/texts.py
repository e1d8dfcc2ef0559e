"""The sources `training:GLOB` and `held_out:GLOB`: whole files for one split.

    config.data.source = 'training:train.jsonl + held_out:books.jsonl'
    config.data.seqio_modules = ('launch.real_model.texts',)

JSON lines with a field `text`, as in `jsonl:GLOB`. All documents of the first
are for training, all of the second are held out, so that the held-out rows
(`config.data.eval_rows`) divide evenly over the sources.
"""

from encdec_adapt.data.sources import document_source, row_sources


class _Text(row_sources.JsonlSource):
  split = ''

  def __init__(self, name: str, max_bytes: int = 0):
    super().__init__(name, max_bytes)
    # A source without held-out documents would hold out passages.
    self.divisible = False

  def in_split(
    self, document_id: str, split: str, eval_fraction: float, seed: int
  ) -> bool:
    """Returns whether the split is that of the source."""
    return split == self.split


@document_source.register('training')
class TrainingText(_Text):
  """`training:GLOB`: no document is held out."""

  form, split = 'training:GLOB', 'train'


@document_source.register('held_out')
class HeldOutText(_Text):
  """`held_out:GLOB`: every document is held out."""

  form, split = 'held_out:GLOB', 'eval'
