"""Archives: exact or rounded as requested, bounded, and refused if they are not ours."""

from __future__ import annotations

import json
import lzma
import zlib

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from safetensors.numpy import load, save

from svdcompress.errors import CheckpointError, ExportError, OutputError, UsageError
from svdcompress.export import pack, unpack
from svdcompress.export._pack import _jumps


def model_of(path, arrays):
    """A model file that returns each array times its input."""
    nodes = [helper.make_node("Mul", [name, "x"], [f"{name}_out"]) for name in arrays]
    outputs = [helper.make_tensor_value_info(f"{name}_out", 1, array.shape) for name, array in arrays.items()]
    constants = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", 1, [])], outputs, constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


def arrays():
    random = np.random.default_rng(0)
    sparse = (random.normal(size=(60, 300)) * (random.random((60, 300)) < 0.05)).astype(np.float32) + 0  # no -0
    far = np.zeros((300, 400), np.float32)
    far[[0, 200, 299], [0, 7, 399]] = 1.5, -2.5, 3.25
    kernel = (random.normal(size=(8, 4, 3, 3)) * np.geomspace(1e-6, 100, 8)[:, None, None, None]).astype(np.float32)
    bias = random.normal(size=30).astype(np.float32)
    return {
        "sparse": sparse,
        "far": far,
        "kernel": kernel,
        "bias": bias,
        "none": np.zeros((30, 9), np.float32),
        "few": bias[:3],
    }


def weights(path):
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(str(path)).graph.initializer}


@pytest.fixture
def src(tmp_path):
    return model_of(tmp_path / "model.onnx", arrays())


def test_files_that_draw_keep_eight_bits(src, tmp_path):
    model = onnx.load(src)
    model.metadata_props.add(key="kind", value="monte_carlo")
    onnx.save(model, src)
    for options in ({"precision": "int4"}, {"bits": {"sparse": 7}}):
        with pytest.raises(UsageError, match=r"model\.onnx: a Monte-Carlo file needs 8 bits or more"):
            pack(src, tmp_path / "a.svdc", **options)
    assert not (tmp_path / "a.svdc").exists()
    for options in ({}, {"precision": "int8"}, {"bits": {"sparse": 8}}):
        assert pack(src, tmp_path / "a.svdc", **options).bytes


def test_exact_and_much_smaller(src, tmp_path):
    packed = pack(src, tmp_path / "a.svdc")
    assert packed.bytes == (tmp_path / "a.svdc").stat().st_size < 6500 and packed.largest == 0
    assert packed.before == src.stat().st_size
    written = unpack(packed.path, tmp_path / "back.onnx")
    assert {name: array.tobytes() for name, array in weights(written.path).items()} == {
        n: a.tobytes() for n, a in arrays().items()
    }
    assert written.path.read_bytes() == src.read_bytes()


@pytest.mark.parametrize(("precision", "bits"), [("int8", 8), ("int4", 4)])
def test_integers_are_within_half_a_step_of_their_channel(src, tmp_path, precision, bits):
    packed = pack(src, tmp_path / "a.svdc", precision)
    unpack(packed.path, tmp_path / "back.onnx")
    worst = 0.0
    for name, found in weights(tmp_path / "back.onnx").items():
        array = arrays()[name]
        if array.ndim > 1:
            for ours, theirs in zip(found, array, strict=True):
                step = max(np.abs(theirs).max(), 1e-30) / (2 ** (bits - 1) - 1)
                nearest = np.round(theirs / step) * step  # with the last step at the largest weight
                size = 2.0**-14 * (theirs**2).sum()  # steps are stored to 8 bits
                assert ((ours - theirs) ** 2).sum() <= 1.1 * ((nearest - theirs) ** 2).sum() + size, name
                if bits == 8:
                    assert np.abs(ours - theirs).max() <= 0.505 * step, name
            assert (found[array == 0] == 0).all()
        worst = max(worst, float(np.abs(found - array).max() / max(np.abs(array).max(), 1e-9)))
    assert packed.largest == pytest.approx(worst) and packed.bytes < 2600


