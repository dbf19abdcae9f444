"""What command lines of different rooms share: options about callers, and how numbers and addresses are read."""

from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TypeVar

N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True)
class Option:
    """One command-line option. Without `is_repeatable` the last one given counts."""

    name: str
    metavar: str
    help: str
    is_repeatable: bool = True

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def within(kind: type[N], least: N, most: N) -> Callable[[str], N]:
    """A type for argparse: a number within bounds, which NaN never is."""

    def read(text: str) -> N:
        value: N | None
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            what = "a whole number" if kind is int else "a number"
            raise ArgumentTypeError(f"expected {what} from {least:g} to {most:g}, not {text[:60]!r}")
        return value

    return read


def url_complaint(text: str, where: str = "") -> str | None:
    """What is wrong with an address that was given (`where` names the places), with the cure. None: it is a URL."""
    if text.startswith(("http://", "https://")):
        return None
    cure = "only http:// and https:// will do" if "://" in text else f"put http:// in front: http://{text}"
    return f"{text!r}{where} is no URL; {cure}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there: a loopback address, or the name of one."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


API_KEY = Option("api_key", "NAME=KEY", "A tenant and its key; repeatable. Without any key everybody may call.")
CALLER_OPTIONS = (
    API_KEY,
    Option("api_key_file", "FILE", "A file with one NAME=KEY per line; repeatable."),
    Option(
        "admin_key_file",
        "FILE",
        "A file with the only key that may administer (default: every key may).",
        is_repeatable=False,
    ),
    Option("allow_host", "NAME", "A name to answer to without keys, as that of a proxy with a login; repeatable."),
    Option("tenant_weight", "NAME=W", "A tenant's share of busy models (1); repeatable."),
    Option("tenant_limit", "NAME=RPM:N:TPM", "Requests a minute, at once, tokens a minute; 0: any. Repeatable."),
    Option("tenant_slo", "NAME=CLASS", "Strictest SLO class of a tenant: interactive, batch-1m, batch-1h; repeatable."),
)
