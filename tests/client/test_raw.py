"""What the command says of models that only continue text."""

import json

import pytest
from aiohttp import web

from tests.client.conftest import Server
from tests.client.test_cli import ROW, nearline


@pytest.mark.parametrize(
    ("answered", "said"),
    [
        ({}, "'Hello!'\n"),
        ({"has_chat_template": True}, "'Hello!'\n"),
        ({"has_chat_template": False}, "'Hello!' --raw\n"),
    ],
)
def test_the_first_call_it_suggests_is_one_that_gets_an_answer(
    server: Server, answered: dict[str, bool], said: str
) -> None:
    async def register(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(f"data: {json.dumps({**ROW, **answered})}\n\n".encode())
        return response

    server.handler = register
    for words in (("model", "add", "org/m", "hub:a/b"), ("adapter", "add", "org/m", "hub:a/b", "--base", "x")):
        assert nearline(*words, url=server.url).stdout.endswith(f"try: nearline invoke org/m {said}")


def test_the_cure_for_a_model_without_a_chat_template_is_an_option_of_this_command(server: Server) -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        error = {"message": "this model has no chat template", "code": "no_chat_template", "param": "messages"}
        return web.json_response({"error": error}, status=400)

    server.handler = refuse
    done = nearline("invoke", "m", "Hello!", url=server.url)
    assert done.returncode == 1
    assert "--raw" in done.stderr
