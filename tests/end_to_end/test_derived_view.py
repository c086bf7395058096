# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false
"""A run in which one pool follows the chain of its view."""

import asyncio

from click.testing import CliRunner
from run_kit import gone, processes_of, start

from etude.cli.weights_forecast import forecast
from etude.store.opening import open_store
from etude.weights.derived import view_keys
from etude.weights.reader import load_head, read_head


async def test_a_pool_follows_the_view_that_the_run_derives_for_it(coin, tmp_path):
    run = tmp_path / "run"
    settings = ("pools.rounded.view=fp8", "pools.rounded.view_source=derived", "trainer.steps=2", "eval.attempts=1")
    command = await start("run", coin, run, *settings)
    await command.until_step(1)
    assert any("serve-deriver" in words for words in processes_of(run).values())
    assert await command.end() == 0, command.errors
    await gone(run)
    verify = await asyncio.create_subprocess_exec(
        *("python", "-m", "etude.cli.main", "verify", str(run)), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await verify.communicate()
    assert verify.returncode == 0, output.decode()
    store = open_store(str(run))
    policy, view = await read_head(store), await read_head(store, keys=view_keys("fp8"))
    assert (view.lineage, view.version) == (policy.lineage, policy.version)
    assert (await load_head(store, view, keys=view_keys("fp8"))).source == policy.digest
    shown = await asyncio.to_thread(CliRunner().invoke, forecast, [str(run)])
    assert shown.exit_code == 0, shown.output
    assert "times the forecast" in shown.output
