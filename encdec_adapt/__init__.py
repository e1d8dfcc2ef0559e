"""Decoder-only language models, adapted into encoder-decoder ones.

    import encdec_adapt
    model = encdec_adapt.load('runs/adapted')

Importing the package imports nothing else; the commands are its modules.
"""


def load(path, **options):
  """Loads a model; see `encdec_adapt.conversion.model_in_memory.load`."""
  from encdec_adapt.conversion import model_in_memory

  return model_in_memory.load(path, **options)
