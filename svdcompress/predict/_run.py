"""From a run's folder and a file of inputs to a file of predictions."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from svdcompress.batch import first_tensor, map_tensors
from svdcompress.errors import (
    DataError,
    ExportError,
    ModelError,
    RecipeError,
    SvdcError,
    UsageError,
    cause,
    explained,
    out_of_memory,
    shortened,
)
from svdcompress.export import read_metadata
from svdcompress.likelihoods import likelihood_for, own_likelihood
from svdcompress.pipeline import OpenRun, Preprocessing, open_run
from svdcompress.predict._promises import wanted
from svdcompress.predict._read import read_inputs
from svdcompress.predict._unlike import Sizes, doubts, other_sizes, warning_of_sizes
from svdcompress.predict._write import check_suffix, write_predictions
from svdcompress.sources import channels_last, check_finite, is_table, preprocess
from svdcompress.uncertainty import NotFiniteError, mc_predict, mean_predict

MC_FILE = "model_mc.onnx"

BATCH = 256
"""Inputs per batch."""

SAMPLES = 100
"""Default number of draws."""

MOST_SAMPLES = 1_000_000
"""Maximum number of draws: more would take ever longer and tell nothing new."""

NOT_FINITE = "outputs_must_be_finite"
"""Name of the file's node that fails for outputs that are not finite."""

MOST_NAMED = 10
"""Maximum number of inputs that a message names."""

PROMISES = ("set", "lower", "upper")
"""Outputs of a file with `export.sets`, which hold from the draws of the validation data on: `Wanted.add` makes them anew."""

NAMES = {"predictive_entropy": "entropy"}
"""Outputs of the ONNX file that have another name in `Prediction`."""


def predict_run(
    run: str | Path,
    inputs: str | Path,
    out: str | Path | None = None,
    *,
    samples: int | None = None,
    onnx: bool = False,
    seed: int | None = None,
    device: str | None = None,
    answer_above: float | None = None,
    coverage: float | None = None,
    told: dict[str, Any] | None = None,
    trust_code: bool = False,
    model: Any = None,
) -> tuple[Path, int]:
    """Predict a file of inputs with a finished run, and write predictions and uncertainties.

    Returns the file written, and the number of inputs in it.

    run: the run's folder. inputs: .npy, .npz, .csv, .parquet, an image or a folder of images; prepared as in training. If
        the run's data came from a user's function, it is not known how that prepared them: give arrays as it returns them;
        images go in as values in [0, 1] and then through `data.transform`, with a warning.
    out: .csv, .parquet or .npz; None: predictions.csv in the current folder.
    samples: draws for each input; None: 100, or the mean instead if the run's validation data show that draws are no better
        (PyTorch only: model_mc.onnx always draws). The mean has no epistemic part: its mutual information is 0.
    onnx: use onnxruntime and model_mc.onnx alone, instead of PyTorch.
    seed: of the noise; None: 0 for PyTorch, and a fresh one at each call for onnxruntime. device: for PyTorch; None: CPU.
    answer_above: accuracy wanted on the answered inputs; `answered` then says for each input whether its confidence is high
        enough for that, judging by the run's validation data. coverage: of `set` (True for each class in it), or of `lower`
        to `upper`. None: what the run's recipe asks for, if anything. What cannot be promised, for example with fewer draws
        than for the validation data, is an error if it is asked for here, and is left out if only the recipe asks for it.
    told: receives what was promised, by name; under "not_promised" why what the recipe asks for is not; under "by" what
        predicted, "samples" or "mean"; under "warnings" a list of the warnings about the inputs, which are also given as
        Python warnings; under "other_sizes" how the sizes of the inputs differ from those in training, if they do: the
        promises are then for other inputs.
    trust_code, model: see `svdcompress.pipeline.open_run`.

    Values are in the target's own units. Raises DataError for inputs that cannot be read or do not fit or whose predictions
    are not finite, UsageError, OutputError, and what `open_run` and `mc_predict` raise.
    """
    out = Path("predictions.csv" if out is None else out)
    check_suffix(out)
    if out.resolve() == Path(inputs).resolve():
        raise UsageError(f"{out}: the predictions would overwrite the inputs; name another file")
    count = SAMPLES if samples is None else samples
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_SAMPLES:
        raise UsageError(f"samples: {shortened(repr(count), 40)}; a whole number from 1 to {MOST_SAMPLES:,} is needed")
    asked: dict[str, Any] = {"trust_code": trust_code, "model": model}
    opened = open_run(run, **{name: value for name, value in asked.items() if value})
    preprocessing = opened.preprocessing if not onnx else _left_to_do(opened)
    files = {} if opened.preprocessing.get("input_shape") else _sizes(opened)
    raw, names = read_inputs(inputs, preprocessing, _shape(opened, files))
    check_finite(raw, str(inputs))
    x = _prepared(_numbers(raw, opened), preprocessing, inputs, trust_code)
    if not names:
        raise DataError(f"{inputs}: a batch of 0 inputs; there is nothing to predict")
    told = {} if told is None else told
    if found := doubts(inputs, raw, opened):
        told["warnings"] = found
    for doubt in found:
        warnings.warn(doubt, stacklevel=2)
    told["by"] = by = "mean" if samples is None and not onnx and _mean_suffices(opened) else "samples"
    promised = wanted(opened, answer_above, coverage, count, told)  # before anything slow
    drawn = 0 if by == "mean" else count
    if onnx:
        parts = _by_onnx(opened, x, count, seed, names, inputs)
    else:
        parts = _by_torch(opened, x, drawn, seed or 0, device, names, inputs)
    batches = list(parts)
    if differ := other_sizes(raw, x, opened, files, preprocessing):  # only now: most models fail on other sizes
        told["other_sizes"] = differ
        told["warnings"] = [*told.get("warnings", ()), warning_of_sizes(inputs, differ)]
        warnings.warn(told["warnings"][-1], stacklevel=2)
    arrays = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    _check_finite(arrays, names, inputs)
    scale = preprocessing.get("target_scale")
    task = opened.recipe.task
    arrays = _in_units(arrays, scale) if scale else arrays
    arrays |= promised.add(opened, arrays, told) if promised is not None else {}
    write_predictions(out, arrays, names, task, opened.classes, opened.dim)
    return out, len(names)


