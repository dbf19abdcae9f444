"""Web pages call from their visitors' browsers. Without API keys a place on the network would be all it takes: so pages
of other origins are refused, names that were made to point here too, and bodies that a page may send unasked.

Source: the Fetch standard (Origin; CORS-safelisted content types need no leave of the server).
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


def check_origin(request: web.Request, door: Door) -> None:
    """Raises Forbidden for what only a foreign page sends while nobody has to show a key, HTTPUnsupportedMediaType for
    a body that does not say it is JSON."""
    headers = request.headers
    if door.tenants.is_open:
        host = headers.get("Host", "")
        if door.is_loopback and not is_beyond_dns(host):
            raise Forbidden(
                f"without API keys this platform does not answer to the name {host[:MAX_SHOWN]!r}, which may be another"
                " site's; call it as localhost or by its address, or start it with --api-key"
            )
        origin = headers.get("Origin")
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            raise Forbidden(
                f"pages of {origin[:MAX_SHOWN]!r} may not call this platform while it has no API keys; start it with"
                " --api-key"
            )
    if request.method in ("POST", "PATCH") and request.body_exists:
        given = headers.get("Content-Type", "")
        if given != JSON and given.partition(";")[0].strip().lower() != JSON:
            text = f"the body is sent as {given[:MAX_SHOWN]!r}" if given else "the body does not say what it is"
            raise web.HTTPUnsupportedMediaType(text=f"{text}; add the header `Content-Type: {JSON}` (curl: -H)")


@lru_cache(maxsize=256)
def is_beyond_dns(host: str) -> bool:
    """Whether a Host header cannot stem from a name that somebody else points here: an address, localhost or none."""
    match = _HOST.fullmatch(host)
    name = match[1].lower() if match else host
    if name in ("", "localhost"):
        return True
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
