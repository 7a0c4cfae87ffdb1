"""Protobuf messages read without their schema: no public class of jax has those in a trace."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

# The values of a message's fields by their number: int, or bytes if a field is no varint.
Message = defaultdict[int, list[Any]]


def fields(message: bytes, number: int, *inner: int) -> Iterator[Any]:
    """The values of a field of a message, or of a field of its messages."""
    for each, value in _items(message):
        if each == number:
            yield from fields(value, *inner) if inner else [value]


def message_of(data: bytes) -> Message:
    values: Message = defaultdict(list)
    for number, value in _items(data):
        values[number].append(value)
    return values


def last(message: Message, number: int, *, default: Any) -> Any:
    """What counts of a field that is not repeated."""
    return message[number][-1] if number in message else default


def numbers_of(values: list[Any]) -> list[int]:
    """Of a repeated field, packed or not."""
    return [
        each
        for value in values
        for each in (packed_numbers(value) if isinstance(value, bytes) else [value])
    ]


def packed_numbers(packed: bytes) -> Iterator[int]:
    at = 0
    while at < len(packed):
        value, at = _varint(packed, at)
        yield value


def _items(message: bytes) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        value: Any
        if key & 7 == 0:
            value, at = _varint(message, at)
        else:
            size, at = _varint(message, at) if key & 7 == 2 else ({1: 8, 5: 4}[key & 7], at)
            value, at = message[at : at + size], at + size
        yield key >> 3, value


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
