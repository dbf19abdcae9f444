"""Decoders: weights and tokens in, hidden states and logits out. Knows nothing of sequences or requests."""
