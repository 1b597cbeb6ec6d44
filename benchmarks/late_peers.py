"""Peers of a row of real.json that were not run beside it, once the run itself is gone.

    python benchmarks/late_peers.py vgg16-nonzero80x-few --like RUN --peer "gradual magnitude, single weights" [--minutes 60]

--like: a finished run of the same recipe and settings, whatever its goal; its dense network has to be the one that the row
starts from. That is checked by the stored figures: accuracy on both parts of the data, settings of the recovery, images,
batch size, precision, PyTorch and device. The peer is trained as by `benchmarks/real.py` (which says how), for as many epochs
as the row and to the size of its network. Which images that network gets wrong is not known any more, so the change is not
paired: its interval is Newcombe's for two independent shares, which is usually wider than a paired one. The row then says so.
A stopped peer is resumed, in the folder that holds RUN.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from pathlib import Path
from typing import Any

import torch
from mnist import read, write
from real import CASES, HERE, alone, figures, trained_by, way_of
from real_peers import PEERS, file_of, train, unpickled
from real_table import table
from slices import UNFINISHED, Slice

from svdcompress.pipeline import OpenRun, open_run
from svdcompress.train import resolved_precision
from svdcompress.uncertainty import wilson

NOTE = "change and interval not paired (benchmarks/late_peers.py)"


def case_of(row: str) -> str:
    """The case that a row belongs to: the longest name that the row's begins with."""
    return max((name for name in CASES if row.startswith(name)), key=len)


def differences(stored: dict[str, Any], opened: OpenRun, device: str) -> dict[str, tuple[Any, Any]]:
    """In what a run differs from the one that a row was made with, as {what: (stored, found)}."""
    recipe, recovery, made = opened.recipe, opened.recovery, stored["setting"]
    start, _ = figures(copy.deepcopy(opened.dense).to(device), opened)
    kept = stored["nets"]["dense start"]
    found = {
        "accuracy of the dense network": (kept["accuracy"], start["accuracy"]),
        "parameters of the dense network": (kept["parameters"], start["parameters"]),
        "recovery": (made["recovery"], trained_by(recovery)),
        "batch": (made["batch"], recovery.batch_size),
        "distill": (made["distill"], recovery.distill.weight),
        "augment": (made["augment"], recipe.data.augment),
        "images": (made["images"], len(opened.data.train)),
        "precision": (made["precision"], resolved_precision(recovery.precision, device)),
        "torch": (made["torch"], torch.__version__),
        "device": (made["device"], torch.cuda.get_device_name() if device == "cuda" else "cpu"),
    }
    return {what: pair for what, pair in found.items() if pair[0] != pair[1]}


def unpaired(before: float, after: float, total: int) -> list[float]:
    """The change of an error, after - before, and its 95% interval (Newcombe 1998, method 10), all in points.

    before, after: errors of two networks in percent of `total` images.
    """
    change = after - before
    (low, high), (lower, upper) = (
        tuple(100 * bound for bound in wilson(error / 100 * total, total)) for error in (before, after)
    )
    return [
        change,
        change - math.hypot(after - lower, high - before),
        change + math.hypot(upper - after, before - low),
    ]


def main() -> None:
    """Train the peers that are missing, one after another, and store each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row")
    parser.add_argument("--like", type=Path, required=True)
    parser.add_argument("--peer", nargs="+", choices=PEERS, required=True)
    parser.add_argument("--minutes", type=float)
    options = parser.parse_args()
    path, slot = HERE / "results" / "real.json", Slice(options.minutes)
    stored = read(path)[options.row]
    opened, device = open_run(options.like, trust_code=True), "cuda" if torch.cuda.is_available() else "cpu"
    if found := differences(stored, opened, device):
        told = "; ".join(f"{what}: {pair[0]} in the row, {pair[1]} in the run" for what, pair in found.items())
        sys.exit(f"{options.like} is not like {options.row}: {told}")
    way = way_of(CASES[case_of(options.row)].goal, stored["epochs"], stored["nets"]["ours"])
    for peer in options.peer:
        if "change" in stored["nets"].get(peer, {}):
            continue
        file = file_of(options.like.parent, options.row, peer, "-late")
        done, seconds = file.with_suffix(".done.pt"), None
        if done.is_file():
            model = unpickled(done).to(device)
        else:
            print(f"{options.row}: {peer}, {way.epochs} epochs", flush=True)
            try:
                model, seconds = train(copy.deepcopy(opened.dense).to(device), opened, way, peer, file, slot)
            except Slice.Over:
                print("the slice has ended; the next one goes on from here")
                sys.exit(UNFINISHED)
            torch.save(model, done)
        net, _ = figures(model, opened)
        errors = (100 - each["accuracy"]["reported"] for each in (net, stored["nets"]["ours"]))
        net |= {"change": unpaired(*errors, len(opened.data.test)), "note": NOTE, "seconds": seconds, "epochs": way.epochs}
        with alone(path.parent):
            results = read(path)
            results[options.row]["nets"][peer] = net
            write(path, results)
            path.with_suffix(".md").write_text(table(results), encoding="utf-8")


if __name__ == "__main__":
    main()
