"""The functions that the pyfix family is made of: each docstring says exactly what the body does.

Text with slots: `{a}`, `{b}` are numbers and `{xs}` is a list, under names that differ from module to module; `{k}` is
a constant that the docstring states and `{m}` one that it does not. Every fault replaces one line of the body, so a
faulty module is always one line away from a right one.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to break a function: line `line` of its body becomes `broken`."""

    kind: str
    line: int
    broken: str


@dataclass(frozen=True, slots=True)
class Blueprint:
    """One function of the family."""

    name: str
    parameters: tuple[str, ...]
    """Slots in order: `a` and `b` take integers, `xs` a list of integers."""
    summary: str
    body: tuple[str, ...]
    faults: tuple[Fault, ...]


NUMBERS = (  # noqa: SIM905 words are read more easily without quotes
    "width height depth price cost total speed time mass force rate count size limit score level offset weight volume "
    "margin budget income debt left right start stop low high near far red blue day hour row column page line stock "
    "order unit load power heat angle radius"
).split()
"""Names that `{a}` and `{b}` may have."""

LISTS = (  # noqa: SIM905
    "items values samples readings grades guests parts points steps names wins lanes gains cards tests bids hits ideas"
).split()
"""Names that `{xs}` may have."""

MODULES = (  # noqa: SIM905
    "shop clock grid bank farm fleet garden kitchen library market mill orbit port school station studio"
).split()
"""Names of modules."""

CONSTANTS = tuple(range(2, 10))
"""Values of `{k}` and `{m}`."""


def _binary(name: str, summary: str, sign: str, wrong: str, *, ordered: bool) -> Blueprint:
    """Two numbers and one operator; `ordered` when their order matters."""
    faults = [
        Fault("wrong_operator", 0, f"return {{a}} {wrong} {{b}}"),
        Fault("wrong_name", 0, f"return {{a}} {sign} {{a}}"),
        Fault("missing_return", 0, f"{{a}} {sign} {{b}}"),
    ]
    if ordered:
        faults.append(Fault("swapped_arguments", 0, f"return {{b}} {sign} {{a}}"))
    return Blueprint(name, ("a", "b"), summary, (f"return {{a}} {sign} {{b}}",), tuple(faults))


def _single(name: str, slots: str, summary: str, line: str, **faults: str) -> Blueprint:
    """One line; the faults by kind."""
    listed = tuple(Fault(kind, 0, broken) for kind, broken in faults.items())
    return Blueprint(name, tuple(slots.split()), summary, (line,), listed)


def _two_steps(name: str, summary: str, first: str, second: str, faults: tuple[Fault, ...]) -> Blueprint:
    """A result that is computed, then changed and returned."""
    return Blueprint(name, ("a", "b"), summary, (first, second), faults)


def _loop(name: str, summary: str, test: str, step: str, faults: tuple[Fault, ...]) -> Blueprint:
    """A total gathered over a list."""
    body = ("total = 0", "for x in {xs}:", f"    if x {test}:", f"        total += {step}", "return total")
    return Blueprint(name, ("xs",), summary, body, faults)


