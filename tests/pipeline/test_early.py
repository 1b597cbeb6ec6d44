"""What is reported before training: classes against outputs, regressions without a loss, tokens, phases."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from svdcompress.errors import CheckpointError, DataError, ModelError
from svdcompress.pipeline import check_model, run
from svdcompress.recipe import DataSection, ModelSection, load_recipe
from svdcompress.sources import Data, FromDataset, InMemory, open_data, outputs_hint

FACTORY = "def make(width=8, n_classes=1000):\n    pass\n\ndef odd(width=8, kinds=1000):\n    pass\n\ndef none():\n    pass\n"


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("torchvision:resnet18", {}, "add --model-arg num_classes=4"),
        ("timm:resnet18", {"num_classes": 1000}, "add --model-arg num_classes=4"),
        ("hf:./folder", {}, "add --model-arg num_labels=4"),
        ("lenet-5", {"outputs": 1000}, "add --model-arg outputs=4"),
        ("mlp", {"sizes": [8, 6, 1000]}, "add --model-arg 'sizes=[8, 6, 4]'"),
        ("./mine.py:make", {}, "add --model-arg n_classes=4"),
        ("./mine.py:odd", {"width": 9}, "add --model-arg kinds=4"),  # found by its value
        ("./mine.py:none", {}, "let ./mine.py:none make a model with 4 outputs"),
    ],
)
def test_the_argument_that_says_how_many_outputs(here, name, args, said):
    assert outputs_hint(ModelSection(name=name, args=args), 1000, 4) == said


def tried(model, targets, inputs=None, held=True, task="classification", outputs=None, name="./mine.py:make"):
    """The data after a model was checked on it."""
    inputs = torch.randn(len(targets), 4) if inputs is None else inputs
    examples = InMemory(inputs, targets) if held else FromDataset(Listed(zip(inputs, targets, strict=True)))
    data = Data(examples, examples, examples, task, (int(targets.max()) + 1 if held else 0) if outputs is None else outputs)
    loss = {"classification": "cross-entropy", "regression": "mse"}[task]
    check_model(model, load_recipe(None, [f"model={name}", f"loss={loss}"]), data, inputs[:2])
    return data


class Listed(list):
    """A dataset that lists its classes, like torchvision's."""

    classes = ("a", "b", "c", "d")


@pytest.mark.parametrize("held", [True, False])
def test_more_outputs_than_classes_are_told_of(here, held):
    said = tried(nn.Linear(4, 1000), torch.arange(8) % 4, held=held).warnings
    assert said == ["the data has 4 classes, the model 1,000 outputs: add --model-arg n_classes=4"]
    assert not tried(nn.Linear(4, 4), torch.arange(8) % 4, held=held).warnings
    maps = nn.Conv2d(1, 7, 1)
    assert "4 classes, the model 7 outputs" in tried(maps, torch.randint(4, (8, 3, 3)) | 3, torch.randn(8, 1, 3, 3)).warnings[0]


def test_fewer_outputs_than_classes_are_an_error_that_names_the_argument(here):
    with pytest.raises(DataError, match=r"label 2 in row 2 .*the model has 2 outputs; add --model-arg n_classes=4"):
        tried(nn.Linear(4, 2), torch.arange(8) % 4)
    with pytest.raises(DataError, match=r"the model has 1 output; for a regression use --loss mse, .* --loss b"):
        tried(nn.Linear(4, 1), torch.arange(8) % 2)
    rows = torch.tensor([[0, 1, 2], [0, 1, 255]])
    with pytest.raises(DataError, match=r"label 255 in row 1 .* a position that does not count has the class -100"):
        tried(nn.Linear(4, 3), rows, torch.randn(2, 3, 4), outputs=3)


