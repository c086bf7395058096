# pyright: basic
"""Plays a harness as it is shipped: in a real sandbox, on a small git repository, against a model with a script.

    async with stage(HarnessSection(command=..., files=...), tmp_path) as played:
        session = await played.play(script(tool_call("shell", {"command": "ls"}), "done"))

The model is a `ScriptedPolicy` behind the real gateway and the ChatML renderer: what it answers is decided by what it
reads, so that a script can follow sub-agents, repeats and compactions.
"""

import asyncio
import sysconfig
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from etude.config import HarnessSection
from etude.environments.local import LocalBackend
from etude.gateway.doubles import Prompt, ScriptedPolicy, byte_tokenizer
from etude.gateway.renderers.chatml import ChatMLRenderer
from etude.gateway.service import Gateway
from etude.interfaces import ExecResult, Grade, SessionRecord, SessionSpec
from etude.rewards.grader import HarborGrader
from etude.rollout.harness import HARNESS_MOUNT, harness_directory
from etude.rollout.player import HarnessPlayer
from etude.rollout.record import RolloutRecord
from etude.tasks.harbor import load_task
from etude.types import SamplingParams, Task, Trajectory

ROOT = Path(__file__).parents[2]
INSTALLED = ROOT / ".harnesses"
"""Where scripts/install-harness puts packages."""
TOKENIZER = byte_tokenizer()

INSTRUCTION = "The tests of this repository fail. Repair the code, not the tests.\n"
FAULT = 'return "-".join(title.lower().split(" "))'
REPAIR = 'return "-".join(title.lower().split())'
REPAIRED = "textkit/slugs.py"
REPOSITORY = {
    "README.md": "# textkit\n\nRun the tests with `python3 -m unittest`.\n",
    "textkit/__init__.py": "",
    REPAIRED: f'def slug(title):\n    """Return the words of a title, joined by single dashes."""\n    {FAULT}\n',
    "textkit/words.py": 'def count(text):\n    """Return how many words a text has."""\n    return len(text.split())\n',
    "test_textkit.py": (
        "import unittest\n\nfrom textkit.slugs import slug\nfrom textkit.words import count\n\n\n"
        "class TextKit(unittest.TestCase):\n"
        '    def test_slug(self):\n        self.assertEqual(slug("Two  Words"), "two-words")\n\n'
        '    def test_count(self):\n        self.assertEqual(count("a b  c"), 3)\n'
    ),
}
REPAIR_COMMAND = """sed -i 's/split(" ")/split()/' textkit/slugs.py"""
TEST_COMMAND = "python3 -m unittest 2>&1 | tail -n 4"

_TEST_SCRIPT = """#!/bin/sh
cp /tests/test_textkit.py /app/ && cd /app || exit 1
if python3 -m unittest; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
_TASK_FILE = """schema_version = "1.4"
[task]
name = "kit/textkit"
[environment]
cpus = 2
memory_mb = {memory_mb}
storage_mb = 256
network_mode = "no-network"
[agent]
timeout_sec = {timeout_s}
[verifier]
environment_mode = "separate"
"""
_IN_REPOSITORY = (
    "git init --quiet --initial-branch=main . && git add --all && "
    "git -c user.name=kit -c user.email=kit@example.org commit --quiet --message=Import && "
    'exec "$@"'
)
"""A sandbox starts from files alone, since a repository's history may hold the solution: it is begun there."""
_PACKAGES = "/opt/packages"
_MADE_BY_TOOLS = {".git", "__pycache__"}


def harness_of(name: str) -> HarnessSection:
    """Return the harness of recipes/harnesses/NAME.toml, as it was installed.

    A program of our own that was not installed runs with the packages of this interpreter instead.
    """
    section = tomllib.loads((ROOT / f"recipes/harnesses/{name}.toml").read_text())["harness"]
    if not (INSTALLED / name).is_dir():
        return HarnessSection(**section | {"files": str(ROOT / "harnesses" / name), "env": {"PYTHONPATH": _PACKAGES}})
    return HarnessSection(**section | {"files": str(INSTALLED / name)})


def missing(name: str) -> str:
    """Return why a harness cannot be played; empty when it can."""
    if (INSTALLED / name).is_dir() or (ROOT / "harnesses" / name / "agent.py").is_file():
        return ""
    return f"{name} is not installed: scripts/install-harness {name}"


Answer = str | Callable[[Prompt], str]


