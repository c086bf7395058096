# pyright: basic
import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from etude.environments.local import LocalBackend
from etude.errors import SandboxError
from etude.interfaces import Environment, EnvironmentBackend

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def sh(environment, script, *, user="agent", timeout_s=10.0, **options):
    return await environment.execute(["/bin/sh", "-c", script], timeout_s=timeout_s, user=user, **options)


def run_on_host(script: str) -> bytes:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout


async def test_a_command_runs_in_the_workdir_as_the_agent_with_the_tasks_files_and_variables(backend, make_task):
    task = make_task({"a.py": "x = 1\n"}, env={"COLOUR": "red"})
    async with backend.create(task) as environment:
        assert isinstance(environment, Environment)
        result = await sh(environment, "cat a.py; echo $COLOUR $EXTRA; echo oops >&2; exit 3", env={"EXTRA": "e"})
    assert result.stdout == b"x = 1\nred e\n"
    assert (result.stderr, result.exit_code, result.timed_out, result.truncated) == (b"oops\n", 3, False, False)


async def test_agent_and_root_are_two_users_and_neither_has_rights_on_the_host(contained, make_task):
    if not contained.capabilities.user_isolated:
        pytest.skip("; ".join(contained.limitations))
    async with contained.create(make_task()) as environment:
        agent = await sh(environment, "id -u; touch /logs/verifier/x; touch /app/mine")
        root = await sh(
            environment, "id -u; touch /logs/verifier/x && rm /app/mine && chown agent /logs/verifier/x", user="root"
        )
        escapes = [
            await sh(environment, script, user="root")
            for script in ("touch /usr/x", "mount -t tmpfs x /tmp", "mknod /tmp/d b 8 0", "chroot / true")
        ]
    assert agent.stdout == b"1000\n"
    assert b"Permission denied" in agent.stderr
    assert (root.stdout, root.stderr) == (b"0\n", b"")
    assert all(escape.exit_code for escape in escapes)


async def test_nothing_of_the_host_is_in_sight(contained, make_task, tmp_path, monkeypatch):
    monkeypatch.setenv("HOST_SECRET", "s3cr3t")
    (tmp_path / "host-file").write_text("secret")
    async with contained.create(make_task()) as environment:
        script = f"""
        ls /proc | grep -c '^[0-9]*$'
        cat /proc/*/environ | tr '\\0' '\\n' | grep -c SECRET
        test -e {tmp_path} || echo unseen
        test -e {Path(__file__)} || echo unseen
        tr '\\0' ' ' < /proc/1/cmdline; echo
        head -c 1 /proc/1/mem || echo sealed
        ls /proc/1/fd || echo sealed
        """
        result = await sh(environment, script)
        as_root = await sh(environment, script, user="root")
    for seen in (result, as_root):
        lines = seen.stdout.decode().splitlines()
        assert int(lines[0]) <= 6
        assert lines[1:4] == ["0", "unseen", "unseen"]
        assert lines[4].startswith("/sbin/init")
        assert lines[5:] == ["sealed", "sealed"]


async def test_the_kernels_ways_out_are_refused_in_the_sandbox_and_open_without_the_filter(contained, make_task):
    script = textwrap.dedent("""
        import ctypes, platform, socket
        libc = ctypes.CDLL(None, use_errno=True)
        machines = {"x86_64": (272, 321, 425, 250, 304, 165), "aarch64": (97, 280, 425, 219, 265, 40)}
        numbers = machines[platform.machine()]
        print(sum(libc.syscall(n, 0x10000000, 0, 0, 0, 0) == -1 and ctypes.get_errno() == 1 for n in numbers))
        refused = 0
        for family in (socket.AF_VSOCK, socket.AF_PACKET, socket.AF_ALG):
            try: socket.socket(family, socket.SOCK_STREAM)
            except OSError as error: refused += error.errno == 97
        print(refused)
    """)
    async with contained.create(make_task()) as environment:
        for user in ("agent", "root"):
            result = await environment.execute(["python3", "-c", script], timeout_s=10, user=user)
            assert result.stdout.split() == [b"6", b"3"], result
    assert run_on_host(script).split() != [b"6", b"3"]


async def test_the_network_is_not_reachable(contained, make_task):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        script = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
        run_on_host(script)
        async with contained.create(make_task()) as environment:
            assert environment.model_url == ""
            inside = await environment.execute(["python3", "-c", script], timeout_s=10)
            away = await environment.execute(["python3", "-c", script.replace("127.0.0.1", "192.0.2.1")], timeout_s=10)
    assert b"ConnectionRefusedError" in inside.stderr
    assert b"Network is unreachable" in away.stderr


