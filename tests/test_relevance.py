"""Masks against the definition of log alpha, weight by weight and group by group; counts; holding masks; files."""

from __future__ import annotations

import gc
import pickle
import warnings
import weakref
from dataclasses import FrozenInstanceError

import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.errors import CheckpointError, ModelError, OutputError, PruneError, UsageError
from svdcompress.layers import variational_layers
from svdcompress.relevance import as_masks


def model(**options) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.ConvTranspose2d(6, 4, 2, groups=2), nn.Flatten(), nn.Linear(4, 3))
    svdc.convert(net, **options)
    with torch.no_grad():
        for layer in (net[0], net[1], net[3]):
            layer.weight.normal_()
            layer.log_sigma2.uniform_(-4, 6)
    return net


def groups_of(layer: nn.Module, share: str) -> list[list[tuple[int, ...]]]:
    """Indices of the weights that share a prior variance, from a loop over the weight's own indices."""
    shape = layer.weight.shape
    found: dict[tuple, list[tuple[int, ...]]] = {}
    for index in torch.cartesian_prod(*(torch.arange(n) for n in shape)).reshape(-1, len(shape)).tolist():
        if isinstance(layer, nn.Linear):
            output, input_ = index[0], index[1]
        elif isinstance(layer, nn.ConvTranspose2d):  # weight: (in, out / groups, ...)
            group = index[0] // (shape[0] // layer.groups)
            output, input_ = group * shape[1] + index[1], index[0]
        else:  # weight: (out, in / groups, ...)
            group = index[0] // (shape[0] // layer.groups)
            output, input_ = index[0], group * shape[1] + index[1]
        key = {"weight": tuple(index), "input": (input_,), "output": (output,), "layer": ()}[share]
        found.setdefault(key, []).append(tuple(index))
    return list(found.values())


def by_hand(layer: nn.Module, share: str, threshold: float) -> torch.Tensor:
    mask = torch.zeros(layer.weight.shape, dtype=torch.bool)
    mean2, sigma2 = layer.weight.detach().double() ** 2, layer.log_sigma2.detach().double().exp()
    for members in groups_of(layer, share):
        noise, signal = sum(sigma2[i] for i in members), sum(mean2[i] for i in members)
        for i in members:
            mask[i] = bool(torch.log(noise) - torch.log(signal) < threshold)
    return mask


@pytest.mark.parametrize("share", ["weight", "input", "output", "layer"])
@pytest.mark.parametrize("threshold", [0.0, 1.5, 3.0])
def test_masks_are_those_of_the_definition(share, threshold):
    net = model(share=share)
    masks = svdc.relevance(net, threshold)
    assert list(masks) == ["0", "1", "3"]
    for name, mask in masks.items():
        assert torch.equal(mask, by_hand(net.get_submodule(name), share, threshold))


def test_a_weight_of_two_shares_must_be_relevant_in_both_each_with_its_own_threshold():
    net = model(share=["weight", "output"])
    masks = svdc.relevance(net, {"weight": 2.0, "output": 1.0})
    for name, mask in masks.items():
        layer = net.get_submodule(name)
        assert torch.equal(mask, by_hand(layer, "weight", 2.0) & by_hand(layer, "output", 1.0))
    assert 0 < masks.kept < masks.total


def test_the_threshold_is_three_unless_the_layer_was_told_otherwise():
    assert torch.equal(svdc.relevance(model())["3"], by_hand(model()[3], "weight", 3.0))
    assert torch.equal(svdc.relevance(model(threshold=1.0))["3"], by_hand(model()[3], "weight", 1.0))


def test_shares_that_a_threshold_does_not_name_keep_the_layers_own_limit():
    net = model(share=["weight", "output"], threshold={"weight": 1.0, "output": 100.0})
    assert torch.equal(
        svdc.relevance(net, {"output": 1.5})["3"], by_hand(net[3], "weight", 1.0) & by_hand(net[3], "output", 1.5)
    )
    assert torch.equal(svdc.relevance(net, {"output": 100.0})["3"], svdc.relevance(net)["3"])
    assert net[3].limits({"output": 1.5}) == {**net[3].threshold, "output": 1.5}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        svdc.relevance(net, net[3].threshold)
    with pytest.warns(UserWarning, match=r"threshold: no layer has the share 'input'.*the layers have output, weight") as found:
        svdc.relevance(net, {"weight": 1.0, "input": 2.0})
    assert found[0].filename == __file__


