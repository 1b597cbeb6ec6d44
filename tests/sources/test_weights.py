"""The user's own weights: every way to pass them, and every way in which they may be wrong."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from svdcompress.errors import CheckpointError
from svdcompress.sources import load_weights, save_weights, start_from


def make():
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2))


@pytest.fixture
def trained():
    torch.manual_seed(1)
    return make()


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".pth"])
def test_files_load_exactly(tmp_path, trained, suffix):
    path = tmp_path / f"w{suffix}"
    if suffix == ".safetensors":
        save_weights(trained, path)
    else:
        torch.save(trained.state_dict(), path)
    assert same(load_weights(make(), path), trained)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: {"state_dict": s, "epoch": 3},
        lambda s: {"model": s, "optimizer": {"lr": 0.1}},
        lambda s: {"model": {"state_dict": s}},
        lambda s: {f"module.{k}": v for k, v in s.items()},
        lambda s: {"state_dict": {f"model.{k}": v for k, v in s.items()}},
        lambda s: {f"_orig_mod.{k}": v for k, v in s.items()},
    ],
)
def test_nested_and_prefixed_weights_are_found(tmp_path, trained, wrap):
    torch.save(wrap(trained.state_dict()), tmp_path / "w.pt")
    assert same(load_weights(make(), tmp_path / "w.pt"), trained)


def test_a_prefix_of_the_users_is_stripped(tmp_path, trained):
    torch.save({f"net.backbone.{k}": v for k, v in trained.state_dict().items()}, tmp_path / "w.pt")
    assert same(load_weights(make(), tmp_path / "w.pt", strip_prefix="net.backbone."), trained)


def test_a_prefix_that_no_name_has_is_told(tmp_path, trained):
    torch.save(trained.state_dict(), tmp_path / "w.pt")
    notes = []
    assert same(load_weights(make(), tmp_path / "w.pt", "nonsense.", notes), trained)
    assert notes == start_from(make(), tmp_path / "w.pt", "nonsense.")
    assert notes == ["weights: no name in w.pt begins with 'nonsense.', so nothing is stripped (the first name is 0.weight)"]
    torch.save({f"net.{k}": v for k, v in trained.state_dict().items()}, tmp_path / "n.pt")
    assert start_from(make(), tmp_path / "n.pt", "net.") == []
    with pytest.raises(
        CheckpointError, match=r"missing(.|\n)*begins with 'ne\.', so nothing is stripped \(the first name is net\.0\.wei"
    ):
        load_weights(make(), tmp_path / "n.pt", "ne.")


@pytest.mark.parametrize(
    ("wrap", "place"),
    [
        (lambda s, e: {"model": s, "model_ema": {"module": e}, "optimizer": {"state": {0: {"step": 3}}}}, "['model_ema']"),
        (lambda s, e: {"epoch": 3, "model": {"state_dict": s, "best": e}}, "['model']['best']"),
        (lambda s, e: {"ema": {f"module.{k}": v for k, v in e.items()}, "state_dict": s}, "['ema']"),
    ],
)
def test_other_weights_in_the_file_are_told_with_the_way_to_take_them(tmp_path, trained, wrap, place):
    average, notes = make(), []
    torch.save(wrap(trained.state_dict(), average.state_dict()), tmp_path / "w.pt")
    assert same(load_weights(make(), tmp_path / "w.pt", notes=notes), trained)
    assert notes == start_from(make(), tmp_path / "w.pt") and "w.pt also contains" in notes[0]
    expression = notes[0].partition("torch.save(")[2].removesuffix(", 'other.pt')")
    assert expression == f"torch.load('w.pt', weights_only=True){place}"
    torch.save(eval(expression.replace("w.pt", str(tmp_path / "w.pt"))), tmp_path / "other.pt")
    assert same(load_weights(make(), tmp_path / "other.pt", notes=(other := [])), average) and other == []


class Turned(nn.Module):
    """Renames and transposes the tensors of an older file in its own hook."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_load_state_dict_pre_hook(self.turn)

    @staticmethod
    def turn(module, state, prefix, *rest):
        for name in ("weight", "bias"):
            if f"{prefix}old.{name}" in state:
                state[f"{prefix}layer.{name}"] = state.pop(f"{prefix}old.{name}").t()


def test_a_models_own_hooks_bring_an_older_file_into_its_form(tmp_path, trained):
    weight, bias = trained[0].weight.detach(), trained[0].bias.detach()
    torch.save({"old.weight": weight.T.contiguous(), "old.bias": bias}, tmp_path / "old.pt")
    model = load_weights(Turned(), tmp_path / "old.pt")
    assert torch.equal(model.layer.weight, weight) and torch.equal(model.layer.bias, bias)
    save_weights(model, tmp_path / "new.safetensors")
    assert same(load_weights(Turned(), tmp_path / "new.safetensors"), model)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda weight: weight[:, :2], "unexpected"),
        (lambda weight: weight.int(), "unexpected"),
        (lambda weight: weight * torch.nan, "layer.weight holds values that are not finite"),
    ],
)
def test_hooks_do_not_let_bad_weights_in(tmp_path, trained, change, said):
    weight, bias = trained[0].weight.detach().T.contiguous(), trained[0].bias.detach()
    torch.save({"old.weight": change(weight), "old.bias": bias}, tmp_path / "old.pt")
    model = Turned()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=said):
        load_weights(model, tmp_path / "old.pt")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def shards(folder, trained):
    state = trained.state_dict()
    names = list(state)
    parts = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
    for file, keys in parts.items():
        save_file({key: state[key].contiguous() for key in keys}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {key: file for file, keys in parts.items() for key in keys}}))
    return index


