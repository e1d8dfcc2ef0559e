"""Every key there is, with its default: experiments start from it.

    python -m encdec_adapt.train --config=configs/base.py --print_config

Any leaf is overridden on the command line, for example
`--config.optimizer.learning_rate=1e-3`. Keys that are not here do not exist:
a mistyped one is an error that names the nearest right one.
"""

import ml_collections

from encdec_adapt.cli import errors
from encdec_adapt.models import model_config


def stack():
  """One transformer stack; the defaults are a small Gemma 2."""
  c = ml_collections.ConfigDict()
  c.layers = 4
  c.width = 128  # Residual width D.
  c.mlp_width = 512  # One branch of the gated feed-forward, F.
  c.heads = 4
  c.kv_heads = 2
  c.head_dim = 32
  c.vocab_size = 4096
  # The embedding table is padded to a multiple of this, so that it divides
  # over the mesh; padding rows never get probability.
  c.vocab_multiple = 128
  c.pattern = ('local', 'global')  # Repeated from layer 0.
  c.window = 4096  # Tokens that a local layer sees.
  # Encoder's local window: 'exclusive' |q-k| < W, as the authors' code;
  # 'inclusive' |q-k| <= W, as transformers 5.23 with eager attention; or
  # 'centered', W keys around the query (T5Gemma 2).
  c.window_rule = 'exclusive'
  c.query_scale = 32.0  # query_pre_attn_scalar.
  c.attention_softcap = 50.0  # 0 for none.
  c.final_softcap = 30.0  # 0 for none.
  c.rope_theta = 10000.0
  # 'linear' (all frequencies divided by the factor) or 'llama3', in which
  # wavelengths above original_length / low_factor are divided and those below
  # original_length / high_factor kept.
  c.rope_scaling = 'none'
  c.rope_factor = 1.0
  c.rope_low_factor = 1.0
  c.rope_high_factor = 4.0
  c.rope_original_length = 8192  # Tokens.
  c.local_rope_theta = 0.0  # Of local layers, never scaled; 0: as the others.
  c.norm_eps = 1e-6
  c.norm_gain = 'one_plus'  # 1 + scale (Gemma), or 'direct' (Llama, Qwen).
  c.post_norms = True  # Norms after attention and feed-forward too (Gemma).
  c.qk_norm = False  # RMSNorm of queries and keys (Gemma 3, Qwen 3).
  c.activation = 'gelu_tanh'  # Or 'silu' (Llama, Qwen).
  c.attention_bias = 'none'  # 'qkv' (Qwen 2) or 'qkvo'.
  c.mlp_bias = False
  c.scale_embeddings = True  # By sqrt(width) (Gemma).
  c.eoi_token = -1  # Token with a vector of its own (T5Gemma 2); -1: none.
  c.tied_head = True  # Logits use the embedding table.
  # Mixture of experts: feed-forwards of a layer, of which a token takes some.
  c.experts = 0  # 0: one that all tokens take; leave the rest as it is then.
  c.experts_per_token = 0
  c.expert_mlp_width = 0  # 0: mlp_width.
  c.norm_topk = False  # Divide a token's shares by their sum (Mixtral).
  c.shared_expert_width = 0  # Beside them, of all tokens (Qwen 2 MoE).
  c.shared_expert_gate = False  # Times a sigmoid of the token (Qwen 2 MoE).
  c.dense_layers = 0  # First layers without experts (DeepSeek).
  return c


