"""Where a run takes place: devices that are not there, and launches that divide the weights."""

import pytest

from svdcompress.errors import TrainingError, UsageError
from svdcompress.train import find_place, make_accelerator


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


def test_names_of_before_warn_and_work():
    import svdcompress.train as train

    with pytest.deprecated_call(match=r"svdcompress\.train\.told is now broadcast"):
        assert train.told is train.broadcast
    with pytest.deprecated_call(match=r"agree is now broadcast_weights"):
        assert train.agree is train.broadcast_weights
    with pytest.raises(AttributeError, match="no attribute 'nobody'"):
        train.nobody  # noqa: B018
