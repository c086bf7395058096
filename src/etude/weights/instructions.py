"""The functions of `lanes` in the language of numba's compiler, which would not find these instructions by itself.

Importing this needs numba.
"""

# pyright: basic
# ruff: noqa: ANN401 - numba and llvmlite say of nothing what it is

import functools
import inspect
from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic, overload

from etude.weights.lanes import (
    LANES,
    add_up_lanes,
    at_most_lanes,
    bits_from,
    class_lanes,
    count_ones,
    differing_lanes,
    fetch_early,
    first_one,
    nth_one,
)


@functools.cache
def teach_lanes() -> None:
    """Let functions that numba compiles call those above, as instructions."""
    _teach_arrays()
    _teach_words()


def _teach_arrays() -> None:
    """Let them call those that read or write places of an array."""

    @intrinsic
    def classes(_typing: Any, values: Any, begin: Any, lower: Any, most: Any, raised: Any, bit: Any) -> Any:
        del begin, lower, most, raised, bit
        element, found = values.dtype, types.UniTuple(types.uint64, 4)
        return found(values, types.int64, element, element, element, types.uint8), _write_classes

    @intrinsic
    def add_up(_typing: Any, values: Any, begin: Any, first: Any) -> Any:
        del begin, first
        return types.uint16(values, types.int64, types.uint16), _write_add_up

    @intrinsic
    def at_most(_typing: Any, values: Any, begin: Any, most: Any) -> Any:
        del begin, most
        return types.uint64(values, types.int64, types.uint16), _write_at_most

    @intrinsic
    def differing(_typing: Any, old: Any, new: Any, begin: Any) -> Any:
        del begin
        return types.uint64(old, new, types.int64), _write_differing

    @intrinsic
    def fetch(_typing: Any, values: Any, begin: Any) -> Any:
        del begin
        return types.void(values, types.int64), _write_fetch

    @intrinsic
    def bits_of(_typing: Any, data: Any, begin: Any) -> Any:
        del begin
        return types.uint64(data, types.int64), _write_bits_from

    # Numba compares the names of parameters.
    overload(class_lanes)(
        lambda values, begin, lower, most, raised, bit: (
            lambda values, begin, lower, most, raised, bit: classes(values, begin, lower, most, raised, bit)  # pyright: ignore[reportCallIssue]
        )
    )
    overload(add_up_lanes)(lambda values, begin, first: lambda values, begin, first: add_up(values, begin, first))  # pyright: ignore[reportCallIssue]
    overload(at_most_lanes)(lambda values, begin, most: lambda values, begin, most: at_most(values, begin, most))  # pyright: ignore[reportCallIssue]
    overload(differing_lanes)(lambda old, new, begin: lambda old, new, begin: differing(old, new, begin))  # pyright: ignore[reportCallIssue]
    overload(fetch_early)(lambda values, begin: lambda values, begin: fetch(values, begin))  # pyright: ignore[reportCallIssue]
    overload(bits_from)(lambda data, begin: lambda data, begin: bits_of(data, begin))  # pyright: ignore[reportCallIssue]


def _teach_words() -> None:
    """Let them call those that ask about the bits of a word."""
    no_zero, one = ir.Constant(ir.IntType(1), 1), np.uint64(1)

    @intrinsic
    def ones(_typing: Any, bits: Any) -> Any:
        del bits
        return types.int64(types.uint64), lambda _context, builder, _signature, values: builder.ctpop(values[0])

    @intrinsic
    def lowest(_typing: Any, bits: Any) -> Any:
        del bits
        return types.int64(types.uint64), lambda _context, builder, _signature, values: builder.cttz(values[0], no_zero)

    @intrinsic
    def deposit(_typing: Any, bits: Any, mask: Any) -> Any:
        del bits, mask
        return types.uint64(types.uint64, types.uint64), _write_deposit

    overload(count_ones)(lambda bits: lambda bits: ones(bits))  # pyright: ignore[reportCallIssue]
    overload(first_one)(lambda bits: lambda bits: lowest(bits))  # pyright: ignore[reportCallIssue]

    if get_host_cpu_features().get("bmi2"):
        overload(nth_one)(
            lambda bits, ones_before: lambda bits, ones_before: lowest(deposit(one << np.uint64(ones_before), bits))  # pyright: ignore[reportCallIssue]
        )
    else:
        plain = inspect.unwrap(nth_one)
        overload(nth_one, strict=False)(lambda *_: plain)


