# pyright: basic
import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import TaskError
from etude.problems import known_keys
from etude.tasks import harbor, tree
from etude.tasks.dockerfile import read_dockerfile
from etude.tasks.harbor import examine, load_task, load_tasks
from etude.tasks.schema import UNSUPPORTED, TaskFile, parse_task_file

TASK_TOML = """
schema_version = "1.4"
[task]
name = "acme/fix"
[metadata]
kind = "off_by_one"
cut_step = 7
tags = ["a", "b"]
[environment]
cpus = 2
memory_mb = 256
network_mode = "no-network"
env = { LEVEL = "high" }
[agent]
timeout_sec = 30
[verifier]
timeout_sec = 20.5
environment_mode = "separate"
[solution]
env = {}
"""
DOCKERFILE = """
# a comment
FROM python:3.11-slim
WORKDIR /srv
WORKDIR app
ENV LANG=C.UTF-8 GREETING="hello you"
ENV LEVEL\tlow
COPY --chown=1:1 src \\
     data.txt /srv/app/
"""


def make(root, **files):
    """Write a good task, with some files replaced (or left out: None) by name, `__` for `/`."""
    task = root / "fix-it"
    contents = {
        "task.toml": TASK_TOML,
        "instruction.md": "Repair it.\n",
        "environment/Dockerfile": DOCKERFILE,
        "environment/src/main.py": "x = 1\n",
        "environment/data.txt": "data\n",
        "tests/test.sh": "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n",
        "solution/solve.sh": "#!/bin/sh\n",
    } | files
    for name, content in contents.items():
        if content is not None:
            path = task / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
    if (task / "tests/test.sh").exists():
        (task / "tests/test.sh").chmod(0o755)
    return task


def errors_of(path):
    with pytest.raises(TaskError) as caught:
        load_task(path)
    return str(caught.value).splitlines()


def test_a_good_task_is_read_completely(tmp_path):
    task = load_task(make(tmp_path))
    assert (task.task_id, task.path) == ("fix-it", str(tmp_path / "fix-it"))
    assert task.instruction == "Repair it.\n"
    assert (task.cpus, task.memory_mb, task.agent_timeout_s, task.verifier_timeout_s) == (2.0, 256, 30.0, 20.5)
    assert task.workdir == "/srv/app"
    assert task.env == {"LANG": "C.UTF-8", "GREETING": "hello you", "LEVEL": "high"}
    assert task.metadata == {"kind": "off_by_one", "cut_step": "7", "tags": '["a", "b"]'}


@pytest.mark.parametrize(
    ("toml", "dockerfile", "workdir"),
    [
        ('workdir = "/work"', "FROM a:1\nWORKDIR /srv\n", "/work"),
        ("", "FROM a:1\nWORKDIR /srv\n", "/srv"),
        ("", "FROM a:1\nWORKDIR srv/\n", "/srv"),
        ("", "FROM a:1\n", "/app"),
    ],
)
def test_the_workdir_is_that_of_the_task_then_of_the_image_then_app(tmp_path, toml, dockerfile, workdir):
    text = f'schema_version = "1.4"\n[environment]\nnetwork_mode = "no-network"\n{toml}\n'
    assert load_task(make(tmp_path, **{"task.toml": text, "environment/Dockerfile": dockerfile})).workdir == workdir


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[environment]\ncpus = 0", "environment.cpus: must be greater than 0, got 0"),
        ("[environment]\nmemory_mb = '1'", 'environment.memory_mb: must be a valid integer, got "1"'),
        ("[environment]\nmemory_md = 1", "environment.memory_md: unknown key; did you mean environment.memory_mb?"),
        ("[agent]\ntimeout_secs = 1", "agent.timeout_secs: unknown key; did you mean agent.timeout_sec?"),
        ("[agent]\ntimeout_sec = inf", "agent.timeout_sec: must be"),
        ("[environment]\ncpus = nan", "environment.cpus: must be"),
        ("[verifyer]\ntimeout_sec = 1", "verifyer: unknown key; did you mean verifier?"),
        ('[task]\nname = "a/../b"', "task.name: must be 'org/name'"),
        ('[environment]\nworkdir = "/a/../etc"', "environment.workdir: '/a/../etc' must be an absolute path"),
        ('[environment]\nworkdir = "/proc/self"', "environment.workdir: '/proc/self' is not a place to work in"),
        ('[environment]\nworkdir = "/tests"', "environment.workdir: '/tests' is not a place to work in"),
        ('[environment]\nworkdir = "/"', "environment.workdir: '/' is not a place to work in"),
        ('[environment]\nenv = { A = "${HOME}" }', "environment.env: the value of A refers to other variables"),
        ('[environment]\nenv = { "A B" = "" }', "environment.env: 'A B' is not a name"),
        ('[environment]\nos = "windows"', "environment.os: must be 'linux'"),
        ('[agent]\nuser = "root"', "agent.user: must be 'agent'"),
        ('[verifier]\nenvironment_mode = "shared"', "verifier.environment_mode: must be 'separate'"),
        ('[verifier]\nnetwork_mode = "public"', "verifier.network_mode: must be 'no-network'"),
        ("[metadata", "not valid TOML: "),
        (f"a = {'[' * 5000}", "not valid TOML: "),
        ("metadata" + ".a" * 20000 + " = 1", "more than 128 dots"),
        (f"metadata.a = {'[' * 220}{']' * 220}", "nested too deeply"),
    ],
)
def test_each_mistake_in_task_toml_is_named_with_file_and_field(tmp_path, line, message):
    text = f'{line}\nnetwork_mode = "no-network"' if line.startswith("[environment]") else line
    if not line.startswith("[environment]"):
        text += '\n[environment]\nnetwork_mode = "no-network"\n' if "[metadata" not in line else "\n"
    path = make(tmp_path, **{"task.toml": f'schema_version = "1.4"\n{text}\n'})
    found = errors_of(path)
    assert any(item.startswith(f"{path}/task.toml: ") and message in item for item in found), found


