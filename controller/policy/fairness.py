"""Virtual token counters: whose turn it is among tenants that wait for the same thing. Pure.

A tenant's counter is the service it was charged for: input tokens + twice the output tokens, over its weight. The
tenant with the smallest counter is next. A tenant that comes back from idleness is lifted to the least of those who
wait, or, when nobody waits, to the tenant that left last: idle time earns no credit, and nothing is ever lowered.
Among tenants that wait at the same time counters then differ by at most `spread_bound`.
Source: [vtc] algorithm and bound; charging an expected output at once and correcting it later is its variant with
length prediction.
"""

from collections.abc import Iterable, Mapping

from nearline.protocol import TenantId

INPUT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0


class VirtualCounters:
    """Counters of the tenants of one queue. Tenants without an entry in `weights` weigh 1; weights are > 0."""

    def __init__(self, weights: Mapping[TenantId, float] | None = None) -> None:
        self._weights = weights or {}
        self._counters: dict[TenantId, float] = {}
        self._num_waiting: dict[TenantId, int] = {}
        self._last_left: TenantId | None = None

    def enter(self, tenant: TenantId) -> None:
        """Count one more waiting request. A tenant that had none is lifted."""
        if tenant in self._num_waiting:
            self._num_waiting[tenant] += 1
            return
        floor = 0.0
        if self._num_waiting:
            floor = min(self._counters[other] for other in self._num_waiting)
        elif self._last_left is not None:
            floor = self._counters[self._last_left]
        self._counters[tenant] = max(self._counters.get(tenant, 0.0), floor)
        self._num_waiting[tenant] = 1

    def leave(self, tenant: TenantId) -> None:
        """Count one waiting request less: it was dispatched, or it ended."""
        self._num_waiting[tenant] -= 1
        if not self._num_waiting[tenant]:
            del self._num_waiting[tenant]
            self._last_left = tenant

    def charge(self, tenant: TenantId, num_input_tokens: float, num_output_tokens: float) -> None:
        """Add service; negative numbers give back what was charged on expectation."""
        service = INPUT_WEIGHT * num_input_tokens + OUTPUT_WEIGHT * num_output_tokens
        self._counters[tenant] = self._counters.get(tenant, 0.0) + service / self._weights.get(tenant, 1.0)

    def order(self, tenants: Iterable[TenantId]) -> list[TenantId]:
        """Sort tenants by whose turn it is; equals by name."""
        return sorted(tenants, key=lambda tenant: (self._counters.get(tenant, 0.0), tenant))

    def counter(self, tenant: TenantId) -> float:
        return self._counters.get(tenant, 0.0)

    def spread(self) -> float:
        """Return how far the counters of those who wait are apart."""
        values = [self._counters[tenant] for tenant in self._num_waiting]
        return max(values) - min(values) if values else 0.0


def spread_bound(max_input_tokens: int, max_running_tokens: int, min_weight: float = 1.0) -> float:
    """Return U: counters of tenants that wait together never differ by more.

    `max_running_tokens` bounds the tokens of all sequences that run at once. Source: [vtc] lemma on counters.
    """
    return max(INPUT_WEIGHT * max_input_tokens, OUTPUT_WEIGHT * max_running_tokens) / min_weight
