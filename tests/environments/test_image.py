# pyright: basic
import pytest

from etude.environments.image import read_image
from etude.errors import TaskError


def image_of(make_task, dockerfile, files=None, **fields):
    return read_image(make_task(files, dockerfile="FROM any\n" + dockerfile, **fields))


def test_the_instructions_that_place_files_and_set_values_are_followed(make_task):
    image = image_of(
        make_task,
        '# comment\nWORKDIR /app\nCOPY app/a.py .\nCOPY ["app/a.py", "app/b.py", "lib/"]\nADD app /all\n'
        "COPY --chown=agent app/a.py \\\n  /etc-like/renamed.py\nENV A=1 B='two words'\n"
        "ENV C three four\nUSER nobody\n",
        {"a.py": "a", "b.py": "b"},
    )
    assert {file.path: file.content for file in image.files} == {
        "/app/a.py": b"a",
        "/app/lib/a.py": b"a",
        "/app/lib/b.py": b"b",
        "/all/a.py": b"a",
        "/all/b.py": b"b",
        "/etc-like/renamed.py": b"a",
    }
    assert image.env == {"A": "1", "B": "two words", "C": "three four"}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("RUN pip install x", "cannot build images"),
        ("COPY ../secret /app/", "leaves the directory"),
        ("COPY app/../../secret /app/", "leaves the directory"),
        ("COPY missing /app/", "does not exist"),
        ("COPY app/link /app/", "symbolic link"),
        ("COPY app/folder/x /app/", "symbolic link"),
        ("COPY app/whole /app/", "not a regular file"),
        ("COPY app /app/../..", "not a path"),
        ("COPY --from=build /x /y", "--chown"),
        ("COPY onlyone", "a source and a destination"),
        ("ADD https://example.com/x /app/", "plain files"),
        ("ADD app/x.tar /app/", "plain files"),
        ("ENV A=$HOME", "variable"),
        ("ENV 'open", "quotation"),
        ("COPY [1] /x", "list of strings"),
        ("FROM again", "only that one"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_file_and_line(make_task, tmp_path, line, reason):
    task = make_task({"a.py": "a"}, dockerfile=f"FROM any\n\n{line}\n")
    (tmp_path / "secret").write_text("s")
    (tmp_path / "task/environment/app/link").symlink_to(tmp_path / "secret")
    (tmp_path / "task/environment/app/folder").symlink_to(tmp_path)
    (tmp_path / "task/environment/app/whole").mkdir()
    (tmp_path / "task/environment/app/whole/folder").symlink_to(tmp_path)
    (tmp_path / "x").write_text("x")
    with pytest.raises(TaskError, match="Dockerfile:3: ") as refused:
        read_image(task)
    assert reason in str(refused.value)


def test_the_context_must_fit_the_storage(make_task):
    with pytest.raises(TaskError, match="storage_mb"):
        image_of(make_task, "COPY app /app\n", {"big": "x" * (1 << 20) + "y"}, storage_mb=1)


def test_a_missing_dockerfile_and_a_reserved_workdir_are_named(make_task, tmp_path):
    with pytest.raises(TaskError, match="workdir '/tests'"):
        image_of(make_task, "", workdir="/tests")
    task = make_task(name="other")
    (tmp_path / "other/environment/Dockerfile").unlink()
    with pytest.raises(TaskError, match="environment/Dockerfile: not found"):
        read_image(task)
