"""The wheel: what is in it, and that it works from a folder that is not the repository."""

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("pbkv_ray", "agents", "workflows", "deployments")
LEFT_OUT = {"deployments/Dockerfile"}  # it builds from the repository
LOOK = """
import json, pbkv_ray, agents
from deployments.http.page import router
from workflows.registry import REGISTRY
print(json.dumps({
    "from": pbkv_ray.__file__,
    "samples": {name: len(spec.samples()) for name, spec in REGISTRY.items()},
    "pages": sorted(route.path for route in router().routes),
}))
"""


def sources() -> list[str]:
    """The files of the packages that git knows or would add."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *PACKAGES]
    found = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True)
    if found.returncode:
        pytest.skip("this is no git repository: which files belong to it is not known")
    return sorted(name for name in found.stdout.splitlines() if (ROOT / name).is_file())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    for name in ["pyproject.toml", "README.md", *sources()]:
        (folder / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / "src" / name)
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    made = subprocess.run([sys.executable, "-c", build, folder], cwd=folder / "src", capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == set(sources()) - LEFT_OUT


def test_it_works_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = f"import sys; sys.path.insert(0, {str(site)!r})\n{LOOK}"
    seen = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert seen.returncode == 0, seen.stderr
    told = json.loads(seen.stdout)
    assert Path(told["from"]).is_relative_to(site)
    assert set(told["samples"]) == {"hover", "swe", "finance"} and min(told["samples"].values()) >= 3
    assert "/" in told["pages"] and "/dashboard/app.js" in told["pages"]
    scripts = next(site.glob("*.dist-info/entry_points.txt")).read_text()
    assert "pbkv = pbkv_ray.cli:main" in scripts and "sglang.srt.plugins" in scripts
