"""Stand-ins for what a rollout needs, scripted by their caller: for tests and dry runs."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from etude.errors import EtudeError
from etude.interfaces import Capabilities, Environment, ExecResult, Grade, SessionRecord, SessionSpec
from etude.types import Failure, Outcome, Task, Trajectory


class ScriptedPlayer:
    """Plays by calling a function of task, index and attempt that names an outcome, a reward and a number of waits."""

    def __init__(self, script: Callable[[Task, int, int], tuple[Outcome, float | None, int]]) -> None:
        self._script = script
        self.seeds: dict[str, int] = {}
        """Seed of every attempt, by rollout_id."""
        self.versions: list[tuple[int | None, int | None]] = []
        """`min_version` and `exact_version` of every attempt."""
        self.num_alive = 0
        self.num_alive_max = 0
        self.cancelled: list[str] = []

    async def play(
        self,
        task: Task,
        *,
        group_id: str,
        index: int,
        seed: int,
        purpose: str,
        attempt: int = 0,
        min_version: int | None = None,
        exact_version: int | None = None,
    ) -> Trajectory:
        """Give way to other tasks as often as the script says, then return what it says."""
        rollout_id = f"{group_id}-{index}" + (f"r{attempt}" if attempt else "")
        self.seeds[rollout_id] = seed
        self.versions.append((min_version, exact_version))
        outcome, reward, waits = self._script(task, index, attempt)
        self.num_alive += 1
        self.num_alive_max = max(self.num_alive_max, self.num_alive)
        try:
            for _ in range(waits):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled.append(rollout_id)
            raise
        finally:
            self.num_alive -= 1
        failure = None if reward is not None else Failure(component="sandbox", reason="scripted", message=purpose)
        return Trajectory(
            rollout_id=rollout_id,
            group_id=group_id,
            task_id=task.task_id,
            index=index,
            outcome=outcome,
            reward=reward,
            failure=failure,
        )


class ScriptedHost:
    """A gateway whose sessions leave the record they are told to."""

    def __init__(self, record: SessionRecord, *, open_error: EtudeError | None = None) -> None:
        self._record = record
        self._open_error = open_error
        self.opened: list[SessionSpec] = []
        self.closed: list[str] = []

    @property
    def port(self) -> int:
        """A port that nothing listens on."""
        return 9

    async def open(self, spec: SessionSpec) -> str:
        """Return a key that names the session, or fail as told."""
        if self._open_error is not None:
            raise self._open_error
        self.opened.append(spec)
        return f"key of {spec.session_id}"

    async def close(self, session_id: str) -> SessionRecord:
        """Return the record."""
        self.closed.append(session_id)
        return self._record


class ScriptedEnvironment:
    """A sandbox in which every command ends as it is told to, or never."""

    def __init__(self, result: ExecResult | EtudeError | None, change: Mapping[str, bytes | None]) -> None:
        self._result = result
        self._change = change
        self.commands: list[tuple[tuple[str, ...], dict[str, str]]] = []
        self.started = asyncio.Event()
        """Set once a command runs."""

    @property
    def environment_id(self) -> str:
        """Always the same."""
        return "scripted"

    @property
    def model_url(self) -> str:
        """Where a harness would find the model."""
        return "http://127.0.0.1:9/v1"

    async def execute(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str = "agent",
        max_output_bytes: int = 1 << 20,
    ) -> ExecResult:
        """Remember the command; without a scripted result, wait until cancelled."""
        self.commands.append((tuple(command), dict(env or {})))
        self.started.set()
        if self._result is None:
            await asyncio.Event().wait()
        if isinstance(self._result, EtudeError):
            raise self._result
        return self._result or ExecResult(exit_code=0, stdout=b"", stderr=b"")

    async def upload(self, files: Mapping[str, bytes], *, executable: frozenset[str] = frozenset()) -> None:
        """Write nothing."""

    async def download(self, path: str, *, max_bytes: int) -> dict[str, bytes]:
        """Return nothing."""
        return {}

    async def changes(self, *, max_bytes: int) -> dict[str, bytes | None]:
        """Return the scripted change."""
        return dict(self._change)


class ScriptedBackend:
    """Makes one kind of sandbox, or fails as told, when it is opened or when it is closed."""

    def __init__(
        self,
        result: ExecResult | EtudeError | None,
        *,
        change: Mapping[str, bytes | None] | None = None,
        create_error: EtudeError | None = None,
        destroy_error: EtudeError | None = None,
    ) -> None:
        self.environment = ScriptedEnvironment(result, change or {})
        self._create_error = create_error
        self._destroy_error = destroy_error
        self.num_alive = 0

    @property
    def capabilities(self) -> Capabilities:
        """Nothing is enforced."""
        return Capabilities()

    def create(self, task: Task, *, model_port: int | None = None) -> AbstractAsyncContextManager[Environment]:
        """Return the scripted sandbox."""
        return self._create()

    @asynccontextmanager
    async def _create(self) -> AsyncGenerator[Environment]:
        if self._create_error is not None:
            raise self._create_error
        self.num_alive += 1
        try:
            yield self.environment
        finally:
            self.num_alive -= 1
            if self._destroy_error is not None:
                raise self._destroy_error

    async def close(self) -> None:
        """Nothing is left."""


class ScriptedGrader:
    """Gives the grade it is told to, or fails."""

    def __init__(self, grade: Grade | EtudeError) -> None:
        self._grade = grade
        self.changes: list[dict[str, bytes | None]] = []

    async def grade(self, task: Task, change: Mapping[str, bytes | None]) -> Grade:
        """Remember the change and answer."""
        self.changes.append(dict(change))
        if isinstance(self._grade, EtudeError):
            raise self._grade
        return self._grade
