"""How a checkpoint on other nodes is named as a source, what says that we may have it; which sources are one."""

from collections.abc import Sequence

from nearline.protocol.ids import Digest
from nearline.protocol.quantization import split_source

PEER = "peer:"
"""Begins such a source. Only a controller writes one: whoever it names is shown the cluster's token."""
TOKEN_VARIABLE = "NEARLINE_CLUSTER_TOKEN"
"""Environment variable with the token that nodes want of each other."""


def peer_source(digest: Digest, urls: Sequence[str]) -> str:
    """Write the source that names a checkpoint on these nodes."""
    return f"{PEER}{digest}@{','.join(urls)}"


def source_key(source: str) -> str:
    """Name what a node reads once at a time: the same for one checkpoint whoever gives it, for a model in whatever form
    it is wanted, and for all revisions of a hub's repository, which may be the same one."""
    source = split_source(source)[1]
    return source.partition("@")[0] if source.startswith((PEER, "hub:")) else source
