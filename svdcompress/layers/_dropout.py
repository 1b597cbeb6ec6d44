"""Dropout that can draw in `eval()` too: MC dropout, for comparison with the variational layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from svdcompress.errors import ModelError
from svdcompress.layers._positions import Shapes
from svdcompress.layers._rows import Rows
from svdcompress.layers._sampling import Sampler, StochasticLayer, leaves_the_graph, outside_of_the_graph


class _NoiseLayer(StochasticLayer):
    """Multiplies its input by noise of mean 1.

    p: dropout rate in [0, 1).
    channels: one random number for each whole channel (inputs of shape (batch, channels, *)), as torch.nn.Dropout2d does.

    Within a member (`sampling(members=True)`) a layer drops the same units at each call: at each step of a recurrence (Gal &
    Ghahramani 2016), but also wherever a network uses the same object in several places. To get different noise there, give
    each place its own layer.
    """

    def __init__(self, p: float = 0.5, channels: bool = False) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ModelError(f"dropout rate p: {p} is not in [0, 1)")
        self.p = p
        self.channels = channels

    def _noise(self, shape: Sequence[int], like: Tensor, sampler: Sampler) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        if leaves_the_graph():
            return outside_of_the_graph(self.forward, x)
        sampler = self.sampler
        if self.p == 0 or isinstance(sampler, Shapes) or (sampler is None and not self.training):
            return x
        if isinstance(sampler, Rows):
            x = sampler.by_draw(x)
            return (x * self._noise(self._shape(x, 3), x, sampler)).flatten(0, 1)
        shape = self._shape(x, 2)
        if sampler is None or not sampler.members:
            return x * self._noise(shape, x, sampler or Sampler())
        # A member drops the same units for every input (Gal & Ghahramani 2016: one draw of the columns of the weights).
        noises = sampler.noises.setdefault(self, {})  # by shape: one layer may serve several widths
        if shape[1:] not in noises:
            noises[shape[1:]] = self._noise(shape[1:], x, sampler)
        return x * noises[shape[1:]]

    def _shape(self, x: Tensor, channels: int) -> Sequence[int]:
        """Shape of the noise; channels: number of dimensions of x up to and including the channels."""
        return x.shape[:channels] + (1,) * (x.dim() - channels) if self.channels else x.shape

    def extra_repr(self) -> str:
        return f"p={self.p}, channels={self.channels}"


class BernoulliDropout(_NoiseLayer):
    """`x * Bernoulli(1 - p) / (1 - p)`: MC dropout (Gal & Ghahramani 2016)."""

    def _noise(self, shape: Sequence[int], like: Tensor, sampler: Sampler) -> Tensor:
        return sampler.bernoulli(shape, 1 - self.p, like) / (1 - self.p)


class GaussianDropout(_NoiseLayer):
    """`x * N(1, alpha)` with `alpha = p / (1 - p)`, the variance of Bernoulli dropout at the same p (Wang & Manning 2013)."""

    def _noise(self, shape: Sequence[int], like: Tensor, sampler: Sampler) -> Tensor:
        return 1 + (self.p / (1 - self.p)) ** 0.5 * sampler.normal(like.new_empty(shape))


DROPOUT_CLASSES: dict[type[nn.Module], bool] = {
    nn.Dropout: False,
    nn.Dropout1d: True,
    nn.Dropout2d: True,
    nn.Dropout3d: True,
}
"""torch.nn's dropout layers, and whether they drop whole channels."""
