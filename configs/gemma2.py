"""Adapting Gemma 2 into T5Gemma: balanced and unbalanced pairs.

    python -m encdec_adapt.train \
      --config=configs/gemma2.py:size=9b_2b,objective=ul2 --workdir=... \
      --config.init.encoder=GEMMA_9B --config.init.decoder=GEMMA_2B \
      --config.data.source=jsonl:/data/*.jsonl \
      --config.data.vocabulary=/data/gemma2.model

The default objective, prefixlm, distills and therefore also needs a teacher:
--config.teacher.checkpoint=GEMMA_2B, the work directory of a decoder-only run
or a Hugging Face folder.

From Encoder-Decoder Gemma (arXiv 2504.06225, section 4): PrefixLM cut in half
at 4096 + 4096 tokens with distillation from the decoder's source, UL2 at 8192
+ 8192 without, about 4.2M tokens a batch, 1000 steps of cross-attention
warm-up for unbalanced pairs. Learning rate, schedule and optimizer were not
published; the values here are ours.

`topology` selects a row of `SHIPPED`, which sets the mesh and what makes the
recipe fit those chips:

    --config=configs/gemma2.py:size=9b_2b,topology=v5e:16x16
    --config=configs/gemma2.py:size=2b_2b,topology=h100:64

`objective=pairs` trains an adapted pair on answers to inputs, without a
teacher: --config.init.encoder=RUN --config.data.source=pairs:/data/*.jsonl.
With topology=h100:1 its plan has decoding on one card, too. `objective=rloo`
optimises such a pair by rewards: 64 prompts of 1024 tokens and 8 answers of 256
to each, with its reference (configs/post_training.md). `lora=16` trains
adapters of that rank over a base of 4 bits (configs/lora.md): one card of 24 GB
--config=configs/gemma2.py:size=2b_2b,objective=pairs,lora=16,topology=l4:1.

Hours of the 10,000 steps of PrefixLM, by the compiled plans in configs/plans
(estimates: `python -m encdec_adapt.plan --table=configs/plans` prints the
seconds of a step). UL2 with 2b_2b takes 40 hours on v5e:8x8; PrefixLM 87 hours
on h100:8 and 12 on h100:64.

    size      v5e:4x4  v6e:4x4  v5e:16x16  v6e:16x16  v5p:4x4x4  v5p:8x8x8
    2b_2b         157       44
    9b_2b                              19          5         30
    9b_9b                              38         10         60
    27b_27b                                                             18

10,000 steps are 42B tokens. At that point the paper's Figure 2 shows a mean
pretraining score of 46.6 for 2b_2b, 41.5 for 9b_2b and 60.1 for 9b_9b, all of
which start at 16 to 17; its best scores take 40 times as many steps.
"""

import dataclasses

from encdec_adapt import config as config_lib
from encdec_adapt.base import errors
from encdec_adapt.models import presets


@dataclasses.dataclass(frozen=True)
class ChipSettings:
  """Values of the keys that make a recipe fit some chips.

  Attributes:
    replica: groups of chips that hold the same parameters.
    fsdp: chips over which parameters are sharded by their width.
    save_every: steps between checkpoints, about half an hour.
    microbatches: parts of a batch.
    rules: name of the sharding rules.
    remat: name of the rematerialisation policy.
    offload: whether the optimizer's state is in host memory.
    optimizer: kind of optimizer.
    tensor: chips over which heads and feed-forwards are sharded.
  """

  replica: int
  fsdp: int
  save_every: int
  microbatches: int
  rules: str = 'fsdp'
  remat: str = 'attention'
  offload: bool = False
  optimizer: str = 'adamw'
  tensor: int = 1


