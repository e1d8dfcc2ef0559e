"""Adapting any two released decoders, by the names of their shapes.

    python -m encdec_adapt.train \
      --config=configs/presets.py:encoder=gemma3_1b,target=t5gemma2 \
      --dry_run --config.init.encoder=GEMMA

Names are those of `encdec_adapt.models.presets.STACKS`: gemma3_270m,
gemma4_e2b, llama3.2_1b, qwen3_0.6b, .. `configs/pretrained.py` takes the same
from the folders of the models, and is what to use where they are there.
Everything but the model is as in `configs/gemma2.py`.
"""

from encdec_adapt import config as config_lib
from encdec_adapt.configs import gemma2
from encdec_adapt.huggingface import config_json
from encdec_adapt.models import presets


def get_config(arg=None):
  """`encoder` and, where it is another, `decoder`: names of shapes.

  `target` is t5gemma, t5gemma2, or empty for any family; `objective` prefixlm
  or ul2.
  """
  args = config_lib.parse_arg(
    arg, encoder='gemma3_1b', decoder='', target='', objective='prefixlm'
  )
  names = args['encoder'], args['decoder'] or args['encoder']
  stacks = [presets.stack(name, vocab_multiple=128) for name in names]
  pair = config_json.pair_of(*stacks, target=args['target'])
  return gemma2.recipe(pair, args['objective'])
