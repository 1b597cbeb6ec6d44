"""From a recipe's settings to numbers: schedules, the automatic final beta, and warnings for the user."""

import json

import pytest
import torch
from safetensors import safe_open
from torch import nn

from svdcompress import convert, relevance
from svdcompress.errors import PruneError
from svdcompress.pipeline import advice, converted, dense_model, final_beta, make_schedule, run
from svdcompress.pipeline._advice import precision_taken, slow_precision
from svdcompress.recipe import BetaSchedule, load_recipe
from svdcompress.relevance import as_masks
from svdcompress.selection import check_some_left
from svdcompress.sources import InMemory, save_weights


def settings(*overrides):
    return load_recipe(None, list(overrides))


def warned(model, examples, *overrides):
    return "\n".join(advice(settings(*overrides), model, examples))


def test_a_launch_of_several_processes_hears_that_nothing_shrinks():
    model = nn.Sequential(nn.Linear(10, 10))
    assert "one process" not in warned(model, 10_000, "train.shrink=30%")
    lines = advice(settings("train.shrink=30%"), model, 10_000, processes=2)
    assert any("train.shrink works in one process only" in line for line in lines)
    assert advice(settings(), model, 10_000, processes=2) == advice(settings(), model, 10_000)


def test_schedules_are_those_of_the_recipe():
    linear = make_schedule(BetaSchedule(start="10%", stop="50%"), 20, 2.0)
    assert [linear(e) for e in (0, 2, 6, 10, 19)] == [0, 0, 1, 2, 2]
    assert make_schedule(BetaSchedule(name="constant"), 20, 0.5)(0) == 0.5
    assert make_schedule(BetaSchedule(name="additive", step=0.02), 20, 1.0)(4) == pytest.approx(0.1)
    assert make_schedule(BetaSchedule(name="cosine", start=0.0, stop=10.0), 20, 1.0)(5) == pytest.approx(0.5)


def test_beta_ends_by_itself_where_it_neither_prunes_all_nor_nothing():
    small = nn.Sequential(nn.Linear(100, 100, bias=False))
    assert final_beta(settings(), small, 60_000) == 1.0
    assert final_beta(settings(), small, 300) == 0.3  # 10 * 300 / 10,000
    assert final_beta(settings(), convert(nn.Sequential(nn.Linear(100, 100))), 1_000_000) == 1.0
    large = nn.Sequential(nn.Linear(3000, 2000, device="meta"))
    assert final_beta(settings(), large, 10_000_000) == 0.1
    assert final_beta(settings("train.beta.final=2.5"), small, 300) == 2.5
    two = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100))
    assert final_beta(settings("convert.exclude=['1']"), two, 300) == 0.3  # counts only what is converted


def test_advice_is_given_where_settings_do_not_suit():
    large = nn.Sequential(nn.Linear(3000, 2000, device="meta"))
    said = warned(large, 50_000, "train.beta.final=1")
    assert "train.beta.final=1 with 6,000,000 weights and N=50,000" in said and "0.05 to 0.2 is a better start" in said
    assert "convert.log_sigma2=-10" in said
    assert "log_sigma2" in warned(large, 50_000, "train.epochs=0", "recover.epochs=3")
    assert "log_sigma2" not in warned(large, 50_000, "train.epochs=0", "recover.epochs=3", "recover.noise=false")
    assert "log_sigma2" not in warned(large, 50_000, "train.epochs=0", "recover.epochs=0")
    assert "beta" not in warned(large, 50_000)
    small = nn.Sequential(nn.Linear(300, 300))
    assert "0.11 is a better start" in warned(small, 1000, "train.beta.final=1")
    assert warned(small, 1000, "train.beta.final=0.5") == ""
    assert "beta never reaches 1" in warned(
        nn.Sequential(nn.Linear(9, 9)), 10_000, "train.epochs=10", "train.beta={start: 5, stop: 20}"
    )
    assert "ends at 0.2, not at 1" in warned(nn.Sequential(nn.Linear(9, 9)), 10_000, "train.epochs=10", "train.beta=additive")
    assert warned(nn.Sequential(nn.Linear(9, 9)), 10_000) == ""
    few = "only 100 training examples: a small drop can't be told from chance"
    assert few in warned(nn.Sequential(nn.Linear(9, 9)), 100)
    assert "heavy pruning" not in warned(nn.Sequential(nn.Linear(9, 9)), 100)  # beta depends on the number of examples
    assert f"{few}, and the KL has a weight of 1/100: expect" in warned(
        nn.Sequential(nn.Linear(9, 9)), 100, "train.beta.final=0.5"
    )


