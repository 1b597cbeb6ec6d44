"""Places and data that make a running run fail: a typed error, nothing lost, and the same result once that is fixed."""

from __future__ import annotations

import json
import os
import resource
import shutil
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from svdcompress import files
from svdcompress.errors import DataError, OutputError, SvdcError
from svdcompress.pipeline import open_run, run
from svdcompress.pipeline._context import Context
from svdcompress.recipe import load_recipe
from svdcompress.sources import _image_folder

QUICK = ["data.limit=120", "export.onnx=false", "report={html: false, latency: false}", "uncertainty.samples=0"]


@pytest.fixture(scope="module")
def recipe(tiny_recipe):
    return load_recipe(_stored(tiny_recipe), QUICK)


def _stored(recipe):
    import tempfile

    from svdcompress.recipe import dump_recipe

    file = Path(tempfile.mkdtemp()) / "recipe.yaml"
    file.write_text(dump_recipe(recipe))
    return file


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory):
    """The folder of the undisturbed run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(recipe, folder)
    return folder


def same(left, right):
    """Check for the same files, the same model, and the same figures except for times."""
    assert sorted(path.name for path in left.iterdir()) == sorted(path.name for path in right.iterdir())
    assert (left / "model.safetensors").read_bytes() == (right / "model.safetensors").read_bytes()
    reports = [json.loads((folder / "report.json").read_text()) for folder in (left, right)]
    for each in reports:
        for name in ("seconds", "created", "warnings"):
            each.pop(name, None)
        each["pruning"].pop("seconds")
        for tried in each["calibrate"].get("tried", []):
            tried.pop("seconds")
    for key in reports[0]:
        assert reports[0][key] == reports[1][key], key
    return True


@contextmanager
def largest_file(size):
    """Limit the size of files, which acts like a full disk for any user."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def at(monkeypatch, stage, act):
    """Call `act` once, when a stage begins."""
    stages, done = Context.stage, []

    def begins(self, name):
        if name == stage and not done:
            done.append(act())
        return stages(self, name)

    monkeypatch.setattr(Context, "stage", begins)
    return done


def failing(recipe, out, said, kind=OutputError, resume=False):
    """The message of a run that fails; if files are left, it must say how to continue."""
    with pytest.raises(kind, match=said) as error:
        run(recipe, out, resume=resume)
    assert ("svdc sparsify --resume" in str(error.value)) is (out / "recipe.yaml").is_file()
    assert type(error.value) is kind
    return str(error.value)


# Space


@pytest.mark.parametrize("size", [1, 1000, 5000, 9000, 12_000, 25_000])
def test_a_full_disk(recipe, whole, tmp_path, size):
    out = tmp_path / "run"
    with largest_file(size):
        failing(recipe, out, "cannot be written")
        if (out / "recipe.yaml").is_file():
            failing(recipe, out, "cannot be written", resume=True)  # and again
    assert not [path for path in out.rglob("*") if files.is_temporary(path)]
    run(recipe, out, resume=(out / "recipe.yaml").is_file())
    assert same(out, whole)


@pytest.mark.parametrize("size", [3000, 8000, 12_000, 40_000])
@pytest.mark.slow
def test_a_disk_that_is_full_for_the_files_at_the_end(tiny_recipe, tiny_run, tmp_path, monkeypatch, size):
    held = largest_file(size)
    at(monkeypatch, "export", held.__enter__)
    try:
        failing(tiny_recipe, tmp_path / "run", "cannot be written")
    finally:
        held.__exit__(None, None, None)
    run(tiny_recipe, tmp_path / "run", resume=True)
    for name in ("model.safetensors", "model.onnx", "model_mc.onnx"):
        assert (tmp_path / "run" / name).read_bytes() == (tiny_run[0] / name).read_bytes()


