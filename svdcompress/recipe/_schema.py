"""The sections of a recipe: one pydantic model each, unknown fields refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from svdcompress.recipe._checks import (
    TASKS,
    known_goal,
    known_loss,
    known_share,
    known_threshold,
    taken_by,
    task_of,
)
from svdcompress.recipe._goal import MOST_LEVELS, parse_goal
from svdcompress.recipe._inputs import DataSection, ModelSection, WeightsSection
from svdcompress.recipe._outputs import CalibrateSection, ExperimentSection, ExportSection, ReportSection, UncertaintySection
from svdcompress.recipe._section import Moment, Section, in_epochs, short


class LossSection(Section):
    """The negative log likelihood: cross-entropy, binary, mse, gaussian-nll, or `package.module:loss`."""

    name: Annotated[str, AfterValidator(known_loss)] = "cross-entropy"
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    class_weights: list[Annotated[float, Field(gt=0)]] | Literal["balanced"] | None = None
    # 1 / noise variance of a regression with mse, in the target's own units; "auto": 1 / validation MSE of the dense model
    tau: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    # needed for a loss of your own
    task: Literal["classification", "binary", "regression", "gaussian"] | None = Field(default=None, validate_default=True)

    @field_validator("label_smoothing", "class_weights", "tau")
    @classmethod
    def _taken(cls, value: Any, info: ValidationInfo) -> Any:
        if value != cls.model_fields[str(info.field_name)].default:
            taken_by(str(info.field_name), value, info.data.get("name"))
        return value

    @field_validator("task")
    @classmethod
    def _fits(cls, task: str | None, info: ValidationInfo) -> str | None:
        return task_of(task, info.data.get("name"))


class LrSchedule(Section):
    """The learning rate over time: from `start` on it falls to `end` times its value, linearly or along half a cosine."""

    name: Literal["constant", "linear", "cosine"] = "linear"
    start: Moment = "50%"
    end: float = Field(default=0.0, ge=0)
    warmup: Moment = 0.0  # it rises linearly from 0 over this time


class RecoverLrSchedule(LrSchedule):
    """The learning rate of recovery, which falls from the beginning unless another start is set."""

    start: Moment = "0%"


Beta = Annotated[float, Field(ge=0)] | Literal["auto"]


class BetaSchedule(Section):
    """The weight of the KL over time: 0 until `start`, `final` from `stop` on (constant: `final` throughout).

    final: auto is 10 N / weights, at most 1, and at most 0.1 for models of millions of weights.
    """

    name: Literal["constant", "linear", "cosine", "additive"] = "linear"
    start: Moment = "5%"
    stop: Moment = "30%"
    final: Beta = "auto"
    step: float = Field(default=0.02, gt=0)  # additive: the increase per epoch

    @model_validator(mode="after")
    def _order(self) -> BetaSchedule:
        alike = self.name in ("linear", "cosine") and type(self.start) is type(self.stop)
        if alike and in_epochs(self.start, 100) > in_epochs(self.stop, 100):
            raise ValueError(f"start ({self.start}) is after stop ({self.stop})")
        return self


class Distillation(Section):
    """Learning from the dense model: `weight` of its soft targets in the loss, at a temperature.

    layers: the weight of a further term, the error of the layers' outputs on the units that stay; it falls to 0 by the end.
    """

    weight: float = Field(default=0.0, ge=0, le=1)
    temperature: float = Field(default=2.0, gt=0)
    layers: float = Field(default=0.0, ge=0)

    @property
    def wanted(self) -> bool:
        """Whether there is anything to learn from the dense model."""
        return self.weight > 0 or self.layers > 0


class Training(Section):
    """Settings that all training loops share."""

    epochs: int = Field(default=20, ge=0)
    batch_size: int = Field(default=100, ge=1)
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"  # sgd: for the means; log sigma2 has Adam
    lr: float = Field(default=1e-3, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    momentum: float = Field(default=0.9, ge=0, lt=1)  # sgd
    schedule: Annotated[LrSchedule, short("name")] = LrSchedule()
    clip: float | None = Field(default=None, gt=0)  # largest norm of the gradient
    accumulate: int = Field(default=1, ge=1)  # batches per step
    # Of matrix products, by autocast. auto: bf16 if the device is faster with it than with float32, else no.
    precision: Literal["no", "auto", "bf16", "fp16"] = "no"
    keep: Literal["last", "best"] = "last"  # which epoch's weights are kept; best: on the validation split
    compile: bool = False  # compute steps and the teacher's answers with torch.compile
    # Statistics of batch normalization. batch: those of each batch, which update the running ones; keep: the running ones,
    # unchanged, for a pretrained network whose data had another mixture than the training data; auto: keep if the network's
    # loss at the start is far lower with them.
    norms: Literal["auto", "batch", "keep"] = "batch"
    # Rates of dropout layers. on: their own; off: 0; rising: from 0 to their own in the first two thirds, for a network that
    # was fitted without dropout; auto: off (rising if predictions draw dropout) if the network's loss at the start is far
    # higher with it than without.
    dropout: Literal["auto", "on", "off", "rising"] = "on"

    @field_validator("precision", mode="before")
    @classmethod
    def _no(cls, value: Any) -> Any:
        return "no" if value is False else value  # YAML reads no as False

    @field_validator("dropout", mode="before")
    @classmethod
    def _switched(cls, value: Any) -> Any:
        return ("on" if value else "off") if isinstance(value, bool) else value  # as YAML reads on and off


class DenseSection(Training):
    """Training of the dense model, if no weights are given."""

    keep: Literal["last", "best"] = "best"


class TrainSection(Training):
    """Fine-tuning of the variational model with the annealed ELBO."""

    # None: the rate of the means (sgd: 0.001). auto: that rate, or a higher one (at most 0.1) if log sigma2 alone needs it to
    # bring log alpha to the threshold in the steps of the training.
    lr_log_sigma2: Annotated[float, Field(gt=0)] | Literal["auto"] | None = None
    beta: Annotated[BetaSchedule, short("name")] = BetaSchedule()
    distill: Distillation = Distillation()
    shrink: Moment | None = None  # from then on dead units are removed after each epoch: faster, and they cannot come back


class RecoverSection(Training):
    """Further training with frozen masks, after pruning."""

    epochs: int = Field(default=5, ge=0)
    # auto: what suits the network: adam, or sgd with the dense model's answers; see docs/search.md.
    optimizer: Literal["auto", "adam", "adamw", "sgd"] = "auto"
    lr: float = Field(default=5e-4, gt=0)
    schedule: Annotated[RecoverLrSchedule, short("name")] = RecoverLrSchedule()
    norms: Literal["auto", "batch", "keep"] = "auto"
    dropout: Literal["auto", "on", "off", "rising"] = "auto"
    noise: bool = True  # False: train the mean alone, without noise and KL
    beta: Beta = "auto"  # constant; auto: a twentieth of the last beta of the training
    lr_log_sigma2: float | None = Field(default=None, gt=0)
    distill: Distillation = Distillation()


Share = Annotated[str | list[str] | dict[str, float], AfterValidator(known_share)]
Threshold = Annotated[float | dict[str, float], AfterValidator(known_threshold)]


class LayerRule(Section):
    """Other settings for the layers that a pattern matches, or that are inside a module that it matches; fields left out are as
    in `convert`."""

    match: str | list[str]
    prior: Literal["ard", "log-uniform"] | None = None
    posterior: Literal["independent", "rank-one"] | None = None
    share: Share | None = None
    log_sigma2: float | None = None
    log_alpha: float | None = None
    threshold: Threshold | None = None

    @model_validator(mode="after")
    def _one_start(self) -> LayerRule:
        if self.log_sigma2 is not None and self.log_alpha is not None:
            raise ValueError("log_sigma2 and log_alpha both say where log variances start; leave one of them out")
        return self

    @property
    def patterns(self) -> list[str]:
        """`match` as a list."""
        return [self.match] if isinstance(self.match, str) else self.match


class ConvertSection(Section):
    """Which layers become variational, and how."""

    prior: Literal["ard", "log-uniform"] = "ard"
    posterior: Literal["independent", "rank-one"] = "independent"  # rank-one: cheaper variances for wide layers
    share: Share = "weight"
    include: list[str] = ["*"]
    exclude: list[str] = []
    log_sigma2: float = -10.0
    log_alpha: float | None = None  # in place of log_sigma2: relative to each layer's scale, -6 for noise of 5% of it
    threshold: Threshold = 3.0
    variance_dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # the type in which variances are computed
    # Weights computed in each forward pass (weight_norm, weight-standardized convolutions): fold computes them once, which is
    # exact in eval mode.
    derived: Literal["keep", "fold"] = "keep"
    # The model's dropout layers. draw: they draw whenever the weights do (MC dropout), in PyTorch and in the ONNX file; keep:
    # they are off outside training, as in torch.
    dropout: Literal["keep", "draw"] = "keep"
    layers: list[LayerRule] = []  # the first rule that matches a layer counts


class RelevanceSection(Section):
    """How log alpha becomes masks. With `candidates`, the sparsest that keeps the validation error is chosen."""

    threshold: Threshold | None = None  # None: as in convert
    candidates: list[Threshold] = []
    # Judge units that several layers share (a residual stream, a head) as one: they are removed or kept as a whole. auto: if
    # layers whose convert.share has input or output share any.
    coupled: bool | Literal["auto"] = "auto"
    # By how much validation error (points; rmse: percent) may exceed the best candidate's.
    tolerance: float = Field(default=0.0, ge=0)


Goal = Annotated[str, AfterValidator(known_goal)]


class SearchSection(Section):
    """The search for the smallest model within a budget, or for the best one of a size; off unless a budget or a goal is set.

    max_drop: points of validation error, or percent of the dense model's RMSE; max_error: the error (percent) or RMSE itself.
    goal: latency=2x, macs=0.4, parameters=10x, nonzero=50x, bytes=200kB. With both, the goal unless the budget forbids it.
    """

    max_drop: float | None = Field(default=None, ge=0)
    max_error: float | None = Field(default=None, ge=0)
    goal: Goal | None = None
    # The measure of size for the smallest model. auto: that of the goal; else nonzero if only single weights are judged
    # (convert.share: weight), and macs if units are.
    objective: Literal["auto", "parameters", "macs", "latency", "bytes", "nonzero"] = "auto"
    # Of the one-sided upper bound on the drop, which has to keep the budget; with too few validation data, the drop has to.
    confidence: float = Field(default=0.9, gt=0.5, lt=1)
    # null: as many as fit into three times the epochs of a run without a search, the path included; from 1 to 8. The best one
    # recovers further in the epochs that are left; a goal without a budget sets some aside for that, if that leaves a trial.
    trials: int | None = Field(default=None, ge=1)
    max_minutes: float | None = Field(default=None, gt=0)  # no trial begins after this many minutes of the search
    # If living units have to go, a trial cuts them in this many steps while it cools, at most one per epoch and the last at its
    # end; 1: all at once. Single weights always go at once.
    cuts: int = Field(default=8, ge=1)
    # Levels of rising pressure: beta doubles from each to the next. null: 6, or 3 if units are cut in steps.
    levels: int | None = Field(default=None, ge=1, le=MOST_LEVELS)
    latency_command: str | None = None  # such as "./on-phone.sh": prints milliseconds for the file, its last argument
    # Batch size at which latency is measured. None: the geometric mean of batches of 1 and 128.
    latency_batch: int | None = Field(default=None, ge=1)
    # What is cut for a size if removing what is dead is not enough. auto: the best of several mixtures of units and single
    # weights, by the NLL of training examples before recovery; off: units by their rank in the model, or single weights alone.
    mixture: Literal["auto", "off"] = "auto"
    # auto: a trial that begins without pressure and cuts whole units cuts them at once, and fits the means that stay to what
    # each layer gave before (least squares over training examples); ways to the size are compared like that, too. off: it cuts
    # them in steps while it cools, and leaves what stays to the training, as with cuts: 1.
    reconstruct: Literal["auto", "off"] = "auto"

    @field_validator("mixture", "reconstruct", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML reads off as False

    @model_validator(mode="after")
    def _one_measure(self) -> SearchSection:
        if self.goal is not None and self.objective not in ("auto", parse_goal(self.goal).measure):
            raise ValueError(f"goal {self.goal} and objective {self.objective} contradict each other; leave the objective out")
        return self

    @model_validator(mode="after")
    def _batch_of_a_latency(self) -> SearchSection:
        if self.latency_batch is None:
            return self
        if self.latency_command is not None:
            raise ValueError("latency_batch has no effect on what latency_command measures; leave one of them out")
        measure = self.objective if self.goal is None else parse_goal(self.goal).measure
        if self.wanted and measure != "latency":
            raise ValueError("latency_batch is for goal latency=... or objective latency; leave it out, or set one of these")
        return self

    @property
    def wanted(self) -> bool:
        """Whether a run searches at all."""
        return any(each is not None for each in (self.max_drop, self.max_error, self.goal))


class PruneSection(Section):
    """Physical removal of dead units."""

    round_to: int = Field(default=1, ge=1)
    remove_inputs: bool = False
    protect: list[str] = []
    time_budget: float = Field(default=60.0, gt=0)


class Recipe(Section):
    """A whole run."""

    description: str = ""
    experiment: Annotated[ExperimentSection, short("name")] | None = None
    model: Annotated[ModelSection, short("name")] = ModelSection()
    weights: Annotated[WeightsSection, short("file")] = WeightsSection()
    data: Annotated[DataSection, short("name")] = DataSection()
    loss: Annotated[LossSection, short("name")] = LossSection()
    dense: DenseSection = DenseSection()
    convert: ConvertSection = ConvertSection()
    train: TrainSection = TrainSection()
    relevance: RelevanceSection = RelevanceSection()
    search: SearchSection = SearchSection()
    prune: PruneSection = PruneSection()
    recover: RecoverSection = RecoverSection()
    calibrate: CalibrateSection = CalibrateSection()
    export: ExportSection = ExportSection()
    uncertainty: UncertaintySection = UncertaintySection()
    report: ReportSection = ReportSection()
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    device: Annotated[str, AfterValidator(str.strip)] = "auto"  # auto, cpu, cuda, cuda:1, mps
    out: str | None = None  # the run's folder; None: runs/NAME

    @model_validator(mode="after")
    def _sets_of_a_coverage(self) -> Recipe:
        if self.export.sets and self.calibrate.coverage is None:
            raise ValueError("export.sets: prediction sets need a coverage; set calibrate.coverage too (--coverage 0.9)")
        return self

    @property
    def task(self) -> str:
        """classification, binary, regression or gaussian."""
        return self.loss.task or TASKS.get(self.loss.name, "classification")