def test_what_counts_for_nothing_is_left_to_the_rest(src, tmp_path):
    counts = np.ones((8, 4, 3, 3), np.float32)
    largest = np.abs(arrays()["kernel"]).reshape(8, -1).argmax(1)
    counts.reshape(8, -1)[np.arange(8), largest] = 0
    errors = []
    for name, importance in (("a", {}), ("b", {"kernel": counts})):
        pack(src, tmp_path / name, "int4", importance=importance)
        unpack(tmp_path / name, tmp_path / f"{name}.onnx")
        off = (weights(tmp_path / f"{name}.onnx")["kernel"] - arrays()["kernel"]) ** 2 * counts
        errors.append(off.reshape(8, -1).sum(1))
    assert (errors[1] <= errors[0]).all() and (errors[1] < errors[0]).any()
    for wrong, reason in ((counts[0], "has the shape"), (-counts, "below 0"), (counts * np.nan, "not finite")):
        with pytest.raises(UsageError, match=f"importance: 'kernel' .*{reason}"):
            pack(src, tmp_path / "c", "int4", importance={"kernel": wrong})
    with pytest.raises(UsageError, match=r"bits: 4\.5 for 'kernel' is not a whole number"):
        pack(src, tmp_path / "c", bits={"kernel": 4.5})
    assert pack(src, tmp_path / "d", bits={"kernel": 4, "nosuch": 3}).missing == ("nosuch",)


def test_each_weight_can_have_bits_of_its_own(src, tmp_path):
    pack(src, tmp_path / "a.svdc", "int8", bits={"kernel": 3, "sparse": 12})
    unpack(tmp_path / "a.svdc", tmp_path / "back.onnx")
    found = weights(tmp_path / "back.onnx")
    assert all(len(np.unique(channel)) <= 7 for channel in found["kernel"])
    assert np.abs(found["sparse"] - arrays()["sparse"]).max() < 0.51 * np.abs(arrays()["sparse"]).max() / 2047


@pytest.mark.parametrize("places", [[], [0], [254], [255], [256], [0, 1, 2], [510, 1020, 100_000]])
def test_steps_can_be_walked(places):
    place, found, first = 0, [], True
    for byte in _jumps(np.array(places, np.int64)):
        place += byte
        if byte != 255:
            found.append(place)
    assert found == places and first


def test_steps_are_deflated_where_that_is_shorter(src, tmp_path):
    random = np.random.default_rng(0)
    array = (random.normal(size=(200, 300)) * (random.random((200, 300)) < 0.3)).astype(np.float32) + 0
    path = model_of(tmp_path / "m.onnx", {"sparse": array})
    tensors, metadata = taken_apart(pack(path, tmp_path / "a.svdc").path)
    assert (metadata["format"], metadata["deflated"]) == ("2", "steps")
    steps = zlib.decompress(tensors["steps"].tobytes(), -15)
    assert [*steps] == np.diff(np.flatnonzero(array), prepend=0).tolist()
    unpack(tmp_path / "a.svdc", tmp_path / "whole.onnx")
    assert np.array_equal(weights(tmp_path / "whole.onnx")["sparse"], array)
    old = {key: value for key, value in metadata.items() if key != "deflated"} | {"format": "1"}  # as 0.1.0 wrote it
    put_together(tmp_path / "b.svdc", {**tensors, "steps": np.frombuffer(steps, np.uint8)}, old)
    unpack(tmp_path / "b.svdc", tmp_path / "old.onnx")
    assert np.array_equal(weights(tmp_path / "old.onnx")["sparse"], array)
    bomb = zlib.compressobj(9, zlib.DEFLATED, -15)
    zeros = bomb.compress(bytes(50 * 2**20)) + bomb.flush()
    for data in (zeros, zeros[:100], b"", tensors["steps"].tobytes() + b"more"):
        put_together(tmp_path / "c.svdc", {**tensors, "steps": np.frombuffer(data, np.uint8)}, metadata)
        refused(tmp_path / "c.svdc", tmp_path, "its steps are damaged")
    put_together(tmp_path / "d.svdc", tensors, {**metadata, "deflated": "graph"})
    refused(tmp_path / "d.svdc", tmp_path, "its header is damaged")