def test_a_full_disk_is_called_so_whatever_the_library_says(tmp_path, monkeypatch):
    """torch's own message is "unexpected pos 64 vs 0"."""

    def fails(path):
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")

    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    with monkeypatch.context() as patch:
        patch.setattr(files.shutil, "disk_usage", lambda folder: usage)
        with pytest.raises(OutputError, match=r"state\.pt: cannot be written: No space left on device; free some space"):
            files.write_atomically(tmp_path / "state.pt", fails)
    with pytest.raises(OutputError, match=r"cannot be written: .*unexpected pos 64 vs 0; free some space or choose another"):
        files.write_atomically(tmp_path / "state.pt", fails)
    with pytest.raises(OutputError, match=r"the folder .*gone no longer exists$"):
        files.write_atomically(tmp_path / "gone" / "state.pt", lambda path: path.write_text(""))


# The folder


@pytest.mark.parametrize("stage", ["dense", "train", "recover", "report"])
def test_a_folder_that_vanishes_and_comes_back(recipe, whole, tmp_path, monkeypatch, stage):
    out, away = tmp_path / "run", tmp_path / "away"
    done = at(monkeypatch, stage, lambda: out.rename(away))
    failing(recipe, out, "no longer exists")
    assert done and not out.exists()
    away.rename(out)
    run(recipe, out, resume=True)
    assert same(out, whole)


def test_a_folder_that_is_gone_for_good_is_free_again(recipe, whole, tmp_path, monkeypatch):
    at(monkeypatch, "prune", lambda: shutil.rmtree(tmp_path / "run"))
    failing(recipe, tmp_path / "run", "no longer exists")
    run(recipe, tmp_path / "run")
    assert same(tmp_path / "run", whole)


@contextmanager
def read_only(folder):
    """Make a folder read-only: by its mode or, for root, by simulating the kernel's answer."""
    if os.geteuid():
        modes = {path: path.stat().st_mode for path in (folder, folder / "state")}
        for path in modes:
            path.chmod(0o555)
        try:
            yield
        finally:
            for path, mode in modes.items():
                path.chmod(mode)
        return

    def refused(work, place):
        def call(*args, **kwargs):
            path = os.fspath(args[place])
            writes = work is not os.open or args[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if writes and isinstance(path, str) and Path(path).is_relative_to(folder):
                raise OSError(30, "Read-only file system", path)
            return work(*args, **kwargs)

        return call

    import builtins
    import io

    def opened(file, mode="r", *args, **kwargs):
        if isinstance(file, str | Path) and set(mode) & set("wax+") and Path(file).is_relative_to(folder):
            raise OSError(30, "Read-only file system", str(file))
        return real(file, mode, *args, **kwargs)

    real = io.open
    with pytest.MonkeyPatch.context() as patch:
        for name, place in (("open", 0), ("mkdir", 0), ("replace", 1), ("rename", 1), ("unlink", 0), ("rmdir", 0)):
            patch.setattr(os, name, refused(getattr(os, name), place))
        patch.setattr(io, "open", opened)
        patch.setattr(builtins, "open", opened)
        yield


@pytest.mark.parametrize("stage", ["dense", "prune", "report"])
def test_a_folder_that_becomes_read_only(recipe, whole, tmp_path, monkeypatch, stage):
    out = tmp_path / "run"
    held = read_only(out)
    done = at(monkeypatch, stage, held.__enter__)
    try:
        with pytest.raises(OutputError, match=r"cannot be written|Read-only|Permission"):
            run(recipe, out)
        with pytest.raises(OutputError, match=r"cannot be written|Read-only|Permission"):
            run(recipe, out, resume=True)
    finally:
        held.__exit__(None, None, None)
    assert len(done) == 1
    run(recipe, out, resume=True)
    assert same(out, whole)


# Data


def images(folder):
    from PIL import Image

    rng = np.random.default_rng(0)
    for index in range(60):
        place = folder / "abc"[index % 3]
        place.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 100, (4, 4), dtype=np.uint8) + 50 * (index % 3)
        Image.fromarray(pixels.astype(np.uint8)).save(place / f"{index}.png")
    return sorted(folder.rglob("*.png"))