def get_config():
  """The defaults."""
  config = ml_collections.ConfigDict()
  config.seed = 0  # Of initialisation and of the order of rows.

  # The model that is trained.
  config.model = ml_collections.ConfigDict()
  config.model.kind = 'decoder_only'  # Or 'encoder_decoder'.
  config.model.encoder = stack()  # Unused by a decoder-only model.
  config.model.decoder = stack()
  config.model.causal_encoder = False  # The paper's ablation.
  # One attention over both stacks' keys, as T5Gemma 2, instead of two; the
  # stacks are then equally wide.
  config.model.cross_merged = False
  config.model.cross_layers = 'all'  # That read the encoder, or 'global'.
  # The encoder reads the decoder's embedding table (T5Gemma 2).
  config.model.shared_table = False

  # How it is computed.
  config.compute = ml_collections.ConfigDict()
  config.compute.dtype = 'float32'  # Of products; 'bfloat16' on TPU and GPU.
  # What the backward pass recomputes: 'none', 'attention' (all but the
  # attention outputs), 'narrow_dots' (all but those and products with weights
  # that do not widen, as an MLP's first do), 'dots' (all but those and all
  # products with weights), 'full' (all).
  config.compute.remat = 'none'
  # 'chunked'; 'splash' on TPU (JAX's kernels; refused where they cannot do
  # what is asked, such as merged attention); 'triton' on GPU (ours, every
  # mask); or 'reference'.
  config.compute.attention = 'chunked'
  config.compute.attention_chunk = 256  # Queries whose scores exist at once.
  config.compute.scan_unroll = 1  # Layers of the scan unrolled at a time.
  config.compute.compile_cache = ''  # Folder of compiled programs; '': none.

  # Where the parameters come from.
  config.init = ml_collections.ConfigDict()
  # 'random'; 'checkpoint' (the same model, continued); 'adapt' (an
  # encoder-decoder from decoder-only checkpoints); 'embeddings' (as 'adapt',
  # but only the embedding tables are kept: a control). Where 'adapt' is
  # given, a stack of config.model is its source's, but may have a multiple of
  # its kv_heads (each is repeated), a larger vocab_size (new tokens are the
  # mean of all), an untied head (a copy of the table), other rules of masks.
  config.init.mode = 'random'
  # The encoder's source: a work directory, or a Hugging Face folder.
  config.init.encoder = ''
  config.init.decoder = ''  # Of the decoder's; '' for the encoder's.
  # 'auto' copies cross-attention from self-attention where shapes allow
  # (balanced pairs) and draws it otherwise; or 'copy', 'fresh'. This and the
  # next are of 'adapt' alone.
  config.init.cross_attention = 'auto'
  # Gain of a fresh cross-attention's post-norm: 'one', or 'zero' (the
  # decoder computes what it did before, at step 0).
  config.init.post_norm_gain = 'one'

  # Text, vocabulary and records. Records are made from the text when they
  # are not there yet, by `python -m encdec_adapt.materialize`.
  config.data = ml_collections.ConfigDict()
  # 'python' (what every Python carries), 'text:GLOB', 'jsonl:GLOB' or
  # 'tfds:NAME:SPLIT'; or several with how often a pass draws each of their
  # documents, as in 'python@2 + jsonl:/data/*.jsonl@0.25'.
  config.data.source = 'python'
  config.data.max_documents = 0  # Of each source; 0 for all of them.
  config.data.max_bytes = 0  # Of each source's text; 0 for all of it.
  config.data.folder = ''  # Of the records; '' for WORKDIR/records.
  # A SentencePiece file, a tokenizer.json, a folder with one of them, or
  # 'bytes'; '' for FOLDER/vocabulary.model. '{workdir}/..' is below the job's.
  config.data.vocabulary = ''
  # Of an encoder that has another one than the decoder; '' for the same.
  config.data.encoder_vocabulary = ''
  config.data.train_vocabulary = True  # Train the file if it is not there.
  # New sentinels at the vocabulary's end, and the mode tokens that it lacks;
  # config.model.*.vocab_size has to cover them.
  config.data.add_sentinels = 0
  # 'causal_lm'; 'prefix_lm' (cut in half, as Encoder-Decoder Gemma);
  # 'prefix_lm_uniform' (Wang et al. 2022); 'ul2' (seven denoisers).
  config.data.objective = 'causal_lm'
  config.data.encoder_length = 0  # S in tokens; 0 for a causal_lm.
  config.data.decoder_length = 256  # T in tokens.
  # When a window needs more spans than there are sentinels: 'unique' is an
  # error that says so, 'recycle' uses the ids again in order.
  config.data.sentinels = 'recycle'
  # Masks, splits, packing and fractions of sources are drawn anew in each.
  config.data.passes = 1
  config.data.repeat = False  # Go on after the last pass, or stop.
  config.data.pack = True  # Several examples in a row.
  config.data.shards = 4  # Files a pass; also the most workers of use.
  config.data.workers = 2  # Processes that make records.
  config.data.seed = 0  # Of the records: split, masks, packing.
  config.data.eval_fraction = 0.04  # Of documents, held out by their id.
  config.data.eval_rows = 64  # Held-out rows; 0 for all.
  config.data.eval_pack = False  # One example in a row of held-out records.

  # A decoder-only model whose distribution is learnt.
  config.teacher = ml_collections.ConfigDict()
  # Its work directory, or a Hugging Face folder; '' for none.
  config.teacher.checkpoint = ''

  config.loss = ml_collections.ConfigDict()
  # Share of the loss that is cross-entropy to the teacher; the rest is to
  # the data. The Gemma 2 report distills with 1.
  config.loss.distillation = 0.0
  config.loss.temperature = 1.0
  config.loss.z_loss = 0.0
  config.loss.label_smoothing = 0.0
  # Of models with experts: the weight of the load-balancing loss, per layer
  # over the tokens of a microbatch (0.01 in Switch Transformer), and of the
  # router's z-loss (0.001 in ST-MoE).
  config.loss.load_balance = 0.01
  config.loss.router_z_loss = 0.0
  # Tokens of a device whose logits exist at a time. Devices that share a
  # table put theirs together: 256 of each of 16 are 4096 rows of logits.
  config.loss.chunk = 1024

  config.optimizer = ml_collections.ConfigDict()
  config.optimizer.kind = 'adamw'  # Or 'adafactor'.
  config.optimizer.learning_rate = 1e-3  # The peak.
  config.optimizer.schedule = 'cosine'  # 'linear', 'rsqrt' or 'constant'.
  config.optimizer.warmup_steps = 20  # By each group's own count.
  config.optimizer.end_fraction = 0.1  # Of the peak, at the last step.
  config.optimizer.rsqrt_steps = 10_000  # Flat steps of 'rsqrt'.
  config.optimizer.b1 = 0.9
  config.optimizer.b2 = 0.95
  config.optimizer.eps = 1e-8
  config.optimizer.weight_decay = 0.0  # Times the learning rate.
  config.optimizer.clip_norm = 1.0  # Global norm; 0 for no clipping.
  config.optimizer.decay_rate = 0.8  # Adafactor's second moment.
  config.optimizer.factored = True  # Adafactor's rows and columns.
  config.optimizer.moment_dtype = 'float32'  # AdamW's first; or 'bfloat16'.
  # Its second ones; 'bfloat16' for a b2 of at most 0.996.
  config.optimizer.second_moment_dtype = 'float32'
  # Keep the state in the hosts' memory, and copy it for each update.
  config.optimizer.offload = False

  config.train = ml_collections.ConfigDict()
  config.train.steps = 100
  config.train.batch_size = 16  # Rows a step, over all devices and hosts.
  config.train.microbatches = 1  # Parts whose gradients are accumulated.
  # First steps in which only cross-attention moves; the paper takes 1000
  # for unbalanced pairs and 0 for balanced ones.
  config.train.cross_attention_warmup = 0
  config.train.log_every = 10  # Steps between printed lines.
  config.train.eval_every = 50  # Steps; step 0 and the last are evaluated.
  config.train.eval_batch_size = 16
  config.train.max_skipped = 10  # Not-finite updates in a row before it stops.
  # A step hangs when it has taken so many times the median step, and at least
  # so many seconds: the job writes every thread's stack to WORKDIR/hang and
  # ends. 0 times: never.
  config.train.hang_factor = 20.0
  config.train.hang_step_seconds = 300.0
  # All else may take so long: compiling, evaluating, saving, the first steps.
  config.train.hang_seconds = 3600.0
  # Traced by the profiler, into WORKDIR/profile; SIGUSR1 traces the next 3.
  config.train.profile_from = 10  # First step.
  config.train.profile_steps = 0

  config.checkpoint = ml_collections.ConfigDict()
  config.checkpoint.every = 100  # Steps; the last one is always saved.
  config.checkpoint.keep = 2  # Newest checkpoints that stay.
  config.checkpoint.keep_every = 0  # Multiples that stay for ever; 0: none.

  # Sizes of the mesh axes; one may be -1, what remains of the devices.
  config.mesh = ml_collections.ConfigDict()
  config.mesh.replica = 1
  config.mesh.fsdp = -1
  config.mesh.sequence = 1
  config.mesh.tensor = 1
  # 'fsdp'; 'fsdp_replica', which shards all but the tables over replica too;
  # 'whole_slice', which shards those, too; or 'data_parallel'. Tables are
  # sharded over at most 64 devices.
  config.mesh.rules = 'fsdp'
  return config


