"""Engine logs are bounded in size and in number."""

import errno
from pathlib import Path

import pytest

from nearline.node_agent.engine_log import MAX_LOGS, EngineLog
from nearline.protocol.log_files import MAX_LOG_BYTES


def test_a_chatty_engine_keeps_its_last_words_and_not_the_disk(tmp_path: Path) -> None:
    line = b"x" * 999 + b"\n"
    with EngineLog(tmp_path, 1) as log:
        for _ in range(3 * MAX_LOG_BYTES // len(line)):
            log.write(line)
        log.write(b"last words\n")
    assert (tmp_path / "engine-1.log").read_bytes().endswith(b"last words\n")
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2 * MAX_LOG_BYTES


def test_only_the_latest_logs_are_kept(tmp_path: Path) -> None:
    for engine_id in range(2 * MAX_LOGS):
        with EngineLog(tmp_path, engine_id) as log:
            log.write(b"hello")
    names = {path.name for path in tmp_path.iterdir()}
    assert len(names) == MAX_LOGS
    assert f"engine-{2 * MAX_LOGS - 1}.log" in names


def test_a_log_that_cannot_be_begun_stops_no_engine_and_is_begun_when_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "open", refuse)
        log = EngineLog(tmp_path, 1)
        log.write(b"lost\n")
    log.write(b"x" * MAX_LOG_BYTES)
    with monkeypatch.context() as full:
        full.setattr(Path, "open", refuse)
        log.write(b"lost, too\n")
        log.write(b"lost, too\n")
    log.write(b"kept\n")
    with log:
        assert log.path.read_bytes() == b"kept\n"