# By the arguments after the colon. `python -m encdec_adapt.plan --search=6`
# finds all but the steps between checkpoints for other chips. AdamW's state and
# gradients of 2B-2B are 83 GiB and do not fit into one H100, nor do parameters,
# gradients and a teacher. Adafactor, which keeps no moments of the parameters'
# size, and UL2, which has no teacher, do; they are another recipe.
SHIPPED = {
  'size=2b_2b,topology=v5e:4x4': ChipSettings(
    replica=2, fsdp=8, save_every=20, microbatches=32, rules='whole_slice'
  ),
  'size=2b_2b,topology=v6e:4x4': ChipSettings(
    replica=2, fsdp=8, save_every=100, microbatches=16
  ),
  'size=2b_2b,objective=ul2,topology=v5e:8x8': ChipSettings(
    replica=2, fsdp=32, save_every=100, microbatches=4
  ),
  'size=9b_2b,topology=v5e:16x16': ChipSettings(
    replica=4, fsdp=64, save_every=200, microbatches=2
  ),
  'size=9b_2b,topology=v6e:16x16': ChipSettings(
    replica=4, fsdp=64, save_every=1000, microbatches=1
  ),
  'size=9b_2b,topology=v5p:4x4x4': ChipSettings(
    replica=2, fsdp=32, save_every=100, microbatches=8, remat='dots'
  ),
  'size=9b_2b,topology=v5p:4x4x4,slices=2': ChipSettings(
    replica=4, fsdp=32, save_every=200, microbatches=4, remat='dots'
  ),
  'size=9b_9b,topology=v5e:16x16': ChipSettings(
    replica=4,
    fsdp=64,
    save_every=100,
    microbatches=2,
    remat='full',
    offload=True,
  ),
  'size=9b_9b,topology=v6e:16x16': ChipSettings(
    replica=4, fsdp=64, save_every=500, microbatches=1, remat='full'
  ),
  'size=9b_9b,topology=v5p:4x4x4': ChipSettings(
    replica=2, fsdp=32, save_every=50, microbatches=8, remat='dots'
  ),
  'size=9b_9b,topology=v5e:16x16,slices=2': ChipSettings(
    replica=8,
    fsdp=64,
    save_every=200,
    microbatches=1,
    remat='full',
    offload=True,
  ),
  'size=27b_27b,topology=v5p:8x8x8': ChipSettings(
    replica=8, fsdp=64, save_every=200, microbatches=1, remat='narrow_dots'
  ),
  # A policy's copy that samples is divided over `tensor` alone.
  'size=2b_2b,objective=rloo,topology=v5e:4x4': ChipSettings(
    replica=1, fsdp=4, tensor=4, save_every=100, microbatches=4
  ),
  'size=2b_2b,objective=rloo,topology=v5p:2x2x4': ChipSettings(
    replica=1, fsdp=16, save_every=100, microbatches=1, remat='dots'
  ),
  'size=9b_2b,objective=rloo,topology=v5e:4x8': ChipSettings(
    replica=1, fsdp=8, tensor=4, save_every=100, microbatches=4
  ),
  'size=9b_2b,objective=rloo,topology=v5p:2x2x4': ChipSettings(
    replica=1, fsdp=16, save_every=100, microbatches=1, remat='dots'
  ),
  'size=2b_2b,topology=h100:8': ChipSettings(
    replica=1, fsdp=8, save_every=50, microbatches=32, remat='dots'
  ),
  'size=2b_2b,topology=h100:16': ChipSettings(
    replica=2, fsdp=8, save_every=100, microbatches=16, remat='dots'
  ),
  'size=2b_2b,topology=h100:64': ChipSettings(
    replica=8, fsdp=8, save_every=500, microbatches=4, remat='dots'
  ),
  'size=2b_2b,objective=ul2,topology=h100:1': ChipSettings(
    replica=1,
    fsdp=1,
    save_every=10,
    microbatches=256,
    remat='full',
    optimizer='adafactor',
  ),
  'size=2b_2b,topology=h200:1': ChipSettings(
    replica=1, fsdp=1, save_every=10, microbatches=512, remat='full'
  ),
  'size=2b_2b,topology=h200:8': ChipSettings(
    replica=1, fsdp=8, save_every=50, microbatches=16, remat='dots'
  ),
  'size=2b_2b,objective=pairs,topology=h100:1': ChipSettings(
    replica=1,
    fsdp=1,
    save_every=100,
    microbatches=32,
    remat='full',
    optimizer='adafactor',
  ),
  'size=2b_2b,objective=pairs,lora=16,topology=l4:1': ChipSettings(
    replica=1, fsdp=1, save_every=100, microbatches=64, remat='dots'
  ),
  'size=9b_9b,objective=pairs,lora=16,topology=h100:1': ChipSettings(
    replica=1, fsdp=1, save_every=100, microbatches=32, remat='dots'
  ),
  'size=9b_9b,objective=pairs,lora=16,topology=v5e:2x4': ChipSettings(
    replica=4,
    fsdp=2,
    save_every=100,
    microbatches=16,
    rules='whole_slice',
    remat='dots',
  ),
  'size=9b_9b,topology=h100:64': ChipSettings(
    replica=1, fsdp=64, save_every=100, microbatches=8, remat='dots'
  ),
  'size=9b_9b,topology=h200:64': ChipSettings(
    replica=1, fsdp=64, save_every=100, microbatches=4, remat='dots'
  ),
  'size=27b_27b,topology=h100:64': ChipSettings(
    replica=1, fsdp=64, save_every=50, microbatches=2, remat='full'
  ),
}
ON_TPU = tuple(name for name in SHIPPED if 'topology=v' in name)