class Once:
    """In a script: an error the first time that the answer is asked for, then the answer."""

    def __init__(self, error: Exception, answer: "Answer") -> None:
        self.error: Exception | None = error
        self.answer = answer

    def __call__(self, prompt: Prompt) -> str:
        error, self.error = self.error, None
        if error is not None:
            raise error
        return self.answer if isinstance(self.answer, str) else self.answer(prompt)


def script(*answers: Answer) -> Callable[[Prompt], str]:
    """Return a policy that gives its n-th answer to every prompt with n earlier answers, and then the last again."""

    def answer(prompt: Prompt) -> str:
        chosen = answers[min(prompt.num_answers, len(answers) - 1)]
        return chosen if isinstance(chosen, str) else chosen(prompt)

    return answer


@dataclass(kw_only=True)
class Session:
    """What one attempt of a harness left."""

    trajectory: Trajectory
    record: SessionRecord
    document: RolloutRecord
    change: dict[str, bytes | None] | None
    """What the harness did to the repository, history and caches aside; None when it was not graded."""
    output: ExecResult | None
    """What the harness printed, and its exit code."""
    prompts: list[Prompt]
    """What the model read."""
    num_requests: int
    """Calls of the model that the harness sent, those that were refused or sent again included."""
    num_cut: int
    """Connections that were cut off."""

    @property
    def said(self) -> str:
        """What the harness printed, for messages of assertions."""
        return "" if self.output is None else (self.output.stdout + self.output.stderr).decode("utf-8", "replace")

    @property
    def edges(self) -> list[str]:
        """How each call hangs in the session's tree."""
        return [node.edge.value for node in self.trajectory.nodes]

    @property
    def prefix_breaks(self) -> int:
        """Calls that were read anew for no reason that the recipe declares."""
        return round(self.record.metrics["gateway/prefix_break_rate"] * len(self.trajectory.nodes))


@dataclass(kw_only=True)
class Wire:
    """A `SessionHost`: a gateway behind a wire that is cut when the answers to some requests come back."""

    gateway: Gateway
    cut: Collection[int] = ()
    """Numbers of calls, from 0."""
    close_before: int | None = None
    """Number of the call that finds its session closed."""
    num_cut: int = 0
    records: list[SessionRecord] = field(default_factory=list)
    num_requests: int = 0
    _session_id: str = ""
    _server: asyncio.Server | None = None
    _connections: set[asyncio.Task] = field(default_factory=set)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    @property
    def port(self) -> int:
        assert self._server
        return self._server.sockets[0].getsockname()[1]

    async def open(self, spec: SessionSpec) -> str:
        self._session_id = spec.session_id
        return await self.gateway.open(spec)

    async def close(self, session_id: str) -> SessionRecord:
        with suppress(ValueError):
            self.records.append(await self.gateway.close(session_id))
        return self.records[-1]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._connections.add(task)
        try:
            with suppress(OSError, asyncio.CancelledError):
                await self._forward(reader, writer)
        finally:
            self._connections.discard(task)
            writer.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, downstream = await asyncio.open_connection("127.0.0.1", self.gateway.port)
        doomed = False

        async def requests() -> None:
            nonlocal doomed
            while chunk := await reader.read(1 << 16):
                if chunk.startswith(b"POST ") and b"/count_tokens" not in chunk.partition(b"\r\n")[0]:
                    doomed = self.num_requests in self.cut
                    if self.num_requests == self.close_before:
                        await self.close(self._session_id)
                    self.num_requests += 1
                downstream.write(chunk)
                await downstream.drain()
            downstream.write_eof()

        async def answers() -> None:
            while chunk := await upstream.read(1 << 16):
                if doomed:
                    self.num_cut += 1
                    writer.transport.abort()
                    return
                writer.write(chunk)
                await writer.drain()

        asking = asyncio.create_task(requests())
        try:
            with suppress(OSError):
                await answers()
        finally:
            asking.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await asking
            downstream.close()


class _Watched:
    """A backend and a grader that keep what passes through them."""

    def __init__(self, backend: LocalBackend) -> None:
        self.backend = backend
        self.grader = HarborGrader(backend)
        self.output: ExecResult | None = None
        self.change: dict[str, bytes | None] | None = None

    @property
    def capabilities(self):
        return self.backend.capabilities

    @asynccontextmanager
    async def create(self, task: Task, *, model_port: int | None = None):
        async with self.backend.create(task, model_port=model_port) as environment:
            execute = environment.execute

            async def kept(*command, **options) -> ExecResult:
                self.output = await execute(*command, **options)
                return self.output

            environment.execute = kept
            yield environment

    async def close(self) -> None:
        await self.backend.close()

    async def grade(self, task: Task, change: Mapping[str, bytes | None]) -> Grade:
        self.change = {path: content for path, content in change.items() if not _MADE_BY_TOOLS & set(path.split("/"))}
        return await self.grader.grade(task, self.change)


