"""Whatever ends a request, its tenant pays for the tokens it got, once: beside that, only idleness moves a counter."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nearline.controller import actions as do
from nearline.controller.config import CoreConfig
from nearline.controller.events import RequestArrived, RequestInfo
from nearline.controller.policy.fairness import VirtualCounters
from nearline.controller.queues import VirtualQueue
from nearline.protocol import InstanceState, RequestId, SloClass, TenantId
from nearline.protocol.errors import ErrorInfo, InstanceFailed, OutOfMemory
from tests.controller.fleets import World, report, slo, world

WEIGHTS = {TenantId("light"): 1.0, TenantId("heavy"): 4.0}
TENANTS = [*WEIGHTS, TenantId("other")]
CONFIG = CoreConfig(start_timeout_s=60.0, tenant_weights=tuple(WEIGHTS.items()), max_losses=3)
NUM_PROMPT = 100


class Ledger:
    """What every tenant should have been charged: told of lifts by the counters, of tokens by the world."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.lifts: dict[tuple[int, TenantId], float] = {}
        self.requests: dict[RequestId, RequestInfo] = {}
        enter = VirtualCounters.enter

        def noted(counters: VirtualCounters, tenant: TenantId) -> None:
            before = counters.counter(tenant)
            enter(counters, tenant)
            key = (id(counters), tenant)
            self.lifts[key] = self.lifts.get(key, 0.0) + counters.counter(tenant) - before

        patch.setattr(VirtualCounters, "enter", noted)

    def check(self, w: World) -> None:
        """Once nothing is open: lifts, and of each request that ever ran its prompt and what it generated."""
        sent = {action.request_id for action in w.actions if isinstance(action, do.Dispatch)}
        for model_id, slo_class, counters in accounts(w):
            for tenant in TENANTS:
                due = self.lifts.get((id(counters), tenant), 0.0)
                for name in sent:
                    request = self.requests[name]
                    if (request.model_id, request.slo.slo_class, request.tenant) == (model_id, slo_class, tenant):
                        due += (NUM_PROMPT + 2 * w.generated.get(name, 0)) / WEIGHTS.get(tenant, 1.0)
                assert counters.counter(tenant) == pytest.approx(due), (model_id, slo_class, tenant)


def accounts(w: World) -> Iterator[tuple[str, SloClass, VirtualCounters]]:
    for record in w.core.fleet.models.values():
        assert isinstance(record.queue, VirtualQueue)
        for slo_class in SloClass:
            yield record.spec.model_id, slo_class, record.queue.counters(slo_class)


def account(w: World, tenant: str) -> float:
    return next(accounts(w))[2].counter(TenantId(tenant))


def running(deadline_s: float | None = None) -> World:
    w = world("a", config=CONFIG)
    w.arrive("r", tenant=TenantId("t"), slo=slo(deadline_s))
    w.start_all()
    w.token("r")
    w.generate("r", 6)
    return w


def test_a_running_request_that_expires_is_charged_for_what_it_got() -> None:
    w = running(deadline_s=30.0)
    w.sleep(31.0)
    assert w.ended == {"r": "deadline_exceeded"}
    assert account(w, "t") == NUM_PROMPT + 2 * 7


def test_a_request_that_fails_in_its_engine_is_charged_for_what_it_got() -> None:
    w = running()
    w.finish("r", ErrorInfo.of(OutOfMemory("no block left")))
    assert w.ended == {"r": "out_of_memory"}
    assert account(w, "t") == NUM_PROMPT + 2 * 7


def test_a_request_that_is_given_up_after_losses_is_charged_for_what_it_got_and_its_prompt_once() -> None:
    w = running()
    node = next(iter(w.nodes.values()))
    for _ in range(CONFIG.max_losses):
        w.disconnect(node)
        w.connect(node)
    assert w.ended == {"r": "instance_failed"}
    assert account(w, "t") == NUM_PROMPT + 2 * 7


def test_a_request_that_waits_again_until_its_time_is_over_is_charged_for_what_it_got() -> None:
    w = running()
    w.disconnect(next(iter(w.nodes.values())))
    w.sleep(CONFIG.start_timeout_s + 1)
    assert w.ended == {"r": "node_lost"}
    assert account(w, "t") == NUM_PROMPT + 2 * 7


STEPS = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 99)), max_size=80)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(STEPS)
def test_whatever_happens_each_tenant_is_charged_for_its_tokens_once_and_lifted_only_as_it_comes_back(
    steps: list[tuple[int, int]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        ledger = Ledger(patch)
        w = world("a", "b", config=CONFIG, num_slots=1, keep_alive_s=5.0)
        w.add_node(report("n2", 2, ["digest-of-a", "digest-of-b"]))
        for step, choice in steps:
            happen(w, ledger, step, choice)
        for node in w.nodes.values():
            if not node.is_connected:
                w.connect(node)
        for _ in range(300):
            for instance in w.instances():
                w.start(instance)
                if instance.state is InstanceState.DRAINING:
                    w.drain_ends(instance)
            for name in list(w.running()):
                w.finish(name)
            if not w.open:
                break
            w.sleep(0.5)
        assert not w.open
        ledger.check(w)


def happen(w: World, ledger: Ledger, step: int, choice: int) -> None:
    names, instances, nodes = list(w.running()), w.instances(), list(w.nodes.values())
    match step:
        case 0 | 1 | 2:
            name, kind = f"r{len(ledger.requests)}", list(SloClass)[choice % 3]
            wish = slo([None, 3.0, 30.0][choice // 3 % 3], slo_class=kind)
            w.arrive(name, "ab"[choice % 2], tenant=TENANTS[choice % len(TENANTS)], slo=wish)
            found = [event.info for event, _ in w.journal if isinstance(event, RequestArrived)]
            ledger.requests[RequestId(name)] = found[-1]
        case 3 | 4 if names:
            w.token(names[choice % len(names)])
            w.generate(names[choice % len(names)], choice % 9)
        case 5 if names:
            w.finish(names[choice % len(names)], [None, ErrorInfo.of(OutOfMemory("none left"))][choice % 2])
        case 6 if w.open:
            w.cancel(list(w.open)[choice % len(w.open)])
        case 7 if instances:
            w.start(instances[choice % len(instances)])
        case 8 if instances:
            instance = instances[choice % len(instances)]
            instance.sequences.clear()
            w.crash(instance)
        case 9:
            node = nodes[choice % len(nodes)]
            w.disconnect(node) if node.is_connected else w.connect(node)
        case 10 if names:
            w.finish(names[choice % len(names)], ErrorInfo.of(InstanceFailed("engine died")))
        case 11:
            w.sleep([0.1, 2.0, 20.0][choice % 3])
        case _:
            pass
