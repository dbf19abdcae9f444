"""The controller's end of the links to node agents: one WebSocket each, frames in, frames out, in order."""

import asyncio
import hmac
from typing import Protocol

import structlog
from aiohttp import WSMsgType, web

from nearline.controller.config import RuntimeConfig
from nearline.protocol import MessageCodec, NodeId, NodeReport, WireError, encode
from nearline.protocol.errors import Unauthorized
from nearline.protocol.frames import Report, ToAgent, ToController, Welcome

MAX_FRAME_BYTES = 64 << 20
_FIRST_REPORT_S = 10.0
_SEND_S = 30.0
_INBOUND = MessageCodec(ToController)
log = structlog.get_logger(__name__)


class LinkOwner(Protocol):
    """Who is told what comes over the links. Called on the event loop; must not block."""

    def node_joined(self, report: NodeReport) -> None: ...
    def node_lost(self, node_id: NodeId) -> None: ...
    def frame_received(self, node_id: NodeId, frame: ToController) -> None: ...


class NodeLink:
    """One live link. `send` never waits: frames queue for the writer, and a peer that stalls loses the link."""

    def __init__(self, node_id: NodeId, socket: web.WebSocketResponse) -> None:
        self.node_id = node_id
        self._socket = socket
        self._outbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._is_closing = False

    def send(self, frame: ToAgent) -> None:
        self._outbox.put_nowait(encode(frame))

    def close(self) -> None:
        """End the link once what was sent before is written. What still comes in is void."""
        self._is_closing = True
        self._outbox.put_nowait(None)

    async def write(self) -> None:
        """Write the outbox until the link ends."""
        try:
            while (data := await self._outbox.get()) is not None:
                async with asyncio.timeout(_SEND_S):
                    await self._socket.send_bytes(data)
        except (ConnectionError, RuntimeError, TimeoutError) as error:
            log.warning("node link cannot be written", node=self.node_id, error=str(error))
        await self._socket.close()

    async def read(self, owner: LinkOwner) -> None:
        """Hand every frame to the owner until the link ends. Raises WireError for what is not a frame."""
        async for message in self._socket:
            if message.type is not WSMsgType.BINARY:
                raise WireError(f"expected a binary message, got {message.type.name}")
            if self._is_closing:
                break
            owner.frame_received(self.node_id, _INBOUND.decode(message.data))


class NodeLinks:
    """All links, at most one per node: a newer one replaces the older."""

    def __init__(self, config: RuntimeConfig, owner: LinkOwner) -> None:
        self._config = config
        self._owner = owner
        self._links: dict[NodeId, NodeLink] = {}

    def send(self, node_id: NodeId, frame: ToAgent) -> bool:
        """Queue a frame for a node; False if it has no link (whoever sent it will hear that the node is lost)."""
        link = self._links.get(node_id)
        if link is not None:
            link.send(frame)
        return link is not None

    def broadcast(self, frame: ToAgent) -> None:
        for link in self._links.values():
            link.send(frame)

    def close(self) -> None:
        """End all links; agents keep their instances and dial again."""
        for link in self._links.values():
            link.close()

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        """Handle GET /internal/node: the whole life of one link. Raises Unauthorized for a wrong token."""
        shown = request.headers.get("Authorization", "").encode()
        if self._config.node_token and not hmac.compare_digest(shown, f"Bearer {self._config.node_token}".encode()):
            raise Unauthorized("this node's token is not the controller's; start it with the same --token-file")
        socket = web.WebSocketResponse(
            receive_timeout=self._config.link_patience_s, max_msg_size=MAX_FRAME_BYTES, compress=False, autoclose=True
        )
        await socket.prepare(request)
        try:
            report = await _first_report(socket)
        except (WireError, TimeoutError, TypeError) as error:
            log.warning("node link refused", peer=request.remote, error=str(error))
            await socket.close(code=1002, message=b"the first message must be a Report")
            return socket
        await self._run(NodeLink(report.node_id, socket), report)
        return socket

    async def _run(self, link: NodeLink, report: NodeReport) -> None:
        older = self._links.get(link.node_id)
        self._links[link.node_id] = link
        if older is not None:
            older.close()
        link.send(Welcome(self._config.report_interval_s, self._config.fencing_token, self._config.deployment))
        log.info("node joined", node=link.node_id, replaced=older is not None)
        try:
            self._owner.node_joined(report)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(link.write())
                try:
                    await link.read(self._owner)
                except WireError as error:
                    log.error("node link speaks another language", node=link.node_id, error=str(error))
                except TimeoutError:
                    log.warning("node link fell silent", node=link.node_id, seconds=self._config.link_patience_s)
                finally:
                    link.close()
        finally:
            if self._links.get(link.node_id) is link:
                del self._links[link.node_id]
                log.warning("node link lost", node=link.node_id)
                self._owner.node_lost(link.node_id)


async def _first_report(socket: web.WebSocketResponse) -> NodeReport:
    async with asyncio.timeout(_FIRST_REPORT_S):
        frame = _INBOUND.decode(await socket.receive_bytes())
    if not isinstance(frame, Report):
        raise WireError(f"expected a Report, got {type(frame).__name__}")
    return frame.report