def _write_bits_from(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    place = _place(context, builder, signature.args[0], *arguments, of=ir.IntType(64))
    loaded = builder.load(place)
    loaded.align = 1
    return builder.bitreverse(builder.bswap(loaded))


def _write_deposit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
    """Write the bits into the places that the mask has, the lowest first."""
    word = ir.IntType(64)
    called = get_or_insert_function(builder.module, ir.FunctionType(word, [word, word]), "llvm.x86.bmi.pdep.64")
    return builder.call(called, arguments)


def _write_classes(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    values, begin, lower, most, raised, bit = arguments
    found = _load(context, builder, signature.args[0], values, begin)
    lower, most, raised = (_filled(builder, found.type, number) for number in (lower, most, raised))
    found = builder.add(found, found)
    found = builder.sub(builder.select(builder.icmp_unsigned(">", found, lower), found, lower), lower)
    found = builder.add(builder.select(builder.icmp_unsigned("<", found, most), found, most), raised)
    width = signature.args[0].dtype.bitwidth // 8
    every = builder.bitcast(found, ir.VectorType(ir.IntType(8), LANES * width))
    highest = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [lane * width + width - 1 for lane in range(LANES)])
    high = builder.shuffle_vector(every, ir.Constant(every.type, ir.Undefined), highest)
    words = []
    for place in range(4):
        chosen = builder.and_(high, _filled(builder, high.type, builder.shl(bit, ir.Constant(bit.type, place))))
        words.append(_compared(builder, "!=", chosen, ir.Constant(high.type, None)))
    return context.make_tuple(builder, signature.return_type, words)


def _write_add_up(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    values, begin, first = arguments
    kind = ir.VectorType(ir.IntType(32), LANES)
    found = _load(context, builder, signature.args[0], values, begin)
    nothing = ir.Constant(found.type, None)
    step = 1
    while step < LANES:
        moved = ir.Constant(kind, [LANES - step + lane for lane in range(LANES)])
        found = builder.add(found, builder.shuffle_vector(nothing, found, moved))
        step *= 2
    last = ir.Constant(ir.IntType(32), LANES - 1)
    total = builder.add(builder.extract_element(found, last), first)
    before = builder.shuffle_vector(nothing, found, ir.Constant(kind, [LANES - 1 + lane for lane in range(LANES)]))
    _store(context, builder, signature.args[0], values, begin, builder.add(before, _filled(builder, found.type, first)))
    return total


def _write_at_most(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    values, begin, most = arguments
    found = _load(context, builder, signature.args[0], values, begin)
    return _compared(builder, "<=", found, _filled(builder, found.type, most))


def _write_differing(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    begin = arguments[2]
    old, new = (_load(context, builder, signature.args[side], arguments[side], begin) for side in range(2))
    return _compared(builder, "!=", old, new)


def _write_fetch(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """Write what brings elements to the second-level cache, also where there are none."""
    place = _place(context, builder, signature.args[0], *arguments, of=ir.IntType(8))
    number = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [place.type, number, number, number])
    called = get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    read, near, data = (ir.Constant(number, value) for value in (0, 2, 1))
    builder.call(called, [place, read, near, data])
    return context.get_dummy_value()


def _compared(builder: Any, relation: str, left: Any, right: Any) -> Any:
    """Return a bit for each lane: whether the relation holds there."""
    return builder.bitcast(builder.icmp_unsigned(relation, left, right), ir.IntType(LANES))


def _filled(builder: Any, kind: Any, number: Any) -> Any:
    """Return a number in every lane."""
    nothing, first = ir.Constant(kind, ir.Undefined), ir.Constant(ir.IntType(32), 0)
    everywhere = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(builder.insert_element(nothing, number, first), nothing, everywhere)


def _load(context: Any, builder: Any, kind: Any, array: Any, begin: Any) -> Any:
    """Return `LANES` elements of an array, wherever in memory they begin."""
    lanes = ir.VectorType(context.get_data_type(kind.dtype), LANES)
    loaded = builder.load(_place(context, builder, kind, array, begin, of=lanes))
    loaded.align = 1
    return loaded


def _store(context: Any, builder: Any, kind: Any, array: Any, begin: Any, lanes: Any) -> None:
    builder.store(lanes, _place(context, builder, kind, array, begin, of=lanes.type)).align = 1


def _place(context: Any, builder: Any, kind: Any, array: Any, begin: Any, *, of: Any) -> Any:
    """Return a pointer to what is to be taken for one of these from element `begin` of an array on."""
    first = builder.gep(context.make_array(kind)(context, builder, array).data, [begin])
    return builder.bitcast(first, of.as_pointer())
