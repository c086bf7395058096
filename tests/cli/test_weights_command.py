# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false
import asyncio
import json
import signal
import subprocess
import sys
import time

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from etude.cli.main import main
from etude.store.opening import open_store
from etude.weights.chain import HEAD_KEY
from etude.weights.publisher import open_publisher


def weights(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"w": torch.randn(50, 40, generator=generator) + 1e-3 * version, "same": torch.ones(7)}


@pytest.fixture
def run(tmp_path):
    async def publish() -> None:
        publisher = await open_publisher(open_store(str(tmp_path / "run")), lineage="one", dtype="bfloat16")
        for version in range(10):
            await publisher.publish(version=version, step=version * 2, tensors=weights(version))

    asyncio.run(publish())
    return str(tmp_path / "run")


def lines(capsys) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


COMMANDS = ("follow", "ls", "log", "diff", "verify", "materialise", "gc")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_with_an_example(command, capsys):
    assert main(["weights", command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"Example: etude weights {command} " in text
    assert "--json" in text


@pytest.mark.parametrize(
    "arguments", [["ls"], ["log"], ["diff", "0", "1"], ["verify"], ["gc"], ["follow", "--to", "x"]]
)
def test_a_run_that_is_not_there_is_not_made(arguments, tmp_path, capsys):
    command, *rest = arguments
    assert main(["weights", command, str(tmp_path / "typo"), *rest]) == 4
    assert "there is no run directory" in capsys.readouterr().err
    assert not (tmp_path / "typo").exists()


def test_versions_are_listed_with_every_way_to_them(run, capsys):
    assert main(["weights", "ls", run, "--json"]) == 0
    rows = lines(capsys)
    assert [row["version"] for row in rows] == list(range(10))
    assert [way["kind"] for way in rows[0]["ways"]] == ["anchor"]
    assert {way["kind"] for way in rows[8]["ways"]} >= {"delta", "skip"}
    assert [row["is_head"] for row in rows] == [False] * 9 + [True]
    assert main(["weights", "ls", run]) == 0
    assert "one/9: delta" in capsys.readouterr().out


def test_the_log_names_steps_and_bytes(run, capsys):
    assert main(["weights", "log", run, "--last", "3", "--json"]) == 0
    rows = lines(capsys)
    assert [(row["version"], row["step"], row["epoch"]) for row in rows] == [(9, 18, 1), (8, 16, 1), (7, 14, 1)]
    assert all(row["num_bytes"] > 0 for row in rows)
    assert main(["weights", "log", run]) == 0
    assert "one/0: step 0, epoch 1" in capsys.readouterr().out


def test_a_diff_names_what_changed_and_by_how_much(run, capsys):
    assert main(["weights", "diff", run, "1", "head", "--json"]) == 0
    (row,) = lines(capsys)
    assert (row["name"], row["elements"]) == ("w", 2000)
    assert row["changed"] == row["by_1"] + row["by_2"] + row["by_8"] + row["by_more"]
    assert row["density"] == row["changed"] / 2000
    assert main(["weights", "diff", run, "one/1", "2"]) == 0
    assert "1 tensors changed" in capsys.readouterr().out
    assert main(["weights", "diff", run, "2", "2"]) == 0
    assert "0 tensors changed" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["10", "two/1", "-1", "x", "", "one/"])
def test_a_version_that_is_not_kept_is_refused(name, run, capsys):
    assert main(["weights", "diff", run, "--", name, "head"]) == 2
    assert "there is no version" in capsys.readouterr().err


def test_a_sound_chain_is_verified_and_a_damaged_one_ends_with_5(run, capsys, tmp_path):
    assert main(["weights", "verify", run]) == 0
    assert "10 versions" in capsys.readouterr().out
    objects = sorted((tmp_path / "run/weights/one/objects").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(objects[-1].read_bytes())
    data[-1] ^= 1
    objects[-1].write_bytes(bytes(data))
    assert main(["weights", "verify", run, "--json"]) == 5
    (report,) = lines(capsys)
    assert report["problems"]
    assert any("is damaged" in problem["what"] for problem in report["problems"])


def test_a_version_becomes_a_model_directory(run, capsys, tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    arguments = ["weights", "materialise", run, "4", "--to", str(tmp_path / "model"), "--files-from", str(base)]
    assert main([*arguments, "--json"]) == 0
    (state,) = lines(capsys)
    assert (state["version"], state["step"], state["state"]) == (4, 8, "ready")
    found = load_file(tmp_path / "model/model.safetensors")
    assert torch.equal(found["w"], weights(4)["w"].bfloat16())
    assert (tmp_path / "model/config.json").read_text() == "{}"


def test_what_would_go_is_named_and_what_goes_is_gone(run, capsys):
    assert main(["weights", "gc", run, "--keep", "1", "--dry-run", "--json"]) == 0
    (looked,) = lines(capsys)
    assert main(["weights", "gc", run, "--keep", "1", "--grace", "0"]) == 0
    assert f"floor one/{looked['floor']}, 0 readers" in capsys.readouterr().out
    assert main(["weights", "verify", run]) == 0
    capsys.readouterr()
    assert main(["weights", "ls", run, "--json"]) == 0
    assert min(row["version"] for row in lines(capsys)[1:]) >= looked["floor"]


def test_following_once_brings_the_directory_to_the_head(run, capsys, tmp_path):
    model = str(tmp_path / "model")
    assert main(["weights", "follow", run, "--to", model, "--once", "--json"]) == 0
    assert [row["version"] for row in lines(capsys)] == [9]
    assert main(["weights", "follow", run, "--to", model, "--once", "--cache", str(tmp_path / "cache")]) == 0
    assert "is version 9 (step 18, lineage one" in capsys.readouterr().out


def test_a_store_that_fails_a_tenth_of_the_calls_is_followed_all_the_same(run, capsys, tmp_path):
    url = f"faulty+file://{run}?fail=0.1"
    assert main(["weights", "follow", url, "--to", str(tmp_path / "model"), "--once", "--json"]) == 0
    assert [row["version"] for row in lines(capsys)] == [9]


def test_following_a_run_that_has_published_nothing_once_says_so(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    arguments = ["weights", "follow", str(tmp_path / "run"), "--to", str(tmp_path / "model"), "--once"]
    assert main(arguments) == 2
    assert "nothing is published" in capsys.readouterr().err


def test_a_view_that_is_not_published_is_told(run, capsys):
    assert main(["weights", "ls", run, "--view", "fp8"]) == 2
    assert "views/fp8" in capsys.readouterr().err


def test_a_damaged_head_is_refused_with_its_name(run, capsys):
    asyncio.run(open_store(run).put(HEAD_KEY, b"{"))
    assert main(["weights", "ls", run]) == 4
    assert "weights/head is damaged" in capsys.readouterr().err


def test_a_service_manager_ends_it_cleanly_and_its_lease_is_given_back(run, tmp_path):
    code = "import sys; from etude.cli.main import main; sys.exit(main(sys.argv[1:]))"
    arguments = [
        "weights",
        "follow",
        run,
        "--to",
        str(tmp_path / "model"),
        "--json",
        "--reader",
        "me",
        "--poll",
        "0.05",
    ]
    with subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE) as process:
        assert msgspec.json.decode(process.stdout.readline())["version"] == 9
        leases = tmp_path / "run/weights/readers"
        assert [path.name for path in leases.iterdir()] == ["me.json"]
        process.send_signal(signal.SIGTERM)
        until = time.monotonic() + 30
        assert process.wait(until - time.monotonic()) == 0
    assert not leases.exists()
