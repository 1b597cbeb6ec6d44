"""What discovery, surgery and verification cost on networks of real size: seconds and memory of one `svdc.prune`.

    python benchmarks/prune_cost.py [--only resnet-50 vit-b bert-base]

Each network (default configuration of transformers, random weights, random masks with 40% dead rows) is pruned in a process
of its own. `added` is the peak of the process's resident memory during `prune` minus what was resident before it, when torch,
the variational model and its masks were already loaded: the copies that pruning works on, the result, and what the passes
need. Goals: ResNet-50 in 10 s, ViT-B and BERT-base in 20 s, on two cores; 2 GB. Results go to
benchmarks/results/prune_cost.json and prune_cost.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from speed import RESULTS, machine
from torch import Tensor, nn

import svdcompress as svdc
from svdcompress.layers import variational_layers

NETWORKS = {
    "resnet-50": ("ResNetForImageClassification", "ResNetConfig", 10),
    "vit-b": ("ViTForImageClassification", "ViTConfig", 20),
    "bert-base": ("BertForSequenceClassification", "BertConfig", 20),
}
"""{name: (model, configuration, goal in seconds)}."""


def network(name: str) -> tuple[nn.Module, Any]:
    """A variational network with biases and norm statistics that are neither 0 nor 1, and two examples."""
    import transformers

    kind, config, _ = NETWORKS[name]
    model = getattr(transformers, kind)(getattr(transformers, config)()).eval()
    for module in model.modules():
        if isinstance(getattr(module, "bias", None), nn.Parameter):
            nn.init.normal_(module.bias, std=0.5)
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.3)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)
    if name == "bert-base":
        inputs: Any = {"input_ids": torch.randint(5, 999, (2, 128)), "attention_mask": torch.ones(2, 128, dtype=torch.long)}
    else:
        inputs = torch.randn(2, 3, 224, 224)
    return svdc.convert(model), inputs


def random_masks(model: nn.Module) -> dict[str, Tensor]:
    """Masks without a random fifth of the weights, 40% of the rows and a fifth of the columns."""
    masks = {}
    for name, layer in variational_layers(model):
        groups, outs, ins, positions = layer.canonical(layer.weight).shape
        keep = torch.rand(groups, outs, ins, positions) >= 0.2
        keep &= torch.rand(groups, outs, 1, 1) >= 0.4
        keep &= torch.rand(groups, 1, ins, 1) >= 0.2
        masks[name] = keep.reshape(layer.weight.shape)
    return masks


def resident(key: str) -> int:
    """Resident bytes of this process: "VmRSS" now, "VmHWM" the peak since the mark was last reset (Linux)."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)]
    return int(line.split()[1]) * 1024


def one(name: str) -> dict[str, Any]:
    """The figures of one network, measured in this process."""
    torch.set_num_threads(2)
    torch.manual_seed(0)
    model, inputs = network(name)
    masks = random_masks(model)
    own = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
    with torch.no_grad():
        from svdcompress.batch import call

        call(model, inputs)  # so that what torch sets up on the first pass is not counted
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark to what is resident now
    before, wall, cpu = resident("VmRSS"), time.perf_counter(), time.process_time()
    small = svdc.prune(model, inputs, masks=masks)
    wall, cpu, peak = time.perf_counter() - wall, time.process_time() - cpu, resident("VmHWM")
    report = small.pruning
    return {
        "name": name,
        "parameters_before": report.parameters_before,
        "parameters_after": report.parameters_after,
        "max_error": report.max_error,
        "notes": report.notes,
        "wall_s": wall,
        "cpu_s": cpu,
        "model_bytes": own,
        "added_bytes": peak - before,
        "peak_bytes": peak,
    }


def table(results: dict[str, Any]) -> str:
    """The figures as Markdown."""
    where = results["machine"]
    lines = [
        "# What one `svdc.prune` costs",
        "",
        f"{where['cpu']}, {where['cores']} cores, two threads, load {results['load']:.1f}; torch {where['versions']['torch']}; "
        "float32, random masks (40% dead rows), two examples.",
        "",
        "`model`: means and log variances. `added`: peak resident memory while pruning, less what was resident before (torch,",
        "model and masks): the dense copy that is traced and compared with, the pruned model, and the forward passes.",
        "`process`: all of it. The wall time holds what else ran on the machine; the CPU time of both threads bounds it from",
        "above on an idle one.",
        "",
        "| network | parameters | wall s | CPU s | goal s | model GB | added GB | process GB | largest difference |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        lines.append(
            f"| {row['name']} | {row['parameters_before'] / 1e6:.1f} M to {row['parameters_after'] / 1e6:.1f} M | "
            f"{row['wall_s']:.1f} | {row['cpu_s']:.1f} | {NETWORKS[row['name']][2]} | {row['model_bytes'] / 1e9:.2f} | "
            f"{row['added_bytes'] / 1e9:.2f} | {row['peak_bytes'] / 1e9:.2f} | {row['max_error']:.1e} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--one", choices=NETWORKS, help="measure this one in this process and print its figures as JSON")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(one(arguments.one)))
        return
    rows = []
    for name in arguments.only:
        command = [sys.executable, __file__, "--one", name]
        rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]))
        print(rows[-1])
    results = {"machine": machine(), "load": os.getloadavg()[0], "rows": rows}
    (RESULTS / "prune_cost.json").write_text(json.dumps(results, indent=1) + "\n")
    (RESULTS / "prune_cost.md").write_text(table(results))


if __name__ == "__main__":
    main()
