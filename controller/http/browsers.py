"""Web pages call from their visitors' browsers. Without API keys a place on the network would be all it takes: so pages
of other origins are refused, names that were made to point here too, and bodies that a page may send unasked.

Source: the Fetch standard (Origin; CORS-safelisted content types need no leave of the server); RFC 6761 (localhost).
"""

import re
from functools import lru_cache
from ipaddress import ip_address

from aiohttp import web

from nearline.controller.http.door import Door
from nearline.protocol.errors import Forbidden

JSON = "application/json"
MAX_SHOWN = 100
_HOST = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(?::\d*)?")
_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_OF_PAGES = ("null", "http://", "https://")
"""How the origins of web pages begin. Those of desktop applications (app://, vscode-webview://) cannot be visited."""


def check_origin(request: web.Request, door: Door) -> None:
    """Raises Forbidden for what only a foreign page sends while nobody has to show a key, HTTPUnsupportedMediaType for
    a body that does not say it is JSON."""
    if not door.tenants.is_open:
        return
    headers = request.headers
    host = headers.get("Host", "")
    if door.is_loopback and not is_ours(host, door.host_names):
        raise Forbidden(
            f"without API keys this platform does not answer to the name {host[:MAX_SHOWN]!r}, because any web site"
            " could have made it point here; call it as localhost or by its address, or start it with --allow-host NAME"
            " (behind a proxy) or with --api-key"
        )
    origin = headers.get("Origin", "").lower()
    if origin.startswith(_OF_PAGES) and origin.partition("://")[2] != host.lower():
        raise Forbidden(
            f"pages of {origin[:MAX_SHOWN]!r} cannot call this platform, with API keys or without (no CORS headers);"
            " call it from the server of that page"
        )
    if request.method in ("POST", "PATCH") and request.body_exists:
        given = headers.get("Content-Type", "")
        if given != JSON and given.partition(";")[0].strip().lower() != JSON:
            text = f"the body is sent as {given[:MAX_SHOWN]!r}" if given else "the body does not say what it is"
            raise web.HTTPUnsupportedMediaType(text=f"{text}; add the header `Content-Type: {JSON}` (curl: -H)")


def check_no_page(request: web.Request) -> None:
    """Raises Forbidden where only node agents connect: browsers name an origin with every WebSocket, agents none."""
    if "Origin" in request.headers:
        raise Forbidden("only node agents may connect here, and no web page")


def host_name(text: str) -> str:
    """Read a name as `is_ours` compares it. Raises ValueError unless it is one, without a port."""
    name = text.lower().removesuffix(".")
    if not _NAME.fullmatch(name):
        raise ValueError(f"--allow-host takes a name without a port, such as models.example.com, not {text[:60]!r}")
    return name


@lru_cache(maxsize=256)
def is_ours(host: str, names: frozenset[str] = frozenset()) -> bool:
    """Whether a Host header cannot stem from a name that somebody else points here: an address, localhost, one of
    `names`, or none."""
    match = _HOST.fullmatch(host)
    name = (match[1] if match else host).lower().removesuffix(".")
    if name in ("", "localhost") or name.endswith(".localhost") or name in names:
        return True
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
