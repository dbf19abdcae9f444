"""Plain HTTP calls to a running platform: one answer, or the frames of a stream."""

import json
import urllib.error
import urllib.request
from typing import Any


def call(url: str, body: dict[str, Any], **headers: str) -> tuple[int, Any]:
    """POST a body; return status and answer."""
    sent = {"Content-Type": "application/json"} | {key.replace("_", "-"): value for key, value in headers.items()}
    request = urllib.request.Request(url, json.dumps(body).encode(), sent)
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def frames(url: str, body: dict[str, Any]) -> list[Any]:
    """POST a body with stream: true; return its data frames, without [DONE]."""
    data = json.dumps(body | {"stream": True}).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        lines = response.read().decode().split("\n\n")
    found = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert found[-1] == "[DONE]"
    return [json.loads(frame) for frame in found[:-1]]


class Way:
    """One way to ask for text: an endpoint, whole, streamed, or as a job."""

    def __init__(self, endpoint: str, kind: str) -> None:
        self.endpoint, self.kind = endpoint, kind

    def __str__(self) -> str:
        return f"{self.endpoint}-{self.kind}"

    def ask(self, url: str, model: str, **options: Any) -> tuple[str, str]:
        """Return the text and the finish reason."""
        text, reason = "", ""
        if self.kind == "stream":
            for frame in frames(self._url(url, model), self._body(model) | options):
                piece, ended = self._piece(frame)
                text, reason = text + piece, ended or reason
            return text, reason
        if self.kind == "job":
            endpoint = {"invoke": "function", "chat": "/v1/chat/completions", "text": "/v1/completions"}[self.endpoint]
            body = {"model": model, "endpoint": endpoint, "input": self._body(model) | options}
            status, job = call(f"{url}/v1/jobs", body, Prefer="wait=30")
            assert (status, job["status"]) == (200, "succeeded"), job
            return self._whole(job["output"])
        status, answer = call(self._url(url, model), self._body(model) | options)
        assert status == 200, answer
        return self._whole(answer if self.endpoint != "invoke" else answer["output"])

    def _url(self, url: str, model: str) -> str:
        paths = {"invoke": f"functions/{model}/invocations", "chat": "chat/completions", "text": "completions"}
        return f"{url}/v1/{paths[self.endpoint]}"

    def _body(self, model: str) -> dict[str, Any]:
        if self.endpoint == "chat":
            return {"model": model, "messages": [{"role": "user", "content": "go"}]}
        return {"model": model, "prompt": "go"} if self.endpoint == "text" else {"prompt": "go"}

    def _whole(self, answer: Any) -> tuple[str, str]:
        if self.endpoint == "invoke":
            return answer["text"], answer["finish_reason"]
        choice = answer["choices"][0]
        return choice["message"]["content"] if self.endpoint == "chat" else choice["text"], choice["finish_reason"]

    def _piece(self, frame: Any) -> tuple[str, str]:
        if self.endpoint == "invoke":
            return frame.get("delta") or "", frame.get("finish_reason") or ""
        choice = frame["choices"][0]
        text = choice["delta"].get("content") or "" if self.endpoint == "chat" else choice["text"]
        return text, choice["finish_reason"] or ""


WAYS = [Way(endpoint, kind) for endpoint in ("chat", "text", "invoke") for kind in ("whole", "stream", "job")]
