"""`--model-arg` and `--data-arg` together with a recipe that has arguments of its own."""

import pytest

from svdcompress.cli._settings import Settings


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(
        "model: {name: './m.py:net', args: {width: 8, depth: 2}}\ndata: {name: './d.py:data', args: {train: 50000}}\n"
    )
    return str(path)


def test_they_join_those_of_the_recipe(recipe):
    made = Settings(recipe, model_arg=["width=16"], data_arg=["folder=photos", "seeds=[1, 2]"]).resolved()
    assert made.model.args == {"width": 16, "depth": 2}
    assert made.data.args == {"train": 50000, "folder": "photos", "seeds": [1, 2]}
    assert Settings(recipe, data_arg=["folder=photos"]).given() == ["data.args.folder"]


def test_another_factory_has_none_of_them(recipe):
    made = Settings(recipe, model="./o.py:net", model_arg=["size=3"], data="./e.py:data", data_arg=["folder=photos"]).resolved()
    assert (made.model.args, made.data.args) == ({"size": 3}, {"folder": "photos"})


def test_set_has_the_last_word(recipe):
    made = Settings(recipe, data_arg=["folder=photos"], set_=["data.args={folder: here}"]).resolved()
    assert made.data.args == {"folder": "here"}
