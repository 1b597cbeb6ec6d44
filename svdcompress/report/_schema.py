"""What the table and the page read of `report.json`; it is checked when a file is read, and other keys are allowed."""

from __future__ import annotations

from pathlib import PurePath, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Number = float | None
Count = Annotated[int, Field(ge=0)]
Shape = list[Count] | None


def _beside(name: str) -> str:
    """Allow only pictures directly in the run's folder, since the page embeds the files that a report names."""
    if PurePath(name).name != name or "\\" in name or PurePath(name).suffix not in (".png", ".svg", ".jpg", ".jpeg"):
        raise ValueError("must be a PNG, SVG or JPEG file directly in the folder")
    return name


def _inside(name: str) -> str:
    """Allow only files within the run's folder: nothing else is read."""
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\\" in name:
        raise ValueError("must be a file within the folder")
    return name


class _Part(BaseModel):
    """Base with strict types: a number must not be given as text."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class Side(_Part):
    """`dense` and `sparse`."""

    metrics: dict[str, Number] | None = None
    validation: dict[str, Number] | None = None
    parameters: Count | None = None
    nonzero: Count | None = None
    weights: Count | None = None
    weights_nonzero: Count | None = None
    bytes: Count | None = None
    bytes_compact: Count | None = None
    macs: Count | None = None
    latency_ms: dict[str, Number] | None = None


class Layer(_Part):
    """One of `layers`."""

    name: str
    shape_before: Shape = None
    shape_after: Shape = None
    sparsity: Number = None
    inputs_before: Count | None = None
    inputs: Count | None = None
    outputs_before: Count | None = None
    outputs: Count | None = None
    type: str | None = None
    parameters_before: Count | None = None
    parameters: Count | None = None
    macs_before: Count | None = None
    macs: Count | None = None


class Group(_Part):
    """One of `pruning.groups`."""

    name: str
    removed: Count | None = None
    kept: Count
    units: Count | None = None
    kept_unrounded: Count | None = None
    reason: str | None = None


class Pruning(_Part):
    """`pruning`."""

    groups: list[Group] | None = None
    max_error: Number = None
    seconds: Number = None
    inputs_kept: list[Count] | None = None
    inputs_gathered: bool | None = None
    columns_dropped: list[str] | None = None
    round_to: Count | None = None
    rounded: bool | None = None
    parameters_after: Count | None = None
    parameters_unrounded: Count | None = None
    notes: list[str] | None = None


class Histogram(_Part):
    """One of `log_alpha`."""

    edges: Annotated[list[float], Field(min_length=2)]
    counts: Annotated[list[float], Field(min_length=1)]
    threshold: Number = None
    share: str | None = None


class Epoch(_Part):
    """One of `history`."""

    stage: str
    epoch: float
    loss: Number = None
    nll: Number = None
    kl: Number = None
    beta: Number = None
    sparsity: Number = None
    lr: Number = None
    val_error: Number = None


class Picture(_Part):
    """One of `pictures`; dark: the file for the dark page, if there is one."""

    file: Annotated[str, AfterValidator(_beside)]
    dark: Annotated[str, AfterValidator(_beside)] | None = None
    title: str | None = None
    caption: str | None = None


class Filters(_Part):
    """One of `filters`."""

    before: list[Any]
    after: list[Any]


class Pixels(_Part):
    """`picture` of one of `doubts`."""

    shape: list[Count]
    base64: str


class Doubt(_Part):
    """One of `doubts`."""

    example: Count
    truth: str
    guess: str
    confidence: float
    entropy: float
    mutual_information: Number = None
    picture: Pixels | None = None


class Recalled(_Part):
    """One of `recall`."""

    examples: Count
    dense: float
    sparse: float
    lost: bool | None = None


class Digest(_Part):
    """One of `files`."""

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    bytes: Count


class Candidate(_Part):
    """One of `candidates` of a trial's mixture."""

    name: str
    nll: Number = None
    size: Number = None


class Mixture(_Part):
    """`mixture` of one of `search.trials`."""

    chosen: str
    usual: str
    examples: Count
    candidates: list[Candidate]


class Reconstructed(_Part):
    """`reconstruction` of one of `search.trials`: number of layers, and the mean error of their outputs before and after."""

    layers: Count
    before: float
    after: float
    left: dict[str, str]


