"""The journal: what was decided live is decided again, in any process; and one request's story can be told."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nearline.controller import actions as do
from nearline.controller import events as happened
from nearline.controller.concern import Concern
from nearline.controller.config import CoreConfig
from nearline.controller.journal import JournalWriter, digest, read, replay
from nearline.controller.replay import main, story
from nearline.protocol import RequestId, SloClass, WireError
from tests.controller.fleets import MAX_RUNNING, World, report, slo, world


def busy_world() -> World:
    w = world("a", "b", keep_alive_s=5.0, config=CoreConfig(epoch="j"))
    w.add_node(report("n2", 2, ["digest-of-a", "digest-of-b"]))
    for n in range(40):
        w.arrive(f"r{n:02d}", "ab"[n % 2], prefix_hash=n % 3)
        w.sleep(0.3)
        w.start_all()
        for name in list(w.running())[: n % 3]:
            w.token(name)
            w.finish(name)
        if n % 11 == 7:
            w.crash(w.instances()[0])
    w.sleep(60)
    return w


def written(directory: Path, w: World, part_bytes: int = 1 << 20, num_parts: int = 100) -> Path:
    writer = JournalWriter(directory, w.config, part_bytes, num_parts)
    first = writer.path
    for event, now in w.journal:
        writer.write(event, now)
    writer.close()
    return first


def test_a_replay_gives_the_actions_of_the_run(tmp_path: Path) -> None:
    w = busy_world()
    replayed = [action for _, _, actions in replay(written(tmp_path, w)) for action in actions]
    assert replayed == w.actions


def test_replays_agree_across_processes_and_hash_seeds(tmp_path: Path) -> None:
    path = written(tmp_path, busy_world())
    prints = []
    for seed in ("0", "1"):
        run = subprocess.run(
            [sys.executable, "-m", "nearline.controller.replay", str(path)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        prints.append(run.stdout)
    assert prints[0] == prints[1]
    found = digest(replay(path))
    assert len(found) == 32
    assert f"digest    {found}" in prints[0]


def test_a_replay_names_the_slowest_requests_so_that_they_can_be_asked_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    w = world("a", "b", config=CoreConfig(epoch="j", dispatch_headroom=0))
    w.arrive("slow", "a")
    w.sleep(3)
    w.start_all()
    w.token("slow")
    w.arrive("quick", "a")
    w.sleep(1)
    w.token("quick")
    w.arrive("unserved", "b")
    w.finish("slow")
    w.sleep(0.5)
    w.finish("quick")
    path = written(tmp_path, w)
    assert main([str(path)]) == 0
    told = capsys.readouterr().out
    assert f"{len(w.journal)} events" in told
    assert ", 3 requests" in told
    rows = [line.split() for line in told.splitlines() if line.startswith(" ")]
    assert [row[2] for row in rows] == ["slow", "quick", "unserved"]
    assert [float(row[0]) for row in rows] == pytest.approx([3.0, 1.0, 0.5], abs=0.2)
    assert rows[2][3:] == ["(still", "waits)"]
    assert main([str(path), "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert (seen["num_events"], seen["num_requests"]) == (len(w.journal), 3)
    assert seen["digest"] in told
    assert [(row["request"], row["still_waits"]) for row in seen["slowest"]] == [
        ("slow", False), ("quick", False), ("unserved", True),
    ]  # fmt: skip
    assert [row["wait_s"] for row in seen["slowest"]] == pytest.approx([float(row[0]) for row in rows], abs=0.001)
    assert main([str(tmp_path / "absent")]) == 1
    assert capsys.readouterr().err == f"cannot replay {tmp_path / 'absent'}: No such file or directory\n"


def test_where_a_requests_time_went_is_told_without_a_time_of_its_own(tmp_path: Path) -> None:
    w = world("a", config=CoreConfig(epoch="j", dispatch_headroom=0))
    w.arrive("mine", "a")
    w.sleep(1)
    w.start_all()
    w.token("mine")
    w.finish("mine")
    w.sleep(60)
    w.arrive("later", "a")
    told = list(story(RequestId("mine"), written(tmp_path, w)))
    times = [now for now, _ in told if now is not None]
    assert times == sorted(times)
    assert max(times) - min(times) < 10
    assert [text.partition(" ")[0] for now, text in told if now is None] == ["in"] * (len(told) - len(times))
    assert told[-1][1].endswith(": runs")


def test_a_journal_in_many_parts_replays_as_one(tmp_path: Path) -> None:
    w = busy_world()
    whole, parts = written(tmp_path / "whole", w), written(tmp_path / "parts", w, part_bytes=5000)
    assert len(list((tmp_path / "parts").iterdir())) > 3
    assert digest(replay(whole)) == digest(replay(parts))


def test_old_parts_are_deleted_and_a_rest_without_its_beginning_says_so(tmp_path: Path) -> None:
    w = busy_world()
    written(tmp_path, w, part_bytes=5000, num_parts=2)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2
    with pytest.raises(WireError, match="replay starts at part 0"):
        list(replay(files[0]))
    _, events = read(files[0])
    assert 0 < len(list(events)) < len(w.journal)


def test_a_record_cut_short_by_a_crash_ends_the_journal(tmp_path: Path) -> None:
    w = busy_world()
    path = written(tmp_path, w)
    path.write_bytes(path.read_bytes()[:-7])
    assert len(list(replay(path))) == len(w.journal) - 1


def test_a_journal_of_another_format_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, busy_world())
    path.write_bytes(path.read_bytes().replace(b"\xa6format\x01", b"\xa6format\x63", 1))
    with pytest.raises(WireError, match="format 99"):
        list(replay(path))


def test_the_story_of_a_request_names_what_it_waited_for(tmp_path: Path) -> None:
    w = world("a", "b", config=CoreConfig(epoch="j"))
    w.arrive("other", "a")
    w.start_all()
    w.finish("other")
    w.arrive("mine", "b")
    w.start_all()
    w.arrive("noise", "b")
    w.finish("mine")
    w.finish("noise")
    concern = Concern(RequestId("mine"))
    items = [item for _, event, actions in replay(written(tmp_path, w)) for item in concern.of(event, actions)]
    kinds = [type(item).__name__ for item in items if not isinstance(item, happened.InstanceChanged)]
    assert kinds[:4] == ["RequestArrived", "StopInstance", "EnsureInstance", "Dispatch"]
    assert kinds[-1] == "SequenceEnded"
    stop = next(item for item in items if isinstance(item, do.StopInstance))
    assert stop.reason.startswith("b waits")
    assert not any("noise" in str(item) for item in items)


def test_a_replay_says_that_a_request_was_late_and_let_others_go_first(tmp_path: Path) -> None:
    w = world("a", config=CoreConfig(epoch="j", dispatch_headroom=0))
    for n in range(MAX_RUNNING):
        w.arrive(f"r{n}")
    w.start_all()
    w.arrive("mine")
    w.arrive("other", slo=slo(slo_class=SloClass.BATCH_1M))
    w.sleep(15.0)
    w.arrive("fresh")
    w.sleep(10.0)
    w.finish("r0")
    assert "fresh" in w.running()
    w.finish("r1")
    told = [text for _, text in story(RequestId("mine"), written(tmp_path, w))]
    assert "waits: it is late, and those go first that can still be in time" in told


@pytest.mark.parametrize("name", ["copy", "copy.journal", "a.b.c", "e.x.journal", "j.000.journal.bak"])
def test_a_copy_under_any_name_replays_by_itself(tmp_path: Path, name: str) -> None:
    first = written(tmp_path, busy_world())
    copy = tmp_path / name
    copy.write_bytes(first.read_bytes())
    assert digest(replay(copy)) == digest(replay(first))


@pytest.mark.parametrize(
    "data", [b"", b"x", b"hello, I am a text file\n" * 40, b"\0" * 4096, b"\x02\0\0\0\xc1\xc1", b"\x01\0\0\0\x05"]
)
def test_what_is_no_journal_is_said_to_be_none(tmp_path: Path, data: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("1.000.journal", "notes.txt"):
        (tmp_path / name).write_bytes(data)
        assert main([str(tmp_path / name)]) == 1
        assert f"cannot replay {tmp_path / name}" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 1
    assert main([str(tmp_path / "absent")]) == 1


def test_a_journal_with_foreign_records_is_refused(tmp_path: Path) -> None:
    first = written(tmp_path, busy_world())
    with first.open("ab") as file:
        file.write(b"\x01\0\0\0\x05")
    with pytest.raises(WireError, match="no event"):
        digest(replay(first))


def test_a_replay_says_why_a_request_waited_and_where_its_time_went(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It waits for the slot of another model, for its own start, and once for a stricter class."""
    w = world("a", "b", config=CoreConfig(epoch="j", dispatch_headroom=0))
    w.arrive("other", "a")
    w.start_all()
    w.token("other")
    w.arrive("mine", "b", slo=slo(slo_class=SloClass.BATCH_1M))
    w.sleep(1)
    w.finish("other")
    w.sleep(2)
    w.start_all()
    w.token("mine")
    for n in range(MAX_RUNNING):
        w.arrive(f"urgent{n}", "b")
    w.sleep(15)
    for n in range(MAX_RUNNING):
        w.token(f"urgent{n}")
        w.finish(f"urgent{n}")
    w.finish("mine")
    assert main([str(written(tmp_path, w)), "--request", "mine"]) == 0
    told = capsys.readouterr().out
    for part in (
        "arrived for b: class batch-1m", "waits: every slot is taken", "b.j.2 is starting",
        "sent to b.j.2 as attempt 1", "gives its place on b.j.2 away", "it gave its place on b.j.2 to a stricter class",
        "attempt 1 ended: stop, 3 tokens", "in all",
    ):  # fmt: skip
        assert part in told, told
    assert main([str(written(tmp_path / "json", w)), "--request", "mine", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["what"] for row in rows] == [line[14:] for line in told.splitlines()]
    assert (rows[0]["after_s"], rows[-1]["after_s"]) == (0.0, None)
    assert main([str(written(tmp_path / "again", w)), "--request", "nobody"]) == 1
    assert "holds no request 'nobody'" in capsys.readouterr().err