async def test_the_model_api_and_only_that_is_reached_from_inside(contained, make_task):
    async def answer(reader, writer):
        line = await reader.readline()
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nyou sent " + line)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, contained.create(make_task(), model_port=port) as environment:
        assert environment.model_url == "http://127.0.0.1:8080/v1"
        script = f"import urllib.request as u; print(u.urlopen('{environment.model_url}/models').read())"
        results = await asyncio.gather(
            *(environment.execute(["python3", "-I", "-c", script], timeout_s=10) for _ in range(2))
        )
        other = await environment.execute(["python3", "-I", "-c", script.replace("8080", str(port))], timeout_s=10)
    assert [result.stdout for result in results] == [b"b'you sent GET /v1/models HTTP/1.1\\r\\n'\n"] * 2
    assert b"refused" in other.stderr


async def test_a_model_that_is_not_there_is_the_sandboxs_error_and_not_what_the_command_made_of_it(
    contained, make_task, unused_tcp_port
):
    async with contained.create(make_task(), model_port=unused_tcp_port) as environment:
        script = "import socket; print(socket.create_connection(('127.0.0.1', 8080), 5).recv(1))"
        with pytest.raises(SandboxError, match=f"port {unused_tcp_port} of this host"):
            await environment.execute(["python3", "-c", script], timeout_s=10)


async def test_the_deadline_kills_the_whole_tree_and_keeps_what_was_printed(backend, make_task):
    async with backend.create(make_task()) as environment:
        script = "echo before; setsid sleep 1000 & (setsid nohup sleep 1001 &) ; sleep 1002"
        result = await sh(environment, script, timeout_s=0.5)
        left = await sh(environment, "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c '[s]leep 100'")
    assert (result.timed_out, result.stdout, result.exit_code) == (True, b"before\n", -signal.SIGKILL)
    assert result.seconds < 5
    assert left.stdout == b"0\n"


async def test_no_process_outlives_its_command(backend, make_task):
    async with backend.create(make_task()) as environment:
        result = await sh(environment, "(setsid nohup sh -c 'sleep 0.2; touch late' >/dev/null 2>&1 &); echo done")
        later = await sh(environment, "sleep 0.5; ls")
    assert result.stdout == b"done\n"
    assert later.stdout == b"solution.py\n"


async def test_output_beyond_the_limit_is_cut_and_said(backend, make_task):
    async with backend.create(make_task()) as environment:
        result = await sh(environment, "yes | head -c 5000000; echo end >&2", max_output_bytes=1000)
        exact = await sh(environment, "yes | head -c 1000", max_output_bytes=1000)
    assert (len(result.stdout), result.stderr, result.truncated) == (1000, b"end\n", True)
    assert (len(exact.stdout), exact.truncated) == (1000, False)


async def test_a_program_that_cannot_start_says_so(backend, make_task):
    async with backend.create(make_task()) as environment:
        result = await environment.execute(["no-such-program"], timeout_s=5)
        folder = await environment.execute(["true"], timeout_s=5, cwd="/nowhere")
        with pytest.raises(SandboxError, match="no user 'admin'"):
            await environment.execute(["true"], timeout_s=5, user="admin")
        assert (await environment.execute(["true"], timeout_s=5)).exit_code == 0
    assert result.exit_code == folder.exit_code == 127
    assert b"no-such-program" in result.stderr
    assert b"/nowhere" in folder.stderr


async def test_bombs_do_not_take_the_sandbox_with_them(contained, make_task):
    capabilities = contained.capabilities
    if not (capabilities.memory_limited and capabilities.pids_limited and capabilities.disk_limited):
        pytest.skip("; ".join(contained.limitations))
    async with contained.create(make_task(memory_mb=96, storage_mb=8)) as environment:
        forks = await sh(environment, "b() { b | b & }; b; sleep 0.5", timeout_s=3)
        memory = await environment.execute(["python3", "-c", "bytearray(1 << 30)"], timeout_s=10)
        disk = await sh(
            environment, "head -c 200000000 /dev/zero > big; head -c 200000000 /dev/zero > /tmp/big; rm -f big"
        )
        names = await environment.execute(
            ["python3", "-c", "for n in range(100000): open(f'/tmp/{n}', 'w').close()"], timeout_s=10
        )
        alive = await sh(environment, "rm -rf /tmp/*; echo alive")
    assert forks.stderr or forks.timed_out
    assert (memory.exit_code, memory.out_of_memory, forks.out_of_memory) == (-signal.SIGKILL, True, False)
    assert disk.stderr
    assert b"No space left" in names.stderr
    assert alive.stdout == b"alive\n"


