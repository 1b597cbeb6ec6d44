"""The README's figure: error against size for the public ResNet-20, ours and its peers, as light and dark PNG.

    python benchmarks/real_plot.py [--out docs/images]

Reads results/real.json (error on the reported half with its 95% interval, multiply-accumulates) and real_int8.json (bytes of
each ONNX file, in float and integers); missing results are not drawn.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mnist import read

from svdcompress.experiments._pictures import BLUE, GREEN, PURPLE, QUIET, RED, figure, save

HERE = Path(__file__).resolve().parent
NETWORK = "resnet20"
LOOKS = {
    "ours": (BLUE, "o", "svdcompress"),
    "torch-pruning, Taylor": (RED, "s", "torch-pruning, Taylor"),
    "torch-pruning, magnitude": (PURPLE, "^", "torch-pruning, magnitude"),
    "gradual magnitude, single weights": (GREEN, "v", "gradual magnitude, single weights"),
    "dense start": (QUIET, "D", "dense"),
}
"""Color, marker and name of each row that is drawn."""


def against_macs(axis: Any, cases: dict[str, Any]) -> None:
    """Plot error against multiply-accumulates; the networks of one way at its sizes have one color."""
    for row, (colour, marker, name) in LOOKS.items():
        nets = [case["nets"][row] for case in cases.values() if row in case["nets"]]
        nets = nets[:1] if row == "dense start" else nets
        if not nets or row.startswith("gradual"):  # their multiply-accumulates do not change
            continue
        x, y = [net["macs"] / 1e6 for net in nets], [100 - net["accuracy"]["reported"] for net in nets]
        bounds = [(100 - high, 100 - low) for low, high in (net["interval"] for net in nets)]
        bars = [[value - low for value, (low, _) in zip(y, bounds, strict=True)]]
        bars += [[high - value for value, (_, high) in zip(y, bounds, strict=True)]]
        axis.errorbar(x, y, bars, color=colour, marker=marker, ms=5, lw=1.2, elinewidth=0.8, capsize=2, label=name)
    axis.set(xlabel="million multiply-accumulates", ylabel="test error (%)", xlim=(0, None), ylim=(0, None))
    axis.set_title("filters removed", fontsize=9)
    axis.legend(fontsize=7, loc="lower left", frameon=False)


def against_bytes(axis: Any, cases: dict[str, Any]) -> None:
    """Plot error against file size; a dotted line joins the float file and the integer one."""
    for row, (colour, marker, _) in LOOKS.items():
        found = [case["nets"].get(row) or case["nets"].get(row.replace(", ", "-").replace(" ", "-")) for case in cases.values()]
        for net in [net for net in found if net][: 1 if row == "dense start" else None]:
            ends = []
            for form, face in (("float", colour), ("int8", "none")):
                made = net["forms"].get(form)
                if made is not None:
                    ends.append((made["bytes"] / 1000, made["errors"]["reported"]["error"]))
                    axis.plot(*ends[-1], marker, color=colour, mfc=face, ms=5)
            axis.plot(*zip(*ends, strict=True), color=colour, lw=0.8, ls=":")
    axis.set(xlabel="size of the ONNX file (kB)", xlim=(0, None), ylim=(0, None))
    axis.set_title("full: float32, hollow: int8", fontsize=9)


def main() -> None:
    """Draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "images")
    options = parser.parse_args()
    results = HERE / "results"
    macs, sizes = (
        {name: case for name, case in read(results / file).items() if name.startswith(NETWORK)}
        for file in ("real.json", "real_int8.json")
    )
    drawing, axes = figure(1, 2 if sizes else 1, (9 if sizes else 5, 3.4))
    against_macs(axes[0, 0], macs)
    if sizes:
        against_bytes(axes[0, 1], sizes)
    top = max(axis.get_ylim()[1] for axis in axes[0])
    for axis in axes[0]:
        axis.set_ylim(0, 1.05 * top)
    save(drawing, options.out / f"{NETWORK}.png", "", "")


if __name__ == "__main__":
    main()