def test_targets_that_look_like_a_regression(here):
    (here / "ages.csv").write_text("\n".join(["x,age", *(f"{i % 7},{20 + i}" for i in range(60))]))
    section = DataSection(name="csv:ages.csv", target="age")
    said = open_data(section, "classification").warnings
    assert len(said) == 1 and "different whole numbers in" in said[0] and said[0].endswith("for a regression, use --loss mse")
    assert not open_data(section, "regression").warnings
    (here / "ages.csv").write_text("\n".join(["x,age", *(f"{i % 7},{20 + i / 7}" for i in range(60))]))
    with pytest.raises(DataError, match=r"which is not a class; for a regression, use --loss mse"):
        open_data(section, "classification")
    (here / "few.csv").write_text("\n".join(["x,age", *(f"{i % 7},{20 + i % 3}" for i in range(60))]))
    assert not open_data(DataSection(name="csv:few.csv", target="age"), "classification").warnings


class Language(nn.Module):
    def __init__(self, positions=8, words=20, kind="bert"):
        super().__init__()
        self.config = SimpleNamespace(max_position_embeddings=positions, vocab_size=words, model_type=kind)
        self.words, self.places, self.head = nn.Embedding(words, 4), nn.Embedding(positions, 4), nn.Linear(4, 2)

    def forward(self, input_ids):
        start = 2 if self.config.model_type == "roberta" else 0
        places = torch.arange(start, start + input_ids.shape[1])
        return self.head((self.words(input_ids) + self.places(places)).mean(1))


@pytest.mark.parametrize(
    ("kind", "length", "largest", "said"),
    [
        ("bert", 9, 19, r"have 9 tokens, but the model takes 8 \(max_position_embeddings\): add --data-arg max_length=8"),
        ("roberta", 8, 19, r"inputs have 8 tokens, but the model takes 6 .* --data-arg max_length=6"),
        ("bert", 8, 20, r"There is a token 20, but the model knows only 0 to 19 \(vocab_size\): does the tokenizer"),
        ("bert", 8, 19, None),
    ],
)
def test_tokens_that_a_language_model_does_not_take(kind, length, largest, said):
    inputs = {"input_ids": torch.full((4, length), largest)}
    if said is None:
        tried(Language(kind=kind), torch.arange(4) % 2, inputs_of(inputs))
        return
    with pytest.raises(ModelError, match=said):
        tried(Language(kind=kind), torch.arange(4) % 2, inputs_of(inputs))


def inputs_of(inputs):
    """A dict that can be sliced like a tensor."""

    class Rows(dict):
        def __getitem__(self, key):
            return {name: value[key] for name, value in self.items()} if isinstance(key, slice) else super().__getitem__(key)

    return Rows(inputs)


def test_weights_to_start_from_are_trained_first_and_what_they_lack_is_told(tmp_path):
    torch.manual_seed(0)
    encoder = {f"0.{name}": tensor for name, tensor in nn.Linear(8, 24).state_dict().items()}
    torch.save(encoder, tmp_path / "encoder.pt")
    (tmp_path / "net.py").write_text(
        "from torch import nn\ndef make():\n    return nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 3))\n"
    )
    x = torch.randn(200, 8)
    np.savez(tmp_path / "x.npz", x=x.numpy(), y=x[:, :3].argmax(1).numpy())
    fields = {"model": f"{tmp_path}/net.py:make", "data": f"npz:{tmp_path / 'x.npz'}", "weights": f"{tmp_path}/encoder.pt"}
    quick = {"dense.epochs": 2, "train.epochs": 1, "recover.epochs": 0, "uncertainty.samples": 0, "report.latency": False}
    results = run(
        load_recipe(None, fields={**fields, **quick, "weights.trained": False, "export.onnx": False}), tmp_path / "run"
    )
    assert any("2 tensors are not in it and keep their initial values: 2.weight, 2.bias" in line for line in results["notes"])
    assert [row["stage"] for row in results["history"]].count("dense") == 2
    with pytest.raises(CheckpointError, match="--untrained"):
        run(load_recipe(None, fields={**fields, **quick}), tmp_path / "other")


@pytest.mark.parametrize("held", [True, False])
def test_labels_of_one_class_are_told_of(here, held):
    said = tried(nn.Linear(4, 3), torch.zeros(8, dtype=torch.long), held=held, outputs=1).warnings
    assert said == ["all labels are of the same class: nothing can be learned from them, and no error can be measured"]
