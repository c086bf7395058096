# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false
"""Numbers under the wrong step, settings without an effect, recipes that do not install."""

import ast
import io
import json
import re
import signal
import subprocess
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path
from typing import get_args

import pytest
from packaging.requirements import Requirement

from etude.config import RunConfig
from etude.errors import ConfigError
from etude.problems import OTHER_NAMES, known_keys, section_of
from etude.runtime.settings import load_settings
from etude.telemetry.console import PlainConsole
from etude.telemetry.rows import decode_rows
from etude.telemetry.sink import JsonlSink

ROOT = Path(__file__).parents[2]
WAITS = {"P-98": "planner: it estimates time and cost before a run starts"}


class Counting:
    """The mistake: a service that numbers rows itself, and drops those that come late."""

    def __init__(self):
        self.rows = {}

    def record(self, row):
        self.rows[len(self.rows)] = row

    def record_at(self, row):
        if row["step"] >= max(self.rows, default=0):
            self.rows[row["step"]] = row


def row(step, version, **values):
    return {"stage": "train", "step": step, "version": version, **values}


@pytest.mark.row("P-88")
def test_a_row_of_metrics_says_its_own_step_version_and_time(tmp_path):
    """Every row carries step, policy version and time; one that does not is refused where it is made."""
    rows = [row(1, 1, loss=0.5), row(1, 1, note=1.0), row(2, 2, loss=0.4)]
    counting = Counting()
    for one in rows:
        counting.record(one)
    assert counting.rows[2]["step"] != 1
    assert counting.rows[1]["step"] != 2

    sink = JsonlSink(tmp_path / "metrics.jsonl", wall=lambda: 12.0)
    for one in rows:
        sink.record(one)
    for unnumbered in ({"loss": 1.0}, {"step": 3, "loss": 1.0}, {"step": None, "version": 3}):
        with pytest.raises(ValueError, match="needs an integer step and version"):
            sink.record(unnumbered)
    sink.close()
    kept = decode_rows((tmp_path / "metrics.jsonl").read_bytes(), place="metrics")
    assert [(one["step"], one["version"], one["time"]) for one in kept] == [(1, 1, 12.0), (1, 1, 12.0), (2, 2, 12.0)]


WRITE_FOREVER = """
import sys
from pathlib import Path
from etude.telemetry.sink import JsonlSink
sink = JsonlSink(Path(sys.argv[1]))
for step in range(10**9):
    sink.record({"step": step, "version": step, "loss": 0.5})
    print(step, flush=True)
"""


@pytest.mark.row("P-89")
def test_the_local_file_is_the_truth_about_metrics(tmp_path):
    """Rows are appended to a local file that keeps the late ones and survives `kill -9`; nothing renumbers them."""
    late = [row(1, 1), row(3, 3), row(2, 2, eval=0.5)]
    service = Counting()
    for one in late:
        service.record_at(one)
    assert 2 not in service.rows

    path = tmp_path / "metrics.jsonl"
    writer = subprocess.Popen([sys.executable, "-c", WRITE_FOREVER, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    said = [int(writer.stdout.readline()) for _ in range(50)]
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    path.write_bytes(path.read_bytes() + b'{"step": 9')
    sink = JsonlSink(path)
    for one in late:
        sink.record(one)
    sink.close()
    steps = [one["step"] for one in decode_rows(path.read_bytes(), place="metrics")]
    assert steps[: len(said)] == said
    assert steps[-3:] == [1, 3, 2]


@pytest.mark.slow
@pytest.mark.row("P-91")
async def test_an_asynchronous_run_is_evaluated_at_exact_versions(finished):
    """Evaluation is a stage of every recipe and a command on a run: each draws under exactly one version."""
    for version in (0, 6):
        report = json.loads((finished / f"evals/{version}/report.json").read_text())
        assert (report["version"], report["tasks"], report["scored"]) == (version, 1, 2)
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [one["version"] for one in rows if one["stage"] == "eval"] == [0, 6]
    drawn = [
        step["extra"]["versions"]
        for version in (0, 6)
        for document in (finished / "rollouts").glob(f"eval-v{version}-*/*.json")
        for step in json.loads(document.read_text())["steps"]
        if step["source"] == "agent"
    ]
    assert drawn
    assert {run[0] for runs in drawn for run in runs} == {0, 6}
    assert all(len(runs) == 1 for runs in drawn)


def lenient(tables, key, value):
    """Read a setting as careless programs do: whatever is written is merged in."""
    section, _, name = key.rpartition(".")
    tables.setdefault(section, {})[name] = value
    return tables.get("trainer", {}).get("lr", 1e-3)


def other_value(annotation, value):
    """Return another value than this one, as TOML."""
    choices = [choice for choice in get_args(annotation) if isinstance(choice, str) and choice != value]
    if choices:
        return json.dumps(choices[-1])
    if isinstance(value, bool):
        return json.dumps(not value)
    if isinstance(value, int):
        return str(value + 1)
    if isinstance(value, float):
        return str(value / 2 + 0.001)
    return json.dumps("elsewhere") if isinstance(value, str) else '["eval"]'


def settings_of(model, prefix=""):
    """Yield dotted key, annotation and default of every setting that holds a value."""
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        if section is None and field.annotation != dict[str, str]:
            yield prefix + name, field.annotation, field.default
        elif section is not None and "tuple" not in str(field.annotation):
            yield from settings_of(section, f"{prefix}{name}.")


def read_attributes():
    """Return the names of all attributes that the package reads anywhere but in the declaration of its settings."""
    sources = [path for path in (ROOT / "src" / "etude").rglob("*.py") if path.name != "config.py"]
    nodes = (node for path in sources for node in ast.walk(ast.parse(path.read_text())))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)}


