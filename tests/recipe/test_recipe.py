"""Recipes: what is refused and with which messages, overrides, the resolved form."""

import re
from pathlib import Path

import pytest
import yaml

from svdcompress.errors import RecipeError
from svdcompress.recipe import SHARES, Recipe, dump_recipe, find_recipe, in_epochs, load_recipe, parse_recipe, shipped_recipes


def write(path, text):
    path.write_text(text)
    return path


def test_every_shipped_recipe_is_valid_and_described():
    assert "digits" in shipped_recipes()
    for name, path in shipped_recipes().items():
        assert load_recipe(name) == load_recipe(path)
        assert load_recipe(name).description, name


def test_the_resolved_recipe_reads_back_as_itself(tmp_path):
    recipe = load_recipe(
        "digits", ["train.beta.stop=40%", "convert.share={weight: 0.8, input: 0.2}", "relevance.candidates=[3, 4]"]
    )
    assert load_recipe(write(tmp_path / "r.yaml", dump_recipe(recipe))) == recipe


def test_sections_may_be_one_string():
    recipe = parse_recipe({"model": "lenet-5", "data": "mnist:digits", "loss": "mse", "train": {"beta": "constant"}})
    assert (recipe.model.name, recipe.data.name, recipe.train.beta.name) == ("lenet-5", "mnist:digits", "constant")
    assert recipe.task == "regression"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("train: {epoch: 3}", "train.epoch: unknown field; did you mean train.epochs?"),
        ("epochs: 3", "did you mean dense.epochs or train.epochs or recover.epochs?"),
        ("train: {beta: {finale: 1}}", "did you mean train.beta.final?"),
        ("convert: {layers: [{match: fc1, shares: input}]}", "did you mean convert.layers.0.share?"),
        ("train: {epochs: many}", "train.epochs: should be a valid integer"),
        ("train: {lr: -1}", "train.lr: should be greater than 0 (got -1)"),
        ("train: {beta: {start: soon}}", "train.beta.start: a number of epochs, or a share of them such as 30% (got 'soon')"),
        ("train: {beta: {start: 10, stop: 5}}", "train.beta: start (10.0) is after stop (5.0)"),
        ("loss: hinge", "loss.name: unknown loss; use cross-entropy"),
        ("data: {validation: 0}", "data.validation: should be greater than 0"),
        ("prune: {round_to: 0}", "prune.round_to"),
        ("train: {lr: .inf}", "train.lr: should be a finite number (got inf)"),
        ("convert: {log_sigma2: .nan}", "convert.log_sigma2: should be a finite number (got nan)"),
        ("convert: {threshold: {weight: .inf}}", "convert.threshold.weight: should be a finite number"),
        ("convert: {share: inputs}", "convert.share: unknown name 'inputs'; use one or several of weight, input"),
        ("convert: {share: wieght}", "did you mean weight?"),
        ("convert: {share: []}", "convert.share: name at least one of weight"),
        ("convert: {share: {weight: 1, input: 0}}", "convert.share: parts must be above 0"),
        ("convert: {threshold: {rows: 3}}", "convert.threshold: unknown share 'rows'"),
        ("convert: {layers: [{match: a, share: rows}]}", "convert.layers.0.share: unknown name 'rows'"),
        ("convert: {layers: [{match: a, threshold: {rows: 3}}]}", "convert.layers.0.threshold: unknown share 'rows'"),
        ("convert: {layers: [{match: a, log_sigma2: -8, log_alpha: -6}]}", "convert.layers.0: log_sigma2 and log_alpha both"),
        ("convert: {variance_dtype: half}", "convert.variance_dtype: should be 'auto', 'float32' or 'bfloat16'"),
        ("relevance: {threshold: {rows: 3}}", "relevance.threshold: unknown share 'rows'"),
        ("relevance: {candidates: [3, {rows: 3}]}", "relevance.candidates.1: unknown share 'rows'"),
        ("export: {opset: 99}", "export.opset: should be less than or equal to 23"),
        ("export: {opset: 22}", "export.opset: model_mc.onnx draws random numbers, which onnxruntime supports up to 21"),
        ("loss: gausian-nll", "did you mean gaussian-nll?"),
        ("loss: 'package.module:loss'", "loss.task: package.module:loss is a loss of your own: set its task to one of"),
        ("loss: {name: mse, task: classification}", "loss.task: the task of mse is regression"),
        ("loss: {name: mse, label_smoothing: 0.1}", "loss.label_smoothing: only cross-entropy takes it, not mse"),
        ("loss: {name: binary, label_smoothing: 0.1}", "loss.label_smoothing: only cross-entropy takes it, not binary"),
        ("loss: {name: gaussian-nll, class_weights: balanced}", "loss.class_weights: only cross-entropy and binary take it"),
        ("loss: {name: 'a:b', task: binary, class_weights: [2]}", "loss.class_weights: only cross-entropy and binary take it"),
        ("loss: {name: binary, class_weights: [1, 2]}", "loss.class_weights: binary takes one weight"),
        ("loss: {tau: 4}", "loss.tau: only mse takes it, not cross-entropy"),
        ("train: 7", "train: should be a valid dictionary"),
        ("- a list", "a recipe is a mapping of sections"),
        ("train: {epochs: [3", "not YAML"),
    ],
)
def test_errors_name_the_file_and_the_field(tmp_path, content, said):
    path = write(tmp_path / "mine.yaml", content)
    with pytest.raises(RecipeError) as error:
        load_recipe(path)
    assert said in str(error.value)
    assert str(path) in str(error.value)


