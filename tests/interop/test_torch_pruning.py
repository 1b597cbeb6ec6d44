"""torch-pruning's pruners with our relevance, and our surgery carrying out their choices."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from svdcompress.convert import convert
from svdcompress.errors import PruneError, UsageError
from svdcompress.layers import variational_layers
from svdcompress.prune import prune
from svdcompress.relevance import as_masks, hold, relevance

tp = pytest.importorskip("torch_pruning")

from svdcompress.interop.torch_pruning import RelevanceImportance, chosen  # noqa: E402


class Stream(nn.Module):
    """Two convolutions on a residual stream, a depthwise convolution, and a head on flattened features."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.inner, self.outer = nn.Conv2d(8, 6, 3, padding=1), nn.Conv2d(6, 8, 1)
        self.each, self.mix = nn.Conv2d(8, 8, 3, groups=8, padding=1), nn.Conv2d(8, 10, 1)
        self.head = nn.Linear(10 * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = x + self.outer(torch.relu(self.inner(x)))
        return self.head(torch.relu(self.mix(self.each(x))).flatten(1))


X = torch.randn(2, 3, 2, 2, generator=torch.Generator().manual_seed(0))


def noisy(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    model = convert(model).eval()
    with torch.no_grad():
        for _, layer in variational_layers(model):
            layer.log_sigma2.copy_(2 * torch.randn(layer.weight.shape) - 7)
    return model


def pruner(model: nn.Module, head: nn.Module, ratio: float, steps: int = 1, **options: bool) -> tp.pruner.BasePruner:
    options = {"global_pruning": True, **options}
    return tp.pruner.BasePruner(
        model, X, RelevanceImportance(), pruning_ratio=ratio, iterative_steps=steps, ignored_layers=[head], **options
    )


def nats(layer: nn.Module, select: tuple) -> float:
    """The information in the selected weights of a layer, summed one by one."""
    keep = layer.relevant()[select].flatten().tolist()
    pairs = zip(layer.weight[select].flatten().tolist(), layer.log_sigma2[select].flatten().tolist(), keep, strict=True)
    return sum(0.5 * math.log1p((mean**2 + 1e-8) / math.exp(noise)) for mean, noise, alive in pairs if alive)


def test_a_channel_is_worth_the_information_in_the_weights_that_go_with_it() -> None:
    model = noisy(Stream())
    model.inner.mask = torch.rand(model.inner.weight.shape) > 0.3
    graph = tp.DependencyGraph().build_dependency(model, X)
    every = slice(None)
    group = graph.get_pruning_group(model.inner, tp.prune_conv_out_channels, list(range(6)))
    expected = [nats(model.inner, (i,)) + nats(model.outer, (every, i)) for i in range(6)]
    torch.testing.assert_close(RelevanceImportance()(group), torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=1e-4)
    group = graph.get_pruning_group(model.stem, tp.prune_conv_out_channels, list(range(8)))
    expected = [
        nats(model.stem, (i,)) + nats(model.outer, (i,)) + nats(model.inner, (every, i)) + nats(model.each, (i,))
        + nats(model.mix, (every, i))
        for i in range(8)
    ]  # fmt: skip
    torch.testing.assert_close(RelevanceImportance()(group), torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=1e-4)
    group = graph.get_pruning_group(model.mix, tp.prune_conv_out_channels, list(range(10)))
    expected = [nats(model.mix, (i,)) + nats(model.head, (every, slice(4 * i, 4 * i + 4))) for i in range(10)]
    torch.testing.assert_close(RelevanceImportance()(group), torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("whole", [True, False], ids=["global", "local"])
def test_a_choice_is_masks_and_our_surgery_is_exact(whole: bool) -> None:
    model = noisy(Stream())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    masks = chosen(pruner(model, model.head, 0.5, global_pruning=whole))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    small = prune(model, X, masks=masks).eval()
    assert small.pruning.removed > 0 and small.pruning.parameters_after < small.pruning.parameters_before
    if not whole:
        widths = small.stem.out_channels, small.inner.out_channels, small.mix.out_channels
        assert widths == (4, 3, 5)
    x = torch.randn(3, 3, 2, 2)
    with torch.no_grad():
        torch.testing.assert_close(small(x), hold(model, masks)(x), rtol=1e-5, atol=1e-5)


def test_the_least_go_first() -> None:
    model = noisy(nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1)))
    with torch.no_grad():
        for unit in (1, 4, 6):
            model[0].log_sigma2[unit] = 5.0
            model[2].log_sigma2[:, unit] = 5.0
    masks = chosen(pruner(model, model[2], 3 / 8))
    assert (~masks["0"].flatten(1).any(1)).nonzero().flatten().tolist() == [1, 4, 6]
    assert masks["0"].flatten(1).any(1).sum() == masks["2"].flatten(2).any(2).any(0).sum() == 5


def test_a_schedule_of_several_steps_counts_from_the_whole_model() -> None:
    model = noisy(Stream())
    steps = pruner(model, model.head, 0.6, steps=3, global_pruning=False)
    widths, found = [], []
    for _ in range(3):
        found.append(chosen(steps))
        hold(model, found[-1])
        widths.append(prune(model, X).mix.out_channels)
    assert widths == [8, 6, 4]
    for more, less in itertools.pairwise(found):
        assert all((less[name] <= more[name]).all() for name in less) and less.kept < more.kept


def test_what_is_dead_counts_as_gone_and_stays_dead() -> None:
    model = noisy(Stream())
    masks = {name: mask.clone() for name, mask in relevance(model, 100).items()}
    masks["mix"][:4] = False
    masks["head"].view(5, 10, 4)[:, :4] = False
    hold(model, as_masks(model, masks))
    found = chosen(pruner(model, model.head, 0.4, global_pruning=False))
    assert not found["mix"][:4].any() and found["mix"][4:].flatten(1).any(1).all()


class RawFirst(nn.Module):
    """A raw input first in a concatenation: torch-pruning's graph gets its offsets wrong there (docs/pruning.md)."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Conv2d(3, 6, 1), nn.Conv2d(9, 6, 1), nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.two(torch.cat([x, torch.relu(self.one(x))], 1))))


def test_exact_where_its_graph_is_wrong() -> None:
    """Even if torch-pruning chooses the wrong channels, they are masked, and the small model computes the masked model."""
    model = noisy(RawFirst())
    masks = chosen(pruner(model, model.head, 0.5))
    small = prune(model, X, masks=masks).eval()
    x = torch.randn(3, 3, 2, 2)
    with torch.no_grad():
        torch.testing.assert_close(small(x), hold(model, masks)(x), rtol=1e-5, atol=1e-5)


def test_a_dense_model_is_refused() -> None:
    model = Stream()
    with pytest.raises(PruneError, match=r"no variational layer; call svdcompress.convert"):
        chosen(pruner(model, model.head, 0.5))


def test_unknown_sides_are_refused() -> None:
    with pytest.raises(UsageError, match=r"sides: 'input' is not one of"):
        RelevanceImportance("input")


def test_groups_of_layers_that_stayed_dense_are_left_alone() -> None:
    model = convert(Stream(), exclude=["stem", "inner", "outer", "each", "mix"]).eval()
    masks = chosen(pruner(model, model.head, 0.5, global_pruning=False))
    assert set(masks) == {"head"} and masks["head"].sum() == 5 * 20  # half of its inputs


def test_its_own_surgery_on_a_converted_model_fails_loudly() -> None:
    """Nobody should compute with the variances of other weights: `chosen` is the right way."""
    model = noisy(Stream())
    pruner(model, model.head, 0.5, global_pruning=False).step()
    with pytest.raises(RuntimeError):
        model(X)
