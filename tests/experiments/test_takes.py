"""Which recipe settings an experiment takes, and that it refuses the others."""

import pytest

from svdcompress.errors import OutputError, RecipeError, UsageError
from svdcompress.experiments import Context, check, outline, run, run_recipe
from svdcompress.recipe import dump_recipe, load_recipe


@pytest.mark.parametrize(
    "name, override",
    [
        ("co2", "train.epochs=3"),
        ("co2", "convert.threshold=2"),
        ("leak", "model=lenet-5"),
        ("leak", "weights=trained.pt"),
        ("leak", "loss=mse"),
        ("leak", "data=mnist:DIR"),  # it makes its own data
        ("vae", "export.onnx=false"),
        ("bayes-linear", "train.beta.final=0.5"),
    ],
)
def test_what_has_no_effect_is_refused(name, override, tmp_path):
    field = override.partition("=")[0]
    with pytest.raises(RecipeError, match=rf"{field}.*: without effect on the experiment {name}.*experiment.settings"):
        run_recipe(load_recipe(name, [override]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_was_given_is_refused_as_its_default_too():
    recipe = load_recipe("co2", ["train.epochs=20"])
    check(recipe)  # the values alone do not show it
    with pytest.raises(RecipeError, match=r"train\.epochs: without effect"):
        check(recipe, ["train.epochs", "seed", "experiment.settings.epochs"])


@pytest.mark.parametrize("name", ["bayes-linear", "co2", "flow", "leak", "rotated-digit", "vae"])
def test_the_shipped_recipe_and_the_one_of_its_run_are_taken(name, tmp_path):
    recipe = load_recipe(name)
    check(recipe)
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    found = outline(load_recipe(tmp_path))
    assert found["settings"].items() >= recipe.experiment.settings.items() and found["experiment"] == name
    assert (found["data"] == "mnist") == (name in ("rotated-digit", "vae"))


def test_the_data_of_those_that_read_it_may_be_named():
    check(load_recipe("vae", ["data=mnist:DIR", "data.validation=0.2"]), ["data", "data.validation"])


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_is_not_there(tmp_path, device):
    with pytest.raises(UsageError, match=f"device: .*{device}"):
        run("bayes-linear", {"epochs": 1}, Context(tmp_path / "run", device=device))
    assert not (tmp_path / "run").exists()


def test_overwrite_moves_the_old_folder_aside(tmp_path, monkeypatch):
    from svdcompress.experiments import _bayes_linear

    folder, lines = tmp_path / "run", []
    folder.mkdir()
    (folder / "mine.txt").write_text("keep")
    monkeypatch.setattr(_bayes_linear, "run", lambda settings, context: {"pictures": []})
    run("bayes-linear", {}, Context(folder, say=lines.append), overwrite=True)
    assert {path.name for path in folder.iterdir()} == {"report.json", "report.html"}
    assert (tmp_path / "run.old-1" / "mine.txt").read_text() == "keep" and "run.old-1" in lines[0]


def test_a_run_that_fails_leaves_the_name_free_and_one_that_cannot_draw_says_so(tmp_path, monkeypatch):
    from svdcompress.experiments import _bayes_linear, _pictures

    def draw(settings, context):
        drawing, _ = _pictures.figure(1, 1, (1, 1))
        return {"pictures": [_pictures.save(drawing, context.out / "absent" / "a.png", "a", "b")]}

    monkeypatch.setattr(_bayes_linear, "run", draw)
    with pytest.raises(OutputError, match=r"a\.png: cannot be written"):
        run("bayes-linear", {}, Context(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
