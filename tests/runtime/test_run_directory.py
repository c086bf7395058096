# pyright: basic
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.config import RunConfig
from etude.errors import ConfigError, PolicyError
from etude.runtime.directory import EvalSummary, RunDirectory, Summary
from etude.runtime.settings import load_settings
from etude.store.opening import open_store


def settings(tmp_path, *overrides):
    file = tmp_path / "recipe.toml"
    file.write_text("")
    return load_settings(file, overrides, {})


async def test_a_new_directory_takes_the_configuration_and_gives_it_back(tmp_path):
    run = RunDirectory.open(str(tmp_path / "run"))
    wanted = settings(tmp_path, "trainer.lr=0.5", 'tasks.family="pyfix"')
    await run.adopt(wanted)
    assert await RunDirectory.open(f"file://{tmp_path}/run").config() == wanted.config


@pytest.mark.parametrize("change", ["run.seed=7", "policy.path=/else", 'tasks.family="pyfix"', "policy.shape.layers=9"])
async def test_a_configuration_of_another_run_is_refused_and_nothing_is_written(tmp_path, change):
    run = RunDirectory.open(str(tmp_path / "run"))
    await run.adopt(settings(tmp_path))
    before = (tmp_path / "run/run.toml").read_bytes()
    with pytest.raises(ConfigError, match=r"another (run\.seed|policy\.path|tasks\.family|policy\.shape): choose"):
        await run.adopt(settings(tmp_path, change))
    assert (tmp_path / "run/run.toml").read_bytes() == before


async def test_how_a_run_is_trained_may_change_and_is_recorded(tmp_path):
    run = RunDirectory.open(str(tmp_path / "run"))
    await run.adopt(settings(tmp_path))
    await run.adopt(settings(tmp_path, "trainer.steps=99", f"run.url={tmp_path}/moved"))
    assert tomllib.loads((tmp_path / "run/run.toml").read_text())["trainer"]["steps"] == 99


@pytest.mark.parametrize("content", [b"\xff", b"not toml", b"[run]\nseed = 1\n[run]\n"])
async def test_a_run_toml_that_cannot_be_read_is_refused_by_name(tmp_path, content):
    run = RunDirectory.open(str(tmp_path / "run"))
    (tmp_path / "run/run.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"run/run\.toml cannot be read"):
        await run.adopt(settings(tmp_path))


async def test_a_run_toml_without_what_is_fixed_is_another_run(tmp_path):
    run = RunDirectory.open(str(tmp_path / "run"))
    (tmp_path / "run/run.toml").write_text("run = 3\n")
    with pytest.raises(ConfigError, match=r"another run\.seed, "):
        await run.adopt(settings(tmp_path))


RATES = st.none() | st.floats(0, 1)
EVALS = st.builds(
    EvalSummary,
    pass_rate=RATES,
    attempts=st.integers(1, 9),
    tasks=st.integers(1, 99),
    interval=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    version=st.integers(0, 99),
)


@given(st.dictionaries(st.sampled_from(["before", "after"]), EVALS), st.dictionaries(st.text(), st.floats(0, 9e9)))
async def test_a_summary_reads_back(evals, stages):
    run = RunDirectory.open("memory://")
    assert await run.summary(seed=3) == Summary(seed=3)
    written = Summary(seed=3, seconds=1.5, stages=stages, eval=evals)
    await run.write_summary(written)
    assert await run.summary(seed=3) == written


async def test_the_policy_of_the_latest_stage_is_started_from(tmp_path):
    run = RunDirectory.open(str(tmp_path / "run"))
    for stage in ("pretrain", "sft"):
        (tmp_path / f"run/policy/{stage}").mkdir(parents=True)
        (tmp_path / f"run/policy/{stage}/config.json").write_text("{}")
        assert await run.starting_policy(RunConfig()) == tmp_path / f"run/policy/{stage}"
    assert await run.starting_policy(RunConfig(), ("pretrain",)) == tmp_path / "run/policy/pretrain"


async def test_without_a_stage_the_configured_model_is_started_from(tmp_path):
    run = RunDirectory.open(str(tmp_path / "run"))
    with pytest.raises(ConfigError, match="no policy yet: run etude pretrain"):
        await run.starting_policy(RunConfig())
    config = RunConfig.model_validate({"policy": {"path": str(tmp_path / "model")}})
    with pytest.raises(PolicyError, match=r"model' has no config\.json"):
        await run.starting_policy(config)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    assert await run.starting_policy(config) == tmp_path / "model"


async def test_metrics_of_a_run_far_away_go_with_it_from_machine_to_machine(tmp_path, monkeypatch):
    store = open_store("memory://")
    for cache, row in (("one", b"1\n"), ("two", b"2\n"), ("one", b"3\n")):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / cache))
        run = RunDirectory("memory://far", store)
        with (await run.fetch_metrics()).open("ab") as file:
            file.write(row)
        await run.keep_metrics()
    assert await store.get("metrics.jsonl") == b"1\n2\n3\n"


async def test_a_run_far_away_keeps_its_policies_in_the_store_and_copies_them_here(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = RunDirectory.open("memory://far")
    made = tmp_path / "made"
    made.mkdir()
    (made / "config.json").write_text("{}")
    await run.upload(made, "policy/sft")
    here = await run.starting_policy(RunConfig())
    assert here.is_relative_to(tmp_path / "cache/etude/runs")
    assert (here / "config.json").read_text() == "{}"