def _mean_suffices(opened: OpenRun) -> bool:
    """Whether the run found on its validation data that draws are no better than the mean; False where nothing says so."""
    try:
        results = opened.results
    except SvdcError:  # the folder has models, but no report that can be read
        return False
    return (results.get("calibrate") or {}).get("better") == "mean"


def _left_to_do(opened: OpenRun) -> dict[str, Any]:
    """The preprocessing that the run's Monte-Carlo file leaves to its caller, according to its metadata."""
    path = _mc_file(opened)
    found = read_metadata(path).get("preprocessing", opened.preprocessing)
    try:
        Preprocessing.model_validate(found)
    except ValidationError as error:
        raise ExportError(f"{path}: its metadata on the inputs are damaged: preprocessing.{explained(error)}") from None
    return found


def _mc_file(opened: OpenRun) -> Path:
    path = opened.file(MC_FILE)
    if not os.path.isfile(path):
        raise ExportError(f"{path}: no such file; write it with: svdc export {opened.folder} --monte-carlo --out {path}")
    return path


def _shape(opened: OpenRun, files: Sizes) -> tuple[int, ...] | None:
    """Shape of one input before the transforms, or as in the run's ONNX file; None if unknown, or of several inputs."""
    if opened.preprocessing.get("input_shape"):
        return tuple(opened.preprocessing["input_shape"])
    sizes = next(iter(files.values())) if len(files) == 1 else [0]
    return tuple(sizes) if all(sizes) else None


def _sizes(opened: OpenRun) -> Sizes:
    """The sizes that the run's ONNX file takes; {} if it is missing or damaged."""
    inputs = _file_inputs(opened)
    return {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim[1:]] for value in inputs}


def _file_inputs(opened: OpenRun) -> list[Any]:
    """Inputs of the run's ONNX file; [] if it is missing or damaged."""
    path = opened.file("model.onnx")
    if not os.path.isfile(path):
        return []
    import onnx

    try:
        return list(onnx.load(str(path), load_external_data=False).graph.input)
    except Exception:  # a damaged file: the inputs are taken as they are, and the model says whether they fit
        return []