@pytest.mark.parametrize("harm", ["truncated", "empty", "removed"])
def test_an_image_that_breaks_while_the_run_goes_on(tiny_recipe, tmp_path, monkeypatch, harm):
    pytest.importorskip("PIL")
    monkeypatch.setattr(_image_folder, "IN_MEMORY_BYTES", 0)  # images are read whenever they are needed
    every = images(tmp_path / "photos")
    sets = [f"data=imagefolder:{tmp_path}/photos", "data.image_size=[4, 4]", "data.workers=0", "data.transform=[flatten]"]
    recipe = load_recipe(_stored(tiny_recipe), [*QUICK, *sets, "data.limit=null", "model.args={sizes: [16, 12, 3]}"])
    run(recipe, tmp_path / "whole" / "run")
    kept = {path: path.read_bytes() for path in every}

    def break_them():
        for path, content in kept.items():
            path.unlink() if harm == "removed" else path.write_bytes(content[:40] if harm == "truncated" else b"")

    at(monkeypatch, "train", break_them)
    out = tmp_path / "run"
    failing(recipe, out, r"data: .*\.png", DataError)
    assert (out / "dense.safetensors").is_file()
    for path, content in kept.items():
        path.write_bytes(content)
    run(recipe, out, resume=True)
    assert same(out, tmp_path / "whole" / "run")


class Stopped(Exception):
    """Raised instead of killing the run."""


def stopped_run(tmp_path, monkeypatch, tiny_recipe):
    """A run on a data file, stopped before its fine-tuning, and the arrays in the file."""
    rng = np.random.default_rng(0)
    arrays = {"x": rng.normal(size=(60, 4)).astype(np.float32), "y": np.arange(60) % 3}
    np.savez(tmp_path / "d.npz", **arrays)
    sets = [f"data=npz:{tmp_path}/d.npz", "data.transform=[flatten]", "model.args={sizes: [4, 12, 3]}", "data.limit=null"]
    recipe = load_recipe(_stored(tiny_recipe), [*QUICK, *sets])

    def stop():
        raise SvdcError("stopped")

    with monkeypatch.context() as patch:
        at(patch, "train", stop)
        with pytest.raises(SvdcError, match="stopped"):
            run(recipe, tmp_path / "run")
    return recipe, arrays


def test_data_that_are_fewer_when_a_run_goes_on_are_refused(tiny_recipe, tmp_path, monkeypatch):
    recipe, arrays = stopped_run(tmp_path, monkeypatch, tiny_recipe)
    out = tmp_path / "run"
    before = (out / "state" / "dense.pt").read_bytes()
    np.savez(tmp_path / "d.npz", **{name: array[:40] for name, array in arrays.items()})
    failing(recipe, out, r"the split train has \d+ examples, but had \d+ when the run in .* began", DataError, resume=True)
    content = (tmp_path / "d.npz").read_bytes()
    (tmp_path / "d.npz").write_bytes(content[: len(content) // 2])
    failing(recipe, out, r"d\.npz", DataError, resume=True)
    (tmp_path / "d.npz").unlink()
    failing(recipe, out, r"d\.npz", DataError, resume=True)
    assert (out / "state" / "dense.pt").read_bytes() == before
    np.savez(tmp_path / "d.npz", **arrays)
    assert not any("have changed" in line for line in run(recipe, out, resume=True).get("warnings", []))
    assert open_run(out).model is not None


def test_data_with_other_values_when_a_run_goes_on_are_told_of(tiny_recipe, tmp_path, monkeypatch):
    recipe, arrays = stopped_run(tmp_path, monkeypatch, tiny_recipe)
    arrays["x"][:, 1] *= 2
    np.savez(tmp_path / "d.npz", **arrays)
    said = run(recipe, tmp_path / "run", resume=True)["warnings"]
    assert [line for line in said if line.startswith("the data (train, validation, test) have changed since the run began")]


def test_data_may_change_as_long_as_nothing_was_trained(tiny_recipe, tmp_path, monkeypatch):
    recipe, arrays = stopped_run(tmp_path, monkeypatch, tiny_recipe)
    (tmp_path / "run" / "state" / "dense.pt").unlink()
    np.savez(tmp_path / "d.npz", **{name: array[:40] for name, array in arrays.items()})
    results = run(recipe, tmp_path / "run", resume=True)
    assert sum(results["examples"].values()) == 40
    assert torch.isfinite(torch.tensor(results["sparse"]["metrics"]["nll"]))
