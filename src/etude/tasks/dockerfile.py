"""What a task needs to know of its Dockerfile: WORKDIR, ENV, and that COPY stays inside `environment/`.

Building is the business of an environment backend; this only reads.
"""

import json
import posixpath
import re
import shlex
from collections.abc import Iterable, Iterator
from typing import cast

import msgspec

from etude.tasks.finding import Finding, warning
from etude.tasks.schema import env_problem

RESERVED = ("/tests", "/solution", "/logs", "/opt/harness", "/proc", "/sys", "/dev")
"""Directories of a sandbox that belong to grading, the harness or the kernel."""

_FLAG = re.compile(r"--[a-z-]+=\S*|--[a-z-]+")
_ESCAPE = re.compile(r"^[ \t]*#[ \t]*escape[ \t]*=", re.MULTILINE | re.IGNORECASE)
_REMOTE = re.compile(r"[a-z]+://|git@")


class Dockerfile(msgspec.Struct, frozen=True, kw_only=True):
    """The parts that decide how a task is played."""

    workdir: str
    """Absolute; empty when there is no WORKDIR."""
    env: dict[str, str]
    findings: tuple[Finding, ...]


def read_dockerfile(text: str, path: str, files: Iterable[str]) -> Dockerfile:
    """Read a Dockerfile whose build context holds `files`, given by relative path."""
    workdir = ""
    env: dict[str, str] = {}
    findings: list[Finding] = []
    context = _with_folders(files)
    images = 0
    for keyword, rest in instructions(text):
        problems: Iterable[str] = ()
        match keyword:
            case "FROM":
                images += 1
                problems = ["builds in several stages are not supported"] if images > 1 else []
                if unpinned := _unpinned(rest):
                    findings.append(warning(path, unpinned, "name a tag or, better, a digest", field="FROM"))
            case "WORKDIR":
                workdir = posixpath.normpath(posixpath.join(workdir or "/", rest.strip("\"'")))
                problems = workdir_problems(rest, workdir)
            case "ENV":
                pairs, problems = _env(rest)
                env |= pairs
            case "COPY" | "ADD":
                problems = copy_problems(rest, workdir, context)
            case _:
                continue
        findings += [Finding(path=path, field=keyword, message=problem) for problem in problems]
    if _ESCAPE.search(text):
        findings.append(Finding(path=path, field="escape", message="the directive is not supported; use backslashes"))
    if not images:
        findings.append(Finding(path=path, field="FROM", message="is missing", hint="begin with FROM image:tag"))
    return Dockerfile(workdir=workdir, env=env, findings=tuple(findings))


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield each instruction in capitals with its arguments, continued lines joined and comments left out."""
    pending = ""
    lines = [line.strip() for line in text.split("\n")]
    # The empty line at the end finishes an instruction that the file leaves open.
    for line in (*(line for line in lines if line and not line.startswith("#")), ""):
        if line.endswith("\\"):
            pending += line[:-1] + " "
            continue
        keyword, *rest = (pending + line).split(None, 1) or [""]
        if keyword:
            yield keyword.upper(), "".join(rest).strip()
        pending = ""


def workdir_problems(written: str, workdir: str) -> list[str]:
    """Say why a working directory is refused; empty when it is not."""
    if "$" in written or not workdir.isprintable():
        return ["variables and control characters are not supported; write the directory out"]
    if not workdir.startswith("/") or ".." in written.split("/"):
        return [f"{written!r} must be an absolute path without '..'"]
    if workdir in ("/", "//") or _is_reserved(workdir):
        return [f"{workdir!r} is not a place to work in; use a directory of its own, such as /app"]
    return []


def _is_reserved(path: str) -> bool:
    return any(f"{path}/".startswith(f"{taken}/") for taken in RESERVED)


def copy_problems(rest: str, workdir: str, context: set[str]) -> Iterator[str]:
    """Say why the arguments of a COPY or ADD are refused; nothing when they are not."""
    try:
        words = _words(_without_flags(rest))
    except ValueError as error:
        yield f"cannot be read: {error}"
        return
    if "--from" in rest:
        yield "copying from another image or stage is not supported"
    if any(word.startswith("<<") for word in words):
        yield "here-documents are not supported; put the file into environment/"
        return
    if len(words) < 2:  # noqa: PLR2004 - a source and a destination
        yield "needs a source and a destination"
        return
    *sources, target = words
    for source in sources:
        if problem := _source_problem(source, context):
            yield f"{source!r} {problem}"
    if ".." in target.split("/") or "$" in target:
        yield f"{target!r} must be a path without '..' or variables"
    elif _is_reserved(posixpath.normpath(posixpath.join(workdir or "/", target))):
        yield f"{target!r} is reserved; the agent must not find tests or solution there"


def _source_problem(source: str, context: set[str]) -> str:
    if _REMOTE.match(source):
        return "is fetched over the network; put the file into environment/"
    if source.startswith("/") or ".." in source.split("/"):
        return "leaves environment/; use a path relative to it, without '..'"
    if "$" in source or not source.isprintable():
        return "has variables or control characters; write it out"
    # What a pattern matches is known when the image is built.
    is_pattern = any(sign in source for sign in "*?[")
    return "" if is_pattern or posixpath.normpath(source) in context else "is not in environment/"


def _with_folders(files: Iterable[str]) -> set[str]:
    found = {"."}
    for file in files:
        name = file
        while name and name not in found:
            found.add(name)
            name = posixpath.dirname(name)
    return found


def _without_flags(rest: str) -> str:
    while match := _FLAG.match(rest):
        rest = rest[match.end() :].lstrip()
    return rest


def _words(rest: str) -> list[str]:
    if rest.startswith("["):
        words: object = json.loads(rest)
        if not isinstance(words, list) or not all(isinstance(word, str) for word in cast("list[object]", words)):
            raise ValueError("the list must hold strings")
        return cast("list[str]", words)
    return shlex.split(rest)


def _env(rest: str) -> tuple[dict[str, str], list[str]]:
    name, *value = rest.split(None, 1) or [""]
    if "=" in name:
        try:
            assignments = [word.partition("=") for word in shlex.split(rest)]
        except ValueError as error:
            return {}, [f"cannot be read: {error}"]
    else:
        # The old form sets one variable to the rest of the line: ENV NAME some text
        assignments = [(name, "=", "".join(value))]
    problems = [f"{name!r} has no value" for name, equals, _ in assignments if not equals]
    pairs = {name: value for name, _, value in assignments}
    problems += [problem for name, value in pairs.items() if (problem := env_problem(name, value))]
    return ({} if problems else pairs), problems


def _unpinned(rest: str) -> str:
    image = _without_flags(rest).split(" ")[0]
    name = image.rpartition("/")[2]
    if image == "scratch" or "@" in name or (":" in name and not name.endswith(":latest")):
        return ""
    return f"{image!r} may become another image"
