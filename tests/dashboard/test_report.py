"""Promises of the report, of `etude status` and of `etude show`."""

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from test_html import HOSTILE, Seen

from etude.cli.show import show
from etude.cli.status import status
from etude.dashboard.report import render_report, write_report
from etude.dashboard.run_view import load_run, open_run
from etude.dashboard.summary import status_of
from etude.errors import StoreError
from etude.evaluation.suite import EvalReport, TaskResult, report_key
from etude.interfaces import ObjectStore
from etude.rollout.identity import HarnessIdentity
from etude.rollout.record import RolloutRecord, encode_record
from etude.store.opening import open_store
from etude.types import Failure, Outcome, Trajectory

CONFIG = '[run]\nurl = "runs/demo"  # default\nseed = 3  # --set\n\n[trainer]\nsteps = 20  # recipe.toml\n'


def rollout(group: str, index: int, *, text: str = "done", outcome: Outcome = Outcome.SCORED) -> RolloutRecord:
    scored = outcome is Outcome.SCORED
    name = text.encode("utf-8", "replace").decode()
    return RolloutRecord(
        trajectory=Trajectory(
            rollout_id=f"{group}-{index}",
            group_id=group,
            task_id=name,
            index=index,
            outcome=outcome,
            reward=1.0 if scored else None,
            failure=None if scored else Failure(component="sandbox", reason=name, message=text),
        ),
        purpose="train",
        instruction=text,
        harness=HarnessIdentity(name=name),
        messages=(
            {"role": "user", "content": text},
            {
                "role": "assistant",
                "content": text,
                "reasoning_content": text,
                "tool_calls": [{"id": "c", "function": {"name": text, "arguments": json.dumps({"command": text})}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": text},
        ),
    )


def measured(version: int, passed: int) -> EvalReport:
    return EvalReport(
        version=version,
        attempts=4,
        tasks=1,
        pass_rate=passed / 4,
        interval=(0.1, 0.9),
        pass_at={"1": passed / 4},
        mean_reward=passed / 4,
        scored=4,
        truncated=0,
        held=0,
        infra_failures=0,
        failures={},
        per_task=(TaskResult(task_id="<b>t</b>", passed=passed, scored=4, mean_reward=passed / 4),),
        seconds=1.0,
    )


async def fill(store: ObjectStore, texts: list[str]) -> None:
    rows = [{"step": step, "version": step, "time": 100.0 + step, "stage": "train", "reward/mean": step / 10}
            for step in range(1, 6)]  # fmt: skip
    rows += [{"step": 1, "version": 0, "time": 50.0, "stage": text, text: 1.0} for text in texts]
    rows.sort(key=lambda row: row["time"])  # pyright: ignore[reportArgumentType, reportCallIssue]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    await store.put("metrics.jsonl", (lines + '{"step": 6, "torn').encode())
    await store.put("run.toml", CONFIG.encode())
    before, after = ({"pass_rate": rate, "attempts": 4, "tasks": 60, "extra": 1} for rate in (0.41, 0.86))
    summary = {"seconds": 120.5, "stages": {"train": 70.0}, "eval": {"before": before, "after": after}, "seed": 3}
    await store.put("summary.json", json.dumps(summary).encode())
    for version, passed in ((0, 1), (5, 4)):
        await store.put(report_key(version), msgspec.json.encode(measured(version, passed)))
    for place, text in enumerate(texts):
        record = rollout(f"g{place:06d}", 0, text=text)
        await store.put(record.key, encode_record(record))
        record = rollout(f"g{place:06d}", 1, text=text, outcome=Outcome.INFRA_ERROR)
        await store.put(record.key, encode_record(record))


async def test_nothing_that_a_run_recorded_becomes_markup_or_is_loaded(tmp_path: Path):
    store = open_store(str(tmp_path))
    await fill(store, HOSTILE)
    await write_report(store)
    document = (tmp_path / "report.html").read_text()
    seen = Seen(document)
    assert not {"script", "img", "iframe", "link", "object", "form", "a", "base"} & set(seen.tags)
    assert not [name for name, _ in seen.attributes if name.startswith("on") or name in ("src", "href", "srcdoc")]
    assert "url(" not in document
    assert "<script>alert(1)</script>" in seen.text
    assert all(character.isprintable() or character in "\n\t" for character in document)


async def test_the_report_has_rates_curves_configuration_and_rollouts(tmp_path: Path):
    store = open_store(str(tmp_path))
    await fill(store, ["fine"])
    document = render_report(await load_run(store, rollouts=2))
    text = Seen(document).text
    for expected in ("41.0%", "86.0%", "version 5", "Reward", "reward/mean", "steps = 20", "recipe.toml", "fine: fine"):
        assert expected in text
    assert "4 of 4 passed" in document
    assert "Could not be read" not in text


async def test_a_run_that_has_just_begun_has_a_report_too(tmp_path: Path):
    store = open_store(str(tmp_path))
    await store.put("run.toml", b"not [ toml")
    document = render_report(await load_run(store, rollouts=3))
    assert "not [ toml" in document


async def test_what_is_damaged_is_named_and_the_rest_is_shown(tmp_path: Path):
    store = open_store(str(tmp_path))
    await fill(store, ["fine"])
    await store.put("rollouts/g000000/0.json", b'{"schema_version": "ATIF-v1.8"}')
    await store.put("summary.json", b"\xff")
    await store.put("metrics.jsonl", b'{"step": 1}\n[]\n')
    view = await load_run(store, rollouts=5)
    assert len(view.rollouts) == 1
    assert [problem.partition(":")[0] for problem in view.unreadable] == [
        "metrics.jsonl, line 2",
        "summary.json",
        "rollouts/g000000/0.json",
    ]
    assert "Could not be read" in render_report(view)


async def test_status_says_how_far_the_run_is_and_what_to_do(tmp_path: Path):
    store = open_store(str(tmp_path))
    await fill(store, ["fine"])
    found = status_of(await load_run(store), run="runs/demo", now=200.0)
    assert (found.stage, found.step, found.steps, found.version, found.idle_s) == ("train", 5, 20, 5, 95.0)
    assert (found.pass_rate_before, found.pass_rate_after, found.num_rollouts) == (0.41, 0.86, 2)
    assert "report.html" in found.next_action
    await store.put("summary.json", b"{}")
    assert "resumes" in status_of(await load_run(store), run="runs/demo", now=200.0).next_action


async def test_a_directory_without_a_run_is_refused(tmp_path: Path):
    with pytest.raises(StoreError, match="no run here"):
        await load_run(open_store(str(tmp_path)))
    with pytest.raises(StoreError, match="no run directory"):
        open_run(str(tmp_path / "nowhere"))
    assert not (tmp_path / "nowhere").exists()


@pytest.fixture
async def run(tmp_path: Path) -> str:
    await fill(open_store(str(tmp_path)), HOSTILE)
    return str(tmp_path)


def test_the_status_command_prints_for_people_and_for_machines(run: str):
    plain = CliRunner().invoke(status, [run], catch_exceptions=False)
    assert "pass rate  41.0% before, 86.0% after" in plain.output
    made = json.loads(CliRunner().invoke(status, [run, "--json"], catch_exceptions=False).output)
    assert made["step"] == 5


def test_the_show_command_lists_groups_and_prints_one_rollout_without_steering_the_terminal(run: str):
    everything = CliRunner().invoke(show, [run], catch_exceptions=False).output
    assert everything.count("infra_error") == len(HOSTILE)
    group = CliRunner().invoke(show, [run, "g000007"], catch_exceptions=False).output
    assert [line.split()[0] for line in group.splitlines()] == ["g000007/0", "g000007/1"]
    one = CliRunner().invoke(show, [run, "g000007/0"], catch_exceptions=False).output
    assert r"\x1b[2J\x07\x00\r" in one
    for output in (everything, group, one):
        assert all(character.isprintable() or character in "\n\t" for character in output)


def test_the_show_command_prints_atif_for_machines(run: str):
    made = json.loads(CliRunner().invoke(show, [run, "g000000/1", "--json"], catch_exceptions=False).output)
    assert made["schema_version"] == "ATIF-v1.8"
    listed = CliRunner().invoke(show, [run, "--json", "--last", "3"], catch_exceptions=False).output
    assert [json.loads(line)["outcome"] for line in listed.strip().split("\n")] == [
        "infra_error",
        "scored",
        "infra_error",
    ]


def test_a_rollout_that_is_not_there_is_named(run: str):
    with pytest.raises(StoreError, match="g999999"):
        CliRunner().invoke(show, [run, "g999999"], catch_exceptions=False)


def test_a_message_cannot_pass_for_the_next_turn(run: str):
    forged = rollout("g000099", 0, text="ok\n--- 9  agent\n> shell: rm")
    place = Path(run) / forged.key
    place.parent.mkdir()
    place.write_bytes(encode_record(forged))
    output = CliRunner().invoke(show, [run, "g000099/0"], catch_exceptions=False).output
    assert [line for line in output.splitlines() if line.startswith("---")] == ["--- 1  user", "--- 2  agent"]
