# pyright: basic
"""What dies takes nothing else with it, and leaves nothing behind."""

import asyncio
import contextlib
import os
import resource
import signal
from pathlib import Path

import pytest
from sandbox_kit import fresh_nap, naps, owner, runs, until

from etude.environments.census import living
from etude.environments.cgroups import group_directories
from etude.environments.keeper import RestartBudget
from etude.environments.lease import HeldLease, lease_directory, lease_of_this_process, leases
from etude.environments.local import LocalBackend
from etude.environments.reaping import gone, reap
from etude.errors import SandboxError, StoreError
from etude.telemetry.clock import ManualClock
from etude.telemetry.doubles import MemoryLedger
from etude.telemetry.events import SandboxCreated, SandboxDestroyed

pytestmark = pytest.mark.asyncio(loop_scope="module")


def created(ledger) -> set[str]:
    return {event.sandbox for event in ledger.events if isinstance(event, SandboxCreated)}


def destroyed(ledger) -> dict[str, str]:
    return {event.sandbox: event.reason for event in ledger.events if isinstance(event, SandboxDestroyed)}


@pytest.mark.parametrize("namespaces", [True, False])
async def test_the_death_of_a_first_process_fails_its_sandbox_and_no_other(make_task, namespaces):
    ledger, nap = MemoryLedger(), fresh_nap()
    backend = await LocalBackend.start(namespaces=namespaces, ledger=ledger)
    try:
        async with backend.create(make_task()) as victim, backend.create(make_task(name="b")) as other:
            running = asyncio.create_task(
                victim.execute(["sh", "-c", f"setsid sleep {nap} & sleep {nap}"], timeout_s=99)
            )
            await until(lambda: len(naps(nap)) == 2)
            os.kill(victim.process_id, signal.SIGKILL)
            with pytest.raises(SandboxError, match="died during run"):
                await running
            assert (await other.execute(["echo", "alive"], timeout_s=9)).stdout == b"alive\n"
            await until(lambda: victim.environment_id in destroyed(ledger))
            assert other.environment_id not in destroyed(ledger)
            assert not naps(nap)
    finally:
        await backend.close()
    assert created(ledger) == destroyed(ledger).keys()


@pytest.mark.parametrize("namespaces", [True, False])
async def test_a_launcher_that_dies_fails_what_it_had_started_and_the_next_sandbox_has_a_new_one(make_task, namespaces):
    ledger, nap = MemoryLedger(), fresh_nap()
    backend = await LocalBackend.start(namespaces=namespaces, ledger=ledger)
    first = backend.process_id
    try:
        async with backend.create(make_task()) as running:
            busy = asyncio.create_task(running.execute(["sh", "-c", f"setsid sleep {nap} & sleep {nap}"], timeout_s=99))
            await until(lambda: len(naps(nap)) == 2)
            os.kill(first, signal.SIGKILL)
            with pytest.raises(SandboxError, match="launcher of all sandboxes died"):
                await busy
        async with backend.create(make_task(name="b")) as environment:
            assert backend.process_id not in (0, first)
            assert destroyed(ledger)[running.environment_id] == "launcher_died"
            assert not runs(running.process_id)
            assert not naps(nap)
            assert (await environment.execute(["echo", "again"], timeout_s=9)).stdout == b"again\n"
            (population,) = [one for one in living() if one.backend == backend.name]
            assert (population.launcher, population.sandboxes) == (backend.process_id, (environment.process_id,))
    finally:
        await backend.close()
    assert created(ledger) == destroyed(ledger).keys()
    assert backend.name not in {lease.backend for lease, _ in leases()}


async def test_restarts_have_a_budget_and_growing_pauses():
    clock = ManualClock()
    budget = RestartBudget(clock)
    moments = []
    while await budget.spend():
        moments.append(clock.now())
    pauses = [after - before for before, after in zip([0.0, *moments], moments, strict=False)]
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6])
    clock.advance(601)
    assert await budget.spend()


async def test_a_launcher_beyond_its_budget_ends_in_an_error_that_says_so(make_task):
    clock = ManualClock()
    backend = await LocalBackend.start(clock=clock)
    try:
        task = make_task()
        for _ in range(6):
            async with backend.create(task):
                os.kill(backend.process_id, signal.SIGKILL)
                await until(lambda: backend.process_id == 0)
        with pytest.raises(SandboxError, match="died more than 5 times within 10 minutes"):
            await backend.create(task).__aenter__()
    finally:
        await backend.close()


