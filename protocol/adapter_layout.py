"""How an adapter's numbers lie in its checkpoint, so that an engine takes all of them over in one piece. Pure words.

The weights file holds
- MATRICES, flat, in the base's dtype: of every changed projection A [rank, in] and B [rank, out], B turned and with
  scaling and gain folded in; in execution order, the As of projections that read the same input one after another;
- VECTORS, flat float32, where there are any: gains and shifts of outputs (DoRA's magnitudes, trained biases);
- SITES [7 · num_layers + 2, 7] int64: a row of COLUMNS for every place that can be changed, layer by layer in the
  order of PROJECTIONS, then one for the token embedding (its A is turned too: [vocab, rank]) and one for the head;
- whole tables that replace the base's for this adapter, [vocab, model dim] in the base's dtype, named as in TABLES.
"""

MATRICES, VECTORS, SITES = "matrices", "vectors", "sites"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROJECTION_GROUPS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
"""Projections that read the same input."""
TABLES = ("embed_tokens", "lm_head")
"""The token embedding and the head."""
COLUMNS = ("a", "b", "gain", "shift", "rank", "num_in", "num_out")
"""Byte offsets into MATRICES (a, b) and VECTORS (gain, shift), -1 where there is nothing; rank 0 has no a and b."""
PIECE_ALIGNMENT = 64
"""Groups begin on multiples of so many bytes."""
