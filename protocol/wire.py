"""Strict dataclass ⇄ msgpack codec. An unknown field, a missing field or a wrong type is an error, never a guess.

A message is the two-element array [class name, {field: value}]. Nested dataclasses need no name: their type is
declared by the field; what a field holds by default is not sent. Decoders are compiled once per class from its
annotations.
"""

import types
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack

T = TypeVar("T")
Decoder = Callable[[Any], Any]


class WireError(ValueError):
    """The bytes are not a message of this protocol version."""


def to_plain(value: Any) -> Any:
    """Turn dataclasses, enums and tuples into dicts, strings and lists (JSON's and msgpack's types)."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (list, tuple)):
        if not value or isinstance(value[0], (int, float, str)):
            return list(value)
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    return value


def from_plain(cls: type[T], plain: Any) -> T:
    """Build `cls` from what `to_plain` made. Raises WireError with the path of the first wrong field."""
    result: T = _decoder(cls)(plain)
    return result


def encode(message: Any) -> bytes:
    """Encode one message (a dataclass instance) with its class name."""
    packed: bytes = msgpack.packb([type(message).__name__, _sparse(message)])
    return packed


_SCALARS = frozenset({int, str, float, bool, bytes, type(None)})
_DEFAULTS: dict[type, tuple[tuple[str, Any], ...]] = {}


def _sparse(value: Any) -> Any:
    """As `to_plain`, but without the fields that hold their default."""
    cls = type(value)
    if cls in _SCALARS:
        return value
    if cls is tuple or cls is list:
        return value if not value or isinstance(value[0], (int, float, str)) else [_sparse(item) for item in value]
    if not is_dataclass(cls):
        return {key: _sparse(item) for key, item in value.items()} if cls is dict else to_plain(value)
    defaults = _DEFAULTS.get(cls)
    if defaults is None:
        defaults = _DEFAULTS[cls] = tuple((f.name, f.default) for f in fields(value))
    # Identity, not equality: True is not sent as the 1 that it equals, nor -0.0 as 0.0. Floats of compiled classes have
    # no identity.
    return {
        name: _sparse(item)
        for name, default in defaults
        if (item := getattr(value, name)) is not default and (type(item) is not float or repr(item) != repr(default))
    }


class MessageCodec:
    """Decodes the messages of one link. `messages` is a union of dataclasses or an iterable of them."""

    def __init__(self, messages: Any) -> None:
        classes: Iterable[type] = get_args(messages) or messages
        self._classes = {cls.__name__: cls for cls in classes}

    def decode(self, data: bytes) -> Any:
        """Decode one message. Raises WireError for anything this link does not speak."""
        try:
            name, body = msgpack.unpackb(data, strict_map_key=False)
        except Exception as error:
            raise WireError(f"not a message: {error}") from error
        cls = self._classes.get(name)
        if cls is None:
            raise WireError(f"unknown message {name!r}; is the other process of another version?")
        return from_plain(cls, body)


_COMPILED: dict[Any, Decoder] = {}


def _decoder(annotation: Any) -> Decoder:
    try:
        cached = _COMPILED.get(annotation)
    except TypeError:
        cached = None
    if cached is None:
        cached = _COMPILED[annotation] = _compile(annotation)
    return cached


def _compile(annotation: Any) -> Decoder:
    if isinstance(annotation, NewType):
        return _decoder(annotation.__supertype__)
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return lambda value: value
    if annotation is float:
        return _float
    if annotation in (int, str, bool, bytes, type(None)):
        return _exact(annotation)
    if origin is tuple:
        return _tuple(args)
    if origin is dict:
        return _dict(args)
    if origin in (Union, types.UnionType):
        return _optional(args)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return _enum(annotation)
    if is_dataclass(annotation) and isinstance(annotation, type):
        return _dataclass(annotation)
    raise TypeError(f"{annotation!r} cannot cross a process")


def _float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise WireError(f"expected a number, got {type(value).__name__}")
    return float(value)


def _exact(cls: type) -> Decoder:
    def decode(value: Any) -> Any:
        if type(value) is not cls:
            raise WireError(f"expected {cls.__name__}, got {type(value).__name__}")
        return value

    return decode


def _tuple(args: tuple[Any, ...]) -> Decoder:
    if len(args) == 2 and args[1] is Ellipsis:
        item = args[0].__supertype__ if isinstance(args[0], NewType) else args[0]
        one = _decoder(item)

        def decode_many(value: Any) -> tuple[Any, ...]:
            if not isinstance(value, (list, tuple)):
                raise WireError(f"expected an array, got {type(value).__name__}")
            if item in (int, str):
                if any(type(v) is not item for v in value):
                    raise WireError(f"expected an array of {item.__name__}")
                return tuple(value)
            return tuple([one(v) for v in value])

        return decode_many
    each = [_decoder(a) for a in args]

    def decode_fixed(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)) or len(value) != len(each):
            raise WireError(f"expected an array of {len(each)}")
        return tuple([d(v) for d, v in zip(each, value, strict=True)])

    return decode_fixed


def _dict(args: tuple[Any, ...]) -> Decoder:
    key, item = _decoder(args[0]), _decoder(args[1])

    def decode(value: Any) -> dict[Any, Any]:
        if not isinstance(value, dict):
            raise WireError(f"expected a map, got {type(value).__name__}")
        return {key(k): item(v) for k, v in value.items()}

    return decode


def _optional(args: tuple[Any, ...]) -> Decoder:
    rest = [a for a in args if a is not type(None)]
    if len(rest) != 1 or len(rest) == len(args):
        raise TypeError(f"only `X | None` unions may be fields, not {args!r}")
    one = _decoder(rest[0])
    return lambda value: None if value is None else one(value)


def _enum(cls: type[Enum]) -> Decoder:
    members = {m.value: m for m in cls}

    def decode(value: Any) -> Enum:
        try:
            return members[value]
        except (KeyError, TypeError):
            raise WireError(f"{value!r} is not a {cls.__name__}") from None

    return decode


def _dataclass(cls: type) -> Decoder:
    hints = get_type_hints(cls)
    decoders = {f.name: _decoder(hints[f.name]) for f in fields(cls)}
    required = {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}

    def decode(value: Any) -> Any:
        if not isinstance(value, dict):
            raise WireError(f"{cls.__name__}: expected a map, got {type(value).__name__}")
        if not required <= value.keys():
            raise WireError(f"{cls.__name__}: missing {sorted(required - value.keys())}")
        arguments = {}
        for name, plain in value.items():
            field_decoder = decoders.get(name)
            if field_decoder is None:
                raise WireError(f"{cls.__name__}: unknown field {name!r}")
            try:
                arguments[name] = field_decoder(plain)
            except WireError as error:
                raise WireError(f"{cls.__name__}.{name}: {error}") from None
        return cls(**arguments)

    return decode
