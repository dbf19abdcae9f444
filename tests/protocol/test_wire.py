"""The codec is strict: what it accepts it gives back equal, and it accepts nothing else."""

import dataclasses
import typing
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nearline.protocol import MessageCodec, WireError, encode, frames, from_plain, to_plain

LINKS = (frames.ToAgent, frames.ToController, frames.ToEngine, frames.FromEngine)
MESSAGES = sorted({cls for link in LINKS for cls in typing.get_args(link)}, key=lambda cls: cls.__name__)
CODEC = MessageCodec(MESSAGES)


@given(data=st.data())
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_every_frame_survives_the_wire(data: st.DataObject) -> None:
    cls = data.draw(st.sampled_from(MESSAGES))
    message = data.draw(instances(cls))
    decoded = CODEC.decode(encode(message))
    assert type(decoded) is cls
    assert decoded == message


def instances(annotation: Any) -> st.SearchStrategy[Any]:
    """Values of a wire type, kept small: integers as msgpack carries them, no NaN (it never equals itself)."""
    if isinstance(annotation, typing.NewType):
        return instances(annotation.__supertype__)
    if dataclasses.is_dataclass(annotation):
        hints = typing.get_type_hints(annotation)
        return st.builds(annotation, **{f.name: instances(hints[f.name]) for f in dataclasses.fields(annotation)})
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple and args[1:] == (...,):
        return st.lists(instances(args[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*[instances(a) for a in args])
    if args:
        return st.one_of(*[instances(a) for a in args])
    plain = {int: st.integers(-(2**63), 2**63 - 1), float: st.floats(allow_nan=False), str: st.text(max_size=6)}
    return plain[annotation] if annotation in plain else st.from_type(annotation)


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
def test_every_frame_is_frozen_and_documented_by_its_module(cls: type) -> None:
    assert dataclasses.is_dataclass(cls)
    assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]


def wire(name: str, body: Any) -> bytes:
    packed: bytes = msgpack.packb([name, body])
    return packed


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "not a message"),
        (b"\xc1", "not a message"),
        (wire("Nonsense", {}), "unknown message"),
        (wire("Abort", {"instance_id": "i"}), r"missing \['request_id'\]"),
        (wire("Abort", {"instance_id": "i", "request_id": "r", "extra": 1}), "unknown field 'extra'"),
        (wire("Abort", {"instance_id": 7, "request_id": "r"}), "Abort.instance_id: expected str, got int"),
        (wire("Welcome", {"report_interval_s": True, "fencing_token": 1}), "expected a number"),
        (wire("Abort", [1, 2]), "expected a map"),
    ],
)
def test_a_wrong_message_is_refused_with_the_place_of_the_fault(data: bytes, complaint: str) -> None:
    with pytest.raises(WireError, match=complaint):
        CODEC.decode(data)


@dataclasses.dataclass(frozen=True)
class Nested:
    pairs: tuple[tuple[int, float], ...] = ()
    named: dict[str, int] = dataclasses.field(default_factory=dict)
    maybe: int | None = None


def test_nested_tuples_maps_and_options_keep_their_types() -> None:
    value = Nested(((1, 0.5), (2, 1.0)), {"a": 1}, None)
    assert from_plain(Nested, to_plain(value)) == value
    assert isinstance(from_plain(Nested, to_plain(value)).pairs[0], tuple)


def test_a_bool_is_not_an_int_and_a_mixed_array_is_refused() -> None:
    with pytest.raises(WireError):
        from_plain(Nested, {"maybe": True})
    with pytest.raises(WireError):
        from_plain(Nested, {"pairs": [[1, 0.5, 3]]})
