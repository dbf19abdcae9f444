"""Words of the kernels: what a step's attention and adapters look like as packed tensors."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMeta:
    """Where each sequence's new tokens and cached positions lie in a packed step of T tokens and B sequences.

    Shapes: all int32 on the device of the tensors. query_starts_B1 [B+1] are offsets into T (first 0, last T);
    context_lens_B [B] counts cached positions including this step's new tokens, so sequence b's queries sit at
    positions [context_len - num_new, context_len); block_tables_BN [B, N] lists cache blocks in order (entries past
    the context are never read). `max_query_len` is the largest number of new tokens of one sequence.
    """

    query_starts_B1: Tensor
    context_lens_B: Tensor
    block_tables_BN: Tensor
    max_query_len: int


@dataclass(frozen=True, slots=True)
class LoraSegment:
    """Rows [start, end) of a step use one adapter: y = gain · y + shift + (x · aᵀ) · bᵀ, scaling folded into `b_NR`.

    Shapes: a_RM [R, M], b_NR [N, R]; ranks may differ between segments, and be 0. gain_N, shift_N: float32 [N], None
    for 1 and 0; DoRA's magnitudes and trained biases are such.
    """

    start: int
    end: int
    a_RM: Tensor
    b_NR: Tensor
    gain_N: Tensor | None = None
    shift_N: Tensor | None = None
