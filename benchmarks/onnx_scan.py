"""The Monte-Carlo loop as torch exports it (`scan`, `while_loop`), compared with that of `export_onnx` on one network.

    python benchmarks/onnx_scan.py

A multilayer perceptron 784-300-100-10 with noise on its layers' outputs, 100 draws, the noise an input and the same for all;
onnxruntime, one thread. "scan" is what a loop around a model gives; in "scan, hoisted by hand" the first layer's mean and
variance, which need no noise, are computed before the loop, which no exporter does. Written to
benchmarks/results/onnx_scan.json and onnx_scan.md.
"""

from __future__ import annotations

import json
import tempfile
import time
import warnings
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import svdcompress as svdc

RESULTS = Path(__file__).resolve().parent / "results"
SIZES = (784, 300, 100, 10)
NUMBERS = SIZES[1:]
DRAWS = 100
BATCHES = (1, 64)
TIMES = 15


class Loop(nn.Module):
    """Mean probabilities over draws; inputs (batch, 784) and noise (draws, batch, numbers)."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        masks = [layer.relevant() for layer in layers]  # as the model computes in eval()
        self.means = nn.ParameterList(layer.weight * mask for layer, mask in zip(layers, masks, strict=True))
        self.biases = nn.ParameterList(layer.bias for layer in layers)
        self.variances = nn.ParameterList(layer.log_sigma2.exp() * mask for layer, mask in zip(layers, masks, strict=True))

    def moments(self, index: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of a layer's output."""
        mean = x @ self.means[index].T + self.biases[index]
        return mean, (x.square() @ self.variances[index].T).sqrt()

    def rest(self, mean: Tensor, std: Tensor, noise: Tensor) -> Tensor:
        """The probabilities of a draw, computed from the first layer's moments."""
        parts = noise.split(NUMBERS, 1)
        for index, part in enumerate(parts):
            if index:
                mean, std = self.moments(index, h.relu())  # noqa: F821 (bound by the round before)
            h = mean + std * part
        return h.softmax(1).double()


def empty(x: Tensor) -> Tensor:
    """The sums before the first draw."""
    return torch.zeros(x.shape[0], SIZES[-1], dtype=torch.float64)


class Scan(Loop):
    """The whole model inside the loop."""

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        def draw(total: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            p = self.rest(*self.moments(0, x), row)
            return total + p, p.sum()

        return scan(draw, empty(x), noise)[0] / noise.shape[0]


class Hoisted(Loop):
    """What does not depend on the noise is computed before the loop."""

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        mean, std = self.moments(0, x)

        def draw(total: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            p = self.rest(mean, std, row)
            return total + p, p.sum()

        return scan(draw, empty(x), noise)[0] / noise.shape[0]


class While(Loop):
    """The whole model inside the loop, which takes its row of the noise by index."""

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        def draw(index: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
            row = noise.index_select(0, index.reshape(1)).squeeze(0)
            return index + 1, total + self.rest(*self.moments(0, x), row)

        start = (torch.zeros((), dtype=torch.int64), empty(x))
        return while_loop(lambda index, total: index < noise.shape[0], draw, start)[1] / noise.shape[0]


def exported(kind: type[Loop], layers: Any, file: Path) -> str:
    """Write the file; returns why this failed, or "" if it succeeded."""
    batch, draws = torch.export.Dim("batch"), torch.export.Dim("draws")
    examples = (torch.randn(3, SIZES[0]), torch.randn(4, 3, sum(NUMBERS)))
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = kind(layers).eval()
            program = torch.export.export(module, examples, dynamic_shapes=({0: batch}, {0: draws, 1: batch}), strict=False)
            made: Any = torch.onnx.export(program, (), dynamo=True, opset_version=20, verbose=False)
            made.save(str(file), external_data=False)
    except Exception as error:  # a failure is a result, too
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
    return ""


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    blocks = [part for a, b in pairwise(SIZES) for part in (nn.Linear(a, b), nn.ReLU())]
    model = svdc.convert(nn.Sequential(*blocks[:-1]), log_sigma2=-7.0).eval()
    layers = [layer for layer in model if isinstance(layer, nn.Linear) or hasattr(layer, "log_sigma2")]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        kinds = {"scan": Scan, "scan, hoisted by hand": Hoisted, "while_loop": While}
        for name, kind in {**kinds, "export_onnx": None}.items():
            file, why = Path(folder) / f"{name}.onnx", ""
            if kind is None:
                svdc.export_onnx(model, file, torch.randn(2, SIZES[0]), monte_carlo=True, task="classification", noise="input")
            else:
                why = exported(kind, layers, file)
            row: dict[str, Any] = {"form": name, "failed": why, "bytes": None if why else file.stat().st_size}
            rows.append(row)
            for batch in () if why else BATCHES:
                generator = torch.Generator().manual_seed(batch)
                x = torch.randn(batch, SIZES[0], generator=generator)
                noise = torch.randn(DRAWS, batch, sum(NUMBERS), generator=generator)
                expected = Scan(layers).eval()
                with torch.no_grad():
                    (mean, std), total = expected.moments(0, x), empty(x)
                    for one in noise:
                        total += expected.rest(mean, std, one)
                try:
                    session = onnxruntime.InferenceSession(str(file), options)
                    names = [value.name for value in session.get_inputs()]
                    own = torch.cat([part.flatten(1) for part in noise.split(NUMBERS, 2)], 1)
                    feeds = {names[0]: x.numpy(), names[-1]: (noise if kind else own).numpy()}
                    feeds |= {} if kind else {"samples": np.array(DRAWS)}
                    probabilities = session.run(None, feeds)[0]
                    spent = []
                    for _ in range(TIMES):
                        started = time.process_time()
                        session.run(None, feeds)
                        spent.append(time.process_time() - started)
                    row[f"difference_{batch}"] = float(np.abs(probabilities - (total / DRAWS).numpy()).max())
                    row[f"ms_{batch}"] = round(1000 * min(spent), 2)
                except Exception as error:  # a failure is a result, too
                    row["failed"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
            print(row, flush=True)
    versions = {name: version(name) for name in ("torch", "onnxruntime", "onnxscript")}
    (RESULTS / "onnx_scan.json").write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    heads = ["form", *(f"batch {batch}, ms" for batch in BATCHES), "difference", "bytes", "failed"]
    lines = ["# The Monte-Carlo loop by torch's exporter", "", "Written by `benchmarks/onnx_scan.py`: 784-300-100-10, "]
    lines[-1] += f"{DRAWS} draws, the fastest of {TIMES} calls (processor time, one thread); "
    lines[-1] += ", ".join(f"{name} {number}" for name, number in versions.items()) + "."
    lines += ["", "| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        apart = max((row.get(f"difference_{batch}", 0.0) for batch in BATCHES), default=0.0)
        cells = [
            row["form"],
            *(row.get(f"ms_{batch}", "") for batch in BATCHES),
            f"{apart:.1e}",
            row["bytes"] or "",
            row["failed"],
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    (RESULTS / "onnx_scan.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