def test_settings_that_go_together_are_taken():
    for fine in (
        {"export": {"opset": 23, "monte_carlo": False}},
        {"export": {"opset": 22, "onnx": False}},
        {"export": {"opset": 21}},
        {"loss": {"name": "a.b:loss", "task": "regression"}},
        {"loss": {"name": "mse", "tau": 4, "label_smoothing": 0, "class_weights": None}},
        {"loss": {"name": "binary", "class_weights": [3]}},
        {"convert": {"share": {"weight": 0.8, "layer": 0.2}, "threshold": {"layer": 2}}},
    ):
        recipe = parse_recipe(fine)
        assert parse_recipe(yaml.safe_load(dump_recipe(recipe))) == recipe


def test_the_names_of_shares_are_those_of_the_layers():
    from svdcompress.layers import REDUCED, VARIANCE_DTYPES

    assert tuple(REDUCED) == SHARES
    assert all(parse_recipe({"convert": {"variance_dtype": name}}) for name in VARIANCE_DTYPES)


def test_all_problems_are_listed_one_line_each():
    with pytest.raises(RecipeError) as error:
        parse_recipe({"train": {"epochs": -1, "lr": 0}, "relevance": {"threshold": "high"}})
    assert [line.split(": ")[1] for line in str(error.value).splitlines()] == [
        "train.epochs",
        "train.lr",
        "relevance.threshold",
    ]


def test_overrides_are_yaml_and_errors_name_them():
    recipe = load_recipe(None, ["train.lr=1e-4", "convert.exclude=[head, '*.norm']", "model=lenet-5", "relevance.threshold=4"])
    assert recipe.train.lr == 1e-4
    assert recipe.convert.exclude == ["head", "*.norm"]
    assert (recipe.model.name, recipe.relevance.threshold) == ("lenet-5", 4.0)
    for override, said in (
        ("train.epoch=3", "--set train.epoch=3: train.epoch: unknown field"),
        ("train.epochs=x", "--set train.epochs=x: train.epochs"),
        ("train.epochs", "write it as section.field=value"),
        ("model.name.deep=3", "model.name has no fields"),
    ):
        with pytest.raises(RecipeError, match=said.replace("(", r"\(")):
            load_recipe("digits", [override])


def test_an_override_of_a_section_keeps_its_other_fields():
    recipe = load_recipe(None, ["data=npz:x.npz"], {"data.validation": 0.3})
    assert (recipe.data.name, recipe.data.validation) == ("npz:x.npz", 0.3)


def test_a_missing_recipe_lists_those_there_are(tmp_path):
    with pytest.raises(RecipeError, match=r"no such file, and no shipped recipe of that name \(there are: .*digits"):
        find_recipe(tmp_path / "nothing.yaml")


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ("nets/mine.py", "--model nets/mine.py:FUNCTION"),
        ("./mine.py:make", "--model ./mine.py:make or --data ./mine.py:make"),
        ("torchvision:resnet18", "--model torchvision:resnet18"),
        ("package.models:resnet18", "--model package.models:resnet18"),
        ("hf:bert", "--model hf:bert or --data hf:bert"),
        ("trained.pt", "--weights trained.pt"),
        ("runs/a/model.safetensors", "--weights runs/a/model.safetensors"),
        ("table.csv", "--data csv:table.csv"),
        ("imagefolder:photos", "--data imagefolder:photos"),
    ],
)
@pytest.mark.parametrize("there", [False, True])
def test_a_model_or_data_in_place_of_a_recipe_is_named(tmp_path, monkeypatch, given, option, there):
    monkeypatch.chdir(tmp_path)
    if there:
        Path(given).parent.mkdir(parents=True, exist_ok=True)
        Path(given).write_text("import torch\nnet: x: y")
    with pytest.raises(RecipeError, match=re.escape(f"{given}: not a recipe, which is a YAML file; did you mean {option}?")):
        load_recipe(given)


def test_a_recipe_may_have_any_other_name(tmp_path):
    for name in ("recipe", "a.yml", "b.txt", "c:d.yaml"):
        (tmp_path / name).write_text("train: {epochs: 3}")
        assert load_recipe(tmp_path / name).train.epochs == 3


def test_moments_are_epochs_or_shares_of_them():
    assert [in_epochs(moment, 40) for moment in (5.0, "25%", "0%")] == [5, 10, 0]


@pytest.mark.parametrize("asked", ["recover.schedule=cosine", "recover.schedule.warmup=5%", "recover.schedule={end: 0.1}"])
def test_recovery_falls_from_its_start_on_whatever_else_is_set_of_its_schedule(asked):
    plain = load_recipe(None, [])
    assert (plain.recover.schedule.start, plain.train.schedule.start) == ("0%", "50%")
    assert load_recipe(None, [asked]).recover.schedule.start == "0%"
    assert load_recipe(None, [asked.replace("recover", "train")]).train.schedule.start == "50%"
    assert load_recipe(None, [asked, "recover.schedule.start=20%"]).recover.schedule.start == "20%"


def test_no_field_shares_its_default_between_recipes():
    first, second = Recipe(), Recipe()
    first.train.beta.final = 0.5
    first.convert.layers.append(None)
    assert second.train.beta.final == "auto"
    assert second.convert.layers == []


def test_the_dump_is_plain_yaml():
    content = yaml.safe_load(dump_recipe(load_recipe("digits")))
    assert content["model"]["name"] == "mlp"
    assert set(content) == set(Recipe.model_fields)
