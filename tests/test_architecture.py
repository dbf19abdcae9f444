"""The plan of the house, held: who may import whom, what a mind may not do, how large things may grow."""

import ast
import subprocess
import sys
import zipfile
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "protocol": set(),
    "kernels": set(),
    "checkpoint_store": {"protocol"},
    "loader": {"protocol", "checkpoint_store"},
    "engine": {"protocol", "kernels", "loader"},
    "node_agent": {"protocol", "checkpoint_store"},
    "controller": {"protocol"},
    "client": {"protocol"},
    "simulator": {"protocol", "controller", "engine", "checkpoint_store", "node_agent"},
}
ROOMS = sorted(MAY_IMPORT)
TORCH_ROOMS = {"kernels", "loader", "engine"}
WORDS = {
    "types",
    "config",
    "events",
    "actions",
    "errors",
    "ids",
    "request",
    "model",
    "quantization",
    "instance",
    "frames",
    "decoder",
    "adapter_layout",
    "options",
}
MINDS = {
    "checkpoint_store": {"quantize_codes", "tiers", "packing", "ssd", "estimate", "depth"},
    "protocol": {"step_time"},
    "engine": {
        "sequence",
        "block_manager",
        "scheduler",
        "core",
        "adapters",
        "admission",
        "validation",
        "decode_shapes",
        "merge_meter",
        "merging",
        "merge_turns",
        "policy",
        "policy_mlfq",
        "policy_shortest",
        "profile_plan",
        "step_budget",
        "step_law",
        "step_pace",
        "swap",
    },
    "node_agent": {"core", "lifecycle", "roster", "supply", "budget", "pace", "sequences", "fence", "pulse"},
    "controller": {
        "core",
        "state",
        "estimate",
        "queues",
        "timers",
        "agenda",
        "references",
        "requests",
        "machines",
        "janitor",
        "mishaps",
        "capacity",
        "copying",
        "choices",
        "promises",
        "advice",
        "places",
        "moves",
        "foresight",
        "homes",
    },
}
IMPURE = {"time", "asyncio", "threading", "logging", "structlog", "torch", "random", "os", "socket", "subprocess",
          "aiohttp", "redis", "concurrent", "uuid", "secrets", "datetime"}  # fmt: skip
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS, MAX_MEDIAN_LINES = 400, 60, 7, 150


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def sources(*folders: str) -> list[Path]:
    return sorted(p for folder in folders for p in (ROOT / folder).rglob("*.py") if "__pycache__" not in p.parts)


def imported_modules(path: Path) -> set[str]:
    """Every module named by an import anywhere in the file, lazy ones included."""
    names: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names} if node.module == "nearline" else set()
    return names


def minds() -> list[Path]:
    named = [ROOT / room / f"{name}.py" for room, names in MINDS.items() for name in sorted(names)]
    return named + sources("controller/policy")


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_the_rooms_the_table_allows(room: str) -> None:
    for path in sources(room):
        names = imported_modules(path) - {"nearline.__version__"}
        rooms = {name.split(".")[1] for name in names if name.startswith("nearline.")}
        assert rooms <= MAY_IMPORT[room] | {room}, f"{path.relative_to(ROOT)} imports {sorted(rooms)}"


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_imported_only_through_its_words_and_minds(room: str) -> None:
    """A neighbour may name a package or its words; hands belong to their own room."""
    for path in sources(*[r for r in ROOMS if r != room]):
        for name in imported_modules(path):
            parts = name.split(".")
            if parts[:2] != ["nearline", room] or len(parts) < 3:
                continue
            is_mind = path.is_relative_to(ROOT / "simulator") and parts[2] in MINDS.get(room, set()) | {"policy"}
            is_word = parts[2] in WORDS | {"wire", "stderr", "secret_files", "log_files"}
            assert is_word or is_mind, f"{path.relative_to(ROOT)} reaches into {name}"


