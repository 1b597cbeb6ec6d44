"""Does a mixture that is chosen untrained (`search.mixture: auto`) lose less once it is fine-tuned?

    python benchmarks/mixtures.py [--seeds 0 1 2] [--goals parameters=8x ...]

The digits recipe, a path of three levels. For each goal, and for a size half of that, the first trial of a search is made in
every way to its size (docs/search.md): one cooled posterior, then masks, pruning and recovery for each way, with the same noise
and order of examples. So `auto` is the row that the choice takes, `off` the usual one, and both are paired. Results are written after
each goal and seed to benchmarks/results/mixtures.json and mixtures.md, where others stay; what is there is not made again.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from mnist import machine, read, write

from svdcompress import report
from svdcompress.likelihoods import likelihood_for
from svdcompress.pipeline import _stages, run, versions
from svdcompress.pipeline._choose_masks import EXAMPLES, option
from svdcompress.pipeline._search import Search
from svdcompress.pipeline._smaller import prune_stage, recover_stage
from svdcompress.pipeline._some import some
from svdcompress.pipeline._ways import ways
from svdcompress.recipe import Recipe, load_recipe
from svdcompress.search import best_option
from svdcompress.train import losses
from svdcompress.uncertainty import paired_means, paired_shares

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
GOALS = ("parameters=8x", "macs=0.15", "nonzero=60x", "bytes=8x")
FURTHER = (1, 2)
"""Sizes: of the goal, and as many times smaller."""

SETTINGS = ("search.levels=3", "uncertainty.samples=0", "report.html=false", "report.latency=false")


class Done(Exception):
    """Ends the run once all ways were made."""


class Every(Search):
    """The first trial of a search, in every way."""

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
        model, _ = self.path.cooled(pressure)
        to_size = ways(self.context, self.opened, self.dense, model, self.measure, target)
        usual = to_size.usual()
        found = [usual, *([] if usual.free else to_size.others_than(usual))]
        options = [option(model, way, some(data.train, EXAMPLES), data, "cpu") for way in found]
        made = []
        for way in found:
            with tempfile.TemporaryDirectory() as folder:
                small = prune_stage(self.context, self.opened, model, way.masks, Path(folder) / "pruned.safetensors")
                state = Path(folder) / "recover.pt"
                ended = self.path.beta(pressure)
                recover_stage(self.context, self.dense, self.variational, small, ended=ended, stage="trial 1", state=state)
                made.append((self.measure.of_small(small.model.eval(), self.dense.model), small.model))
            assert abs(made[-1][0][self.measure.name] - way.size) <= 0.02 * way.size, (way.name, way.size, made[-1][0])
        first = made[0][1]
        rows = [
            {
                "way": way.name,
                "size": way.size,
                "nonzero": costs["nonzero"],
                "untrained": one.nll,
                **self._judged(small, first),
            }
            for way, one, (costs, small) in zip(found, options, made, strict=True)
        ]
        chosen = best_option(options).name
        return {"pressure": pressure, "asked": self._dense_size / target, "chosen": chosen, "ways": rows}

    def _judged(self, small: Any, first: Any) -> dict[str, Any]:
        """Figures of a way, and how they differ from those of the usual one (95%, paired)."""
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


def table(results: dict[str, Any]) -> str:
    """Markdown: the sum, then each way."""
    lines = ["# Mixtures of a size, chosen untrained", "", "Written by `benchmarks/mixtures.py`, which says how.", ""]
    rows = [
        (goal, seed, trial) for goal in GOALS for seed, trials in sorted(results.get(goal, {}).items()) for trial in trials["rows"]
    ]
    lines += ["| goal | sizes | another way chosen | validation NLL, change | its sign | test error, change | test NLL, change |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for goal in (*GOALS, "all"):
        own = [trial for name, _, trial in rows if goal in (name, "all")]
        if not own:
            continue
        taken = [(trial["ways"][0], _chosen(trial)) for trial in own if _chosen(trial) is not trial["ways"][0]]
        change = {
            (split, figure): mean([after[split][figure] - before[split][figure] for before, after in taken] or [0.0])
            for split, figure in (("validation", "nll"), ("test", "error"), ("test", "nll"))
        }
        better = sum(after["validation"]["nll"] < before["validation"]["nll"] for before, after in taken)
        lines.append(
            f"| {goal} | {len(own)} | {len(taken)} | {change['validation', 'nll']:+.4f} | lower in {better}, higher in "
            f"{len(taken) - better} | {change['test', 'error']:+.2f} points | {change['test', 'nll']:+.4f} |"
        )
    lines += ["", "Changes are means over the trials in which another way than the usual one was chosen, chosen less usual.", ""]
    pairs = [
        (way["untrained"] - trial["ways"][0]["untrained"], way["validation"]["nll"] - trial["ways"][0]["validation"]["nll"])
        for _, _, trial in rows
        for way in trial["ways"][1:]
    ]
    alike = sum((before < 0) == (after < 0) for before, after in pairs)
    if pairs:
        lines += [f"Of {len(pairs)} other ways, {alike} stand after recovery (validation NLL) on the side of the usual one on which "]
        lines[-1] += "they stood before it (training NLL)."
    head = ("goal", "seed", "asked", "way", "size", "training NLL before recovery", "validation: error %, NLL", "test: error %, NLL")
    head += ("test error less the usual way's (95%)",)
    lines += ["", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for goal, seed, trial in rows:
        for way in trial["ways"]:
            low, high = way["test"]["error_change"]
            cells = [goal, seed, f"{trial['asked']:.3g}x", way["way"] + (" (chosen)" if way["way"] == trial["chosen"] else "")]
            cells += [f"{way['size']:,.0f}", f"{way['untrained']:.4f}"]
            cells += [f"{way[split]['error']:.2f}, {way[split]['nll']:.4f}" for split in ("validation", "test")]
            cells += ["" if way is trial["ways"][0] else f"{low:+.2f} to {high:+.2f}"]
            lines.append(f"| {' | '.join(cells)} |")
    for one in [each for by_seed in results.values() for each in by_seed.values()][:1]:
        lines += ["", f"{one['machine'].get('cpu')}, torch {one['versions']['torch']}, {one['threads']} thread."]
    return "\n".join(lines) + "\n"


def _chosen(trial: dict[str, Any]) -> dict[str, Any]:
    return next(way for way in trial["ways"] if way["way"] == trial["chosen"])


def recipe(goal: str, seed: int) -> Recipe:
    """The digits, searched for a goal."""
    return load_recipe(HERE.parent / "recipes" / "digits.yaml", [*SETTINGS, f"search.goal='{goal}'", f"seed={seed}"])


def main() -> None:
    """Goals by seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--goals", nargs="+", choices=GOALS, default=list(GOALS))
    options = parser.parse_args()
    _stages.Search = Every
    results = read(RESULTS / "mixtures.json")
    for seed in options.seeds:
        for goal in options.goals:
            if str(seed) in results.get(goal, {}):
                continue
            Every.rows = []
            with tempfile.TemporaryDirectory() as folder:
                try:
                    run(recipe(goal, seed), Path(folder) / "run")
                except Done:
                    pass
            about = {"machine": machine(), "versions": versions(), "threads": torch.get_num_threads()}
            results.setdefault(goal, {})[str(seed)] = report.plain({"rows": Every.rows, **about})
            write(RESULTS / "mixtures.json", results)
            (RESULTS / "mixtures.md").write_text(table(results), encoding="utf-8")


if __name__ == "__main__":
    main()
