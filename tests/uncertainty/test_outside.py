"""Out-of-distribution inputs made from token ids, and sets that would equal the test data."""

import pytest
import torch

from svdcompress.errors import OutputError
from svdcompress.uncertainty import outside, plot

CLS, SEP, PAD = 101, 102, 0


def texts(count=12, length=9):
    """Token ids between [CLS] and [SEP], padded, with their mask, in batches of 6."""
    generator = torch.Generator().manual_seed(0)
    ids, mask = torch.full((count, length), PAD), torch.zeros(count, length, dtype=torch.long)
    for row in range(count):
        tokens = 3 + row % 4
        ids[row, : tokens + 2] = torch.cat(
            [torch.tensor([CLS]), torch.randint(5, 90, (tokens,), generator=generator), torch.tensor([SEP])]
        )
        mask[row, : tokens + 2] = 1
    return ids, mask


def batches_of(inputs, size=6):
    count = len(next(iter(inputs.values())) if isinstance(inputs, dict) else inputs)
    cut = lambda k: {n: v[k : k + size] for n, v in inputs.items()} if isinstance(inputs, dict) else inputs[k : k + size]  # noqa: E731
    return lambda: ((cut(k), torch.zeros(min(size, count - k))) for k in range(0, count, size))


def test_tokens_are_shuffled_and_drawn_within_their_text():
    ids, mask = texts()
    kinds = torch.ones_like(ids)
    sets = outside(batches_of({"input_ids": ids, "attention_mask": mask, "token_type_ids": kinds}))
    assert set(sets) == {"shuffled", "uniform"}
    inside = (mask > 0) & (ids != CLS) & (ids != SEP)
    for name, batches in sets.items():
        parts = [part for part, _ in batches()]
        got = torch.cat([part["input_ids"] for part in parts])
        assert torch.equal(got[~inside], ids[~inside]) and got.dtype == ids.dtype  # padding and special tokens
        assert (got[inside] != ids[inside]).double().mean() > 0.4
        assert torch.equal(torch.cat([part["attention_mask"] for part in parts]), mask)
        assert torch.equal(torch.cat([part["token_type_ids"] for part in parts]), kinds)
        if name == "shuffled":
            assert all(sorted(a.tolist()) == sorted(b.tolist()) for a, b in zip(ids, got, strict=True))
        else:
            assert got[inside].min() >= 5 and got[inside].max() < 90
        again = torch.cat([part["input_ids"] for part, _ in batches()])
        assert torch.equal(got, again)


def test_tokens_alone_change_and_other_whole_numbers_stay():
    ids = texts()[0][:, 1:4]
    for batches in outside(batches_of(ids)).values():
        assert not torch.equal(torch.cat([part for part, _ in batches()]), ids)
    assert outside(batches_of({"place": ids, "kind": ids})) == {}  # their meaning is unknown, so there is no set to compare


def test_a_set_that_is_the_test_data_again_is_left_out():
    assert set(outside(batches_of(torch.rand(12, 1)))) == {"uniform"}  # a single number cannot be shuffled
    assert outside(batches_of(torch.rand(12))) == {}
    assert outside(batches_of(torch.full((12, 4), 7))) == {}  # one token only


def test_pictures_that_cannot_be_written_are_an_output_error(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match="file: cannot be created"):
        plot({"contenders": [], "task": "regression"}, tmp_path / "file")
