"""A node agent in the test's own process: a real WebSocket to the controller, and counted tokens as answers."""

import asyncio
from dataclasses import replace
from typing import Any, Self

import aiohttp

from nearline.protocol import (
    FinishReason,
    InstanceId,
    InstanceState,
    InstanceStatus,
    MessageCodec,
    NodeReport,
    SequenceTimings,
    SequenceUpdate,
    encode,
)
from nearline.protocol.frames import (
    Abort,
    EnsureInstance,
    InstanceChanged,
    Report,
    StopInstance,
    Submit,
    ToAgent,
    Tokens,
    Welcome,
)
from tests.controller.fleets import MAX_RUNNING, TIMINGS

_INBOUND = MessageCodec(ToAgent)


class FakeAgent:
    """Each sequence yields the tokens 1000 + position, so a resumed stream can be told from a repeated one."""

    def __init__(self, url: str, node_report: NodeReport, token: str = "", step_s: float = 0.005) -> None:
        self.url = url
        self.report = node_report
        self.token = token
        self.step_s = step_s
        self.load_s = 0.02
        self.fill_s = 0.0
        self.is_mute = False
        self.instances: dict[InstanceId, InstanceStatus] = {}
        self.sequences: dict[str, tuple[InstanceId, asyncio.Task[None]]] = {}
        self.received: list[Any] = []
        self.welcome: Welcome | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession()
        await self.dial()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.hang_up()
        await self._session.close()

    async def dial(self) -> None:
        headers = {"Authorization": f"Bearer {self.token}"}
        self._socket = await self._session.ws_connect(self.url, headers=headers)
        await self.send(Report(self.full_report()))
        self._reader = asyncio.create_task(self._read())

    async def hang_up(self) -> None:
        """The link breaks: sequences are aborted, instances stay."""
        self._reader.cancel()
        for name in list(self.sequences):
            self.abort(name)
        await self._socket.close()

    @property
    def is_connected(self) -> bool:
        return not self._socket.closed

    def full_report(self) -> NodeReport:
        return replace(self.report, instances=tuple(self.instances.values()))

    async def send(self, frame: Any) -> None:
        await self._socket.send_bytes(encode(frame))

    def abort(self, request_id: str) -> None:
        _, task = self.sequences.pop(request_id, (None, None))
        if task is not None:
            task.cancel()

    async def change(self, instance_id: InstanceId, state: InstanceState, **settings: Any) -> None:
        status = replace(self.instances[instance_id], state=state, max_running=MAX_RUNNING, **settings)
        self.instances[instance_id] = status
        if state in (InstanceState.STOPPED, InstanceState.FAILED):
            del self.instances[instance_id]
            for name, (where, _) in list(self.sequences.items()):
                if where == instance_id:
                    self.abort(name)
        await self.send(InstanceChanged(status))

    async def _read(self) -> None:
        async for message in self._socket:
            frame = _INBOUND.decode(message.data)
            self.received.append(frame)
            match frame:
                case Welcome():
                    self.welcome = frame
                case EnsureInstance(spec):
                    if spec.instance_id not in self.instances:
                        fields = (spec.instance_id, spec.model_id, spec.digest, InstanceState.PENDING)
                        self.instances[spec.instance_id] = InstanceStatus(*fields)
                        await self.change(spec.instance_id, InstanceState.LOADING)
                        await asyncio.sleep(self.load_s)
                        await self.change(spec.instance_id, InstanceState.READY)
                        self._filling = asyncio.create_task(self._fill(spec.instance_id))
                case StopInstance(instance_id):
                    if instance_id in self.instances:
                        await self.change(instance_id, InstanceState.STOPPED)
                case Submit():
                    task = asyncio.create_task(self._generate(frame))
                    self.sequences[frame.request.request_id] = (frame.instance_id, task)
                case Abort(_, request_id):
                    self.abort(request_id)

    async def _fill(self, instance_id: InstanceId) -> None:
        await asyncio.sleep(self.fill_s)
        if instance_id in self.instances:
            await self.change(instance_id, InstanceState.READY, timings=TIMINGS)

    async def _generate(self, submit: Submit) -> None:
        request, total = submit.request, submit.request.sampling.max_tokens
        for position in range(len(submit.generated_token_ids), total):
            await asyncio.sleep(self.step_s)
            is_first = position == len(submit.generated_token_ids)
            update = SequenceUpdate(
                request.request_id,
                submit.attempt,
                (1000 + position,),
                FinishReason.LENGTH if position == total - 1 else None,
                timings=SequenceTimings(0.0, 0.0, 0.004, 0) if is_first else None,
            )
            if update.finish_reason:
                self.sequences.pop(request.request_id, None)
            if not self.is_mute:
                await self.send(Tokens(submit.instance_id, (update,)))
