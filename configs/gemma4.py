"""Adapting two Gemma 4 into a pair: E2B, E4B, 31B, and 26B-A4B with experts.

    python -m encdec_adapt.train --config=gemma4:size=e2b_e2b,objective=ul2 \\
      --workdir=.. --config.init.encoder=GEMMA_E2B \\
      --config.data.source='jsonl:/data/*.jsonl' \\
      --config.data.vocabulary=/data/tokenizer.json

`size` is a pair of e2b, e4b, 31b and 26b_a4b, `objective` that of
configs/gemma2.py, which has the recipe: prefixlm, the default, distills and
needs --config.teacher.checkpoint too. Both stacks read one second table in
E2B-E2B and E4B-E4B. A decoder whose values are its keys (31B, 26B-A4B) needs an
encoder of its own width.

`topology` selects a row of `SHIPPED`:

    --config=gemma4:size=e2b_e2b,topology=h100:8
    --config=gemma4:size=31b_31b,topology=v5p:8x8x8

By their compiled plans 10,000 steps take 134 and 31 hours. Heads of 512, those
of global layers, have no kernel on GPUs: they take chunks of keys and queries
(configs/attention.md), and the plan of E2B-E2B reaches 24 % of the peak.
"""

from encdec_adapt import config as config_lib
from encdec_adapt.base import errors
from encdec_adapt.configs import gemma2
from encdec_adapt.models import model_config, presets

# By the arguments after the colon.
SHIPPED = {
  'size=e2b_e2b,topology=h100:8': gemma2.ChipSettings(
    replica=1, fsdp=8, save_every=50, microbatches=64, remat='dots'
  ),
  'size=31b_31b,topology=v5p:8x8x8': gemma2.ChipSettings(
    replica=16, fsdp=16, tensor=2, save_every=200, microbatches=1
  ),
}
_SIZES = 'e2b', 'e4b', '31b', '26b_a4b'


def get_config(arg=None):
  """`size`, a pair; `objective`, of gemma2.py; `topology`, of `SHIPPED`."""
  args = config_lib.parse_arg(
    arg, size='e2b_e2b', objective='prefixlm', topology=''
  )
  pairs = {f'{encoder}_{x}': (encoder, x) for encoder in _SIZES for x in _SIZES}
  if args['size'] not in pairs:
    raise errors.UserError(
      f'size={args["size"]} is not a pair of {", ".join(_SIZES)}; write the'
      ' encoder first, as in size=e2b_e2b.'
    )
  stacks = (
    presets.stack(f'gemma4_{size}', vocab_multiple=128)
    for size in pairs[args['size']]
  )
  pair = model_config.encoder_decoder(*stacks)
  config = gemma2.recipe(pair, args['objective'])
  if args['topology']:
    _spread(config, **args)
  return config


def _spread(config, size, objective, topology):
  """Sets what depends on the chips, from the row of `SHIPPED`."""
  name = f'size={size},topology={topology}'
  if objective != 'prefixlm':
    name = f'size={size},objective={objective},topology={topology}'
  if name not in SHIPPED:
    raise errors.UserError(
      f'{name} is not in configs/gemma4.py, which has {"; ".join(SHIPPED)}.'
      ' Find a mesh for other chips with `python -m encdec_adapt.plan'
      ' --search=6`.'
    )
  gemma2.set_chips(config, SHIPPED[name])
  is_tpu = topology.startswith('v')
  config.compute.attention = 'splash' if is_tpu else 'tokamax'
