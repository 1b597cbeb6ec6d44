"""README and guides: their Python runs, their commands parse, their links resolve; the API reference is current."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

ROOT = Path(__file__).parent.parent
GUIDES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").glob("*.md") if path.name != "api.md")]
FENCE = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block: its language, the file that it contains ("" for none), its text, its line in the guide."""

    language: str
    title: str
    text: str
    line: int


def blocks(guide: Path) -> list[Block]:
    text = guide.read_text(encoding="utf-8")
    return [Block(m[1], m[2] or "", m[3], text[: m.start()].count("\n") + 2) for m in FENCE.finditer(text)]


def commands(guide: Path) -> list[list[str]]:
    """The arguments of each `svdc` (or `-m svdcompress`) command in a guide."""
    found = []
    for block in blocks(guide):
        for line in block.text.splitlines() if block.language in ("console", "text") else ():
            match = re.match(r"\$ svdc (.*)|.* -m svdcompress (.*)", line)
            if match:
                found.append(shlex.split(match[1] or match[2], comments=True))
    return found


def write_titled(guide: Path, folder: Path) -> None:
    for block in blocks(guide):
        if block.title:
            (folder / block.title).write_text(block.text, encoding="utf-8")


def guide_id(path: Path) -> str:
    return path.stem


def test_there_is_a_guide_for_each_subject():
    names = {path.stem for path in GUIDES}
    assert {"README", "own-model", "beta-and-thresholds", "uncertainty", "onnx", "several-gpus", "extending"} <= names


@pytest.mark.parametrize("guide", GUIDES, ids=guide_id)
def test_python_blocks_run_in_their_order(guide, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    write_titled(guide, tmp_path)
    torch.manual_seed(0)
    for block in blocks(guide):  # another test may have imported a module of that name
        if block.title:
            monkeypatch.delitem(sys.modules, Path(block.title).stem, raising=False)
    before = set(sys.modules)
    namespace: dict[str, object] = {"__name__": "guide"}
    registered = dict(_variational_classes())
    try:
        for block in blocks(guide):
            if block.language == "python" and not block.title:
                code = compile("\n" * (block.line - 1) + block.text, str(guide), "exec")
                exec(code, namespace)
    finally:
        _variational_classes().clear()
        _variational_classes().update(registered)
        for name in {Path(block.title).stem for block in blocks(guide) if block.title} - before:
            sys.modules.pop(name, None)


def _variational_classes() -> dict:
    from svdcompress.layers import VARIATIONAL_CLASSES

    return VARIATIONAL_CLASSES


@pytest.mark.parametrize("guide", GUIDES, ids=guide_id)
def test_commands_have_only_options_that_exist(guide):
    import typer

    from svdcompress.cli import app

    command = typer.main.get_command(app)
    for arguments in commands(guide):
        context = command.make_context("svdc", list(arguments), resilient_parsing=True)
        name, found, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        assert found is not None, arguments
        found.make_context(name, rest, parent=context, resilient_parsing=True)


@pytest.mark.parametrize("guide", GUIDES, ids=guide_id)
def test_recipes_in_guides_are_valid(guide):
    import yaml

    from svdcompress.recipe import Recipe

    for block in blocks(guide):
        if block.language == "yaml":
            Recipe.model_validate(yaml.safe_load(block.text))


@pytest.mark.parametrize("guide", GUIDES, ids=guide_id)
def test_links_within_the_repository_lead_somewhere(guide):
    text = guide.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if not re.match(r"\w+:", target):
            assert (guide.parent / target).exists(), f"{guide.name}: {target}"


def test_the_api_reference_is_current():
    done = subprocess.run([sys.executable, ROOT / "docs" / "api.py", "--check"], capture_output=True, text=True, env=_env())
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name", ["pipeline.run", "pipeline.open_run", "predict.predict_run", "export.check_parity", "train.fit"]
)
def test_the_api_reference_has_a_section_for_each_room(name):
    room, _, function = name.partition(".")
    sections = re.split(r"^## ", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    (section,) = [text for text in sections if text.startswith(f"svdcompress.{room}\n")]
    assert f"### {function}\n" in section


def test_the_other_languages_name_inputs_and_outputs_that_a_file_has(tmp_path, monkeypatch):
    import onnx

    guide = ROOT / "docs" / "deploy.md"
    monkeypatch.chdir(tmp_path)
    exec(next(block.text for block in blocks(guide) if block.language == "python"), {})
    javascript, cpp = (next(block.text for block in blocks(guide) if block.language == name) for name in ("javascript", "cpp"))
    inputs, outputs = re.search(r"run\(\{(.*?)\}\)", javascript)[1], re.search(r"const \{(.*?)\} = await", javascript)[1]
    named = {
        "javascript": [[part.partition(":")[0].strip() for part in text.split(",")] for text in (inputs, outputs)],
        "cpp": [re.findall(r'"(.*?)"', re.search(rf"char\* {side}\[\] = \{{(.*?)\}};", cpp)[1]) for side in ("in", "out")],
    }
    for text, (fed, read) in zip((javascript, cpp), named.values(), strict=True):
        (file,) = re.findall(r'"(\S+\.onnx)"', text)
        graph = onnx.load(tmp_path / file).graph
        defaults = {value.name for value in graph.initializer}
        assert set(fed) == {value.name for value in graph.input} - defaults  # all required inputs
        assert read and set(read) <= {value.name for value in graph.output}
        assert "[5, 20]" in text or "{5, 20}" in text
        assert [dim.dim_value for dim in graph.input[0].type.tensor_type.shape.dim][1:] == [20]


def _env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}


