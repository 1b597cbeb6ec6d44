"""A run on text with a Hugging Face language model, whose files are verified from the folder alone."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

from svdcompress.pipeline import run, verify_run
from svdcompress.recipe import load_recipe

pytestmark = pytest.mark.slow

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "plot", "dull", "fine"]

SETTINGS = [
    "data.target=liked",
    "train={epochs: 1, batch_size: 10}",
    "recover.epochs=1",
    "uncertainty.samples=3",
    "report={html: false, latency: false}",
    "device=cpu",
]


@pytest.fixture(scope="module")
def text_run(tmp_path_factory):
    """The folder of a run on forty short reviews."""
    transformers = pytest.importorskip("transformers")
    place = tmp_path_factory.mktemp("text")
    (place / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    transformers.BertTokenizer(str(place / "vocab.txt")).save_pretrained(place / "tokenizer")
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12,
        max_position_embeddings=8, num_labels=2, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.BertForSequenceClassification(config).save_pretrained(place / "model")
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(40):
        words = rng.choice(WORDS[5:], size=rng.integers(1, 5))
        rows.append(f"{' '.join(words)},{'yes' if {'good', 'fine'} & set(words) else 'no'}")
    (place / "reviews.csv").write_text("\n".join(["review,liked", *rows]) + "\n")
    sets = [
        f"model=hf:{place}/model",
        f"data=csv:{place}/reviews.csv",
        f"data.args={{tokenizer: {place}/tokenizer, max_length: 6}}",
    ]
    results = run(load_recipe(None, [*sets, *SETTINGS]), place / "run")
    assert results["verified"]["failed"] == 0 and not results.get("failed")
    return place / "run"


def test_everything_is_looked_at(text_run):
    found = verify_run(text_run)
    assert found.failed == [] and found.skipped == []
    looked_at = {(check.file, check.name.split(" of ")[0]) for check in found.checks}
    assert {("model.onnx", "error"), ("model_mc.onnx", "Monte-Carlo mean"), ("model.safetensors", "nonzero")} <= looked_at


def test_what_was_changed_is_named(text_run, tmp_path):
    folder = shutil.copytree(text_run, tmp_path / "run")
    results = json.loads((folder / "report.json").read_text())
    results["sparse"]["metrics"]["error"] += 40.0
    results["sparse"]["nonzero"] += 1
    (folder / "report.json").write_text(json.dumps(results))
    failed = {check.name for check in verify_run(folder).failed}
    assert "nonzero" in failed and any(name.startswith("error of ") for name in failed)


def test_without_the_data_the_rest_is_looked_at(text_run, tmp_path):
    place = shutil.copytree(text_run.parent, tmp_path / "elsewhere")
    (place / "reviews.csv").unlink()
    recipe = (place / "run" / "recipe.yaml").read_text().replace(str(text_run.parent), str(place))
    (place / "run" / "recipe.yaml").write_text(recipe)
    found = verify_run(place / "run")
    assert {check.file for check in found.failed} == {"recipe.yaml"}  # its digest has changed
    assert {check.file for check in found.skipped} >= {"model.onnx"}
    assert all("reviews.csv" in check.note for check in found.skipped)
