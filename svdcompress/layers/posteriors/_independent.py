"""A variance of its own for each weight."""

from __future__ import annotations

from torch import Tensor

from svdcompress.layers.posteriors._base import Posterior, Shaped


class Independent(Posterior):
    """A log variance for each weight: the mean-field posterior of Molchanov et al. 2017 and Kharitonov et al. 2018."""

    name = "independent"
    parameters = ("log_sigma2",)

    def start(self, layer: Shaped, log_sigma2: Tensor) -> dict[str, Tensor]:
        """The log variances themselves."""
        return {"log_sigma2": log_sigma2}

    def log_sigma2(self, layer: Shaped) -> Tensor:
        """The parameter itself."""
        return layer.log_sigma2
