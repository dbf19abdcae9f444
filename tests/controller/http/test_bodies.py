"""Large bodies: read in a thread, refused by their length before anything is tokenised."""

import json
import threading
from typing import Any

import pytest
from pydantic import field_validator

from nearline.controller.http.bodies import INLINE_BYTES, read_body
from nearline.controller.http.schemas import Body
from nearline.controller.text.vocabulary import Vocabulary
from tests.controller.http.conftest import CONTEXT, FrontDoor


class Probe(Body):
    text: str

    @field_validator("text")
    @classmethod
    def _where(cls, _: str) -> str:
        return threading.current_thread().name


@pytest.mark.parametrize("is_large", [False, True])
async def test_a_large_body_is_read_in_a_thread(is_large: bool) -> None:
    data = json.dumps({"text": "x" * (INLINE_BYTES if is_large else 10)})
    name = (await read_body(Probe, data)).text
    assert (name != threading.main_thread().name) is is_large


@pytest.mark.parametrize("prompt", [[1] * CONTEXT, "x" * (17 * CONTEXT), "x y " * 200_000])
async def test_what_can_never_fit_is_refused_without_being_tokenised(
    front: FrontDoor, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Vocabulary, "_encode", lambda *_: pytest.fail("it was tokenised"))
    chat = [{"role": "user", "content": prompt}]
    jobs = [{"model": "tiny", "input": {"prompt": prompt}, "endpoint": e} for e in ("function", "/v1/completions")]
    asked = [("/v1/completions", {"model": "tiny", "prompt": prompt})]
    asked += [("/v1/functions/tiny/invocations", {"prompt": prompt}), *(("/v1/jobs", job) for job in jobs)]
    if isinstance(prompt, str):
        asked.append(("/v1/chat/completions", {"model": "tiny", "messages": chat}))
    for path, body in asked:
        status, answer, _ = await front.post(path, body)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded"), path
        assert answer["error"]["param"] in ("prompt", "messages")
        assert str(len(prompt)) in answer["error"]["message"] or path.endswith("completions")


async def test_a_long_text_that_may_fit_is_still_counted_in_tokens(front: FrontDoor) -> None:
    status, answer, _ = await front.post("/v1/completions", {"model": "tiny", "prompt": "x" * (2 * CONTEXT)})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert f"{2 * CONTEXT} tokens" in answer["error"]["message"]
