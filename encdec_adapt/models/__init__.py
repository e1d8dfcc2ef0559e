"""Transformer stacks and the models made of them.

Owns shapes, parameters, the forward pass and key/value caches. Calls `ops`
for all arithmetic that is not a projection; imports nothing of training,
sharding or data. Axes are named logically, and their meaning on a mesh is
decided by the caller (`ops.partition.use`).

Letters of shapes and einsum equations, everywhere in the package:

  B batch          D model width        N query heads      V vocabulary rows
  S encoder length E encoder width      K key/value heads  R repeats of the
  T decoder length   (for cross-        G = N / K            pattern (scanned
  L either length    attention)         H head dim           `layers` axis)
                   F mlp width          X experts

The parameter tree is plain nested dicts of float32 arrays:

  {'encoder': STACK, 'decoder': STACK}, or {'decoder': STACK}
  STACK: embedder/table, blocks/layer_j/BLOCK with leading R, tail/layer_j/
    BLOCK without (lead/layer_j/BLOCK before layers with experts),
    final_norm/scale, and head/table where it is not tied
  BLOCK: see `block.Block`

`layers_index` is the only place that maps a layer number to its leaves.
"""
