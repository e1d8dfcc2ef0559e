"""Adapting Gemma 2 into T5Gemma: balanced and unbalanced pairs.

    python -m encdec_adapt.train \
      --config=configs/gemma2.py:size=9b_2b,objective=ul2 --workdir=... \
      --config.init.encoder=GEMMA_9B --config.init.decoder=GEMMA_2B \
      --config.data.source=jsonl:/data/*.jsonl \
      --config.data.vocabulary=/data/gemma2.model

The default objective, prefixlm, distills: it also needs a teacher,
--config.teacher.checkpoint=GEMMA_2B, the work directory of a decoder-only run
or a Hugging Face folder.

What Encoder-Decoder Gemma states (arXiv 2504.06225, section 4) is set here:
PrefixLM cut in half at 4096 + 4096 tokens with distillation from the
decoder's source, UL2 at 8192 + 8192 without, about 4.2M tokens a batch, 1000
steps of cross-attention warm-up for unbalanced pairs. Learning rate,
schedule and optimizer were not published: the values here are ours.

`topology` says how the same recipe is spread over chips, so that it fits them:

    --config=configs/gemma2.py:size=9b_2b,topology=v5e:16x16,slices=2
    --config=configs/gemma2.py:size=2b_2b,topology=h100:64

What such a job needs of each chip is planned in configs/plans; the chips of
`PLANNED` are those that it is made for.
"""

from configs import base
from encdec_adapt.cli import errors
from encdec_adapt.models import model_flops, parameters, presets
from encdec_adapt.planning import chips as chips_lib
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import rules as rules_lib
from encdec_adapt.telemetry import flops as flops_lib

PLANNED = (
  'size=2b_2b,topology=v5e:4x4',
  'size=2b_2b,topology=v6e:4x4',
  'size=2b_2b,objective=ul2,topology=v5e:8x8',
  'size=9b_2b,topology=v5e:16x16',
  'size=9b_2b,topology=v6e:16x16',
  'size=9b_2b,topology=v5p:4x4x4',
  'size=9b_2b,topology=v5p:4x4x4,slices=2',
  'size=9b_9b,topology=v5e:16x16',
  'size=9b_9b,topology=v6e:16x16',
  'size=9b_9b,topology=v5p:4x4x4',
  'size=9b_9b,topology=v5e:16x16,slices=2',
  'size=27b_27b,topology=v5p:8x8x8',
)


def get_config(arg=None):
  """`size` is a pair such as 2b_2b, 9b_2b, s_s; `objective` prefixlm or ul2.

  `topology` is of TPUs, such as v5e:4x4, and `slices` how many of them; or of
  GPUs, such as h100:64.
  """
  args = base.parse_arg(
    arg, size='2b_2b', objective='prefixlm', topology='', slices=1
  )
  pair = presets.t5gemma(args['size'], vocab_multiple=128)
  config = recipe(pair, args['objective'])
  if args['topology']:
    spread(config, pair, args['topology'], args['slices'])
  elif args['slices'] != 1:
    raise errors.UserError(
      f'slices={args["slices"]} is of a topology, which is not given; add'
      ' topology=v5e:16x16, or other chips.'
    )
  return config


def recipe(pair, objective):
  """The configuration that adapts into a pair, a `models.model_config` one."""
  if objective not in ('prefixlm', 'ul2'):
    raise errors.UserError(
      f'objective={objective} is not known; choose prefixlm or ul2.'
    )
  config = base.get_config()
  base.set_model(config.model, pair)
  config.init.mode = 'adapt'

  config.data.train_vocabulary = False
  if objective == 'prefixlm':
    config.data.objective = 'prefix_lm'
    length = 4096
    config.loss.distillation = 1.0
  else:
    config.data.objective = 'ul2'
    length = 8192
  config.data.encoder_length = config.data.decoder_length = length
  # Gemma has 99 unused ids and a window of 8192 needs up to 2048 spans.
  config.data.sentinels = 'recycle'
  config.data.shards = 256

  config.compute.dtype = 'bfloat16'
  config.compute.remat = 'full'
  config.compute.attention_chunk = 512
  config.loss.chunk = 256
  config.train.batch_size = 4_194_304 // (2 * length)
  config.train.steps = 10_000
  balanced = pair.encoder.width == pair.decoder.width
  config.train.cross_attention_warmup = 0 if balanced else 1000
  config.train.eval_every = 1000
  config.train.eval_batch_size = 64
  config.optimizer.learning_rate = 1e-4
  config.optimizer.warmup_steps = 100
  config.checkpoint.every = 1000
  return config


