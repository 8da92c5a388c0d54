"""The shape of the code, checked by a machine: directions of imports, purity of the core, sizes of files."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = sorted((ROOT / "pbkv_ray" / "core").glob("*.py"))
FOLDERS = ("pbkv_ray", "agents", "workflows", "deployments")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))

# A core that reads a clock, rolls dice or does IO cannot be replayed.
IMPURE = {"asyncio", "time", "random", "os", "logging", "threading"} | {"socket", "subprocess", "datetime", "secrets"}
MAX_LINES = 350


def imported_modules(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}


def test_imports_go_one_way():
    """The contracts of pyproject.toml, [tool.importlinter]: `import ray` in core, for one, fails here."""
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.name)
def test_the_core_is_pure(path: Path):
    allowed = {"numpy", "pbkv_ray"} | set(sys.stdlib_module_names) - IMPURE
    assert {name.split(".")[0] for name in imported_modules(path)} <= allowed


def test_files_stay_small():
    long = {str(p.relative_to(ROOT)): n for p in SOURCES if (n := len(p.read_text().splitlines())) > MAX_LINES}
    assert long == {}


def test_the_package_named_agents_is_ours():
    import agents

    assert Path(str(agents.__file__)).parent == ROOT / "agents"
