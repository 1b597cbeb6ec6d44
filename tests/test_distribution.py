"""The wheel and the sdist: their contents, and that the wheel works outside of the repository."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(folder)], cwd=ROOT, check=True, capture_output=True)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


@pytest.mark.slow
def test_the_wheel_holds_the_package_its_recipes_and_nothing_else(built):
    names = {name for name in zipfile.ZipFile(built[0]).namelist() if ".dist-info/" not in name}
    code = {str(path.relative_to(ROOT)) for path in (ROOT / "svdcompress").rglob("*.py")}
    recipes = {
        f"svdcompress/{path.relative_to(ROOT)}" for path in (ROOT / "recipes").rglob("*") if path.suffix in (".py", ".yaml")
    }
    assert len(recipes) > 8
    assert names == code | recipes | {"svdcompress/py.typed", "svdcompress/report/style.css", "svdcompress/report/script.js"}
    assert any(name.endswith("licenses/LICENSE") for name in zipfile.ZipFile(built[0]).namelist())


@pytest.mark.slow
def test_the_wheel_lists_and_finds_its_recipes_anywhere(built, tmp_path):
    zipfile.ZipFile(built[0]).extractall(tmp_path / "site")
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}

    def svdc(*arguments):
        command = [sys.executable, "-m", "svdcompress", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True, text=True).stdout

    assert "mnist-lenet5-units" in svdc("recipes")
    assert svdc("recipes", "show", "digits") == (ROOT / "recipes" / "digits.yaml").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_sdist_holds_what_builds_and_tests_it(built):
    with tarfile.open(built[1]) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    wanted = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile", "constraints.txt", "recipes/digits.yaml"}
    assert wanted <= names and {"svdcompress/__init__.py", "tests/test_distribution.py"} <= names
    assert not [name for name in names if name.startswith((".venv", "runs/", "dist/"))]
