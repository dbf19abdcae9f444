"""Asks every engine process for signs of life and says which of them hang."""

import asyncio
from collections.abc import Callable

import structlog

from nearline.node_agent.pulse import Pulse, Verdict, patience_s
from nearline.node_agent.types import EngineId
from nearline.protocol import InstanceId, Seconds
from nearline.protocol.frames import Ping

MAX_INTERVAL_S: Seconds = 2.0
log = structlog.get_logger()


class Heartbeat:
    """Owns one pulse per process. `hung(engine_id, reason)` is called once for a process that does not answer.

    A process is watched while it is idle, and while it serves: bound, with all its bytes read. In between others wait
    for it with deadlines of their own.
    """

    def __init__(
        self, send: Callable[[EngineId, object], None], hung: Callable[[EngineId, str], None], least_s: Seconds
    ) -> None:
        self._send = send
        self._hung = hung
        self._least_s = least_s
        self._pulses: dict[EngineId, Pulse] = {}
        self._waiting: dict[InstanceId, EngineId] = {}
        self._bound: dict[InstanceId, Seconds] = {}
        self._filled: dict[InstanceId, None] = {}

    async def run(self) -> None:
        """Look at every process again and again, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(MAX_INTERVAL_S, self._least_s / 4))
            for engine_id, pulse in list(self._pulses.items()):
                verdict = pulse.look(loop.time())
                if verdict is Verdict.ASK:
                    self._send(engine_id, Ping(pulse.number))
                elif verdict is Verdict.HUNG:
                    del self._pulses[engine_id]
                    log.error("an engine hangs; killing it", engine_id=engine_id)
                    self._hung(engine_id, "it gave no sign of life and was killed")

    def idle(self, engine_id: EngineId) -> None:
        """Watch a process that serves nobody."""
        self._pulses.setdefault(engine_id, Pulse()).watch(self._least_s)

    def binding(self, engine_id: EngineId, instance_id: InstanceId) -> None:
        """Leave a process alone while it becomes an instance."""
        self.busy(engine_id)
        self._waiting[instance_id] = engine_id

    def bound(self, instance_id: InstanceId, longest_step_s: Seconds) -> None:
        """Note that an instance may be sent requests, and how long its steps may take."""
        self._bound[instance_id] = patience_s(longest_step_s, self._least_s)
        self._begin(instance_id)

    def filled(self, instance_id: InstanceId) -> None:
        """Note that an instance's bytes are there."""
        self._filled[instance_id] = None
        self._begin(instance_id)

    def busy(self, engine_id: EngineId) -> None:
        """Leave a process alone that binds or unbinds."""
        self._pulses.setdefault(engine_id, Pulse()).rest()

    def answered(self, engine_id: EngineId, number: int, longest_step_s: Seconds) -> None:
        """Take in a sign of life, and how long the process's steps may take by now."""
        if engine_id in self._pulses:
            self._pulses[engine_id].answered(number, patience_s(longest_step_s, self._least_s))

    def gone(self, engine_id: EngineId) -> None:
        """Forget a process that has ended or is ending."""
        self._pulses.pop(engine_id, None)

    def released(self, instance_id: InstanceId) -> None:
        """Forget an instance. One that still serves has all its bytes, or nobody would let go of the frames."""
        if instance_id in self._bound:
            self.filled(instance_id)
        self._waiting.pop(instance_id, None)
        self._bound.pop(instance_id, None)
        self._filled.pop(instance_id, None)

    def _begin(self, instance_id: InstanceId) -> None:
        if instance_id in self._waiting and instance_id in self._bound and instance_id in self._filled:
            engine_id = self._waiting.pop(instance_id)
            if engine_id in self._pulses:
                self._pulses[engine_id].watch(self._bound[instance_id])
