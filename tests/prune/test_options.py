"""The options of `prune`, what it refuses, and that the given model is never changed."""

from __future__ import annotations

import copy

import pytest
import torch
from masking import gap, masked, outputs, random_masks, shake
from torch import Tensor, nn
from torch.nn import functional as F

from svdcompress.convert import convert
from svdcompress.errors import ModelError, PruneError, SvdcError, UsageError
from svdcompress.layers import variational_layers
from svdcompress.prune import groups, prune
from svdcompress.prune._attempt import Attempt
from svdcompress.relevance import relevance


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3))


def dead(model: nn.Module, name: str, rows: list[int], columns: tuple[int, ...] = ()) -> dict[str, Tensor]:
    masks = {n: torch.ones_like(layer.weight, dtype=torch.bool) for n, layer in variational_layers(model)}
    masks[name][rows] = False
    masks[name][:, list(columns)] = False
    return masks


def test_threshold_and_the_layers_own_relevance_agree_with_eval() -> None:
    torch.manual_seed(0)
    model = convert(shake(net()), share="input")
    with torch.no_grad():
        for _, layer in variational_layers(model):
            layer.log_sigma2.fill_(-6)
            layer.weight[:, :3] = 1e-6
            layer.weight[:, 3:6] *= 0.5
    x = torch.randn(5, 8)
    own = prune(model, x)
    assert gap(outputs(own.eval(), x), outputs(model.eval(), x)) <= 1e-5
    stricter = prune(model, x, threshold=-1.5)
    assert gap(outputs(stricter.eval(), x), outputs(masked(model, dict(relevance(model, -1.5))), x)) <= 1e-5
    assert stricter.pruning.parameters_after < own.pruning.parameters_after < own.pruning.parameters_before
    assert all(layer.mask is not None for _, layer in variational_layers(own))


def test_report_tells_groups_and_layers() -> None:
    model = convert(shake(net()))
    small = prune(model, torch.randn(2, 8), masks=dead(model, "0", [1, 2, 3]))
    by_name = {group.name: group for group in small.pruning.groups}
    assert (by_name["0"].removed, by_name["0"].kept, by_name["0"].reason) == (3, 13, "")
    assert by_name["4"].removed == 0 and by_name["4"].reason == "output of the model"
    assert {layer.name: (layer.shape_before, layer.shape_after) for layer in small.pruning.layers}["2"] == ((12, 16), (12, 13))
    told = small.pruning.to_dict()
    assert told["surgery"]["attributes"]["0"] == {"out_features": 13} and told["max_error"] is not None


def test_what_only_dead_units_read_goes_too() -> None:
    model = convert(shake(net()))
    masks = dead(model, "4", [], columns=tuple(range(6)))
    masks["2"][6:, :5] = False  # five units of the first layer are read only by the six dead ones of the second
    x = torch.randn(2, 8)
    small = prune(model, x, masks=masks)
    assert [layer.out_features for _, layer in variational_layers(small)] == [11, 6, 3]
    assert gap(outputs(small.eval(), x), outputs(masked(model, masks), x)) <= 1e-6


def test_groups_tells_without_doing() -> None:
    for model in (net(), convert(net())):
        before = copy.deepcopy(model.state_dict())
        report = groups(model, torch.randn(2, 8))
        assert [(group.name, group.kept, group.prunable) for group in report.groups] == [
            ("0", 16, True),
            ("2", 12, True),
            ("4", 3, False),
        ]
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_protected_layers_stay() -> None:
    model = convert(shake(net()))
    masks = dead(model, "0", [0, 1])
    masks["2"][[4, 5]] = False
    small = prune(model, torch.randn(2, 8), masks=masks, protect=["2"])
    assert small[0].out_features == 16 and small[2].out_features == 12
    assert {group.name: group.reason for group in small.pruning.groups}["0"] == "protected"


def test_protecting_a_container_or_a_second_name_protects_what_is_inside() -> None:
    inner = nn.Linear(16, 12)
    model = convert(shake(nn.ModuleDict({"body": nn.Sequential(nn.Linear(8, 16), nn.ReLU(), inner), "head": nn.Linear(12, 3)})))
    model["alias"] = inner

    class Whole(nn.Module):
        def __init__(self, parts: nn.ModuleDict) -> None:
            super().__init__()
            self.parts = parts

        def forward(self, x: Tensor) -> Tensor:
            return self.parts["head"](torch.relu(self.parts["body"](x)))

    whole = Whole(model)
    masks = dead(whole, "parts.body.0", [0, 1])
    masks["parts.body.2"][[4, 5]] = False
    x = torch.randn(2, 8)
    free = prune(whole, x, masks=masks)
    assert (free.parts["body"][0].out_features, free.parts["body"][2].out_features) == (14, 10)
    for pattern, widths in (("parts.body", (16, 12)), ("parts.alias", (16, 12)), ("parts.body.0", (16, 10))):
        small = prune(whole, x, masks=masks, protect=[pattern])
        assert (small.parts["body"][0].out_features, small.parts["body"][2].out_features) == widths, pattern


