"""Corruptions against scipy's, and what they leave unchanged."""

import numpy as np
import pytest
import torch

from svdcompress.uncertainty import LEVELS, shifts
from svdcompress.uncertainty._shift import blur, contrast, occlusion, rotation

ndimage = pytest.importorskip("scipy.ndimage")


def batches_of(x, size=5):
    cut = lambda k: {n: v[k : k + size] for n, v in x.items()} if isinstance(x, dict) else x[k : k + size]  # noqa: E731
    count = len(next(iter(x.values())) if isinstance(x, dict) else x)
    return lambda: ((cut(k), torch.zeros(min(size, count - k))) for k in range(0, count, size))


def all_of(batches):
    return torch.cat([part for part, _ in batches()])


def images(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_blur_is_scipys():
    x = images(2, 3, 12, 20)
    got = blur(x, 0.1)
    sigma = (0, 0, 1.2, 2.0)  # a tenth of each side
    want = ndimage.gaussian_filter(x.numpy(), sigma, mode="nearest", radius=(0, 0, 4, 6))
    np.testing.assert_allclose(got.numpy(), want, atol=1e-9)


@pytest.mark.parametrize("shape", [(9, 9), (11, 17)])
def test_rotation_is_scipys(shape):
    x = images(6, 1, *shape)
    got = rotation(x, 30.0, torch.Generator().manual_seed(0))
    sides = []
    for before, after in zip(x, got, strict=True):
        turned = {
            side: ndimage.rotate(before[0].numpy(), side * 30.0, reshape=False, order=1, mode="nearest") for side in (1, -1)
        }
        fitting = [side for side, want in turned.items() if np.allclose(after[0].numpy(), want, atol=1e-6)]
        assert len(fitting) == 1
        sides += fitting
    assert set(sides) == {1, -1}


def test_contrast_keeps_the_mean():
    x = images(4, 3, 6, 6)
    got = contrast(x, 0.25)
    torch.testing.assert_close(got.mean((1, 2, 3)), x.mean((1, 2, 3)))
    torch.testing.assert_close(got.flatten(1).std(1), 0.25 * x.flatten(1).std(1))


def test_occlusion_hides_one_rectangle():
    x = images(50, 2, 10, 20)
    got = occlusion(x, 0.3, torch.Generator().manual_seed(0), -7.0)
    hidden = got == -7.0
    assert torch.equal(hidden[:, 0], hidden[:, 1]) and torch.equal(got[~hidden], x[~hidden])
    places = set()
    for mask in hidden[:, 0]:
        rows, columns = mask.any(1).nonzero().flatten(), mask.any(0).nonzero().flatten()
        assert len(rows) == 3 and len(columns) == 6 and int(mask.sum()) == 18
        places.add((int(rows[0]), int(columns[0])))
    assert len(places) > 25


def test_images_have_five_kinds_at_five_levels_and_repeat():
    x = images(12, 1, 8, 8).float() * 3 - 1
    found = shifts(batches_of(x))
    assert list(found) == ["blur", "noise", "contrast", "rotation", "occlusion"]
    for kind, levels in found.items():
        assert len(levels) == 6 and torch.equal(all_of(levels[0]), x)
        distance = [float((all_of(batches) - x).square().mean()) for batches in levels]
        assert distance == sorted(distance) and distance[1] > 0, kind
        assert torch.equal(all_of(levels[3]), all_of(levels[3]))
        assert all_of(levels[5]).min() >= x.min() - 1e-5 and all_of(levels[5]).max() <= x.max() + 1e-5
    noisy = all_of(found["noise"][1])
    inside = (noisy > x.min()) & (noisy < x.max())  # values clipped at the ends of the range have less noise
    assert float((noisy - x)[inside].std()) == pytest.approx(0.05 * float(x.max() - x.min()), rel=0.15)


def test_images_laid_flat_are_images_if_their_shape_is_known():
    x = images(10, 1, 6, 6).float()
    flat = shifts(batches_of(x.flatten(1)), image_shape=[1, 6, 6])
    square = shifts(batches_of(x))
    for kind in square:
        torch.testing.assert_close(all_of(flat[kind][4]), all_of(square[kind][4]).flatten(1))
    assert set(shifts(batches_of(x.flatten(1)), image_shape=[36])) == {"noisy values", "missing values"}


def test_columns_have_noise_of_their_own_size_or_lose_values():
    x = torch.randn(4000, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 10.0, 0.0]) + 5
    found = shifts(batches_of(x, 400), limit=10_000)
    for level, size in enumerate(LEVELS["noisy values"], 1):
        spread = (all_of(found["noisy values"][level]) - x).std(0)
        torch.testing.assert_close(spread, size * x.std(0), rtol=0.06, atol=1e-6)
    for level, share in enumerate(LEVELS["missing values"], 1):
        got = all_of(found["missing values"][level])
        lost = got != x
        assert float(lost[:, :2].double().mean()) == pytest.approx(share, abs=0.02) and not lost[:, 2].any()
        torch.testing.assert_close(got[:, :2][lost[:, :2]], x.mean(0)[:2].expand(4000, 2)[lost[:, :2]])


def test_only_the_first_tensor_and_no_more_than_asked():
    x = {"a": torch.rand(20, 3), "b": torch.rand(20, 2), "c": torch.ones(20, dtype=torch.long)}
    found = shifts(batches_of(x), limit=10)
    parts = [part for part, _ in found["noisy values"][5]()]
    assert sum(len(part["a"]) for part in parts) == 10
    assert torch.equal(torch.cat([part["b"] for part in parts]), x["b"][:10]) and not torch.equal(parts[0]["a"], x["a"][:5])


def test_words_are_lost_to_the_mask_or_to_other_words():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, 90, (200, 30), generator=generator)
    ids[:, 0], mask = 1, torch.ones(200, 30, dtype=torch.long)
    mask[:, 25:] = 0
    free = (mask > 0) & (ids != 1)
    for level, share in enumerate(LEVELS["masked words"], 1):
        masked = [part for part, _ in shifts(batches_of({"input_ids": ids, "attention_mask": mask}))["masked words"][level]()]
        got = torch.cat([part["attention_mask"] for part in masked])
        assert torch.equal(torch.cat([part["input_ids"] for part in masked]), ids)
        assert float((got == 0)[free].double().mean()) == pytest.approx(share, abs=0.03) and torch.equal(
            got[~free], mask[~free]
        )
        drawn = all_of(shifts(batches_of(ids))["masked words"][level])
        assert float((drawn != ids)[:, 1:].double().mean()) == pytest.approx(share, abs=0.04) and (drawn[:, 0] == 1).all()
        assert drawn[:, 1:].min() >= 10 and drawn.max() < 90


def test_inputs_of_which_nothing_is_known():
    assert shifts(batches_of({"place": torch.ones(6, 4, dtype=torch.long)})) == {}
    assert shifts(batches_of(torch.full((6, 2), 3.0))) == {}  # constant columns stay unchanged
