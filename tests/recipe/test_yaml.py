"""Recipes that are contradictory, larger than they look, or impossible to store as intended."""

from __future__ import annotations

import time

import pytest

from svdcompress.errors import RecipeError
from svdcompress.recipe import dump_recipe, load_recipe, parse_recipe


def refused(tmp_path, text, *words):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    started = time.monotonic()
    with pytest.raises(RecipeError) as error:
        load_recipe(path)
    said = str(error.value)
    assert all(word in said for word in (*words, "r.yaml")), said
    assert len(said) < 1000 and time.monotonic() - started < 5
    return said


def test_a_key_that_occurs_twice_is_an_error_with_its_line(tmp_path):
    refused(tmp_path, "train:\n  epochs: 3\n  lr: 0.1\n  epochs: 4\n", "the key 'epochs' occurs twice", "line 4")
    refused(tmp_path, "seed: 1\ndata: digits\nseed: 2\n", "the key 'seed' occurs twice", "line 3")
    refused(tmp_path, "model: {name: mlp, args: {sizes: [1, 2], sizes: [3]}}\n", "the key 'sizes' occurs twice")


def test_aliases_do_not_multiply(tmp_path):
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)]
    refused(tmp_path, "\n".join(lines), "aliases expanded")
    refused(tmp_path, "model:\n  args: &a\n    b: *a\n", "contains itself")
    refused(tmp_path, "model: " + "[" * 5000, "nested more than 64 deep")
    refused(tmp_path, "model: " + "{a: " * 100 + "1" + "}" * 100, "nested more than 64 deep")
    refused(tmp_path, "x: 1\n" * 300_000, "at most")
    assert load_recipe(None, ["model={name: mlp, args: {sizes: &s [2, 3], other: *s}}"]).model.args["other"] == [2, 3]


@pytest.mark.parametrize("section", ["model", "data"])
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("2024-01-31", "start.at: a date"),
        ("2024-01-31 10:00:00", "start.at: a datetime"),
        (".inf", "start.at: inf is not finite"),
        (".nan", "start.at: nan is not finite"),
        ("!!binary aGVsbG8=", "start.at: a bytes"),
        ("!!set {a, b}", "start.at: a set"),
        ("{1: a}", "start.at: the key 1 is a int, not text"),
        ("1" + "0" * 30, "start.at: a whole number beyond 64 bits"),
    ],
)
def test_arguments_that_a_stored_recipe_would_change_are_refused(tmp_path, section, value, said):
    """They used to be stored as null or as text, and a resumed run then built another model."""
    refused(tmp_path, f"{section}:\n  name: mlp\n  args:\n    start:\n      at: {value}\n", section, said)


def test_what_is_stored_is_what_was_given():
    args = {"a": 1, "b": 1.5, "c": True, "d": None, "e": [1, {"f": "2024-01-31"}], "g": 1e-300, "h": -(2**63)}
    recipe = parse_recipe({"model": {"name": "mlp", "args": args}})
    import yaml

    assert yaml.safe_load(dump_recipe(recipe))["model"]["args"] == args


@pytest.mark.parametrize(
    "setting",
    ["seed=true", "train.epochs=true", "train.lr=false", "data.limit=yes", "data.image_size=[true, 4]", "train.shrink=true",
     "convert.share={weight: true}", "relevance.candidates=[true]", "loss.class_weights=[true, 1]"],
)  # fmt: skip
def test_true_is_no_number(setting):
    with pytest.raises(
        RecipeError, match=f"{setting.partition('=')[0]}.*neither a number nor a name|{setting.partition('=')[0]}"
    ):
        load_recipe(None, [setting])


def test_flags_are_flags_still():
    recipe = load_recipe(None, ["train.compile=true", "recover.noise=false", "relevance.coupled=true", "model.args={a: true}"])
    assert (recipe.train.compile, recipe.recover.noise, recipe.relevance.coupled) == (True, False, True)
    assert recipe.model.args == {"a": True}


@pytest.mark.parametrize("text", ["no", "off", "'no'", "false"])
def test_no_precision_is_written_as_yaml_reads_it(text):
    """The error for a loss that is not finite suggests train.precision=no, which YAML reads as false."""
    assert load_recipe(None, [f"train.precision={text}", f"recover.precision={text}"]).train.precision == "no"
    with pytest.raises(RecipeError, match=r"train\.precision"):
        load_recipe(None, ["train.precision=yes"])


@pytest.mark.parametrize(
    "setting", ["uncertainty.samples=100000000000000000000", "train.epochs=100000000000000000000", "data.image_size=[99999, 4]"]
)
def test_numbers_beyond_all_use(setting):
    with pytest.raises(RecipeError, match=setting.partition("=")[0]):
        load_recipe(None, [setting])


def test_messages_stay_readable(tmp_path):
    refused(tmp_path, f"train: {{epochs: '{'x' * 200_000}'}}", "characters left out")
    refused(tmp_path, f"? {'k' * 100_000}\n: 1", "unknown field")
    with pytest.raises(RecipeError) as error:
        load_recipe(None, [f"train.epochs=[{'1, ' * 30_000}1]"])
    assert len(str(error.value)) < 4001
