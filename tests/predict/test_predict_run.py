"""From input files to prediction files, with PyTorch and with ONNX, for hand-made runs."""

import csv
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import svdcompress as svdc
from svdcompress.calibrate import Promises, save_promises
from svdcompress.errors import CheckpointError, DataError, ExportError, OutputError, UsageError
from svdcompress.export import export_onnx
from svdcompress.predict import predict_run, read_inputs
from svdcompress.recipe import CalibrateSection, DataSection
from svdcompress.sources import preprocess
from svdcompress.uncertainty import mc_predict

_run = sys.modules["svdcompress.predict._run"]


def opened(folder, model, task="classification", preprocessing=None, **more):
    more = {"classes": None, "tau": None, "dim": 1, **more}
    recipe = SimpleNamespace(task=task, calibrate=CalibrateSection(), data=DataSection(name="imagefolder:photos"))
    return SimpleNamespace(
        folder=folder,
        file=lambda name, **_: folder / name,
        model=model.eval(),
        recipe=recipe,
        preprocessing=preprocessing or {},
        **more,
    )


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A small convolutional net for gray images of 6x5, with its ONNX files."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 4))
    svdc.convert(model, log_sigma2=-3.0)
    example = torch.randn(2, 1, 6, 5)
    export_onnx(model.eval(), folder / "model.onnx", example)
    export_onnx(model, folder / "model_mc.onnx", example, monte_carlo=True)
    normalize = {"transform": [{"normalize": {"mean": [0.5], "std": [0.25]}}]}
    return opened(folder, model, preprocessing=normalize, classes=["ant", "bee", "cat", "dog"])


@pytest.fixture(autouse=True)
def run(images, monkeypatch):
    monkeypatch.setattr(_run, "open_run", lambda folder: images)


