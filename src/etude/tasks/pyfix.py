"""The pyfix task family: small Python modules with one injected fault, as Harbor task directories.

Everything derives from a seed. Training and held-out tasks share no module text, right or broken.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypedDict

from etude.tasks.pyfix_library import BLUEPRINTS, CONSTANTS, LISTS, MODULES, NUMBERS, Blueprint, Fault

FUNCTIONS_PER_MODULE = 1
NUM_CASES = 8

_RUNNER = Path(__file__).with_name("pyfix_runner.py")


@dataclass(frozen=True, slots=True)
class Function:
    """A blueprint with its slots filled."""

    blueprint: Blueprint
    slots: dict[str, str]

    @property
    def lines(self) -> list[str]:
        """Source of the right function."""
        parameters = ", ".join(self.slots[slot] for slot in self.blueprint.parameters)
        head = [f"def {self.blueprint.name}({parameters}):", f'    """{self.blueprint.summary.format(**self.slots)}"""']
        return head + [self._body_line(line) for line in self.blueprint.body]

    def _body_line(self, line: str) -> str:
        return "    " + line.format(**self.slots)

    def broken_line(self, fault: Fault) -> tuple[int, str]:
        """Index into `lines` and the text that the fault puts there."""
        return 2 + fault.line, self._body_line(fault.broken)


@dataclass(frozen=True, slots=True)
class Problem:
    """A module with one fault, and the line that repairs it."""

    module: str
    """Name of the file, without `.py`."""
    right: tuple[str, ...]
    """Lines of the right module."""
    line: int
    """Index of the faulty line."""
    broken_line: str
    kind: str
    functions: tuple[Function, ...]

    @property
    def broken(self) -> tuple[str, ...]:
        """Lines of the faulty module."""
        return (*self.right[: self.line], self.broken_line, *self.right[self.line + 1 :])

    @property
    def repair(self) -> str:
        """Shell command that repairs the module in place."""
        return replace_line(self.module, self.line, self.right[self.line])


def replace_line(module: str, index: int, text: str) -> str:
    """Shell command that replaces line `index` (from 0) of `<module>.py`."""
    return f"sed -i '{index + 1}c\\{text}' {module}.py"


def numbered(lines: tuple[str, ...]) -> str:
    """The text that `cat -n` prints for these lines."""
    return "".join(f"{number:6d}\t{line}\n" for number, line in enumerate(lines, start=1))


def problems(seed: str, *, exclude: frozenset[str] = frozenset()) -> Iterator[Problem]:
    """Yield problems without end, none twice, and none whose right or broken text is in `exclude`."""
    random = Random(f"pyfix-{seed}")
    seen = set(exclude)
    while True:
        problem = _draw(random)
        texts = {"\n".join(problem.broken), "\n".join(problem.right)}
        if texts & seen or not _fault_shows(problem):
            continue
        seen |= texts
        yield problem


def texts_of(chosen: list[Problem]) -> frozenset[str]:
    """Texts that no other split may contain."""
    return frozenset(text for problem in chosen for text in ("\n".join(problem.broken), "\n".join(problem.right)))


def _draw(random: Random) -> Problem:
    functions = tuple(_fill(blueprint, random) for blueprint in random.sample(BLUEPRINTS, FUNCTIONS_PER_MODULE))
    lines: list[str] = []
    starts: list[int] = []
    for function in functions:
        if lines:
            lines.append("")
        starts.append(len(lines))
        lines += function.lines
    faulty = random.randrange(len(functions))
    fault = random.choice(functions[faulty].blueprint.faults)
    index, broken_line = functions[faulty].broken_line(fault)
    return Problem(
        module=random.choice(MODULES),
        right=tuple(lines),
        line=starts[faulty] + index,
        broken_line=broken_line,
        kind=fault.kind,
        functions=functions,
    )


def _fill(blueprint: Blueprint, random: Random) -> Function:
    first, second = random.sample(NUMBERS, 2)
    constant, other = random.sample(CONSTANTS, 2)
    slots = {"a": first, "b": second, "xs": random.choice(LISTS), "k": str(constant), "m": str(other)}
    return Function(blueprint, slots)


class Case(TypedDict):
    """One call and the result that the right module gives."""

    function: str
    arguments: list[object]
    expected: object


def _arguments(function: Function, random: Random) -> list[object]:
    constant = int(function.slots["k"])
    return [
        [random.choice((constant, random.randint(1, 12))) for _ in range(random.randint(3, 6))]
        if slot == "xs"
        else random.randint(1, 9)
        for slot in function.blueprint.parameters
    ]


def _run(lines: tuple[str, ...], name: str, arguments: list[object]) -> object:
    """Result of one function of a module that this file wrote; only such text is ever executed here."""
    namespace: dict[str, object] = {}
    exec("\n".join(lines), namespace)
    function = namespace[name]
    assert callable(function)
    return function(*arguments)


def cases(problem: Problem) -> list[Case]:
    """Calls of every function, as the tests make them."""
    random = Random(f"cases-{digest(problem)}")
    found: list[Case] = []
    for function in problem.functions:
        for _ in range(NUM_CASES):
            arguments = _arguments(function, random)
            expected = _run(problem.right, function.blueprint.name, arguments)
            found.append(Case(function=function.blueprint.name, arguments=arguments, expected=expected))
    return found


def _fault_shows(problem: Problem) -> bool:
    """Whether a test tells the faulty module from the right one."""
    return any(_run(problem.broken, case["function"], case["arguments"]) != case["expected"] for case in cases(problem))


def digest(problem: Problem) -> str:
    """Eight hexadecimal digits that name the problem."""
    return hashlib.sha256("\n".join((problem.module, *problem.broken)).encode()).hexdigest()[:8]


def instruction(problem: Problem) -> str:
    """What the agent is asked: the text of instruction.md."""
    return f"One line of {problem.module}.py does not do what its docstring says. Repair it.\n"


def write_task(problem: Problem, directory: Path) -> Path:
    """Write the Harbor task directory of a problem and return its path."""
    task = directory / f"pyfix-{problem.kind.replace('_', '-')}-{digest(problem)}"
    for folder in ("environment", "tests", "solution"):
        (task / folder).mkdir(parents=True, exist_ok=True)
    module = f"{problem.module}.py"
    (task / "instruction.md").write_text(instruction(problem))
    (task / "task.toml").write_text(
        'schema_version = "1.4"\n'
        f'[task]\nname = "pyfix/{task.name}"\nversion = "1"\n'
        f'[metadata]\nkind = "{problem.kind}"\n'
        '[environment]\ncpus = 1\nmemory_mb = 512\nnetwork_mode = "no-network"\nworkdir = "/app"\n'
        "[agent]\ntimeout_sec = 30\n"
        '[verifier]\nenvironment_mode = "separate"\ntimeout_sec = 20\n'
    )
    (task / "environment" / module).write_text("\n".join(problem.broken) + "\n")
    (task / "environment" / "Dockerfile").write_text(
        f"FROM python:3.11-slim\nWORKDIR /app\nCOPY {module} /app/{module}\n"
    )
    (task / "tests" / "cases.json").write_text(json.dumps({"module": problem.module, "cases": cases(problem)}))
    (task / "tests" / "run.py").write_bytes(_RUNNER.read_bytes())
    script = task / "tests" / "test.sh"
    script.write_text("#!/bin/sh\nexec python3 -I -S /tests/run.py\n")
    solution = task / "solution" / "solve.sh"
    solution.write_text(f"#!/bin/sh\n{problem.repair}\n")
    script.chmod(0o755)
    solution.chmod(0o755)
    return task