# fmt: off - a table: one function per entry
BLUEPRINTS: tuple[Blueprint, ...] = (
    _binary("add", "Return {a} plus {b}.", "+", "-", ordered=False),
    _binary("subtract", "Return {a} minus {b}.", "-", "+", ordered=True),
    _binary("multiply", "Return {a} times {b}.", "*", "+", ordered=False),
    _binary("divide", "Return {a} divided by {b}.", "//", "%", ordered=True),
    _binary("remainder", "Return {a} modulo {b}.", "%", "//", ordered=True),
    _binary("above", "Return whether {a} is more than {b}.", ">", "<", ordered=True),
    _binary("below", "Return whether {a} is less than {b}.", "<", ">", ordered=True),
    _binary("same", "Return whether {a} equals {b}.", "==", "!=", ordered=False),
    _binary("differs", "Return whether {a} differs from {b}.", "!=", "==", ordered=False),
    _single(
        "largest",
        "a b",
        "Return the larger of {a} and {b}.",
        "return max({a}, {b})",
        wrong_function="return min({a}, {b})",
        wrong_name="return max({a}, {a})",
        missing_return="max({a}, {b})",
    ),
    _single(
        "smallest",
        "a b",
        "Return the smaller of {a} and {b}.",
        "return min({a}, {b})",
        wrong_function="return max({a}, {b})",
        wrong_name="return min({b}, {b})",
        missing_return="min({a}, {b})",
    ),
    _single(
        "raised",
        "a b",
        "Return {a} to the power {b}.",
        "return pow({a}, {b})",
        swapped_arguments="return pow({b}, {a})",
        wrong_name="return pow({a}, {a})",
        missing_return="pow({a}, {b})",
    ),
    _single(
        "shift",
        "a",
        "Return {a} plus {k}.",
        "return {a} + {k}",
        wrong_constant="return {a} + {m}",
        wrong_operator="return {a} - {k}",
        missing_return="{a} + {k}",
    ),
    _single(
        "lower",
        "a",
        "Return {a} minus {k}.",
        "return {a} - {k}",
        wrong_constant="return {a} - {m}",
        wrong_operator="return {a} + {k}",
        swapped_arguments="return {k} - {a}",
    ),
    _single(
        "scale",
        "a",
        "Return {a} times {k}.",
        "return {a} * {k}",
        wrong_constant="return {a} * {m}",
        wrong_operator="return {a} + {k}",
        missing_return="{a} * {k}",
    ),
    _single(
        "first",
        "xs",
        "Return the first of {xs}.",
        "return {xs}[0]",
        off_by_one="return {xs}[1]",
        missing_return="{xs}[0]",
    ),
    _single(
        "last",
        "xs",
        "Return the last of {xs}.",
        "return {xs}[-1]",
        off_by_one="return {xs}[-2]",
        missing_return="{xs}[-1]",
    ),
    _single(
        "rest",
        "xs",
        "Return {xs} without the first.",
        "return {xs}[1:]",
        off_by_one="return {xs}[2:]",
        missing_return="{xs}[1:]",
    ),
    _single(
        "total",
        "xs",
        "Return the sum of {xs}.",
        "return sum({xs})",
        wrong_function="return len({xs})",
        missing_return="sum({xs})",
    ),
    _single(
        "number",
        "xs",
        "Return the number of {xs}.",
        "return len({xs})",
        wrong_function="return sum({xs})",
        off_by_one="return len({xs}) - 1",
    ),
    _single(
        "upto",
        "a",
        "Return the numbers from 1 to {a}.",
        "return list(range(1, {a} + 1))",
        off_by_one="return list(range(1, {a}))",
        wrong_constant="return list(range({m}, {a} + 1))",
    ),
    _two_steps(
        "plan",
        "Return {a} times {b}, plus {k}.",
        "result = {a} * {b}",
        "return result + {k}",
        (
            Fault("wrong_operator", 0, "result = {a} + {b}"),
            Fault("wrong_name", 0, "result = {a} * {a}"),
            Fault("wrong_constant", 1, "return result + {m}"),
            Fault("missing_return", 1, "result + {k}"),
        ),
    ),
    _two_steps(
        "adjust",
        "Return {a} plus {b}, minus {k}.",
        "result = {a} + {b}",
        "return result - {k}",
        (
            Fault("wrong_operator", 1, "return result + {k}"),
            Fault("wrong_name", 0, "result = {b} + {b}"),
            Fault("wrong_constant", 1, "return result - {m}"),
            Fault("missing_return", 1, "result - {k}"),
        ),
    ),
    _loop(
        "gather",
        "Return the sum of {xs} above {k}.",
        "> {k}",
        "x",
        (
            Fault("off_by_one", 2, "    if x >= {k}:"),
            Fault("wrong_operator", 2, "    if x < {k}:"),
            Fault("wrong_constant", 0, "total = 1"),
            Fault("wrong_name", 4, "return x"),
        ),
    ),
    _loop(
        "tally",
        "Return how many of {xs} are below {k}.",
        "< {k}",
        "1",
        (
            Fault("off_by_one", 2, "    if x <= {k}:"),
            Fault("wrong_operator", 2, "    if x > {k}:"),
            Fault("wrong_constant", 3, "        total += {m}"),
            Fault("missing_return", 4, "total"),
        ),
    ),
)
# fmt: on