@pytest.mark.parametrize("path", minds(), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_mind_has_no_clock_no_io_and_no_chance(path: Path) -> None:
    roots = {name.split(".")[0] for name in imported_modules(path)}
    assert not roots & IMPURE, f"imports {sorted(roots & IMPURE)}"
    for node in ast.walk(tree(path)):
        assert not isinstance(node, (ast.AsyncFunctionDef, ast.Await)), f"line {node.lineno}: async"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"open", "print", "hash", "id", "input"}, f"line {node.lineno}: {node.func.id}()"
        if isinstance(node, (ast.For, ast.comprehension)):
            is_set = isinstance(node.iter, (ast.Set, ast.SetComp)) or (
                isinstance(node.iter, ast.Call) and getattr(node.iter.func, "id", "") in {"set", "frozenset"}
            )
            assert not is_set, "iterates a set: the order is not defined"


def test_files_and_functions_stay_small() -> None:
    too_large = []
    lines = []
    for path in sources(*ROOMS, "benchmarks", "examples", "tests"):
        count = path.read_text().count("\n")
        if path.is_relative_to(ROOT / "tests") is False:
            lines.append(count)
        if count > MAX_FILE_LINES:
            too_large.append(f"{path.relative_to(ROOT)}: {count} lines")
        for node in ast.walk(tree(path)):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            arguments = node.args
            count = len(arguments.args) + len(arguments.kwonlyargs) + len(arguments.posonlyargs)
            count -= bool(arguments.args) and arguments.args[0].arg in ("self", "cls")
            where = f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
            if length > MAX_FUNCTION_LINES:
                too_large.append(f"{where}: {length} lines")
            is_command = path == ROOT / "client" / "cli.py" or path.is_relative_to(ROOT / "client" / "commands")
            is_device_code = any(ast.unparse(decorator) == "triton.jit" for decorator in node.decorator_list)
            if count > MAX_PARAMETERS and not (is_command or is_device_code):
                too_large.append(f"{where}: {count} parameters")
    assert not too_large, "\n".join(too_large)
    assert sorted(lines)[len(lines) // 2] <= MAX_MEDIAN_LINES


def test_names_are_nouns_of_their_room() -> None:
    banned = {"utils", "helpers", "common", "misc", "util"}
    assert not [p for p in sources(*ROOMS) if p.stem in banned]


@pytest.mark.parametrize("room", sorted(set(ROOMS) - {"kernels", "loader"}))
def test_importing_a_room_loads_no_torch(room: str) -> None:
    code = f"import sys, nearline.{room}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("hand", ["controller.__main__", "node_agent.__main__", "client.cli", "checkpoint_store.store"])
def test_processes_without_tensors_load_no_torch(hand: str) -> None:
    code = f"import sys, nearline.{hand}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_only_tensor_rooms_name_torch() -> None:
    for path in sources(*sorted(set(ROOMS) - TORCH_ROOMS)):
        assert not {n for n in imported_modules(path) if n.split(".")[0] in ("torch", "transformers")}, path


def test_every_room_has_a_short_readme_and_a_link() -> None:
    for room in ROOMS:
        readme = ROOT / room / "README.md"
        assert readme.exists(), f"{room}/README.md is missing"
        assert len(readme.read_text().splitlines()) <= 60, f"{room}/README.md is over 60 lines"
        link = ROOT / "src" / "nearline" / room
        assert link.is_symlink()
        assert link.resolve() == ROOT / room


def test_no_installed_distribution_owns_our_import_name() -> None:
    owners = set(metadata.packages_distributions().get("nearline", [])) - {"nearline"}
    assert not owners


def test_every_source_file_says_what_it_knows() -> None:
    silent = [str(p.relative_to(ROOT)) for p in sources(*ROOMS) if not ast.get_docstring(tree(p))]
    assert not silent


@pytest.mark.slow
def test_the_wheel_holds_every_room(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for room in ROOMS:
        for path in sources(room):
            assert f"nearline/{path.relative_to(ROOT)}" in names
    assert "nearline/py.typed" in names
    assert [n for n in names if n.startswith("nearline/kernels/csrc/")]