@pytest.mark.parametrize("threshold", [float("nan"), {"weight": float("nan")}], ids=str)
def test_a_threshold_that_is_not_a_number_is_refused(threshold):
    for use in (lambda: svdc.relevance(model(), threshold), lambda: svdc.convert(nn.Linear(2, 2), threshold=threshold)):
        with pytest.raises(ModelError, match="threshold: nan is not a valid limit on log alpha"):
            use()


def test_a_weight_of_zero_is_irrelevant_and_log_alpha_at_the_threshold_is_too():
    net = svdc.convert(nn.Sequential(nn.Linear(2, 1)), threshold=3.0)
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[0.0, 1.0]]))
        net[0].log_sigma2.fill_(-10.0)
    assert svdc.relevance(net)["0"].tolist() == [[False, True]]
    limit = float(net[0].log_alpha()[0, 1])
    assert svdc.relevance(net, limit)["0"].tolist() == [[False, False]]


def test_counts_by_layer_and_in_total():
    net = model()
    mask = torch.zeros_like(net[0].weight, dtype=torch.bool)
    mask[4, 1, 0, 0] = mask[4, 0, 0, 0] = mask[5, 1, 2, 2] = True  # second group: outputs 4, 5; inputs 2, 3
    found = as_masks(net, {"0": mask, "1": torch.ones_like(net[1].weight, dtype=torch.bool), "3": svdc.relevance(net)["3"]})
    first, second, last = found.layers
    assert (first.name, first.kept, first.total, first.inputs, first.outputs) == ("0", 3, 108, 2, 2)
    with pytest.raises(FrozenInstanceError):
        first.kept = 4
    assert (second.kept, second.inputs, second.outputs, second.sparsity) == (48, 6, 4, 0.0)
    assert first.sparsity == pytest.approx(1 - 3 / 108)
    assert found.kept == 3 + 48 + last.kept and found.total == 108 + 48 + 12
    assert found.sparsity == pytest.approx(1 - found.kept / 168)
    assert repr(found) == f"Masks(3 layers, {found.kept} of 168 weights kept)"


def test_relevance_changes_nothing_and_its_masks_are_its_own():
    net = model()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    masks = svdc.relevance(net)
    masks["3"].zero_()
    assert {name: value.tolist() for name, value in net.state_dict().items()} == {n: v.tolist() for n, v in before.items()}
    assert svdc.relevance(net)["3"].any()
    svdc.hold(net, svdc.relevance(net))
    svdc.relevance(net)["3"].zero_()
    assert net[3].mask.any()


def test_eval_computes_with_the_masks_of_relevance():
    net = model(threshold=1.0).eval()
    masks = svdc.relevance(net)
    plain = nn.Linear(4, 3)
    with torch.no_grad():
        plain.weight.copy_(net[3].weight * masks["3"])
        plain.bias.copy_(net[3].bias)
    x = torch.randn(5, 4)
    torch.testing.assert_close(net[3](x), plain(x))


# Holding


def test_held_masks_count_in_every_mode_whatever_log_alpha_becomes():
    net = model()
    masks = {name: torch.rand(m.shape) < 0.5 for name, m in svdc.relevance(net).items()}
    assert svdc.hold(net, masks) is net
    with torch.no_grad():
        net[3].log_sigma2.fill_(-30.0)
    assert all(torch.equal(svdc.relevance(net)[name], masks[name]) for name in masks)
    x = torch.randn(64, 4)
    for mode in (True, False):
        torch.testing.assert_close(
            net.train(mode)[3](x), x @ (net[3].weight * masks["3"]).T + net[3].bias, atol=1e-3, rtol=1e-3
        )
    stricter = svdc.relevance(net, -100.0)
    assert stricter.kept == 0, "a threshold given counts within the held mask"
    loose = svdc.relevance(net, 100.0)
    assert all(torch.equal(loose[name], masks[name]) for name in masks), "and never brings back what the mask dropped"


