"""The command: statuses, JSON, and messages a person can act on."""

import inspect
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from nearline.client.commands.up import open_to_others
from nearline.client.platform import PlatformConfig
from tests.client.conftest import Server

ROW = {
    "id": "org/m", "state": "asleep", "tier": "ssd", "num_bytes": 269_060_552, "dtype": "bfloat16",
    "max_context_tokens": 8192, "num_instances": 0,
}  # fmt: skip


def nearline(*arguments: str, url: str = "http://127.0.0.1:9", **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nearline", *arguments]
    environment = {"NEARLINE_URL": url, "PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=60, **options)


def test_a_list_is_a_table_for_people_and_one_json_value_for_programs(server: Server) -> None:
    async def listed(request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [ROW]})

    server.handler = listed
    shown = nearline("model", "list", url=server.url)
    assert shown.returncode == 0
    assert "org/m" in shown.stdout
    assert "269.1 MB" in shown.stdout
    assert "\x1b" not in shown.stdout
    assert json.loads(nearline("model", "list", "--json", url=server.url).stdout) == [ROW]


def test_failure_is_status_1_with_the_cure_on_stderr_or_in_the_json() -> None:
    plain = nearline("ps")
    assert (plain.returncode, plain.stdout) == (1, "")
    assert "nearline up" in plain.stderr
    as_json = nearline("ps", "--json")
    assert as_json.returncode == 1
    assert json.loads(as_json.stdout)["error"]["code"] == "state_unavailable"


def test_a_message_with_brackets_prints_as_it_is(server: Server) -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "shape [4, 64][/b]", "code": "invalid_request"}}, status=400)

    server.handler = refuse
    assert "shape [4, 64][/b]" in nearline("ps", url=server.url).stderr


def test_an_answer_streams_to_stdout_and_notes_go_to_stderr(server: Server) -> None:
    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in ({"delta": "Hel"}, {"delta": "lo"}, {"delta": "", "finish_reason": "length", "timings": {}}):
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    server.handler = stream
    done = nearline("invoke", "m", "-", url=server.url, input="from stdin")
    assert (done.returncode, done.stdout) == (0, "Hello\n")
    assert "--max-tokens" in done.stderr
    assert json.loads(server.seen[0][3])["messages"][0]["content"] == "from stdin"


def test_a_relative_source_is_sent_as_the_server_sees_it(server: Server, tmp_path: Path) -> None:
    async def register(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        progress = {"phase": "writing", "done_bytes": 5, "total_bytes": 10}
        await response.write(f"data: {json.dumps(progress)}\n\ndata: {json.dumps(ROW)}\n\n".encode())
        return response

    server.handler = register
    source = tmp_path / "a model"
    done = nearline("model", "add", "m", "a model", "--json", url=server.url, cwd=tmp_path)
    assert json.loads(done.stdout) == ROW
    assert json.loads(server.seen[0][3])["source"] == str(source)


def test_a_models_promises_are_made_changed_and_taken_away(server: Server, tmp_path: Path) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response(ROW, status=201 if request.method == "POST" else 200)

    server.handler = answer
    nearline("model", "add", "m", str(tmp_path), "--deadline-ms", "900", "--slo", "batch-1m", "--json", url=server.url)
    changed = ("--ttft-ms", "500", "--keep-alive", "-1", "--clear", "deadline-ms", "--clear", "keep-alive-min")
    shown = nearline("model", "set", "m", *changed, url=server.url)
    assert shown.returncode == 0, shown.stderr
    assert "deadline_ms = none" in shown.stdout
    made, patched = (json.loads(seen[3]) for seen in server.seen)
    assert made == {
        "name": "m", "source": str(tmp_path), "replace": False, "slo": "batch-1m", "deadline_ms": 900,
    }  # fmt: skip
    assert patched == {"ttft_ms": 500, "keep_alive_s": -1, "deadline_ms": None, "keep_alive_min_s": None}
    assert "nothing to change" in nearline("model", "set", "m", url=server.url).stderr


def test_an_error_names_what_to_do_at_this_command(server: Server) -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no", "code": "invalid_api_key"}}, status=400)

    server.handler = refuse
    for cure in ("--api-key", "NEARLINE_API_KEY"):
        assert cure in nearline("ps", url=server.url).stderr
    bare = nearline("ps", url="127.0.0.1:8000")
    assert (bare.returncode, bare.stdout) == (1, "")
    assert "put http:// in front: http://127.0.0.1:8000" in bare.stderr
    assert "Traceback" not in bare.stderr


@pytest.mark.parametrize(
    ("code", "cure"),
    [("name_taken", "(`replace`); here that is --replace"), ("invalid_api_key", "give your key with --api-key")],
)
def test_cures_are_those_of_this_command(server: Server, code: str, cure: str) -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "choose (`replace`)", "code": code}}, status=400)

    server.handler = refuse
    done = nearline("model", "remove", "m", url=server.url)
    assert done.returncode == 1
    assert cure in done.stderr


