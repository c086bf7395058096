# pyright: basic
"""The control plane starts without what only the trainer and the samplers need."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "ray", "transformers")

FIRST_TO_LOAD_SOMETHING_HEAVY = """
import importlib, pkgutil, sys
for name in sys.argv[2:]:
    package = importlib.import_module(name)
    inside = pkgutil.walk_packages(getattr(package, "__path__", []), name + ".")
    for module in [name, *(found.name for found in inside)]:
        importlib.import_module(module)
        if loaded := set(sys.argv[1].split(",")) & set(sys.modules):
            sys.exit(f"importing {module} loads {sorted(loaded)}")
"""

WITHOUT = """
import sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1].split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from etude.cli.main import main
code = main(sys.argv[2:])
print("loaded:", *sys.modules, file=sys.stderr)
sys.exit(code)
"""


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def control_plane() -> list[str]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = [contract for contract in contracts if contract["name"].startswith("The control plane")]
    return contract["source_modules"]


def imported(path: Path) -> set[str]:
    """Return the packages that a file imports anywhere, those for type checkers only included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"etude"}


def required(project: dict, *extras: str) -> set[str]:
    """Return the packages that the core and these extras install by name."""
    lines = project["dependencies"] + [line for extra in extras for line in project["optional-dependencies"][extra]]
    return {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in lines}


def test_whatever_is_imported_is_required_by_the_core_or_by_the_extra_that_runs_it():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    light = {name.split(".")[1] for name in control_plane()}
    undeclared = {}
    for path in (ROOT / "src" / "etude").rglob("*.py"):
        room = path.relative_to(ROOT / "src" / "etude").parts[0].removesuffix(".py")
        extras = () if room in light | {"cli"} else ("train", "numba") if room in ("policy", "weights") else ("train",)
        allowed = required(project, *extras)
        if missing := imported(path) - allowed:
            undeclared[str(path.relative_to(ROOT))] = missing
    assert not undeclared


def test_importing_the_control_plane_loads_nothing_heavy():
    result = run(FIRST_TO_LOAD_SOMETHING_HEAVY, ",".join(HEAVY), *control_plane())
    assert result.returncode == 0, result.stderr


def test_help_needs_only_click_and_the_standard_library():
    result = run(WITHOUT, ",".join((*HEAVY, "numpy", "pydantic", "pyarrow", "aiohttp", "obstore")), "--help")
    assert result.returncode == 0, result.stderr
    assert "quickstart" in result.stdout


def test_a_configuration_is_shown_where_nothing_heavy_is_installed():
    recipe = str(ROOT / "recipes" / "quickstart.toml")
    result = run(WITHOUT, ",".join((*HEAVY, "numpy")), "config", "show", recipe)
    assert result.returncode == 0, result.stderr
    assert 'family = "pyfix"' in result.stdout


def test_the_mini_harness_imports_the_standard_library_only():
    mini = ROOT / "harnesses" / "mini" / "mini.py"
    # -I -S: neither the user's nor the environment's packages are on the path.
    result = subprocess.run(
        [sys.executable, "-I", "-S", str(mini)], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 2, result.stderr
    assert "ModuleNotFoundError" not in result.stderr