def test_models_that_hold_the_same_masks_share_no_tensor():
    one, other = model(), model()
    masks = {name: mask.clone() for name, mask in svdc.relevance(one).items()}
    before = {name: mask.clone() for name, mask in masks.items()}
    svdc.hold(one, masks)
    svdc.hold(other, masks)
    state = other.state_dict()
    other.load_state_dict({key: ~value if key.endswith("mask") else value for key, value in state.items()})
    for name, layer in one.named_modules():
        if name in masks:
            assert torch.equal(masks[name], before[name]) and torch.equal(layer.mask, before[name])
            assert torch.equal(dict(other.named_modules())[name].mask, ~before[name])


def test_letting_go_lets_log_alpha_decide_again():
    net = model()
    before = svdc.relevance(net)
    svdc.hold(net, {name: torch.zeros_like(mask) for name, mask in before.items()})
    assert svdc.relevance(net).kept == 0
    svdc.hold(net, None)
    assert all(torch.equal(svdc.relevance(net)[name], before[name]) for name in before)


# Files


def test_masks_are_saved_and_loaded(tmp_path):
    net = model()
    masks = svdc.relevance(net)
    masks.save(tmp_path / "masks.safetensors")
    loaded = svdc.Masks.load(tmp_path / "masks.safetensors", model())
    assert list(loaded) == list(masks) and loaded.layers == masks.layers
    assert all(torch.equal(loaded[name], masks[name]) for name in masks)


def test_masks_that_cannot_be_written_are_an_output_error(tmp_path):
    with pytest.raises(OutputError, match=r"masks\.safetensors: cannot be written"):
        svdc.relevance(model()).save(tmp_path / "none" / "masks.safetensors")


def test_files_that_are_no_masks_are_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"none\.safetensors"):
        svdc.Masks.load(tmp_path / "none.safetensors", model())
    (tmp_path / "cut.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{")
    with pytest.raises(CheckpointError, match=r"cut\.safetensors: not readable as saved masks"):
        svdc.Masks.load(tmp_path / "cut.safetensors", model())
    svdc.relevance(model()).save(tmp_path / "masks.safetensors")
    other = svdc.convert(nn.Sequential(nn.Linear(4, 3)))
    with pytest.raises(PruneError, match=r"no mask for \[\], no layer for \['1', '3'\]"):
        svdc.Masks.load(tmp_path / "masks.safetensors", other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda masks: masks.pop("3"), r"no mask for \['3'\]"),
        (lambda masks: masks.update(extra=masks["3"]), r"no layer for \['extra'\]"),
        (lambda masks: masks.update({"3": masks["3"].T}), r"masks\['3'\]: shape \(4, 3\), but the weight has \(3, 4\)"),
        (lambda masks: masks.update({"3": masks["3"].float()}), r"masks\['3'\]: dtype torch.float32, but a mask is bool"),
    ],
)
def test_masks_of_another_model_are_refused_and_nothing_is_held(change, message):
    net = model()
    masks = dict(svdc.relevance(net))
    change(masks)
    with pytest.raises(PruneError, match=message):
        svdc.hold(net, masks)
    assert net[0].mask is None


def test_a_model_without_variational_layers_and_an_unknown_share_are_errors():
    with pytest.raises(UsageError, match=r"no variational layer; call svdcompress\.convert"):
        svdc.relevance(nn.Linear(2, 2))
    with pytest.raises(ModelError, match="threshold: unknown name 'rows'"):
        svdc.relevance(model(), {"rows": 2.0})


# An optimizer made before the conversion