@pytest.mark.parametrize("mode", ["", 'network_mode = "public"', 'network_mode = "allowlist"'])
def test_a_task_that_wants_a_network_is_refused(tmp_path, mode):
    path = make(tmp_path, **{"task.toml": f'schema_version = "1.4"\n[environment]\n{mode}\n'})
    assert any("environment.network_mode" in line for line in errors_of(path))


@pytest.mark.parametrize("key", sorted(UNSUPPORTED))
def test_what_harbor_knows_and_etude_does_not_is_refused_by_name(key):
    findings = []
    text = f'{key} = "x"\nschema_version = "1.4"\nenvironment.network_mode = "no-network"\n'
    assert parse_task_file(text, "task.toml", findings) is None
    assert [item.field for item in findings] == [key]
    assert "unknown" not in findings[0].message


def test_no_key_is_both_accepted_and_refused():
    assert not set(known_keys(TaskFile)) & set(UNSUPPORTED)


@pytest.mark.parametrize("name", sorted(harbor.UNSUPPORTED_FILES))
def test_files_of_harbor_that_etude_does_not_support_are_refused_by_name(tmp_path, name):
    extra = f"{name}/first/instruction.md" if name == "steps" else name
    path = make(tmp_path, **{extra: "{}"})
    (line,) = errors_of(path)
    assert line.startswith(f"{path}/{name}: ")
    assert "not supported" in line


@pytest.mark.parametrize("name", sorted(harbor.REQUIRED_FILES))
def test_a_missing_file_is_named(tmp_path, name):
    path = make(tmp_path, **{name: None})
    assert any(line.startswith(f"{path}/{name}: is missing; ") for line in errors_of(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b" \n", "is empty"),
        (b"\xff", "not UTF-8: byte 0"),
        (b"a\0b", "holds a NUL"),
        (b"a" * (harbor.MAX_TEXT_BYTES + 1), "larger than 65536 bytes"),
    ],
)
def test_an_instruction_that_no_agent_could_be_given_is_refused(tmp_path, content, message):
    path = make(tmp_path, **{"instruction.md": content})
    (line,) = errors_of(path)
    assert line.startswith(f"{path}/instruction.md: {message}")


@pytest.mark.parametrize("target", ["/etc/passwd", "../../outside", "../tests/test.sh", "src"])
def test_symbolic_links_are_refused_wherever_they_lead(tmp_path, target):
    path = make(tmp_path)
    (path / "environment/link").symlink_to(target)
    (line,) = errors_of(path)
    assert line.startswith(f"{path}/environment/link: symbolic links are refused")


