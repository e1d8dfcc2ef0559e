"""Operations on arrays: masks, attention, rope, norms, embedding, losses.

Plain functions over `jax.Array`. `rope` imports `base.option_strings` to
parse the text of a scaling; nothing else here imports another folder. Bad
arguments raise ValueError. The active mesh comes from
`encdec_adapt.ops.partition`.
"""
