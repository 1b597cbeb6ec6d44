"""The sections of a recipe that say what a run gives: what is fitted last, and what is written."""

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
    compact_monte_carlo: bool = False  # model_mc_compact.onnx: the same of model_mc.onnx
    # model_int8.onnx: in integers, as far as the validation error allows. Computed in float32, and stored in fewer bits:
    # model_int4.onnx, weights in four bits, or eight where four lose too much; model_float16.onnx, two bytes a number.
    # auto: integers, or float16 where no layer can be in integers within the tolerance.
    precision: Literal["none", "auto", "int8", "int4", "float16"] = "none"
    # In which means and variances of model_mc.onnx are stored; float16 only where its outputs stay as they are to 1/1000.
    monte_carlo_dtype: Literal["float32", "float16"] = "float32"
    sets: bool = False  # prediction sets or intervals as further outputs; calibrate.coverage says of what coverage

    @field_validator("opset")
    @classmethod
    def _draws(cls, opset: int, info: ValidationInfo) -> int:
        return opset_fits(opset, bool(info.data.get("onnx") and info.data.get("monte_carlo")))


class UncertaintySection(Section):
    """Samples for the figures of the predictive distribution; 0: none.

    budget: seconds that they may take; beyond it they are of fewer test examples, then of fewer samples. auto: a fifth of
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

    temperature: of logits, or of variances that the model gives; constant noise is fitted in any case.
    posterior: auto tries all of them.
    """

    posterior: Literal["auto", "variational", "scaled", "refit", "laplace-diagonal"] = "variational"
    temperature: bool = True
    epochs: int = Field(default=10, ge=1)  # of a refit
    beta: float = Field(default=1.0, ge=0)  # of a refit; 1 is the bound itself
    # Share of truths that prediction sets (classification) or intervals (regression) are to hold.
    coverage: Annotated[float, Field(gt=0, lt=1)] | None = None
    # Accuracy wanted on what is answered: the confidence from which on it is reached goes into report and files.
    answer_above: Annotated[float, Field(gt=0, lt=1)] | None = None
