"""Questions and answers over the pipes of a process of our own: each as many bytes as the number before it says."""

import struct
import sys
from collections.abc import Callable
from typing import BinaryIO

LENGTH = struct.Struct("<I")


def answer_all(answer: Callable[[bytes], bytes]) -> None:
    """Answer every question on stdin on stdout, until stdin closes."""
    while (question := _read(sys.stdin.buffer)) is not None:
        data = answer(question)
        sys.stdout.buffer.write(LENGTH.pack(len(data)) + data)
        sys.stdout.buffer.flush()


def _read(stream: BinaryIO) -> bytes | None:
    head = stream.read(LENGTH.size)
    return stream.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else None