class Stage:
    """Sandboxes that show one harness; each play has a gateway and a model of its own."""

    def __init__(self, backend: LocalBackend, harness: HarnessSection, task: Task) -> None:
        self._backend = backend
        self._harness = harness
        self._task = task

    async def play(
        self,
        answer: Callable[[Prompt], str],
        *,
        context_length: int = 1_000_000,
        max_tokens: int = 8_000,
        max_calls: int = 100,
        max_session_tokens: int = 1_000_000,
        cut: Collection[int] = (),
        keep_alive_s: float = 10.0,
        close_before: int | None = None,
        env: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
        instruction: str = INSTRUCTION,
        wire_type: "type[Wire] | None" = None,
    ) -> Session:
        """Play one attempt and grade it.

        `cut` are the calls whose connection is cut when their answer comes, counted as the harness sends them.
        `arguments` are added to the harness's command.
        The session is closed before the call with the number `close_before`.
        """
        harness = self._harness.model_copy(
            update={
                "max_calls": max_calls,
                "max_session_tokens": max_session_tokens,
                "env": {**self._harness.env, **(env or {})},
                "command": ("sh", "-c", _IN_REPOSITORY, "sh", *self._harness.command, *arguments),
            }
        )
        policy = ScriptedPolicy(answer, tokenizer=TOKENIZER)
        gateway = Gateway(
            sampler=policy,
            renderer=ChatMLRenderer(TOKENIZER),
            rules=harness.rules,
            context_length=context_length,
            keep_alive_s=keep_alive_s,
        )
        wire = (wire_type or Wire)(gateway=gateway, cut=cut, close_before=close_before)
        watched = _Watched(self._backend)
        documents: list[RolloutRecord] = []
        player = HarnessPlayer(
            host=wire,
            backend=watched,
            grader=watched,
            harness=harness,
            params=SamplingParams(max_tokens=max_tokens),
            on_record=documents.append,
        )
        async with AsyncExitStack() as stack:
            await gateway.start()
            stack.push_async_callback(gateway.stop)
            await wire.start()
            stack.push_async_callback(wire.stop)
            task = msgspec.structs.replace(self._task, instruction=instruction)
            trajectory = await player.play(task, group_id="g000000", index=0, seed=0, purpose="train")
        return Session(
            trajectory=trajectory,
            record=wire.records[-1],
            document=documents[0],
            change=watched.change,
            output=watched.output,
            prompts=policy.prompts,
            num_requests=wire.num_requests,
            num_cut=wire.num_cut,
        )


@asynccontextmanager
async def stage(harness: HarnessSection, directory: Path, *, memory_mb: int = 1024, timeout_s: float = 120.0):
    """Yield a `Stage`; its task is written below the directory. What the harness needs must be in `harness.files`."""
    task = write_task(directory / "textkit", memory_mb=memory_mb, timeout_s=timeout_s)
    mounts = {HARNESS_MOUNT: harness_directory(harness)}
    if harness.env.get("PYTHONPATH") == _PACKAGES:
        mounts[_PACKAGES] = Path(sysconfig.get_path("purelib"))
    backend = await LocalBackend.start(mounts=mounts)
    try:
        yield Stage(backend, harness, task)
    finally:
        await backend.close()


def write_task(path: Path, *, memory_mb: int = 1024, timeout_s: float = 120.0) -> Task:
    """Write the repository with its failing test as a Harbor task."""
    for name, text in REPOSITORY.items():
        file = path / "environment/repository" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (path / "environment/Dockerfile").write_text("FROM python:3.11-slim\nWORKDIR /app\nCOPY repository/ /app/\n")
    (path / "tests").mkdir()
    (path / "tests/test_textkit.py").write_text(REPOSITORY["test_textkit.py"])
    (path / "tests/test.sh").write_text(_TEST_SCRIPT)
    (path / "tests/test.sh").chmod(0o755)
    (path / "task.toml").write_text(_TASK_FILE.format(memory_mb=memory_mb, timeout_s=timeout_s))
    (path / "instruction.md").write_text(INSTRUCTION)
    return load_task(path)
