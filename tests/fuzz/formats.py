"""The file formats, each with small valid files and a reader that checks its result."""

from __future__ import annotations

import gzip
import io
import json
import random
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from formats_more import NAMES as MORE
from formats_more import checked, header
from formats_more import formats as more
from harness import Format, Wrong
from rich.console import Console
from safetensors.torch import load as tensors_of
from safetensors.torch import save as bytes_of
from torch import nn
from torch.nn import functional as F

import svdcompress as svdc
from svdcompress import checkpoint, report
from svdcompress.errors import SvdcError
from svdcompress.pipeline import open_run
from svdcompress.pipeline._folder import RunState
from svdcompress.predict import predict_run, read_inputs
from svdcompress.recipe import DataSection, Training, dump_recipe, load_recipe, parse_recipe
from svdcompress.relevance import Masks
from svdcompress.sources import InMemory, check_finite, decode, load_weights, open_data
from svdcompress.train import fit

INDEX = "m.safetensors.index.json"

JSON = (json.loads, lambda value: json.dumps(value).encode())


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.1), nn.Flatten()),
        *(nn.Linear(4 * 16, 6), nn.ReLU(), nn.Linear(6, 3)),
    )


def untouched(read: Any, model: nn.Module) -> None:
    """Call `read(model)`; if it refuses the file, the model must be unchanged."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    own = [(type(module), sorted(vars(module))) for module in model.modules()]
    try:
        read(model)
    except BaseException:
        now = model.state_dict()
        same = list(now) == list(state) and all(torch.equal(now[name], state[name]) for name in state)
        if not same or [(type(module), sorted(vars(module))) for module in model.modules()] != own:
            raise Wrong("the model was changed by a file that was refused") from None
        raise


def runs(model: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        model.eval()(x)


# Checkpoints


def make_checkpoint(folder: Path) -> None:
    model = svdc.convert_dropout(svdc.convert(net().eval()))
    masks = {name: mask.clone() for name, mask in svdc.relevance(model).items()}
    masks["0"][1] = False
    masks["5"][2:4] = False
    small = svdc.prune(model, torch.randn(2, 1, 6, 6), masks=masks)
    svdc.save(small, folder / "model.safetensors", extra={"preprocessing": {"transform": []}})


def read_checkpoint(folder: Path, rng: random.Random) -> None:
    model = net()
    untouched(lambda model: svdc.load(folder / "model.safetensors", model), model)
    runs(model, torch.zeros(2, 1, 6, 6))


def manifest_of(content: bytes) -> Any:
    return json.loads(header(content)["__metadata__"]["svdcompress"])


def with_manifest(good: bytes) -> Any:
    tensors = tensors_of(good)

    def written(value: Any) -> bytes:
        if isinstance(value, dict):
            value = {name: part for name, part in value.items() if name != "sha256"}  # else nothing gets past the digest
        return bytes_of(tensors, {"svdcompress": json.dumps(value)})

    return written


# Dense weights


def make_weights(folder: Path) -> None:
    torch.save({"model": net().state_dict(), "epoch": 3}, folder / "w.pt")


def read_weights(folder: Path, rng: random.Random) -> None:
    model = net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        untouched(lambda model: load_weights(model, folder / "w.pt"), model)
    runs(model, torch.zeros(2, 1, 6, 6))


def make_shards(folder: Path) -> None:
    state = net().state_dict()
    names = list(state)
    files = {"a.safetensors": names[:4], "b.safetensors": names[4:]}
    for file, own in files.items():
        (folder / file).write_bytes(bytes_of({name: state[name] for name in own}))
    index = {"metadata": {}, "weight_map": {name: file for file, own in files.items() for name in own}}
    (folder / INDEX).write_text(json.dumps(index))


def read_shards(folder: Path, rng: random.Random) -> None:
    model = net()
    untouched(lambda model: load_weights(model, folder / INDEX), model)
    runs(model, torch.zeros(2, 1, 6, 6))


# Recipes


def make_recipe(folder: Path) -> None:
    (folder / "recipe.yaml").write_text(RECIPE)


RECIPE = """
description: a net of digits
model: {name: mlp, args: {sizes: [64, 8, 10]}}
data: {name: digits, validation: 0.1, split: random, transform: [{normalize: {mean: 0.5, std: 0.5}}], image_size: [8, 8]}
loss: {name: cross-entropy, label_smoothing: 0.1, class_weights: balanced}
convert:
  share: {weight: 1, input: 3}
  threshold: {weight: 3, input: 2}
  layers: [{match: "1*", prior: ard, log_sigma2: -8}]