@pytest.mark.parametrize("fast", [True, False])
def test_emulated_bfloat16_is_told(monkeypatch, fast):
    monkeypatch.setattr("svdcompress.layers._precision._FAST_CPU", fast)
    cpu = torch.device("cpu")
    lines = slow_precision(settings("train.precision=bf16", "recover.precision=bf16"), cpu, True)
    assert bool(lines) != fast
    if not fast:
        assert lines[0].endswith("--set train.precision=auto --set recover.precision=auto")
    every = ("dense.precision=bf16", "train.precision=bf16", "recover.precision=bf16")
    assert not slow_precision(settings("dense.precision=bf16", "recover.precision=bf16", "recover.epochs=0"), cpu, True)
    for trained, count in ((True, 2), (False, 3)):  # a dense model that is already trained is not trained again
        assert sum(line.count(".precision=auto") for line in slow_precision(settings(*every), cpu, trained)) == count * (
            not fast
        )
    assert not slow_precision(settings(), cpu, False) and not slow_precision(settings("train.precision=auto"), cpu, False)
    assert precision_taken(settings("dense.precision=auto"), cpu, True) is None
    assert precision_taken(settings("recover.precision=auto"), cpu, True) == (
        "precision auto: bfloat16 (bf16) on cpu" if fast else "precision auto: float32 (no) on cpu"
    )
    assert precision_taken(settings("train.precision=bf16"), cpu, True) is None


def test_a_recovery_by_sgd_trains_variances_too(tmp_path):
    """SGD for means and Adam for log variances, in a run whose recovery keeps its noise."""
    sets = [
        "data=digits",
        "model=mlp",
        "dense.epochs=1",
        "train.epochs=1",
        "data.limit=300",
        "recover.optimizer=sgd",
        "recover.lr=0.05",
    ]
    sets += ["uncertainty.samples=0", "report.html=false", "report.latency=false", "export.onnx=false"]
    results = {}
    for epochs in (0, 2):
        run(load_recipe(None, [*sets, f"recover.epochs={epochs}"]), tmp_path / str(epochs))
        with safe_open(tmp_path / str(epochs) / "model.safetensors", "pt") as file:
            results[epochs] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    names = [name for name in results[0] if name.endswith(("log_sigma2", "weight"))]
    assert any("log_sigma2" in name for name in names)
    for name in names:
        assert not torch.equal(results[0][name], results[2][name]), name


def test_a_run_in_the_precision_of_the_chip_is_one_in_that_precision(monkeypatch, tmp_path):
    monkeypatch.setattr("svdcompress.layers._precision._FAST_CPU", True)
    found = {}
    for asked in ("auto", "bf16", "no"):
        sets = [f"{stage}.precision={asked}" for stage in ("dense", "train", "recover")]
        sets += ["data=digits", "model=mlp", "dense.epochs=1", "train.epochs=2", "recover.epochs=1", "data.limit=300"]
        sets += ["uncertainty.samples=0", "report.html=false", "report.latency=false", "export.onnx=false"]
        sets += ["convert.variance_dtype=float32"]
        results = run(load_recipe(None, sets), tmp_path / asked)
        found[asked] = [row["loss"] for row in results["history"]]
        assert ("precision auto: bfloat16 (bf16) on cpu" in results["notes"]) == (asked == "auto")
        assert any("has no bfloat16 instructions" in line for line in results["warnings"]) is False
    assert found["auto"] == found["bf16"] != found["no"]


def test_a_models_own_normalisation_of_images_is_not_forgotten(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5], "image_std": [0.25]}))
    name = f"model.name='hf:{tmp_path}'"
    setting = "data.transform=[{normalize: {mean: [0.5], std: [0.25]}}]"
    said = warned(nn.Sequential(nn.Linear(9, 9)), 10_000, name)
    assert f"--set '{setting}'" in said
    assert warned(nn.Sequential(nn.Linear(9, 9)), 10_000, name, setting) == ""


class Residual(nn.Module):
    """A branch that may be removed, in parallel with a path that stays."""

    def __init__(self):
        super().__init__()
        self.branch, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(x + self.branch(x))


def test_an_empty_layer_is_an_error_only_if_the_model_becomes_a_constant():
    torch.manual_seed(0)
    model = convert(Residual()).eval()
    examples = InMemory(torch.randn(8, 4), torch.zeros(8).long())
    masks = relevance(model, 50.0)
    check_some_left(model, masks, examples)
    masks["branch"][:] = False
    check_some_left(model, as_masks(model, masks), examples)
    masks["head"][:] = False
    with pytest.raises(PruneError, match=r"nothing is left of layer 'branch', 'head': .* the same answer"):
        check_some_left(model, as_masks(model, masks), examples)
    assert model.head.mask is None  # the masks were only tried on


def test_the_precision_of_variances_is_the_recipes():
    for name in ("auto", "float32", "bfloat16"):
        made = settings("convert.layers=[{match: '0', share: input}]", f"convert.variance_dtype={name}")
        model = converted(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), made)
        assert [layer.variance_dtype for layer in model] == [name, name]


def test_what_is_trained_before(tmp_path):
    recipe = load_recipe(None, ["model={name: mlp, args: {sizes: [4, 3, 2]}}"])
    model, trained = dense_model(recipe)
    assert not trained
    recipe.weights.trained = True
    again, trained = dense_model(recipe)
    assert trained
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))  # with the same seed
    recipe.weights.trained = None
    recipe.weights.file = str(tmp_path / "w.safetensors")
    with torch.no_grad():
        next(model.parameters()).zero_()
    save_weights(model, recipe.weights.file)
    loaded, trained = dense_model(recipe)
    assert trained and not next(loaded.parameters()).any()
    recipe.weights.trained = False  # only initial weights
    loaded, trained = dense_model(recipe)
    assert not trained and not next(loaded.parameters()).any()