def test_a_key_that_may_not_administer_lists_what_it_may_call(server: Server) -> None:
    rows = [{"id": "m", "parent": None, "max_model_len": 2048}, {"id": "ad", "parent": "m", "max_model_len": 2048}]

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/models":
            return web.json_response({"object": "list", "data": rows})
        error = {"message": "this needs the admin key", "code": "permission_denied"}
        return web.json_response({"error": error}, status=403)

    server.handler = answer
    shown = nearline("model", "list", url=server.url)
    assert [line.split() for line in shown.stdout.splitlines()[1:]] == [["m", "–", "2048"], ["ad", "m", "2048"]]
    assert json.loads(nearline("model", "list", "--json", url=server.url).stdout) == rows


def test_an_answer_that_breaks_off_says_so_on_its_own_line_and_to_call_again(server: Server) -> None:
    async def break_off(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"delta": "par"}\n\n')
        assert request.transport is not None
        request.transport.close()
        return response

    server.handler = break_off
    done = nearline("invoke", "m", "x", url=server.url)
    assert (done.returncode, done.stdout) == (1, "par\n")
    assert "broke off; call again" in done.stderr
    assert "TransferEncoding" not in done.stderr


def test_timings_come_with_the_id_that_replay_takes(server: Server) -> None:
    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"id": "req_7", "delta": "hi", "finish_reason": "stop"}\n\ndata: [DONE]\n\n')
        return response

    server.handler = stream
    notes = nearline("invoke", "m", "x", "--timings", url=server.url).stderr
    assert "request req_7" in notes
    assert "bind, read and prefill overlap" in notes


def test_a_model_is_shown_in_words(server: Server) -> None:
    error = {"rate": 0.0123456789, "copy_bytes": 4_000_000_000.0}
    row = {**ROW, "license": None, "keep_alive_s": 300.0, "created_at": 0.0, "is_ready": True, "profile": error}

    async def show(request: web.Request) -> web.StreamResponse:
        return web.json_response({**row, "adapters": ["a", "[b]"]})

    server.handler = show
    lines = nearline("model", "show", "org/m", url=server.url).stdout.splitlines()
    shown = {line.split()[0]: line.strip().partition(" ")[2].strip() for line in lines}
    assert shown["num_bytes"] == "269.1 MB"
    assert shown["license"] == "–"
    assert shown["keep_alive_s"] == "300 s"
    assert shown["created_at"].startswith(("1970-01-01", "1969-12-31"))
    assert shown["is_ready"] == "yes"
    assert (shown["profile"], shown["rate"], shown["copy_bytes"]) == ("", "0.01235", "4.0 GB")
    assert shown["adapters"] == "a, [b]"


def test_a_job_that_failed_makes_wait_fail(server: Server) -> None:
    async def failed(request: web.Request) -> web.StreamResponse:
        error = {"message": "no such luck", "code": "instance_failed"}
        return web.json_response({"id": "job_1", "status": "failed", "error": error})

    server.handler = failed
    waited = nearline("job", "wait", "job_1", url=server.url)
    assert waited.returncode == 1
    assert "no such luck" in waited.stderr
    assert "no such luck" in nearline("job", "result", "job_1", url=server.url).stderr


def test_every_verb_that_answers_takes_json() -> None:
    from typer.main import get_command

    from nearline.client.cli import app

    root = get_command(app)
    silent = {"up", "demo", "controller", "node", "replay", "simulate"}
    for name, command in root.commands.items():
        for verb in getattr(command, "commands", {name: command}).values():
            options = {flag for parameter in verb.params for flag in parameter.opts}
            assert name in silent or "--json" in options, f"nearline {name} {verb.name}"