def _numbers(raw: Any, opened: OpenRun) -> Any:
    """Convert integers to float32 where the run's ONNX file takes floats, except bytes, which are images; tokens stay. The
    numbers of a table are converted in any case."""
    parts = {"": raw} if isinstance(raw, Tensor) else raw
    if is_table(opened.preprocessing, raw):
        return raw if raw.is_floating_point() else raw.float()
    whole = [name for name, tensor in parts.items() if not (tensor.is_floating_point() or tensor.dtype == torch.uint8)]
    inputs = _file_inputs(opened) if whole else []
    floating = {value.name for value in inputs if value.type.tensor_type.elem_type == _FLOAT}
    if isinstance(raw, Tensor):
        return raw.float() if floating and len(inputs) == 1 else raw
    return {name: tensor.float() if name in whole and name in floating else tensor for name, tensor in raw.items()}


_FLOAT = 1  # onnx.TensorProto.FLOAT


def _prepared(raw: Any, preprocessing: dict[str, Any], origin: str | Path, trust_code: bool) -> Any:
    try:
        return preprocess(raw, preprocessing, trust_code=trust_code)
    except RecipeError as error:
        raise DataError(f"{origin}: the recipe's transforms do not fit these inputs ({error})") from error


def _batches(x: Any) -> Iterator[Any]:
    for start in range(0, len(first_tensor(x)), BATCH):
        yield map_tensors(x, lambda tensor, start=start: tensor[start : start + BATCH])


def _by_torch(
    opened: OpenRun, x: Any, samples: int, seed: int, device: str | None, names: Sequence[str], origin: str | Path
) -> Iterator[dict[str, np.ndarray]]:
    """Predictions of each batch. samples: 0 for the mean. names: of the inputs, which come from `origin`."""
    model = opened.model.to(device or "cpu")
    generator = torch.Generator().manual_seed(seed)
    own = own_likelihood(opened.model, opened.recipe.task, opened.dim, opened.tau)

    def predicted(batch: Any) -> dict[str, np.ndarray]:
        if samples:
            return mc_predict(model, batch, samples, task=own, generator=generator).numpy()
        return mean_predict(model, batch, task=own).numpy()

    def fails(batch: Any, row: int) -> bool:
        try:
            predicted(map_tensors(batch, lambda tensor: tensor[row : row + 1]))
        except SvdcError as error:  # a model may refuse a batch of one
            return isinstance(error, NotFiniteError)
        return False

    for index, batch in enumerate(_batches(x)):
        try:
            found = predicted(batch)
        except DataError as error:
            why = channels_last(batch) if "does not fit" in str(error) else ""
            raise DataError(f"{origin}: {error}{why}") from error
        except NotFiniteError as error:
            rows = names[index * BATCH : (index + 1) * BATCH]
            raise _not_finite(origin, [name for row, name in enumerate(rows) if fails(batch, row)] or rows) from error
        except SvdcError:
            raise
        except Exception as error:  # whatever the model raises
            if out_of_memory(error):
                raise ModelError(
                    "out of memory: give the inputs in smaller files, or use a machine or device with more memory"
                ) from error
            raise DataError(
                f"{origin}: the model of {opened.folder} fails on inputs of the shape {_shapes(batch)}: "
                f"{type(error).__name__}: {cause(error)}{channels_last(batch)}"
            ) from error
        yield found


def _shapes(batch: Any) -> str:
    """The shape of one input, or of each of its parts, as text."""
    found: list[str] = []
    map_tensors(batch, lambda tensor: found.append(str(tuple(tensor.shape[1:]))))
    return " and ".join(found)


def _by_onnx(
    opened: OpenRun, x: Any, samples: int, seed: int | None, names: Sequence[str], origin: str | Path
) -> Iterator[dict[str, np.ndarray]]:
    """Predictions of each batch. No PyTorch model is built, as in a service without PyTorch."""
    import onnxruntime

    path = _mc_file(opened)
    read_metadata(path)  # its error names a damaged file
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # failures are raised as errors
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"], enable_fallback=0)
    except Exception as error:  # onnxruntime has its own exception class for each status
        raise ExportError(f"{path}: onnxruntime cannot load it ({shortened(cause(error))}); {_again(opened, path)}") from error
    if seed is not None and "seed" not in [value.name for value in session.get_overridable_initializers()]:
        raise ExportError(
            f"{path}: the file takes no seed; write one that does with: svdc export {opened.folder} --monte-carlo --out FILE"
        )
    outputs = [NAMES.get(str(output.name), str(output.name)) for output in session.get_outputs()]
    needed = {"mean"} if likelihood_for(opened.recipe.task).classes else {"mean", "variance"}
    expected = [value for value in session.get_inputs() if value.name != "samples"]
    for index, batch in enumerate(_batches(x)):
        feed = {**_feed(batch, expected, path, origin), "samples": np.array(samples, np.int64)}
        if seed is not None:
            feed["seed"] = _seed_of(seed, index)
        rows = names[index * BATCH : (index + 1) * BATCH]
        found = dict(zip(outputs, _run(session, feed, path, rows, origin), strict=True))
        if not needed <= set(found) or any(not _has_rows(value, len(rows)) for value in found.values()):
            raise ExportError(f"{path}: its outputs are not those of a Monte-Carlo file; {_again(opened, path)}")
        yield {name: value for name, value in found.items() if name not in PROMISES}


