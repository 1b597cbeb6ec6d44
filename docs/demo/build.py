"""Fills the page with what it needs: python docs/demo/build.py [--run RUN]. Then: python -m http.server -d docs/demo

onnxruntime-web is fetched by npm at the version below, checked against its digest, and not committed. --run takes the models of
a finished run of a digits recipe in place of those that are committed (see SOURCE in models/models.json).
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PACKAGE, VERSION = "onnxruntime-web", "1.30.0"
INTEGRITY = "sha512-q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="
FILES = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")


def fetch(folder: Path = HERE / "ort") -> None:
    """The three files of onnxruntime-web that a page without a bundler needs. Exits with a reason where they can't be had."""
    stamp = folder / "VERSION"
    if stamp.is_file() and stamp.read_text() == INTEGRITY and all((folder / name).is_file() for name in FILES):
        return
    folder.mkdir(parents=True, exist_ok=True)
    if shutil.which("npm") is None:
        sys.exit("npm is needed to fetch onnxruntime-web: install Node.js")
    command = ["npm", "pack", "--silent", "--pack-destination", str(folder), f"{PACKAGE}@{VERSION}"]
    try:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    except subprocess.CalledProcessError as error:
        sys.exit(f"npm could not fetch {PACKAGE}@{VERSION} (exit code {error.returncode})")
    archive = folder / f"{PACKAGE}-{VERSION}.tgz"
    found = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if f"sha512-{found}" != INTEGRITY:
        archive.unlink()
        sys.exit(f"{PACKAGE}@{VERSION}: its digest is sha512-{found}, not the one that this script names")
    with tarfile.open(archive) as packed:
        for name in FILES:
            file = packed.extractfile(f"package/dist/{name}")
            assert file is not None
            (folder / name).write_bytes(file.read())
    archive.unlink()
    stamp.write_text(INTEGRITY)


def take(run: Path, folder: Path = HERE / "models") -> None:
    """The ONNX files of a run of square pictures, and what the page says of them."""
    import onnx

    import svdcompress as svdc

    opened = svdc.load_run(run)
    results = opened.results
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("dense.onnx", "model.onnx"):
        shutil.copyfile(run / name, folder / name)
    # JavaScript can't leave an optional input out, so the seed is a required one.
    sampled = folder / "model_mc.onnx"
    command = ["export", str(run), "--monte-carlo", "--noise", "seed", "--out", str(sampled)]
    sampled.unlink(missing_ok=True)
    subprocess.run([sys.executable, "-m", "svdcompress", *command], check=True)
    graph = onnx.load(str(folder / "model.onnx")).graph
    sizes = [dim.dim_value or 1 for dim in graph.input[0].type.tensor_type.shape.dim]
    side = round(numbers(sizes) ** 0.5)
    if side * side != numbers(sizes):
        sys.exit(f"{run}: inputs of shape {sizes} are no square pictures")
    error = {name: results[name]["metrics"]["error"] for name in ("dense", "sparse")}
    promised = ((results.get("promises") or {}).get("answer_above") or {}).get("samples") or {}
    models: list[dict[str, Any]] = [
        {"file": "dense.onnx", "name": "dense", **counts(results["dense"]), "error": error["dense"]},
        {"file": "model.onnx", "name": "sparse", **counts(results["sparse"]), "error": error["sparse"]},
        {"file": "model_mc.onnx", "name": "sparse, 100 samples", **counts(results["sparse"]), "samples": True},
    ]
    drawn = next((row for name, row in results["uncertainty"].items() if "samples" in name), {})
    models[2]["error"] = drawn.get("error")
    for model in models:
        model["bytes"] = (folder / model["file"]).stat().st_size
        model["output"] = onnx.load(str(folder / model["file"])).graph.output[0].name
    tested, versions = results["examples"]["test"], results["versions"]
    about = {
        "source": f"{first_sentence(results['description'])}, seed {results['seed']}, svdcompress {versions['svdcompress']}",
        "side": side,
        "input": graph.input[0].name,
        "shape": sizes,
        "classes": list(map(str, opened.classes or range(10))),
        "answer_above": round(promised.get("threshold", 0.9), 4),
        "note": f"Errors on {tested:,} test images. Times: one drawing, one thread, onnxruntime-web {VERSION} in this browser.",
        "models": models,
    }
    (folder / "models.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def first_sentence(text: str | None) -> str:
    """Of a recipe's description."""
    return " ".join((text or "a run").split()).partition(". ")[0]


def counts(side: dict[str, Any]) -> dict[str, int]:
    """Parameters and non-zeros of a side of the report."""
    return {key: side[key] for key in ("parameters", "nonzero")}


def numbers(sizes: list[int]) -> int:
    """The product."""
    total = 1
    for size in sizes:
        total *= size
    return total


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, help="a finished run whose models the page shows")
    given = parser.parse_args()
    if given.run is not None:
        take(given.run)
    fetch()
    print("now: python -m http.server -d docs/demo, and open the address that it prints")
