"""What a chat template may not ask for: one call that makes a text or a number of gigabytes, which nothing can end."""

import re
from string import Formatter
from typing import Any

MAX_REPEATED_CHARS = 1_000_000
MAX_BITS = 100_000
_PADDING = ("center", "ljust", "rjust", "zfill", "expandtabs")
_SPEC = re.compile(r"%(?:\([^()]*\))?[-+ #0]*(\*|\d*)(?:\.(\*|\d*))?")


def is_large_operation(operator: str, left: Any, right: Any) -> bool:
    """Whether `left % right`, `left * right` or `left ** right` is larger than a prompt needs."""
    sizes = [len(side) for side in (left, right) if isinstance(side, (str, bytes, list, tuple))]
    counts = [side for side in (left, right) if isinstance(side, int)]
    if operator == "%":
        text = left.decode("latin-1") if isinstance(left, bytes) else left
        return isinstance(text, str) and _is_wide([width for spec in _SPEC.findall(text) for width in spec])
    if len(counts) == 2:
        bits = [side.bit_length() for side in counts]
        return (bits[0] * counts[1] if operator == "**" else sum(bits)) > MAX_BITS
    return bool(sizes and counts) and sizes[0] * counts[0] > MAX_REPEATED_CHARS


def is_large_call(method: Any, arguments: list[Any]) -> bool:
    """Whether a method of a text pads it, its tabs or its fields to more than a prompt needs."""
    method = getattr(method, "__wrapped__", method)  # the sandbox wraps str.format
    text, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    if isinstance(text, str) and name in ("format", "format_map"):
        specs = [spec for _, _, spec, _ in Formatter().parse(text) if spec]
        return any("{" in spec for spec in specs) or _is_wide([n for spec in specs for n in re.findall(r"\d+", spec)])
    if not isinstance(text, (str, bytes)) or name not in _PADDING:
        return False
    times = len(text) if name == "expandtabs" else 1
    return any(isinstance(width, int) and width * times > MAX_REPEATED_CHARS for width in arguments)


def _is_wide(widths: list[str]) -> bool:
    """Digits, or a star for a width that is given elsewhere."""
    return "*" in widths or sum(int(width[:9]) for width in widths if width) > MAX_REPEATED_CHARS
