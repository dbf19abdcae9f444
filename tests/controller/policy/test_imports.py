"""Where a new checkpoint goes."""

from dataclasses import replace

from nearline.controller.policy.imports import copy_place, import_place, peer_urls
from nearline.controller.state import NodeRecord
from nearline.protocol import Digest, NodeId
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


def test_what_a_node_lacks_the_others_give_that_have_it_whole_those_with_it_in_memory_first() -> None:
    nodes = [node("n1", 1, ("m",)), node("n2", 1, ("m",)), node("n3", 1, ("m",), is_connected=False), node("n4", 1)]
    nodes += [node("n5", 1, ("m",))]
    nodes[1].residency[Digest("m")] = replace(nodes[1].residency[Digest("m")], dram_bytes=7)
    nodes[4].residency[Digest("m")] = replace(nodes[4].residency[Digest("m")], ssd_bytes=0, is_fetchable=True)
    urls = [one.report.http_url for one in nodes]
    assert peer_urls(nodes, Digest("m"), NodeId("n4")) == (urls[1], urls[0])
    assert peer_urls(nodes, Digest("m"), NodeId("n2")) == (urls[0],)
    assert peer_urls(nodes, Digest("other"), NodeId("n4")) == ()


def test_a_copy_goes_where_most_disk_is_left_among_those_that_lack_it() -> None:
    nodes = [node("n1", 90, ("m",)), node("n2", 50), node("n3", 70, is_connected=False), node("n4", 50)]
    assert copy_place(nodes, Digest("m")) == "n2"
    assert copy_place(nodes[:1], Digest("m")) is None
