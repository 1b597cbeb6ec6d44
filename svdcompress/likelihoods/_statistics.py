"""What is summed over the draws, and the outputs computed from the sums: the formulas of `mc_predict`, as parts of a graph.

Sums are float64. In float32 a small mutual information would be off by several percent after many samples.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from svdcompress.errors import ExportError
from svdcompress.likelihoods._heads import HeadsError, class_axis


class Statistics:
    """Base class. parts: also output aleatoric and epistemic variances, for tasks that do not output them anyway."""

    def __init__(self, likelihood: Any, parts: bool = False) -> None:
        self.likelihood, self.dim, self.parts = likelihood, likelihood.dim, parts

    def of_draw(self, output: Any) -> tuple[Tensor, ...]:
        """What one draw adds to the sums."""
        raise NotImplementedError

    def outputs(self, sums: tuple[Tensor, ...], samples: Tensor) -> dict[str, Tensor]:
        """The file's outputs, float32, after `samples` draws (a scalar)."""
        raise NotImplementedError

    def _heads(self, output: Any) -> Any:
        """The heads of a model's output in float64."""
        try:
            return tree_map(lambda head: head.double(), self.likelihood.heads(output))
        except HeadsError as error:
            raise ExportError(str(error)) from error

    def _along(self, output: Tensor) -> int:
        """The class dimension, counted from the front. Raises UsageError where the output has no such one."""
        return class_axis(output.dim(), self.dim)

    def _variances(self, aleatoric: Tensor, mean: Tensor, squares: Tensor) -> dict[str, Tensor]:
        epistemic = (squares - mean * mean).clamp_min(0)
        return {"variance": aleatoric + epistemic, "aleatoric": aleatoric, "epistemic": epistemic}


class MomentStatistics(Statistics):
    """Any likelihood's `moments`: `1/T sum variance_t` and the variance of the means."""

    def of_draw(self, output: Any) -> tuple[Tensor, ...]:
        mean, variance = self.likelihood.moments(self._heads(output))
        return mean, mean * mean, variance

    def outputs(self, sums: tuple[Tensor, ...], samples: Tensor) -> dict[str, Tensor]:
        mean, squares, noise = (total / samples for total in sums)
        return file_outputs(mean, self._variances(noise, mean, squares), True)


def entropy_of(p: Tensor) -> Tensor:
    """-p log p, and 0 where p is 0; ONNX has no `entr`."""
    return -p * p.clamp_min(1e-30).log()


def file_outputs(
    mean: Tensor, variances: dict[str, Tensor], parts: bool, entropy: Tensor | None = None, expected: Tensor | None = None
) -> dict[str, Tensor]:
    """The outputs of a file by name, float32; without entropies for values."""
    outputs = {"mean": mean, "variance": variances["variance"]}
    if entropy is not None and expected is not None:
        outputs["predictive_entropy"] = entropy
        outputs["expected_entropy"] = expected
        outputs["mutual_information"] = (entropy - expected).clamp_min(0)
    if parts:
        outputs |= {name: variances[name] for name in ("aleatoric", "epistemic")}
    return {name: value.float() for name, value in outputs.items()}
