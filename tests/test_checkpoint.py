"""Files that load exactly, and files that are refused with a reason."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from svdcompress.batch import unwrapped
from svdcompress.checkpoint import load, read_manifest, save
from svdcompress.convert import convert, convert_dropout
from svdcompress.errors import CheckpointError, OutputError, UsageError
from svdcompress.layers import sampling, variational_layers
from svdcompress.likelihoods import likelihood_of, set_likelihood
from svdcompress.prune import prune
from svdcompress.relevance import hold, relevance
from svdcompress.uncertainty import mc_predict


def net(width: int = 8) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3)),
        *(nn.Linear(6 * 16, width, bias=False), nn.ReLU(), nn.Linear(width, 3)),
    )


def converted() -> nn.Module:
    torch.manual_seed(0)
    model = convert(net(), prior="log-uniform", share={"weight": 1, "input": 3}, threshold={"input": 4}, log_sigma2=-7.5)
    with torch.no_grad():
        for _, layer in variational_layers(model):
            layer.log_sigma2.uniform_(-9, 1)
        model[1].running_mean.normal_()
        model[1].bias.normal_()
    return model


def masked() -> nn.Module:
    model = converted()
    return hold(model, {name: torch.rand(layer.weight.shape) > 0.4 for name, layer in variational_layers(model)})


def pruned() -> nn.Module:
    model = converted()
    masks = {name: torch.rand(layer.weight.shape) > 0.4 for name, layer in variational_layers(model)}
    masks["0"][:2] = False
    masks["5"][[1, 4, 5]] = False
    small = prune(model, torch.randn(2, 1, 6, 6), masks=masks)
    assert small.pruning.removed >= 5
    assert small[5].bias is not None and small[5].bias_sigma2 is not None
    return small


def same(a: nn.Module, b: nn.Module) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return sorted(left) == sorted(right) and all(
        left[key].dtype == right[key].dtype and torch.equal(left[key], right[key]) for key in left
    )


@pytest.mark.parametrize("make", [net, converted, masked, pruned])
@pytest.mark.parametrize("target", ["dense", "converted"])
def test_exact_to_the_bit(make, target: str, tmp_path) -> None:
    if make is net and target == "converted":
        pytest.skip("a dense file does not fit a converted model; see test_a_dense_file_is_refused_by_a_converted_model")
    model = make().eval()
    path = tmp_path / "model.safetensors"
    save(model, path, extra={"run": 7})
    torch.manual_seed(99)
    fresh = net() if target == "dense" else convert(net())
    again = load(path, fresh.eval())
    assert again is fresh and same(model, again)
    x = torch.randn(4, 1, 6, 6)
    with torch.no_grad():
        assert torch.equal(model(x), again(x))
        for a, b in zip(variational_layers(model), variational_layers(again), strict=True):
            assert (a[0], a[1].prior, a[1].share, a[1].threshold) == (b[0], b[1].prior, b[1].share, b[1].threshold)
            assert a[1].variance_dtype == b[1].variance_dtype and repr(a[1]) == repr(b[1])
        if make is not net:
            draws = []
            for each in (model, again):
                with sampling(each, generator=torch.Generator().manual_seed(1)):
                    draws.append(each(x))
            assert torch.equal(*draws)
            assert relevance(again).kept == relevance(model).kept
    assert read_manifest(path)["extra"] == {"run": 7}
    save(again, tmp_path / "again.safetensors", extra={"run": 7})
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


def test_pruned_twice_still_loads_onto_the_factory(tmp_path) -> None:
    once = pruned()
    masks = {name: layer.mask.clone() for name, layer in variational_layers(once)}
    masks["7"][:, 0] = False
    twice = prune(once, torch.randn(2, 1, 6, 6), masks=masks)
    assert twice[7].in_features == once[7].in_features - 1
    save(twice, tmp_path / "twice.safetensors")
    assert same(twice, load(tmp_path / "twice.safetensors", net()))


def test_ties_dtypes_frozen_layers_and_dropout(tmp_path) -> None:
    def factory() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4, 4), nn.Linear(4, 2))
        model[3].weight = model[0].weight
        model[4].requires_grad_(False)
        return model.to(torch.bfloat16)

    model = convert_dropout(convert(factory()), p=0.4)
    path = tmp_path / "tied.safetensors"
    save(model, path)
    again = load(path, factory().float())
    assert again[3].weight is again[0].weight and again[3].log_sigma2 is again[0].log_sigma2
    assert again[0].weight.dtype == torch.bfloat16 and not again[4].weight.requires_grad
    assert type(again[2]).__name__ == "BernoulliDropout" and again[2].p == 0.4
    assert same(model, again)
    assert "3.weight" in read_manifest(path)["ties"]


def test_dropout_that_draws_is_that_of_the_file(tmp_path) -> None:
    def factory(dropout: type[nn.Module] = nn.Dropout) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), dropout(0.5), nn.Linear(4, 2))

    path = tmp_path / "some.safetensors"
    save(convert_dropout(factory(nn.Dropout2d), p=0.05), path)
    for model in (factory(), convert_dropout(factory()), convert_dropout(factory(), gaussian=True)):
        again = load(path, model)
        assert type(again[1]).__name__ == "BernoulliDropout" and again[1].p == 0.05 and again[1].channels
    save(factory(), path)
    refused(path, convert_dropout(factory()), "1: BernoulliDropout in the model", "none in the file")


def test_wrappers_are_taken_off(tmp_path) -> None:
    def factory() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))

    model = set_likelihood(convert(factory()), "regression", tau=4.0)
    plain, wrapped = tmp_path / "plain.safetensors", tmp_path / "wrapped.safetensors"
    save(model, plain)
    for wrap in (nn.DataParallel, torch.compile):
        save(wrap(model), wrapped)
        assert wrapped.read_bytes() == plain.read_bytes()
        again = wrap(factory())
        assert load(wrapped, again) is again and same(model, unwrapped(again))
        assert likelihood_of(again).settings() == likelihood_of(model).settings()
        assert mc_predict(again, torch.ones(2, 4), 3).task == "regression"


def test_special_values_survive(tmp_path) -> None:
    model = convert(nn.Sequential(nn.Linear(3, 2)))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[2e-38, -0.0, -3e38], [1e-45, -1.0, 3e38]]))
    save(model, tmp_path / "odd.safetensors")
    again = load(tmp_path / "odd.safetensors", nn.Sequential(nn.Linear(3, 2)))
    assert torch.equal(again[0].weight.view(torch.int32), model[0].weight.view(torch.int32))


# What cannot be loaded


def refused(path, model: nn.Module, *words: str) -> None:
    before = {key: value.clone() for key, value in model.state_dict().items()}
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(CheckpointError) as caught:
        load(path, model)
    assert str(path) in str(caught.value)
    for word in words:
        assert word in str(caught.value), caught.value
    assert [type(module) for module in model.modules()] == kinds
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_missing_file(tmp_path) -> None:
    refused(tmp_path / "none.safetensors", net(), "no such file")


@pytest.mark.parametrize("length", [0, 5, 200, -1])
def test_truncated_file(length: int, tmp_path) -> None:
    path = tmp_path / "cut.safetensors"
    save(pruned(), path)
    path.write_bytes(path.read_bytes()[:length])
    refused(path, net(), "truncated")


def test_foreign_files(tmp_path) -> None:
    path = tmp_path / "foreign.safetensors"
    save_file(net().state_dict(), str(path))
    refused(path, net(), "no svdcompress manifest")
    path.write_bytes(pickle.dumps({"weight": 1}))
    refused(path, net(), "not a safetensors file")
    save_file({"a": torch.zeros(1)}, str(path), {"svdcompress": "{not json"})
    refused(path, net(), "manifest cannot be read")
    save_file({"a": torch.zeros(1)}, str(path), {"svdcompress": json.dumps({"format": 1})})
    refused(path, net(), "damaged")
    save_file({"a": torch.zeros(1)}, str(path), {"svdcompress": json.dumps({"format": 99})})
    refused(path, net(), "format 99")


def test_other_models(tmp_path) -> None:
    path = tmp_path / "model.safetensors"
    save(pruned(), path)
    refused(path, nn.Sequential(nn.Linear(3, 2)), "another model", "0: VariationalConv2d in the file, Linear in the model")
    wider = net()
    wider.append(nn.Linear(3, 3))
    refused(path, wider, "8.weight: missing in the file")
    refused(path, nn.Sequential(*list(net())[:-1]), "no such layer")
    save(masked(), path)
    refused(path, net(width=9), "shape (8, 96) in the file, (9, 96) in the model")


def test_a_dense_file_is_refused_by_a_converted_model(tmp_path) -> None:
    save(net(), tmp_path / "dense.safetensors")
    refused(tmp_path / "dense.safetensors", convert(net()), "variational in the model, dense in the file")


# What cannot be saved


def test_saving_is_atomic_and_says_where_it_fails(tmp_path) -> None:
    path = tmp_path / "model.safetensors"
    save(converted(), path)
    before = path.read_bytes()
    with pytest.raises(UsageError, match="JSON"):
        save(converted(), path, extra={"x": object()})
    with pytest.raises(OutputError, match="nowhere"):
        save(converted(), tmp_path / "nowhere" / "model.safetensors")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError, match="folder"):
        save(converted(), tmp_path / "folder")
    assert path.read_bytes() == before
    assert sorted(item.name for item in tmp_path.iterdir()) == ["folder", "model.safetensors"]


def test_state_that_needs_a_pickle_is_refused(tmp_path) -> None:
    class Odd(nn.Linear):
        def get_extra_state(self) -> dict:
            return {"a": {1, 2}}

        def set_extra_state(self, state: dict) -> None: ...

    with pytest.raises(CheckpointError, match="pickle"):
        save(nn.Sequential(Odd(2, 2)), tmp_path / "odd.safetensors")


@pytest.mark.parametrize(
    ("where", "value", "word"),
    [
        (("layers", "5", "prior"), "flat", "prior"),
        (("layers", "5", "share"), {"nobody": 1.0}, "share"),
        (("layers", "5", "threshold"), {"nobody": 1.0}, "threshold"),
        (("layers", "5", "variance_dtype"), "int8", "int8"),
        (("surgery", "attributes", "5"), {"training": 3}, "must be integers, as many as in the model"),
        (("surgery", "attributes", "5"), {"in_features": "many"}, "in_features"),
        (
            ("surgery", "attributes", "5"),
            {"out_features": 10, "in_features": [84]},
            "must be integers, as many as in the model",
        ),
        (("surgery", "attributes", "5"), {"nothing": 3}, "lacks"),
        (("layers", "5", "threshold"), "3", "threshold"),  # text for a number
    ],
)
def test_a_manifest_with_other_things_than_save_writes_is_refused(where, value, word, tmp_path) -> None:
    """The model is unchanged: nothing is converted or set before the whole manifest has been checked."""
    path, changed = tmp_path / "model.safetensors", tmp_path / "changed.safetensors"
    save(masked(), path)
    with safe_open(str(path), "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        manifest = json.loads(file.metadata()["svdcompress"])
    del manifest["sha256"]  # as in a file of an earlier version
    part = manifest
    for key in where[:-1]:
        part = part.setdefault(key, {})
    part[where[-1]] = value
    save_file(tensors, str(changed), {"svdcompress": json.dumps(manifest)})
    model = net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=word):
        load(changed, model)
    assert type(model[5]) is nn.Linear and model[5].in_features == 96
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def rewritten(path, tensors=None, **manifest) -> None:
    """Rewrite the file with other tensors or other parts of its manifest, and without a digest."""
    with safe_open(str(path), "pt") as file:
        held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        own = json.loads(file.metadata()["svdcompress"])
    del own["sha256"]  # as in a file of an earlier version
    save_file({**held, **(tensors or {})}, str(path), {"svdcompress": json.dumps({**own, **manifest})})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("5.weight", lambda t: t * float("nan")),
        ("5.log_sigma2", lambda t: t / 0),
        ("1.running_mean", lambda t: t + float("inf")),
        ("7.bias", lambda t: t.int()),
        ("7.weight", lambda t: t.to(torch.complex64)),
        ("7.weight", lambda t: t.to(torch.float8_e5m2)),
        ("5.log_sigma2", lambda t: t.bool()),
        ("5.mask", lambda t: t.float()),
        ("1.num_batches_tracked", lambda t: t.float()),
    ],
)
def test_tensors_that_are_no_weights_are_refused_by_name(name, change, tmp_path) -> None:
    path = tmp_path / "model.safetensors"
    save(masked(), path)
    with safe_open(str(path), "pt") as file:
        tensor = file.get_tensor(name)
    rewritten(path, {name: change(tensor)})
    refused(path, net(), name)


def test_infinities_of_a_causal_mask_are_meant(tmp_path) -> None:
    def factory() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 2))
        model.register_buffer("causal", torch.full((3, 3), -float("inf")).triu(1))
        return model

    save(convert(factory()), tmp_path / "m.safetensors")
    assert torch.isinf(load(tmp_path / "m.safetensors", factory()).causal).sum() == 3


@pytest.mark.parametrize("p", [1.0, 7, -0.1, "0.5", True, None])
def test_a_bad_dropout_rate_leaves_the_model_as_it_was(p, tmp_path) -> None:
    """The layers before it used to be converted by the time it was found."""
    path = tmp_path / "model.safetensors"
    save(convert_dropout(converted(), p=0.4), path)
    rewritten(path, dropout={"4": {"class": "BernoulliDropout", "p": p, "channels": False}})
    model = net()
    refused(path, model, "dropout.4.p")
    assert type(model[4]) is nn.Dropout


@pytest.mark.parametrize(
    "manifest",
    [
        {"format": True},
        {"format": "1"},
        {"format": 0},
        {"layers": []},
        {"layers": {"5": []}},
        {"layers": {"5": {"class": 7}}},
        {"surgery": 3},
        {"surgery": {"shapes": {"5.weight": "many"}}},
        {"surgery": {"attributes": {"5": {"in_features": [[1]]}}}},
        {"surgery": {"attributes": {"5": {"in_features": 95}}}},
        {"surgery": {"attributes": {"0": {"groups": 2}}}},
        {"ties": {"a": 3}},
        {"ties": {"a": "nobody"}},
        {"extra": 3},
        {"versions": []},
    ],
    ids=str,
)
def test_manifests_of_other_types_are_refused_and_nothing_is_touched(manifest, tmp_path) -> None:
    path = tmp_path / "model.safetensors"
    save(converted(), path)
    rewritten(path, **manifest)
    model = net()
    refused(path, model)
    assert not hasattr(model, "surgery") and model[5].in_features == 96 and model[0].groups == 1


@pytest.mark.parametrize(
    "text", ["[]", "3", "null", '"text"', "[" * 100_000, '{"a":' * 50_000, "\ud800", '{"format": 1, "format": 2}']
)
def test_manifests_that_are_no_objects(text, tmp_path) -> None:
    path = tmp_path / "model.safetensors"
    try:
        save_file({"a": torch.zeros(1)}, str(path), {"svdcompress": text})
    except Exception:
        pytest.skip("this text does not go into a file")
    refused(path, net(), "manifest")


def test_a_failure_in_the_midst_leaves_the_model_as_it_was(tmp_path, monkeypatch) -> None:
    from svdcompress.checkpoint import _load

    path = tmp_path / "model.safetensors"
    save(convert_dropout(pruned(), p=0.4), path)
    monkeypatch.setattr(_load, "_check_lengths", lambda name, module: 1 / 0 if name == "7" else None)
    model = net()
    before = [sorted(vars(module)) for module in model.modules()]
    refused(path, model, "ZeroDivisionError")
    assert [sorted(vars(module)) for module in model.modules()] == before
    assert model[5].in_features == 96 and type(model[4]) is nn.Dropout and model(torch.randn(2, 1, 6, 6)).shape == (2, 3)
