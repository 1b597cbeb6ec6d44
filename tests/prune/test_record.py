"""The record of surgery: it lists exactly what changed, and it survives JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from masking import random_masks, shake
from torch import nn
from zoo_models import ZOO

from svdcompress.convert import convert
from svdcompress.prune import prune
from svdcompress.prune._record import Selection, Surgery


def _integers(module: nn.Module) -> dict[str, Any]:
    """The oracle: every integer, or sequence of integers, in a module."""
    found = {}
    for name, value in vars(module).items():
        row = isinstance(value, tuple | list) and value and all(type(part) is int for part in value)
        if type(value) is int or row:
            found[name] = list(value) if row else value
    return found


@pytest.mark.parametrize("name", ["mlp", "vgg-bn", "resnet-basic", "mobilenet-v3", "timm-vit", "hf-bert", "gated-mlp"])
def test_the_record_is_what_changed(name):
    torch.manual_seed(0)
    factory, inputs = ZOO[name]
    model = convert(shake(factory()).eval())
    small: Any = prune(model, inputs(), masks=random_masks(model))
    before, after = dict(model.named_modules()), dict(small.named_modules())
    changed = {}
    for own, module in after.items():
        old = _integers(before[own])
        new = {key: value for key, value in _integers(module).items() if old.get(key) != value}
        if new:
            changed[own] = new
    assert changed and small.surgery["attributes"] == changed
    assert list(small.surgery["attributes"]) == [own for own in after if own in changed]
    tensors, old = dict(small.named_parameters()), dict(model.named_parameters())
    shapes = {
        key: list(t.shape)
        for key, t in tensors.items()
        if "log_sigma2" not in key and (key not in old or old[key].shape != t.shape)
    }
    assert {key: shape for key, shape in small.surgery["shapes"].items() if key in tensors} == shapes


def test_json_and_back():
    record = Surgery(
        {"net.0": {"out_features": 3, "shape": [1, 3]}},
        {"net.0.weight": [3, 4]},
        {"cut": Selection(1, [0, 2])},
        Selection(1, [5]),
    )
    told = json.loads(json.dumps(record.to_dict()))
    assert told == {
        "attributes": {"net.0": {"out_features": 3, "shape": [1, 3]}},
        "shapes": {"net.0.weight": [3, 4]},
        "kept": {"cut": {"dim": 1, "kept": [0, 2]}},
        "inputs": {"kept": [5], "dim": 1},
    }
    assert Surgery.from_dict(told) == record
    assert Surgery.from_dict({}).to_dict() == {"attributes": {}, "shapes": {}}


def test_one_after_the_other():
    first = Surgery(
        {"a": {"width": 8, "heads": 4}}, {"a.weight": [8]}, {"a": Selection(1, [0, 1, 3])}, Selection(1, [0, 3, 4, 7])
    )
    second = Surgery(
        {"a": {"width": 6}, "b": {"width": 2}}, {"a.weight": [6]}, {"a": Selection(1, [0, 3])}, Selection(1, [1, 3])
    )
    both = first.then(second)
    assert both.attributes == {"a": {"width": 6, "heads": 4}, "b": {"width": 2}} and both.shapes == {"a.weight": [6]}
    assert both.kept == {"a": Selection(1, [0, 3])}
    assert both.inputs == Selection(1, [3, 7])
    assert first.attributes == {"a": {"width": 8, "heads": 4}}
    assert first.then(Surgery()) == first


def test_setting_what_it_is_already_is_no_change():
    model = nn.Sequential(nn.Linear(4, 3))
    record = Surgery()
    record.set(model, "0", "out_features", 3)
    assert record.attributes == {}
    record.set(model, "0", "out_features", 2)
    assert record.attributes == {"0": {"out_features": 2}} and model[0].out_features == 2