def steps(before: bool, frozen: bool = False, clear: bool = False, fused: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    model[0].requires_grad_(not frozen)
    early = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
    svdc.convert(model)
    optimizer = early if before else torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
    elbo = svdc.ELBO(model, nn.CrossEntropyLoss(), num_examples=8)
    for _ in range(3):
        optimizer.zero_grad()
        elbo(model(torch.randn(8, 4)), torch.randint(2, (8,))).backward()
        optimizer.step()
        if clear:
            model.zero_grad()
    return model


@pytest.mark.parametrize("options", [{}, {"frozen": True}, {"clear": True}, {"fused": True}], ids=str)
def test_variances_that_no_optimizer_has_are_noticed(options):
    model = steps(before=True, **options)
    with pytest.warns(UserWarning, match=r"optimizer made before svdcompress.convert"):
        svdc.relevance(model)
    with pytest.warns(UserWarning, match=r"optimizer made before svdcompress.convert"):
        svdc.prune(model, torch.randn(2, 4))


@pytest.mark.parametrize("options", [{}, {"frozen": True}, {"clear": True}, {"fused": True}], ids=str)
def test_variances_that_are_trained_raise_no_warning(options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = steps(before=False, **options)
        svdc.relevance(model)
        svdc.prune(model, torch.randn(2, 4))
        svdc.relevance(svdc.convert(nn.Sequential(nn.Linear(4, 6))))  # not trained at all


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
    dtype = next(model.parameters()).dtype
    svdc.ELBO(model, nn.MSELoss(), num_examples=8)(
        model(torch.randn(8, 4, dtype=dtype)), torch.zeros(8, 4, dtype=dtype)
    ).backward()
    optimizer.step()
    return model


@pytest.mark.parametrize("made", [Tied, lambda: nn.Sequential(nn.Linear(4, 4))], ids=["tied", "plain"])
def test_variances_that_no_optimizer_has_are_noticed_after_a_cast_or_a_checkpoint(made, tmp_path):
    file = tmp_path / "model.safetensors"
    trained = svdc.convert(made())
    stepped(trained, torch.optim.Adam(trained.parameters()))
    svdc.save(trained, file)
    cast, loaded = made().double(), made()
    early = [torch.optim.Adam(model.parameters()) for model in (cast, loaded)]
    svdc.convert(cast).float()
    svdc.load(file, loaded)
    for model, optimizer in zip((cast, loaded), early, strict=True):
        with pytest.warns(UserWarning, match=r"optimizer made before svdcompress.convert\(model\) or svdcompress.load"):
            svdc.relevance(stepped(model, optimizer))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        svdc.relevance(trained.double())
        loaded = svdc.load(file, made()).double()
        assert not next(iter(variational_layers(loaded)))[1].variance_stepped
        svdc.convert(loaded, log_sigma2=-2.0)  # it was trained, so it does not count as starting elsewhere
        svdc.relevance(stepped(loaded, torch.optim.Adam(loaded.parameters())))
        svdc.relevance(svdc.load(file, trained))  # with the gradients of its own training


def test_layers_are_freed_at_once_though_their_gradients_are_noticed():
    layer = svdc.convert(nn.Linear(4, 3))
    gone = weakref.ref(layer.log_sigma2)
    copied = pickle.loads(pickle.dumps(layer))
    assert not copied.variance_heard and not layer.variance_heard
    layer(torch.randn(2, 4)).sum().backward()
    layer.zero_grad()
    assert layer.variance_heard and not layer.log_sigma2._backward_hooks
    gc.disable()
    try:
        del layer
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("root", [True, False])
def test_divided_weights_are_refused(root, tmp_path):
    """With FSDP's own state, in a group of one process; after a pass of the root the weights are whole for a moment."""
    fully_shard = pytest.importorskip("torch.distributed.fsdp").fully_shard
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    try:
        net = svdc.convert(nn.Sequential(nn.Linear(4, 3)))
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        fully_shard(net if root else net[0], mesh=mesh)
        with pytest.raises(UsageError, match=r"0: its weights are divided among processes .*DistributedDataParallel"):
            svdc.ELBO(net, nn.MSELoss(), 10)(net(torch.ones(2, 4)), torch.ones(2, 3))
        with pytest.raises(UsageError, match="0: its weights are divided among processes"):
            svdc.relevance(net)
        whole = svdc.convert(nn.Sequential(nn.Linear(4, 3)))
        distributed = torch.distributed.tensor.distribute_tensor
        whole[0].weight = nn.Parameter(distributed(whole[0].weight.detach(), mesh, [torch.distributed.tensor.Shard(0)]))
        with pytest.raises(UsageError, match="0: its weights are divided among processes"):
            svdc.relevance(whole)
    finally:
        torch.distributed.destroy_process_group()
