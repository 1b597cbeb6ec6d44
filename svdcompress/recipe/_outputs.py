"""The sections of a recipe about the results of a run: what is fitted last, and what is written."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from svdcompress.recipe._checks import opset_fits
from svdcompress.recipe._section import Plain, Section


class ExportSection(Section):
    """What is written as ONNX."""

    onnx: bool = True
    monte_carlo: bool = True
    opset: int = Field(default=20, ge=18, le=23)  # up to 21 with monte_carlo
    compact: bool = True  # model_compact.onnx: without the zeros
    compact_monte_carlo: bool = False  # model_mc_compact.onnx: the same for model_mc.onnx
    # model_int8.onnx: in integers, as far as the validation error allows. Computed in float32, but stored in fewer bits:
    # model_int4.onnx, weights in four bits, or in eight where four lose too much; model_float16.onnx, two bytes per number.
    # auto: integers, or float16 if no layer can be in integers within the tolerance.
    precision: Literal["none", "auto", "int8", "int4", "float16"] = "none"
    # Type in which model_mc.onnx stores means and variances; float16 only if its outputs stay the same to within 1/1000.
    monte_carlo_dtype: Literal["float32", "float16"] = "float32"
    # Dimensions whose size the files leave open, by input and dimension, with a name for each: {input: {2: height, 3: width}}.
    dynamic_axes: dict[str, dict[int, str]] = {}
    sets: bool = False  # prediction sets or intervals as further outputs, of the coverage calibrate.coverage

    @field_validator("opset")
    @classmethod
    def _draws(cls, opset: int, info: ValidationInfo) -> int:
        return opset_fits(opset, bool(info.data.get("onnx") and info.data.get("monte_carlo")))


class UncertaintySection(Section):
    """Samples for the figures of the predictive distribution; 0: none.

    budget: seconds that they may take; if they need more, they use fewer test examples, then fewer samples. auto: a fifth of
    what training took, at least 30 s. none: as long as it takes.
    """

    samples: int = Field(default=100, ge=0, le=1_000_000)
    budget: Annotated[float, Field(gt=0)] | Literal["auto", "none"] = "auto"


class ReportSection(Section):
    """What the report holds beyond the table."""

    html: bool = True
    latency: bool = True
    tensorboard: bool = False


class ExperimentSection(Section):
    """An experiment in place of the usual run: its name, and its own settings (see `svdcompress.experiments`)."""

    name: Literal["bayes-linear", "co2", "flow", "leak", "rotated-digit", "vae"]
    settings: Plain = {}


class CalibrateSection(Section):
    """What is fitted on validation data once the network is small: its posterior, its temperature, and what it promises.

    temperature: of the logits, or of the variances that the model predicts; constant noise is fitted in any case.
    posterior: auto tries all of them.
    """

    posterior: Literal["auto", "variational", "scaled", "refit", "laplace-diagonal"] = "variational"
    temperature: bool = True
    epochs: int = Field(default=10, ge=1)  # of the refit
    beta: float = Field(default=1.0, ge=0)  # of the refit; 1 gives the ELBO itself
    # Rate at which prediction sets (classification) or intervals (regression) should hold the truth.
    coverage: Annotated[float, Field(gt=0, lt=1)] | None = None
    # Accuracy wanted on answered inputs; the lowest confidence at which it is reached goes into report and files.
    answer_above: Annotated[float, Field(gt=0, lt=1)] | None = None
