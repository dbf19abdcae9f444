"""Who may call and how much: options that `nearline up` and the controller both take, written once for both."""

from dataclasses import dataclass


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
    Option("tenant_weight", "NAME=W", "A tenant's share of busy models (1); repeatable."),
    Option("tenant_limit", "NAME=RPM:N:TPM", "Requests a minute, at once, tokens a minute; 0: any. Repeatable."),
    Option("tenant_slo", "NAME=CLASS", "Strictest SLO class of a tenant: interactive, batch-1m, batch-1h; repeatable."),
)
