"""Text for language models: tables with a tokenizer, and Hugging Face data sets."""

import json
import shutil

import pytest
import torch

from svdcompress.errors import DataError
from svdcompress.recipe import DataSection
from svdcompress.sources import frame_inputs, open_data, open_frame

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A folder with a tokenizer of a few words."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def reviews(tmp_path):
    """A table of 20 reviews: text, a number, a label."""
    rows = [f'"good film, {i}",{i},yes' if i % 2 else f'"bad film, {i}",{i},no' for i in range(20)]
    file = tmp_path / "reviews.csv"
    file.write_text("\n".join(["review,stars,liked", *rows]) + "\n")
    return file


def opened(file, **args):
    return open_data(
        DataSection(name=f"csv:{file}", target="liked", args=args, split="tail", validation=4, test_share=0.2), "classification"
    )


def test_a_table_with_a_tokenizer_becomes_what_a_language_model_takes(reviews, tokenizer):
    data = opened(reviews, tokenizer=tokenizer, max_length=6)
    (inputs, targets) = next(data.train.batches(2))
    assert set(inputs) == {"input_ids", "attention_mask", "token_type_ids"}
    good, bad, film, unknown = (WORDS.index(word) for word in ("good", "bad", "film", "[UNK]"))
    assert inputs["input_ids"].tolist() == [[2, bad, film, unknown, unknown, 3], [2, good, film, unknown, unknown, 3]]
    assert (targets.tolist(), data.classes) == ([0, 1], ["no", "yes"])


def test_further_texts_are_read_in_the_same_way(reviews, tokenizer):
    data = opened(reviews, tokenizer=tokenizer, max_length=6)
    again = frame_inputs(open_frame(reviews, "csv"), data.preprocessing, "again")
    assert torch.equal(again["input_ids"][:2], next(data.train.batches(2))[0]["input_ids"])
    with pytest.raises(DataError, match=r"data\.args\.text: again has no column 'review'"):
        frame_inputs(open_frame(reviews, "csv").drop(columns="review"), data.preprocessing, "again")


def test_texts_that_are_cut_are_told_of(reviews, tokenizer, tmp_path):
    import shutil

    assert not opened(reviews, tokenizer=tokenizer, max_length=8).warnings  # [CLS] good film , 1 [SEP] are six
    assert opened(reviews, tokenizer=tokenizer, max_length=6).warnings == []
    (said,) = opened(reviews, tokenizer=tokenizer, max_length=4).warnings
    assert "20 of 20 texts (100%) are cut to 4 tokens; the longest has 6" in said and "--data-arg max_length=6" in said
    short = tmp_path / "short"
    shutil.copytree(tokenizer, short)
    config = json.loads((short / "tokenizer_config.json").read_text())
    (short / "tokenizer_config.json").write_text(json.dumps({**config, "model_max_length": 5}))
    data = opened(reviews, tokenizer=str(short))
    assert data.train.inputs["input_ids"].shape[1] == 5  # below 128, as in the tokenizer
    assert "the longest has 6 (model_max_length: 5; more than the tokenizer's model takes)" in data.warnings[0]
    (said,) = opened(reviews, tokenizer=str(short), max_length=7).warnings
    assert "7 tokens, but the tokenizer's model_max_length is 5" in said


def test_what_is_wrong_with_text_is_said(reviews, tokenizer, tmp_path):
    with pytest.raises(DataError, match=r"data\.args\.tokenizer: \./nowhere: no such folder"):
        opened(reviews, tokenizer="./nowhere")
    with pytest.raises(DataError, match=rf"data\.args\.tokenizer: {tmp_path}: "):
        opened(reviews, tokenizer=str(tmp_path))
    with pytest.raises(DataError, match=r"data\.args\.max_length: 0 is not a number"):
        opened(reviews, tokenizer=tokenizer, max_length=0)
    with pytest.raises(DataError, match="not 'tokeniser'"):
        opened(reviews, tokeniser=tokenizer)
    with pytest.raises(DataError, match=r"data\.args\.text: .* has 0 columns of text"):
        opened(_without_text(reviews, tmp_path), tokenizer=tokenizer)
    with pytest.raises(DataError, match=r"data\.args\.text: 'liked' is the target: a model that is given it has nothing to pr"):
        opened(reviews, tokenizer=tokenizer, text="liked")
    many = tmp_path / "many.csv"
    many.write_text("review,liked\n" + "\n".join(f"text {i},{i % 2}" for i in range(200)))
    with pytest.raises(DataError, match=r"'review' is text with 200 distinct values; .*--data-arg tokenizer=FOLDER"):
        opened(many)