async def test_the_first_process_cannot_be_killed_or_traced_from_inside(contained, make_task):
    async with contained.create(make_task()) as environment:
        for user in ("agent", "root"):
            await sh(environment, "kill -9 1; kill -STOP 1; kill -9 -1", user=user)
            assert (await sh(environment, "echo alive", user=user)).stdout == b"alive\n"


async def test_mounts_are_shown_read_only(make_task, tmp_path):
    harness = tmp_path / "harness"
    harness.mkdir()
    (harness / "mini.py").write_text("print('hello')\n")
    backend = await LocalBackend.start(mounts={"/opt/harness": harness})
    try:
        async with backend.create(make_task()) as environment:
            result = await environment.execute(["python3", "-I", "-S", "/opt/harness/mini.py"], timeout_s=10)
            write = await sh(environment, "echo x > /opt/harness/mini.py", user="root")
    finally:
        await backend.close()
    assert result.stdout == b"hello\n"
    assert write.exit_code
    assert (harness / "mini.py").read_text() == "print('hello')\n"


async def test_sandboxes_do_not_see_each_other(contained, make_task):
    task = make_task()
    async with contained.create(task) as one, contained.create(task) as other:
        await sh(one, "echo 1 > /tmp/x; echo 2 > solution.py")
        seen = await sh(other, "ls /tmp; cat solution.py")
        assert one.environment_id != other.environment_id
    assert seen.stdout == b"x = 1\n"


async def test_a_sandbox_is_of_no_use_after_its_block(backend, make_task):
    async with backend.create(make_task()) as environment:
        pass
    with pytest.raises(SandboxError, match="closed"):
        await environment.execute(["true"], timeout_s=5)


async def test_a_request_that_is_broken_off_spoils_the_sandbox_instead_of_mixing_answers(backend, make_task):
    async with backend.create(make_task()) as environment:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await environment.execute(["sleep", "60"], timeout_s=60)
        with pytest.raises(SandboxError, match="broken off"):
            await environment.execute(["true"], timeout_s=5)


def leftovers(zygote: int, name: str) -> list[str]:
    """The zygote, its sandboxes, commands that name it, and the backend's control groups and directories."""
    group = f"etude-sandboxes-{name}"
    # Unlike a glob, a walk is not stopped by the groups of other sandboxes that vanish under it.
    found = [f"{parent}/{group}" for parent, groups, _ in os.walk("/sys/fs/cgroup") if group in groups]
    found += [str(root) for root in Path("/dev/shm").glob(f"etude-sandbox-{name}-*")]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            session = int((process / "stat").read_text().rpartition(")")[2].split()[3])
            command = (process / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if session == zygote or f"{zygote}000" in command:
            found.append(f"{process.name}: {command}")
    return found


OWNER = """
import asyncio, sys
from etude.environments.local import LocalBackend
from etude.types import Task

async def main():
    backend = await LocalBackend.start(namespaces=sys.argv[2] == "True")
    task = Task(task_id="t", path=sys.argv[1], digest="d", instruction="")
    nap = f"sleep {backend.process_id}000"
    async with backend.create(task) as one, backend.create(task, model_port=9) as other:
        await other.execute(["true"], timeout_s=9)
        print(backend.process_id, backend.name, flush=True)
        await one.execute(["sh", "-c", f"setsid {nap} & (setsid nohup {nap} &) ; {nap}"], timeout_s=1000)

asyncio.run(main())
"""


@pytest.mark.parametrize("namespaces", [True, False])
async def test_nothing_is_left_when_the_owner_is_killed(make_task, namespaces):
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNER, make_task().path, str(namespaces), stdout=asyncio.subprocess.PIPE
    )
    assert owner.stdout
    zygote, name = (await owner.stdout.readline()).decode().split()
    async with asyncio.timeout(60):
        while sum(f"{zygote}000" in line for line in leftovers(int(zygote), name)) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    owner.kill()
    await owner.wait()
    async with asyncio.timeout(60):
        while leftovers(int(zygote), name):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_close_destroys_every_sandbox_before_it_returns(make_task):
    backend: EnvironmentBackend = await LocalBackend.start()
    zygote = backend.process_id
    opened = backend.create(make_task())
    environment = await opened.__aenter__()
    running = asyncio.create_task(environment.execute(["sleep", "1000"], timeout_s=1000))
    await asyncio.sleep(0)
    await backend.close()
    with pytest.raises(SandboxError):
        await running
    await opened.__aexit__(None, None, None)
    assert leftovers(zygote, backend.name) == []