def set_stack(section, shape):
  """Fills a stack's section from a `models.model_config.StackConfig`."""
  for key in section:
    value = getattr(shape, key)
    section[key] = model_config.NONE_AS[key] if value is None else value


def set_model(section, model):
  """Fills the section `model` from a `models.model_config.ModelConfig`."""
  for name, shape in model.stacks.items():
    set_stack(section[name], shape)
  if isinstance(model, model_config.DecoderOnlyConfig):
    section.kind = 'decoder_only'
    return
  section.kind = 'encoder_decoder'
  section.causal_encoder = model.encoder.role == 'causal'
  section.cross_merged = model.decoder.cross_merged
  section.cross_layers = model.decoder.cross_layers
  section.shared_table = model.shared_table


def parse_arg(arg, **defaults):
  """Parses 'key=value,key=value' after the config file's colon.

  Args:
    arg: what stands after the colon, or None.
    **defaults: the keys that exist, with default values; values keep the
      type of the default.

  Returns:
    A dictionary.

  Raises:
    UserError: an unknown key or a value of the wrong type; names the known.
  """
  values = dict(defaults)
  for item in filter(None, (arg or '').split(',')):
    key, equals, text = item.partition('=')
    if key not in defaults or not equals:
      known = ', '.join(f'{k}={v}' for k, v in defaults.items())
      raise errors.UserError(
        f'config argument {item!r} is not understood; after the colon stand'
        f' key=value pairs of: {known}.'
      )
    try:
      values[key] = type(defaults[key])(text)
    except ValueError as error:
      raise errors.UserError(
        f'config argument {item!r}: the value must be a'
        f' {type(defaults[key]).__name__}.'
      ) from error
  return values
