"""Every kind of variational layer, small, with an input; and the oracle that draws weights and calls torch.nn's own layer."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from svdcompress.layers import (
    VARIATIONAL_CLASSES,
    VariationalConv1d,
    VariationalConv2d,
    VariationalConv3d,
    VariationalConvTranspose1d,
    VariationalConvTranspose2d,
    VariationalConvTranspose3d,
    VariationalLayer,
    VariationalLinear,
    register_loaded,
)
from svdcompress.layers._hf import VariationalHFConv1D

register_loaded()


@dataclass(frozen=True)
class Case:
    """A layer class with its arguments, and the shape of an input."""

    kind: type[VariationalLayer]
    args: dict
    shape: tuple[int, ...]

    def layer(self, spread: float = 1.0, **kwargs) -> VariationalLayer:
        """The layer in train mode, the same each time; log_sigma2 from -4 - spread to -4 + spread."""
        torch.manual_seed(0)
        layer = self.kind(**self.args, **kwargs)
        with torch.no_grad():
            layer.log_sigma2.copy_(-4 + spread * (2 * torch.rand_like(layer.weight) - 1))
        return layer

    def dense(self, layer: VariationalLayer) -> nn.Module:
        """torch.nn's layer with the same weight and bias."""
        dense = self.kind.dense_class(**self.args).to(layer.weight.dtype)
        dense.load_state_dict({name: value for name, value in layer.state_dict().items() if name in ("weight", "bias")})
        return dense

    def x(self, seed: int = 1) -> Tensor:
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(seed))

    @property
    def batched(self) -> bool:
        return len(self.shape) > 1 + self.dims

    @property
    def dims(self) -> int:
        """The number of spatial dimensions."""
        return len(self.args.get("kernel_size", ()))


def conv(kind, shape, kernel_size, inputs=4, outputs=6, **args) -> Case:
    return Case(kind, {"in_channels": inputs, "out_channels": outputs, "kernel_size": kernel_size, **args}, shape)


C1, C2, C3 = VariationalConv1d, VariationalConv2d, VariationalConv3d
T1, T2, T3 = VariationalConvTranspose1d, VariationalConvTranspose2d, VariationalConvTranspose3d
IMAGE = (2, 4, 5, 5)

CASES = {
    "linear": Case(VariationalLinear, {"in_features": 5, "out_features": 3}, (4, 5)),
    "linear-no-bias": Case(VariationalLinear, {"in_features": 5, "out_features": 3, "bias": False}, (4, 5)),
    "linear-sequence": Case(VariationalLinear, {"in_features": 5, "out_features": 3}, (2, 3, 5)),
    "linear-one": Case(VariationalLinear, {"in_features": 5, "out_features": 3}, (5,)),
    "hf-conv1d": Case(VariationalHFConv1D, {"nx": 5, "nf": 3}, (4, 5)),
    "hf-conv1d-sequence": Case(VariationalHFConv1D, {"nx": 5, "nf": 3}, (2, 3, 5)),
    "conv1d": conv(C1, (2, 4, 8), (3,), stride=2, padding=1),
    "conv1d-circular-no-bias": conv(C1, (2, 4, 6), (3,), padding=1, padding_mode="circular", bias=False),
    "conv2d": conv(C2, IMAGE, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)),
    "conv2d-no-bias": conv(C2, IMAGE, (3, 3), bias=False),
    "conv2d-reflect": conv(C2, IMAGE, (3, 3), padding=(2, 1), padding_mode="reflect"),
    "conv2d-replicate": conv(C2, IMAGE, (3, 3), padding=1, padding_mode="replicate", stride=2),
    "conv2d-circular": conv(C2, IMAGE, (3, 3), padding=(1, 2), padding_mode="circular"),
    "conv2d-same": conv(C2, IMAGE, (3, 3), padding="same", dilation=2),
    "conv2d-same-even": conv(C2, IMAGE, (2, 4), padding="same"),
    "conv2d-same-reflect": conv(C2, IMAGE, (2, 3), padding="same", padding_mode="reflect"),
    "conv2d-valid": conv(C2, IMAGE, (3, 3), padding="valid"),
    "conv2d-groups": conv(C2, IMAGE, (3, 3), padding=1, groups=2),
    "conv2d-depthwise": conv(C2, IMAGE, (3, 3), outputs=8, padding=1, groups=4, bias=False),
    "conv2d-one": conv(C2, (4, 5, 5), (3, 3), padding=1),
    "conv3d": conv(C3, (2, 4, 3, 4, 4), (2, 2, 2), padding=1, outputs=2),
    "transposed1d": conv(T1, (2, 4, 5), (3,), stride=2, output_padding=1),
    "transposed2d": conv(T2, (2, 4, 3, 3), (3, 3), stride=2, padding=1, output_padding=1, groups=2),
    "transposed2d-no-bias": conv(T2, (2, 4, 3, 3), (2, 3), dilation=2, bias=False),
    "transposed2d-one": conv(T2, (4, 3, 3), (2, 2), stride=2),
    "transposed3d": conv(T3, (1, 4, 2, 2, 3), (2, 2, 2), outputs=2, stride=2),
}

assert {case.kind for case in CASES.values()} == set(VARIATIONAL_CLASSES.values()), "a layer has no case"


def weight_draws(case: Case, layer: VariationalLayer, x: Tensor, draws: int, keep: Tensor | None = None) -> Tensor:
    """The oracle: outputs (draws, *output) of the dense layer, with weights drawn from the posterior for each draw."""
    sigma = layer.log_sigma2.exp().sqrt()
    weights = layer.weight + sigma * torch.randn(draws, *layer.weight.shape, dtype=x.dtype)
    weights = weights if keep is None else weights * keep
    dense = case.dense(layer)
    rest = {} if layer.bias is None else {"bias": layer.bias}
    return vmap(lambda weight: functional_call(dense, {"weight": weight, **rest}, (x,)))(weights)


def layer_draws(case: Case, layer: VariationalLayer, x: Tensor, draws: int) -> Tensor:
    """Draws of the layer itself, (draws, *output): one pass over the repeated input."""
    if case.batched:
        return layer(x.expand(draws, *x.shape).flatten(0, 1)).unflatten(0, (draws, len(x)))
    return layer(x.expand(draws, *x.shape))
