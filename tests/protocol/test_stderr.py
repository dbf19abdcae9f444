"""Logs on a full disk, by the device that is always full."""

import subprocess
import sys


def test_a_log_line_that_cannot_be_written_stops_nobody() -> None:
    code = (
        "import structlog; from nearline.protocol.stderr import Stderr;"
        "structlog.configure(logger_factory=structlog.PrintLoggerFactory(Stderr()));"
        "structlog.get_logger().warning('is', this='kept?'); print('it went on')"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=full, check=True, text=True)
    assert done.stdout == "it went on\n"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert "kept?" in told.stderr
