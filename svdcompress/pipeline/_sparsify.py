"""`sparsify`: what the command does, for a model and data in memory."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from torch import nn

from svdcompress import report
from svdcompress.batch import generators_kept
from svdcompress.errors import UsageError
from svdcompress.pipeline._open import open_run
from svdcompress.pipeline._run import run
from svdcompress.recipe import WITHOUT_RECIPE, Recipe, changed, load_recipe
from svdcompress.sources.given import given
from svdcompress.train import Place, broadcast, find_place, meet

NOT_THEIRS: dict[str, Any] = {
    "model.args": {},
    "weights.file": None,
    **{f"data.{name}": None for name in ("root", "target", "features", "test", "image_size")},
    **{f"data.{name}": [] for name in ("transform", "augment")},
    "data.args": {},
    "data.validation": 0.1,
    "data.limit": None,
    "data.unlabelled": False,
}
"""Fields of a recipe that belong to its own model and data; they are reset for the ones that the caller passes in."""


@dataclass(frozen=True, repr=False)
class Sparsified:
    """The result of `sparsify`.

    model: small, still variational, in `eval()`; it takes the same inputs as the dense one (as the recipe prepares them).
    report, results: the contents of `report.json`, typed and as a dict. folder: the run's folder with all files.
    """

    model: nn.Module
    report: report.Results
    folder: Path
    results: dict[str, Any] = field(default_factory=dict)

    @property
    def onnx(self) -> Path:
        """The path of the deterministic ONNX file."""
        return self.folder / "model.onnx"

    def __repr__(self) -> str:
        dense, sparse = ((side.metrics or {}) if (side := getattr(self.report, name)) else {} for name in ("dense", "sparse"))
        name = "error" if "error" in sparse else "rmse"
        found = self.results.get("compression") or {}
        ratios = ", ".join(f"{found[key]:.3g}x fewer {key}" for key in ("nonzero", "parameters", "macs") if found.get(key))
        told = len(self.results.get("warnings") or ())
        doubts = f", {told} warning{'s' * (told != 1)} (.report.warnings)" if told else ""
        errors = f"{name} {sparse.get(name, 0):.4g} (dense {dense.get(name, 0):.4g})"
        return f"Sparsified({errors}, {ratios}, in {self.folder}{doubts})"


def sparsify(
    model: nn.Module,
    data: Any,
    *,
    max_drop: float | None = None,
    max_error: float | None = None,
    goal: str | None = None,
    objective: str = "auto",
    loss: Any = None,
    trained: bool = True,
    recipe: str | Path | Recipe | None = None,
    settings: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = True,
) -> Sparsified:
    """Make a trained model smaller, as `svdc sparsify` does; the given model is not changed.

    model: returns a tensor (N, ...), or what the recipe's loss takes. data: (inputs, targets), a Dataset or DataLoader, or a
    dict of those under "train", "validation" and "test"; missing ones are split off from "train".
    max_drop: points of validation error (regression: percent of the RMSE) that may be lost; the smallest model within it is
    searched for. max_error: the same as a bound on the error itself. goal: the size wanted, such as "latency=2x", "macs=0.4",
    "parameters=10x", "nonzero=50x" or "bytes=200kB". objective: what `max_drop` makes small. Without any of these, one model
    is made from the settings.
    loss: a name as in a recipe (cross-entropy, binary, mse, gaussian-nll), or a function of (output, targets) that returns a
    mean; its task is then set by `settings={"loss.task": ...}`. None: the recipe's, or cross-entropy without a recipe.
    trained: whether the model is trained; False trains it first. recipe: a file, the name of a shipped recipe, or a `Recipe`,
    whose settings are used except for model and data. settings: {field: value} on top of these, such as {"train.epochs": 5}.
    out: the run's folder (None: a temporary one). resume, overwrite, quiet: as for the command; with `quiet`, warnings are
    issued as Python warnings. Their advice is worded for the command: `--set FIELD=VALUE` is `settings={"FIELD": VALUE}`
    here, and `--epochs 9` is `settings={"train.epochs": 9}`.
    Under torchrun or `accelerate launch`, all processes have to call it, each with all of the data; their results are alike.
    The states of the generators of torch, numpy and random, and of accelerate, are restored afterwards.

    Raises whatever a run raises: an SvdcError that names the field. Ctrl-C raises one, too, `errors.Interrupted`, whose message
    says how to resume: a loop that goes on after an SvdcError should not go on after this one.

    Example:
        >>> found = svdc.sparsify(model, (x, y), max_drop=0.5)
        >>> found.model(x[:1]), found.report.sparse.metrics, found.onnx
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"model: {type(model).__name__} is not a torch.nn.Module")
    if resume and out is None:
        raise UsageError("resume: which run? Name its folder, as out=...")
    own_loss = loss if callable(loss) else None
    with generators_kept(), given(model=model, data=data, loss=own_loss) as names:
        fields: dict[str, Any] = {} if recipe is None else dict(NOT_THEIRS)
        fields |= {"model.name": names["model"], "data.name": names["data"]}
        if loss is not None:
            fields["loss.name"] = names.get("loss", loss)
        fields |= {"weights.trained": trained, **(WITHOUT_RECIPE if recipe is None else {})}
        asked = {"max_drop": max_drop, "max_error": max_error, "goal": goal}
        fields |= {f"search.{name}": value for name, value in asked.items() if value is not None}
        if objective != "auto":
            fields["search.objective"] = objective
        fields |= dict(settings or {})
        made = _recipe(recipe, fields)
        place = find_place(made.device)
        meet("svdcompress.sparsify")
        folder = Path(out) if out is not None else _temporary(place)
        results = broadcast(run(made, folder, resume=resume, overwrite=overwrite, quiet=quiet))  # the first one has them
        small = open_run(folder, trust_code=True).model  # the only code it names is the caller's objects
    for line in results.get("warnings") or () if quiet else ():  # otherwise they were printed
        warnings.warn(line, stacklevel=2)
    return Sparsified(small, report.Results.model_validate(results), folder, results)


def _temporary(place: Place) -> Path:
    """A new folder, the same for all processes of a launch."""
    return Path(broadcast(str(Path(mkdtemp(prefix="svdcompress-")) / "run") if place.first else ""))


def _recipe(base: str | Path | Recipe | None, fields: Mapping[str, Any]) -> Recipe:
    return changed(base, fields) if isinstance(base, Recipe) else load_recipe(base, fields=fields)
