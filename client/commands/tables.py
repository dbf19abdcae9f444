"""Rows and objects as people read them: a table where it fits, else one record per row; nothing is ever cut."""

from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from nearline.client.commands.options import in_words

_ANY_WIDTH = 100_000
_INDENT = "  "
_GAPS = (2, 1)
"""Spaces between columns: what looks well, and what will do."""


class Listing:
    """Rows under headings. In a terminal too narrow for them each becomes lines of its own, in full, so that what one
    must copy can be copied; in a file or a pipe rows stay rows, whatever their width."""

    def __init__(self, *headings: str) -> None:
        self._headings = headings
        self._rows: list[tuple[str, ...]] = []

    def add(self, *cells: str) -> None:
        self._rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for gap in _GAPS:
            table = self._table(gap)
            width = Measurement.get(console, options.update(width=_ANY_WIDTH), table).maximum
            if width <= options.max_width or not console.is_terminal:
                yield from console.render(table, options.update(width=width))
                return
        yield Text("\n").join(self._records())

    def _table(self, gap: int) -> Table:
        table = Table(*self._headings, box=None, padding=(0, gap, 0, 0), pad_edge=False)
        for row in self._rows:
            table.add_row(*(Text(cell) for cell in row))
        return table

    def _records(self) -> Iterator[Text]:
        """One text per row, with a line per cell and an empty one at the end."""
        width = max(len(heading) for heading in self._headings)
        for row in self._rows:
            lines = [Text.assemble((f"{heading:>{width}}  ", "dim"), cell)
                     for heading, cell in zip(self._headings, row, strict=True)]  # fmt: skip
            yield Text("\n").join([*lines, Text()])


def described(thing: dict[str, Any]) -> list[Text]:
    """One object as lines of name and value; what it holds is indented below its name."""
    rows = list(_fields(thing, 0))
    width = max(len(name) for name, _ in rows)
    return [Text.assemble((f"{name:<{width}}  ", "dim"), value) if value else Text(name, "dim") for name, value in rows]


def _fields(thing: dict[str, Any], depth: int) -> Iterator[tuple[str, str]]:
    for key, value in thing.items():
        if isinstance(value, dict) and value:
            yield _INDENT * depth + key, ""
            yield from _fields(value, depth + 1)
        else:
            yield _INDENT * depth + key, in_words(key, value)
