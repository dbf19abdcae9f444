"""How a checkpoint on other nodes is named as a source, and what says that we may have it."""

from collections.abc import Sequence

from nearline.protocol.ids import Digest

PEER = "peer:"
"""Begins such a source. Only a controller writes one: whoever it names is shown the cluster's token."""
TOKEN_VARIABLE = "NEARLINE_CLUSTER_TOKEN"
"""Environment variable with the token that nodes want of each other."""


def peer_source(digest: Digest, urls: Sequence[str]) -> str:
    """Write the source that names a checkpoint on these nodes."""
    return f"{PEER}{digest}@{','.join(urls)}"