def test_numbers_that_only_happen_to_be_equal_stay() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = self.num_classes = self.max_length = 12
            self.a, self.b = nn.Linear(6, 12), nn.Linear(12, 12)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.relu(self.a(x)).view(-1, self.hidden)).view(-1, self.num_classes)

    model = convert(shake(Net()))
    small = prune(model, torch.randn(2, 6), masks=dead(model, "a", [1, 2]))
    assert (small.hidden, small.num_classes, small.max_length) == (10, 12, 12)


def test_round_to() -> None:
    model = convert(shake(net()))
    small = prune(model, torch.randn(2, 8), masks=dead(model, "0", list(range(11))), round_to=4)
    assert small[0].out_features == 8
    assert "multiple of 4" in small.pruning.groups[0].reason


@pytest.mark.parametrize("kind", ["features", "channels"])
def test_inputs_go_by_option_alone(kind: str) -> None:
    torch.manual_seed(0)
    if kind == "features":
        model, x = convert(shake(net())), torch.randn(4, 8)
        masks = dead(model, "0", [1], columns=(2, 5, 6))
    else:
        chain = nn.Sequential(nn.Conv2d(8, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(100, 2))
        model, x = convert(shake(chain)), torch.randn(4, 8, 5, 5)
        masks = dead(model, "0", [1], columns=(2, 5, 6))
    kept = [0, 1, 3, 4, 7]
    assert prune(model, x, masks=masks)[0].weight.shape[1] == 8
    small = prune(model, x, masks=masks, remove_inputs=True)
    assert small[0].weight.shape[1] == 5
    assert (small.pruning.inputs_kept, small.pruning.inputs_dim) == (kept, 1)
    assert small.surgery["inputs"] == {"kept": kept, "dim": 1}
    assert gap(outputs(small.eval(), x[:, kept]), outputs(masked(model, masks), x)) <= 1e-5


class HardCoded(nn.Module):
    """The view's constant is hard-coded, so pruning its units fails and is undone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(6, 12), nn.Linear(12, 4), nn.Linear(6, 10), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)).view(-1, 12)) + self.d(torch.relu(self.c(x)))


@pytest.mark.parametrize("spent", [False, True])
def test_time_budget_leaves_the_rest_masked(spent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = convert(shake(HardCoded()))
    masks = random_masks(model, 0.0, 0.5, 0.0)
    x = torch.randn(3, 6)
    if spent:  # from the start of the search for the faulty groups
        search = Attempt._search
        monkeypatch.setattr(Attempt, "_search", lambda self, *args: setattr(self, "deadline", 0) or search(self, *args))
    small = prune(model, x, masks=masks)
    assert gap(outputs(small.eval(), x), outputs(masked(model, masks), x)) <= 1e-5
    reasons = {group.name: group.reason for group in small.pruning.groups}
    assert small.a.out_features == 12 and "left masked" in reasons["a"]
    if spent:
        assert small.c.out_features == 10 and "time budget" in reasons["c"]
    else:
        assert small.c.out_features < 10 and "left masked" not in reasons["c"]
        assert "is invalid for input" in reasons["a"]


def test_no_time_to_follow_the_model_leaves_it_masked_with_a_note() -> None:
    torch.manual_seed(0)
    model, x = convert(shake(net())), torch.randn(3, 8)
    masks = random_masks(model)
    small = prune(model, x, masks=masks, time_budget=1e-9)
    assert small.pruning.parameters_after == small.pruning.parameters_before
    assert any("time budget" in note for note in small.pruning.notes)
    assert gap(outputs(small.eval(), x), outputs(masked(model, masks), x)) <= 1e-6


def test_wrong_but_silent_shapes_are_put_back() -> None:
    """With channels picked by index, shapes still fit after pruning but contents differ; verification detects this."""

    class Sneaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 12), nn.Linear(12, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.a(x))
            order = torch.arange(h.shape[1] - 1, -1, -1)
            return self.b(h) + h[:, order].cumsum(1).sum(1, keepdim=True) * (h.shape[1] / 12)

    torch.manual_seed(0)
    model = convert(shake(Sneaky()))
    masks = random_masks(model, 0.0, 0.5, 0.3)
    x = torch.randn(3, 6)
    small = prune(model, x, masks=masks)
    assert gap(outputs(small.eval(), x), outputs(masked(model, masks), x)) <= 1e-5


def test_inputs_removed_twice_are_told_in_terms_of_the_first_model() -> None:
    torch.manual_seed(0)
    model, x = convert(shake(net())), torch.randn(4, 8)
    once = prune(model, x, masks=dead(model, "0", [], columns=(2, 5, 6)), remove_inputs=True)
    masks = {name: layer.mask.clone() for name, layer in variational_layers(once)}
    masks["0"][:, 1] = False  # the second of 0, 1, 3, 4, 7
    twice = prune(once, x[:, once.pruning.inputs_kept], masks=masks, remove_inputs=True)
    assert twice.pruning.inputs_kept == [0, 2, 3, 4]
    assert twice.surgery["inputs"] == {"kept": [0, 3, 4, 7], "dim": 1}
    again = prune(twice, x[:, [0, 3, 4, 7]])
    assert again.surgery["inputs"] == {"kept": [0, 3, 4, 7], "dim": 1}


def test_features_of_one_of_several_inputs_stay_with_a_note() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 10), nn.Linear(4, 10), nn.Linear(10, 2)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.c(torch.relu(self.a(x) + self.b(y)))

    model = convert(shake(Two()))
    x = (torch.randn(3, 6), torch.randn(3, 4))
    masks = dead(model, "a", [], columns=(1, 2))
    small = prune(model, x, masks=masks, remove_inputs=True)
    assert small.pruning.inputs_kept is None and any("inputs are kept" in note for note in small.pruning.notes)
    assert gap(outputs(small.eval(), x), outputs(masked(model, masks), x)) <= 1e-5


def test_modes_hooks_and_frozen_layers_stay() -> None:
    model = convert(shake(net()))
    model.train()
    model[1].eval()
    model[4].requires_grad_(False)
    calls = []
    model[2].register_forward_hook(lambda *_: calls.append(1))
    small = prune(model, torch.randn(2, 8), masks=dead(model, "0", [3]))
    assert [module.training for module in small.modules()] == [module.training for module in model.modules()]
    assert [p.requires_grad for p in small.parameters()] == [p.requires_grad for p in model.parameters()]
    calls.clear()
    small(torch.randn(2, 8))
    assert calls == [1]


def test_everything_masked_leaves_one_unit_each_and_tells() -> None:
    model = convert(shake(net()))
    masks = {name: torch.zeros_like(layer.weight, dtype=torch.bool) for name, layer in variational_layers(model)}
    x = torch.randn(3, 8)
    small = prune(model, x, masks=masks)
    assert [layer.weight.shape for _, layer in variational_layers(small)] == [(1, 8), (1, 1), (3, 1)]
    assert any("every weight is masked" in note for note in small.pruning.notes)
    assert gap(outputs(small.eval(), x), outputs(masked(model, masks), x)) <= 1e-6


# Bad input


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("not today")


@pytest.mark.parametrize(
    ("inputs", "word"),
    [
        (torch.randn(2, 9), "example inputs"),
        (torch.randint(0, 5, (2, 8)), "example inputs"),
        ({"y": torch.randn(2, 8)}, "example inputs"),
        ((torch.randn(2, 8), torch.randn(2, 8)), "example inputs"),
    ],
)
def test_wrong_example_inputs(inputs: object, word: str) -> None:
    model = convert(net())
    before = copy.deepcopy(model.state_dict())
    for function in (prune, groups):
        with pytest.raises(PruneError, match=word):
            function(model, inputs)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_other_bad_input() -> None:
    model, x = convert(net()), torch.randn(2, 8)
    good = dict(relevance(model))
    with pytest.raises(PruneError, match="not today"):
        prune(convert(Failing()), torch.randn(1, 4))
    with pytest.raises(UsageError, match="convert"):
        prune(net(), x)
    with pytest.raises(PruneError, match="another model"):
        prune(model, x, masks={"other": torch.ones(2, 2, dtype=torch.bool)})
    with pytest.raises(PruneError, match="shape"):
        prune(model, x, masks={**good, "0": torch.ones(2, 2, dtype=torch.bool)})
    with pytest.raises(PruneError, match="bool"):
        prune(model, x, masks={**good, "0": torch.ones(16, 8)})
    with pytest.raises(UsageError, match="not both"):
        prune(model, x, masks=good, threshold=3)
    with pytest.raises(UsageError, match="round_to"):
        prune(model, x, round_to=0)
    with pytest.raises(PruneError, match="'nothing' matches no module"):
        prune(model, x, protect=["nothing"])
    with pytest.raises((PruneError, ModelError)):
        prune(model, {})
    odd = convert(net())
    odd.lock = (item for item in ())  # makes the model impossible to copy
    with pytest.raises(SvdcError, match="copied"):
        prune(odd, x)


def test_functional_weights_are_left_alone() -> None:
    """A weight that is computed before use cannot be followed: it stays, with a reason."""

    class Standardised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)
            self.raw = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.a(x)).mean((2, 3))
            h = h @ (self.raw - self.raw.mean(1, keepdim=True))
            return F.relu(self.b(F.relu(self.a(x)))).mean((2, 3)) + h[:, :4]

    torch.manual_seed(0)
    model = convert(shake(Standardised()))
    masks = random_masks(model, 0.1, 0.5, 0.3)
    x = torch.randn(2, 3, 7, 7)
    small = prune(model, x, masks=masks)
    assert small.a.out_channels == 8
    assert {group.name: group for group in small.pruning.groups}["a"].reason
    assert gap(outputs(small.eval(), x), outputs(masked(model, masks), x)) <= 1e-5


@pytest.mark.parametrize("wrap", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
def test_a_weight_that_is_computed_since_conversion_is_named(wrap) -> None:
    model = convert(net()).eval()
    wrap(model[2])
    for work in (prune, groups):
        with pytest.raises(PruneError, match=r"^2: its weight has been computed .* derived='fold'"):
            work(model, torch.randn(2, 8))
