"""Opening a finished run: its recipe, models, data and results."""

from __future__ import annotations

import os
import shlex
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import nn

from svdcompress import checkpoint, report
from svdcompress.errors import CheckpointError, DataError, OutputError, TrustError, UsageError, explained, shortened
from svdcompress.pipeline._extra import Extra
from svdcompress.pipeline._folder import STATE, resume_command, stored_recipe
from svdcompress.pipeline._foreign import foreign
from svdcompress.pipeline._label import label
from svdcompress.pipeline._recovery import for_recovery, slowed, steady
from svdcompress.pipeline._same_data import changed
from svdcompress.pipeline._select import whole
from svdcompress.recipe import LossSection, Recipe, RecoverSection
from svdcompress.sources import (
    Data,
    code_in,
    code_of_data,
    code_of_loss,
    code_of_model,
    code_of_transforms,
    load_weights,
    make_model,
    open_data,
)
from svdcompress.sources.given import given, named

OF_THE_FOLDER: dict[str, dict[str, Any]] = {
    "model": {"args": {}},
    "data": {"args": {}, **dict.fromkeys(("root", "target", "features", "test", "image_size"))},
}
"""Recipe fields that describe the folder's own model and data; they are reset for objects that the caller passes in instead."""


@dataclass
class OpenRun:
    """A run's folder and its recipe; everything else is read when it is first accessed.

    trust_code: whether Python code that the folder's files name may run. Without it `model`, `dense`, `data` and `loss` raise
    TrustError if they need such code; the package's own models, data and losses always work.
    compared: whether files are compared with `report.json` before they are used (`file`).
    """

    folder: Path
    recipe: Recipe
    trust_code: bool = False
    model_given: bool = False  # the caller named the model, not the folder
    handed: Mapping[str, Any] = field(default_factory=dict)  # the caller's objects, under "model" and "data"
    compared: bool = True  # not by the checks of `verify`, which name such files themselves
    _seen: set[str] = field(default_factory=set, init=False, repr=False)

    @cached_property
    def model(self) -> nn.Module:
        """The sparse variational model, in `eval()`."""
        loaded = checkpoint.load(self.file("model.safetensors"), self.fresh())
        return whole(loaded, self._extra.get("inputs") or {}).eval()

    @cached_property
    def dense(self) -> nn.Module:
        """The dense model that the run started from, in `eval()`."""
        return load_weights(self.fresh(), self.file("dense.safetensors")).eval()

    def file(self, name: str, *, own: bool = False) -> Path:
        """The path of a file of the folder that is about to be used. Warns, once per file, if it is not the one that the run
        wrote; own: raises CheckpointError instead, for a file that is worth nothing to another run."""
        path = self.folder / name
        if not self.compared or name in self._seen or not os.path.isfile(path):
            return path
        said = foreign(self.folder, name, self._digests, listed=own)
        more = f"`svdc verify {shlex.quote(str(self.folder))}` says more"
        if said and own:
            raise CheckpointError(f"{said}, so what it says may be of other data. Restore or delete it; {more}")
        self._seen.add(name)
        if said:
            warnings.warn(f"{said}: what comes of it need not agree with the report; {more}", stacklevel=4)
        return path

    @cached_property
    def _digests(self) -> dict[str, dict[str, Any]] | None:
        try:
            return self.results.get("files")
        except OutputError:  # no report, or none that can be read: the other files can be used without
            return None

    def fresh(self) -> nn.Module:
        """A new model with the architecture that the run started from, without its weights."""
        if not self.model_given:
            self._allow(code_of_model(self.recipe.model))
        with self._given():
            return make_model(self.recipe.model)

    def _given(self) -> AbstractContextManager[Any]:
        """Within it, the recipe's names of the caller's objects can be resolved."""
        return given(**self.handed) if self.handed else nullcontext()

    def _allow(self, code: Mapping[str, str]) -> None:
        """Raises TrustError for code that only the folder's files name, unless `trust_code` is set."""
        if code and not self.trust_code:
            rest = {field: name for field, name in code_in(self.recipe).items() if field not in code}
            raise TrustError(untrusted(self.folder, {**code, **({} if self.model_given else rest)}))

    @cached_property
    def data(self) -> Data:
        """The run's data, with the same splits as in the run. Of unlabelled data, the dense model's answers are the targets."""
        data = self.data_as_read
        if self.recipe.data.unlabelled:
            label(data, self.dense, True, "cpu", self.dim)
        return data

    @cached_property
    def data_as_read(self) -> Data:
        """The same without answers of the dense model, which take a pass over the data; for those who need inputs alone."""
        self._allow(code_of_data(self.recipe.data))
        section = self.recipe.data
        if "standardized" not in self.preprocessing:  # written by a version that did not standardize tables
            section = section.model_copy(update={"standardize": False})
        with self._given():
            data = open_data(section, self.recipe.task, strict=False)
        data.dim = self.dim
        known = self._extra.get("classes")
        if known and data.classes and list(known) != list(data.classes):
            before, now = (shortened(", ".join(map(str, names))) for names in (known, data.classes))
            raise DataError(
                f"{self.folder}: the run knows the classes {before}, but {section.name} now has {now}: every figure would be "
                "wrong. Restore the data as they were"
            )
        if other := changed(self._extra.get("data") or {}, data):
            warnings.warn(
                f"{self.folder}: the data are not those of the run ({other}). Figures measured on them can't be compared with "
                "its report, and its training examples may be among the test examples",
                stacklevel=5,  # from `data`
            )
        return data

    @property
    def recovery(self) -> RecoverSection:
        """The section `recover` as the run used it, with `optimizer: auto` resolved for batch statistics and the learning rate
        of a second attempt, if there was one. Where the run kept running statistics, SGD gave way to `steady`; its notes say
        so."""
        resolved, rate = for_recovery(self.recipe, self.dense)[0], self.results.get("recover_lr")
        other = steady(self.recipe, resolved)
        of_steady = rate is not None and other is not None and rate < other.lr < resolved.recover.lr  # SGD's are larger
        return resolved.recover if of_steady else slowed(resolved.recover, rate)

    @property
    def steady(self) -> RecoverSection | None:
        """What replaces `recovery` in a fit that keeps running statistics; None: nothing does."""
        found = steady(self.recipe, for_recovery(self.recipe, self.dense)[0])
        return None if found is None else slowed(found, self.results.get("recover_lr"))

    @property
    def loss(self) -> LossSection:
        """The loss that the run's models are trained with."""
        self._allow(code_of_loss(self.recipe.loss))
        return self.recipe.loss

    @cached_property
    def results(self) -> dict[str, Any]:
        """The contents of `report.json`."""
        return report.load(self.folder)

    @cached_property
    def preprocessing(self) -> dict[str, Any]:
        """How the run's inputs were prepared, for `svdcompress.sources.preprocess`; read without the data."""
        found = self._extra.get("preprocessing") or {}
        self._allow(code_of_transforms(found.get("transform") or ()))
        return found

    @cached_property
    def classes(self) -> list[str] | None:
        """The names of the classes, if there are any."""
        return self._extra.get("classes")

    @cached_property
    def dim(self) -> int:
        """The dimension of the model's output that holds the classes."""
        return self._extra.get("dim", 1)

    @cached_property
    def tau(self) -> float | None:
        """For a regression with constant noise, the noise precision on the validation data, in the units of the loss."""
        return self._extra.get("tau")

    @cached_property
    def _extra(self) -> dict[str, Any]:
        path = self.file("model.safetensors")
        extra = checkpoint.read_manifest(path).get("extra") or {}
        try:
            Extra.model_validate(extra)
        except ValidationError as error:
            raise CheckpointError(
                f"{path}: what its manifest says about the run is damaged: extra.{explained(error)}"
            ) from None
        return extra