def get_config(arg=None):
  """Returns the configuration of a pair.

  Args:
    arg: `size` is a pair such as 2b_2b, 9b_2b or s_s; `objective` is prefixlm,
      ul2, pairs or rloo; `lora` is a rank of adapters, 0 for none; `topology`
      (and `slices`) select a row of `SHIPPED`.
  """
  args = config_lib.parse_arg(
    arg, size='2b_2b', objective='prefixlm', lora=0, topology='', slices=1
  )
  pair = presets.t5gemma(args['size'], vocab_multiple=128)
  config = recipe(pair, args['objective'])
  if args['lora']:
    config.init.mode = 'checkpoint'
    config.train.cross_attention_warmup = 0  # Adapters train at once.
    config.train.lora.rank, config.train.lora.alpha = args['lora'], 32.0
    config.train.lora.base = 'nf4'
    config.optimizer.learning_rate = 1e-3  # As in configs/sft.py.
  if args['topology'] or args['slices'] != 1:
    spread(config, **args)
  return config


def recipe(pair, objective):
  """Returns the configuration that adapts into a pair, for any devices.

  Args:
    pair: an EncoderDecoderConfig.
    objective: prefixlm, ul2, pairs or rloo.
  """
  if objective not in ('prefixlm', 'ul2', 'pairs', 'rloo'):
    raise errors.UserError(
      f'objective={objective} is not known; choose prefixlm, ul2, pairs or'
      ' rloo.'
    )
  config = config_lib.defaults()
  config_lib.set_model(config.model, pair)
  config.init.mode = 'adapt'

  # Not Python's own text, the default: a pair of this size needs the user's.
  config.data.source = ''
  config.data.train_vocabulary = False
  if objective == 'prefixlm':
    config.data.objective = 'prefix_lm'
    length = 4096
    config.loss.kind = 'distill'
  elif objective == 'ul2':
    config.data.objective = 'ul2'
    length = 8192
  else:
    config.data.objective = 'pairs'
    length = 1024
  config.data.encoder_length = config.data.decoder_length = length
  # Gemma has 99 unused ids and a window of 8192 needs up to 2048 spans.
  config.data.sentinels = 'recycle'
  config.data.shards = 256

  config.compute.dtype = 'bfloat16'
  config.compute.attention_chunk = 512
  config.loss.chunk = 256
  config.train.batch_size = 4_194_304 // (2 * length)
  config.train.steps = 10_000
  balanced = pair.encoder.width == pair.decoder.width
  config.train.cross_attention_warmup = 0 if balanced else 1000
  config.evaluation.loss = 1000
  config.train.eval_batch_size = 64
  config.optimizer.learning_rate = 1e-4
  config.optimizer.warmup_steps = 100
  config.checkpoint.every = 1000
  if objective in ('pairs', 'rloo'):
    # The lengths of T0's fine-tuning (Wang et al. 2022), as in configs/sft.py.
    config.init.mode = 'checkpoint'
    config.data.decoder_length = 256
    config.train.batch_size, config.train.steps = 128, 1000
    config.train.cross_attention_warmup = 0
  if objective == 'rloo':
    config.loss.kind, config.train.rewards.answers = 'rloo', 1.0
    config.train.batch_size, config.optimizer.learning_rate = 64, 1e-6
  return config


def spread(config, size, objective, topology, slices, lora=0):
  """Sets what depends on the chips, from the row of `SHIPPED`."""
  name = f'size={size}' + (
    f',objective={objective}' if objective != 'prefixlm' else ''
  )
  name += f',lora={lora}' if lora else ''
  name += f',topology={topology}' + (f',slices={slices}' if slices != 1 else '')
  if name not in SHIPPED:
    known = '; '.join(SHIPPED)
    raise errors.UserError(
      f'{name} is not in configs/gemma2.py, which has {known}. Find a mesh for'
      ' other chips with `python -m encdec_adapt.plan --search=6'
      f' --config=gemma2:size={size},objective={objective},lora={lora}'
      f' --topology={topology or "v5e:4x4"} --num_slices={slices}'
      ' --config.compute.attention=splash` (tokamax on GPUs), and set'
      ' config.mesh, config.compute and config.train.microbatches.'
    )
  set_chips(config, SHIPPED[name])
  # Ampere has no kernels, and those of Blackwell have run on no card.
  kind = 'splash' if name in ON_TPU else 'chunked'
  is_hopper = topology.startswith(('h100', 'h200'))
  config.compute.attention = 'tokamax' if is_hopper else kind


def set_chips(config, settings):
  """Sets the values of a `ChipSettings`."""
  mesh, train = config.mesh, config.train
  mesh.replica, mesh.fsdp = settings.replica, settings.fsdp
  mesh.tensor = settings.tensor
  mesh.rules, config.compute.remat = settings.rules, settings.remat
  train.microbatches = settings.microbatches
  config.optimizer.offload = settings.offload
  config.optimizer.kind = settings.optimizer
  config.checkpoint.every = settings.save_every
  chips = mesh.replica * mesh.fsdp * mesh.tensor
  train.eval_batch_size = max(chips, train.eval_batch_size)