@pytest.mark.parametrize("namespaces", [True, False])
async def test_reaping_removes_what_the_dead_left_and_nothing_of_the_living(make_task, tmp_path, namespaces):
    dead = await owner(make_task(), run=tmp_path / "a", namespaces=namespaces)
    alive = await owner(make_task(name="b"), run=tmp_path / "b", namespaces=namespaces)
    try:
        os.kill(dead.first, signal.SIGSTOP)  # the worst case: nobody is left to notice, nor to clean up
        os.kill(dead.launcher, signal.SIGKILL)
        await dead.kill()
        lives = {lease.backend: lives for lease, lives in leases()}
        assert (lives[dead.backend], lives[alive.backend]) == (False, True)
        sandboxes = {dead.sandbox, alive.sandbox, "from-elsewhere-7"}
        assert await asyncio.to_thread(gone, sandboxes) == sandboxes - {alive.sandbox}
        assert not naps(dead.nap)
        assert not runs(dead.first)
        assert len(naps(alive.nap)) == 2
        (population,) = living(str(tmp_path / "b"))
        assert (population.owner, population.launcher) == (alive.process.pid, alive.launcher)
        assert population.sandboxes == (alive.first,)
        assert dead.backend not in {lease.backend for lease, _ in leases()}
    finally:
        await alive.kill()
    await until(lambda: not naps(alive.nap))
    await asyncio.to_thread(reap)
    assert not {dead.backend, alive.backend} & {lease.backend for lease, _ in leases()}


async def test_a_file_in_the_place_of_a_lease_is_nobodys_and_hurts_nobody(tmp_path):
    path = lease_directory() / "not-a-lease.json"
    path.write_bytes(b"{")
    try:
        held = HeldLease(lease_of_this_process("test-of-leases", run=""))
        assert ("test-of-leases", True) in {(lease.backend, lives) for lease, lives in leases()}
        assert "test-of-leases" not in await asyncio.to_thread(reap)
        held.release()
        assert "test-of-leases" not in {lease.backend for lease, _ in leases()}
    finally:
        path.unlink()


async def test_a_name_is_in_the_ledger_before_its_sandbox_exists(make_task):
    class Full(MemoryLedger):
        async def flush_local(self):
            raise StoreError("disk full")

    ledger = Full()
    with pytest.raises(StoreError, match="disk full"):
        await LocalBackend.start(ledger=ledger)
    assert created(ledger) == destroyed(ledger).keys()


async def test_too_many_open_files_here_are_an_error_of_the_sandbox_that_says_what_to_do(backend, make_task):
    task = make_task()
    async with backend.create(task):
        pass
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        with pytest.raises(SandboxError, match="raise ulimit -n"):
            await backend.create(task).__aenter__()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held:
            os.close(descriptor)
    async with backend.create(task) as environment:
        assert (await environment.execute(["true"], timeout_s=9)).exit_code == 0


async def test_a_launcher_without_room_says_so_and_goes_on_when_there_is_some(make_task):
    task = make_task()
    backend = await LocalBackend.start()
    try:
        limits = resource.prlimit(backend.process_id, resource.RLIMIT_NOFILE)
        resource.prlimit(backend.process_id, resource.RLIMIT_NOFILE, (4, limits[1]))
        with pytest.raises(SandboxError, match="too many open files"):
            await backend.create(task).__aenter__()
        resource.prlimit(backend.process_id, resource.RLIMIT_NOFILE, limits)
        async with backend.create(task) as environment:
            assert (await environment.execute(["true"], timeout_s=9)).exit_code == 0
    finally:
        await backend.close()


async def test_a_control_group_that_cannot_be_made_is_an_error_of_that_sandbox_alone(make_task):
    task, ledger = make_task(), MemoryLedger()
    backend = await LocalBackend.start(ledger=ledger)
    try:
        if not (groups := [path for path in map(Path, group_directories(backend.name)) if path.is_dir()]):
            pytest.skip("no control groups can be made on this host")
        taken = groups[0] / f"{backend.name}-{len(created(ledger))}"
        taken.mkdir()
        with pytest.raises(SandboxError, match="see that control groups, open files, processes and memory"):
            await backend.create(task).__aenter__()
        await until(lambda: not taken.exists())
        async with backend.create(task) as environment:
            assert (await environment.execute(["true"], timeout_s=9)).exit_code == 0
    finally:
        await backend.close()
    assert created(ledger) == destroyed(ledger).keys()


async def test_a_full_sandbox_names_the_limit_of_its_task(contained, make_task):
    async with contained.create(make_task(storage_mb=1)) as environment:
        with pytest.raises(SandboxError, match="storage_mb is used up"):
            await environment.upload({f"/app/{number}": bytes(1 << 24) for number in range(5)})
        assert (await environment.execute(["rm", "-rf", "/app/0"], timeout_s=9, user="root")).exit_code == 0
