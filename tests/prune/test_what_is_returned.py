"""Outputs of every form that Python has: what cannot be looked into is not pruned, and what stays beside the output is told."""

import functools
import itertools
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.prune._tensors import tensors_in


@dataclass(slots=True)
class Slots:
    logits: torch.Tensor


class Private:
    __slots__ = ("__logits",)

    def __init__(self, logits):
        self.__logits = logits

    def get(self):
        return self.__logits


def answer(logits):
    return lambda factor: factor * logits


FORMS = {
    "slots": (Slots, lambda out: out.logits),
    "private slots": (Private, lambda out: out.get()),
    "beside a loss": (lambda y: (y.mean(), Slots(y)), lambda out: out[1].logits),
    "dict values": (lambda y: {"logits": y}.values(), lambda out: next(iter(out))),
    "deque": (lambda y: deque([y]), lambda out: out[0]),
    "frozenset": (lambda y: frozenset([y]), lambda out: next(iter(out))),
    "object": (lambda y: SimpleNamespace(of=[{"logits": y}]), lambda out: out.of[0]["logits"]),
    "closure": (answer, lambda out: out(1.0)),
    "partial": (lambda y: functools.partial(torch.mul, y), lambda out: out(1.0)),
    "array": (lambda y: y.detach().numpy(), torch.from_numpy),
    "array of objects": (lambda y: np.array([y, None], dtype=object), lambda out: out[0]),
    "list": (lambda y: y.tolist(), torch.tensor),
    "list beside a tensor": (lambda y: (y[:, :1], y.tolist()), lambda out: torch.tensor(out[1])),
}


class Named(Sequence):
    """Holds names; the tensors are in its attributes."""

    def __init__(self, logits):
        self.logits = logits

    def __getitem__(self, index):
        return ["first", "second"][index]

    def __len__(self):
        return 2


class Broken(Named):
    def __getitem__(self, index):
        raise RuntimeError("not like this")


FORMS |= {
    "sequence with attributes": (Named, lambda out: out.logits),
    "sequence that raises": (Broken, lambda out: out.logits),
    "items": (lambda y: [{"loss": y.sum()}.items(), {"logits": y}.items()], lambda out: dict(out[1])["logits"]),
    "method": (lambda y: Private(y).get, lambda out: out()),
    "default argument": (lambda y: lambda factor, y=y: factor * y, lambda out: out(1.0)),
    "array of another byte order": (lambda y: (y, y.detach().numpy().astype(">f4")), lambda out: out[0]),
    "counter": (lambda y: (y, itertools.count()), lambda out: out[0]),
}
UNSEEN = {
    "generator": (lambda y: (2 * part for part in [y]), lambda out: next(out) / 2, "iterator"),
    "zip": (lambda y: zip([y], strict=True), lambda out: next(out)[0], "iterator"),
    "classes": (lambda y: y.argmax(1).tolist(), torch.tensor, "no tensor is found in what the model returns (list)"),
    "text": (lambda y: str(y.tolist()), lambda out: torch.tensor(eval(out)), "no tensor"),
}


