"""Fields that `recover.optimizer: auto` may choose: open only where they are not set, in files, options and Python alike."""

import copy

import pytest
import yaml

from svdcompress.recipe import (
    BY_SGD,
    HEADING,
    Distillation,
    Recipe,
    RecoverSection,
    as_written,
    changed,
    dump_recipe,
    from_earlier,
    left_open,
    load_recipe,
    parse_recipe,
)
from svdcompress.recipe._auto import EARLIER

USUAL = {"lr": 5e-4, "weight_decay": 0.0, "schedule.warmup": 0.0, "distill.weight": 0.0, "distill.temperature": 2.0}
"""The defaults of the fields in BY_SGD."""


def nested(field, value):
    """The section `recover` of a recipe's file that sets one field."""
    for name in reversed(field.split(".")):
        value = {name: value}
    return value


def by_file(folder, field, value):
    (folder / "mine.yaml").write_text(yaml.safe_dump({"recover": nested(field, value)}))
    return load_recipe(folder / "mine.yaml")


def by_set(folder, field, value):
    return load_recipe(None, [f"recover.{field}={value}"])


def by_option(folder, field, value):
    return load_recipe(None, fields={f"recover.{field}": value})


def by_settings(folder, field, value):
    return changed(load_recipe(None), {f"recover.{field}": value})


def by_section(folder, field, value):
    return Recipe(recover=RecoverSection(**nested(field, value)))


def by_assignment(folder, field, value):
    recipe = Recipe()
    inside, _, name = field.rpartition(".")
    setattr(getattr(recipe.recover, inside) if inside else recipe.recover, name, value)
    return recipe


WAYS = [by_file, by_set, by_option, by_settings, by_section, by_assignment]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("field", USUAL)
def test_a_field_that_is_set_to_its_default_is_not_open(way, field, tmp_path):
    recipe = way(tmp_path, field, USUAL[field])
    others = [name for name in USUAL if name != field]
    assert recipe == Recipe() and left_open(recipe.recover) == others
    read = parse_recipe(yaml.safe_load(dump_recipe(recipe)))
    for same in (read, changed(recipe, {"seed": 0}), copy.deepcopy(recipe), recipe.model_copy(update={"out": None})):
        assert same == recipe and left_open(same.recover) == others


def test_all_are_open_if_nothing_is_set_and_none_if_an_optimizer_is_named():
    assert list(USUAL) == list(BY_SGD) == left_open(Recipe().recover)
    assert left_open(load_recipe("digits").recover) == list(USUAL)[1:]  # it has an lr
    for optimizer in ("adam", "adamw", "sgd"):
        assert left_open(RecoverSection(optimizer=optimizer)) == []
    for inside in ("schedule=cosine", "schedule={start: 0%}", "distill={layers: 30}", "epochs=7"):  # not what is beside them
        assert left_open(load_recipe(None, [f"recover.{inside}"]).recover) == list(USUAL)
    assert left_open(RecoverSection(distill=Distillation())) == list(USUAL)


def test_a_file_holds_every_field_but_the_open_ones():
    whole = Recipe().model_dump(mode="json")
    assert as_written(load_recipe(None, ["recover.optimizer=adam"])) == {
        **whole,
        "recover": {**whole["recover"], "optimizer": "adam"},
    }
    found = yaml.safe_load(dump_recipe(load_recipe(None, ["recover.distill.weight=0"])))
    wanted = copy.deepcopy(whole)
    del wanted["recover"]["lr"], wanted["recover"]["weight_decay"], wanted["recover"]["schedule"]["warmup"]
    del wanted["recover"]["distill"]["temperature"]
    assert found == wanted and found["recover"]["distill"]["weight"] == 0


def test_in_files_of_earlier_versions_only_other_values_than_the_defaults_are_set(tmp_path):
    """They hold every field, set or not."""
    recipe = load_recipe(None, ["recover.lr=0.003", "recover.distill.weight=0.5", "seed=3"])
    text = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)
    (tmp_path / "recipe.yaml").write_text(EARLIER + text)
    found = load_recipe(tmp_path / "recipe.yaml")
    assert found == recipe and left_open(found.recover) == ["weight_decay", "schedule.warmup", "distill.temperature"]
    found = load_recipe(tmp_path / "recipe.yaml", ["recover.weight_decay=0"])
    assert found == recipe and left_open(found.recover) == ["schedule.warmup", "distill.temperature"]
    for heading in ("", HEADING):  # a user's own file, or one of this version: all that it holds is set
        (tmp_path / "recipe.yaml").write_text(heading + text)
        assert left_open(load_recipe(tmp_path / "recipe.yaml").recover) == []
    named = {"recover": {"optimizer": "adam", "lr": 5e-4}}
    assert from_earlier(copy.deepcopy(named)) == named
    for other in (None, [], {}, {"recover": None}, {"recover": {"schedule": "cosine", "distill": 3}}):
        assert from_earlier(copy.deepcopy(other)) == other
