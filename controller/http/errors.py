"""Every failure in one shape: `{"error": {message, type, param, code}}` with the headers that tell clients what next.

Source: OpenAI's error object; openai-python retries 408, 409, 429 and 5xx unless `x-should-retry` says otherwise.
"""

import math
from http import HTTPStatus
from typing import Any

from aiohttp import web

from nearline.controller.shown import shown
from nearline.protocol.errors import ERRORS, Busy, NearlineError

DEFAULT_RETRY_AFTER_S = 2.0
MAX_BODY_BYTES = 32 << 20
MAX_RETRY_AFTER_S = 120.0
"""Clients give up for good when they are told to wait longer."""

_HTTP_CODES = {404: "route_not_found", 405: "method_not_allowed", 413: "payload_too_large"}


def envelope(error: BaseException) -> dict[str, Any]:
    """Describe any exception in OpenAI's shape. What is not ours says nothing of its inside."""
    if not isinstance(error, NearlineError):
        error = NearlineError("an internal error occurred; the controller's log has it under this request's id")
    row = ERRORS[type(error)]
    return {"error": {"message": error.message, "type": row.type, "param": error.param, "code": row.code}}


def error_headers(error: BaseException) -> dict[str, str]:
    """Say whether and when to try again."""
    row = ERRORS[type(error)] if isinstance(error, NearlineError) else ERRORS[NearlineError]
    headers = {"x-should-retry": "true" if row.is_retryable else "false"}
    wait_s = error.retry_after_s if isinstance(error, NearlineError) else None
    if wait_s is None and isinstance(error, Busy) and row.is_retryable:
        wait_s = DEFAULT_RETRY_AFTER_S
    if wait_s is not None and row.is_retryable:
        headers["Retry-After"] = str(math.ceil(min(max(wait_s, 1.0), MAX_RETRY_AFTER_S)))
    return headers


def error_response(error: BaseException) -> web.Response:
    """Answer with any exception."""
    status = error.status if isinstance(error, NearlineError) else 500
    return web.json_response(envelope(error), status=status, headers=error_headers(error))


def http_error_response(error: web.HTTPException, asked: str = "") -> web.Response:
    """Answer with one of aiohttp's own errors (unknown route, wrong method, body too large …). `asked` is what the
    client wanted, as `GET /path`."""
    status = error.status
    kind = "not_found_error" if status == 404 else "invalid_request_error" if status < 500 else "server_error"
    code = _HTTP_CODES.get(status, HTTPStatus(status).name.lower())
    body = {"error": {"message": _http_message(error, asked), "type": kind, "param": None, "code": code}}
    headers = {"x-should-retry": "false"}
    if "Allow" in error.headers:
        headers["Allow"] = error.headers["Allow"]
    return web.json_response(body, status=status, headers=headers)


def _http_message(error: web.HTTPException, asked: str) -> str:
    if isinstance(error, web.HTTPNotFound):
        return f"there is no route {shown(asked)}; GET / lists the main ones"
    if isinstance(error, web.HTTPMethodNotAllowed):
        return f"{shown(error.method)} is not allowed here; use {', '.join(sorted(error.allowed_methods))}"
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return f"the body is too large; at most {MAX_BODY_BYTES >> 20} MiB are taken"
    return error.text or error.reason
