"""Fixtures of the uncertainty tests."""

import pytest
import torch
from small_models import mlp, widen

import svdcompress as svdc


@pytest.fixture
def classifier():
    return widen(svdc.convert(mlp(4, 6, 3)))


@pytest.fixture
def x():
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(3))
