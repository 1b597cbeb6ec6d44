"""The page's section on using the run's files: inputs, outputs, and code to copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import yaml

from svdcompress.errors import RecipeError
from svdcompress.recipe import Recipe, parse_recipe, parse_yaml
from svdcompress.report import _html as html
from svdcompress.sources import made_by, run_argument
from svdcompress.sources.given import is_given, shown

FILE, SAMPLED = "model.onnx", "model_mc.onnx"

TYPES = {1: "float32", 6: "int32", 7: "int64", 9: "bool", 10: "float16", 11: "float64"}
"""ONNX's element types by number, under NumPy's names."""


@dataclass(frozen=True)
class Port:
    """An input or output of a file; sizes: numbers, or names for those that vary."""

    name: str
    type: str
    sizes: list[int | str]

    @property
    def shape(self) -> str:
        """Its shape as text."""
        return f"({', '.join(map(str, self.sizes))}{',' * (len(self.sizes) == 1)})"


def use(results: Mapping[str, Any], folder: Path | None) -> str:
    """Inputs and outputs of the files, their preprocessing, and a snippet; "" without a file."""
    if folder is None or not (folder / FILE).is_file():
        return ""
    try:
        inputs, outputs, metadata = _read(folder / FILE)
        sampled = _read(folder / SAMPLED) if (folder / SAMPLED).is_file() else None
    except Exception as error:  # whatever onnx raises for a damaged file
        return html.paragraph(f"{FILE} and {SAMPLED} cannot be read ({type(error).__name__}).")
    body = [[_code(FILE), _ports(inputs), _ports(outputs)]]
    if sampled is not None:
        body.append([_code(SAMPLED), _ports(sampled[0]), _ports(sampled[1])])
    table = html.table(["file", "inputs", "outputs"], body)
    snippet = _snippet(inputs, metadata.get("classes"), sampled is not None)
    kept = f'<pre tabindex="0">{escape(snippet)}</pre>'
    recipe = _recipe(results)
    function = None if recipe is None else made_by(recipe.data)
    function = None if function is None else shown(function)
    how = ""
    if recipe is not None and is_given(recipe.model.name):  # a model handed over in Python, unknown to a command
        how = " --onnx" if sampled is not None else " --model FILE.py:FACTORY"
    command = f"svdc predict {run_argument(folder, recipe)}{how} --input FILE"
    taken = "npy, npz, csv, parquet, an image, or a folder"
    if function:  # it may process images in ways that are unknown here
        taken = f"npy or npz, with inputs as {escape(function)} gives them"
    shell = f'<p class="quiet">From the command line: {_code(command)} (FILE: {taken}).</p>'
    return f"{table}{_prepared(metadata.get('preprocessing') or {}, function)}{kept}{shell}"


def _recipe(results: Mapping[str, Any]) -> Recipe | None:
    """The run's recipe; None if its results hold none that can be read."""
    try:
        return parse_recipe(parse_yaml(str(results["recipe"])))
    except (KeyError, RecipeError, yaml.YAMLError):
        return None


def _read(path: Path) -> tuple[list[Port], list[Port], dict[str, Any]]:
    import onnx

    from svdcompress.export import read_metadata

    graph = onnx.load(str(path), load_external_data=False).graph
    return [_port(v) for v in graph.input], [_port(v) for v in graph.output], read_metadata(path)


def _port(value: Any) -> Port:
    kind = value.type.tensor_type
    sizes = [size.dim_param or size.dim_value or "?" for size in kind.shape.dim]
    return Port(value.name, TYPES.get(kind.elem_type, "?"), sizes)


def _ports(ports: list[Port]) -> str:
    return "<br>".join(
        f"{_code(port.name)} {escape(port.type)} {escape(port.shape) if port.sizes else 'scalar'}" for port in ports
    )


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def _prepared(preprocessing: Mapping[str, Any], function: str | None) -> str:
    """How raw inputs have to be prepared for the file. function: the user's own, which makes the run's data."""
    divided = preprocessing.get("bytes")
    steps = [f"bytes (uint8) {divided}, as float32"] * bool(divided) + (preprocessing.get("transform") or [])
    if not steps and function:
        return html.paragraph(
            f"Pass inputs as {function} returns them, with all that it does to them; the files need no other preprocessing."
        )
    if not steps:
        return html.paragraph("Pass inputs as the data source returns them; the files need no other preprocessing.")
    words = "; ".join(step if isinstance(step, str) else ", ".join(f"{k}: {v}" for k, v in step.items()) for step in steps)
    if function:
        return html.paragraph(
            f"Prepare inputs as the run did, in this order: what {function} does to them itself; {words}. svdc predict does "
            "all but the first."
        )
    return html.paragraph(f"Prepare inputs as the run did, in this order: {words}. svdc predict does so by itself.")


def _snippet(inputs: list[Port], classes: Any, sampled: bool) -> str:
    """Python code for onnxruntime, with the names of the files' own inputs."""
    lines = ["import numpy as np", "import onnxruntime", ""]
    for port in inputs:
        sizes = ", ".join("1" if isinstance(size, str) else str(size) for size in port.sizes)
        comma = "," * (len(port.sizes) == 1)
        made = f"np.zeros(({sizes}{comma}), dtype=np.{port.type.replace('bool', 'bool_')})"
        lines.append(f"{_variable(port.name)} = {made}  # yours, in batches of any size")
    feed = ", ".join(f"{port.name!r}: {_variable(port.name)}" for port in inputs)
    lines += [
        f'session = onnxruntime.InferenceSession("{FILE}")',
        f"output = session.run(None, {{{feed}}})[0]",
    ]
    if classes:
        lines += [f"classes = {list(map(str, classes))[:20]!r}" + ("  # ..." if len(classes) > 20 else "")]
        lines += ["print([classes[k] for k in output.argmax(1)])"]
    if sampled:
        lines += [
            "",
            f'unsure = onnxruntime.InferenceSession("{SAMPLED}")',
            "names = [port.name for port in unsure.get_outputs()]",
            f"values = unsure.run(None, {{{feed}, 'samples': np.array(100)}})",
            "result = dict(zip(names, values))  # mean, variance, ...",
        ]
    return "\n".join(lines)


def _variable(name: str) -> str:
    return name if name.isidentifier() else "x"
