"""Does a mixture that is chosen before training (`search.mixture: auto`) lose less after fine-tuning?

    python benchmarks/mixtures.py [--seeds 0 1 2] [--goals parameters=8x ...] [--part ways]

The digits recipe is used with a single cut (`search.cuts=1`). Ways: on a path of three levels, for each goal and for half its
size, the first trial of a search is made to its size in every way (docs/search.md): one cooled posterior, then masks, pruning
and recovery for each way, with the same noise and order of examples. So `auto` is the row of the chosen way, `off` that of
the usual one, and both are paired. Searches: whole searches of two trials on paths of six or three levels, with `auto` and
with `off`. Results are written after each goal and seed to benchmarks/results/mixtures.json and mixtures.md, where others are
kept; stored results are not made again.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

import torch
from mnist import machine, read, write

from svdcompress import report
from svdcompress.likelihoods import likelihood_for
from svdcompress.pipeline import _stages, open_run, run, versions
from svdcompress.pipeline._choose_masks import EXAMPLES, option
from svdcompress.pipeline._cool import begin
from svdcompress.pipeline._recover import recover_stage
from svdcompress.pipeline._search import Search
from svdcompress.pipeline._smaller import prune_stage
from svdcompress.pipeline._some import some
from svdcompress.pipeline._ways import ways_for
from svdcompress.recipe import Recipe, load_recipe
from svdcompress.search import best_option
from svdcompress.train import losses
from svdcompress.uncertainty import paired_means, paired_shares

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
GOALS = ("parameters=8x", "macs=0.15", "nonzero=60x", "bytes=8x")
FURTHER = (1, 2)
"""The sizes that are tried: the goal's, and as many times smaller."""

SEARCHES = {
    "nonzero=60x": ("nonzero=60x", 6),
    "nonzero=120x": ("nonzero=120x", 6),
    "nonzero=60x, three levels": ("nonzero=60x", 3),
}
"""For each whole search: the goal, and the number of levels of the path."""

SETTINGS = ("uncertainty.samples=0", "report.html=false", "report.latency=false", "search.cuts=1")


class Done(Exception):
    """Ends the run after all ways were made."""


class Every(Search):
    """Makes the first trial of a search in every way."""

    rows: list[dict[str, Any]]

    def _searched(self) -> Any:
        self._climb()
        for times in FURTHER:
            asked = replace(self._strategy(), goal=self._target / times).next([])
            assert asked is not None
            Every.rows.append(self._every(*asked))
        raise Done

    def _every(self, pressure: float, target: float) -> dict[str, Any]:
        data = self.opened.data
        ask = self._ask(len(Every.rows) + 1, pressure, target)
        begin(ask, self.folder)
        cooled = self._cooled(ask)
        model, to_size = (
            cooled.model,
            ways_for(self.measure)(self.context, self.opened, self.dense, cooled.model, self.measure, target, cooled.masks),
        )
        usual = to_size.usual()
        others = [] if usual.free else [to_size.fitted(way, usual) for way in to_size.others_than(usual)]
        found = [usual, *(way for way in others if way is not None)]
        options = [option(model, way, some(data.train, EXAMPLES), data, "cpu") for way in found]
        made = []
        for way in found:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "pruned.safetensors"
                small = prune_stage(self.context, self.opened, model, way.masks, file)
                state = Path(folder) / "recover.pt"
                ended = self.path.beta(pressure)
                given = self.context, self.dense, self.variational, small, file
                recover_stage(*given, ended=ended, stage="trial 1", state=state)
                made.append((self.measure.of_small(small.model.eval(), self.dense.model), small.model))
            assert abs(made[-1][0][self.measure.name] - way.size) <= 0.02 * way.size, (way.name, way.size, made[-1][0])
        rows = [
            {
                "way": way.name,
                "size": way.size,
                "nonzero": costs["nonzero"],
                "untrained": one.nll,
                **self._judged(small, made[0][1]),
            }
            for way, one, (costs, small) in zip(found, options, made, strict=True)
        ]
        chosen = best_option(options).name
        return {"pressure": pressure, "asked": self._dense_size / target, "chosen": chosen, "ways": rows}

    def _judged(self, small: Any, first: Any) -> dict[str, Any]:
        """Figures of a way, and the paired 95% intervals of their differences from the usual way's."""
        data, likelihood = self.opened.data, likelihood_for("classification")
        found: dict[str, Any] = {}
        for name in ("train", "validation", "test"):
            wrong, nll, _ = losses(small, getattr(data, name), likelihood)
            usual_wrong, usual_nll, _ = losses(first, getattr(data, name), likelihood)
            found[name] = {
                "error": 100 * float(wrong.mean()),
                "nll": float(nll.mean()),
                "error_change": [100 * edge for edge in paired_shares(usual_wrong, wrong)],
                "nll_change": list(paired_means(nll - usual_nll)),
            }
        return found