def test_unknown_names_are_refused(src, tmp_path):
    with pytest.raises(UsageError, match="precision: 'int3' is unknown; one of float32"):
        pack(src, tmp_path / "a", "int3")
    with pytest.raises(UsageError, match="codec: 'rar' is unknown; one of xz, zstd"):
        pack(src, tmp_path / "a", codec="rar")
    pack(src, tmp_path / "a")
    with pytest.raises(OutputError, match="is a folder"):
        unpack(tmp_path / "a", tmp_path)


def taken_apart(path):
    """(tensors, metadata) of an archive."""
    data = lzma.decompress(path.read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return dict(load(data)), header["__metadata__"]


def put_together(path, tensors, metadata):
    path.write_bytes(lzma.compress(save(tensors, metadata)))
    return path


def refused(path, tmp_path, reason, **more):
    with pytest.raises(CheckpointError, match=reason):
        unpack(path, tmp_path / "back.onnx", **more)
    assert not (tmp_path / "back.onnx").exists()


def test_what_is_no_archive_is_refused(src, tmp_path):
    good = pack(src, tmp_path / "a.svdc").path.read_bytes()
    bad = tmp_path / "bad.svdc"
    for data, reason in (
        (b"", "not an svdc archive"),
        (b"PK\x03\x04 hello", "not an svdc archive"),
        (good[: len(good) // 2], "truncated"),
        (good[:300] + bytes([good[300] ^ 255]) + good[301:], "damaged|not an svdc archive"),
        (lzma.compress(b"hello there, this is text"), "not an svdc archive|truncated"),
        (lzma.compress(b""), "truncated"),
    ):
        bad.write_bytes(data)
        refused(bad, tmp_path, reason)
    refused(tmp_path / "none.svdc", tmp_path, "none.svdc: cannot be read")


def test_a_bomb_is_refused_before_it_is_made(src, tmp_path):
    path = pack(src, tmp_path / "a.svdc").path
    refused(path, tmp_path, "are allowed", most=10_000)
    tensors, metadata = taken_apart(path)
    # a stream of zeros that is far larger than declared, and one that declares its size
    data = lzma.decompress(path.read_bytes())
    (tmp_path / "b.svdc").write_bytes(lzma.compress(data + bytes(50 * 2**20)))
    refused(tmp_path / "b.svdc", tmp_path, "it is longer than its header says")
    big = put_together(tmp_path / "c.svdc", {**tensors, "numbers": np.zeros(50 * 2**20, np.uint8)}, metadata)
    assert big.stat().st_size < 20_000
    refused(big, tmp_path, r"would expand to 52,4\d\d,\d\d\d bytes", most=10**7)
    # a graph with a weight of a petabyte of zeros
    model = onnx.load_model_from_string(tensors["graph"].tobytes())
    next(t for t in model.graph.initializer if t.name == "none").dims[:] = [2**25, 2**25]
    graph = np.frombuffer(model.SerializeToString(), np.uint8)
    refused(
        put_together(tmp_path / "d.svdc", {**tensors, "graph": graph}, metadata), tmp_path, "its weights would expand to 4,503,"
    )
    model = onnx.load_model_from_string(tensors["graph"].tobytes())
    next(t for t in model.graph.initializer if t.name == "none").dims[:] = [2**62, 4]
    graph = np.frombuffer(model.SerializeToString(), np.uint8)
    refused(put_together(tmp_path / "e.svdc", {**tensors, "graph": graph}, metadata), tmp_path, "its weights would expand to")


def test_files_outside_are_refused(src, tmp_path):
    tensors, metadata = taken_apart(pack(src, tmp_path / "a.svdc").path)
    for location in ("../secret", "/etc/passwd", "weights.bin"):
        model = onnx.load_model_from_string(tensors["graph"].tobytes())
        few = next(t for t in model.graph.initializer if t.name == "few")
        few.ClearField("raw_data")
        few.external_data.add(key="location", value=location)
        few.data_location = onnx.TensorProto.EXTERNAL
        graph = np.frombuffer(model.SerializeToString(), np.uint8)
        refused(
            put_together(tmp_path / "b.svdc", {**tensors, "graph": graph}, metadata),
            tmp_path,
            "refers to external files of weights",
        )


def test_files_outside_of_functions_and_sparse_weights_are_refused(src, tmp_path):
    tensors, metadata = taken_apart(pack(src, tmp_path / "a.svdc").path)
    for where in ("sparse", "function", "attribute"):
        model = onnx.load_model_from_string(tensors["graph"].tobytes())
        if where == "sparse":
            tensor = model.graph.sparse_initializer.add().values
        elif where == "function":
            tensor = (
                model.functions.add(name="F", domain="my").node.add(op_type="Constant").attribute.add(name="value", type=4).t
            )
        else:
            tensor = model.graph.node[0].attribute.add(name="sparse_value", type=11).sparse_tensor.values
        tensor.data_type, tensor.data_location = 1, onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="../secret")
        graph = np.frombuffer(model.SerializeToString(), np.uint8)
        changed = put_together(tmp_path / f"{where}.svdc", {**tensors, "graph": graph}, metadata)
        refused(changed, tmp_path, "refers to external files of weights")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda rows: [["other", *rows[0][1:]], *rows[1:]], "its weight 'other' is damaged"),
        (lambda rows: [*rows, rows[0]], "twice"),
        (lambda rows: [[rows[0][0], "pickle", *rows[0][2:]], *rows[1:]], "is damaged"),
        (lambda rows: [[*rows[0][:2], rows[0][2] + 1, rows[0][3]], *rows[1:]], "damaged"),
        (lambda rows: [[*rows[0][:2], -1, rows[0][3]], *rows[1:]], "damaged"),
        (lambda rows: rows[:-1], "left over|onnx"),
        (lambda rows: [[*rows[0][:3], 9], *rows[1:]], "damaged"),
        (lambda rows: rows[::-1], "damaged"),
        (lambda rows: 5, "its header is damaged"),
    ],
)
def test_what_does_not_fit_is_refused(src, tmp_path, change, reason):
    tensors, metadata = taken_apart(pack(src, tmp_path / "a.svdc", "int8").path)
    rows = json.loads(metadata["weights"])
    path = put_together(tmp_path / "b.svdc", tensors, {**metadata, "weights": json.dumps(change(rows))})
    with pytest.raises(Exception, match=reason) as caught:
        unpack(path, tmp_path / "back.onnx")
    assert type(caught.value).__name__ in ("CheckpointError", "ExportError")
    for place in ("a", [1], {}, None, 0.5, True, -1, 10**30):
        data = lzma.decompress((tmp_path / "a.svdc").read_bytes())
        end = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:end])
        header["numbers"]["data_offsets"][0] = place
        text = json.dumps(header).encode()
        bad = lzma.compress(len(text).to_bytes(8, "little") + text + data[end:])
        (tmp_path / "d.svdc").write_bytes(bad)
        refused(tmp_path / "d.svdc", tmp_path, "its header is damaged")
    later = put_together(tmp_path / "c.svdc", tensors, {**metadata, "format": "7"})
    refused(later, tmp_path, "format 7, of a newer svdcompress")


def test_a_graph_with_a_name_that_is_no_text_is_refused(src, tmp_path):
    """onnx.checker's message would repeat the name, and then would not be valid text either."""
    pack(src, tmp_path / "m.svdc")
    content = lzma.decompress((tmp_path / "m.svdc").read_bytes())
    assert b"Mul" in content
    (tmp_path / "m.svdc").write_bytes(lzma.compress(content.replace(b"Mul", b"\xff\xfel")))
    with pytest.raises(ExportError, match="a name that is not valid text"):
        unpack(tmp_path / "m.svdc", tmp_path / "m.onnx")
    assert not (tmp_path / "m.onnx").exists()
