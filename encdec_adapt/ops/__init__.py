"""Operations on arrays: masks, attention, rope, norms, embedding, losses.

Plain functions over `jax.Array`. Nothing here imports another package of
ours; bad arguments raise ValueError. The active mesh comes from
`encdec_adapt.ops.partition`.
"""
