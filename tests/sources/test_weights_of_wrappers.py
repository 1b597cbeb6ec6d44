"""Weights of wrappers (DDP, torch.compile, Lightning, AveragedModel) or beside others, and TorchScript archives."""

import warnings

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from svdcompress.errors import CheckpointError
from svdcompress.sources import load_weights, save_weights, start_from


def make(width=3):
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2))


@pytest.fixture
def trained():
    torch.manual_seed(1)
    return make()


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def under(prefix, model):
    return {f"{prefix}{name}": tensor for name, tensor in model.state_dict().items()}


def refused(path, strip_prefix=None, load=load_weights):
    model = make()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError) as error:
        load(model, path, strip_prefix)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert str(path) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "prefix",
    [
        "module._orig_mod.",
        "model._orig_mod.",
        "_orig_mod.module.",
        "module.module.",
        "module._orig_mod.model.",
        "module.module._orig_mod.model.",
    ],
)
def test_wrappers_around_one_another_are_stripped(tmp_path, trained, prefix):
    torch.save(under(prefix, trained), tmp_path / "w.pt")
    assert same(load_weights(make(), tmp_path / "w.pt", notes=(notes := [])), trained) and notes == []
    assert start_from(make(), tmp_path / "w.pt") == []


def test_names_of_the_model_that_look_like_a_wrappers_are_kept(tmp_path, trained):
    def held():
        return nn.ModuleDict({"model": make(), "module": make()})

    own = held()
    torch.save(under("model.", own), tmp_path / "w.pt")
    assert same(load_weights(held(), tmp_path / "w.pt"), own)


@pytest.mark.parametrize("nest", [lambda s: s, lambda s: {"state_dict": s}])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda m: AveragedModel(m),
        lambda m: AveragedModel(nn.ModuleDict({"module": m})),
        lambda m: AveragedModel(nn.ModuleDict({"_orig_mod": m})),
        lambda m: nn.ModuleDict({"_orig_mod": AveragedModel(m)}),
        lambda m: nn.ModuleDict({"model": AveragedModel(m)}),
    ],
    ids=["plain", "of-ddp", "of-compiled", "compiled", "lightning"],
)
def test_averages_are_taken_without_their_count(tmp_path, trained, wrap, nest):
    torch.save(nest(wrap(trained).state_dict()), tmp_path / "w.pt")
    assert same(load_weights(make(), tmp_path / "w.pt", notes=(notes := [])), trained) and notes == []
    assert start_from(make(), tmp_path / "w.pt") == []


def test_averages_in_a_safetensors_file(tmp_path, trained):
    save_weights(AveragedModel(trained), tmp_path / "w.safetensors")
    assert same(load_weights(make(), tmp_path / "w.safetensors"), trained)


def test_the_command_for_other_weights_works_for_averages(tmp_path, trained, monkeypatch):
    monkeypatch.chdir(tmp_path)
    average, notes = AveragedModel(make()), []
    torch.save({"model": trained.state_dict(), "model_ema": average.state_dict()}, "tv.pt")
    assert same(load_weights(make(), "tv.pt", notes=notes), trained)
    exec(notes[0].partition("save it in its own file: ")[2])
    assert same(load_weights(make(), "other.pt"), average.module)


@pytest.mark.parametrize(
    ("count", "more"),
    [(torch.ones(3), {}), (torch.tensor(3), {"epoch": torch.tensor(2)})],
    ids=["not-a-number", "beside-others"],
)
def test_what_is_no_count_of_averages_is_not_dropped(tmp_path, trained, count, more):
    torch.save({**under("module.", trained), "n_averaged": count, **more}, tmp_path / "w.pt")
    said = refused(tmp_path / "w.pt")
    assert "unexpected" in said and "n_averaged" in said and said.endswith("add --strip-prefix module.")
    load_weights(make(), tmp_path / "w.pt", "module.", notes := [])
    assert "n_averaged" in notes[0]


