"""The longread task family: trails of notes, many times longer than a model's context, as Harbor task directories.

Each note names the next one, at the end of its text, and some have a code; asked for are the last code and the place at
which the last note says that the trail ends. Only a note says where the trail goes on, and which code was the last one
shows at the end, many notes later: an agent whose context holds only some of them has to carry code and name by itself.
Whoever stops early guesses a place out of twenty. Everything derives from a seed.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from etude.tasks.longread_words import ADJECTIVES, CODES, NAMES, NOUNS, VERBS

START = "start"
NUM_NOTES = 14
SENTENCES = 15
"""Of a note, besides the two that count."""

CODED_NOTES = 4
LAST_CODE = 9
"""Notes after the place of this number have no code: the last one has to be carried on for some time."""

_INSTRUCTION = (
    "Follow the notes from start on. Each names the next, some have a code. "
    "Write the last code and the end into answer.txt.\n"
)


@dataclass(frozen=True, slots=True)
class Problem:
    """A trail of notes."""

    names: tuple[str, ...]
    """Names of the notes in order."""
    codes: tuple[str, ...]
    """The code of each, empty for those without."""
    end: str
    """The place at which the trail ends."""
    notes: dict[str, str]
    """Text of each by its name."""

    @property
    def code(self) -> str:
        """The last code."""
        return [code for code in self.codes if code][-1]

    @property
    def trail(self) -> str:
        """All that counts of the notes, on one line."""
        return " ".join((*(f"{name} {code}" for name, code in zip(self.names, self.codes, strict=True)), self.end))

    def after(self, name: str) -> tuple[str, str]:
        """Return what the note of this name says: the next name or the end, and its code or nothing."""
        place = self.names.index(name)
        return (*self.names, self.end)[place + 1], self.codes[place]


def write_answer(code: str, end: str) -> str:
    """Return the shell command that answers with this code and end."""
    return f"echo code {code} end {end} > answer.txt"


def problems(seed: str, *, exclude: frozenset[str] = frozenset()) -> Iterator[Problem]:
    """Yield problems without end, none twice, and none whose trail is in `exclude`."""
    random = Random(f"longread-{seed}")
    seen = set(exclude)
    while True:
        *onward, end = random.sample(NAMES, NUM_NOTES)
        names = (START, *onward)
        coded = {0, *random.sample(range(1, LAST_CODE), CODED_NOTES - 1)}
        codes = tuple(random.choice(CODES) if place in coded else "" for place in range(NUM_NOTES))
        said = zip(names, (*onward, end), codes, strict=True)
        notes = {name: note(to, code, random, SENTENCES, is_last=to == end) for name, to, code in said}
        problem = Problem(names, codes, end, notes)
        if problem.trail not in seen:
            seen.add(problem.trail)
            yield problem


def texts_of(chosen: list[Problem]) -> frozenset[str]:
    """Trails that no other split may contain."""
    return frozenset(problem.trail for problem in chosen)


def note(following: str, code: str, random: Random, num_sentences: int, *, is_last: bool) -> str:
    """Return the text of a note: idle talk, then its code, if it has one, and the following name or the end."""
    talk = [_sentence(random) for _ in range(num_sentences)]
    coded = f"The code is {code}." if code else "It has no code."
    onward = f"The trail ends at {following}." if is_last else f"The next note is {following}."
    return " ".join([*talk, coded, onward]) + "\n"


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
    (task / "tests" / "expected.txt").write_text(f"{problem.code} {problem.end}\n")
    script = task / "tests" / "test.sh"
    # The answer is hostile: of any size, or a link to what is expected. Saying what is what is no mistake.
    script.write_text(
        "#!/bin/sh\n"
        "reward=0\n"
        "if [ -f /app/answer.txt ] && [ ! -L /app/answer.txt ]; then\n"
        "    answer=$(head -c 4096 /app/answer.txt | sed 's/code //; s/end //')\n"
        '    if [ "$answer" = "$(cat /tests/expected.txt)" ]; then reward=1; fi\n'
        "fi\n"
        "echo $reward > /logs/verifier/reward.txt\n"
    )
    solution = task / "solution" / "solve.sh"
    solution.write_text(f"#!/bin/sh\n{write_answer(problem.code, problem.end)}\n")
    script.chmod(0o755)
    solution.chmod(0o755)
    return task