def _again(opened: OpenRun, path: Path) -> str:
    return f"write it again with: svdc export {opened.folder} --monte-carlo --out {path}"


def _has_rows(value: Any, count: int) -> bool:
    """Whether an output holds floating-point numbers for `count` inputs."""
    return isinstance(value, np.ndarray) and value.dtype.kind == "f" and value.ndim > 0 and len(value) == count


def _seed_of(seed: int, index: int) -> np.ndarray:
    """The file's seed for one batch, so that each batch has its own noise."""
    state = np.random.SeedSequence([abs(seed), int(seed < 0), index]).generate_state(1, np.uint64)
    return (state >> np.uint64(1)).astype(np.int64).reshape(())


def _run(session: Any, feed: dict[str, np.ndarray], path: Path, names: Sequence[str], origin: str | Path) -> list[np.ndarray]:
    """The file's outputs. names: of the rows, for errors."""
    try:
        return session.run(None, feed)
    except Exception as error:  # onnxruntime has its own exception class for each status
        if NOT_FINITE not in str(error):
            raise DataError(f"{origin}: the inputs do not fit {path}: {error}{_lie(feed).removeprefix('.')}") from error
        wrong = [name for row, name in enumerate(names) if _fails(session, feed, row)]
        raise _not_finite(origin, wrong or names) from error


def _lie(feed: dict[str, np.ndarray]) -> str:
    """A hint for images with the channels last, which PyTorch does not take; "" for all other inputs."""
    return next((found for value in feed.values() if (found := channels_last(torch.from_numpy(value)))), "")


def _fails(session: Any, feed: dict[str, np.ndarray], row: int) -> bool:
    """Whether the predictions for a single row are not finite."""
    try:
        session.run(None, {name: value[row : row + 1] if value.ndim else value for name, value in feed.items()})
    except Exception as error:
        return NOT_FINITE in str(error)
    return False


def _check_finite(arrays: dict[str, np.ndarray], names: Sequence[str], origin: str | Path) -> None:
    finite = np.ones(len(names), bool)
    for array in arrays.values():
        finite &= np.isfinite(array).reshape(len(names), -1).all(1)
    if not finite.all():
        raise _not_finite(origin, [name for name, good in zip(names, finite, strict=True) if not good])


def _not_finite(origin: str | Path, names: Sequence[str]) -> DataError:
    listed = ", ".join(names[:MOST_NAMED]) + (", ..." if len(names) > MOST_NAMED else "")
    return DataError(
        f"{origin}: the predictions are not finite (NaN or infinite) for {len(names)} of the inputs: {listed}; their values "
        "are too large for the model, or it computes NaN for them: fix these inputs or leave them out"
    )


def _feed(batch: Any, expected: list[Any], path: Path, origin: str | Path) -> dict[str, np.ndarray]:
    tensors: dict[str, Tensor] = batch if isinstance(batch, dict) else {expected[0].name: batch}
    missing = [value.name for value in expected if value.name not in tensors]
    if missing:
        raise DataError(f"{origin}: {path} takes {', '.join(value.name for value in expected)}, but there is no {missing[0]!r}")
    values = {value.name: tensors[value.name] for value in expected}
    for name, tensor in values.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise DataError(f"{origin}: {name}: contains values that are not finite (NaN or infinite)")
    return {name: tensor.numpy() for name, tensor in values.items()}


def _in_units(arrays: dict[str, np.ndarray], scale: list[float]) -> dict[str, np.ndarray]:
    """Convert predictions from the units of standardized targets to those of the targets; all but the mean are squares."""
    shift, factor = scale
    return {name: value * factor + shift if name == "mean" else value * factor**2 for name, value in arrays.items()}
