"""The forms that a size may have."""

import pytest

from svdcompress.errors import RecipeError
from svdcompress.recipe import load_recipe, parse_goal


@pytest.mark.parametrize(
    ("text", "dense", "target"),
    [
        ("latency=2x", 10.0, 5.0),
        ("latency=5ms", 10.0, 5.0),
        ("latency=250us", 10.0, 0.25),
        ("macs=0.4", 1000.0, 400.0),
        ("macs=40%", 1000.0, 400.0),
        ("macs=30M", 1e9, 30e6),
        ("parameters=10x", 1000.0, 100.0),
        ("parameters = 10k", 1e6, 1e4),
        ("nonzero=50x", 1000.0, 20.0),
        ("nonzero=5000", 1e6, 5000.0),
        ("bytes=200kB", 1e6, 200_000.0),
        ("bytes=1.5MiB", 1e9, 1.5 * 1024**2),
    ],
)
def test_sizes(text, dense, target):
    assert parse_goal(text).target(dense) == pytest.approx(target)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("latencies=2x", "did you mean latency"),
        ("2x", "MEASURE=SIZE"),
        ("latency=5", "write a factor"),
        ("bytes=200", "does not have a unit of bytes"),
        ("macs=0", "above 0"),
        ("macs=0.5x", "larger than the dense one"),
        ("macs=fast", "is not a size"),
        ("latency=200kB", "does not have a unit of latency"),
    ],
)
def test_what_is_no_size_says_how_to_write_one(text, said):
    with pytest.raises(RecipeError, match=f"search.goal: .*{said}"):
        load_recipe(None, fields={"search.goal": text})
