"""What people copy from the screen is there in full, however narrow it is."""

import io

import pytest
from rich.console import Console
from rich.text import Text

from nearline.client.commands.models import _models_table
from nearline.client.commands.tables import Listing, described
from tests.client.test_cli import ROW, nearline

JOB = "job_0123456789abcdef0123456789abcdef"
MODEL = "an-organisation/a-model-with-quite-a-long-name"


def printed(thing: object, width: int, is_terminal: bool = True) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=is_terminal, no_color=True, soft_wrap=True)
    console.print(thing)
    return Text.from_ansi(console.file.getvalue()).plain  # type: ignore[attr-defined]


def jobs() -> Listing:
    listing = Listing("JOB", "MODEL", "STATUS")
    listing.add(JOB, MODEL, "running [1/2]")
    listing.add("job_2", "m", "queued")
    return listing


@pytest.mark.parametrize("width", [10, 40, 80, 96])
def test_rows_that_do_not_fit_become_records_with_every_character(width: int) -> None:
    lines = printed(jobs(), width).splitlines()
    assert [line.split(maxsplit=1) for line in lines if line.strip()] == [
        ["JOB", JOB], ["MODEL", MODEL], ["STATUS", "running [1/2]"],
        ["JOB", "job_2"], ["MODEL", "m"], ["STATUS", "queued"],
    ]  # fmt: skip


@pytest.mark.parametrize("width", [97, 100, 200])
def test_rows_that_fit_are_a_table(width: int) -> None:
    heading, first, second = (line.split() for line in printed(jobs(), width).splitlines())
    assert (heading, first[:2], second) == (["JOB", "MODEL", "STATUS"], [JOB, MODEL], ["job_2", "m", "queued"])


def test_rows_stay_rows_in_a_pipe_whatever_their_width() -> None:
    wide = Listing("ID", "REASON")
    wide.add("x" * 300, "y" * 300)
    assert printed(wide, 400, is_terminal=False).splitlines()[1].split() == ["x" * 300, "y" * 300]


def test_what_an_object_holds_stands_below_its_name() -> None:
    thing = {"id": "m", "slo": {"slo_class": "batch-1m", "ttft_s": None}, "num_bytes": 2_000_000, "adapters": []}
    assert [line.plain.rstrip() for line in described(thing)] == [
        "id           m",
        "slo",
        "  slo_class  batch-1m",
        "  ttft_s     –",
        "num_bytes    2.0 MB",
        "adapters     –",
    ]


def test_a_quantised_model_is_listed_with_the_format_of_its_weights() -> None:
    rows = [{**ROW, "quantization": "int8"}, {**ROW, "id": "plain", "quantization": None}]
    _, small, plain = printed(_models_table(rows), 120).splitlines()
    assert ("int8" in small, "bfloat16" in small, "bfloat16" in plain) == (True, False, True)


def test_help_keeps_what_stands_in_brackets() -> None:
    assert "hub:org/name[@revision]" in "".join(nearline("model", "add", "--help").stdout.split())
