"""An invented but realistic run, with every key that the report knows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest


def sample_results(layers: int = 3) -> dict[str, Any]:
    """Results as of a run of LeNet-300-100; with `layers` above nine, the histograms become a heat map."""
    random = np.random.default_rng(0)
    names = ["fc1", "fc2", "head"] if layers == 3 else [f"encoder.block{k}.attention.output" for k in range(layers)]
    return {
        "name": "mnist-lenet300",
        "created": "2026-11-21T09:30:12+00:00",
        "description": "LeNet-300-100 on MNIST.",
        "seed": 0,
        "device": "cpu (2 cores)",
        "threshold": 3.0,
        "threads": 1,
        "versions": {"svdcompress": "0.1.0", "torch": "2.13.0", "onnxruntime": "1.31.1", "python": "3.11.7"},
        "seconds": {
            "data": 0.8,
            "dense": 61.2,
            "fine_tune": 213.0,
            "prune": 0.9,
            "recover": 20.4,
            "export": 6.1,
            "evaluate": 4.0,
        },
        "warnings": ["beta = 1 with N = 60,000 prunes hard"],
        "dense": {
            "metrics": {"error": 1.64, "nll": 0.0613, "ece": 0.0091},
            "parameters": 266_610,
            "nonzero": 266_610,
            "weights": 266_200,
            "weights_nonzero": 266_200,
            "bytes": 1_068_920,
            "macs": 266_200,
            "latency_ms": {"batch_1": 0.0332, "batch_128": 0.912},
        },
        "sparse": {
            "metrics": {"error": 1.83, "nll": 0.0592, "ece": 0.0052},
            "parameters": 25_912,
            "nonzero": 3_312,
            "weights": 25_800,
            "weights_nonzero": 3_161,
            "bytes": 106_204,
            "macs": 25_800,
            "latency_ms": {"batch_1": 0.0091, "batch_128": 0.131},
        },
        "compression": {
            "parameters": 10.29,
            "nonzero": 80.5,
            "weights_nonzero": 84.2,
            "bytes": 10.06,
            "macs": 10.3,
            "latency": {"batch_1": 3.65, "batch_128": 6.96},
        },
        "changes": {"error": {"low": 0.05, "high": 0.33}, "nll": {"low": -0.0049, "high": 0.0007}},
        "examples": {"train": 55_000, "validation": 5000, "test": 10_000},
        "layers": [
            {"name": name, "shape_before": [300, 784], "shape_after": [32, 611], "sparsity": 0.988 - 0.03 * k}
            for k, name in enumerate(names)
        ],
        "parity": {"model.onnx": 2.4e-7, "model_mc.onnx": 4.1e-6},
        "history": _history(),
        "log_alpha": {name: _histogram(random, 0.7 + 0.01 * k) for k, name in enumerate(names)},
        "threshold_curve": [
            {
                "threshold": t,
                "error": 1.8 + 0.02 * (t - 3) ** 2,
                "nll": 0.06 + 0.001 * (t - 3) ** 2,
                "nonzero": 900 * math.exp(t / 3),
            }
            for t in np.linspace(-2, 8, 21).tolist()
        ],
        "calibration": {
            "dense": _bins(0.05, 0.0091),
            "sparse, mean": _bins(0.03, 0.0071),
            "sparse, 100 samples": _bins(-0.01, 0.0052),
        },
        "uncertainty": {
            "dense": {"error": 1.64, "nll": 0.0613, "ece": 0.0091, "brier": 0.026, "ood_auroc_entropy": 0.981},
            "dense, temperature": {"error": 1.64, "nll": 0.0560, "ece": 0.0040, "brier": 0.025, "ood_auroc_entropy": 0.982},
            "sparse, 100 samples": {"error": 1.80, "nll": 0.0561, "ece": 0.0052, "brier": 0.026, "ood_auroc_mi": 0.989},
        },
        "pruning": {
            "groups": [
                {"name": "fc1", "removed": 268, "kept": 32, "reason": ""},
                {"name": "fc2", "removed": 81, "kept": 19, "reason": "a residual sum joins it with fc1 <and others>"},
            ],
            "inputs_kept": None,
            "max_error": 3.1e-6,
            "seconds": 0.4,
        },
        "filters": {
            "fc1": {
                "before": random.normal(size=(24, 49)).round(3).tolist(),
                "after": (random.normal(size=(24, 49)) * (random.random((24, 49)) < 0.1)).round(3).tolist(),
            }
        },
        "recipe": "model: {name: lenet300}\ndata: idx:../data/mnist\ntrain:\n  epochs: 60  # <not> a tag\n",
    }


def _history() -> list[dict[str, Any]]:
    entries = []
    for epoch in range(10):
        entries.append(
            {"stage": "dense", "epoch": epoch, "nll": 0.4 * 0.6**epoch + 0.01, "val_error": 6 * 0.7**epoch + 1.7, "lr": 1e-3}
        )
    for epoch in range(50):
        beta = min(max(epoch - 5, 0) / 15, 1.0)
        entries.append(
            {
                "stage": "fine-tune",
                "epoch": epoch,
                "loss": 0.3,
                "nll": 0.02 + 0.03 * beta + 0.002 * math.sin(epoch),
                "kl": 1.3e6 * math.exp(-epoch / 14) + 12_000,
                "beta": beta,
                "sparsity": 0.988 / (1 + math.exp(-(epoch - 20) / 4)),
                "val_error": 1.7 + 0.2 * beta,
                "lr": 1e-3 * (1 - epoch / 50),
            }
        )
    for epoch in range(5):
        entries.append(
            {"stage": "recover", "epoch": epoch, "nll": 0.045, "kl": 11_000, "beta": 1.0, "sparsity": 0.988, "val_error": 1.8}
        )
    return entries


def _histogram(random: np.random.Generator, dead: float) -> dict[str, Any]:
    n = 100_000
    values = np.concatenate([random.normal(6.5, 0.8, int(n * dead)), random.normal(-3, 2.2, n - int(n * dead))])
    counts, edges = np.histogram(values.clip(-10, 10), bins=50, range=(-10, 10))
    return {"edges": edges.tolist(), "counts": counts.tolist(), "threshold": 3.0}


def _bins(gap: float, ece: float) -> dict[str, Any]:
    confidence = [(k + 0.5) / 15 for k in range(15)]
    return {
        "confidence": confidence,
        "accuracy": [None if c < 0.2 else min(max(c - gap * 4 * c * (1 - c), 0), 1) for c in confidence],
        "count": [0 if c < 0.2 else int(20 + 9000 * c**12) for c in confidence],
        "ece": ece,
    }


@pytest.fixture(scope="session")
def sample() -> Callable[..., dict[str, Any]]:
    """The function that makes these results, for fixtures of a wider scope."""
    return sample_results


@pytest.fixture
def results() -> dict[str, Any]:
    """A fresh copy for each test."""
    return sample_results()
