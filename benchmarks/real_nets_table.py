"""The table of real_nets.py: a section for each network, with each net's sizes and figures and how ours differs."""

from __future__ import annotations

import json
from typing import Any

import torch
from real_table import asked, distilled, optimizers, within

from svdcompress.uncertainty import paired_means

DIFFERENCE = "{0[0]:+.3f} [{0[1]:+.3f}, {0[2]:+.3f}]"
"""A difference with its 95% interval."""

SIZES = {"macs": "MACs", "parameters": "parameters", "nonzero": "non-zeros"}
"""Sizes, given as how many times smaller than the dense start's."""

COLUMNS = {
    "r2": ("R2", "{:.3f}"),
    "r2_ahead": ("ours less this, R2", DIFFERENCE),
    "spearman": ("rank corr. of deviation and error", "{:.2f}"),
    "spearman_ahead": ("ours less this, rank corr.", DIFFERENCE),
    "coverage": ("coverage of the 90% interval", "{:.1%}"),
    "coverage_ahead": ("ours less this, coverage", DIFFERENCE),
    "nll": ("negative log likelihood", "{:.2f}"),
    "nll_ahead": ("ours less this, NLL", DIFFERENCE),
    "width": ("its width (yield)", "{:.2f}"),
    "agreement": ("agrees with full: all", "{:.1%}"),
    "agreement_tones": ("tones", "{:.1%}"),
    "agreement_speech": ("speech", "{:.1%}"),
    "accuracy_tones": ("tones within 50 cents", "{:.1%}"),
    "gap": ("of the gap from tiny to full", "{:.0%}"),
    "frame_ms": ("ms a frame", "{:.1f}"),
    "psnr": ("PSNR on BSD68, dB", "{:.2f}"),
    "faster": ("times as fast in onnxruntime, by batch", "{}"),
    "ahead": ("ours less this, dB", DIFFERENCE),
}


def table(results: dict[str, Any]) -> str:
    """Markdown: a section for each network."""
    lines = [
        "# A BERT of reactions, CREPE and DnCNN",
        "",
        "Written by `benchmarks/real_nets.py`, which says how each row is made.",
        "",
    ]
    for name, one in results.items():
        made, nets = one["setting"], one["nets"]
        if "tiny" in nets and nets["tiny"]["agreement"] < 1:
            for net in nets.values():
                if "agreement" in net:
                    net["gap"] = 1 - (1 - net["agreement"]) / (1 - nets["tiny"]["agreement"])
        if "images" in nets.get("ours", {}):
            ours = torch.tensor(nets["ours"]["images"])
            for net in nets.values():
                if net is not nets["ours"] and "images" in net:
                    less = ours - torch.tensor(net["images"])
                    net["ahead"] = [float(less.mean()), *paired_means(less)]
        dense = nets.get("dense start", {}).get("latency_ms") or {}
        for net in (net for label, net in nets.items() if label != "dense start"):
            if (took := net.get("latency_ms")) and dense:
                net["faster"] = ", ".join(f"{key.removeprefix('batch_')}: {dense[key] / took[key]:.2f}x" for key in took)
        columns = [key for key in COLUMNS if any(key in net for net in nets.values())]
        lines += [f"## {name}", "", f"Beside: {one['anchor']}.", ""]
        lines += [
            f"- `{asked(made['goal'])}`, {made['trials']} trial(s), {made['levels']} level(s); dense epochs {made['dense']}"
            f"{', those of ' + made['dense_of'] if 'dense_of' in made else ''}"
        ]
        if "budget" in nets.get("ours", {}):
            unit = " points" if name.startswith("crepe") else "% of the dense network's RMSE"
            lines += [f"- {within(nets['ours']['budget'], unit, 'validation examples')}"]
        precision = made["precision"].replace("no", "float32")
        lines += [f"- {one['epochs']} epochs from there for each row but the starts; {optimizers(made)}, {precision}"]
        lines += [f"- data {json.dumps(made['data'])}: {json.dumps(made['examples'])}; seed {made['seed']}"]
        if made.get("norms") == "keep":
            lines += ["- batch normalisation keeps its running statistics in recovery, every row (`recover.norms=keep`)"]
        if made.get("dropout") == "draw":
            lines += ["- our network's own dropout draws beside its weights (`convert.dropout=draw`)"]
        if (how := made.get("recover_dropout", "on")) != "on":
            lines += [f"- dropout in recovery, ours and that of all others that train: {how}"]
        shared = f", {distilled(one['nets'])}" if made["distill"] and "recovery" in made else ""
        lines += [f"- distillation {made['distill']:g}{shared}{'' if 'loss' not in made else ', loss ' + made['loss']}"]
        if layers := made.get("layers"):
            lines += [
                f"- ours alone: {layers:g} times the error of the layers' outputs, falling to 0 (`recover.distill.layers`)"
            ]
        lines += [f"- {made['device']}, {one['machine'].get('cpu')}, {made['threads']} thread(s), beside other work"]
        lines += [f"- {', '.join(f'{key} {value}' for key, value in made['versions'].items())}", ""]
        sizes = [key for key in SIZES if any(key in net for net in nets.values())]
        head = ["net", *(SIZES[key] for key in sizes), *(COLUMNS[key][0] for key in columns), "wall-clock"]
        lines += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
        base = nets["dense start"] if "dense start" in nets else nets["ours"]
        for label, net in nets.items():
            if "failed" in net:
                lines.append(f"| {label} | failed: {net['failed']} |" + " |" * (len(head) - 2))
                continue
            cells = [label, *(f"{base.get(key, base['parameters']) / net[key]:.2f}x" if key in net else "" for key in sizes)]
            cells += [COLUMNS[key][1].format(net[key]) if net.get(key) is not None else "" for key in columns]
            lines.append(f"| {' | '.join([*cells, '%.0f min' % (net['seconds'] / 60) if 'seconds' in net else ''])} |")
        lines.append("")
    return "\n".join(lines)
