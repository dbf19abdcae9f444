"""How many blocks the running sequences may come to need at once. Pure.

Source: S-LoRA (MLSys 2024): sort by remaining tokens, largest first; when the n-th ends, n sequences have grown by
its remaining tokens. We count in blocks, count shared blocks once, and hold a sequence that does not decode yet
at its final size, because it does not grow in step with the others.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Growth:
    """One sequence's claim: `num_positions` once this step is done, `max_positions` at most ever.

    `num_shared` of its leading blocks are also used by others and are counted apart. `is_decoding`: from this
    step on it grows by exactly one position per step.
    """

    num_positions: int
    max_positions: int
    num_shared: int
    is_decoding: bool


def peak_blocks(claims: Iterable[Growth], num_shared_blocks: int, block_size: int) -> int:
    """Bound from above the blocks in use at any later step, if no further sequence is admitted."""
    peak = fixed = num_shared_blocks
    decoding: list[tuple[int, int, int]] = []
    for claim in claims:
        if claim.is_decoding:
            remaining = claim.max_positions - claim.num_positions
            decoding.append((remaining, claim.num_positions + block_size - 1, claim.num_shared))
        else:
            fixed += -(-claim.max_positions // block_size) - claim.num_shared
    peak = fixed
    positions = shared = 0
    decoding.sort(reverse=True)
    for count, (remaining, rounded_up, num_shared) in enumerate(decoding, start=1):
        positions += rounded_up
        shared += num_shared
        peak = max(peak, fixed + (positions + count * remaining) // block_size - shared)
    return peak
