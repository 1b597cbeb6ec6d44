"""The ridge regression against numpy's least squares with explicit rows for the ridge."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from svdcompress.reconstruction import RIDGES, solve


def by_hand(x: np.ndarray, y: np.ndarray, ridge: float, intercept: bool) -> tuple[np.ndarray, np.ndarray]:
    """Weight and bias by `lstsq`, with a penalty row for each weight; the column of ones has no penalty."""
    centred = x - x.mean(0) if intercept else x
    cost = np.sqrt(ridge * (centred**2).sum() / min(x.shape))
    rows = np.vstack([x, cost * np.eye(x.shape[1])])
    if intercept:
        rows = np.hstack([rows, np.concatenate([np.ones(len(x)), np.zeros(x.shape[1])])[:, None]])
    found = np.linalg.lstsq(rows, np.vstack([y, np.zeros((x.shape[1], y.shape[1]))]), rcond=None)[0]
    return found[: x.shape[1]].T, (found[-1] if intercept else np.zeros(y.shape[1]))


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("shape", [(200, 12), (30, 50)], ids=["more rows", "more inputs"])
def test_the_solution_and_its_ridge(shape: tuple[int, int], intercept: bool) -> None:
    generator = np.random.default_rng(0)
    rows, columns = shape
    held = rows // 5
    x = generator.normal(size=shape) @ generator.normal(size=(columns, columns)) + 2.0
    y = x @ generator.normal(size=(columns, 3)) * 0.1 + generator.normal(size=(rows, 3)) * 2 + 0.7
    found = solve(torch.from_numpy(x), torch.from_numpy(y), held, intercept=intercept)
    errors = {}
    for ridge in RIDGES:
        weight, bias = by_hand(x[:-held], y[:-held], ridge, intercept)
        errors[ridge] = ((y[-held:] - x[-held:] @ weight.T - bias) ** 2).sum()
    assert found.ridge == min(errors, key=errors.__getitem__)
    assert found.after == pytest.approx(min(errors.values()), rel=1e-6)
    assert found.before == pytest.approx((y[-held:] ** 2).sum(), rel=1e-9) and found.after < found.before
    weight, bias = by_hand(x, y, found.ridge or 0.0, intercept)  # with all rows
    assert np.allclose(found.change.numpy(), weight, atol=1e-6) and np.allclose(found.shift.numpy(), bias, atol=1e-6)


def test_what_is_only_noise_changes_nothing() -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(60, n, generator=generator, dtype=torch.float64) for n in (40, 2))
    found = solve(x, y - y.mean(0), 30, intercept=False)
    assert found.ridge is None and not found.change.any() and not found.shift.any() and found.after == found.before


def test_a_bias_alone_is_mended_where_inputs_say_nothing() -> None:
    x = torch.zeros(50, 4, dtype=torch.float64)
    found = solve(x, torch.full((50, 2), 3.0, dtype=torch.float64), 10, intercept=True)
    assert not found.change.any() and torch.allclose(found.shift, torch.full((2,), 3.0, dtype=torch.float64))
    assert found.after == pytest.approx(0) and found.before == pytest.approx(180)
    still = solve(x, torch.full((50, 2), 3.0, dtype=torch.float64), 10, intercept=False)
    assert not still.change.any() and not still.shift.any() and still.after == still.before


@pytest.mark.parametrize("shape", [(512, 2000), (1000, 20)], ids=["more inputs", "more rows"])
@pytest.mark.parametrize("offset", [1.0, 100.0])
def test_inputs_far_from_zero(shape: tuple[int, int], offset: float) -> None:
    generator = torch.Generator().manual_seed(4)
    x = offset + 0.03 * torch.randn(shape[0], 10, generator=generator) @ torch.randn(10, shape[1], generator=generator)
    y = (x.double() - offset) @ torch.randn(shape[1], 2, generator=generator, dtype=torch.float64)
    found = solve(x, y, shape[0] // 5, intercept=True)
    assert found.ridge is not None and found.after < 0.01 * found.before
    constant = solve(x[:1].expand(shape).contiguous(), y, shape[0] // 5, intercept=True)
    assert constant.ridge is None and not constant.change.any()