def test_a_count_that_the_model_itself_has_is_loaded(tmp_path, trained):
    torch.save({**AveragedModel(trained).state_dict(), "n_averaged": torch.tensor(7)}, tmp_path / "w.pt")
    assert int(load_weights(AveragedModel(make()), tmp_path / "w.pt").n_averaged) == 7


@pytest.mark.parametrize("prefix", ["encoder.backbone.", "net.inner.", "module.net._orig_mod."])
def test_a_prefix_of_all_names_is_named(tmp_path, trained, prefix):
    torch.save(under(prefix, trained), tmp_path / "w.pt")
    said = refused(tmp_path / "w.pt")
    assert "missing (8)" in said and said.endswith(f"add --strip-prefix {prefix}")
    assert refused(tmp_path / "w.pt", load=start_from) == said
    assert same(load_weights(make(), tmp_path / "w.pt", prefix), trained)
    shorter = prefix.partition(".")[0] + "."
    assert refused(tmp_path / "w.pt", shorter).endswith(f"add --strip-prefix {prefix}")


def test_no_prefix_is_named_that_does_not_help(tmp_path, trained):
    lacking = under("net.", trained)
    del lacking["net.3.bias"]
    for stored in (lacking, {"0.weight": torch.ones(3, 4)}, under("", make(5)), under("module.", make(5))):
        torch.save(stored, tmp_path / "w.pt")
        assert "--strip-prefix" not in refused(tmp_path / "w.pt")
    counted = under("net.", make(5))
    torch.save({name: tensor for name, tensor in counted.items() if "batches" not in name}, tmp_path / "w.pt")
    for load in (load_weights, start_from):
        assert "wrong shape" in (said := refused(tmp_path / "w.pt", "net.", load)) and "--strip-prefix" not in said


def test_names_beside_those_of_a_wrapper_are_told_with_the_prefix(tmp_path, trained):
    torch.save({"state_dict": {**under("model.", trained), "criterion.weight": torch.ones(2)}}, tmp_path / "w.ckpt")
    said = refused(tmp_path / "w.ckpt")
    assert "missing" not in said and "unexpected (1): criterion.weight" in said and said.endswith("add --strip-prefix model.")
    assert same(load_weights(make(), tmp_path / "w.ckpt", "model.", notes := []), trained)
    assert notes == ["weights: names in w.ckpt that do not begin with 'model.' are left out (1): criterion.weight"]
    assert start_from(make(), tmp_path / "w.ckpt", "model.") == notes
    assert "criterion.weight" in start_from(make(), tmp_path / "w.ckpt")[0]


@pytest.mark.parametrize("inner", ["", "_orig_mod."])
def test_one_of_two_networks_is_taken_by_its_prefix(tmp_path, trained, inner):
    teacher = make()
    torch.save({**under(f"student.{inner}", trained), **under(f"teacher.{inner}", teacher)}, tmp_path / "w.pt")
    assert refused(tmp_path / "w.pt").endswith(f"add --strip-prefix student.{inner} or --strip-prefix teacher.{inner}")
    for prefix, other, model in (("student.", "teacher.", trained), ("teacher.", "student.", teacher)):
        assert same(load_weights(make(), tmp_path / "w.pt", prefix, notes := []), model)
        names = [f"{other}{inner}{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias")]
        assert notes == [f"weights: names in w.pt that do not begin with '{prefix}' are left out (9): {', '.join(names)} ..."]


def test_networks_of_two_wrappers_are_not_mixed(tmp_path, trained):
    torch.save({**under("module.", trained), **under("model.", make())}, tmp_path / "w.pt")
    assert refused(tmp_path / "w.pt").endswith("add --strip-prefix module. or --strip-prefix model.")
    part = {name: tensor for name, tensor in under("module.", make()).items() if "3." not in name}
    torch.save({**part, **under("model.", trained)}, tmp_path / "w.pt")
    assert refused(tmp_path / "w.pt").endswith("add --strip-prefix model.")
    assert "missing (2): 3.weight, 3.bias" in refused(tmp_path / "w.pt", "module.")
    torch.save({"0.weight": torch.ones(3, 4), **under("model.", trained)}, tmp_path / "mixed.pt")
    assert refused(tmp_path / "mixed.pt").endswith("add --strip-prefix model.")
    model = make()
    assert len(start_from(model, tmp_path / "w.pt")) == 1 and same(model, trained)


