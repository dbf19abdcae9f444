"""What the documents say is so."""

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from nearline.client.cli import app

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def registered_routes() -> set[tuple[str, str]]:
    """(method, path) of every route a person may call, with `{name:.+}` written as `{name}`."""
    routes = set()
    for path in (ROOT / "controller" / "http").glob("*.py"):
        for method, route in re.findall(r'web\.(get|post|delete|put|patch)\(\s*f?"([^"]+)"', path.read_text()):
            plain = re.sub(r"\{(\w+):[^}]+\}", r"{\1}", route)
            if plain == "/admin/{kind}":
                routes |= {("GET", f"/admin/{kind}") for kind in ("instances", "nodes", "queues")}
            else:
                routes.add((method.upper(), plain))
    return routes


def test_every_route_is_documented_and_every_documented_route_exists() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    documented = set(re.findall(r"`(GET|POST|DELETE|PUT|PATCH) (/[^`]*)`", text))
    assert documented == registered_routes()


def documented_commands() -> list[str]:
    text = README + (ROOT / "docs" / "fleet.md").read_text().replace("\\\n", "")
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = [line.split(" #")[0].strip().removesuffix("&").strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("nearline ")]


@pytest.mark.parametrize("line", documented_commands())
def test_every_command_of_the_documents_parses(line: str) -> None:
    """Parsing alone: the journeys behind them are tests/system."""
    command, arguments = get_command(app), shlex.split(line)[1:]
    while hasattr(command, "commands"):
        command = command.commands[arguments.pop(0)]
    command.make_context("nearline", arguments)


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
