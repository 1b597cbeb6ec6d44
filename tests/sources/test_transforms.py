"""Unsuitable transforms and augmentation are refused when the data are opened, naming the field, the step and the shape."""

import pytest
import torch

from svdcompress.errors import RecipeError
from svdcompress.recipe import DataSection
from svdcompress.sources import InMemory, open_data, preprocess


def opened(name="digits", **fields):
    return open_data(DataSection(name=name, limit=40, **fields), "classification")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"transform": [{"reshape": [3, 3]}]},
            r"data\.transform: \{reshape: \[3, 3\]\} does not fit .* shape \(N, 1, 8, 8\): shape",
        ),
        ({"transform": [{"pad": "x"}]}, r"data\.transform: pad: 'x' does not fit"),
        ({"transform": [{"scale": "x"}]}, r"data\.transform: scale: 'x' does not fit"),
        ({"transform": ["flatten", {"resize": 16}]}, r"data\.transform: \{resize: 16\} .* \(N, 64\): it is for images"),
        ({"transform": ["flatten", {"pad": 1}]}, r"data\.transform: \{pad: 1\} .* \(N, 64\): it is for images"),
        ({"transform": ["flatten", "gray"]}, r"data\.transform: gray does not fit .* \(N, 64\): it is for images"),
        ({"transform": [{"pad": 2}, {"pad": 1}, "flatten", "rgb"]}, r"data\.transform: rgb does not fit .* \(N, 196\)"),
        ({"augment": ["flatten", {"crop": 1}]}, r"data\.augment: \{crop: 1\} does not fit inputs of the shape \(N, 64\)"),
        ({"transform": ["flatten"], "augment": ["flip"]}, r"data\.augment: flip does not fit inputs of the shape \(N, 64\)"),
        (
            {"transform": [{"normalize": {"mean": [0.1, 0.2, 0.3], "std": 1}}]},
            r"data\.transform: \{normalize: .* \(N, 1, 8, 8\): mean has 3 numbers, but the inputs have 1 channels or columns",
        ),
        (
            {"transform": ["flatten", {"normalize": {"mean": 0, "std": [1, 2]}}]},
            r"std has 2 numbers, .* 64 channels or columns",
        ),
        ({"augment": [{"affine": {"degrees": 9}}, {"reshape": [7]}]}, r"data\.augment: \{reshape: \[7\]\} does not fit"),
    ],
)
def test_a_step_that_does_not_fit_is_named_on_opening(fields, said):
    with pytest.raises(RecipeError, match=said):
        opened(**fields)


OWN = """
import torch
from torch.utils.data import Dataset

def forgetful(x): x.mul_(1)
def fails(x, times): raise KeyError(times)

class Rows(Dataset):
    def __len__(self): return 12
    def __getitem__(self, i): return torch.full((3,), float(i)), i % 2
def rows(): return Rows()
"""


def test_functions_of_the_users(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    with pytest.raises(RecipeError, match=r"data\.transform: .*own\.py:forgetful returned nothing"):
        opened(transform=[f"{path}:forgetful"])
    with pytest.raises(RecipeError, match=r"data\.augment: \{.*own\.py:fails: \{'times': 3\}\} does not fit .* 3"):
        opened(augment=[{f"{path}:fails": {"times": 3}}])


def test_what_is_read_as_needed_is_tried_too(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    with pytest.raises(RecipeError, match=r"data\.transform: \{resize: 4\} does not fit inputs of the shape \(N, 3\)"):
        opened(f"{path}:rows", transform=[{"resize": 4}])
    with pytest.raises(RecipeError, match=r"data\.augment: flip does not fit inputs of the shape \(N, 3\)"):
        opened(f"{path}:rows", augment=["flip"])


def test_trying_the_augmentation_moves_no_seed():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    data = opened(augment=[{"noise": 0.1}])
    assert torch.equal(torch.rand(2), expected)
    assert isinstance(data.train, InMemory)


def test_images_are_shaped_as_the_names_say():
    x = torch.rand(2, 1, 8, 8)
    assert preprocess(x, {"transform": [{"pad": 1}, "rgb", {"resize": [4, 5]}]}).shape == (2, 3, 4, 5)
    assert torch.allclose(preprocess(x, {"transform": ["rgb", "gray", {"scale": 2}]}), 2 * x)
    assert torch.equal(preprocess(x, {"transform": [{"pad": 1}]})[:, :, 1:-1, 1:-1], x)
