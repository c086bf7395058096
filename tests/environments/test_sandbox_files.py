# pyright: basic
import pytest

from etude.errors import SandboxError

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def sh(environment, script, user="agent"):
    result = await environment.execute(["/bin/sh", "-c", script], timeout_s=10, user=user)
    assert result.exit_code == 0, result
    return result.stdout.decode()


async def test_uploaded_files_belong_to_the_owner_of_their_directory(contained, make_task):
    async with contained.create(make_task()) as environment:
        files = {"/app/a/b/mine.sh": b"#!/bin/sh\necho ran\n", "/tests/deep/root": b"r", "/tmp/t": b"t"}
        await environment.upload(files, executable=frozenset({"/app/a/b/mine.sh"}))
        assert await sh(environment, "./a/b/mine.sh; stat -c %U a/b /tests/deep/root") == "ran\nagent\nroot\n"
        await environment.upload({"/app/a/b/mine.sh": b"#!/bin/sh\necho again\n"})
        assert await sh(environment, "./a/b/mine.sh") == "again\n"


@pytest.mark.parametrize("path", ["relative", "/", "/app/../etc/x", "", "/app/\0", "/etc/passwd", "/usr/x", "/proc/x"])
async def test_an_upload_to_an_unsafe_or_protected_path_is_refused(contained, make_task, path):
    async with contained.create(make_task()) as environment:
        with pytest.raises(SandboxError):
            await environment.upload({path: b""})
        assert await sh(environment, "echo alive") == "alive\n"


async def test_uploads_replace_links_and_special_files_and_never_follow_them(contained, make_task):
    async with contained.create(make_task()) as environment:
        await sh(environment, "echo safe > victim; ln -s /app/victim link; mkfifo fifo; ln -s /tmp dir; ln victim hard")
        await environment.upload({"/app/link": b"1", "/app/fifo": b"2", "/app/hard": b"3"})
        assert await sh(environment, "cat victim link fifo hard") == "safe\n123"
        with pytest.raises(SandboxError, match="symbolic"):
            await environment.upload({"/app/dir/x": b""})


async def test_a_full_sandbox_says_so(contained, make_task):
    async with contained.create(make_task(storage_mb=1)) as environment:
        with pytest.raises(SandboxError, match="No space left"):
            await environment.upload({"/app/big": bytes(80 << 20)})


async def test_downloads_hold_regular_files_only(backend, make_task):
    async with backend.create(make_task({"a.txt": "a", "d/b.txt": "b"})) as environment:
        await sh(environment, "ln -s /etc/passwd link; ln -s /etc dir; mkfifo fifo; mkdir empty")
        await sh(environment, "touch \"$(printf 'not-utf8-\\377')\"")
        assert await environment.download("/app", max_bytes=100) == {"a.txt": b"a", "d/b.txt": b"b"}
        assert await environment.download("/app/a.txt", max_bytes=1) == {"a.txt": b"a"}
        assert await environment.download("/app/fifo", max_bytes=1) == {}
        for path in ("/app/link", "/app/dir/passwd", "/app/none"):
            with pytest.raises(SandboxError):
                await environment.download(path, max_bytes=10000)


async def test_downloads_and_changes_are_bounded_by_bytes_entries_and_depth(backend, make_task):
    async with backend.create(make_task()) as environment:
        await sh(environment, "truncate -s 100M sparse")
        for read in (environment.download("/app", max_bytes=1000), environment.changes(max_bytes=1000)):
            with pytest.raises(SandboxError, match="more than 1000 bytes"):
                await read
        deep = "import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')"
        await environment.execute(["rm", "sparse"], timeout_s=5)
        await environment.execute(["python3", "-c", deep], timeout_s=20)
        with pytest.raises(SandboxError):
            await environment.changes(max_bytes=1000)
        assert await sh(environment, "echo alive") == "alive\n"


async def test_changes_are_what_differs_from_the_pristine_workdir(backend, make_task):
    files = {"same.py": "s", "edited.py": "e", "gone.py": "g", "linked.py": "l", "d/moved.py": "m", "big": "x" * 5000}
    async with backend.create(make_task(files)) as environment:
        assert await environment.changes(max_bytes=0) == {}
        script = """
            echo new > edited.py; rm gone.py linked.py; ln -s same.py linked.py; mv d/moved.py d/here.py
            cp same.py copy; mv copy same.py; touch -d 2001-01-01 edited.py; mkdir -p n; : > n/empty
        """
        await sh(environment, script)
        changes = await environment.changes(max_bytes=100)
    assert changes == {
        "edited.py": b"new\n",
        "gone.py": None,
        "linked.py": None,
        "d/moved.py": None,
        "d/here.py": b"m",
        "n/empty": b"",
    }