@pytest.mark.row("P-93")
def test_every_documented_setting_takes_effect_in_every_documented_way(tmp_path):
    """File, environment and `--set` each change each key or are refused; an unknown key is refused with a guess."""
    assert lenient({}, "training.learning_rate", 5.0) == 1e-3

    with pytest.raises(ConfigError, match=r"did you mean trainer\?"):
        load_settings(None, ["training.learning_rate=5.0"], {})
    page = (ROOT / "docs" / "configuration.md").read_text()
    read = read_attributes()
    assert not [key for key, _, _ in settings_of(RunConfig) if key.rpartition(".")[2] not in read]
    for key, annotation, default in settings_of(RunConfig):
        assert f"| `{key.rpartition('.')[2]}` |" in page
        text = other_value(annotation, default)
        file = tmp_path / "run.toml"
        section, _, name = key.rpartition(".")
        file.write_text(f"[{section}]\n{name} = {text}\n" if section else f"{name} = {text}\n")
        variable = "ETUDE__" + key.replace(".", "__").upper()
        for ways in ((file, (), {}), (None, (f"{key}={text}",), {}), (None, (), {variable: text})):
            try:
                value = load_settings(*ways).config
            except ConfigError as error:
                assert key.rpartition(".")[2] in str(error)  # noqa: PT017 either is fine, silence is not
                continue
            for part in key.split("."):
                value = getattr(value, part)
            assert value != default, f"{key} has no effect through {ways}"


@pytest.mark.row("P-94")
@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("trainer.stepz", "trainer.steps"),
        ("trainer.max_staleness", "rollout.max_staleness"),
        ("rolout.group_size", "rollout"),
        *((f"trainer.{name}", key) for name, key in OTHER_NAMES.items()),
    ],
)
def test_an_unknown_key_is_answered_with_the_one_that_was_meant(written, meant):
    """A misspelt key, one in the wrong table and one of another system's name are each told the right one."""
    assert meant in set(known_keys(RunConfig))
    with pytest.raises(ConfigError) as refusal:
        load_settings(None, [f"{written}=1"], {})
    # The mistake: to say that the key is unknown, and no more.
    assert "unknown" in str(refusal.value)
    assert f"did you mean {meant}?" in str(refusal.value)


def needed_by(requirements, seen):
    """Return the names of everything that installing these requirements installs here."""
    for text in requirements:
        requirement = Requirement(text)
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        needed_by(requires(name) or (), seen)
    return seen


HEAVY = re.compile(r"^(torch|triton|nvidia.*|cuda.*|flash.attn|vllm.*|sglang|ray|transformers)$")


@pytest.mark.row("P-96")
def test_the_core_installs_without_a_gpu_library_and_versions_are_pinned_for_the_rest():
    """Nothing that the core installs needs CUDA, and one file pins every version that the recipes were run with."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert any(HEAVY.match(name) for name in needed_by(project["optional-dependencies"]["train"], set()))
    core = needed_by(project["dependencies"], set())
    assert not [name for name in core if HEAVY.match(name)]

    pins = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in pins if "==" in line}
    wanted = core | needed_by(project["optional-dependencies"]["train"], set())
    # A venv brings setuptools along.
    assert sorted(name for name in wanted - pinned - {"setuptools"} if not HEAVY.match(name)) == []
    urls = [line for line in (*project["dependencies"], *project["optional-dependencies"]["train"]) if "://" in line]
    assert not urls


@pytest.mark.row("P-97")
def test_the_first_example_shows_asynchrony_while_it_happens():
    """The quickstart trains an agent in its harness, and every step prints how stale its tokens were."""
    quickstart = load_settings(ROOT / "recipes" / "quickstart.toml", (), {}).config
    assert quickstart.rollout.max_staleness > 0
    assert quickstart.tasks.family == "pyfix"

    stream = io.StringIO()
    PlainConsole(stream).step(row(4, 4, **{"staleness/mean_versions": 0.5, "staleness/max_versions": 1.0}), total=40)
    assert "stale 0.50  max 1" in stream.getvalue()
    # The mistake: a line that says how fast the run is, and not how far its samplers are behind.
    stream = io.StringIO()
    PlainConsole(stream).step(row(4, 4, **{"sampling/tokens_per_s": 100.0}))
    assert "stale" not in stream.getvalue()
    page = (ROOT / "docs" / "quickstart.md").read_text()
    assert "`stale`" in page
    assert "max_staleness=0" in page
