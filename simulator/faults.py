"""What goes wrong on purpose: nodes that die and come back, callers that hang up. Seeded. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from nearline.protocol import NodeId, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """A node dies every `node_loss_every_s` on average (0: never) and is back after `node_back_s`, its DRAM empty.

    A part `cancel_part` of the callers hangs up, after a time of mean `patience_s`.
    """

    seed: int = 0
    node_loss_every_s: Seconds = 0.0
    node_back_s: Seconds = 20.0
    cancel_part: float = 0.0
    patience_s: Seconds = 5.0

    def node_losses(self, node_ids: Sequence[NodeId]) -> Iterator[tuple[Seconds, NodeId]]:
        """Yield (when, which node), without end."""
        stream, at = Random(f"{self.seed}/node loss"), 0.0
        while self.node_loss_every_s > 0 and node_ids:
            at += stream.expovariate(1.0 / self.node_loss_every_s)
            yield at, stream.choice(node_ids)

    def patiences(self) -> Iterator[Seconds | None]:
        """Yield for every request in turn after how long its caller hangs up, or None."""
        stream = Random(f"{self.seed}/patience")
        while True:
            does_leave = stream.random() < self.cancel_part
            patience = stream.expovariate(1.0 / self.patience_s)
            yield patience if does_leave else None
