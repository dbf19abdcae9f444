"""What the SDK gives back."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Output:
    """The answer to one invocation. `timings` is the waterfall in seconds; `usage` counts tokens."""

    id: str
    model: str
    text: str
    finish_reason: str | None
    usage: dict[str, int] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.text


def output_of(body: dict[str, Any]) -> Output:
    """Read the body of a finished invocation (or a job's `output`)."""
    answer = body.get("output") or {}
    return Output(
        id=str(body.get("id", "")),
        model=str(body.get("model", "")),
        text=answer.get("text", ""),
        finish_reason=answer.get("finish_reason"),
        usage=body.get("usage") or {},
        timings=body.get("timings") or {},
    )


def invocation(input_text: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """The body of an invocation: plain text is one user message; `prompt=` or `messages=` are sent as they are."""
    if input_text is None:
        return options
    return {"messages": [{"role": "user", "content": input_text}], **options}