def untrusted(folder: Path, code: Mapping[str, str]) -> str:
    """The error message about code that the files of a run's folder name."""
    named = ", ".join(f"{shortened(name, 80)} ({field})" for field, name in code.items())
    name = code.get("model.name")
    again = f"; or name the model again yourself: --model {shlex.quote(name)}" if name and len(code) == 1 else ""
    return (
        f"{folder} names code that would run here: {named}. Code does not run just because a file names it. If you know "
        f"and trust it, add --trust-code to the command (in Python: trust_code=True){again}"
    )


def open_run(folder: str | Path, *, trust_code: bool = False, model: Any = None, data: Any = None) -> OpenRun:
    """Open the folder of a finished run.

    trust_code: whether Python code that the folder names (a factory of models or data, a transform) may run. Without it, only
    the package's own code runs, and TrustError names the code that would have run. See THREATS.md.
    model: replaces the one that the folder names: a name, as in a recipe, a module like the dense one that the run started
    from (its weights do not matter), or a function that makes one. data: as for `sparsify`, replaces the folder's.

    Raises OutputError if the folder is no run, or the run did not finish; UsageError for an experiment's folder;
    CheckpointError without a model.safetensors.
    """
    folder = Path(folder)
    if not os.path.isdir(folder):
        raise OutputError(f"{folder}: no such folder")
    recipe = stored_recipe(folder)
    if recipe.experiment is not None:
        raise UsageError(f"{folder}: an experiment leaves figures and pictures, but no model; see them: svdc report {folder}")
    if not os.path.isfile(folder / "model.safetensors"):
        if os.path.isdir(folder / STATE):
            raise OutputError(f"{folder}: the run is not finished; continue with: {resume_command(folder, recipe)}")
        raise CheckpointError(f"{folder}: model.safetensors is missing")
    handed = {} if data is None else {"data": data}
    if model is not None and not isinstance(model, str):
        handed["model"] = made = model if isinstance(model, nn.Module) or not callable(model) else model()
        if not isinstance(made, nn.Module):
            raise UsageError(
                f"model: {type(made).__name__} is neither a torch.nn.Module, nor a function that makes one, nor a name"
            )
    changes: dict[str, dict[str, Any]] = {key: {"name": named(key), **OF_THE_FOLDER[key]} for key in handed}
    if isinstance(model, str):
        changes["model"] = {"name": model}
    changed = {key: getattr(recipe, key).model_copy(update=fields) for key, fields in changes.items()}
    return OpenRun(folder, recipe.model_copy(update=changed), trust_code, model is not None, handed)


def load_run(folder: str | Path, *, trust_code: bool = False, model: Any = None, data: Any = None) -> OpenRun:
    """Open a finished run: its small model, its dense model, its data and its results.

    folder: what `svdc sparsify --out` or `svdc.sparsify(out=)` wrote. trust_code: allow Python code that the folder names,
    such as your model's factory; without it `.model` and `.data` raise TrustError if they need any. model: instead of
    trusting the folder, name the model yourself, as on the command line, or pass it: a module like the dense one that the run
    started from, or a function that makes one. data: as for `sparsify`. A run of `svdc.sparsify` needs both again, as its
    folder does not contain the model and data that you passed.

    Returns an `OpenRun`; everything is read on first access: `.model` (sparse, variational, in `eval()`), `.dense`,
    `.data.test`, `.results` (the contents of report.json), `.recipe`.
    Raises OutputError for a folder that is no finished run; UsageError for an experiment's folder.

    Example:
        >>> run = svdc.load_run("runs/digits")
        >>> run.results["compression"]["nonzero"], svdc.mc_predict(run.model, x).entropy
    """
    return open_run(folder, trust_code=trust_code, model=model, data=data)
