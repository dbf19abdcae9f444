"""The agent's end of the link to the controller: one WebSocket, dialled again for ever, silent peers noticed."""

import asyncio
import contextlib
import random
import re
from collections import deque
from collections.abc import Callable

import aiohttp
import structlog

from nearline.node_agent.fence import Fence
from nearline.node_agent.watched import watched
from nearline.protocol import MessageCodec, Seconds, WireError, encode
from nearline.protocol.frames import Report, ToAgent, Welcome

HEARTBEAT_S: Seconds = 2.0
"""A ping goes out this often, so that a living peer is never silent for long."""
PATIENCE_S: Seconds = 12.0
"""A peer silent for this long is gone. It must outlast a controller that is busy for some seconds: dropping the link
costs every stream of this node a second start. A socket that closes is noticed at once anyway."""
WELCOME_TIMEOUT_S: Seconds = 5.0
CONNECT_TIMEOUT_S: Seconds = 5.0
CLOSE_TIMEOUT_S: Seconds = 1.0
FIRST_RETRY_S, LAST_RETRY_S = 0.05, 2.0
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_CODEC = MessageCodec(ToAgent)
_LOOPBACK = re.compile(r"(?<=://)(?:127\.\d+\.\d+\.\d+|localhost|\[::1\])(?=[:/])")
log = structlog.get_logger()


class ControllerLink:
    """Keeps one link up. Owns the HTTP session while `run` runs.

    `hello(local_host)` makes the first Report of each link; `on_message` hears all that the controller says, in order;
    `on_lost` is called once per link that was welcomed and broke. Callbacks run in the event loop and must not block.
    """

    def __init__(
        self,
        controller_url: str,
        token: str | None,
        hello: Callable[[str], Report],
        on_message: Callable[[object], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._url = _socket_url(controller_url)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._hello, self._on_message, self._on_lost = hello, on_message, on_lost
        self._outbox: deque[bytes] = deque()
        self._has_news = asyncio.Event()
        self._fence = Fence()
        self._controller_host: str | None = None
        self._is_open = False
        self.is_up = False

    def send(self, message: object) -> None:
        """Send after everything sent before. Without a link it is dropped: the next Report tells the whole truth."""
        if self._is_open:
            self._outbox.append(encode(message))
            self._has_news.set()

    def seen_from_here(self, urls: str) -> str:
        """Rewrite what the controller says of where nodes are. Those on its own machine may have told it of a loopback
        address; from another machine they are found where we found the controller."""
        return _LOOPBACK.sub(self._controller_host, urls) if self._controller_host else urls

    async def run(self) -> None:
        """Dial, speak, and dial again until cancelled."""
        retry_s, last_reason = FIRST_RETRY_S, ""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout, headers=self._headers) as session:
            while True:
                reason = await self._connect_once(session)
                if self.is_up:
                    retry_s = FIRST_RETRY_S
                    self.is_up = False
                    self._on_lost()
                    log.warning("link to the controller lost; instances stay", reason=reason)
                elif reason != last_reason:
                    log.warning("no link to the controller yet; dialling on", url=self._url, reason=reason)
                last_reason = reason
                await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))
                retry_s = min(LAST_RETRY_S, retry_s * 2)

    async def _connect_once(self, session: aiohttp.ClientSession) -> str:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S + WELCOME_TIMEOUT_S) as limit:
                async with session.ws_connect(
                    self._url,
                    timeout=aiohttp.ClientWSTimeout(ws_receive=PATIENCE_S, ws_close=CLOSE_TIMEOUT_S),
                    max_msg_size=MAX_MESSAGE_BYTES,
                    compress=0,
                ) as ws:
                    return await self._speak(ws, limit)
        except TimeoutError:
            return f"the controller was silent for {PATIENCE_S:g} s" if self.is_up else "no welcome in time"
        except aiohttp.WSServerHandshakeError as error:
            if error.status in (401, 403):
                return "it refuses this node: give --token-file a copy of the file node.token of its data directory"
            return f"it answers {error.status} where nodes are served: is this the controller's address?"
        except (aiohttp.ClientError, OSError, WireError) as error:
            why = str(error) or type(error).__name__
            return why if self.is_up else f"{why}; is that what --controller should say, and does it run?"
        finally:
            self._is_open = False
            self._outbox.clear()

    async def _speak(self, ws: aiohttp.ClientWebSocketResponse, limit: asyncio.Timeout) -> str:
        local = ws.get_extra_info("sockname") or ("127.0.0.1",)
        remote = ws.get_extra_info("peername") or local
        host = f"[{remote[0]}]" if ":" in remote[0] else remote[0]
        self._controller_host = None if remote[0] == local[0] else host
        self._outbox.clear()
        self._is_open = True
        self.send(self._hello(local[0]))
        tasks = [watched(self._send_outbox(ws), "link's outbox"), watched(_ping_forever(ws), "link's pings")]
        try:
            async for message in ws:
                if message.type is not aiohttp.WSMsgType.BINARY:
                    raise WireError(f"a {message.type.name} message instead of a binary one")
                said = _CODEC.decode(message.data)
                if not self.is_up:
                    if not isinstance(said, Welcome):
                        raise WireError(f"{type(said).__name__} before Welcome")
                    if not self._fence.admits(said.deployment, said.fencing_token):
                        return f"a newer controller than number {said.fencing_token} has led this node"
                    limit.reschedule(None)
                    self.is_up = True
                    log.info("linked to the controller", url=self._url)
                self._on_message(said)
            return f"closed by the controller ({ws.close_code})"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send_outbox(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        try:
            while True:
                await self._has_news.wait()
                self._has_news.clear()
                while self._outbox:
                    await ws.send_bytes(self._outbox.popleft())
        except Exception as error:
            await ws.close()  # wakes the receiver, which says the link is lost
            if not isinstance(error, (aiohttp.ClientError, OSError)):
                raise


async def _ping_forever(ws: aiohttp.ClientWebSocketResponse) -> None:
    with contextlib.suppress(aiohttp.ClientError, OSError):  # the receiver says that the link is lost
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await ws.ping()


def _socket_url(controller_url: str) -> str:
    scheme, _, rest = controller_url.rstrip("/").partition("://")
    return f"{ {'http': 'ws', 'https': 'wss'}.get(scheme, scheme) }://{rest}/internal/node"
