"""Hugging Face datasets: a folder saved with `save_to_disk`, or a name on the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from svdcompress.errors import DataError
from svdcompress.recipe import DataSection
from svdcompress.sources._examples import LABEL_KEYS
from svdcompress.sources._images import _stacked
from svdcompress.sources._names import check_folder
from svdcompress.sources._raw import Raw, Table, encode_classes, optional
from svdcompress.sources._text import ARGS, tokens


def read_hub(place: str, section: DataSection) -> Raw:
    """`hf:NAME_OR_DIR`: images, text or numbers, and a label column (`data.target`, else one of the usual names).

    data.args: `tokenizer` (folder or id, for text), `max_length`, `text` (column); the rest goes to `load_dataset`.
    """
    check_folder(place, DataError, "data.name: hf")
    datasets = optional("datasets", "datasets", f"data: hf:{place}")
    args = dict(section.args)
    own = {key: args.pop(key, None) for key in ARGS}
    try:
        found = datasets.load_from_disk(place) if Path(place).is_dir() else datasets.load_dataset(place, **args)
    except Exception as error:  # datasets raises many kinds
        raise DataError(f"data.name: hf:{place}: {type(error).__name__}: {str(error).splitlines()[0]}") from error
    splits = dict(found) if isinstance(found, dict) else {"train": found}
    if "train" not in splits:
        raise DataError(f"data.name: hf:{place} has no split named train; it has {', '.join(splits)}")
    classes: list[str] | None = None
    tables = {}
    for name in ("train", "validation", "test"):
        if name in splits:
            tables[name], classes = _table(splits[name], f"hf:{place} ({name})", section, own, classes)
    return Raw(tables["train"], tables.get("test"), tables.get("validation"), classes)


def _table(split: Any, origin: str, section: DataSection, own: dict[str, Any], classes: list[str] | None) -> tuple[Table, Any]:
    label = section.target or next((name for name in LABEL_KEYS if name in split.column_names), None)
    if label is None or label not in split.column_names:
        raise DataError(f"data.target: {origin} has the columns {', '.join(split.column_names)}; name the one to predict")
    values = list(split[label])
    names = getattr(split.features[label], "names", None)
    if names:
        targets, classes = torch.tensor(values), list(names)
    elif values and isinstance(values[0], str):
        targets, classes = encode_classes(values, classes, origin)
    else:
        targets = torch.tensor(values)
    columns = section.features or [name for name in split.column_names if name != label]
    first = split[0]
    image = next((name for name in columns if hasattr(first[name], "convert")), None)
    text = own["text"] or next((name for name in columns if isinstance(first[name], str)), None)
    if image is not None:
        return Table(origin, _images(split[image], section), targets), classes
    if text is not None:
        return Table(origin, tokens(list(split[text]), own, origin), targets), classes
    arrays = [torch.as_tensor(np.asarray(split[name], dtype=np.float32)) for name in columns]
    inputs = torch.cat([array.reshape(len(array), -1) for array in arrays], 1)
    return Table(origin, inputs, targets), classes


def _images(images: Any, section: DataSection) -> torch.Tensor:
    size = section.image_size
    tensors = []
    for image in images:
        image = image.convert("L" if image.mode in ("1", "L") else "RGB")
        array = np.array(image.resize((size[1], size[0])) if size else image)
        tensors.append(torch.from_numpy(array[None] if array.ndim == 2 else array.transpose(2, 0, 1).copy()))
    return _stacked(tensors, [f"image {index}" for index in range(len(tensors))])
