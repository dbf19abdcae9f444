"""ControllerCore keeps promises: tenants share, short answers go first, classes are counted."""

from nearline.controller import events as happened
from nearline.controller.config import CoreConfig
from nearline.protocol import TenantId
from tests.controller.fleets import GB, MAX_RUNNING, World, model, report, resident, world


def serve(w: World, num_rounds: int) -> list[str]:
    """Finish everything that runs, round by round; return who was served in which order."""
    served = []
    for _ in range(num_rounds):
        for name in sorted(w.running()):
            served.append(name)
            w.token(name)
            w.finish(name)
    return served


def test_a_light_tenant_has_its_turns_beside_one_that_floods() -> None:
    w = world("a", config=CoreConfig(dispatch_headroom=0))
    for n in range(40):
        w.arrive(f"flood{n:02d}", tenant=TenantId("flood"))
    w.start_all()
    for n in range(3):
        w.arrive(f"light{n}", tenant=TenantId("light"))
    served = serve(w, 4)
    assert [name for name in served if name.startswith("light")] == ["light0", "light1", "light2"]
    assert len(served) == 4 * MAX_RUNNING, "first come, first served would need eleven rounds"


def test_a_tenant_of_double_weight_gets_two_places_for_one() -> None:
    w = world("a", config=CoreConfig(dispatch_headroom=0, tenant_weights=((TenantId("big"), 2.0),)))
    for n in range(60):
        w.arrive(f"big{n:02d}", tenant=TenantId("big"))
        w.arrive(f"low{n:02d}", tenant=TenantId("low"))
    w.start_all()
    served = serve(w, 15)
    shares = [sum(name.startswith(kind) for name in served) for kind in ("big", "low")]
    assert abs(shares[0] / shares[1] - 2.0) < 0.25


def test_what_is_learned_of_a_model_survives_a_new_version_of_it() -> None:
    w = world("a")
    w.arrive("r1")
    w.start_all()
    w.token("r1")
    w.finish("r1")
    w.post(happened.ModelAdded(model("a", "digest-two")))
    current = w.core.fleet.current_model("a")  # type: ignore[arg-type]
    assert current is not None
    assert current.lengths.calibration.num_answers == 1


def test_a_prompt_that_is_only_read_teaches_nothing_about_the_length_of_answers() -> None:
    w = world("a")
    w.arrive("embedding", max_tokens=0)
    w.start_all()
    w.token("embedding")
    w.finish("embedding")
    current = w.core.fleet.current_model("a")  # type: ignore[arg-type]
    assert current is not None
    assert current.lengths.calibration.num_answers == 0
    w.core.check()


def test_models_with_short_starts_get_a_scarce_slot_before_one_whose_start_would_make_all_of_them_late() -> None:
    """By due date `big` is first. Its start takes 17 s of the others' 20."""
    w = World()
    sizes = {"blocker": GB, "big": 34 * GB, "x": 2 * GB, "y": 2 * GB}
    for name, size in sizes.items():
        w.post(happened.ModelAdded(model(name, num_bytes=size)))
    residency = tuple(resident(f"digest-of-{name}", size) for name, size in sizes.items())
    w.add_node(report(num_slots=1, residency=residency))
    w.arrive("b", "blocker")
    w.start_all()
    for n, name in enumerate(("big", "x", "y")):
        w.sleep(0.1 * n)
        w.arrive(name, name)
    w.sleep(0.5)
    w.token("b")
    w.finish("b")
    order = []
    for _ in range(60):
        w.sleep(0.5)
        w.start_all()
        order += serve(w, 1)
    assert order == ["x", "y", "big"]
