"""What a request is promised: what it asks for over what its function offers, within its tenant's cap. Pure."""

from dataclasses import dataclass, replace

from nearline.controller.config import CLASS_TARGET_S
from nearline.protocol import Seconds, Slo, SloClass

STRICTEST_FIRST = (SloClass.INTERACTIVE, SloClass.BATCH_1M, SloClass.BATCH_1H)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a body says about its promise; None: nothing."""

    slo_class: SloClass | None = None
    ttft_s: Seconds | None = None
    tpot_s: Seconds | None = None
    deadline_s: Seconds | None = None


def agreed(wish: Wish, offer: Slo, cap: SloClass | None = None) -> Slo:
    """Put a wish in place of an offer (a function's default, or a job's own promise), then hold it to a cap.

    A wished class brings that class's own target. Of two deadlines the earlier counts. Under a cap the class is at
    best the cap, and the first token is never promised sooner than the cap's target; pace and deadline stay as asked.
    """
    slo = offer if wish.slo_class is None else replace(offer, slo_class=wish.slo_class, ttft_s=None)
    deadlines_s = [at for at in (wish.deadline_s, offer.deadline_s) if at is not None]
    slo = replace(
        slo,
        ttft_s=slo.ttft_s if wish.ttft_s is None else wish.ttft_s,
        tpot_s=slo.tpot_s if wish.tpot_s is None else wish.tpot_s,
        deadline_s=min(deadlines_s, default=None),
    )
    return slo if cap is None else _capped(slo, cap)


def rank(slo_class: SloClass) -> int:
    """Order classes, the strictest 0."""
    return STRICTEST_FIRST.index(slo_class)


def _capped(slo: Slo, cap: SloClass) -> Slo:
    ttft_s = None if slo.ttft_s is None else max(slo.ttft_s, CLASS_TARGET_S[cap])
    return replace(slo, slo_class=max(slo.slo_class, cap, key=rank), ttft_s=ttft_s)
