"""The hub's mixin, offline: a round trip through a folder, and what an upload would contain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.errors import CheckpointError, ModelError

pytest.importorskip("huggingface_hub")
from svdcompress.interop.hub import HubMixin


class Net(HubMixin, nn.Module):
    def __init__(self, width: int = 16, classes: int = 3) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, classes))

    def forward(self, x):
        return self.body(x)


class Other(HubMixin, nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)


@pytest.fixture
def small():
    torch.manual_seed(0)
    model = svdc.convert(Net(width=32)).eval()
    with torch.no_grad():
        model.body[0].log_sigma2[5:] = 20.0
    return svdc.prune(model, torch.randn(2, 8))


def test_a_pruned_model_comes_back_exactly(small, tmp_path):
    small.save_pretrained(tmp_path / "net")
    assert json.loads((tmp_path / "net" / "config.json").read_text()) == {"width": 32, "classes": 3}
    again = Net.from_pretrained(tmp_path / "net")
    assert type(again) is Net and not again.training
    assert again.body[0].weight.shape == (5, 8)
    ours, theirs = small.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    x = torch.randn(7, 8)
    torch.testing.assert_close(again(x), small(x), rtol=0, atol=0)
    drawn = [svdc.mc_predict(model, x, 9, generator=torch.Generator().manual_seed(1)).mean for model in (small, again)]
    torch.testing.assert_close(*drawn, rtol=0, atol=0)


def test_a_dense_model_goes_there_and_back_too(tmp_path):
    model = Net(classes=5)
    model.save_pretrained(tmp_path)
    assert torch.equal(Net.from_pretrained(tmp_path).body[2].weight, model.body[2].weight)


def test_an_upload_holds_the_same_files(small, monkeypatch):
    import huggingface_hub.hub_mixin as theirs

    sent = {}

    class Api:
        def __init__(self, token=None):
            pass

        def create_repo(self, repo_id, **_):
            return type("Url", (), {"repo_id": repo_id})

        def upload_folder(self, *, repo_id, folder_path, **_):
            sent.update({path.name: path.read_bytes() for path in Path(folder_path).iterdir()}, repo=repo_id)
            return "done"

    monkeypatch.setattr(theirs, "HfApi", Api)
    assert small.push_to_hub("me/net") == "done"
    assert sent["repo"] == "me/net" and {"config.json", "model.safetensors", "README.md"} <= sent.keys()
    assert b"svdcompress" in sent["README.md"]


def test_another_class_and_a_missing_file_are_refused(small, tmp_path):
    small.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="made for another model than Other"):
        Other.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        Net.from_pretrained(tmp_path)

    class NoModule(HubMixin):
        pass

    with pytest.raises(ModelError, match=r"torch\.nn\.Module"):
        NoModule.from_pretrained(tmp_path)
