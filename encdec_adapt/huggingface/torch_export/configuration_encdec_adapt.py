"""config.json of encdec_adapt models, for `transformers`."""

import transformers


class EncDecAdaptConfig(transformers.PreTrainedConfig):
  """Model shape; `model` has the keys of encdec_adapt's `config.model`."""

  model_type = 'encdec_adapt'

  def __init__(self, model=None, **fields):
    self.model = model or {}
    # Caches and generation read the decoder's sizes under these names.
    if decoder := self.model.get('decoder'):
      fields |= {
        'is_encoder_decoder': self.model['kind'] == 'encoder_decoder',
        'num_hidden_layers': decoder['layers'],
        'hidden_size': decoder['width'],
        'vocab_size': decoder['vocab_size'],
      }
    super().__init__(**fields)

  def prompt(self, text):
    """Returns a text after the (first) prefix used in training."""
    tasks = getattr(self, 'task_specific_params', None) or {}
    prefixes = tasks.get('encdec_adapt', {}).get('prefixes')
    return (prefixes or [''])[0] + text