class Net(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.first, self.last, self.wrap = nn.Linear(8, 16), nn.Linear(16, 3), wrap

    def forward(self, x):
        return self.wrap(self.last(torch.relu(self.first(x))))


def dropped(wrap, units):
    """A converted network of which the first `units` hidden units are irrelevant."""
    torch.manual_seed(0)
    model = svdc.convert(Net(wrap), log_sigma2=-30.0).eval()
    with torch.no_grad():
        model.first.log_sigma2[:units] = 20.0
        model.first.weight[:units] = 1e-9
        model.first.bias[:units] = -1.0
    return model


@pytest.mark.parametrize("units", [0, 5])
@pytest.mark.parametrize("form", FORMS)
def test_outputs_of_all_forms_are_kept(form, units):
    wrap, get = FORMS[form]
    model, x = dropped(wrap, units), torch.randn(4, 8)
    small = svdc.prune(model, x)
    assert small.pruning.removed == units and small.last.weight.shape == (3, 16 - units) and not small.pruning.notes
    with torch.no_grad():
        hidden = torch.relu(torch.nn.functional.linear(x, model.first.weight, model.first.bias))
        expected = torch.nn.functional.linear(hidden * (torch.arange(16) >= units), model.last.weight, model.last.bias)
        torch.testing.assert_close(get(small(x)).float(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("form", UNSEEN)
def test_what_cannot_be_looked_into_is_left_whole(form):
    wrap, get, why = UNSEEN[form]
    model, x = dropped(wrap, 5), torch.randn(4, 8)
    small = svdc.prune(model, x)
    assert small.pruning.removed == 0 and small.first.weight.shape == (16, 8)
    assert any(why in note for note in small.pruning.notes)
    assert get(small(x)).shape == get(model(x)).shape


def test_a_time_that_was_measured_is_no_answer():
    import time

    begun = []
    for clock in (time.perf_counter, lambda: [time.perf_counter()], lambda: begun.append(time.time()) or list(begun)):
        small = svdc.prune(dropped(lambda y, clock=clock: {"logits": y, "seconds": clock()}, 5), torch.randn(4, 8))
        assert small.pruning.removed == 5 and small.pruning.max_error < 1e-5


class Aside(Net):
    """An auxiliary head whose answers a loss reads from an attribute, in one mode or in both."""

    def __init__(self, modes):
        super().__init__(lambda y: y)
        self.modes, self.aux, self.seen = modes, nn.Linear(16, 5), []

    def forward(self, x):
        if self.training in self.modes:
            self.logits = self.aux(torch.relu(self.first(x)))
            self.seen.append(self.logits)
        return super().forward(x)


@pytest.mark.parametrize("modes", [(True,), (False,), (True, False)])
@pytest.mark.parametrize("used", [False, True])  # the attributes then hold tensors of other sizes
def test_tensors_beside_the_output_are_told(modes, used):
    torch.manual_seed(0)
    model, x = svdc.convert(Aside(modes), log_sigma2=-30.0), torch.randn(2, 8)
    if used:
        model(torch.randn(7, 8)), model.eval()(torch.randn(7, 8))
    small = svdc.prune(model.eval(), x)
    assert small.aux.weight.shape[0] == 1
    (note,) = small.pruning.notes
    assert "beside its output, which were pruned" in note
    assert all(f"{name} (of shape (2, 5), now (2, 1))" in note for name in ("logits", "seen"))
    assert "prune.protect" in note
    whole = svdc.prune(model, x, protect=["aux"])
    assert whole.aux.weight.shape[0] == 5 and not whole.pruning.notes


class Locked(Net):
    def forward(self, x):
        self.lock, self.input = threading.Lock(), x  # the former cannot be copied
        return super().forward(x)


def test_what_cannot_be_copied_is_no_hindrance():
    torch.manual_seed(0)
    model = svdc.convert(Locked(lambda y: y), log_sigma2=-30.0).eval()
    with torch.no_grad():
        model.first.log_sigma2[:5], model.first.weight[:5], model.first.bias[:5] = 20.0, 1e-9, -1.0
    small = svdc.prune(model, torch.randn(4, 8))
    assert small.pruning.removed == 5 and not small.pruning.notes


class Remembers(Net):
    def forward(self, x):
        self.input = x
        return super().forward(x)


def test_an_input_that_was_cut_is_not_told_of():
    torch.manual_seed(0)
    model = svdc.convert(Remembers(lambda y: y), log_sigma2=-30.0).eval()
    with torch.no_grad():
        model.first.log_sigma2[:, :3], model.first.weight[:, :3] = 20.0, 1e-9
    small = svdc.prune(model, torch.randn(4, 8), remove_inputs=True)
    assert small.pruning.inputs_kept == [3, 4, 5, 6, 7] and not small.pruning.notes


@pytest.mark.parametrize("form", ["slots", "closure", "partial", "method", "default argument", "deque"])
def test_they_are_kept_without_verification(form):
    """As outputs that are seen before anything is removed, not because the check has put them back."""
    model = dropped(FORMS[form][0], 5)
    small = svdc.prune(model, torch.randn(4, 8), verify=False)
    assert small.pruning.removed == 5 and small.last.weight.shape == (3, 11)


def test_objects_that_are_made_on_the_way_are_not_mistaken_for_each_other():
    """Each pair of `items()` is a new tuple, in the memory of one that is gone."""
    assert len(tensors_in([{"a": torch.zeros(1)}.items() for _ in range(50)])) == 50
