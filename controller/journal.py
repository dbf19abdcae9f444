"""The journal of (now, event): written live, replayed into a fresh core, and asked why a request waited.

A journal is a series of files, `<epoch>.000.journal` on, each a run of length-prefixed msgpack records. The first
record of every file is the header (format, part, core config); every other one is (now, event). The first file starts
with the core itself, so replaying the files in order gives the very same actions; once the oldest files of a long run
have been deleted, what is left can be read but not replayed. It holds lengths and ids, never text or tokens.

`python -m nearline.controller.replay FILE [--request ID]` reads it for people (replay.py).
"""

import errno
import hashlib
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from nearline.controller.actions import Action
from nearline.controller.config import CoreConfig
from nearline.controller.core import ControllerCore
from nearline.controller.events import Event
from nearline.protocol import MessageCodec, Seconds, WireError, encode, from_plain, to_plain

FORMAT = 1
SUFFIX = ".journal"
_PART = re.compile(rf"(?P<epoch>.+)\.(?P<part>\d+){re.escape(SUFFIX)}")
_LENGTH = struct.Struct("<I")
_EVENTS = MessageCodec(Event)


@dataclass(frozen=True, slots=True)
class JournalHeader:
    format: int
    part: int
    config: CoreConfig


class JournalWriter:
    """Appends events. Owns: the open file. Bounded: at most `num_parts` files of about `part_bytes` are kept.

    Raises OSError, on creation too, when the disk refuses. `part` is where it begins.
    """

    def __init__(self, directory: Path, config: CoreConfig, part_bytes: int, num_parts: int, part: int = 0) -> None:
        self._directory = directory
        self._config = config
        self._part_bytes = part_bytes
        self._num_parts = num_parts
        self.part = part
        directory.mkdir(parents=True, exist_ok=True)
        self._open()

    def write(self, event: Event, now: Seconds) -> None:
        """Append one event. Raises OSError when the disk refuses."""
        self._append(msgpack.packb([now, encode(event)]))
        if self._num_bytes >= self._part_bytes:
            self._file.close()
            self.part += 1
            self._open()

    def close(self) -> None:
        self._file.close()

    def _open(self) -> None:
        self.path = self._directory / f"{self._config.epoch}.{self.part:03d}{SUFFIX}"
        self._file = self.path.open("wb", buffering=0)
        self._num_bytes = 0
        self._append(msgpack.packb(to_plain(JournalHeader(FORMAT, self.part, self._config))))
        files = sorted(self._directory.glob(f"*{SUFFIX}"), key=lambda path: (path.stat().st_mtime_ns, path.name))
        for path in files[: -self._num_parts]:
            path.unlink(missing_ok=True)

    def _append(self, record: bytes) -> None:
        data = _LENGTH.pack(len(record)) + record
        num_written = self._file.write(data)
        self._num_bytes += num_written
        if num_written < len(data):  # how a disk begins to be full
            raise OSError(errno.ENOSPC, f"{num_written} of {len(data)} bytes were written", str(self.path))


def read(path: Path) -> tuple[JournalHeader, Iterator[tuple[Event, Seconds]]]:
    """Open a journal at any of its files: its header, and the events of that file and those after it.

    A copy under a name that is not `<epoch>.NNN.journal` stands alone. Raises WireError for a file of another format.
    A record cut short by a crash ends the journal.
    """
    records = _records(path)
    try:
        header = from_plain(JournalHeader, next(records, None))
    except WireError as error:
        raise WireError(f"{path} is no journal, or one of another version: {error}") from None
    if header.format != FORMAT:
        raise WireError(f"{path} has journal format {header.format}; this version reads {FORMAT}")
    return header, _events(path, records)


def replay(path: Path) -> Iterator[tuple[Seconds, Event, list[Action]]]:
    """Run a journal through a fresh core and yield what it did. Raises WireError if its first file is missing."""
    header, events = read(path)
    first_part(path, header)
    core = ControllerCore(header.config)
    for event, now in events:
        yield now, event, core.on(event, now)


def first_part(path: Path, header: JournalHeader) -> None:
    """Raises WireError unless a journal's core can be built up from here."""
    if header.part != 0:
        raise WireError(f"{path} is part {header.part} of its journal; replay starts at part 0, which may be deleted")


def digest(steps: Iterable[tuple[Seconds, Event, list[Action]]]) -> str:
    """Condense a run into one number: equal digests, equal actions in equal order."""
    total = hashlib.blake2b(digest_size=16)
    for _, _, actions in steps:
        for action in actions:
            total.update(encode(action))
    return total.hexdigest()


def _records(path: Path) -> Iterator[Any]:
    data = path.read_bytes()
    position = 0
    while position + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, position)
        record = data[position + _LENGTH.size : position + _LENGTH.size + length]
        position += _LENGTH.size + length
        if len(record) == length:
            try:
                yield msgpack.unpackb(record)
            except ValueError as error:
                raise WireError(f"{path} is no journal: {error}") from None


def _events(path: Path, records: Iterator[Any]) -> Iterator[tuple[Event, Seconds]]:
    name = _PART.fullmatch(path.name)
    part = int(name["part"]) if name else 0
    while True:
        for record in records:
            if not isinstance(record, list) or len(record) != 2 or not isinstance(record[1], bytes):
                raise WireError(f"{path} holds a record that is no event; it was written by something else")
            yield _EVENTS.decode(record[1]), record[0]
        if name is None:  # a copy under another name: nothing says what would come after it
            return
        part += 1
        path = path.with_name(f"{name['epoch']}.{part:03d}{SUFFIX}")
        if not path.exists():
            return
        records = _records(path)
        next(records, None)