def test_a_link_in_place_of_a_directory_is_not_entered(tmp_path):
    path = make(tmp_path)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/key").write_text("k")
    (path / "environment/more").symlink_to(tmp_path / "secret")
    assert not any("key" in name for name in examine(path).tree.files)


def test_pipes_and_sockets_are_refused_without_being_opened(tmp_path):
    path = make(tmp_path)
    os.mkfifo(path / "tests/pipe")
    with socket.socket(socket.AF_UNIX) as server:
        here = Path.cwd()
        os.chdir(path / "tests")
        server.bind("sock")
        os.chdir(here)
        found = errors_of(path)
    assert sorted(line.split(": ")[0] for line in found) == [f"{path}/tests/pipe", f"{path}/tests/sock"]
    assert all("not a regular file" in line for line in found)


@pytest.mark.parametrize("name", [b"a\nb", b"\x1b[2J", b"\xff"])
def test_names_that_could_fool_a_terminal_are_refused_and_shown_harmlessly(tmp_path, name):
    path = make(tmp_path)
    Path(os.fsdecode(os.fsencode(path / "environment") + b"/" + name)).write_text("x")
    (line,) = errors_of(path)
    assert "control characters or is not UTF-8" in line
    assert line.isprintable()


def test_a_directory_of_absurd_size_is_refused_without_reading_it(tmp_path):
    path = make(tmp_path)
    with (path / "environment/huge").open("wb") as file:
        file.truncate(tree.MAX_FILE_BYTES + 1)
    (line,) = errors_of(path)
    assert line.startswith(f"{path}/environment/huge: larger than")
    (path / "environment/huge").unlink()
    for number in range(tree.MAX_FILES + 1):
        (path / f"environment/{number}").touch()
    assert f"more than {tree.MAX_FILES} files" in errors_of(path)[0]


def test_keys_that_could_fool_a_terminal_are_shown_harmlessly(tmp_path):
    path = make(tmp_path, **{"task.toml": TASK_TOML + '"\\u001b[2J\\n" = 1\n'})
    (line,) = errors_of(path)
    assert "unknown key" in line
    assert line.isprintable()


def test_a_file_that_became_a_link_after_it_was_listed_is_not_followed(tmp_path):
    (tmp_path / "secret").write_text("k")
    (tmp_path / "link").symlink_to("secret")
    with pytest.raises(TaskError):
        tree.read_bytes(tmp_path / "link", max_bytes=10)


def test_the_digest_changes_with_every_byte_and_name_and_with_nothing_else(tmp_path):
    first = load_task(make(tmp_path / "a"))
    assert load_task(make(tmp_path / "b")).digest == first.digest
    assert load_task(make(tmp_path / "c", **{"environment/data.txt": "date\n"})).digest != first.digest
    assert load_task(make(tmp_path / "d", **{"environment/src/a": "", "environment/src/b": ""})).digest != first.digest


