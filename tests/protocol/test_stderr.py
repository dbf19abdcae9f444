"""Logs on a full disk, by the device that is always full, and beside those of others."""

import socket
import subprocess
import sys

CODE = (
    "import structlog; from nearline.protocol.stderr import Stderr;"
    "structlog.configure(logger_factory=structlog.PrintLoggerFactory(Stderr()));"
    "structlog.get_logger().warning('is', this='kept?'); structlog.get_logger().error('last'); print('it went on')"
)


def test_a_log_line_that_cannot_be_written_stops_nobody() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", CODE], stdout=subprocess.PIPE, stderr=full, check=True, text=True)
    assert done.stdout == "it went on\n"
    told = subprocess.run([sys.executable, "-c", CODE], capture_output=True, check=True, text=True)
    assert "kept?" in told.stderr


def test_a_log_line_is_one_write_so_that_those_of_other_processes_stay_whole_too() -> None:
    """Each write to such a socket arrives as one message."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            subprocess.run([sys.executable, "-c", CODE], stdout=subprocess.DEVNULL, stderr=theirs, check=True)
        first, second, end = (ours.recv(4096) for _ in range(3))
    assert (b"kept?" in first, first.count(b"\n"), first[-1:]) == (True, 1, b"\n")
    assert (b"last" in second, second.count(b"\n"), second[-1:]) == (True, 1, b"\n")
    assert end == b""