def searched(goal: str, levels: int, seed: int) -> dict[str, Any]:
    """Two whole searches, with and without the choice, and the paired 95% interval of the difference on the test data."""
    found: dict[str, Any] = {}
    wrong = {}
    for setting in ("auto", "off"):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            results = run(recipe(goal, seed, f"search.levels={levels}", "search.trials=2", f"search.mixture={setting}"), out)
            opened = open_run(out)
            wrong[setting] = losses(opened.model, opened.data.test, likelihood_for("classification"))[0]
        trials = results["search"]["trials"]
        taken = next(trial for trial in trials if trial["number"] == results["search"]["chosen"])
        found[setting] = {
            "costs": taken["costs"],
            "mixtures": [(trial["mixture"] or {}).get("chosen") for trial in trials],
            "trial": taken["number"],
            "validation": taken["metrics"],
            "test": results["sparse"]["metrics"],
            "reached": results["search"]["reached"],
            "seconds": results["seconds"]["search"],
        }
    return {**found, "change": [100 * edge for edge in paired_shares(wrong["off"], wrong["auto"])], **about()}


def about() -> dict[str, Any]:
    """The machine, versions and threads that the figures depend on."""
    return {"machine": machine(), "versions": versions(), "threads": torch.get_num_threads()}


def table(results: dict[str, Any]) -> str:
    """Markdown: a summary of the ways, the searches, then each way."""
    ways_of = results.get("ways", {})
    rows = [
        (goal, seed, trial)
        for goal in GOALS
        for seed, trials in sorted(ways_of.get(goal, {}).items())
        for trial in trials["rows"]
    ]
    lines = ["# Mixtures of a size, chosen untrained", "", "Written by `benchmarks/mixtures.py`, which says how.", ""]
    lines += _sums(rows)
    lines += _searches(results.get("searches", {}))
    head = ("goal", "seed", "asked", "way", "size", "training NLL before recovery", "validation: error %, NLL")
    head += ("test: error %, NLL", "test error less the usual way's (95%)")
    lines += ["## Each way", "", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for goal, seed, trial in rows:
        for way in trial["ways"]:
            low, high = way["test"]["error_change"]
            cells = [goal, seed, f"{trial['asked']:.3g}x", way["way"] + (" (chosen)" if way["way"] == trial["chosen"] else "")]
            cells += [f"{way['size']:,.0f}", f"{way['untrained']:.4f}"]
            cells += [f"{way[split]['error']:.2f}, {way[split]['nll']:.4f}" for split in ("validation", "test")]
            cells += ["" if way is trial["ways"][0] else f"{low:+.2f} to {high:+.2f}"]
            lines.append(f"| {' | '.join(cells)} |")
    for one in [each for by_seed in ways_of.values() for each in by_seed.values()][:1]:
        lines += ["", f"{one['machine'].get('cpu')}, torch {one['versions']['torch']}, {one['threads']} thread."]
    return "\n".join(lines) + "\n"


def _sums(rows: list[tuple[str, str, dict[str, Any]]]) -> list[str]:
    head = (
        "goal",
        "sizes",
        "another way chosen",
        "validation NLL, change",
        "its sign",
        "test error, change",
        "test NLL, change",
    )
    lines = ["## One trial, each way", "", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for goal in (*GOALS, "all"):
        own = [trial for name, _, trial in rows if goal in (name, "all")]
        if not own:
            continue
        taken = [(trial["ways"][0], _chosen(trial)) for trial in own if _chosen(trial) is not trial["ways"][0]]
        cells = [goal, f"{len(own)}", f"{len(taken)}"]
        if taken:
            change = {
                (split, figure): mean(after[split][figure] - before[split][figure] for before, after in taken)
                for split, figure in (("validation", "nll"), ("test", "error"), ("test", "nll"))
            }
            lower = sum(after["validation"]["nll"] < before["validation"]["nll"] for before, after in taken)
            cells += [f"{change['validation', 'nll']:+.4f}", f"lower in {lower}, higher in {len(taken) - lower}"]
            cells += [f"{change['test', 'error']:+.2f} points", f"{change['test', 'nll']:+.4f}"]
        lines.append(f"| {' | '.join([*cells, *[''] * (len(head) - len(cells))])} |")
    lines += [
        "",
        "Changes are means over the trials in which another way than the usual one was chosen, chosen less usual.",
        "",
    ]
    for name, there in (("single weights", ("nonzero=60x",)), ("shapes", [goal for goal in GOALS if goal != "nonzero=60x"])):
        pairs = [
            (way["untrained"] - trial["ways"][0]["untrained"], way["validation"]["nll"] - trial["ways"][0]["validation"]["nll"])
            for goal, _, trial in rows
            for way in trial["ways"][1:]
            if goal in there
        ]
        alike = sum((before < 0) == (after < 0) for before, after in pairs)
        lines += [
            f"Goals of {name}: of {len(pairs)} other ways, {alike} are on the same side of the usual one before recovery "
            "(training NLL) and after it (validation NLL).",
            "",
        ]
    return lines


def _searches(results: dict[str, Any]) -> list[str]:
    head = (
        "goal",
        "seed",
        "mixtures of the trials",
        "size, auto",
        "off",
        "validation NLL, auto",
        "off",
        "test error %, auto",
        "off",
    )
    head += ("auto less off (95%)", "seconds, auto", "off")
    lines = ["## Whole searches", "", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for goal, by_seed in results.items():
        measure = goal.partition("=")[0]
        for seed, found in sorted(by_seed.items()):
            both = [found["auto"], found["off"]]
            cells = [goal, seed, ", ".join(str(name or "no choice") for name in both[0]["mixtures"])]
            cells += [f"{one['costs'][measure]:,.0f}" for one in both] + [f"{one['validation']['nll']:.4f}" for one in both]
            cells += [f"{one['test']['error']:.2f}" for one in both]
            cells += [f"{found['change'][0]:+.2f} to {found['change'][1]:+.2f}"] + [f"{one['seconds']:.0f}" for one in both]
            lines.append(f"| {' | '.join(cells)} |")
        errors = {side: mean(one[side]["test"]["error"] for one in by_seed.values()) for side in ("auto", "off")}
        lines.append(f"| {goal} | mean | | | | | | {errors['auto']:.2f} | {errors['off']:.2f} | | | |")
    return [*lines, ""]


def _chosen(trial: dict[str, Any]) -> dict[str, Any]:
    return next(way for way in trial["ways"] if way["way"] == trial["chosen"])


def recipe(goal: str, seed: int, *more: str) -> Recipe:
    """The digits recipe with a search for a goal."""
    asked = [*SETTINGS, f"search.goal='{goal}'", f"seed={seed}", *more]
    return load_recipe(HERE.parent / "recipes" / "digits.yaml", asked)


def main() -> None:
    """Make the parts that are asked for, for all goals and seeds without stored results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--goals", nargs="+", choices=GOALS, default=list(GOALS))
    parser.add_argument("--part", choices=["ways", "searches", "both"], default="both")
    options = parser.parse_args()
    results = read(RESULTS / "mixtures.json")

    def keep(part: str, goal: str, seed: int, found: dict[str, Any]) -> None:
        results.setdefault(part, {}).setdefault(goal, {})[str(seed)] = report.plain(found)
        write(RESULTS / "mixtures.json", results)
        (RESULTS / "mixtures.md").write_text(table(results), encoding="utf-8")

    for seed in options.seeds:
        for goal in options.goals if options.part != "searches" else ():
            if str(seed) not in results.get("ways", {}).get(goal, {}):
                Every.rows = []
                with mock.patch.object(_stages, "Search", Every), tempfile.TemporaryDirectory() as folder, suppress(Done):
                    run(recipe(goal, seed, "search.levels=3"), Path(folder) / "run")
                keep("ways", goal, seed, {"rows": Every.rows, **about()})
    for seed in options.seeds:
        for row, (goal, levels) in SEARCHES.items() if options.part != "ways" else ():
            if str(seed) not in results.get("searches", {}).get(row, {}):
                keep("searches", row, seed, searched(goal, levels, seed))


if __name__ == "__main__":
    main()
