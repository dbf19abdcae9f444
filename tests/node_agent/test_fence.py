"""Fencing tokens, leader by leader."""

from hypothesis import given
from hypothesis import strategies as st

from nearline.node_agent.fence import Fence


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(1, 9))))
def test_no_leader_is_obeyed_after_a_newer_one_of_its_deployment(welcomes: list[tuple[str, int]]) -> None:
    fence = Fence()
    newest: dict[str, int] = {}
    for deployment, token in welcomes:
        assert fence.admits(deployment, token) == (token >= newest.get(deployment, 0))
        newest[deployment] = max(token, newest.get(deployment, 0))