# Positions of one side that a chip trains on at a time: as many as the plans
# below `configs/plans` have memory for; those of GPUs are by shapes.
_TOKENS = {'v5e': 4096, 'v6e': 8192, 'v5p': 4096, 'h100': 8192, 'h200': 8192}
# Bytes that a parameter's state takes in a step: float32, two moments and two
# gradients; and the share of a device's memory that they and what layers save
# may take. More did not fit when it was compiled (9B-9B on v5e:16x16: 0.77, of
# which it needs 1.28 in all), this much does (2B-2B on v5e:4x4: 0.55, 0.92).
_STATE, _SHARE = 20, 0.6
# A v5p keeps products with weights for the backward pass, the widest of an MLP
# only if those of all layers take at most so many bytes: with 9B-9B's 20 GB it
# needs 76 of 96 GiB, and 27B-27B has 56 GB.
_WIDEST = 30e9
_BFLOAT16 = 2  # Bytes.
_SECONDS = 1800  # Between checkpoints.
_MFU = 0.5  # By which steps are taken to run, for that.


def spread(config, pair, topology, slices):
  """Sets mesh, microbatches and kernels for TPUs, or GPUs of a cluster.

  Groups of chips, of at most 64, hold a copy of everything; nothing is
  gathered between slices. Each half of a slice is a group where that leaves
  room; where it does not, a slice alone shares one copy between its halves.
  GPUs are taken for nodes of eight, and a copy is held by as few of them as
  can. Where the largest group has no room for the optimizer's state, that is
  in the hosts' memory, and everything is recomputed.

  Raises:
    UserError: there are no such chips, or no slice of them; or the batch does
      not divide over them.
  """
  kind = topology.partition(':')[0]
  if kind in chips_lib.CHIPS and kind not in _TOKENS:
    raise errors.UserError(
      f'topology={topology}: there is no recipe for {kind}; there are for'
      f' {", ".join(_TOKENS)}. Take one of those and change config.mesh,'
      ' config.compute and config.train.microbatches.'
    )
  if kind not in _TOKENS:
    raise errors.UserError(
      f'topology={topology} is not known; it is one of'
      f' {", ".join(_TOKENS)} and extents, as in v5e:4x4 or h100:64.'
    )
  where = chips_lib.parse(topology, slices)
  chips, batch = where.devices, config.train.batch_size
  if batch % chips:
    raise errors.UserError(
      f'topology={topology}: {chips} chips do not divide the batch of {batch}'
      ' rows; take a power of two.'
    )
  length = config.data.decoder_length
  rows = max(1, _TOKENS[kind] // length)
  if where.chip.kind == 'tpu':
    config.compute.attention = 'splash'
    groups = _parts_of_a_slice(where)
  else:
    config.compute.attention = 'triton'
    groups = _nodes(where)
  holds = [n for n in groups if _holds(pair, where, n, rows * length)]
  group = holds[0] if holds else groups[-1]
  if group == chips and where.chip.kind == 'tpu' and chips > 1:
    config.mesh.rules, group = 'whole_slice', chips // 2
  config.mesh.fsdp = group
  config.mesh.replica = chips // group
  config.optimizer.offload = not holds
  config.compute.remat = _remat(pair, kind, length) if holds else 'full'
  config.train.microbatches = max(1, batch // (chips * rows))
  config.train.eval_batch_size = max(chips, config.train.eval_batch_size)
  flops = batch * flops_lib.TRAINING
  flops *= model_flops.forward(pair, length, length, 2 * length)
  seconds = flops / (_MFU * where.chip.flops * chips)
  every = _rounded(_SECONDS / seconds)
  config.checkpoint.every = min(every, config.checkpoint.every)


def _parts_of_a_slice(where):
  """Sizes of groups: half of a slice's chips, or all of them."""
  chips = where.devices // where.count
  return [
    mesh_lib.in_groups(n, rules_lib.VOCABULARY_GROUP).fsdp
    for n in (max(1, chips // 2), chips)
  ]


def _nodes(where):
  """Sizes of groups: GPUs of one node, or of several."""
  nodes = (n * where.chip.host_chips for n in (1, 2, 4, 8))
  return [mesh_lib.in_groups(where.devices, n).fsdp for n in nodes]


def _holds(pair, where, group, tokens):
  """Whether so many devices have room for a job's state, and what is saved.

  Args:
    pair: its model.
    where: the devices.
    group: how many of them hold a copy.
    tokens: of one side, that a device trains on at a time.
  """
  state = _STATE * parameters.count(pair) / group
  saved = 0
  for stack in (pair.encoder, pair.decoder):
    attentions = 2 if stack is pair.decoder else 1
    kept = stack.width + attentions * stack.heads * stack.head_dim
    saved += stack.layers * kept * tokens * _BFLOAT16
  return state + saved <= _SHARE * where.chip.hbm_bytes


def _remat(pair, kind, length):
  """What the backward pass recomputes: of a v5p, as little as memory allows."""
  if kind != 'v5p':
    return 'attention'
  widest = sum(
    length * stack.layers * 2 * stack.mlp_width * _BFLOAT16
    for stack in (pair.encoder, pair.decoder)
  )
  return 'dots' if widest <= _WIDEST else 'narrow_dots'


def _rounded(steps):
  """A number of steps, down to 1, 2 or 5 times a power of ten."""
  sizes = (m * 10**n for n in range(4) for m in (1, 2, 5))
  return max((n for n in sizes if n <= steps), default=1)
