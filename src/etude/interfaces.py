"""One small Protocol per seam.

Rooms of one layer do not know each other: they meet here and are introduced in `runtime`.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from etude.types import (
    Completion,
    Failure,
    Node,
    SampleRequest,
    SamplerStatus,
    SamplingParams,
    Task,
    Trajectory,
)


@runtime_checkable
class Clock(Protocol):
    """Time, so that tests can own it."""

    def now(self) -> float:
        """Seconds on a clock that never goes back."""
        ...

    async def sleep(self, seconds: float) -> None: ...


@runtime_checkable
class ObjectStore(Protocol):
    """Bytes under a key, far away. Keys are relative, `/`-separated, without `.` or `..`."""

    async def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        """Raise `ObjectMissingError` when the key does not exist, `StoreError` when the object exceeds `max_bytes`."""
        ...

    async def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        """Write the whole object; readers see old bytes or new ones. `create_only` raises `ObjectExistsError`."""
        ...

    async def compare_and_swap(self, key: str, data: bytes, *, expected: bytes | None) -> bool:
        """Replace the object if its bytes are `expected` (None: if it does not exist); False when they are not."""
        ...

    async def list(self, prefix: str) -> list[str]:
        """Return the keys under a prefix, sorted. May lag behind `put`: nothing relies on it being fresh."""
        ...


@runtime_checkable
class ErasableStore(ObjectStore, Protocol):
    """A store whose objects can be removed."""

    async def delete(self, key: str) -> None:
        """Remove an object; one that is not there is nothing to do."""
        ...


class SparingReads(Protocol):
    """Reads that fetch no more than is needed."""

    async def get_if_changed(
        self, key: str, *, tag: str | None, max_bytes: int | None = None
    ) -> tuple[bytes, str] | None:
        """Return the object's bytes and their tag, or None when `tag`, from an earlier call, is still theirs.

        Raise as `ObjectStore.get` does.
        """
        ...

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return exactly `length` bytes from `start`; raise `StoreError` when the object ends before."""
        ...


@runtime_checkable
class Bucket(ErasableStore, SparingReads, Protocol):
    """All that a store can do; `etude.store.opening.open_store` returns one."""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What an environment backend enforces on this host. What is False is refused, never ignored."""

    user_isolated: bool = False
    process_isolated: bool = False
    network_isolated: bool = False
    filesystem_isolated: bool = False
    memory_limited: bool = False
    cpu_limited: bool = False
    disk_limited: bool = False
    pids_limited: bool = False
    snapshot: bool = False
    fork: bool = False
    memory_snapshot: bool = False
    egress_enforced: bool = False
    gpu: bool = False


class ExecResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a command in a sandbox ended."""

    exit_code: int
    """-N when signal N ended it."""
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    truncated: bool = False
    """Output beyond the limit was read and thrown away."""
    out_of_memory: bool = False
    """The sandbox's memory limit was reached meanwhile, and a process was killed for it."""
    seconds: float = 0.0


@runtime_checkable
class Environment(Protocol):
    """One sandbox, used once. Made by an `EnvironmentBackend`; gone after its `async with` block."""

    @property
    def environment_id(self) -> str: ...

    @property
    def model_url(self) -> str:
        """Base URL at which the model API is reached from inside, such as http://127.0.0.1:8080/v1; empty if none."""
        ...

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
        """Run a program (no shell), `env` added to the sandbox's own; kill its whole process tree at the deadline."""
        ...

    async def upload(self, files: Mapping[str, bytes], *, executable: frozenset[str] = frozenset()) -> None:
        """Write files by absolute path inside the sandbox; no symbolic link is followed out of it."""
        ...

    async def download(self, path: str, *, max_bytes: int) -> dict[str, bytes]:
        """Read a regular file, or all regular files under a directory, by path relative to `path`.

        Symbolic links and special files are left out. Raise `SandboxError` beyond `max_bytes` in all.
        """
        ...

    async def changes(self, *, max_bytes: int) -> dict[str, bytes | None]:
        """Return what differs from the pristine workdir: relative path to new bytes, None for a deleted file.

        Found from outside the sandbox, without running anything the agent could have replaced. Symbolic links and
        special files are left out. Raise `SandboxError` beyond `max_bytes` in all.
        """
        ...


class EnvironmentBackend(Protocol):
    """Makes sandboxes."""

    @property
    def capabilities(self) -> Capabilities: ...

    def create(self, task: Task, *, model_port: int | None = None) -> AbstractAsyncContextManager[Environment]:
        """Open a fresh sandbox from the task's pristine environment.

        With `model_port`, connections made inside the sandbox to `model_url` reach that loopback port of this host;
        nothing else of the network is reachable. Raise `SandboxError` when the sandbox cannot be made.
        """
        ...

    async def close(self) -> None:
        """Destroy what is left."""
        ...


class Grade(msgspec.Struct, frozen=True, kw_only=True):
    """What a grader found."""

    reward: float | None
    """None when the grader itself failed."""
    components: dict[str, float] = {}
    failure: str = ""
    """Why there is no reward."""
    held: bool = False
    """A screen holds the rollout out of baseline and loss; `failure` carries the evidence."""
    log: str = ""
    """Tail of the tests' output, for people."""


class Grader(Protocol):
    """Scores what an agent left behind, in a sandbox where the agent never was."""

    async def grade(self, task: Task, change: Mapping[str, bytes | None]) -> Grade:
        """Apply the change (path relative to the workdir to new bytes, None for a deleted file) and run the tests."""
        ...