train: {epochs: 3, lr: 0.001, shrink: 50%, beta: {start: 10%, stop: 2, final: auto}, schedule: cosine, distill: {weight: 0.5}}
relevance: {candidates: [2, {weight: 3}], tolerance: 0.1}
prune: {round_to: 8, protect: []}
seed: 3
"""


def loaded(text: str) -> Any:
    """YAML text as the reference parses it: by libyaml if available, which is ten times as fast."""
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def read_recipe(folder: Path, rng: random.Random) -> None:
    recipe = load_recipe(folder / "recipe.yaml")
    if parse_recipe(loaded(dump_recipe(recipe))) != recipe:
        raise Wrong("what is stored is not what was read")


# Data files


def idx_bytes(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.astype(np.uint8).tobytes()


def make_idx(folder: Path) -> None:
    for split in ("train", "t10k"):
        (folder / f"{split}-images-idx3-ubyte").write_bytes(idx_bytes(np.arange(160).reshape(10, 4, 4)))
        (folder / f"{split}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_bytes(np.arange(10) % 3)))


def read_idx(folder: Path, rng: random.Random) -> None:
    checked(open_data(DataSection(name=f"mnist:{folder}", validation=2), "classification"))


def make_npz(folder: Path) -> None:
    x = np.random.default_rng(0).normal(size=(24, 3))
    np.savez_compressed(folder / "d.npz", x=x.astype(">f4"), y=np.arange(24) % 2)
    np.savez(folder / "e.npz", x=x, y=np.arange(24) % 2)


def read_npz(folder: Path, rng: random.Random) -> None:
    for name in ("d.npz", "e.npz"):
        checked(open_data(DataSection(name=f"npz:{folder / name}", validation=2, test_share=0.2), "classification"))


def make_npy(folder: Path) -> None:
    np.save(folder / "x.npy", np.random.default_rng(0).normal(size=(5, 2, 3)).astype(np.float32))


def read_npy(folder: Path, rng: random.Random) -> None:
    x, names = read_inputs(folder / "x.npy")
    check_finite(x, "x.npy")
    oracle = np.load(folder / "x.npy", allow_pickle=False)
    if len(names) != len(oracle) or not np.array_equal(x.numpy(), oracle.astype(x.numpy().dtype)):
        raise Wrong("other numbers than numpy reads")


def make_csv(folder: Path) -> None:
    rows = [f"{i * 0.37:.3f},{'red' if i % 3 else 'blue'},{i},{i % 2}" for i in range(24)]
    (folder / "t.csv").write_text("\n".join(["a,colour,n,label", *rows]) + "\n")


def read_csv(folder: Path, rng: random.Random) -> None:
    task = rng.choice(("classification", "regression", "binary"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pandas warns about columns of mixed types
        checked(open_data(DataSection(name=f"csv:{folder / 't.csv'}", target="label", validation=2, test_share=0.2), task))


# Masks


def make_masks(folder: Path) -> None:
    svdc.relevance(svdc.convert(net())).save(folder / "masks.safetensors")


def read_masks(folder: Path, rng: random.Random) -> None:
    model = svdc.convert(net())
    untouched(lambda model: svdc.hold(model, Masks.load(folder / "masks.safetensors", model)), model)
    runs(model, torch.zeros(2, 1, 6, 6))


# A run's folder


def make_run(folder: Path) -> None:
    recipe = load_recipe("digits", ["model.args={sizes: [6, 5, 3]}"])
    model = svdc.convert(nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))).eval()
    preprocessing = {"transform": [{"normalize": {"mean": [0.5], "std": [0.25]}}], "input_shape": [6], "target_scale": None}
    extra = {
        "preprocessing": preprocessing,
        "classes": ["a", "b", "c"],
        "tau": None,
        "inputs": {"inputs_kept": None, "inputs_dim": None},
    }
    checkpoint.save(model, folder / "model.safetensors", extra=extra)
    (folder / "recipe.yaml").write_text(dump_recipe(recipe))
    np.save(folder / "x.npy", np.zeros((3, 6), np.float32))
    side = {
        "metrics": {"error": 2.5, "nll": 0.1},
        "parameters": 53,
        "nonzero": 50,
        "bytes": 900,
        "macs": 45,
        "latency_ms": {"batch_1": 0.1},
    }
    results = {
        "name": "run", "seed": 0, "device": "cpu", "versions": {"torch": "2"}, "seconds": {"data": 0.1, "train": 2.0},
        "warnings": ["one"], "threshold": 3.0, "dense": side, "sparse": {**side, "nonzero": 20}, "created": "2026-01-01",
        "compression": {"nonzero": 2.5, "latency": {"batch_1": 1.5}},
        "layers": [{"name": "1", "shape_before": [5, 6], "shape_after": [4, 6], "sparsity": 0.4, "outputs": 4}],
        "history": [{"stage": "train", "epoch": k, "loss": 1.0 / k, "nll": 0.5, "kl": 3.0, "beta": 0.1, "sparsity": 0.1 * k,
                     "val_error": 3.0, "lr": 0.01} for k in (1, 2, 3)],
        "log_alpha": {"1": {"edges": [-1.0, 0.0, 1.0], "counts": [3, 4], "threshold": 3.0, "share": "weight"}},
        "threshold_curve": [{"threshold": 2.0, "error": 2.0, "nonzero": 30}, {"threshold": 3.0, "error": 2.5, "nonzero": 20}],
        "calibration": {"sparse": {"confidence": [0.5, 0.9], "accuracy": [0.4, 0.9], "count": [10, 90], "ece": 0.02}},
        "uncertainty": {"sparse": {"ece": 0.02}}, "parity": {"model.onnx": 1e-7},
        "pruning": {"groups": [{"name": "1", "units": 5, "removed": 1, "kept": 4, "reason": ""}], "round_to": 1,
                    "notes": [], "seconds": 0.1},
        "recipe": "seed: 0\n",
    }  # fmt: skip
    report.write_json(folder / "report.json", results)
    (folder / "state").mkdir()
    (folder / "state" / "run.json").write_text(json.dumps({"seconds": {"data": 1.0}}))
    trained(folder / "state" / "train.pt", 1)


def trained(state: Path, epochs: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3))
    x, y = torch.randn(8, 6), torch.arange(8) % 3
    settings = Training(epochs=epochs, batch_size=8)
    loss: Any = F.cross_entropy
    fit(model, InMemory(x, y), loss, settings, state=state, device="cpu")


def read_run(folder: Path, rng: random.Random) -> None:
    number = rng.random()
    opened = open_run(folder)
    results = opened.results
    report.rows(results)
    try:
        report.table(results, Console(file=io.StringIO()), folder)
        if number < 0.01:
            report.render(results, folder)
    except SvdcError:
        raise
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, report.SectionWarning):
        pass  # the command `report` reports these as a report that was edited by hand
    RunState(folder, writer=False)
    trained(folder / "state" / "train.pt", 2)
    predict_run(folder, folder / "x.npy", folder / "p.npz", samples=2)
    with np.load(folder / "p.npz") as stored:
        if stored["mean"].shape != (3, 3):
            raise Wrong("predictions of another shape")


# Images and text


def make_images(folder: Path) -> None:
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    for kind in ("png", "jpeg", "gif", "bmp", "tiff", "webp", "ppm"):
        Image.fromarray(pixels).save(folder / f"i.{kind}")
    Image.fromarray(pixels[:, :, 0].astype(np.uint16) * 200).save(folder / "wide.png")


IMAGES = (*(f"i.{kind}" for kind in ("png", "jpeg", "gif", "bmp", "tiff", "webp", "ppm")), "wide.png")


def read_images(folder: Path, rng: random.Random) -> None:
    refused = None
    for name in IMAGES:
        try:
            image = decode(folder / name, (8, 8), name)
        except SvdcError as error:
            refused = error
            continue
        if image.dtype != torch.uint8 or image.shape[1:] != (8, 8) or len(image) not in (1, 3):
            raise Wrong(f"an image of {image.dtype} and shape {tuple(image.shape)}")
    if refused is not None:
        raise refused


def make_text(folder: Path) -> None:
    import transformers

    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film"]) + "\n")
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    rows = [f"{'good' if i % 2 else 'bad'} film {i},{i % 2}" for i in range(16)]
    (folder / "t.csv").write_text("\n".join(["review,label", *rows]) + "\n")


def read_text(folder: Path, rng: random.Random) -> None:
    section = DataSection(
        name=f"csv:{folder / 't.csv'}",
        target="label",
        args={"tokenizer": str(folder), "max_length": 6},
        validation=2,
        test_share=0.2,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checked(open_data(section, "classification"))


def formats(folder: Path) -> dict[str, Format]:
    """All formats of this file, by name. folder: for a valid checkpoint whose tensors the mutated manifests are read with."""
    good = folder / "good-checkpoint"
    good.mkdir(parents=True, exist_ok=True)
    make_checkpoint(good)
    run = folder / "good-run"
    run.mkdir(exist_ok=True)
    make_run(run)
    manifest = (manifest_of, with_manifest((good / "model.safetensors").read_bytes()))
    of_run = (manifest_of, with_manifest((run / "model.safetensors").read_bytes()))
    yaml_ = (loaded, lambda value: yaml.safe_dump(value, sort_keys=False).encode())
    idx = tuple(f"{split}-{rest}" for split in ("train", "t10k") for rest in ("images-idx3-ubyte", "labels-idx1-ubyte.gz"))
    run_files = ("report.json", "recipe.yaml", "model.safetensors", "state/run.json", "state/train.pt")
    return {
        form.name: form
        for form in (
            Format("checkpoint", make_checkpoint, read_checkpoint, ("model.safetensors",), {"model.safetensors": manifest}),
            Format("weights", make_weights, read_weights, ("w.pt",)),
            Format("shards", make_shards, read_shards, (INDEX, "a.safetensors"), {INDEX: JSON}),
            Format("recipe", make_recipe, read_recipe, ("recipe.yaml",), {"recipe.yaml": yaml_}),
            Format("idx", make_idx, read_idx, idx),
            Format("npz", make_npz, read_npz, ("d.npz", "e.npz")),
            Format("npy", make_npy, read_npy, ("x.npy",)),
            Format("csv", make_csv, read_csv, ("t.csv",)),
            Format("masks", make_masks, read_masks, ("masks.safetensors",)),
            Format("run", make_run, read_run, run_files,
                   {"report.json": JSON, "recipe.yaml": yaml_, "model.safetensors": of_run, "state/run.json": JSON}),
            Format("images", make_images, read_images, IMAGES),
            Format("text", make_text, read_text, ("t.csv", "tokenizer.json", "tokenizer_config.json"),
                   {"tokenizer.json": JSON, "tokenizer_config.json": JSON}),
        )
    } | more(folder)  # fmt: skip


NAMES = ("checkpoint", "weights", "shards", "recipe", "idx", "npz", "npy", "csv", "masks", "images", "text", "run", *MORE)
