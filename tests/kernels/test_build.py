"""Compiling: once, by whoever comes first, for this CPU, and without it everything still works."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from nearline import kernels
from nearline.kernels import build, native, reference
from tests.kernels.paged import paged_problem


@pytest.mark.parametrize(
    ("flags", "tier"),
    [
        ("fma avx2 f16c avx512f avx512bw avx512vl avx512dq avx512_bf16 avx512_vnni amx_bf16", "avx512_bf16"),
        ("fma avx2 f16c avx512f avx512bw avx512vl avx512dq", "avx512"),
        ("fma avx2 f16c avx512f", "avx2"),
        ("sse2 avx", "portable"),
        ("", "portable"),
    ],
)
def test_a_cpu_gets_the_best_build_it_can_execute(flags: str, tier: str) -> None:
    assert build.best_tier(frozenset(flags.split())) == tier


@pytest.mark.usefixtures("compiled")
def test_racing_builds_leave_one_library_and_no_rubbish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "one.c").write_text("int nl_answer(void) { return 42; }\n")
    monkeypatch.setattr(build, "SOURCES", sources)
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: build.library(directory=tmp_path / "cache"), range(4)))
    assert list((tmp_path / "cache").iterdir()) == list(paths)
    (sources / "one.c").write_text("int nl_answer(void) { return 43; }\n")
    assert build.library(directory=tmp_path / "cache") not in paths


@pytest.mark.usefixtures("compiled")
def test_a_compiler_error_is_reported_in_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad.c").write_text("int broken(")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    with pytest.raises(build.BuildFailed, match=r"bad\.c"):
        build.library(directory=tmp_path / "cache")


def test_without_a_compiler_the_reference_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    native.library.cache_clear()
    try:
        p = paged_problem([(2, 20)])
        p.meta.block_tables_BN.clamp_(min=0)
        result = kernels.paged_attention(p.q_THD, p.k_cache, p.v_cache, p.meta, 0.3)
        expected = reference.paged_attention(p.q_THD, p.k_cache, p.v_cache, p.meta, 0.3)
        assert torch.equal(result, expected)
        assert torch.equal(kernels.activate(torch.ones(1, 4), "silu"), reference.activate(torch.ones(1, 4), "silu"))
        assert not kernels.FusedDecoder(
            kernels.LayerShape(1, 1, 8, 8, 8, 1e-5, 1.0), num_layers=1, dtype=torch.float32
        ).accepts(1)
        assert sum("no C compiler" in record.getMessage() for record in caplog.records) == 1
    finally:
        native.library.cache_clear()


def test_building_ahead_says_where_the_library_is() -> None:
    done = subprocess.run([sys.executable, "-m", "nearline.kernels"], capture_output=True, text=True, check=True)
    assert "nearline-kernels-" in done.stdout or "not compiled" in done.stderr


def test_kernels_import_without_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; import nearline.kernels"
    subprocess.run([sys.executable, "-c", code], check=True)
