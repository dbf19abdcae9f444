"""What was promised and what was kept, per model, SLO class and tenant. Pure.

A request keeps its promise when its first token came by its target, its pace by `tpot_s` and its end by its deadline,
as far as each was asked for. One that the caller gave up before its first token was due counts for nothing.
"""

from dataclasses import dataclass, field

from nearline.controller.queues import RequestRecord
from nearline.protocol import ModelId, Seconds, SloClass, TenantId

OTHERS = TenantId("(others)")
_MAX_ROWS = 4096


@dataclass(slots=True)
class Tally:
    num_met: int = 0
    num_missed: int = 0
    num_refused: int = 0

    @property
    def attainment(self) -> float:
        """Part of all requests whose promise was kept; a refusal is none."""
        return self.num_met / max(1, self.num_met + self.num_missed + self.num_refused)


PromiseKey = tuple[ModelId, SloClass, TenantId]


@dataclass(slots=True)
class Promises:
    """Tallies since the start. Bounded: tenants beyond `_MAX_ROWS` rows share one."""

    rows: dict[PromiseKey, Tally] = field(default_factory=dict)

    def ended(self, request: RequestRecord, num_generated: int, now: Seconds) -> None:
        """Count a request that ended by itself."""
        slo, first_at = request.info.slo, request.first_token_at
        is_met = (now if first_at is None else first_at) <= request.due_at
        if slo.tpot_s is not None and first_at is not None and num_generated > 1:
            is_met = is_met and (now - first_at) / (num_generated - 1) <= slo.tpot_s
        if request.deadline is not None:
            is_met = is_met and now <= request.deadline
        tally = self._of(request)
        tally.num_met += is_met
        tally.num_missed += not is_met

    def given_up(self, request: RequestRecord, now: Seconds) -> None:
        """Count a request whose caller left: by its first token, if that was due."""
        first_at = request.first_token_at
        if first_at is None and now <= request.due_at:
            return
        is_met = first_at is not None and first_at <= request.due_at
        tally = self._of(request)
        tally.num_met += is_met
        tally.num_missed += not is_met

    def refused(self, request: RequestRecord) -> None:
        """Count a request that was refused or failed."""
        self._of(request).num_refused += 1

    def forget(self, model_id: ModelId) -> None:
        for key in [key for key in self.rows if key[0] == model_id]:
            del self.rows[key]

    def _of(self, request: RequestRecord) -> Tally:
        info = request.info
        key = (info.model_id, info.slo.slo_class, info.tenant)
        tally = self.rows.get(key)
        if tally is None and len(self.rows) >= _MAX_ROWS:
            key = (info.model_id, info.slo.slo_class, OTHERS)
            tally = self.rows.get(key)
        if tally is None:
            tally = self.rows[key] = Tally()
        return tally
