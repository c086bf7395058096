"""The longread task family: trails of notes, many times longer than a model's context, as Harbor task directories.

Each note names the next one and has a number, somewhere in its text; asked for is the last digit of the sum of all
numbers. Nothing but a note says where the trail goes on, and none can be left out: an agent whose context holds only
some of them has to carry the sum and the place by itself. Who guesses is right in one of ten. Everything derives from a
seed.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from etude.tasks.longread_words import ADJECTIVES, NAMES, NOUNS, VERBS

START, END = "start", "end"
NUM_NOTES = 14
SENTENCES = 15
"""Of a note, besides the two that count."""

MOST = 5
"""Largest number of a note."""

_INSTRUCTION = (
    "Follow the notes from start to end. Each one names the next and has a number. "
    "Write the last digit of the sum into answer.txt.\n"
)


@dataclass(frozen=True, slots=True)
class Problem:
    """A trail of notes."""

    names: tuple[str, ...]
    """Names of the notes in order."""
    numbers: tuple[int, ...]
    """The number of each."""
    notes: dict[str, str]
    """Text of each by its name."""

    @property
    def answer(self) -> int:
        """The last digit of the sum."""
        return sum(self.numbers) % 10

    @property
    def trail(self) -> str:
        """All that counts of the notes, on one line."""
        return " ".join(f"{name} {number}" for name, number in zip(self.names, self.numbers, strict=True))

    def after(self, name: str) -> tuple[str, int]:
        """Return what the note of this name says: the next name, and its number."""
        place = self.names.index(name)
        return (*self.names, END)[place + 1], self.numbers[place]


def write_answer(answer: int) -> str:
    """Return the shell command that gives this answer."""
    return f"echo {answer} > answer.txt"


def problems(seed: str, *, exclude: frozenset[str] = frozenset()) -> Iterator[Problem]:
    """Yield problems without end, none twice, and none whose trail is in `exclude`."""
    random = Random(f"longread-{seed}")
    seen = set(exclude)
    while True:
        names = (START, *random.sample(NAMES, NUM_NOTES - 1))
        numbers = tuple(random.randint(1, MOST) for _ in names)
        said = zip(names, (*names[1:], END), numbers, strict=True)
        notes = {name: note(following, number, random, SENTENCES) for name, following, number in said}
        problem = Problem(names, numbers, notes)
        if problem.trail not in seen:
            seen.add(problem.trail)
            yield problem


def texts_of(chosen: list[Problem]) -> frozenset[str]:
    """Trails that no other split may contain."""
    return frozenset(problem.trail for problem in chosen)


def note(following: str, number: int, random: Random, num_sentences: int) -> str:
    """Return the text of a note: idle talk, and somewhere in it the name of the following one and the number."""
    sentences = [_sentence(random) for _ in range(num_sentences)]
    for counts in (f"The next note is {following}.", f"The number is {number}."):
        sentences.insert(random.randint(0, len(sentences)), counts)
    return " ".join(sentences) + "\n"


def _sentence(random: Random) -> str:
    first, second = random.sample(NOUNS, 2)
    return f"The {random.choice(ADJECTIVES)} {first} {random.choice(VERBS)} a {random.choice(ADJECTIVES)} {second}."


def digest(problem: Problem) -> str:
    """Eight hexadecimal digits that name the problem."""
    return hashlib.sha256("".join(problem.notes.values()).encode()).hexdigest()[:8]


def instruction(_problem: Problem) -> str:
    """What the agent is asked: the text of instruction.md."""
    return _INSTRUCTION


def write_task(problem: Problem, directory: Path) -> Path:
    """Write the Harbor task directory of a problem and return its path."""
    task = directory / f"longread-{digest(problem)}"
    for folder in ("environment/notes", "tests", "solution"):
        (task / folder).mkdir(parents=True, exist_ok=True)
    (task / "instruction.md").write_text(instruction(problem))
    (task / "task.toml").write_text(
        'schema_version = "1.4"\n'
        f'[task]\nname = "longread/{task.name}"\nversion = "1"\n'
        '[environment]\ncpus = 1\nmemory_mb = 512\nnetwork_mode = "no-network"\nworkdir = "/app"\n'
        "[agent]\ntimeout_sec = 120\n"
        '[verifier]\nenvironment_mode = "separate"\ntimeout_sec = 20\n'
    )
    for name, text in problem.notes.items():
        (task / "environment" / "notes" / name).write_text(text)
    (task / "environment" / "Dockerfile").write_text("FROM python:3.11-slim\nWORKDIR /app\nCOPY notes/ /app/\n")
    (task / "tests" / "expected.txt").write_text(f"{problem.answer}\n")
    script = task / "tests" / "test.sh"
    # The answer is the agent's: it may be of any size, or a link to what is expected.
    script.write_text(
        "#!/bin/sh\n"
        "reward=0\n"
        "if [ -f /app/answer.txt ] && [ ! -L /app/answer.txt ] &&\n"
        '    [ "$(head -c 4096 /app/answer.txt)" = "$(cat /tests/expected.txt)" ]; then reward=1; fi\n'
        "echo $reward > /logs/verifier/reward.txt\n"
    )
    solution = task / "solution" / "solve.sh"
    solution.write_text(f"#!/bin/sh\n{write_answer(problem.answer)}\n")
    script.chmod(0o755)
    solution.chmod(0o755)
    return task