def rows_of(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def pictures(folder, count=3, size=(5, 6), mode="L"):
    folder.mkdir(exist_ok=True)
    generator = np.random.default_rng(0)
    shape = (size[1], size[0]) if mode == "L" else (size[1], size[0], 3)
    arrays = [generator.integers(0, 256, shape, dtype=np.uint8) for _ in range(count)]
    for k, array in enumerate(arrays):
        Image.fromarray(array, mode=mode).save(folder / f"{k}.png")
    return np.stack(arrays)


def expected(images, arrays, samples, seed=0):
    x = preprocess(torch.from_numpy(arrays), images.preprocessing)
    return mc_predict(images.model, x, samples, generator=torch.Generator().manual_seed(seed))


def test_csv_of_an_array(images, tmp_path):
    arrays = np.random.default_rng(1).integers(0, 256, (4, 1, 6, 5), dtype=np.uint8)
    np.save(tmp_path / "x.npy", arrays)
    out, count = predict_run("run", tmp_path / "x.npy", tmp_path / "p.csv", samples=20, seed=3)
    want, rows = expected(images, arrays, 20, 3), rows_of(out)
    assert count == len(rows) == 4 and [row["name"] for row in rows] == ["0", "1", "2", "3"]
    for k, row in enumerate(rows):
        assert row["label"] == images.classes[int(want.mean[k].argmax())]
        assert float(row["confidence"]) == pytest.approx(float(want.mean[k].max()))
        assert float(row["mutual_information"]) == pytest.approx(float(want.mutual_information[k]), rel=1e-6)
        assert float(row["mean_bee"]) == pytest.approx(float(want.mean[k, 1]))
        assert float(row["epistemic_dog"]) == pytest.approx(float(want.epistemic[k, 3]))


def test_more_inputs_than_a_batch(images, tmp_path, monkeypatch):
    monkeypatch.setattr(_run, "BATCH", 3)
    np.save(tmp_path / "x.npy", np.random.default_rng(1).random((8, 1, 6, 5)))
    for onnx in (False, True):
        out, _ = predict_run("run", tmp_path / "x.npy", tmp_path / "p.npz", samples=5, onnx=onnx)
        with np.load(out) as stored:
            assert stored["mean"].shape == (8, 4) and list(stored["classes"]) == images.classes
            np.testing.assert_allclose(stored["mean"].sum(1), 1, rtol=1e-5)


def test_parquet_and_npz_hold_the_same(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    np.savez(tmp_path / "x.npz", x=np.random.default_rng(1).random((3, 1, 6, 5)), y=np.zeros(2))
    predict_run("run", tmp_path / "x.npz", tmp_path / "p.parquet", samples=5)
    predict_run("run", tmp_path / "x.npz", tmp_path / "p.npz", samples=5)
    table = parquet.read_table(tmp_path / "p.parquet").to_pydict()
    with np.load(tmp_path / "p.npz") as stored:
        np.testing.assert_allclose(table["mean_cat"], stored["mean"][:, 2])
        np.testing.assert_allclose(table["entropy"], stored["entropy"])


def test_onnx_agrees_with_pytorch(tmp_path):
    np.save(tmp_path / "x.npy", np.random.default_rng(1).random((3, 1, 6, 5)))
    predict_run("run", tmp_path / "x.npy", tmp_path / "torch.npz", samples=4000)
    predict_run("run", tmp_path / "x.npy", tmp_path / "onnx.npz", samples=4000, onnx=True)
    with np.load(tmp_path / "torch.npz") as ours, np.load(tmp_path / "onnx.npz") as theirs:
        error = (ours["mean"] - theirs["mean"]) / np.sqrt(2 * ours["epistemic"] / 4000)
        assert np.abs(error).max() < 5
        np.testing.assert_allclose(ours["mutual_information"], theirs["mutual_information"], rtol=0.15)


def test_onnx_draws_anew_unless_there_is_a_seed(tmp_path, monkeypatch):
    monkeypatch.setattr(_run, "BATCH", 2)
    np.save(tmp_path / "x.npy", np.ones((4, 1, 6, 5)))

    def mean(seed):
        out, _ = predict_run("run", tmp_path / "x.npy", tmp_path / "p.npz", samples=3, onnx=True, seed=seed)
        with np.load(out) as stored:
            return stored["mean"]

    fresh, seeded = [mean(None) for _ in range(3)], [mean(5) for _ in range(2)]
    assert np.array_equal(*seeded)
    assert len({array.tobytes() for array in (*fresh, seeded[0], mean(6), mean(-5))}) == 6
    assert not np.array_equal(seeded[0][:2], seeded[0][2:])  # each batch has its own noise


def test_onnx_says_which_predictions_are_not_finite(images, tmp_path, monkeypatch):
    x = np.random.default_rng(1).random((9, 1, 6, 5)).astype(np.float32)
    x[3], x[7, 0, 2, 2] = 1e30, -1e35
    np.save(tmp_path / "x.npy", x)
    with pytest.raises(DataError, match=r"x\.npy: the predictions are not finite .* for 2 of the inputs: 3, 7; "):
        predict_run("run", tmp_path / "x.npy", tmp_path / "p.csv", samples=20, onnx=True)
    monkeypatch.setattr(_run, "BATCH", 6)
    with pytest.raises(DataError, match=r"for 1 of the inputs: 3; "):
        predict_run("run", tmp_path / "x.npy", tmp_path / "p.csv", samples=20, onnx=True)
    assert not (tmp_path / "p.csv").exists()


def test_an_onnx_file_that_does_not_look_at_its_outputs(images, tmp_path):
    onnx = pytest.importorskip("onnx")
    helper, x = onnx.helper, np.ones((3, 2), np.float32)
    x[1] = 3e38
    value = lambda name, *shape: helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", *shape])  # noqa: E731
    samples = helper.make_tensor_value_info("samples", onnx.TensorProto.INT64, [])
    nodes = [helper.make_node("Mul", ["input", "input"], ["mean"]), helper.make_node("Identity", ["samples"], ["unused"])]
    graph = helper.make_graph(nodes, "old", [value("input", 2), samples], [value("mean", 2)])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), tmp_path / "model_mc.onnx")
    np.save(tmp_path / "x.npy", x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_run, "open_run", lambda folder: opened(tmp_path, images.model))
        with pytest.raises(DataError, match=r"for 1 of the inputs: 1; "):
            predict_run("run", tmp_path / "x.npy", tmp_path / "p.csv", onnx=True)
        with pytest.raises(ExportError, match=r"model_mc\.onnx: the file takes no seed"):
            predict_run("run", tmp_path / "x.npy", tmp_path / "p.csv", onnx=True, seed=1)


