"""Folders of images: which are classes, which splits, what is read, and what is told. Pixels are compared with Pillow's own."""

import numpy as np
import pytest
import torch

from svdcompress.errors import DataError
from svdcompress.predict import read_inputs
from svdcompress.recipe import DataSection
from svdcompress.sources import FromDataset, InMemory, _image_folder, open_data
from svdcompress.sources._images import Seen, look_at

Image = pytest.importorskip("PIL.Image")


def opened(folder, **fields):
    return open_data(DataSection(name=f"imagefolder:{folder}", **{"workers": 0, **fields}), "classification")


def pictures(folder, *classes, count=8, mode="RGB", size=(6, 5)):
    draw = np.random.default_rng(len(str(folder)))
    for name in classes:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            shape = size if mode == "L" else (*size, 3)
            image = Image.fromarray(draw.integers(0, 256, shape, dtype=np.uint8))
            image.save(folder / name / f"{mode}{index}.png")
    return folder


def test_the_classes_and_their_counts_are_noted(tmp_path):
    pictures(tmp_path, "b", "a")
    pictures(tmp_path, "a", count=3, mode="L")
    data = opened(tmp_path)
    assert data.notes[0] == f"{tmp_path}: 2 classes (images): a (11), b (8)" and data.warnings == []
    many = pictures(tmp_path / "many", *(f"{index:02}" for index in range(12)), count=4)
    assert opened(many).notes[0].endswith("09 (4), ...")


def test_links_are_followed_once(tmp_path):
    pictures(tmp_path / "elsewhere", "c")
    folder = pictures(tmp_path / "photos", "a", "b")
    (folder / "c").symlink_to(tmp_path / "elsewhere" / "c")
    (folder / "a" / "again").symlink_to(folder)  # a way back up
    (folder / "b" / "more").symlink_to(folder / "a")
    data = opened(folder, test_share=0.25, validation=0.25)
    assert data.classes == ["a", "b", "c"]
    assert sum(map(len, (data.train, data.validation, data.test))) >= 8 + 16 + 8
    _, names = read_inputs(folder)
    assert {"a/RGB0.png", "b/more/RGB7.png", "c/RGB0.png"} <= set(names)


@pytest.mark.parametrize("names", [("Train", "Val", "TEST"), ("training", "valid", "testing")])
def test_splits_by_any_case(tmp_path, names):
    for name, count in zip(names, (8, 3, 2), strict=True):
        pictures(tmp_path / name, "a", "b", count=count)
    data = opened(tmp_path)
    assert data.classes == ["a", "b"] and [len(part) for part in (data.train, data.validation, data.test)] == [16, 6, 4]


def test_splits_that_are_missing_doubled_or_beside_others(tmp_path):
    for name in ("val", "test"):
        pictures(tmp_path / "few" / name, "a", "b")
    with pytest.raises(DataError, match=r"few: has val, test, but no train|few: has test, val, but no train"):
        opened(tmp_path / "few")
    for name in ("train", "val", "validation"):
        pictures(tmp_path / "two" / name, "a", "b")
    with pytest.raises(DataError, match="two: val, validation are the same split"):
        opened(tmp_path / "two")
    for name in ("train", "dev", "eval"):
        pictures(tmp_path / "more" / name, "a", "b")
    (tmp_path / "more" / "docs").mkdir()
    data = opened(tmp_path / "more")
    assert data.classes == ["a", "b"] and "images in dev, eval are not read, as there is a split train" in data.warnings[0]


def test_a_split_in_capitals_beside_train_is_a_split_whatever_else_there_is(tmp_path):
    for name in ("train", "Test", "docs"):
        pictures(tmp_path / name, "a", "b", count=6 if name == "Test" else 20)
    data = opened(tmp_path)
    assert len(data.test) == 12 and "images in docs are not read" in data.warnings[0]
    pictures(tmp_path / "camera" / "@eaDir", "a")  # copies that a file server makes
    for name, count in (("Train", 20), ("Test", 6)):
        pictures(tmp_path / "camera" / name, "a", "b", count=count)
    data = opened(tmp_path / "camera")
    assert data.classes == ["a", "b"] and len(data.test) == 12 and not data.warnings


