"""What a row of `real_nets.py` starts from: another row's dense network, or the peer that is this network trained further."""

from __future__ import annotations

import sys
from pathlib import Path

from real_peers import unpickled
from safetensors.torch import save_file

from svdcompress.pipeline import open_run
from svdcompress.recipe import Recipe

TRAINED_ON = "-dense-trained-as-long"
"""The end of the file name of the peer that is a run's dense network, trained further."""


def dense_weights(given: Path, name: str, data: list[str]) -> Path:
    """The weights that a case starts from. given: a run, or the file of the peer that is its dense network, trained further.

    data: NAME=VALUE of the case's data. Ends the program if they differ from the run's: what the network was trained on may
    be among the test data.
    """
    run = _run_of(given)
    args = open_run(run, trust_code=True).recipe.data.args
    if any(str(args.get(key)) != value for key, _, value in (each.partition("=") for each in data)):
        sys.exit(f"--dense: {run.name} has other data ({args}) than {name}: some may be test data here")
    if run == given:
        return run / "dense.safetensors"
    weights = given.with_suffix(".safetensors")
    save_file({key: tensor.contiguous() for key, tensor in unpickled(given)["model"].state_dict().items()}, weights)
    return weights


def epochs_of_start(recipe: Recipe) -> tuple[int, str | None]:
    """How many epochs a run's dense network was trained for, and by which other row, if not by the run itself.

    Ends the program if that row has other data.
    """
    if recipe.weights.trained is False:
        return recipe.dense.epochs, None
    file = Path(recipe.weights.file or "")
    if file.name != "dense.safetensors" and not file.stem.endswith(TRAINED_ON):
        return 0, None
    own = file.name == "dense.safetensors"
    run = file.parent if own else _run_of(file)
    begun = open_run(run, trust_code=True).recipe
    if begun.data != recipe.data:
        sys.exit(f"--dense: {run.name} has other data ({begun.data.args}) than this run ({recipe.data.args})")
    before, _ = epochs_of_start(begun)
    return (before, run.name) if own else (before + unpickled(file.with_suffix(".pt"))["epochs"], file.stem)


def _run_of(given: Path) -> Path:
    if given.is_dir():
        return given
    return given.with_name(given.stem.removesuffix(TRAINED_ON))
