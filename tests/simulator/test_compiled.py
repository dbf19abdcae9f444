"""The compiled copy: constructors written out do what generated ones do, and the copy decides as the sources do."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nearline.simulator.__main__ import main as simulate
from nearline.simulator.compiled import build, modules
from nearline.simulator.constructors import written_out

SOURCE = '''
from dataclasses import dataclass, field
from itertools import count

numbers = count()

@dataclass(frozen=True, slots=True)
class Point:
    """Two numbers."""

    x: int
    y: int = 2

    def sum(self) -> int:
        return self.x + self.y

@dataclass(slots=True, kw_only=True)
class Bag:
    point: Point = field(default_factory=lambda: Point(1))
    things: list[int] = field(default_factory=list)
    total: int = field(init=False)

    def __post_init__(self) -> None:
        self.total = len(self.things) + self.point.y

@dataclass(order=True)
class Ordered:
    x: int

class Derived(Point):
    pass
'''
FLEET = "--models 12 --nodes 3 --slots 2 --model-gb 8 --dram-gb 40 --keep-alive 20 --tenants 3 --batch-part 0.3"
RUNS = {
    "paced": f"{FLEET} --rate 4 --seconds 200",
    "step by step": f"{FLEET} --rate 2 --seconds 60 --detail engine",
    "with losses": f"{FLEET} --rate 3 --seconds 300 --lose-node-every 40 --cancel 0.2 --max-replicas 2 --seed 7",
    "planner": f"{FLEET} --rate 3 --seconds 100 --policy planner",
}


def classes(source: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "sample"}
    exec(compile(source, "sample", "exec"), namespace)
    return namespace


def test_constructors_written_out_take_what_generated_ones_take() -> None:
    written = written_out(SOURCE)
    new, old = classes(written), classes(SOURCE)
    assert written.count("def __init__") == 2
    assert "frozen" not in written
    for each in (new, old):
        point, bag = each["Point"](1), each["Bag"](things=[4, 5])
        assert (point.x, point.y, point.sum(), repr(point)) == (1, 2, 3, "Point(x=1, y=2)")
        assert hash(point) == hash(each["Point"](y=2, x=1))
        assert (bag.total, bag.point, bag.things) == (4, each["Point"](1), [4, 5])
        assert each["Bag"]().things is not each["Bag"]().things
        assert dataclasses.replace(point, y=5) == each["Point"](1, 5)
        with pytest.raises(TypeError):
            each["Bag"]([4])
        with pytest.raises(TypeError):
            each["Point"]()


def test_classes_that_ask_for_more_stay_as_they_are() -> None:
    text = SOURCE[SOURCE.index("@dataclass(order=True)") :]
    assert written_out(text) == text.rstrip("\n") + "\n"


def test_minds_are_compiled_and_hands_are_not() -> None:
    found = modules()
    assert {"nearline/controller/core.py", "nearline/controller/config.py", "nearline/simulator/loop.py"} <= {*found}
    assert not {"nearline/checkpoint_store/config.py", "nearline/simulator/__main__.py"} & {*found}
    assert not [path for path in found if path.endswith("__init__.py")]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_compiled_copy_decides_what_the_sources_decide(tmp_path: Path) -> None:
    build(tmp_path)
    for name, line in RUNS.items():
        for file, environment in (("sources", {}), ("copy", {"PYTHONPATH": str(tmp_path)})):
            arguments = [*line.split(), "--json", str(tmp_path / file)]
            if not environment:
                assert simulate(arguments) == 0
                continue
            command = [sys.executable, "-m", "nearline.simulator", *arguments]
            subprocess.run(command, check=True, env={**os.environ, **environment}, cwd=tmp_path)
        found, expected = (json.loads((tmp_path / file).read_text()) for file in ("copy", "sources"))
        assert found == expected, name
    where = "import nearline.controller.core as core; print(core.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", where],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.stdout.strip().endswith(".so")
    assert done.stdout.startswith(str(tmp_path))
