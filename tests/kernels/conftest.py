"""Two threads for every test, and the compiled library in each build that this CPU can run."""

import os
from collections.abc import Iterator

import pytest
import torch

from nearline import kernels
from nearline.kernels import build, native


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    kernels.set_num_threads(min(2, os.cpu_count() or 1))
    yield
    kernels.set_num_threads(before)


@pytest.fixture(scope="session")
def compiled() -> None:
    """Skip where there is no compiler: the reference serves there."""
    if native.library() is None:
        pytest.skip("no C compiler on this machine")


_SUPPORTED = [name for name, flags in build.TIERS.items() if build.cpu_flags().issuperset(flags)]
_QUICK = {_SUPPORTED[0], "avx2"}


@pytest.fixture(params=[n if n in _QUICK else pytest.param(n, marks=pytest.mark.slow) for n in _SUPPORTED])
def every_tier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, compiled: None) -> str:
    """Run the test on each build that this CPU can execute, not only on its best."""
    tier: str = request.param
    lib = native.load(build.library(tier))
    lib.nl_set_num_threads(2)
    monkeypatch.setattr(native, "library", lambda: lib)
    return tier
