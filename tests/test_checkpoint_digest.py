"""A checkpoint holds a digest of itself: a changed bit is noticed, and files of earlier versions, without one, are read."""

import torch
from test_checkpoint import net, pruned, refused, rewritten

from svdcompress.checkpoint import load, save


def test_a_single_bit_that_is_another(tmp_path) -> None:
    path = tmp_path / "model.safetensors"
    save(pruned(), path)
    whole = path.read_bytes()
    begins = 8 + int.from_bytes(whole[:8], "little")
    for place in (begins, (begins + len(whole)) // 2, len(whole) - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        refused(path, net(), "damaged, or changed after it was written")
    path.write_bytes(whole.replace(b'{\\"weight\\": 3.0', b'{\\"weight\\": 2.0'))
    assert path.read_bytes() != whole
    refused(path, net(), "damaged, or changed after it was written")


def test_files_of_earlier_versions_have_no_digest(tmp_path) -> None:
    path = tmp_path / "model.safetensors"
    save(pruned(), path)
    expected = load(path, net()).state_dict()
    rewritten(path)
    assert all(torch.equal(value, expected[key]) for key, value in load(path, net()).state_dict().items())