def _without_text(reviews, folder):
    file = folder / "numbers.csv"
    open_frame(reviews, "csv").drop(columns="review").to_csv(file, index=False)
    return file


def changed(tokenizer, folder, file, **changes):
    """A copy of the tokenizer's folder with some values of a file changed."""
    shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
    content = json.loads((folder / file).read_text())
    for name, value in changes.items():
        section, _, key = name.rpartition("__")
        (content[section] if section else content)[key] = value
    (folder / file).write_text(json.dumps(content))
    return str(folder)


@pytest.mark.parametrize("key", ["vocab", "merges"])
def test_a_tokenizer_that_names_files_as_its_words_is_refused(reviews, tokenizer, tmp_path, key):
    """The library would read /dev/zero until there is no memory left."""
    folder = changed(tokenizer, tmp_path / "t", "tokenizer.json", **{f"model__{key}": "/dev/zero"})
    with pytest.raises(DataError, match=rf"tokenizer\.json: {key} is text \(/dev/zero\), not the words"):
        opened(reviews, tokenizer=folder)
    text = (tmp_path / "t" / "tokenizer.json").read_text()  # the key appears twice, the harmless one last
    (tmp_path / "t" / "tokenizer.json").write_text(text.replace('"/dev/zero"', f'"/dev/zero", "{key}": {{"[UNK]": 0}}'))
    with pytest.raises(DataError, match=rf"{key} is text"):
        opened(reviews, tokenizer=folder)


def test_a_tokenizer_that_names_files_outside_of_its_folder_is_refused(reviews, tokenizer, tmp_path):
    (tmp_path / "secret.txt").write_text("secret\n")
    for name in (str(tmp_path / "secret.txt"), "../secret.txt", "/dev/zero"):
        folder = changed(tokenizer, tmp_path / "t", "tokenizer_config.json", vocab_file=name)
        with pytest.raises(DataError, match=r"tokenizer_config\.json: vocab_file names a file elsewhere"):
            opened(reviews, tokenizer=folder)
    made = changed(tokenizer, tmp_path / "u", "tokenizer_config.json", tokenizer_file="/somebody/s/tokenizer.json")
    assert opened(reviews, tokenizer=made, max_length=6).classes == ["no", "yes"]
    (tmp_path / "u" / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json: cannot be read"):
        opened(reviews, tokenizer=made)


@pytest.mark.parametrize("length", ["many", [3], {"a": 1}, -5, True])
def test_a_longest_text_that_is_no_number_is_refused(reviews, tokenizer, tmp_path, length):
    folder = changed(tokenizer, tmp_path / "t", "tokenizer_config.json", model_max_length=length)
    with pytest.raises(DataError, match=r"its model_max_length is .*, which is not a number of tokens"):
        opened(reviews, tokenizer=folder, max_length=6)


def test_a_saved_data_set_of_text_and_one_of_numbers(tmp_path, tokenizer):
    datasets = pytest.importorskip("datasets")
    texts = {"text": ["good film", "bad film"] * 10, "label": [1, 0] * 10}
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(texts)}).save_to_disk(str(tmp_path / "texts"))
    section = DataSection(name=f"hf:{tmp_path}/texts", args={"tokenizer": tokenizer, "max_length": 4}, split="tail")
    data = open_data(section, "classification")
    assert next(data.train.batches(1))[0]["input_ids"].tolist() == [[2, WORDS.index("good"), WORDS.index("film"), 3]]
    with pytest.raises(DataError, match=r"data\.args\.tokenizer: .* holds text"):
        open_data(DataSection(name=f"hf:{tmp_path}/texts"), "classification")

    numbers = {"a": [float(i) for i in range(20)], "b": [[1.0, 2.0]] * 20, "label": [0, 1] * 10}
    datasets.Dataset.from_dict(numbers).save_to_disk(str(tmp_path / "numbers"))
    data = open_data(DataSection(name=f"hf:{tmp_path}/numbers", split="tail"), "classification")
    assert next(data.train.batches(2))[0].tolist() == [[0.0, 1.0, 2.0], [1.0, 1.0, 2.0]]
    with pytest.raises(DataError, match=r"data\.target: .*numbers \(train\) has the columns a, b, label"):
        open_data(DataSection(name=f"hf:{tmp_path}/numbers", target="c"), "classification")
    with pytest.raises(DataError, match=r"data\.name: hf: \./nowhere: no such folder"):
        open_data(DataSection(name="hf:./nowhere"), "classification")
