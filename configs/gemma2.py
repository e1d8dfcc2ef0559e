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
from encdec_adapt.models import presets
from encdec_adapt.planning import chips as chips_lib
from encdec_adapt.runtime import errors
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import rules as rules_lib

PLANNED = (
  'size=2b_2b,topology=v5e:4x4',
  'size=2b_2b,topology=v6e:4x4',
  'size=2b_2b,objective=ul2,topology=v5e:8x8',
  'size=9b_2b,topology=v5e:16x16',
  'size=9b_2b,topology=v6e:16x16',
  'size=9b_2b,topology=v5p:4x4x4',
  'size=9b_2b,topology=v5e:16x16,slices=2',
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
    spread(config, args['topology'], args['slices'])
  elif args['slices'] != 1:
    raise errors.UserError(
      f'slices={args["slices"]} is of a topology, which is not given; add'
      ' topology=v5e:16x16, or other chips.'
    )
  return config


def recipe(pair, objective):
  """The configuration that adapts into a pair, a `models.config` one."""
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


# Positions of one side that a chip trains on at a time.
_TOKENS = {'v5e': 4096, 'v6e': 8192, 'v5p': 4096, 'h100': 8192, 'h200': 8192}
# Bytes that a parameter's state takes in a step: float32, two moments and two
# gradients; and the share of a device's memory that all of them may take.
_STATE, _SHARE = 20, {'tpu': 0.36, 'gpu': 0.7}
# A v5p keeps products with weights for the backward pass, the widest of an MLP
# only if those of all layers take at most so many bytes.
_WIDEST = 30e9
_BFLOAT16 = 2  # Bytes.


def spread(config, topology, slices):
  """Sets mesh, microbatches and kernels for TPUs, or GPUs of a cluster.

  Groups of chips, of at most 64, hold a copy of everything; nothing is
  gathered between slices. A slice has two groups at least where that leaves
  room: what is summed over all chips of a slice, the TPU's compiler does not
  scatter, and sends twice. GPUs are taken for nodes of eight, and a copy is
  held by as few of them as can.

  Raises:
    UserError: there are no such chips, or no slice of them.
  """
  kind = topology.partition(':')[0]
  if kind not in _TOKENS:
    raise errors.UserError(
      f'topology={topology} is not known; it is one of'
      f' {", ".join(_TOKENS)} and extents, as in v5e:4x4 or h100:64.'
    )
  where = chips_lib.parse(topology, slices)
  chips = where.devices
  if where.chip.kind == 'tpu':
    config.compute.attention = 'splash'
    group = _part_of_a_slice(config.model, where)
  else:
    config.compute.attention = 'triton'
    group = _nodes_that_hold(config.model, where)
  config.mesh.fsdp = group
  config.mesh.replica = chips // group
  config.compute.remat = _remat(config, kind)
  rows = max(1, _TOKENS[kind] // config.data.decoder_length)
  batch = config.train.batch_size
  config.train.microbatches = max(1, batch // (chips * rows))
  config.train.eval_batch_size = max(chips, config.train.eval_batch_size)


def _part_of_a_slice(model, where):
  """Chips of a group: half of a slice, or all of it where that is too few."""
  chips = where.devices // where.count
  whole, half = (
    mesh_lib.in_groups(n, rules_lib.VOCABULARY_GROUP).fsdp
    for n in (chips, max(1, chips // 2))
  )
  return half if _holds(model, where, half) else whole


def _nodes_that_hold(model, where):
  """GPUs of the fewest nodes that have room for the state of a model."""
  nodes = (n * where.chip.host_chips for n in (1, 2, 4, 8))
  groups = [mesh_lib.in_groups(where.devices, n).fsdp for n in nodes]
  return next((n for n in groups if _holds(model, where, n)), groups[-1])


def _holds(model, where, group):
  """Whether so many devices have room for the state of a model.

  By its products and tables; what else there is takes little.
  """
  count = 0
  for stack in (model.encoder, model.decoder):
    attention = 2 * (stack.heads + stack.kv_heads) * stack.head_dim
    rows = stack.layers * (3 * stack.mlp_width + attention) + stack.vocab_size
    count += rows * stack.width
  room = _SHARE[where.chip.kind] * where.chip.hbm_bytes
  return _STATE * count / group <= room


def _remat(config, kind):
  """What the backward pass recomputes: as little as a chip's memory allows."""
  if kind != 'v5p':
    return 'attention'
  lengths = (config.data.encoder_length, config.data.decoder_length)
  stacks = (config.model.encoder, config.model.decoder)
  widest = sum(
    length * stack.layers * 2 * stack.mlp_width * _BFLOAT16
    for length, stack in zip(lengths, stacks, strict=True)
  )
  return 'dots' if widest <= _WIDEST else 'narrow_dots'
