"""The admission formula against a brute-force replay of the future it bounds."""

from hypothesis import given, settings
from hypothesis import strategies as st

from nearline.engine.admission import Growth, peak_blocks

SIZE = 4
decoding = st.builds(
    lambda now, more: Growth(num_positions=now, max_positions=now + more, num_shared=0, is_decoding=True),
    st.integers(1, 40),
    st.integers(0, 40),
)


def brute_force(claims: list[Growth]) -> int:
    """Let all grow in step, each until its last position, and count blocks at every step."""
    steps = range(1 + max((c.max_positions - c.num_positions for c in claims), default=0))
    alive = [[c.num_positions + t for c in claims if c.num_positions + t <= c.max_positions] for t in steps]
    return max(sum(-(-positions // SIZE) for positions in step) for step in alive) if claims else 0


@given(st.lists(decoding, max_size=8))
@settings(max_examples=300, deadline=None)
def test_the_bound_holds_and_is_tight_to_less_than_a_block_per_sequence(claims: list[Growth]) -> None:
    bound, actual = peak_blocks(claims, 0, SIZE), brute_force(claims)
    assert actual <= bound <= actual + len(claims)


@given(decoding)
def test_for_one_sequence_it_is_exact(claim: Growth) -> None:
    assert peak_blocks([claim], 0, SIZE) == -(-claim.max_positions // SIZE)


def test_by_hand() -> None:
    claims = [Growth(8, 12, 0, True), Growth(4, 5, 0, True), Growth(4, 20, 0, False)]
    # At its final size the third takes 5. When the second ends: (9+3 + 5+3) // 4 = 5. When the first ends: 3.
    assert peak_blocks(claims, 0, SIZE) == 5 + 5
    assert peak_blocks([Growth(8, 12, 2, True), Growth(8, 12, 2, True)], 2, SIZE) == 2 + (15 + 15) // 4 - 4
    assert peak_blocks([], 0, SIZE) == 0