def test_an_interrupt_while_the_command_still_loads_leaves_no_traceback() -> None:
    class Interrupted:  # stands in for Ctrl-C at the moment the first module is looked for
        def find_spec(self, name: str, *_: object) -> None:
            if name == "nearline.client.cli":
                raise KeyboardInterrupt

    source = inspect.getsource(Interrupted)
    program = f"import sys\n{textwrap.dedent(source)}\nsys.meta_path.insert(0, Interrupted())\n"
    program += "from nearline.__main__ import main\nmain()"
    ended = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_after_an_interrupt_nothing_is_waited_for() -> None:
    program = """
import sys, threading, types
def interrupted(): raise KeyboardInterrupt
sys.modules["nearline.client.cli"] = types.SimpleNamespace(app=interrupted)
threading.Thread(target=threading.Event().wait).start()
from nearline.__main__ import main
print("text")
main()"""
    ended = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "text\n", "")


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--merge", "foo", "--merge"),
        ("--slots", "0", "--slots"),
        ("--pool", "lots", "'lots' is not a size"),
        ("--tenant-weight", "a=0", "NAME=W with W above 0, not 'a=0'"),
        ("--tenant-slo", "a=soon", "one of interactive"),
        ("--allow-host", "https://a.example", "--allow-host takes a name without a port"),
        ("--pool", "7TiB", "--pool-bytes is 7,168.0 GiB, and this machine has"),
    ],
)
def test_up_refuses_options_before_anything_starts(tmp_path: Path, option: str, value: str, said: str) -> None:
    done = nearline("up", "--data-dir", str(tmp_path / "data"), "--port", "0", option, value)
    assert done.returncode != 0
    assert said in done.stderr
    assert "valkey" not in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("host", "keys", "arguments", "said"),
    [
        ("127.0.0.1", (), (), []),
        ("::1", (), (), []),
        ("10.0.0.7", (), (), ["may call and administer; add --api-key-file"]),
        ("10.0.0.7", (), ("--admin-key-file", "f"), ["may call; add --api-key-file"]),
        ("10.0.0.7", ("ann=a",), (), []),
        ("0.0.0.0", (), ("--api-key-file", "f"), [":8123   (the URL for other machines)"]),
        ("0.0.0.0", (), (), [":8123   (the URL for other machines)", "anyone who reaches this port"]),
    ],
)
def test_up_says_what_other_machines_may_do(
    host: str, keys: tuple[str, ...], arguments: tuple[str, ...], said: list[str]
) -> None:
    config = PlatformConfig(data_dir=Path("d"), host=host, api_keys=keys, controller_args=arguments)
    lines = open_to_others(config, "http://127.0.0.1:8123")
    assert len(lines) == len(said)
    assert all(text in line for text, line in zip(said, lines, strict=True))
    assert "0.0.0.0" not in "".join(lines)


def piped(reader: str, *arguments: str, url: str = "http://127.0.0.1:9") -> tuple[int, str]:
    """The status of a command whose output goes where a shell sends it, and what it said on stderr."""
    command = f'"$0" -m nearline "$@" {reader}'
    environment = {"NEARLINE_URL": url, "PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    line = ["/bin/bash", "-o", "pipefail", "-c", command, sys.executable, *arguments]
    done = subprocess.run(line, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                          env=environment, timeout=60)  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.parametrize("arguments", [("model", "list"), ("model", "list", "--json"), ("simulate", "--seconds", "5")])
def test_an_output_that_nobody_reads_ends_the_command_without_a_word(
    server: Server, arguments: tuple[str, ...]
) -> None:
    async def listed(request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [ROW] * 2000})

    server.handler = listed
    status, said = piped("| true", *arguments, url=server.url)
    assert status != 0
    assert "Traceback" not in said
    assert "roken pipe" not in said


def test_an_output_that_cannot_be_written_says_so_in_one_line(server: Server) -> None:
    async def listed(request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [ROW]})

    server.handler = listed
    for arguments in (("model", "list"), ("model", "list", "--json")):
        told = piped("> /dev/full", *arguments, url=server.url)
        assert told == (1, "error: cannot write the output: No space left on device\n")
    assert piped(">&-", "model", "list", url=server.url) == (0, ""), "closed on purpose"