@given(
    st.dictionaries(st.text("ab1:", min_size=1, max_size=4), st.text("ab1:", max_size=4), max_size=4),
    st.dictionaries(st.text("ab1:", min_size=1, max_size=4), st.text("ab1:", max_size=4), max_size=4),
)
def test_different_trees_have_different_digests(one, other):
    def digest(files):
        entries = {
            name: tree.TreeFile(num_bytes=0, executable=False, sha256=content)
            for name, content in sorted(files.items())
        }
        return tree.Tree(files=entries, findings=()).digest()

    padded = [{name: content.ljust(4) for name, content in files.items()} for files in (one, other)]
    assert (digest(padded[0]) == digest(padded[1])) == (padded[0] == padded[1])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("COPY /etc/passwd /app/", "COPY: '/etc/passwd' leaves environment/"),
        ("COPY ../tests /app/", "COPY: '../tests' leaves environment/"),
        ("COPY src/../../tests /app/", "COPY: 'src/../../tests' leaves environment/"),
        ('COPY ["../a b", "/app/"]', "COPY: '../a b' leaves environment/"),
        ("ADD https://example.com/x /app/", "ADD: 'https://example.com/x' is fetched over the network"),
        ("COPY nothing /app/", "COPY: 'nothing' is not in environment/"),
        ("COPY src /tests/", "COPY: '/tests/' is reserved"),
        ("COPY src /app/../tests", "COPY: '/app/../tests' must be a path without '..'"),
        ("COPY --from=other src /app", "COPY: copying from another image"),
        ("COPY $SRC /app", "COPY: '$SRC' has variables"),
        ("COPY <<EOF /app/x", "COPY: here-documents are not supported"),
        ("COPY src", "COPY: needs a source and a destination"),
        ('COPY "src /app', "COPY: cannot be read"),
        ('COPY ["src", 1]', "COPY: cannot be read"),
        ("COPY\t../x /app/", "COPY: '../x' leaves environment/"),
        ("COPY src \\\n# comment\n\n  ../x /app/", "COPY: '../x' leaves environment/"),
        ("WORKDIR tests", "WORKDIR: '/tests' is not a place to work in"),
        ("COPY src tests", "COPY: 'tests' is reserved"),
        ("# escape=`", "escape: the directive is not supported"),
        ("copy ../x /app/", "COPY: '../x' leaves environment/"),
        ("FROM two:1", "FROM: builds in several stages"),
        ("ENV A=$B", "ENV: the value of A refers to other variables"),
        ("ENV 1A=b", "ENV: '1A' is not a name"),
        ("ENV A=1 B", "ENV: 'B' has no value"),
        ("ENV", "ENV: '' is not a name"),
        ('ENV A="b', "ENV: cannot be read"),
        ("WORKDIR /app/../..", "WORKDIR: '/app/../..' must be an absolute path"),
        ("WORKDIR $HOME", "WORKDIR: variables and control characters"),
        ("WORKDIR /proc", "WORKDIR: '/proc' is not a place to work in"),
    ],
)
def test_a_dockerfile_cannot_reach_out_of_its_directory(tmp_path, line, message):
    path = make(tmp_path, **{"environment/Dockerfile": f"FROM one:1\n{line}\n"})
    found = errors_of(path)
    assert any(item.startswith(f"{path}/environment/Dockerfile: {message}") for item in found), found


@pytest.mark.parametrize("line", ["COPY . /app", "COPY src/main.py ./", "COPY ./src/ /app/", "COPY *.txt /app/"])
def test_ordinary_dockerfiles_are_accepted(tmp_path, line):
    assert load_task(make(tmp_path, **{"environment/Dockerfile": f"FROM one:1\n{line}\n"}))


@given(st.text(st.sampled_from("FROMCPYENVADWKI \n\\\"'[]{},.=$/-#<\0é"), max_size=80))
def test_reading_a_dockerfile_never_fails(text):
    assert read_dockerfile(text, "Dockerfile", ["a"]).findings or "FROM" in text


@given(st.text(max_size=60))
def test_reading_a_task_file_never_fails(text):
    findings = []
    assert parse_task_file(text, "task.toml", findings) is None
    assert findings


def test_tasks_come_sorted_and_hidden_directories_are_left_out(tmp_path):
    for name in ("b", "a", "c"):
        make(tmp_path).rename(tmp_path / name)
    (tmp_path / ".git").mkdir()
    (tmp_path / "README.md").write_text("tasks")
    assert [task.task_id for task in load_tasks(tmp_path)] == ["a", "b", "c"]


def test_all_broken_tasks_are_reported_together(tmp_path):
    make(tmp_path, **{"instruction.md": ""}).rename(tmp_path / "a")
    make(tmp_path, **{"instruction.md": ""}).rename(tmp_path / "b")
    with pytest.raises(TaskError) as caught:
        load_tasks(tmp_path)
    assert len(str(caught.value).splitlines()) == 2


def test_task_ids_that_differ_in_case_only_are_refused(tmp_path):
    make(tmp_path).rename(tmp_path / "task")
    make(tmp_path).rename(tmp_path / "Task")
    with pytest.raises(TaskError, match="the same task id"):
        load_tasks(tmp_path)


def test_a_name_that_cannot_be_an_id_is_refused(tmp_path):
    path = make(tmp_path).rename(tmp_path / "fix it")
    assert "cannot be a task id" in errors_of(path)[0]


@pytest.mark.parametrize("name", ["nothing", "file"])
def test_what_is_no_directory_of_tasks_says_so(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(TaskError, match="name a directory"):
        load_tasks(tmp_path / name)
    with pytest.raises(TaskError, match="not a directory"):
        load_task(tmp_path / name)
    (tmp_path / "empty").mkdir()
    with pytest.raises(TaskError, match="holds 0 tasks"):
        load_tasks(tmp_path / "empty")
