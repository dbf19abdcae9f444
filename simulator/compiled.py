"""`python -m nearline.simulator.compiled [DIR]`: the minds as machine code, in a copy of the packages under DIR.

mypyc, which comes with mypy, compiles whatever the simulator loads but for packages, entry points and hands. The
sources stay as they are and need no compiler; with `PYTHONPATH=DIR` a command runs the copy.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import nearline
import nearline.simulator.__main__  # so that all it needs is loaded
from nearline.simulator.constructors import written_out

DIRECTORY = Path("build/compiled")
_HANDS = {"config", "futex", "lease", "pipes", "plot", "side_process", "ssd", "weights_file"}
"""Modules that read files, call the system or draw: nothing to gain. Of configs, only the controller's is hot."""


def modules() -> list[str]:
    """Paths of the modules to compile, from the parent of the package."""
    names = [name.split(".") for name in sys.modules if name.startswith("nearline.")]
    hot = [parts for parts in names if parts[-1] not in {*_HANDS, "__main__", "compiled", "constructors"}]
    hot.append(["nearline", "controller", "config"])
    root = Path(nearline.__file__).parent.parent
    return sorted(path for parts in hot if (root / (path := f"{'/'.join(parts)}.py")).is_file())


def build(directory: Path) -> Path:
    """Copy the packages and compile the copy's minds. Returns the directory. Raises ImportError without mypy."""
    from mypyc.build import mypycify
    from setuptools import Distribution

    chosen, source = modules(), Path(nearline.__file__).parent
    directory.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(directory / "nearline", ignore_errors=True)
    shutil.copytree(source, directory / "nearline", ignore=shutil.ignore_patterns("__pycache__"))
    for path in chosen:
        copy = directory / path
        copy.write_text(written_out(copy.read_text()))
    before = Path.cwd()
    os.chdir(directory)
    try:
        options = ["--config-file=", "--strict", "--ignore-missing-imports", *chosen]
        extensions = mypycify(options, opt_level="3", debug_level="0", multi_file=True)
        command = Distribution({"name": "nearline-compiled", "ext_modules": extensions}).get_command_obj("build_ext")
        command.inplace = True
        command.ensure_finalized()
        command.run()
    finally:
        os.chdir(before)
    return directory


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m nearline.simulator.compiled", description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?", default=DIRECTORY)
    directory = build(parser.parse_args(arguments).directory)
    sys.stdout.write(f"run it with PYTHONPATH={directory}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
