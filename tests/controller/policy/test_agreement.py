"""What a request is promised: its wish over the offer, within the cap."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearline.controller.config import CLASS_TARGET_S, target_s
from nearline.controller.policy.agreement import Wish, agreed, rank
from nearline.protocol import Slo, SloClass

NOW, M, H = SloClass.INTERACTIVE, SloClass.BATCH_1M, SloClass.BATCH_1H
OFFER = Slo(NOW, ttft_s=0.5, tpot_s=0.05)
ROWS = [
    (Wish(), OFFER, None, OFFER),
    (Wish(slo_class=H), OFFER, None, Slo(H, tpot_s=0.05)),
    (Wish(ttft_s=2.0), OFFER, None, Slo(NOW, ttft_s=2.0, tpot_s=0.05)),
    (Wish(slo_class=M, ttft_s=2.0), OFFER, None, Slo(M, ttft_s=2.0, tpot_s=0.05)),
    (Wish(deadline_s=9.0), Slo(deadline_s=4.0), None, Slo(deadline_s=4.0)),
    (Wish(), OFFER, M, Slo(M, ttft_s=60.0, tpot_s=0.05)),
    (Wish(slo_class=NOW), Slo(H), M, Slo(M)),
    (Wish(slo_class=H), OFFER, M, Slo(H, tpot_s=0.05)),
    (Wish(ttft_s=90.0), Slo(), M, Slo(M, ttft_s=90.0)),
]


@pytest.mark.parametrize(("wish", "offer", "cap", "expected"), ROWS)
def test_a_promise_is(wish: Wish, offer: Slo, cap: SloClass | None, expected: Slo) -> None:
    assert agreed(wish, offer, cap) == expected


SPANS = st.none() | st.floats(0.01, 5000)
CLASSES = st.sampled_from([NOW, M, H])


WISHES = st.builds(Wish, slo_class=st.none() | CLASSES, ttft_s=SPANS, deadline_s=SPANS)


@given(WISHES, st.builds(Slo, CLASSES, SPANS), CLASSES)
def test_no_wish_gets_past_a_cap(wish: Wish, offer: Slo, cap: SloClass) -> None:
    found = agreed(wish, offer, cap)
    assert rank(found.slo_class) >= rank(cap)
    assert target_s(found) >= CLASS_TARGET_S[cap]
