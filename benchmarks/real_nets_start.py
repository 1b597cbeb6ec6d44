"""What a row of `real_nets.py` begins with: the dense network of another row, or the one that was trained on beside it."""

from __future__ import annotations

import sys
from pathlib import Path

from real_peers import unpickled
from safetensors.torch import save_file

from svdcompress.pipeline import open_run
from svdcompress.recipe import Recipe

TRAINED_ON = "-dense-trained-as-long"
"""How the file of the peer ends that trained a run's dense network on."""


def dense_weights(given: Path, name: str, data: list[str]) -> Path:
    """The weights that a case begins with. given: a run, or the file of the dense network that was trained on beside it.

    data: NAME=VALUE of the case's data. Ends the program where they are others than the run's: what the network was trained
    on may be among the test data.
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
    """For how many epochs a run's dense network was trained, and by which other row where it was not by the run itself.

    Ends the program where the data of that row are others.
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
