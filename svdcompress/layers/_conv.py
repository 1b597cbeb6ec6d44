"""The variational convolutions, plain and transposed, in one to three dimensions."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from svdcompress.layers._base import VariationalLayer
from svdcompress.layers._in_parts import in_parts
from svdcompress.layers._maps import Convolution, Map


class _VariationalConv(VariationalLayer):
    """A convolution with the stride, dilation, groups and padding modes of torch.nn."""

    def _transform(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return in_parts(self._conv_forward, x, weight, bias)

    def _as_map(self, x: Tensor) -> tuple[Tensor, Map]:
        dims = len(self.kernel_size)
        x = x if x.dim() == dims + 2 else x.unsqueeze(0)
        padding, pads = self.padding, self._reversed_padding_repeated_twice
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, pads, mode=self.padding_mode), (0,) * dims
        elif isinstance(padding, str):
            padding = tuple(pads[::-2])
            if any(right != left for left, right in zip(pads[::2], pads[1::2], strict=True)):
                x, padding = F.pad(x, pads), (0,) * dims  # an even kernel under "same": one more on the right
        return x, Convolution(self.stride, padding, self.dilation, False, (0,) * dims, self.groups)


class VariationalConv1d(_VariationalConv, nn.Conv1d):
    """torch.nn.Conv1d with Gaussian weights; x: (batch, in_channels, length), or without the batch."""

    dense_class = nn.Conv1d


class VariationalConv2d(_VariationalConv, nn.Conv2d):
    """torch.nn.Conv2d with Gaussian weights; x: (batch, in_channels, height, width), or without the batch."""

    dense_class = nn.Conv2d


class VariationalConv3d(_VariationalConv, nn.Conv3d):
    """torch.nn.Conv3d with Gaussian weights; x: (batch, in_channels, depth, height, width), or without the batch."""

    dense_class = nn.Conv3d


class _VariationalConvTranspose(VariationalLayer):
    """A transposed convolution; `forward` also takes torch.nn's optional `output_size`."""

    def _transform(self, x: Tensor, weight: Tensor, bias: Tensor | None, output_size: list[int] | None = None) -> Tensor:
        function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[len(self.kernel_size) - 1]
        extra = self._extra(x, output_size)
        return function(x, weight, bias, self.stride, self.padding, extra, self.groups, self.dilation)

    def _as_map(self, x: Tensor, output_size: list[int] | None = None) -> tuple[Tensor, Map]:
        extra = self._extra(x, output_size)
        x = x if x.dim() == len(self.kernel_size) + 2 else x.unsqueeze(0)
        return x, Convolution(self.stride, self.padding, self.dilation, True, tuple(extra), self.groups)

    def _extra(self, x: Tensor, output_size: list[int] | None) -> list[int]:
        """The output padding, on one side of each spatial dimension."""
        dims = len(self.kernel_size)
        return self._output_padding(x, output_size, self.stride, self.padding, self.kernel_size, dims, self.dilation)


class VariationalConvTranspose1d(_VariationalConvTranspose, nn.ConvTranspose1d):
    """torch.nn.ConvTranspose1d with Gaussian weights; x: (batch, in_channels, length), or without the batch."""

    dense_class = nn.ConvTranspose1d


class VariationalConvTranspose2d(_VariationalConvTranspose, nn.ConvTranspose2d):
    """torch.nn.ConvTranspose2d with Gaussian weights; x: (batch, in_channels, height, width), or without the batch."""

    dense_class = nn.ConvTranspose2d


class VariationalConvTranspose3d(_VariationalConvTranspose, nn.ConvTranspose3d):
    """torch.nn.ConvTranspose3d with Gaussian weights; x: (batch, in_channels, depth, height, width), or unbatched."""

    dense_class = nn.ConvTranspose3d
