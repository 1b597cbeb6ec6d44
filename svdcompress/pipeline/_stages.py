"""The stages of a run, in order. Each finds what a stopped run left of it and goes on from there."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from datetime import datetime, timezone
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from torch import nn

from svdcompress import checkpoint, cost, report
from svdcompress.errors import Interrupted, OutputError, VerifyError
from svdcompress.layers import variational_layers
from svdcompress.likelihoods import likelihood_for, make_loss, set_likelihood
from svdcompress.objective import Constant
from svdcompress.pipeline import _figures
from svdcompress.pipeline._advice import advice
from svdcompress.pipeline._changes import changes
from svdcompress.pipeline._convert import check_some_left, converted, final_beta, make_schedule, shrinking
from svdcompress.pipeline._dense import check_model, dense_model
from svdcompress.pipeline._folder import RunState, Stop
from svdcompress.pipeline._log import check_tensorboard, log_row
from svdcompress.pipeline._loss import class_weights
from svdcompress.pipeline._onnx import Files
from svdcompress.pipeline._outcome import nothing_smaller
from svdcompress.pipeline._reach import out_of_reach, rate_of_variances, reach_of
from svdcompress.pipeline._round import rounded
from svdcompress.pipeline._same_data import check_same, seen
from svdcompress.pipeline._select import bare, whole
from svdcompress.pipeline._skill import no_skill
from svdcompress.pipeline._uncertainty import seconds_for, uncertainty
from svdcompress.pipeline._verify import self_check, set_aside
from svdcompress.prune import prune
from svdcompress.recipe import Recipe, Training, dump_recipe
from svdcompress.relevance import hold
from svdcompress.sources import Data, example_inputs, make_model, open_data, save_weights
from svdcompress.train import Bars, Fit, Place, agree, evaluate, fit, wait, write_atomically

EXAMPLES = 2
"""Examples with which graphs are traced."""


class Stages:
    """One run. `run` does all stages; the attributes are what they hand on.

    data, dense, model (converted; masks held once chosen), small (pruned), masks, results (what `report.json` will hold).
    """

    def __init__(self, recipe: Recipe, out: Path, place: Place, bars: Bars, stop: Stop, say: Callable[[str], None]) -> None:
        self.recipe, self.out, self.place, self.bars, self.stop, self.say = recipe, out, place, bars, stop, say
        self.state = RunState(out, place.first)
        self.history: list[dict[str, Any]] = []
        self.wrong: VerifyError | None = None
        self.results: dict[str, Any] = {"seconds": dict(self.state.facts.get("seconds", {}))}

    def run(self) -> dict[str, Any]:
        """All stages; returns the results (on the first process; {} on others)."""
        self._stage("data", self._data)
        self._stage("dense", self._dense)
        self._stage("convert", self._convert)
        self._stage("train", self._train)
        self._stage("threshold", self._threshold)
        self._stage("prune", self._prune)
        self._stage("recover", self._recover)
        if self.place.first:
            self._stage("evaluate", self._evaluate)
            self._stage("export", self._export)  # from here on all that is left is figures
            self._stage("figures", partial(self._try, "uncertainty", self._uncertainty))
            self._stage("cost", partial(self._try, "latency and ratios", self._cost))
            self._stage("verify", self._verify)
            self._stage("report", self._report)
            if not self.wrong:  # else it can go on and write its files anew
                self.state.finish()
        wait()
        if self.wrong:
            raise self.wrong
        if self.place.first and self.files.error:
            raise self.files.error
        return self.results if self.place.first else {}

    def _stage(self, name: str, work: Callable[[], None]) -> None:
        if self.stop():
            raise Interrupted(f"stopped by {self.stop.signal} before the stage {name}.")
        started = time.monotonic()
        with nullcontext() if name in ("dense", "train", "recover") else self.bars.working(name):
            work()
        seconds = self.results["seconds"]
        seconds[name] = seconds.get(name, 0.0) + time.monotonic() - started
        self.state.put(seconds=seconds)

    def _try(self, what: str, work: Callable[[], None]) -> None:
        """Make figures. What fails in it is a warning, and under `failed` in the report: it must not cost a run its files."""
        try:
            work()
        except (Interrupted, OutputError):
            raise
        except Exception as error:  # of the test data, of other packages, of the user's model: a figure is never worth the rest
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            self.results.setdefault("failed", {})[what] = reason
            self._warn(f"no figures of {what} ({reason}); the files are not concerned")

    # Up to a trained variational model

    def _data(self) -> None:
        self.state.write_recipe(self.recipe)  # before anything that takes long: from here on it can be resumed
        if self.recipe.report.tensorboard:
            check_tensorboard()
        self.data: Data = open_data(self.recipe.data, self.recipe.task)
        now = seen(self.data)
        if any(self.state.folder.glob("*.pt")) and (before := self.state.facts.get("data")):
            if other := check_same(before, now, self.out):
                self._warn(other)
        else:
            self.state.put(data=now)
        self.inputs = example_inputs(self.data.train, EXAMPLES)

    def _dense(self) -> None:
        recipe = self.recipe
        self.dense, trained = dense_model(recipe)
        check_model(self.dense, recipe, self.data, self.inputs)
        self.beta = final_beta(recipe, self.dense, len(self.data.train), self.inputs)
        for line in self.data.notes:
            self._note(line)
        for line in [*self.data.warnings, *advice(recipe, self.dense, len(self.data.train), self.place.world, self.inputs)]:
            self._warn(line)
        self._tell_phases(trained)
        if not trained:
            self.history += self._fit(self.dense, "dense", recipe.dense, tau=1.0).history
        self.dense.eval()
        self.tau = _figures.noise_precision(self.dense, self.data)
        if self.place.first:
            with _figures.there(self.place.device, self.dense):
                found = None if recipe.loss.class_weights else no_skill(self.dense, self.data, self.place.device)
            if found:
                self._warn(found)
            write_atomically(self.out / "dense.safetensors", lambda path: save_weights(self.dense, path))

    def _warn(self, line: str) -> None:
        self.results.setdefault("warnings", []).append(line)
        self.say(f"[yellow]warning:[/] {escape(line)}")

    def _note(self, line: str) -> None:
        self.results.setdefault("notes", []).append(line)
        self.say(f"[dim]note:[/] {escape(line)}")

    def _tell_phases(self, trained: bool) -> None:
        """How long each phase of training is, and what sets it."""
        recipe = self.recipe
        phases = [] if trained else [f"the dense model {recipe.dense.epochs} epochs (--dense-epochs; --weights has it trained)"]
        phases.append(f"fine-tuning {recipe.train.epochs} (--epochs)")
        phases.append(f"recovery {recipe.recover.epochs} (--set recover.epochs=...)")
        self.say(f"[dim]training: {escape(', '.join(phases))}[/]")

    def _convert(self) -> None:
        self.model = converted(copy.deepcopy(self.dense).cpu(), self.recipe, self.inputs)
        self.shapes = {name: tuple(layer.weight.shape) for name, layer in variational_layers(self.model)}
        count, world = len(self.data.train), self.place.world
        self.rate = rate_of_variances(self.recipe, self.model, count, self.beta, world)
        found = reach_of(self.recipe, self.model, count, self.beta, self.rate, world)
        self.results["reach"] = found.to_dict()
        for line in out_of_reach(self.recipe, found):
            self._warn(line)

    def _train(self) -> None:
        train = self.recipe.train
        self.history += self._fit(
            self.model,
            "train",
            train,
            schedule=make_schedule(train.beta, train.epochs, self.beta),
            lr_log_sigma2=self.rate,
            distill=train.distill,
            compiled=train.compile,
            **shrinking(self.recipe, self.inputs),
        ).history

    def _fit(self, model: nn.Module, stage: str, settings: Training, *, tau: float | None = None, **more: Any) -> Fit:
        recipe = self.recipe
        result = fit(
            model,
            self.data.train,
            make_loss(recipe.loss, tau=tau or self._loss_tau(), class_weights=self._class_weights, dim=self.data.dim),
            settings,
            stage=stage,
            teacher=None if stage == "dense" else copy.deepcopy(self.dense),
            task=recipe.task,
            dim=self.data.dim,
            validate=self._validate,
            seed=recipe.seed,
            device=recipe.device,
            state=self.state.folder / f"{stage}.pt",
            bars=self.bars,
            stop=self.stop,
            on_epoch=self._log,
            **more,
        )
        agree(model)
        model.cpu().eval()
        return result

    def _validate(self, model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        data = self.data
        return evaluate(model, data.validation, data.task, device=device, scale=data.target_scale, dim=data.dim)

    def _loss_tau(self) -> float:
        wanted = self.recipe.loss.tau
        return (self.tau or 1.0) if wanted == "auto" else wanted

    @cached_property
    def _class_weights(self) -> torch.Tensor | None:
        return class_weights(self.recipe.loss, self.data, self.dense, self.inputs)

    def _log(self, row: dict[str, Any]) -> None:
        if self.recipe.report.tensorboard and self.place.first:
            log_row(self.out, row)

    # From log alpha to a small model

    def _threshold(self) -> None:
        def validate(model: nn.Module) -> dict[str, float]:
            with _figures.there(self.place.device, model):
                return self._validate(model)

        self.masks, threshold, curve = _figures.choose_masks(self.model, self.recipe, validate, self.inputs)
        self._try("log alpha", lambda: self._keep("log_alpha", report.log_alpha_histograms(self.model, threshold)))
        self.results["threshold"] = threshold if threshold is not None else self.recipe.convert.threshold
        self.results["threshold_curve"] = curve
        check_some_left(self.model, self.masks, self.data.validation)

    def _prune(self) -> None:
        file = self.state.folder / "pruned.safetensors"
        if self.place.first and not (file.exists() and "pruning" in self.state.facts):
            settings, export = self.recipe.prune, self.recipe.export
            asked = {name: getattr(settings, name) for name in ("remove_inputs", "protect", "time_budget")}

            def make(round_to: int) -> nn.Module:
                return prune(self.model, self.inputs, masks=self.masks, round_to=round_to, **asked)

            timed = export.onnx and self.recipe.report.latency
            feed = partial(_figures.feed, self.data) if timed else None
            small, pruning = rounded(make, settings.round_to, self.inputs, feed, export.opset)
            checkpoint.save(small, file)
            self.state.put(pruning=report.plain(pruning))
        wait()
        facts = RunState(self.out, writer=False).facts["pruning"]  # the first process's
        self.small = whole(checkpoint.load(file, make_model(self.recipe.model)), facts)
        self.results["pruning"] = {name: value for name, value in facts.items() if name != "surgery"}

    def _recover(self) -> None:
        recover = self.recipe.recover
        if recover.epochs:
            self.history += self._fit(
                self.small,
                "recover",
                recover,
                schedule=Constant(self.beta if recover.beta == "auto" else recover.beta) if recover.noise else None,
                noise=recover.noise,
                lr_log_sigma2=recover.lr_log_sigma2,
                distill=recover.distill,
                total=sum(prod(shape) for shape in self.shapes.values()),
            ).history
        if self.place.first:
            pruning, data = self.results["pruning"], self.data
            tau = _figures.noise_precision(self.small, data)
            set_likelihood(bare(self.small), likelihood_for(data.task, data.dim, tau))
            extra: dict[str, Any] = {
                "recipe": self.recipe.model_dump(mode="json"),
                "preprocessing": self.data.preprocessing,
                "classes": self.data.classes,
                "tau": tau,
                "dim": self.data.dim,
                "inputs": {name: pruning.get(name) for name in ("inputs_kept", "inputs_dim")},
            }
            checkpoint.save(bare(self.small), self.out / "model.safetensors", extra=extra)

    # Figures and files

    def _keep(self, name: str, value: Any) -> None:
        self.results[name] = value

    def _evaluate(self) -> None:
        """The first look at the test data, and counts."""
        results = self.results
        for name, model in (("dense", self.dense), ("sparse", self.small)):
            results[name] = {}
            self._try(f"the {name} model on the test data", partial(self._metrics, name, model))
            self._try(f"the {name} model's size", partial(self._count, name, model))
        self._try("the intervals of the changes", self._changes)
        rows = partial(_figures.layer_rows, self.shapes, self.masks, bare(self.small))
        self._try("layers", lambda: self._keep("layers", rows()))
        self._try("filters", lambda: self._keep("filters", report.first_filters(self.dense, hold(self.model, self.masks))))

    def _metrics(self, name: str, model: nn.Module) -> None:
        with _figures.there(self.place.device, model):
            self.results[name]["validation"] = self._validate(model)
            self.results[name]["metrics"] = _figures.test_metrics(model, self.data)

    def _changes(self) -> None:
        with _figures.there(self.place.device, self.dense, self.small):
            self.results["changes"] = changes(self.dense, self.small, self.data, self.place.device)

    def _count(self, name: str, model: nn.Module) -> None:
        self.results[name].update(cost.measure(model, self.inputs).to_dict())

    def _uncertainty(self) -> None:
        settings = self.recipe.uncertainty
        if not settings.samples:
            return
        trained = sum(self.results["seconds"].get(stage, 0.0) for stage in ("dense", "train", "recover"))
        with _figures.there(self.place.device, self.dense, self.small):
            budget = seconds_for(settings.budget, trained)
            found = uncertainty(self.dense, self.small, self.data, settings.samples, self.recipe.seed, budget)
        self.results.update(found)

    def _export(self) -> None:
        self.files = Files(self.recipe, self.data, self.inputs, self.out, self.results, self._warn)
        if not self.recipe.export.onnx:
            return
        self.files.sparse(self.small)
        self._try("dense.onnx", partial(self.files.dense, self.dense))

    def _cost(self) -> None:
        results = self.results
        results["compression"] = cost.compression(results["dense"], results["sparse"])
        if len(self.files.written) == 2 and self.recipe.report.latency:
            paths = {name: file.path for name, file in self.files.written.items()}
            make_input = _figures.feed(self.data, paths["dense"])
            for name, times in cost.latencies(paths, make_input).items():
                results[name]["latency_ms"] = times
            results["threads"] = 1
            results["compression"] = cost.compression(results["dense"], results["sparse"])
        results.setdefault("warnings", []).extend(nothing_smaller(self.recipe, results, self.history))

    def _verify(self) -> None:
        """Look at the files as somebody who has nothing else would. What is wrong gets another name and ends the run."""
        found = self_check(self.recipe, self.out, self.results, self.small, self.data)
        self.results["verified"] = found.to_dict()
        for check in found.skipped:
            if not check.note.startswith("there is no"):
                self._warn(f"not checked: {check.file}: {check.name} ({check.note})")
        if found.failed:
            self.wrong = set_aside(found)
            self._warn(str(self.wrong))

    def _report(self) -> None:
        recipe = self.recipe
        self.results.update(
            name=self.out.name,
            description=recipe.description,
            task=recipe.task,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            examples={name: len(getattr(self.data, name)) for name in ("train", "validation", "test")},
            history=self.history,
            recipe=dump_recipe(recipe),
            seed=recipe.seed,
            device=str(self.place.device),
            processes=self.place.world,
            versions=_figures.versions(),
        )
        self.results.update(report.stamped(self.results, self.out))
        report.write_json(self.out / "report.json", self.results)
        if recipe.report.html:
            self._try("report.html", self._draw)
            report.write_json(self.out / "report.json", self.results)  # with what the drawing had to say

    def _draw(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fonts and the like are not the user's business
            report.write(self.out, self.results)
