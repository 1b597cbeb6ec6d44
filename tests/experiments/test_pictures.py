"""Pictures in two colors: they show the same, only the colors of the page change."""

import numpy as np
import pytest
from matplotlib.image import imread

from svdcompress.errors import OutputError
from svdcompress.experiments._pictures import BLUE, INK, RED, figure, save


def rgb(colour):
    return [int(colour[k : k + 2], 16) for k in (1, 3, 5)]


def near(pixels, colour):
    """The number of pixels of a color, up to rounding."""
    return int((np.abs(pixels - rgb(colour)).max(-1) <= 2).sum())


@pytest.fixture
def pixels(tmp_path):
    drawing, axes = figure(1, 2, (6, 3))
    axes[0, 0].plot([0, 1], [0, 1], color=BLUE, linewidth=4)
    axes[0, 0].plot([0, 1], [1, 0], "o", mfc="none", color=RED, ms=12, mew=4)
    axes[0, 0].fill_between([0, 1], [0, 0], [0.1, 0.1], color=INK, alpha=0.5, linewidth=0)
    axes[0, 0].bar([0.5], [0.3], color=BLUE)
    axes[0, 1].imshow(np.linspace(0, 1, 64).reshape(8, 8), cmap="gray")
    entry = save(drawing, tmp_path / "two.png", "Two", "of them")
    assert entry == {"title": "Two", "file": "two.png", "dark": "two-dark.png", "caption": "of them"}
    return [np.rint(255 * imread(tmp_path / entry[key])[..., :3]) for key in ("file", "dark")]


def test_colours_are_those_of_each_page(pixels):
    light, dark = pixels
    assert light.shape == dark.shape
    assert near(light, "#ffffff") > 0.4 * light[..., 0].size and near(dark, "#14171a") > 0.4 * dark[..., 0].size
    for colour, other in ((BLUE, "#56b4e9"), (RED, "#f28e4b")):
        assert near(light, colour) == pytest.approx(near(dark, other), rel=0.05) and near(light, colour) > 100
        assert near(dark, colour) == near(light, other) == 0
    assert near(dark, "#ffffff") < 3000  # the picture contains some white itself


def test_a_picture_keeps_its_colours(pixels):
    light, dark = (image[:, image.shape[1] // 2 :] for image in pixels)
    grey = [np.unique(image[np.ptp(image, axis=-1) == 0][:, 0]) for image in (light, dark)]
    assert {0, 65, 130, 190} <= {int(value) for value in grey[0]} & {int(value) for value in grey[1]}


def test_a_folder_that_takes_no_file(tmp_path):
    with pytest.raises(OutputError, match=r"two\.png: cannot be written"):
        save(figure(1, 1, (2, 2))[0], tmp_path / "none" / "two.png", "", "")
