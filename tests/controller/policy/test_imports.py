"""Where a new checkpoint goes."""

from nearline.controller.policy.imports import import_place
from nearline.controller.state import NodeRecord
from nearline.protocol import Digest
from tests.controller.fleets import GB, report


def node(name: str, free_gb: int, digests: tuple[str, ...] = (), is_connected: bool = True) -> NodeRecord:
    made = NodeRecord(report(name, 1, digests, ssd_free_bytes=free_gb * GB), is_connected)
    made.apply(made.report)
    return made


def test_a_model_goes_where_most_disk_is_left_and_an_adapter_to_its_base() -> None:
    nodes = [node("n1", 10), node("n2", 90, is_connected=False), node("n3", 50), node("n4", 20, ("base",))]
    assert import_place(nodes, None) == "n3"
    assert import_place(nodes, Digest("base")) == "n4"
    assert import_place(nodes, Digest("nobody-has-it")) == "n3"


def test_equal_nodes_are_told_apart_by_name_and_without_any_there_is_no_place() -> None:
    assert import_place([node("n2", 5), node("n1", 5)], None) == "n1"
    assert import_place([node("n1", 5, is_connected=False)], None) is None
