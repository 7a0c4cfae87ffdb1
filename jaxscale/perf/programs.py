"""The compiled programs that a trace holds: what each launches, in order, and its messages."""

import re
from collections import defaultdict
from collections.abc import Container, Iterator
from dataclasses import dataclass
from functools import cached_property

from jaxscale.perf.protobuf import fields, last, message_of, numbers_of, packed_numbers


@dataclass(frozen=True)
class Instruction:
    """One that launches. kind: "gemm" or "attention" if it calls a library, else "other".

    key: the same for fusions that share their code, and else the name.
    """

    name: str
    op_name: str
    kind: str
    key: str


@dataclass(frozen=True)
class Program:
    """op_names: of every instruction. message_bytes: of collectives, by instruction.

    schedule: what a run launches on the stream that computes, in order, with the turns of loops one
    after the other.
    """

    name: str
    op_names: dict[str, str]
    message_bytes: dict[str, int]
    schedule: tuple[Instruction, ...]

    @cached_property
    def keys(self) -> dict[str, str]:
        """The key by an instruction's name, and by that of the launch which XLA names after it."""
        by_launch = {
            re.sub(r"\W", "_", each.name): each.key
            for each in self.schedule
            if each.kind == "other"
        }
        return by_launch | {each.name: each.key for each in self.schedule}

    @cached_property
    def shared_op_names(self) -> dict[str, str]:
        """By key: the op name of its instructions, if all have the same but for numbers.

        Those of layers do.
        """
        different = defaultdict(set)
        for each in self.schedule:
            different[each.key].add(re.sub(r"\d+", "0", each.op_name))
        return {each.key: each.op_name for each in self.schedule if len(different[each.key]) == 1}


def programs(space: bytes, numbers: Container[int]) -> dict[int, Program]:
    """Of the programs in a trace those of these numbers, which launches have as program_id.

    1 s for 20,000 instructions. The numbers of fields are those of xplane.proto, hlo.proto and
    xla_data.proto.
    """
    found = {}
    for plane in fields(space, 1):
        if next(fields(plane, 2), b"") == b"/host:metadata":
            for module in fields(plane, 4, 2, 5, 6, 1):
                if (number := next(fields(module, 5), 0)) in numbers:
                    found[number] = _program(module)
    return found


_ELEMENT_BYTES = {3: 2, 4: 4, 5: 8, 7: 2, 8: 4, 9: 8, 10: 2, 11: 4, 12: 8, 15: 8, 16: 2, 18: 16}
_COLLECTIVE = re.compile(r"(ragged-)?all-|reduce-scatter|collective-")
_LAUNCHES_NOTHING = frozenset(
    "parameter get-tuple-element tuple bitcast constant after-all add-dependency opt-barrier "
    "domain partition-id replica-id copy-start copy-done async-update async-done send send-done "
    "recv recv-done infeed outfeed".split()
)


@dataclass(frozen=True)
class _Node:
    """An instruction as it is in the trace."""

    name: str
    opcode: str
    op_name: str
    shared_name: str  # of those with the same computation
    target: str  # of a custom call
    settings: bytes
    shape: bytes
    operands: tuple[int, ...]
    called: tuple[int, ...]


# By their number, in the order of execution.
_Computation = dict[int, _Node]


def _program(module: bytes) -> Program:
    field = message_of(module)
    orders = dict(map(_order, fields(last(field, 7, default=b""), 1)))
    computations = dict(_computation(each, orders) for each in field[3])
    nodes = [
        (node, computation)
        for computation in computations.values()
        for node in computation.values()
    ]
    schedule = tuple(_launching(computations, last(field, 6, default=0)))
    op_names = {node.name: node.op_name for node, _ in nodes}
    return Program(
        last(field, 1, default=b"").decode(),
        op_names=op_names | {each.name: each.op_name for each in schedule},
        message_bytes={
            node.name: _larger_side(node, computation)
            for node, computation in nodes
            if _COLLECTIVE.match(node.opcode) or node.opcode == "async-start"
        },
        schedule=schedule,
    )


def _order(entry: bytes) -> tuple[int, list[int]]:
    field = message_of(entry)
    return last(field, 1, default=0), numbers_of(message_of(last(field, 2, default=b""))[1])


def _computation(data: bytes, orders: dict[int, list[int]]) -> tuple[int, _Computation]:
    field = message_of(data)
    number, nodes = last(field, 5, default=0), dict(map(_node, field[2]))
    return number, {each: nodes[each] for each in orders.get(number, nodes)}


def _node(data: bytes) -> tuple[int, _Node]:
    field = message_of(data)
    metadata = message_of(last(field, 7, default=b""))
    op_name = last(metadata, 2, default=b"").decode()
    return last(field, 35, default=0), _Node(
        name=last(field, 1, default=b"").decode(),
        opcode=last(field, 2, default=b"").decode(),
        op_name=op_name if "/" in op_name else "",
        shared_name=last(metadata, 12, default=b"").decode(),
        target=last(field, 28, default=b"").decode(),
        settings=last(field, 43, default=b""),
        shape=last(field, 3, default=b""),
        operands=tuple(numbers_of(field[36])),
        called=tuple(numbers_of(field[38])),
    )


def _launching(computations: dict[int, _Computation], number: int) -> Iterator[Instruction]:
    """What a computation launches, in order; of a loop without a known number of turns, one."""
    for node in computations.get(number, {}).values():
        if node.opcode == "while":
            turns = re.search(rb'"known_trip_count":\{"n":"(\d+)"', node.settings)
            body = list(_launching(computations, node.called[0]))
            yield from body * int(turns[1] if turns else 1)
        elif node.opcode in ("call", "conditional", "async-start"):
            for each in node.called:
                yield from _launching(computations, each)
        elif node.opcode not in _LAUNCHES_NOTHING and not _COLLECTIVE.match(node.opcode):
            inside = [
                each for number in node.called for each in computations.get(number, {}).values()
            ]
            yield _instruction(node, inside)


def _instruction(node: _Node, inside: list[_Node]) -> Instruction:
    targets = {node.target, *(each.target for each in inside)}
    op_name = node.op_name or next((each.op_name for each in inside[::-1] if each.op_name), "")
    kind = "other"
    if any("cublas" in target for target in targets):
        kind = "gemm"
    elif any("cudnn$fmha" in target for target in targets):
        kind = "attention"
    shared = node.shared_name if kind == "other" else ""
    return Instruction(node.name, op_name, kind, key=shared or node.name)


def _larger_side(node: _Node, computation: _Computation) -> int:
    """The bytes of the gathered array, of what is to be scattered, or of what is reduced."""
    operands = sum(
        _shape_bytes(computation[number].shape) for number in node.operands if number in computation
    )
    # An instruction that starts a collective returns (operands, results).
    parts = fields(node.shape, 4) if node.opcode.endswith("-start") else [node.shape]
    return max([operands, *map(_shape_bytes, parts)])


def _shape_bytes(shape: bytes) -> int:
    if parts := list(fields(shape, 4)):
        return sum(map(_shape_bytes, parts))
    size = _ELEMENT_BYTES.get(next(fields(shape, 2), 0), 1)
    for dim in packed_numbers(next(fields(shape, 3), b"")):
        size *= dim
    return size