def test_sharded_weights_by_index_or_folder(tmp_path, trained):
    index = shards(tmp_path, trained)
    assert same(load_weights(make(), index), trained)
    assert same(load_weights(make(), tmp_path), trained)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names b\.safetensors, which is not in the same folder"):
        load_weights(make(), index)


def test_tied_weights_are_stored_once_and_are_not_missing(tmp_path):
    def tied():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        return model

    model = tied()
    save_weights(model, tmp_path / "w.safetensors")
    assert same(load_weights(tied(), tmp_path / "w.safetensors"), model)


class Evil:
    def __reduce__(self):
        import os

        return os.mkdir, ("hacked",)


def truncated(path, trained):
    torch.save(trained.state_dict(), path)
    path.write_bytes(path.read_bytes()[:-200])


def truncated_safetensors(path, trained):
    save_weights(trained, path)
    path.write_bytes(path.read_bytes()[:-10])


BAD = {
    "missing.pt": (lambda path, trained: None, "no such file"),
    "empty.pt": (lambda path, trained: path.write_bytes(b""), "the file is empty"),
    "text.pt": (lambda path, trained: path.write_text("these are no weights\n" * 9), "not a PyTorch file"),
    "text.safetensors": (
        lambda path, trained: path.write_text("these are no weights\n" * 9),
        "not a complete safetensors file",
    ),
    "cut.pt": (truncated, "truncated, or not a PyTorch file"),
    "cut.safetensors": (truncated_safetensors, "not a complete safetensors file"),
    "evil.pt": (lambda path, trained: torch.save({"state_dict": Evil()}, path), "could run code; it is not read"),
    "module.pt": (lambda path, trained: torch.save(trained, path), "could run code; it is not read"),
    "nothing.pt": (lambda path, trained: torch.save({"epoch": 3}, path), "no weights found in it (it holds: epoch)"),
    "nan.pt": (
        lambda path, trained: torch.save(
            {k: v * float("nan") if k == "0.bias" else v for k, v in trained.state_dict().items()}, path
        ),
        "0.bias holds values that are not finite",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_named_and_change_nothing(tmp_path, monkeypatch, trained, name):
    monkeypatch.chdir(tmp_path)
    write, said = BAD[name]
    write(tmp_path / name, trained)
    model = make()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError) as error:
        load_weights(model, tmp_path / name)
    assert said in str(error.value)
    assert name in str(error.value)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not (tmp_path / "hacked").exists()


def test_a_pickle_below_zip_is_refused_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(Evil(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="could run code"):
        load_weights(make(), tmp_path / "old.pt")
    assert not (tmp_path / "hacked").exists()


def test_what_does_not_fit_is_listed(tmp_path, trained):
    state = dict(trained.state_dict())
    state["head.weight"] = state.pop("3.weight")
    state["0.weight"] = torch.zeros(3, 5)
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(CheckpointError) as error:
        load_weights(make(), tmp_path / "w.pt")
    text = str(error.value)
    assert "missing (1): 3.weight" in text
    assert "unexpected (1): head.weight" in text
    assert "wrong shape (1): 0.weight (3, 5), the model has (3, 4)" in text


def test_weights_to_start_from_may_lack_a_head_and_have_more(tmp_path, trained):
    state = {name: tensor for name, tensor in trained.state_dict().items() if not name.startswith("3.")}
    torch.save({**state, "cls.bias": torch.ones(2)}, tmp_path / "encoder.pt")
    model = make()
    drawn = model[3].weight.clone()
    lines = start_from(model, tmp_path / "encoder.pt")
    assert torch.equal(model[0].weight, trained[0].weight) and torch.equal(model[3].weight, drawn)
    assert len(lines) == 2 and "3.weight, 3.bias" in lines[0] and "cls.bias" in lines[1]
    with pytest.raises(CheckpointError, match=r"missing(.|\n)*--untrained"):
        load_weights(make(), tmp_path / "encoder.pt")
    torch.save(trained.state_dict(), tmp_path / "all.pt")
    assert start_from(make(), tmp_path / "all.pt") == []


@pytest.mark.parametrize("wrong", ["little", "shape", "nan"])
def test_weights_to_start_from_that_do_not_fit_change_nothing(tmp_path, trained, wrong):
    state = trained.state_dict()
    if wrong == "little":
        state = {"1.weight": state["1.weight"], "other": torch.ones(3)}
    elif wrong == "shape":
        state["0.weight"] = torch.ones(3, 5)
    else:
        state["0.weight"][0, 0] = torch.nan
    torch.save(state, tmp_path / "w.pt")
    model = make()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    words = {"little": "missing", "shape": "wrong shape", "nan": "not finite"}
    with pytest.raises(CheckpointError, match=words[wrong]):
        start_from(model, tmp_path / "w.pt")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