def test_classes_that_are_named_like_splits(tmp_path):
    data = opened(pictures(tmp_path / "vehicles", "bus", "train"))
    assert data.classes == ["bus", "train"] and "train is taken as a class, like bus" in data.warnings[0]
    for name in ("train", "test", "sample"):  # no classes at all
        pictures(tmp_path / "flat", name)
    with pytest.raises(DataError, match="images are next to the class folders"):
        opened(tmp_path / "flat")
    for name in ("Train/steam", "Train/diesel", "Car/a", "Bus/b"):
        pictures(tmp_path / "deep", name)
    data = opened(tmp_path / "deep")
    assert data.classes == ["Bus", "Car", "Train"] and "Train is taken as a class, like Bus, Car" in data.warnings[0]
    data = opened(pictures(tmp_path / "trial", "control", "test"))
    assert data.classes == ["control", "test"] and "test is taken as a class, like control" in data.warnings[0]


def test_what_is_no_image_is_told_and_hidden_files_are_left_out(tmp_path):
    folder = pictures(tmp_path, "a", "b")
    (folder / "a" / ".ipynb_checkpoints").mkdir()
    (folder / ".hidden.png").write_bytes((folder / "a" / "RGB0.png").read_bytes())
    pictures(folder, ".ipynb_checkpoints")
    (folder / "a" / "notes.txt").write_text("none")
    data = opened(folder)
    assert data.classes == ["a", "b"] and data.warnings == []
    for name in ("1.HEIC", "2.HEIC", "3.avif"):
        (folder / "b" / name).write_bytes(b"?")
    (folder / "b" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    (line,) = opened(folder).warnings
    assert "4 files are not read (.heic: 2, .avif: 1, links to nothing: 1)" in line
    (folder / "c").mkdir()
    (folder / "c" / "1.HEIC").write_bytes(b"?")
    with pytest.raises(DataError, match=r"c: none of its files is read; images are \.jpg"):
        opened(folder)


def test_folders_that_are_no_classes_are_told(tmp_path):
    folder = pictures(tmp_path, "a", "b")
    for name in ("annotations", "__MACOSX"):
        (folder / name).mkdir()
        (folder / name / "1.xml").write_text("<a/>")
    (folder / "__MACOSX" / "1.png").write_bytes(b"?")
    (folder / "same").symlink_to(folder / "a")
    data = opened(folder)
    assert data.classes == ["a", "b", "same"]
    assert [line.split(": ", 2)[2] for line in data.warnings] == [
        "has no images, so it is no class",
        "the classes a and same are the same folder",
    ]


def test_numbers_without_a_known_range_are_refused(tmp_path):
    folder = pictures(tmp_path, "a", "b")
    for name, pixels in (("f", np.random.rand(6, 5).astype("float32")), ("i", np.full((6, 5), 70_000, "int32"))):
        Image.fromarray(pixels).save(folder / "b" / f"{name}.tif")
        with pytest.raises(DataError, match=rf"{name}\.tif: .* pixels .*have no known range"):
            opened(folder)
        with pytest.raises(DataError, match=rf"{name}\.tif: .* pixels .*have no known range"):
            read_inputs(folder)
        (folder / "b" / f"{name}.tif").unlink()
    for value in (51_200, 200):  # of 16 bits, of 8
        Image.fromarray(np.full((6, 5), value, "int32")).save(folder / "b" / "z.tif")
        assert float(read_inputs(folder / "b" / "z.tif")[0].max()) == 200


@pytest.mark.parametrize("needed", [False, True])
def test_twelve_bits_in_sixteen_are_told(tmp_path, monkeypatch, needed):
    monkeypatch.setattr(_image_folder, "IN_MEMORY_BYTES", 0 if needed else 2**30)
    draw = np.random.default_rng(0)
    for name, most in (("dark", 4095), ("full", 65_535)):
        for kind in "ab":
            (tmp_path / name / kind).mkdir(parents=True)
            for index in range(5):
                pixels = draw.integers(0, most + 1, (6, 5)).astype(np.uint16)
                Image.fromarray(pixels).save(tmp_path / name / kind / f"{index}.png")
    (line,) = opened(tmp_path / "dark", image_size=(6, 5)).warnings
    assert "images is above 15 of 255: hardly any levels are left" in line
    data = opened(tmp_path / "full", image_size=(6, 5), split="tail", test_share=0.1, validation=0.1)
    assert data.warnings == []
    pixels = np.asarray(Image.open(tmp_path / "full" / "a" / "0.png")).astype(int) // 256
    x = torch.cat([x for x, _ in data.train.batches(20)])
    assert any(torch.equal(one[0], torch.tensor(pixels / 255).float()) for one in x)


def test_gray_among_color_is_color_wherever_images_are_kept(tmp_path, monkeypatch):
    folder = pictures(tmp_path, "a", "b", mode="L")
    pictures(folder, "b", count=1)
    whole = opened(folder, image_size=(6, 5))
    monkeypatch.setattr(_image_folder, "IN_MEMORY_BYTES", 2 * 8 * 30 + 3 * 30)  # enough if one gray image stands for all
    lazy = opened(folder, image_size=(6, 5))
    assert isinstance(whole.train, InMemory) and isinstance(lazy.train, FromDataset)
    for (x, y), (x2, y2) in zip(whole.train.batches(4, shuffle=3), lazy.train.batches(4, shuffle=3), strict=True):
        assert x.shape[1] == 3 and torch.equal(x, x2) and torch.equal(y, y2)
    monkeypatch.setattr(_image_folder, "IN_MEMORY_BYTES", 0)
    monkeypatch.setattr(_image_folder, "DECODED", 1)
    monkeypatch.setattr(_image_folder, "look_at", lambda files: Seen(len(files)))  # color comes after those looked at
    data = opened(folder, image_size=(6, 5), test_share=0.2, validation=2)
    with pytest.raises(DataError, match=r"RGB0\.png.* in color, unlike"):
        for part in (data.train, data.validation, data.test):
            list(part.batches(4))


def test_images_that_are_stored_rotated_are_told(tmp_path):
    folder = pictures(tmp_path, "a", "b")
    exif = Image.Exif()
    exif[0x0112] = 3
    up = np.zeros((6, 5, 3), np.uint8)
    up[:3] = 255
    for index in range(2):
        Image.fromarray(up).save(folder / "b" / f"z{index}.jpg", exif=exif)
    (line,) = opened(folder).warnings
    assert "z0.jpg and 1 more: stored rotated or mirrored" in line
    with pytest.warns(UserWarning, match="stored rotated or mirrored"):
        inputs, _ = read_inputs(folder / "b" / "z0.jpg")
    assert float(inputs[0, :, 0].min()) > 200 > 50 > float(inputs[0, :, 5].max())  # as stored
    exif[0x0112] = 1
    for index in range(2):
        Image.fromarray(up).save(folder / "b" / f"z{index}.jpg", exif=exif)
    assert opened(folder).warnings == []


def test_headers_are_read_without_decoding(tmp_path, monkeypatch):
    """A small file may claim any number of pixels, and decoding thousands of files takes minutes."""
    folder = pictures(tmp_path, "a", "b")
    exif = Image.Exif()
    exif[0x0112] = 3
    Image.new("RGB", (6, 5)).save(folder / "b" / "z.png", exif=exif)
    from PIL.PngImagePlugin import PngImageFile

    monkeypatch.setattr(PngImageFile, "load", lambda self: pytest.fail("decoded"))
    seen = look_at(sorted((folder / "b").iterdir()))
    assert (seen.looked, seen.channels, seen.wide) == (9, 3, False) and "z.png: stored rotated" in seen.warnings[0]


def test_a_gray_split_beside_one_in_color_is_in_color(tmp_path):
    pictures(tmp_path / "train", "a", "b")
    pictures(tmp_path / "val", "a", "b", mode="L", count=3)
    data = opened(tmp_path, test_share=0.25)
    assert next(iter(data.validation.batches(6)))[0].shape == (6, 3, 6, 5)
