"""Outputs besides the one that is trained and judged: which of them a run warns about."""

import pytest
import torch
from torch import nn

from svdcompress.batch import other_outputs
from svdcompress.errors import ModelError
from svdcompress.pipeline import check_model
from svdcompress.recipe import load_recipe
from svdcompress.sources import Data, InMemory


class Detector(nn.Module):
    """Classes and boxes from one trunk, in any container."""

    def __init__(self, form, frozen=False):
        super().__init__()
        self.trunk, self.classes, self.boxes = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 4)
        self.form = form
        self.requires_grad_(not frozen)

    def forward(self, x):
        found = self.trunk(x).relu()
        return self.form(self.classes(found), self.boxes(found))


def warnings_of(form, loss="cross-entropy", targets=None, frozen=False):
    """The warnings for a model before training."""
    examples = InMemory(torch.randn(6, 4), torch.arange(6) % 3 if targets is None else targets)
    recipe = load_recipe(None, ["model=./mine.py:make", f"loss={loss}"])
    data = Data(examples, examples, examples, recipe.task, 3)
    check_model(Detector(form, frozen), recipe, data, examples.inputs[:2])
    return data.warnings


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("form", "main", "named"),
    [
        (lambda c, b: {"boxes": b, "logits": c}, "logits", "boxes (2, 4)"),
        (lambda c, b: (c, b), "output_0", "output_1 (2, 4)"),
        (lambda c, b: {"logits": c, "maps": {"fine": [b]}, "loss": b.mean()}, "logits", "maps_fine_0 (2, 4)"),
        (lambda c, b: {"last_hidden_state": c, "boxes": b}, "output", "boxes (2, 4)"),
    ],
)
def test_an_output_that_nothing_trains_is_told_before_training(form, main, named, frozen):
    (said,) = warnings_of(form, frozen=frozen)
    assert said.startswith(
        f"{main} (2, 3) is what is trained and evaluated. The model also returns {named}: nothing here trains or evaluates it; "
        "leave its layers out (--set"
    )


def test_what_is_no_further_prediction_is_not_told(tmp_path, monkeypatch):
    assert not warnings_of(lambda c, b: c)
    assert not warnings_of(lambda c, b: {"logits": c, "probabilities": c.softmax(1), "best": c.argmax(1)})
    inner = {"hidden_states": 3, "encoder_attentions": 3, "past_key_values": 2}
    assert not warnings_of(lambda c, b: {"loss": None, "logits": c, **{name: (b,) * count for name, count in inner.items()}})
    assert not warnings_of(lambda c, b: (b[:, :2], b[:, 2:]), "gaussian-nll", torch.randn(6, 2))  # mean and log variance
    (tmp_path / "own.py").write_text("def loss(output, targets):\n    return output['boxes'].square().mean()\n")
    monkeypatch.chdir(tmp_path)
    own = "{name: ./own.py:loss, task: classification}"
    assert not warnings_of(lambda c, b: {"logits": c, "boxes": b}, own)  # it gets both


def test_logits_that_do_not_come_first_are_told_what_to_do():
    def other_way_round(c, b):
        return [b[:, None], c]

    with pytest.raises(
        ModelError, match=r"of shape \(2, 1, 4\) and \(2, 3\), .* first of several outputs is used: return the logits"
    ):
        warnings_of(other_way_round)
    with pytest.raises(ModelError, match=r"does not fit") as error:
        warnings_of(lambda c, b: b[:, None])
    assert "outputs is used" not in str(error.value)


def test_other_outputs_of_transformers_are_those_that_answer():
    modeling_outputs = pytest.importorskip("transformers.modeling_outputs")
    start, end, state = (torch.randn(2, 5) for _ in range(3))
    output = modeling_outputs.QuestionAnsweringModelOutput
    found = other_outputs(output(None, start, end, hidden_states=(state,), attentions=(state,)))
    assert list(found) == ["end_logits"]