def test_names_without_the_prefix_do_not_fill_gaps(tmp_path, trained):
    stored = {**under("", make()), **under("ema.", trained)}
    torch.save(stored, tmp_path / "w.pt")
    assert same(load_weights(make(), tmp_path / "w.pt", "ema."), trained)
    del stored["ema.3.weight"]
    torch.save(stored, tmp_path / "w.pt")
    said = refused(tmp_path / "w.pt", "ema.")
    assert "missing (1): 3.weight" in said and "are left out (9): 0.weight" in said and "add --strip-prefix" not in said


def test_of_two_networks_the_one_of_the_models_shapes_is_named(tmp_path, trained):
    torch.save({**under("teacher.", make(5)), **under("student.", trained)}, tmp_path / "w.pt")
    assert refused(tmp_path / "w.pt").endswith("To take those, add --strip-prefix student.")
    assert "wrong shape" in (said := refused(tmp_path / "w.pt", "teacher.")) and "add --strip-prefix student." in said
    assert refused(tmp_path / "w.pt", "teacher.", start_from) == said
    torch.save(under("teacher.", make(5)), tmp_path / "w.pt")
    assert refused(tmp_path / "w.pt").endswith("add --strip-prefix teacher.")


def test_a_prefix_is_named_for_tied_weights_and_without_counters(tmp_path):
    def tied():
        model = nn.ModuleDict({"a": nn.Linear(3, 3), "another_one": nn.Linear(3, 3), "norm": nn.BatchNorm1d(3)})
        model["another_one"].weight = model["a"].weight
        return model

    own = under("net.", tied())
    del own["net.norm.num_batches_tracked"]
    for left in ("a", "another_one"):
        stored = {name: tensor for name, tensor in own.items() if name != f"net.{left}.weight"}
        torch.save(stored, tmp_path / "w.pt")
        with pytest.raises(CheckpointError, match=r"add --strip-prefix net\.$"):
            load_weights(tied(), tmp_path / "w.pt")
        load_weights(tied(), tmp_path / "w.pt", "net.")


@pytest.mark.parametrize(
    ("first", "other", "strip"),
    [("model.", "module.", None), ("", "module._orig_mod.", None), ("model._orig_mod.", "", None), ("net.", "module.", "net.")],
)
def test_other_weights_are_told_whatever_their_prefix(tmp_path, trained, first, other, strip):
    stored = {"state_dict": under(first, trained), "ema_state_dict": under(other, make()), "scaler": {"scale": torch.ones(1)}}
    torch.save(stored, tmp_path / "w.pt")
    assert same(load_weights(make(), tmp_path / "w.pt", strip, notes := []), trained)
    assert len(notes) == 1 and "['ema_state_dict'], 'other.pt'" in notes[0]


@pytest.mark.parametrize("suffix", [".pt", ".ckpt"])
def test_a_torchscript_archive_is_refused_with_the_command_for_its_weights(tmp_path, trained, monkeypatch, suffix):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer PyTorch calls TorchScript deprecated
        torch.jit.save(torch.jit.script(trained.eval()), f"script{suffix}")
    with warnings.catch_warnings(record=True) as raw:
        warnings.simplefilter("always")
        with pytest.raises(CheckpointError) as error:
            load_weights(make(), f"script{suffix}")
    assert raw == []
    said, _, command = str(error.value).partition("; save its weights: ")
    assert said == f"weights: script{suffix}: a TorchScript archive"
    assert command == f"torch.save(torch.jit.load('script{suffix}').state_dict(), 'weights.pt')"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(command)
    assert same(load_weights(make(), "weights.pt"), trained)
