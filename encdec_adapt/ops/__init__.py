"""Operations on arrays: masks, attention, rope, norms, embedding, losses.

Plain functions over `jax.Array`. `rope` and `relative_bias` import `base.keys`,
as their options are sections of keys; nothing else here imports another folder.
Bad arguments raise ValueError. The active mesh comes from
`encdec_adapt.ops.partition`.
"""