class Tried(_Part):
    """One of `search.trials`."""

    number: Count
    pressure: float
    beta: float
    costs: dict[str, float]
    error: float
    drop: float
    upper: Number
    met: bool
    seconds: float
    estimate: Number = None
    at_most: Number = None
    mixture: Mixture | None = None
    reconstruction: Reconstructed | None = None
    continues: Count | None = None
    recover_lr: float | None = None


class DenseCost(_Part):
    """`search.dense`."""

    error: float
    costs: dict[str, float]


class MeasuredWith(_Part):
    """`search.measured`."""

    batches: list[Count] | None = None
    threads: Count | None = None
    clock: str | None = None
    machine: str | None = None
    onnxruntime: str | None = None
    command: str | None = None


class SearchEpochs(_Part):
    """`search.epochs`: epochs of the path and all trials, and of one run without a search."""

    search: Count
    one_run: Count


class Search(_Part):
    """`search`."""

    objective: Literal["parameters", "macs", "latency", "bytes", "nonzero"]
    goal: str | None = None
    max_drop: Number = None
    max_error: Number = None
    confidence: float
    measured: MeasuredWith | None = None
    dense: DenseCost
    least: Number = None
    validation_examples: Count
    path: list[dict[str, float]]
    trials: list[Tried]
    chosen: Count
    epochs: SearchEpochs | None = None
    met: bool | None = None
    reached: bool | None = None
    notes: list[str] | None = None


class Tempered(_Part):
    """`mean` and `samples` of `calibrate`."""

    value: float
    before: float
    after: float
    taken: bool


class TriedPosterior(_Part):
    """One of `calibrate.tried`."""

    name: str
    nll: Number = None
    note: str = ""


class Calibrate(_Part):
    """`calibrate`."""

    posterior: str | None = None
    mean: Tempered | None = None
    samples: Tempered | None = None
    tried: list[TriedPosterior] | None = None
    notes: list[str] | None = None
    likelihood: dict[str, Any] | None = None


class Measured(_Part):
    """How well a promise was kept on the test data."""

    coverage: Number = None
    each: list[float] | None = None
    size: Number = None
    accuracy: Number = None
    answered: Number = None


class Coverage(_Part):
    """One of `promises.coverage`."""

    coverage: float
    examples: Count
    kind: str
    test: Measured | None = None


class Answers(_Part):
    """One of `promises.answer_above`."""

    accuracy: float
    threshold: float
    answered: float
    test: Measured | None = None


class Promises(_Part):
    """`promises`."""

    coverage: dict[str, Coverage] | None = None
    answer_above: dict[str, Answers] | None = None


class Reduced(_Part):
    """`int8`, `int4` and `float16`."""

    file: str | None = None
    bytes: Count | None = None
    metrics: dict[str, Number] | None = None
    agreement: Number = None
    layers: dict[str, str] | None = None
    latency_ms: dict[str, Number] | None = None


class Results(_Part):
    """All of `report.json`."""

    format: Count | None = None
    files: dict[Annotated[str, AfterValidator(_inside)], Digest] | None = None
    name: str | None = None
    description: str | None = None
    created: str | None = None
    task: str | None = None
    experiment: str | None = None
    recipe: str | None = None
    seed: int | None = None
    device: str | None = None
    processes: Count | None = None
    threads: Count | None = None
    clock: str | None = None
    recover_lr: float | None = None
    torch_threads: Count | None = None
    versions: dict[str, str | None] | None = None
    seconds: dict[str, float] | None = None
    warnings: list[str] | None = None
    examples: dict[str, Count] | None = None
    dense: Side | None = None
    sparse: Side | None = None
    int8: Reduced | None = None
    int4: Reduced | None = None
    float16: Reduced | None = None
    compression: dict[str, float | dict[str, Number] | None] | None = None
    layers: list[Layer] | None = None
    parity: dict[str, Number] | None = None
    history: list[Epoch] | None = None
    log_alpha: dict[str, Histogram] | None = None
    threshold_curve: list[dict[str, Any]] | None = None
    calibrate: Calibrate | None = None
    promises: Promises | None = None
    calibration: dict[str, dict[str, Any] | None] | None = None
    doubts: list[Doubt] | None = None
    recall: dict[str, Recalled] | None = None
    pruning: Pruning | None = None
    search: Search | None = None
    filters: dict[str, Filters] | None = None
    pictures: list[Picture] | None = None
