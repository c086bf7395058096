"""Which paths of an agent's change reach the sandbox that grades it.

Left out is what steers an interpreter or a test runner without being asked for: start-up files, configuration of test
tools, modules that hide the standard library. A task that has such a file from the start lets it be changed.
"""

import sys
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

import msgspec

_START_UP = ("sitecustomize.py", "usercustomize.py", "*.pth", ".python-version", "pyvenv.cfg")
_TEST_TOOLS = ("conftest.py", "pytest.ini", ".pytest.ini", "pyproject.toml", "setup.cfg", "tox.ini", ".coveragerc")
_CACHES = ("__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache")
_COMPILED = (".pyc", ".pyo")
_HIDING = frozenset(sys.stdlib_module_names) | {"pytest", "_pytest", "pluggy"}


class Sorted(msgspec.Struct, frozen=True, kw_only=True):
    """A change, taken apart."""

    applied: dict[str, bytes | None] = {}
    protected: dict[str, str] = {}
    """Reason by path: applied only if the task's pristine environment has that path."""
    unsafe: tuple[str, ...] = ()
    """Paths that are no plain relative paths; never applied."""


def sort_change(change: Mapping[str, bytes | None]) -> Sorted:
    """Sort paths, relative to the workdir, by what may be done with them; caches are dropped."""
    applied: dict[str, bytes | None] = {}
    protected: dict[str, str] = {}
    unsafe: list[str] = []
    for path, content in change.items():
        parts = PurePosixPath(path).parts
        if not parts or path.startswith("/") or ".." in parts or "\0" in path or str(PurePosixPath(path)) != path:
            unsafe.append(path)
        elif not (set(parts) & set(_CACHES) or path.endswith(_COMPILED)):
            applied[path] = content
            if reason := _reason(parts):
                protected[path] = reason
    return Sorted(applied=applied, protected=protected, unsafe=tuple(unsafe))


def _reason(parts: tuple[str, ...]) -> str:
    name = parts[-1].lower()
    if any(fnmatchcase(name, pattern) for pattern in _START_UP):
        return "runs when an interpreter starts"
    if name in _TEST_TOOLS:
        return "steers test tools"
    top = parts[0].removesuffix(".py") if len(parts) == 1 else parts[0]
    if name.endswith((".py", ".so")) and top.partition(".")[0] in _HIDING:
        return f"hides the module {top.partition('.')[0]}"
    return ""