def run(arguments: list[str], folder: Path) -> None:
    done = subprocess.run([sys.executable, *arguments], cwd=folder, env=_env(), capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(arguments)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


TRAINED = "import torch, mine; torch.save(mine.make().state_dict(), 'trained.pt')"
SESSIONS = {
    "own-model": ([["-c", TRAINED]], ["runs/mine"]),
    "hugging-face": ([["prepare.py"]], ["runs/my-vit"]),
}
"""Guides whose commands are run: the commands to run before them, and the run folders that they create."""


@pytest.mark.slow
@pytest.mark.parametrize("guide", SESSIONS)
def test_the_commands_of_a_guide_do_what_they_say(guide, tmp_path):
    path = ROOT / "docs" / f"{guide}.md"
    write_titled(path, tmp_path)
    before, folders = SESSIONS[guide]
    for arguments in before:
        run(arguments, tmp_path)
    for arguments in commands(path):
        run(["-m", "svdcompress", *arguments], tmp_path)
    for folder in folders:
        for name in ("model.onnx", "model_mc.onnx", "model.safetensors", "report.html", "report.json", "recipe.yaml"):
            assert (tmp_path / folder / name).is_file()


def test_the_functions_for_audio_fit_each_other(tmp_path, monkeypatch):
    import wave

    import numpy as np

    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for number in range(10):
        file = tmp_path / "sounds" / "ab"[number % 2] / f"{number}.wav"
        file.parent.mkdir(parents=True, exist_ok=True)
        with wave.open(str(file), "wb") as audio:
            audio.setparams((1, 2, 16_000, 0, "NONE", ""))
            audio.writeframes((3000 * rng.normal(size=15_000)).astype("<i2").tobytes())
    (code,) = [block.text for block in blocks(ROOT / "docs" / "guides.md") if block.title == "sounds.py"]
    namespace: dict = {}
    exec(code, namespace)
    (x, y), (x_test, _) = namespace["data"]()
    assert len(x) == len(y) == 8 and len(x_test) == 2
    assert namespace["model"](2)(x).shape == (8, 2)


def rows_of_what_to_touch():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("| to add | touch | test |\n|---|---|---|\n")[2].partition("\n\n")[0]
    return [tuple(cell.strip() for cell in row.strip("|").split("|")) for row in table.splitlines()]


def test_the_table_has_what_the_issue_asks_for():
    named = " ".join(row[0] for row in rows_of_what_to_touch())
    for word in ("prior", "posterior", "layer", "likelihood", "source", "schedule", "output", "section", "format", "strategy"):
        assert word in named


@pytest.mark.parametrize("row", rows_of_what_to_touch(), ids=lambda row: row[0].replace(" ", "-"))
def test_what_the_table_says_to_touch_is_there(row):
    """A _NAME.py is a new file in an existing folder; names in brackets are in the file before them."""
    _, touch, test = row
    folder = re.search(r"layers/(priors|posteriors)/", touch)
    if folder and not (ROOT / "svdcompress" / folder[0]).is_dir():
        pytest.skip(f"svdcompress/{folder[0]} is not part of this version yet")
    files = re.findall(r"`([\w/]+\.py)`", touch)
    assert 1 <= len(set(files)) <= 2  # anything more has no room of its own yet
    for file in files:
        path = ROOT / "svdcompress" / file
        assert path.parent.is_dir() if path.name == "_NAME.py" else path.is_file(), file
        for names in re.findall(rf"`{re.escape(file)}` \((`[^)]*)\)", touch):
            for name in re.findall(r"`(@?\w+)`", names):
                owner = path if path.is_file() else path.parent / "_registry.py"
                assert name.lstrip("@") in owner.read_text(encoding="utf-8"), f"{file}: {name}"
    for file in re.findall(r"`(tests/[\w/]+\.py)`", test):
        if folder is None:
            assert (ROOT / file).is_file(), file
