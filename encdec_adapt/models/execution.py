"""Execution choices: dtype, rematerialisation, kernels and compilation.

Imports no modules of layers: rematerialisation uses the checkpoint names in
`ops`.
"""

from collections.abc import Callable, Mapping
import dataclasses

from jax import checkpoint_policies as policies

from encdec_adapt.base import keys
from encdec_adapt.ops import attention, experts, products
from encdec_adapt.telemetry import environment

# Values saved for the backward pass besides the input of each block.
#   none: everything; no rematerialisation.
#   full: nothing.
#   dots: products with weights, and attention outputs.
#   narrow_dots: as dots, without products that more than double the width (the
#     first of an MLP), which need most of the memory and half of the compute.
#   attention: attention outputs, so that attention is recomputed only inside
#     its own backward pass.
REMAT_POLICIES: dict[str, Callable[..., bool] | None] = {
  'none': None,
  'full': policies.nothing_saveable,
  'dots': policies.save_only_these_names(
    products.WIDE, products.NARROW, experts.PRODUCT, attention.SAVED
  ),
  'narrow_dots': policies.save_only_these_names(
    products.NARROW, attention.SAVED
  ),
  'attention': policies.save_only_these_names(attention.SAVED),
}


AUTO = 'auto'  # Resolved for the devices by `ComputeConfig.on`.
_UNCHOSEN = 'full'  # Policy while `remat` is still 'auto'.


@dataclasses.dataclass(frozen=True)
class ComputeConfig:
  """Keys of `config.compute`: execution choices.

  Part of every model, and hashable like models: programs are cached by it. No
  choice changes the parameters.
  """

  dtype: str = keys.key(
    AUTO,
    "Dtype of activations and products: 'float32'; 'bfloat16'; or 'auto',"
    ' bfloat16 but on CPUs that do not multiply in it (avx512_bf16 or amx_bf16'
    ' in /proc/cpuinfo), where it is float32. config.json has what it was when'
    ' the job started, which a resumed job keeps.',
    one_of=(AUTO, 'float32', 'bfloat16'),
  )
  remat: str = keys.key(
    AUTO,
    "What the backward pass recomputes: 'none', 'attention' (all but the"
    " attention outputs), 'narrow_dots' (all but those and the products with"
    " weights that do not widen), 'dots' (all but those and all products with"
    " weights) or 'full' (all); 'auto' is none on CPUs, and elsewhere the"
    ' fastest whose training step fits into nine tenths of the memory of a'
    ' device, which a job prints and stores.',
    one_of=(AUTO, *REMAT_POLICIES),
  )
  attention: str = keys.key(
    'chunked',
    "'chunked'; 'splash' on TPU (JAX's kernels; an error where they cannot"
    " honour a mask, such as merged attention); 'tokamax' on Hopper and"
    ' Blackwell GPUs (extra `gpu`, Python from 3.12; bfloat16, and likewise an'
    " error); or 'reference'.",
    one_of=tuple(attention.BACKENDS),
  )
  attention_chunk: int = keys.key(
    256, 'Queries and keys whose scores exist at once (chunked).', at_least=1
  )
  scan_unroll: int = keys.key(
    1, 'Layers of the scan that are unrolled at a time.', at_least=1
  )
  compile_cache: str = keys.key('', "Folder of compiled programs; '' for none.")

  def __post_init__(self):
    keys.check(self, 'config.compute.')

  def on(
    self, platform: str, earlier: Mapping[str, str] | None = None
  ) -> 'ComputeConfig':
    """Resolves 'auto' values for a platform.

    On accelerators `remat` stays 'auto': `training.remat_choice` chooses it by
    device memory.

    Args:
      platform: 'cpu', 'gpu' or 'tpu'.
      earlier: keys of the resumed job, which are kept; None for a new job.
    """
    values = {'dtype': 'bfloat16', 'remat': AUTO}
    if platform == 'cpu':
      values['remat'] = 'none'
      if not environment.cpu_multiplies_bfloat16():
        values['dtype'] = 'float32'
    for key in values:
      if getattr(self, key) != AUTO:
        values[key] = getattr(self, key)
      elif earlier and key in earlier:
        values[key] = earlier[key]
    return dataclasses.replace(self, **values)

  @property
  def saveable(self) -> Callable[..., bool] | None:
    """The `REMAT_POLICIES` policy of `remat`."""
    return REMAT_POLICIES[_UNCHOSEN if self.remat == AUTO else self.remat]

  @property
  def cached_attention(self) -> str:
    """Attention backend for keys from a cache.

    Kernels are not worth their overhead for its few queries, and some require
    positions equal to indices.
    """
    chosen = self.attention
    return 'chunked' if attention.BACKENDS[chosen].kernels else chosen


# The reference on every platform: float32 without rematerialisation.
REFERENCE = ComputeConfig('float32', 'none')
