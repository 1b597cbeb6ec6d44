"""Where a run takes place: missing devices, and launches that divide the weights."""

import os
import pickle

import pytest
import torch

from svdcompress.errors import TrainingError, UsageError
from svdcompress.train import find_place, make_accelerator, resolved_precision


@pytest.mark.parametrize(
    ("device", "said"), [("gpu", "unknown 'gpu'"), ("cuda:99", "is not available"), ("xpu", "not available")]
)
def test_a_device_that_is_not_there_is_named(device, said):
    with pytest.raises(UsageError, match=said):
        find_place(device)


@pytest.mark.parametrize("variable", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM"])
def test_launches_that_divide_the_weights_are_refused(monkeypatch, variable):
    monkeypatch.setenv(variable, "true")
    with pytest.raises(UsageError, match="divides the weights among processes"):
        find_place("cpu")
    monkeypatch.setenv(variable, "false")
    assert find_place("cpu").first


def test_half_precision_needs_a_device_that_has_it():
    with pytest.raises(TrainingError, match=r"train\.precision: fp16 needs a CUDA device"):
        make_accelerator("cpu", "fp16")


@pytest.mark.parametrize(("fast", "wanted"), [(True, "bf16"), (False, "no")])
def test_precision_follows_the_chip(monkeypatch, fast, wanted):
    monkeypatch.setattr("svdcompress.layers._precision._FAST_CPU", fast)
    assert make_accelerator("cpu", "auto").mixed_precision == wanted == resolved_precision("auto", "cpu")
    assert [make_accelerator("cpu", asked).mixed_precision for asked in ("no", "bf16")] == ["no", "bf16"]


@pytest.mark.parametrize(("major", "wanted"), [(7, "no"), (8, "bf16"), (9, "bf16")])
def test_precision_follows_the_generation_of_a_gpu(monkeypatch, major, wanted):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("Properties", (), {"major": major}))
    assert resolved_precision("auto") == resolved_precision("auto", "cuda:1") == wanted


def test_names_of_before_warn_and_work():
    import svdcompress.train as train

    with pytest.deprecated_call(match=r"svdcompress\.train\.told is now broadcast"):
        assert train.told is train.broadcast
    with pytest.deprecated_call(match=r"agree is now broadcast_weights"):
        assert train.agree is train.broadcast_weights
    with pytest.raises(AttributeError, match="no attribute 'nobody'"):
        train.nobody  # noqa: B018


def test_an_accelerator_of_the_callers_is_as_it_was_after_a_fit(monkeypatch):
    """accelerate keeps its state once per process: ours would leak into the caller's loop and onto their next device."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from svdcompress.recipe import TrainSection
    from svdcompress.sources import InMemory
    from svdcompress.train import fit

    monkeypatch.delenv("ACCELERATE_TORCH_DEVICE", raising=False)
    AcceleratorState._reset_state(reset_partial_state=True)
    own = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    examples, model = InMemory(torch.rand(8, 4), torch.zeros(8, dtype=torch.long)), torch.nn.Linear(4, 2)
    fit(model, examples, torch.nn.functional.cross_entropy, TrainSection(epochs=1), stage="train", device="cpu")
    assert (own.mixed_precision, own.gradient_accumulation_steps, own.device.type) == ("bf16", 2, "cpu")
    with own.accumulate(model):
        assert not own.sync_gradients  # the first of two
    AcceleratorState._reset_state(reset_partial_state=True)
    find_place("cpu")
    assert "ACCELERATE_TORCH_DEVICE" not in os.environ and not AcceleratorState._shared_state


def test_every_error_reaches_the_other_processes():
    """An error of the first process is pickled for them: its class must be made from its message alone."""
    from svdcompress import errors
    from svdcompress.train import NotFinite

    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.SvdcError)]
    for kind in [*kinds, NotFinite]:
        found = pickle.loads(pickle.dumps(kind("what to do")))
        assert type(found) is kind and str(found) == "what to do"
    error = pickle.loads(pickle.dumps(NotFinite("nan", "train", "level 2", where="at step 3", rate=0.1)))
    assert (error.stage, error.section, error.where, error.rate) == ("train", "level 2", "at step 3", 0.1)
