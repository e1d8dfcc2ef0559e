"""Transformer stacks and models.

Owns shapes, parameters, the forward pass and key/value caches. Calls `ops` for
all arithmetic except projections; imports nothing of training, sharding or
data. Axes have logical names, and the caller maps them to a mesh
(`ops.partition.use`).

Letters in shapes and einsum equations, everywhere in the package:

  B batch          D model width        N query heads      V vocabulary rows
  S encoder length E encoder width      K key/value heads  R repeats of the
  T decoder length   (for cross-        G = N / K            pattern (scanned
  L either length    attention)         H head dim           `layers` axis)
                   F mlp width          X experts

The parameter tree consists of nested dicts of float32 arrays:

  {'encoder': STACK, 'decoder': STACK}, or {'decoder': STACK}
  STACK: embedder/table, blocks/layer_j/BLOCK with leading R, tail/layer_j/
    BLOCK without, final_norm/scale, and head/table if untied; before layers
    with experts lead/layer_j/BLOCK; for layers that share keys and values
    sharing_blocks and sharing_tail, like blocks and tail; with a second table
    layer_inputs/{table, projection, scale}; of BERT embedder/{positions, types,
    norm} and transform, of GPT-2 embedder/positions
  BLOCK: see `block.Block`

Only `layers_index` maps layer numbers to leaves.
"""