def test_monte_carlo_files_that_are_something_else(images, tmp_path, monkeypatch):
    onnx = pytest.importorskip("onnx")
    np.save(tmp_path / "x.npy", np.ones((3, 1, 6, 5), np.float32))
    path, good = tmp_path / "model_mc.onnx", onnx.load(str(images.folder / "model_mc.onnx"))
    monkeypatch.setattr(_run, "open_run", lambda folder: opened(tmp_path, images.model))

    def refused(message, change):
        model = onnx.ModelProto()
        model.CopyFrom(good)
        change(model)
        onnx.save(model, str(path))
        with pytest.raises(ExportError, match=message):
            predict_run("run", tmp_path / "x.npy", tmp_path / "p.csv", samples=2, onnx=True)
        assert not (tmp_path / "p.csv").exists()

    def says(text):
        return lambda model: model.metadata_props.add(key="preprocessing", value=text)

    def names_no_mean(model):
        next(output for output in model.graph.output if output.name == "mean").name = "means"
        for node in model.graph.node:
            node.output[:] = ["means" if name == "mean" else name for name in node.output]
            node.input[:] = ["means" if name == "mean" else name for name in node.input]

    again = r"write it again with: svdc export .* --monte-carlo --out"
    refused(rf"model_mc\.onnx: onnxruntime cannot load it .*{again}", lambda model: model.graph.node.pop(0))
    refused(rf"model_mc\.onnx: its outputs are not those of a Monte-Carlo file; {again}", names_no_mean)
    for text in ("5", "[]", '{"transform": 3}', '{"target_scale": ["a", 1]}'):
        refused(r"model_mc\.onnx: its metadata on the inputs are damaged: preprocessing\.", says(text))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scores": torch.zeros(40)}, "differ in length"),
        ({"scores": torch.full((300,), float("nan"))}, "scores holds values that are not finite"),
        ({"right": torch.ones(300)}, "right is torch.float32"),
        ({"labels": torch.arange(300)}, "some labels are not classes"),
        ({"labels": torch.zeros(300, dtype=torch.int32)}, "labels is torch.int32"),
        ({"labels": None}, r"its scores do not fit the run's task classification \(the file says classification\)"),
        ({"classes": 3}, "some labels are not classes"),
        ({"classes": 3, "labels": torch.arange(300) % 3}, "made for 3 classes, but the run has 4"),
        ({"classes": 10**400}, "classes, which no run writes"),
    ],
)
def test_promises_that_no_run_writes(images, tmp_path, change, said):
    np.save(tmp_path / "x.npy", np.ones((3, 1, 6, 5), np.float32))
    confidence = torch.linspace(0.3, 1, 300, dtype=torch.float64)
    parts = {"confidence": confidence, "right": confidence > 0.4, "scores": 1 - confidence, "labels": torch.arange(300) % 4}
    run = opened(tmp_path, images.model, preprocessing=images.preprocessing, classes=images.classes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_run, "open_run", lambda folder: run)
        for settings, message in (({}, ""), (change, said)):
            settings = {"task": "classification", "classes": 4, **parts, **settings}
            save_promises(tmp_path / "validation.safetensors", {"samples": Promises(**settings)})
            if not message:
                predict_run("run", tmp_path / "x.npy", tmp_path / "p.npz", samples=2, coverage=0.9, answer_above=0.5)
                continue
            with pytest.raises(CheckpointError, match=rf"(?s)validation.safetensors: .*{message}"):
                predict_run("run", tmp_path / "x.npy", tmp_path / "q.npz", samples=2, coverage=0.9)
    assert not (tmp_path / "q.npz").exists()


def test_a_folder_of_images(images, tmp_path):
    arrays = pictures(tmp_path / "pictures")
    out, _ = predict_run("run", tmp_path / "pictures", tmp_path / "p.csv", samples=10)
    rows = rows_of(out)
    assert [row["name"] for row in rows] == ["0.png", "1.png", "2.png"]
    want = expected(images, arrays[:, None], 10)
    assert [float(row["confidence"]) for row in rows] == pytest.approx(want.mean.amax(1).tolist())


