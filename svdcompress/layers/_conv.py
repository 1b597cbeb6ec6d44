"""The variational convolutions, plain and transposed, in one to three dimensions."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from svdcompress.layers._base import VariationalLayer


class _VariationalConv(VariationalLayer):
    """Stride, dilation, groups and all of torch's padding modes are those of torch.nn."""

    def _transform(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # torch.nn's own forward with other weights; padding a square is the square of padding.
        return self._conv_forward(x, weight, bias)


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
    """The optional `output_size` of torch.nn's forward is taken too."""

    def _transform(self, x: Tensor, weight: Tensor, bias: Tensor | None, output_size: list[int] | None = None) -> Tensor:
        dims = len(self.kernel_size)
        function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
        extra = self._output_padding(x, output_size, self.stride, self.padding, self.kernel_size, dims, self.dilation)
        return function(x, weight, bias, self.stride, self.padding, extra, self.groups, self.dilation)


class VariationalConvTranspose1d(_VariationalConvTranspose, nn.ConvTranspose1d):
    """torch.nn.ConvTranspose1d with Gaussian weights; x: (batch, in_channels, length), or without the batch."""

    dense_class = nn.ConvTranspose1d


class VariationalConvTranspose2d(_VariationalConvTranspose, nn.ConvTranspose2d):
    """torch.nn.ConvTranspose2d with Gaussian weights; x: (batch, in_channels, height, width), or without the batch."""

    dense_class = nn.ConvTranspose2d


class VariationalConvTranspose3d(_VariationalConvTranspose, nn.ConvTranspose3d):
    """torch.nn.ConvTranspose3d with Gaussian weights; x: (batch, in_channels, depth, height, width), or unbatched."""

    dense_class = nn.ConvTranspose3d
