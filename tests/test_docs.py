"""What the documents say is so."""

import argparse
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from nearline.client.cli import app
from nearline.controller import __main__ as controller
from nearline.controller import replay
from nearline.controller.http.app import create_app
from nearline.node_agent import __main__ as node_agent
from nearline.simulator import __main__ as simulator

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("*/README.md"))]
PASSED_ON = {
    "controller": controller._parser,
    "node": node_agent._parser,
    "replay": replay._parser,
    "simulate": simulator._parser,
}
"""Verbs whose arguments another process reads, and its parser."""


def registered_routes() -> set[tuple[str, str]]:
    """(method, path) of every route a person may call, with `{name:.+}` written as `{name}`."""
    door: Any = None
    routes = create_app(door).router.routes()
    return {(route.method, route.resource.canonical) for route in routes if route.resource and route.method != "HEAD"}


def test_every_route_is_documented_and_every_documented_route_exists() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    documented = set(re.findall(r"`(GET|POST|DELETE|PUT|PATCH) (/[^`]*)`", text))
    assert documented == registered_routes()


def documented_commands() -> list[str]:
    """Whole command lines: those of shell blocks."""
    text = "".join(path.read_text() for path in DOCUMENTS).replace("\\\n", "")
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = [line.split(" #")[0].strip().removesuffix("&").strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("nearline ")]


def mentioned_commands() -> list[str]:
    """Verbs and options that sentences name, as `nearline model add|set --slo`."""
    text = "".join(path.read_text() for path in DOCUMENTS)
    spans = re.findall(r"`(?:PYTHONPATH=\S+ )?(nearline [a-z][^`]*)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return sorted({" ".join(span.split()) for span in spans})


def parse(line: str) -> None:
    """Raises click's UsageError, or SystemExit, for what the verb does not take."""
    command, arguments = get_command(app), shlex.split(line)[1:]
    if arguments[0] in PASSED_ON:
        PASSED_ON[arguments[0]]().parse_args(arguments[1:])
        return
    while hasattr(command, "commands"):
        command = command.commands[arguments.pop(0)]
    command.make_context("nearline", arguments)


def options(verbs: list[str]) -> set[str]:
    """The options of `model add`, say. Raises KeyError for no verb."""
    command: Any = get_command(app)
    for verb in verbs:
        command = command.commands[verb]
    if verbs[0] in PASSED_ON:
        parser: argparse.ArgumentParser = PASSED_ON[verbs[0]]()
        return set(parser._option_string_actions)
    return {flag for parameter in getattr(command, "params", []) for flag in parameter.opts}


@pytest.mark.parametrize("line", documented_commands())
def test_every_command_of_the_documents_parses(line: str) -> None:
    """Parsing alone: the journeys behind them are tests/system."""
    parse(line)


@pytest.mark.parametrize("line", ["nearline node --bost h", "nearline simulate --nods 3", "nearline replay f --jsn"])
def test_an_option_that_the_process_behind_a_verb_does_not_have_is_noticed(line: str) -> None:
    with pytest.raises(SystemExit):
        parse(line)


@pytest.mark.parametrize("line", mentioned_commands())
def test_every_verb_and_option_that_the_documents_name_exists(line: str) -> None:
    words = re.sub(r"\[|\]|…", "", line).split()[1:]
    first = words[0].split("|")
    for verb in first:
        nested = [word for word in words[1:2] if hasattr(get_command(app).commands[verb], "commands")]
        for verbs in [[verb, second] for word in nested for second in word.split("|")] or [[verb]]:
            named = {flag for word in words for flag in word.split("|") if re.fullmatch(r"-[a-z]|--[a-z-]+", flag)}
            assert named <= options(verbs), f"nearline {' '.join(verbs)} has no {named - options(verbs)}"


def test_every_make_target_of_the_readme_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^make (\w+)", README, re.MULTILINE))
    assert targets == {"demo", "test"}
    assert all(f"\n{target}:" in makefile for target in targets)


def test_every_link_of_every_readme_leads_somewhere() -> None:
    for readme in [ROOT / "README.md", *ROOT.glob("*/README.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", readme.read_text()):
            assert (readme.parent / target).exists(), f"{readme.relative_to(ROOT)} links to {target}"


def test_every_source_that_code_cites_is_in_the_table_of_papers() -> None:
    known = set(re.findall(r"^\| \[(\w+)\]", README, re.MULTILINE))
    for path in ROOT.glob("*/**/*.py"):
        if {".venv", "build"} & set(path.parts):
            continue
        for key in re.findall(r"Source: \[(\w+)\]", path.read_text()):
            assert key in known, f"{path.relative_to(ROOT)} cites [{key}]"


def test_the_python_blocks_of_the_readme_compile_and_name_what_exists() -> None:
    import nearline.client

    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        compile(block, "README.md", "exec")
    for method in ("remote", "stream", "spawn", "map"):
        assert callable(getattr(nearline.client.Function, method))
