"""Several runs in one table and one picture, and a grid of settings."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from svdcompress import report
from svdcompress.checkpoint import read_manifest, save
from svdcompress.cli import app
from svdcompress.cli._compare import _folder_names, _values
from svdcompress.errors import ExportError, Interrupted, OutputError, PruneError, UsageError
from svdcompress.pipeline import open_run


def svdc(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "160"})


def test_runs_are_put_side_by_side(tiny_run, tmp_path):
    folder, results = tiny_run
    found = json.loads(svdc("compare", folder, folder, "--json").stdout)
    assert len(found) == 2 and found[0] == found[1]
    assert found[0]["sparse"] == pytest.approx(results["sparse"]["metrics"]["error"])
    assert found[0]["nonzero"] == pytest.approx(results["compression"]["nonzero"])
    page = svdc("compare", folder, folder, "--html", tmp_path / "c.html")
    assert page.exit_code == 0 and str(tmp_path / "c.html") in page.stdout.replace("\n", "")
    assert "Sizes and latencies" in (tmp_path / "c.html").read_text()
    shown = svdc("compare", folder, "--picture", tmp_path / "c.png")
    assert shown.exit_code == 0 and (tmp_path / "c.png").read_bytes()[:4] == b"\x89PNG"
    assert "error in % on test data" in shown.stdout
    assert svdc("compare", tmp_path).exit_code == OutputError.exit_code
    assert svdc("compare", folder, "--measure", "size").exit_code == UsageError.exit_code


def test_values_of_a_grid():
    assert _values("train.beta.final=0.1,0.3") == ("train.beta.final", ["0.1", "0.3"])
    assert _values("convert.share={weight: 0.8, input: 0.2},weight") == (
        "convert.share",
        ["{weight: 0.8, input: 0.2}", "weight"],
    )
    for wrong in ("train.epochs", "=3", "train.epochs=1,,2"):
        with pytest.raises(UsageError, match="FIELD=A,B"):
            _values(wrong)


def test_a_sweep_runs_all_combinations_once(tiny_recipe, tmp_path):
    from svdcompress.recipe import dump_recipe

    (tmp_path / "tiny.yaml").write_text(dump_recipe(tiny_recipe))
    quick = ["--set", "uncertainty.samples=0", "--set", "report={html: false, latency: false}", "--set", "export.onnx=false"]
    command = ["sweep", tmp_path / "tiny.yaml", "--grid", "train.epochs=1,2", "--out", tmp_path / "grid", *quick]
    first = svdc(*command)
    assert first.exit_code == 0, first.output
    folders = sorted(path.name for path in (tmp_path / "grid").iterdir())
    assert folders == ["train.epochs-1", "train.epochs-2"]
    times = [(tmp_path / "grid" / name / "report.json").stat().st_mtime_ns for name in folders]
    again = svdc(*command)
    assert again.exit_code == 0 and "finished already" in again.output
    assert times == [(tmp_path / "grid" / name / "report.json").stat().st_mtime_ns for name in folders]
    other = svdc(*command, "--seed", 7, "--set", "train.lr=0.5")
    said = " ".join(other.output.split())
    assert other.exit_code == UsageError.exit_code and "other settings than these" in said
    assert "seed is 0 there and 7 here" in said and "train.lr is 0.01 there and 0.5 here" in said
    assert "another --out, or move the folder away" in said


def test_a_sweep_compares_before_it_runs(tiny_recipe, tmp_path, monkeypatch):
    """Even if only the last folder holds a different run."""
    from svdcompress import pipeline
    from svdcompress.recipe import dump_recipe

    (tmp_path / "tiny.yaml").write_text(dump_recipe(tiny_recipe))
    last = tmp_path / "grid" / "train.epochs-2"
    last.mkdir(parents=True)
    (last / "recipe.yaml").write_text(dump_recipe(tiny_recipe))  # with 4 epochs
    (last / "report.json").write_text("{}")
    ran = []
    monkeypatch.setattr(pipeline, "run", lambda *given, **more: ran.append(given))
    result = svdc("sweep", tmp_path / "tiny.yaml", "--grid", "train.epochs=1,2", "--out", tmp_path / "grid")
    assert result.exit_code == UsageError.exit_code and ran == []
    assert "train.epochs is 4 there and 2 here" in " ".join(result.output.split())


@pytest.fixture
def sweeping(tiny_run, tiny_recipe, tmp_path, monkeypatch):
    """A sweep whose runs are copies of one, except that it fails where train.epochs is 2."""
    from svdcompress import pipeline
    from svdcompress.recipe import dump_recipe

    ran = []

    def run(recipe, folder, **more):
        ran.append(folder.name)
        if recipe.train.epochs == 2:
            raise PruneError("nothing is left of layer '0'")
        shutil.copytree(tiny_run[0], folder)

    (tmp_path / "tiny.yaml").write_text(dump_recipe(tiny_recipe))
    monkeypatch.setattr(pipeline, "run", run)
    command = ["sweep", tmp_path / "tiny.yaml", "--out", tmp_path / "grid"]
    return lambda *more: (svdc(*command, *more), ran)


def test_a_combination_that_fails_does_not_keep_the_others_from_running(sweeping):
    result, ran = sweeping("--grid", "train.epochs=1,2,3")
    assert ran == ["train.epochs-1", "train.epochs-2", "train.epochs-3"]
    assert result.exit_code == PruneError.exit_code
    said = " ".join(result.output.split())
    assert "1 of 3 combinations failed" in said and "train.epochs-2: nothing is left of layer '0'" in said
    table = [line for line in result.stdout.splitlines() if "train.epochs-" in line]
    assert len(table) == 2 and not any("epochs-2" in line for line in table)
    result, _ = sweeping("--grid", "train.epochs=2")
    assert result.exit_code == PruneError.exit_code and "1 of 1 combinations failed" in result.output


def test_a_stop_ends_a_sweep(sweeping, monkeypatch):
    from svdcompress import pipeline

    def stopped(*given, **more):
        raise Interrupted("stopped")

    monkeypatch.setattr(pipeline, "run", stopped)
    assert sweeping("--grid", "train.epochs=1,3")[0].exit_code == Interrupted.exit_code


def test_files_of_the_end_are_checked_ahead_of_the_work(sweeping, tiny_run, tmp_path):
    for option, place, error in [
        ("--picture", tmp_path / "p.foo", UsageError),
        ("--picture", tmp_path / "no" / "p.png", OutputError),
        ("--html", tmp_path / "no" / "c.html", OutputError),
        ("--html", tmp_path, OutputError),
    ]:
        result, ran = sweeping("--grid", "train.epochs=1,3", option, place)
        assert (result.exit_code, ran) == (error.exit_code, []), result.output
        assert svdc("compare", tiny_run[0], option, place).exit_code == error.exit_code
    result, ran = sweeping("--grid", "train.epochs=1,3", "--picture", tmp_path / "grid" / "p.png")  # in the folder of the runs
    assert result.exit_code == 0 and len(ran) == 2 and (tmp_path / "grid" / "p.png").is_file()


def test_combinations_whose_names_are_alike_have_folders_of_their_own(sweeping):
    _, ran = sweeping("--grid", "convert.exclude=['0*'],['0?'],['2']")
    assert len(set(ran)) == 3 and ran[1] == f"{ran[0]}-2"
    assert _folder_names([["a=1*"], ["a=1?"], ["a=1--2"], ["a=1!"]]) == ["a-1-", "a-1--2", "a-1--2-2", "a-1--3"]


def test_a_field_is_named_once_and_long_names_are_cut(sweeping):
    result, ran = sweeping("--grid", "train.lr=0.01,0.02", "--grid", "train.lr=0.03")
    assert result.exit_code == UsageError.exit_code and ran == [] and "train.lr: named twice" in result.output
    result, ran = sweeping("--grid", "out=a,b")
    assert result.exit_code == UsageError.exit_code and ran == []
    long = ",".join(f"layer{index}.with.a.long.name" for index in range(40))
    result, ran = sweeping("--grid", f"convert.exclude=[{long}],[{long},other]")
    assert len(set(ran)) == 2 and all(len(name) == 200 and name.startswith("convert.exclude--layer0") for name in ran)
    (name,) = _folder_names([["data.name=imagefolder:" + "写真" * 60]])
    assert 190 < len(name.encode()) <= 200
    assert ran == _folder_names([[f"convert.exclude=[{long}]"], [f"convert.exclude=[{long},other]"]])


def test_a_combination_without_a_file_has_failed_however_often_it_is_asked(sweeping, tmp_path):
    assert sweeping("--grid", "train.epochs=1,3")[0].exit_code == 0
    (tmp_path / "grid" / "train.epochs-3" / "model.onnx").unlink()
    for name in ("train.epochs-1", "train.epochs-3"):  # as runs of these settings leave it
        file = tmp_path / "grid" / name / "recipe.yaml"
        file.write_text(file.read_text().replace("epochs: 4", f"epochs: {name[-1]}", 1))
    for _ in range(2):
        result, _ = sweeping("--grid", "train.epochs=1,3")
        assert result.exit_code == ExportError.exit_code, result.output
        said = " ".join(result.output.split())
        assert "1 of 2 combinations failed" in said and "train.epochs-3: finished without model.onnx" in said
        assert sum("train.epochs-" in line for line in result.stdout.splitlines()) == 2  # its figures are there


@pytest.fixture
def two(tiny_run, tmp_path):
    """Copies of a run, and their reports to change: write(name, results)."""
    for name in ("one", "two"):
        shutil.copytree(tiny_run[0], tmp_path / name)

    def write(name, **changed):
        file = tmp_path / name / "report.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))

    return tmp_path / "one", tmp_path / "two", write


def test_errors_and_rmses_have_no_common_axis(two, tiny_run, tmp_path):
    one, other, write = two
    sides = {side: {**tiny_run[1][side], "metrics": {"rmse": value}} for side, value in (("dense", 0.002), ("sparse", 0.001))}
    write("two", task="regression", changes={"rmse": {"low": -0.0012, "high": -0.0008}}, **sides)
    for more in ((), ("--json",)):
        shown = svdc("compare", one, other, "--picture", tmp_path / "c.png", "--html", tmp_path / "c.html", *more)
        assert shown.exit_code == UsageError.exit_code and "-0.0012" in shown.stdout and "picture: " not in shown.stdout
        assert "error: --picture: runs with errors and runs with RMSEs have no axis" in " ".join(shown.stderr.split())
        assert not (tmp_path / "c.png").exists()
        (tmp_path / "c.html").unlink()
    shown = svdc("compare", one, other, "--html", tmp_path / "c.html")
    assert shown.exit_code == 0 and "-0.0012 to -0.0008" in shown.stdout
    text = (tmp_path / "c.html").read_text()
    assert text.count("test RMSE of each run") == text.count("test error (%) of each run") == 1
    assert "two: " in text and "test RMSE 0.001, dense 0.002" in text and "one: " in text


def test_latencies_name_their_batch_and_all_batches_are_shown(two, tiny_run):
    one, other, write = two
    ratios = {**tiny_run[1]["compression"], "latency": {"batch_1": 1.5, "batch_8": 3.0, "batch_128": 2.0}}
    write("two", compression=ratios)
    shown = svdc("compare", one, other).stdout
    assert "batch 1 " in shown and "batch 8 " in shown and "3x" in shown and "–" in shown
    results = json.loads((other / "report.json").read_text())
    figure = report.plot_tradeoff(results, measure="latency")
    assert figure.axes[0].get_xlabel() == "times faster (batch 1)"
    (line,) = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert float(line.get_xdata()[0]) == 1.5


def test_a_renamed_folder_has_its_own_name_in_the_picture(two, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(report, "plot_tradeoff", lambda *found, **more: drawn.append([f["name"] for f in found]) or figure)
    figure = type("Figure", (), {"savefig": lambda *given, **more: None})()
    assert svdc("compare", *two[:2], "--picture", tmp_path / "c.png").exit_code == 0
    assert drawn == [["one", "two"]]


def test_runs_that_were_tested_on_other_data_are_told(two, monkeypatch):
    one, other, _ = two
    assert "tested on different data" not in svdc("compare", one, other).output
    extra = read_manifest(other / "model.safetensors")["extra"]
    extra["data"]["test"]["checksum"] += 1  # as after another preparation of the inputs
    save(open_run(other).model, other / "model.safetensors", extra=extra)
    assert "tested on different data" not in svdc("compare", one, other).output
    extra["data"]["test"] |= {"targets": None, "examples": extra["data"]["test"]["examples"] + 1}  # of data read as needed
    save(open_run(other).model, other / "model.safetensors", extra=extra)
    assert "tested on different data" in " ".join(svdc("compare", one, other).output.split())
    extra = read_manifest(one / "model.safetensors")["extra"]
    extra["data"]["test"]["targets"] += 1
    save(open_run(other).model, other / "model.safetensors", extra=extra)
    assert f"{one} and {other} were tested on different data" in " ".join(svdc("compare", one, other).output.split())