class Sampler(Protocol):
    """The policy asked for tokens."""

    async def sample(self, request: SampleRequest) -> Completion: ...

    async def status(self) -> Sequence[SamplerStatus]: ...


class RolloutPlayer(Protocol):
    """Plays one attempt at a task from sandbox to reward."""

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
        """Never raises for what goes wrong inside: that is in the trajectory's outcome. `purpose` is train or eval.

        `attempt` counts replacements after infrastructure failures. The versions bind every token drawn: training
        asks for the version of admission or newer, evaluation for exactly one.
        """
        ...


class TaskSource(Protocol):
    """Tasks in a seeded order, each once per epoch."""

    def next_task(self) -> Task: ...

    def cursor(self) -> bytes:
        """Where the source stands; `restore` of a source over the same tasks continues exactly there."""
        ...

    def restore(self, cursor: bytes) -> None: ...


class Renderer(Protocol):
    """Messages and tools to token ids of one model family, and back."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...

    def render(self, messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]]) -> list[int]:
        """Return the whole prompt, ending where the assistant's answer begins."""
        ...

    def extend(self, messages: Sequence[Mapping[str, object]], *, finished: bool) -> list[int] | None:
        """Return what follows a drawn answer when `messages` (no assistant among them) come next.

        `finished` says that the answer ended with a stop token. None when the family cannot be extended.
        """
        ...

    def parse(self, token_ids: Sequence[int]) -> Mapping[str, object]:
        """Return the drawn tokens as an OpenAI assistant message: `content`, `reasoning_content`, `tool_calls`."""
        ...


class MetricSink(Protocol):
    """Takes rows of metrics; a row carries its step, policy version and time."""

    def record(self, row: Mapping[str, object]) -> None: ...


class Ledger(Protocol):
    """One writer's part of the run ledger."""

    def record(self, event: msgspec.Struct) -> None:
        """Take a fact of `telemetry.events`; it reaches the disk with the next flush, within a fraction of a second."""
        ...

    async def flush(self) -> None:
        """Return when the run directory has every fact recorded so far; raise `StoreError` when it cannot."""
        ...

    async def flush_local(self) -> None:
        """Return when every fact recorded so far survives `kill -9`: it may still be on this machine's disk alone."""
        ...


class StagedWeights(Protocol):
    """Verified weights. Their reader copies what it needs and writes to none of them."""

    @property
    def lineage(self) -> str: ...

    @property
    def version(self) -> int: ...

    @property
    def digest(self) -> str: ...

    @property
    def tensors(self) -> Mapping[str, Any]:
        """Torch tensors by Hugging Face name, in the published dtype, anywhere; untyped because torch is a stranger."""
        ...


class WeightSource(Protocol):
    """Where a sampler learns of new weights."""

    def staged(self) -> AsyncIterator[StagedWeights]:
        """Yield each version once its tensors are verified and ready to be swapped in."""
        ...


class SessionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway is told when a session is opened."""

    session_id: str
    purpose: str
    """`train` or `eval`."""
    seed: int
    """Call n of the session draws with a seed derived from this one and n."""
    params: SamplingParams
    """Pinned: what the harness asks for is recorded and overridden; `max_tokens` is clamped to the context."""
    max_calls: int
    max_session_tokens: int
    deadline_s: float | None = None
    """Seconds after which no call is answered any more; a call in flight ends then."""
    on_limit: Literal["error", "message"] = "error"
    """What a call beyond a limit gets: an error that no SDK retries, or an assistant's message that nobody drew."""
    min_version: int | None = None
    exact_version: int | None = None


class ShownConversation(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation as the harness saw it, OpenAI messages, for people."""

    messages: tuple[dict[str, object], ...] = ()
    tools: tuple[dict[str, object], ...] = ()
    drawn_by: tuple[int | None, ...] = ()
    """The call behind each assistant's message; None where its answer is not in this branch, so that it is a copy."""


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a session leaves behind."""

    nodes: tuple[Node, ...]
    messages: tuple[dict[str, object], ...]
    """The longest conversation of the main agent as the harness saw it, OpenAI messages, for people."""
    tools: tuple[dict[str, object], ...] = ()
    drawn_by: tuple[int | None, ...] = ()
    """The call behind each assistant's message of that conversation; None for a copy."""
    others: tuple[ShownConversation, ...] = ()
    """The longest conversation from each other root; the first few, when there are many."""
    answers: dict[int, dict[str, object]] = {}
    """All that was drawn, as assistant's messages, by node."""
    num_calls: int = 0
    truncated: str = ""
    """The limit that ended it: `calls`, `session_tokens`, `deadline`, `context`; empty when none did."""
    failure: Failure | None = None
    """Set when a sampler or the gateway itself failed a call."""
    requested_sampling: tuple[dict[str, object], ...] = ()
    """Per call, the sampling that the harness asked for; the session's own was used."""
    metrics: dict[str, float] = {}

    @property
    def all_messages(self) -> tuple[dict[str, object], ...]:
        """The main conversation, and then every answer of the session, whatever became of it."""
        return (*self.messages, *self.answers.values())


class SessionHost(Protocol):
    """The gateway, as the rollout worker sees it."""

    @property
    def port(self) -> int:
        """Loopback port of the model API."""
        ...

    async def open(self, spec: SessionSpec) -> str:
        """Return the session's API key, which is unguessable and its only identity."""
        ...

    async def close(self, session_id: str) -> SessionRecord:
        """End the session: later calls with its key are refused for good."""
        ...
