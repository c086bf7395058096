# pyright: basic
"""Processes of a run: they come up or say why not, and never outlive it."""

import asyncio
import os
import signal
import sys

import pytest

from etude.errors import RunError
from etude.runtime.children import child, etude_command
from etude.runtime.directory import RunDirectory
from etude.runtime.settings import load_settings
from etude.runtime.watch import watching

PATIENT = "import sys; print('hello', 'ready http://127.0.0.1:1', sep=chr(10), flush=True); sys.stdin.read()"
STUBBORN = "import time; print('ready x', flush=True); time.sleep(1000)"
NO_BIRTH = "import sys; print('warming up', file=sys.stderr, flush=True); sys.stdin.read()"


def program(code):
    return (sys.executable, "-c", code)


def is_running(process_id):
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_child_says_where_it_serves_and_is_gone_after_the_block(tmp_path):
    async with child("helper", program(PATIENT), log=tmp_path / "logs/helper.log") as helper:
        await helper.wait_until_ready(30)
        assert helper.url == "http://127.0.0.1:1"
        assert is_running(helper.process_id)
    assert not is_running(helper.process_id)


async def test_a_child_that_ends_early_is_quoted_and_its_log_named(tmp_path):
    code = "import sys; sys.exit('first line\\nerror: no such thing')"
    with pytest.raises(RunError) as caught:
        async with child("helper", program(code), log=tmp_path / "helper.log") as helper:
            await helper.wait_until_ready(30)
    expected = "the helper ended with exit code 1 before it was ready. It said: no such thing"
    assert str(caught.value) == f"{expected} (its log is {tmp_path}/helper.log)"
    assert (tmp_path / "helper.log").read_text() == "first line\nerror: no such thing\n"
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(("code", "expected"), [(1, 1), (2, 2), (4, 4), (3, 1), (77, 1)])
async def test_a_child_whose_exit_code_blames_user_or_machine_passes_it_on(tmp_path, code, expected):
    with pytest.raises(RunError, match="It said: nothing") as caught:
        async with child("helper", program(f"raise SystemExit({code})"), log=tmp_path / "log") as helper:
            await helper.wait_until_ready(30)
    assert caught.value.exit_code == expected


async def test_a_child_that_never_comes_up_is_given_up_and_ended(tmp_path):
    with pytest.raises(RunError, match=r"the helper did not come up within 1 s\. It said: warming up \(its log is"):
        async with child("helper", program(NO_BIRTH), log=tmp_path / "log") as helper:
            await helper.wait_until_ready(1)
    assert not is_running(helper.process_id)


async def test_a_real_sampler_that_finds_no_run_says_so(tmp_path):
    command = etude_command("serve-sampler", str(tmp_path / "run"), "--pool", "exact")
    with pytest.raises(
        RunError, match=r"the sampler ended with exit code 4 before it was ready\. It said: .*run\.toml"
    ):
        async with child("sampler", command, log=tmp_path / "log") as sampler:
            await sampler.wait_until_ready(60)


async def test_a_sampler_that_still_waits_for_weights_ends_as_soon_as_it_is_asked_to(tmp_path):
    (tmp_path / "recipe.toml").write_text("")
    await RunDirectory.open(str(tmp_path / "run")).adopt(load_settings(tmp_path / "recipe.toml", (), {}))
    command = etude_command("serve-sampler", str(tmp_path / "run"), "--pool", "local")
    async with child("sampler", command, log=tmp_path / "log") as sampler:
        with pytest.raises(RunError, match="did not come up within 6 s"):
            await sampler.wait_until_ready(6)
    with pytest.raises(RunError, match="the sampler ended with exit code 0"):
        await sampler.watch()


async def kill_and_wait(helper):
    os.kill(helper.process_id, signal.SIGKILL)
    await asyncio.Event().wait()


async def kill_and_break(helper):
    os.kill(helper.process_id, signal.SIGKILL)
    raise RunError("connection lost")


@pytest.mark.parametrize("block", [kill_and_wait, kill_and_break])
async def test_the_end_of_a_child_ends_what_relies_on_it_and_explains_it(tmp_path, block):
    async with child("helper", program(PATIENT), log=tmp_path / "log") as helper:
        await helper.wait_until_ready(30)
        with pytest.raises(RunError, match="the helper ended with exit code -9"):
            async with watching([helper]):
                await block(helper)


async def test_other_errors_of_a_watched_block_come_through_as_they_are(tmp_path):
    async with child("helper", program(PATIENT), log=tmp_path / "log") as helper:
        await helper.wait_until_ready(30)
        with pytest.raises(ZeroDivisionError):
            async with watching([helper]):
                raise ZeroDivisionError
        async with watching([helper]):
            pass
        assert is_running(helper.process_id)


PARENT = """
import asyncio, sys
from pathlib import Path
from etude.runtime.children import child

PATIENT = '''
import asyncio
from etude.runtime.children import say_ready, until_parent_gone
say_ready("here")
asyncio.run(until_parent_gone(asyncio.Event().wait()))
'''

async def main():
    async with child("grandchild", (sys.executable, "-c", PATIENT), log=Path(sys.argv[1])) as one:
        await one.wait_until_ready(60)
        print(one.process_id, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_children_end_when_their_parent_is_killed(tmp_path):
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, str(tmp_path / "log"), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout
    grandchild = int(await parent.stdout.readline())
    assert is_running(grandchild)
    parent.kill()
    await parent.wait()
    async with asyncio.timeout(30):
        while is_running(grandchild):  # noqa: ASYNC110 nobody is told when a foreign process ends
            await asyncio.sleep(0.02)