def test_images_of_another_size_and_in_colour(images, tmp_path):
    pictures(tmp_path / "pictures", size=(10, 12), mode="RGB")
    x, names = read_inputs(tmp_path / "pictures" / "1.png", {}, (1, 6, 5))
    assert x.shape == (1, 1, 6, 5) and x.dtype == torch.uint8 and names == ["1.png"]
    predict_run("run", tmp_path / "pictures", tmp_path / "p.csv", samples=2)
    grey = pictures(tmp_path / "grey")
    colour, _ = read_inputs(tmp_path / "grey", {}, (3, 6, 5))
    assert torch.equal(colour[:, 1], torch.from_numpy(grey))


def test_images_for_a_run_that_flattens_its_inputs(tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = svdc.convert(nn.Sequential(nn.Linear(30, 3)), log_sigma2=-2.0)
    export_onnx(model.eval(), tmp_path / "model.onnx", torch.zeros(2, 30), verify=False)
    run = opened(tmp_path, model, preprocessing={"input_shape": [1, 6, 5], "transform": ["flatten"]})
    monkeypatch.setattr(_run, "open_run", lambda folder: run)
    pictures(tmp_path / "pictures", size=(10, 12), mode="RGB")
    out, count = predict_run("run", tmp_path / "pictures", tmp_path / "p.npz", samples=2)
    assert count == 3
    x, _ = read_inputs(tmp_path / "pictures", {}, (1, 6, 5))
    with np.load(out) as stored:
        want = mc_predict(model, x.flatten(1).float() / 255, 2, generator=torch.Generator().manual_seed(0))
        np.testing.assert_allclose(stored["mean"], want.mean.numpy())


def test_classes_of_one_name_keep_a_column_each(tmp_path, images, monkeypatch):
    monkeypatch.setattr(images, "classes", ["ant", "bee", "ant", "dog"])
    np.save(tmp_path / "x.npy", np.random.default_rng(1).random((3, 1, 6, 5)))
    rows = rows_of(predict_run("run", tmp_path / "x.npy", tmp_path / "p.csv", samples=5)[0])
    assert [sum(float(row[f"mean_{k}"]) for k in range(4)) for row in rows] == pytest.approx([1, 1, 1])


def test_regression_comes_back_in_the_targets_units(tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = svdc.convert(nn.Sequential(nn.Linear(3, 1)), log_sigma2=-2.0)
    run = opened(tmp_path, model, "regression", {"target_scale": [100.0, 5.0]}, tau=4.0)
    monkeypatch.setattr(_run, "open_run", lambda folder: run)
    x = np.random.default_rng(0).random((6, 3))
    np.save(tmp_path / "x.npy", x)
    out, _ = predict_run("run", tmp_path / "x.npy", tmp_path / "p.csv", samples=30)
    generator = torch.Generator().manual_seed(0)
    want = mc_predict(model, torch.tensor(x).float(), 30, task="regression", tau=4.0, generator=generator)
    rows = rows_of(out)
    assert [float(row["mean"]) for row in rows] == pytest.approx((100 + 5 * want.mean[:, 0]).tolist())
    assert [float(row["std"]) for row in rows] == pytest.approx((5 * want.std[:, 0]).tolist())
    assert float(rows[0]["aleatoric"]) == pytest.approx(0.25 * 25)


def test_binary_has_the_standard_deviation_of_the_probability(tmp_path, monkeypatch):
    model = svdc.convert(nn.Sequential(nn.Linear(3, 1)), log_sigma2=-2.0)
    monkeypatch.setattr(_run, "open_run", lambda folder: opened(tmp_path, model, "binary"))
    np.save(tmp_path / "x.npy", np.random.default_rng(0).random((6, 3)))
    rows = rows_of(predict_run("run", tmp_path / "x.npy", tmp_path / "p.csv", samples=30)[0])
    assert float(rows[0]["std"]) == pytest.approx(float(rows[0]["epistemic"]) ** 0.5)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("x.npy", b"", "not a readable array"),
        ("x.npy", b"text", "not a readable array"),
        ("x.npz", b"PK", "not readable arrays"),
        ("x.png", b"text", "not a readable image"),
        ("x.csv", b"a,b\n1,2\n", "not trained on tables"),
        (None, b"", "no such file or folder"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, content, message):
    if name:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        predict_run("run", tmp_path / (name or "missing.npy"), tmp_path / "p.csv")


def test_arrays_that_do_not_fit(tmp_path):
    cases = {
        "objects": np.array([{}], dtype=object),
        "text": np.array(["a"]),
        "scalar": np.array(1.0),
        "shape": np.zeros((2, 3, 6, 5), np.float32),
        "nan": np.full((2, 1, 6, 5), np.nan, np.float32),
        "empty": np.zeros((0, 1, 6, 5), np.float32),
    }
    for name, array in cases.items():
        np.save(tmp_path / f"{name}.npy", array, allow_pickle=True)
        for onnx in (False, True):
            with pytest.raises(DataError):
                predict_run("run", tmp_path / f"{name}.npy", tmp_path / "p.csv", samples=3, onnx=onnx)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(DataError, match="no images"):
        predict_run("run", tmp_path / "nothing", tmp_path / "p.csv")
    assert not (tmp_path / "p.csv").exists()


def test_inputs_that_the_transforms_do_not_fit(images, tmp_path, monkeypatch):
    monkeypatch.setattr(images, "preprocessing", {"transform": [{"reshape": [1, 6, 5]}]})
    np.save(tmp_path / "x.npy", np.zeros((2, 31), np.float32))
    with pytest.raises(
        DataError, match=r"x\.npy: the recipe's transforms .*data\.transform: \{reshape: \[1, 6, 5\]\} .*\(N, 31\)"
    ):
        predict_run("run", tmp_path / "x.npy", tmp_path / "p.csv")


def test_places_and_numbers_that_do_not_do(images, tmp_path, monkeypatch):
    np.save(tmp_path / "x.npy", np.zeros((2, 1, 6, 5), np.float32))
    with pytest.raises(UsageError, match=r"\.csv, \.parquet, \.npz"):
        predict_run("run", tmp_path / "x.npy", tmp_path / "p.txt")
    with pytest.raises(OutputError):
        predict_run("run", tmp_path / "x.npy", tmp_path / "no" / "p.csv", samples=2)
    for onnx in (False, True):
        with pytest.raises(UsageError, match="samples"):
            predict_run("run", tmp_path / "x.npy", tmp_path / "p.csv", samples=0, onnx=onnx)
    with pytest.raises(UsageError, match="from 1 to 1,000,000"):
        predict_run("run", tmp_path / "x.npy", tmp_path / "p.csv", samples=10**20, onnx=True)
    monkeypatch.setattr(_run, "open_run", lambda folder: opened(tmp_path, images.model))
    with pytest.raises(ExportError, match=r"no such file; write it with: svdc export .* --monte-carlo --out .*model_mc.onnx"):
        predict_run("run", tmp_path / "x.npy", tmp_path / "p.csv", onnx=True)


@pytest.mark.parametrize(
    ("report", "by"), [({"better": "mean"}, "mean"), ({"better": "samples"}, "samples"), (None, "samples")]
)
def test_without_a_number_of_samples_the_validation_data_decide(images, tmp_path, report, by):
    arrays = pictures(tmp_path / "pictures")
    np.save(tmp_path / "x.npy", arrays[:, None])
    images.results = {"calibrate": report}
    told = {}
    out, _ = predict_run("run", tmp_path / "x.npy", tmp_path / "p.npz", told=told)
    found = np.load(out)
    assert told["by"] == by and bool((found["mutual_information"] > 0).all()) is (by == "samples")
    x = preprocess(torch.from_numpy(arrays[:, None]), images.preprocessing)
    wanted = torch.softmax(images.model(x), 1) if by == "mean" else expected(images, arrays[:, None], 100).mean
    assert np.allclose(found["mean"], wanted.detach().numpy(), atol=1e-6)
    drawn, _ = predict_run("run", tmp_path / "x.npy", tmp_path / "q.npz", samples=100, told=told)
    assert told["by"] == "samples" and np.allclose(np.load(drawn)["mean"], expected(images, arrays[:, None], 100).mean.numpy())


def test_a_report_that_cannot_be_read_leaves_draws(images, tmp_path):
    class Damaged(SimpleNamespace):
        @property
        def results(self):
            raise OutputError("report.json: damaged")

    np.save(tmp_path / "x.npy", pictures(tmp_path / "pictures")[:, None])
    facts = {name: value for name, value in vars(images).items() if name != "results"}
    told = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_run, "open_run", lambda folder: Damaged(**facts))
        predict_run("run", tmp_path / "x.npy", tmp_path / "p.npz", told=told)
    assert told["by"] == "samples"
