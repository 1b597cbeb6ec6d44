"""How conversion treats a model that could not be trained as it is: half-precision weights, a multi-GPU wrapper."""

from __future__ import annotations

import copy
import gc
import warnings

import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.errors import ModelError


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_log_variances_in_half_precision_are_told_of_once(dtype):
    name = str(dtype).removeprefix("torch.")
    with pytest.warns(UserWarning, match=rf"cannot be trained in {name}, .*\(0, 2\).*model\.float\(\)") as found:
        svdc.convert(net().to(dtype))
    assert len(found) == 1 and found[0].filename == __file__
    mixed = net()
    mixed[2].to(dtype)
    with pytest.warns(UserWarning, match=r"\(2\)"):
        svdc.convert(copy.deepcopy(mixed))
    frozen = net().to(dtype).requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        svdc.convert(mixed, exclude=["2"])
        svdc.convert(frozen)
        svdc.convert(net().to(dtype).float())
        svdc.convert(net().double())


@pytest.fixture
def alone(tmp_path):
    """A process group of one."""
    distributed = torch.distributed
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    gc.collect()  # wrapped models are cycles; freed later, as the last to hold the group, they wait for its thread with the GIL
    distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="a torch without distributed training")
@pytest.mark.parametrize("inside", [False, True])
def test_a_wrapped_model_is_refused(alone, inside):
    wrapped = nn.parallel.DistributedDataParallel(net())
    model = nn.ModuleDict({"body": wrapped}) if inside else wrapped
    with pytest.raises(ModelError, match=r"wrapped in DistributedDataParallel.*convert\(model\) first") as error:
        svdc.convert(model)
    assert ("(body)" in str(error.value)) is inside
    assert not list(svdc.layers.variational_layers(model))
    wrapped = nn.parallel.DistributedDataParallel(svdc.convert(net()))
    assert svdc.convert(wrapped) is wrapped  # nothing left to convert
    assert list(svdc.layers.variational_layers(svdc.convert(nn.DataParallel(net()))))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="a torch without distributed training")
def test_a_divided_model_is_refused(alone):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    with pytest.raises(ModelError, match="wrapped in FSDPModule"):
        svdc.convert(fsdp.fully_shard(net(), mesh=mesh))


def test_log_variances_train_under_autocast():
    """The remedy that the warning names."""
    model = svdc.convert(net().bfloat16().float())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    elbo = svdc.ELBO(model, nn.CrossEntropyLoss(), num_examples=8)
    with torch.autocast("cpu", torch.bfloat16):
        loss = elbo(model(torch.randn(8, 6)), torch.arange(8) % 3)
    loss.backward()
    optimizer.step()
    assert all((layer.log_sigma2 != -10).all() for _, layer in svdc.layers.variational_layers(model))


def test_log_variances_that_are_cast_to_half_precision_later_are_told_of_by_the_first_loss():
    model = svdc.convert(net()).bfloat16()
    x, y = torch.randn(8, 6, dtype=torch.bfloat16), torch.arange(8) % 3
    elbo = svdc.ELBO(model, nn.CrossEntropyLoss(), num_examples=8)
    with pytest.warns(UserWarning, match=r"cannot be trained in bfloat16, .*\(0, 2\).*model\.float\(\)") as found:
        for _ in range(2):
            elbo(model(x), y).backward()
    assert len(found) == 1 and found[0].filename == __file__


@pytest.mark.parametrize("posterior", ["independent", "rank-one"])
def test_a_model_that_is_converted_in_inference_mode_can_be_trained(posterior):
    model = net()
    with torch.inference_mode():
        svdc.convert(model, posterior=posterior)
        inner = svdc.convert(net(), posterior=posterior)  # created in inference mode too
        assert not inner[0].variance_moved and torch.isfinite(inner(torch.randn(2, 6))).all()
    optimizer = torch.optim.Adam(model.parameters())
    svdc.ELBO(model, nn.CrossEntropyLoss(), num_examples=8)(model(torch.randn(8, 6)), torch.arange(8) % 3).backward()
    optimizer.step()
    assert all(layer.variance_stepped for _, layer in svdc.layers.variational_layers(model))
