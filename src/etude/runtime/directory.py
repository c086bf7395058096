"""A run is a directory: where its parts lie, and how the parts that need a file system get one."""

import hashlib
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from etude.config import PolicySection, RunConfig, TasksSection
from etude.errors import ConfigError, ObjectMissingError, PolicyError
from etude.interfaces import Bucket
from etude.runtime.settings import Settings, resolved_toml
from etude.store.opening import open_store
from etude.telemetry.rows import decode_rows

CONFIG_KEY = "run.toml"
SUMMARY_KEY = "summary.json"
METRICS_KEY = "metrics.jsonl"
POLICY_STAGES = ("sft", "pretrain")
"""Stages that leave a policy, the one to start from first."""

_FIXED = (
    ("run", "seed"),
    *(("policy", key) for key in PolicySection.model_fields),
    *(("tasks", key) for key in TasksSection.model_fields),
)
"""What cannot change within a run."""


class EvalSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation in summary.json."""

    pass_rate: float | None
    attempts: int
    """Per task."""
    tasks: int
    interval: tuple[float, float]
    version: int


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """summary.json: what a run came to so far; a stage that is named here is done."""

    seed: int
    seconds: float = 0.0
    """Of all stages, over all the times that the command was started."""
    stages: dict[str, float] = {}
    eval: dict[str, EvalSummary] = {}
    """`before` training and `after`."""


class RunDirectory:
    """The run directory of one URL."""

    def __init__(self, url: str, store: Bucket) -> None:
        self.url = url
        self.store = store
        path = url.removeprefix("file://")
        self.is_local = "://" not in path
        """Whether it is a directory of this machine."""
        name = hashlib.sha256(url.encode()).hexdigest()[:16]
        self.local = Path(path).absolute() if self.is_local else _cache() / "runs" / name
        """A local directory: the run directory itself, or this machine's copy of what needs files."""

    @classmethod
    def open(cls, url: str) -> "RunDirectory":
        """Return the run directory at `url`, which need not exist yet."""
        return cls(url, open_store(url))

    async def adopt(self, settings: Settings) -> None:
        """Write run.toml, or check that the run which is there was started with a configuration that fits.

        Raises:
            ConfigError: The directory belongs to a run with another policy, task set or seed.
        """
        text = resolved_toml(settings)
        try:
            written = tomllib.loads((await self.store.get(CONFIG_KEY)).decode())
        except ObjectMissingError:
            pass
        except ValueError as error:
            msg = f"{self.url}/{CONFIG_KEY} cannot be read ({error}): choose another run.url"
            raise ConfigError(msg) from error
        else:
            now = tomllib.loads(text)
            different = [
                f"{section}.{key}" for section, key in _FIXED if _value(written, section, key) != now[section][key]
            ]
            if different:
                msg = f"{self.url} holds a run with another {', '.join(different)}: choose another run.url"
                raise ConfigError(msg)
        await self.store.put(CONFIG_KEY, text.encode())

    async def config(self) -> RunConfig:
        """Return the configuration that the run was started with."""
        text = (await self.store.get(CONFIG_KEY)).decode()
        return RunConfig.model_validate_json(json.dumps(tomllib.loads(text)))

    async def summary(self, *, seed: int) -> Summary:
        """Return what is done so far."""
        try:
            return msgspec.json.decode(await self.store.get(SUMMARY_KEY), type=Summary)
        except ObjectMissingError:
            return Summary(seed=seed)

    async def write_summary(self, summary: Summary) -> None:
        """Replace summary.json."""
        await self.store.put(SUMMARY_KEY, msgspec.json.format(msgspec.json.encode(summary), indent=2))

    async def upload(self, directory: Path, prefix: str) -> None:
        """Put the files of a local directory under a prefix of the run."""
        if directory == self.local / prefix and self.is_local:
            return
        for path in _files(directory):
            await self.store.put(f"{prefix}/{path.name}", path.read_bytes())

    async def fetch(self, prefix: str) -> Path:
        """Return a local directory with the files directly under a prefix; empty when there are none."""
        directory = self.local / prefix
        if not self.is_local:
            directory.mkdir(parents=True, exist_ok=True)
            for key in await self.store.list(f"{prefix}/"):
                name = key.removeprefix(f"{prefix}/")
                if "/" not in name:
                    (directory / name).write_bytes(await self.store.get(key))
        return directory

    async def fetch_metrics(self) -> Path:
        """Return the local file of metrics, with what another machine wrote when the run is far away."""
        path = self.local / METRICS_KEY
        if not self.is_local:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                stored = await self.store.get(METRICS_KEY)
            except ObjectMissingError:
                stored = b""
            # Rows after the stored ones were written here before a crash.
            if not _is_file(path) or not path.read_bytes().startswith(stored):
                path.write_bytes(stored)
        return path

    def newest_step(self) -> int:
        """Return the last optimizer step of RL that the metrics have a row of; 0 without any.

        Raises:
            IntegrityError: A line of the metrics is damaged.
        """
        path = self.local / METRICS_KEY
        rows = decode_rows(path.read_bytes(), place=str(path)) if _is_file(path) else []
        return max(
            (step for row in rows if row.get("stage") == "train" and isinstance(step := row["step"], int)), default=0
        )

    async def keep_metrics(self) -> None:
        """Put the metrics so far into a run directory that is far away; a local one has them already."""
        if not self.is_local:
            await self.store.put(METRICS_KEY, (self.local / METRICS_KEY).read_bytes())

    async def starting_policy(self, config: RunConfig, stages: Sequence[str] = POLICY_STAGES) -> Path:
        """Return the model directory to start from: the first that one of the stages has left, else `policy.path`.

        Raises:
            ConfigError: There is none.
            PolicyError: `policy.path` is no model directory.
        """
        for stage in stages:
            directory = await self.fetch(f"policy/{stage}")
            if _is_model(directory):
                return directory
        if not config.policy.path:
            msg = f"{self.url} has no policy yet: run etude pretrain and etude sft first, or set policy.path"
            raise ConfigError(msg)
        directory = Path(config.policy.path)
        if not _is_model(directory):
            msg = f"policy.path = {config.policy.path!r} has no config.json: name a Hugging Face model directory"
            raise PolicyError(msg)
        return directory


def _value(written: Mapping[str, Any], section: str, key: str) -> object:
    table = written.get(section)
    return cast("dict[str, object]", table).get(key) if isinstance(table, dict) else None


def _files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir())


def _is_model(directory: Path) -> bool:
    return _is_file(directory / "config.json")


def _is_file(path: Path) -> bool:
    return path.is_file()


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "etude"
