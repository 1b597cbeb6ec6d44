"""The fewest bits of each layer's weights that the validation error allows, for an archive."""

from __future__ import annotations

import copy

from svdcompress.errors import UsageError
from svdcompress.export import round_weights
from svdcompress.layers import variational_layers
from svdcompress.pipeline._allowed import Allowed, budget, told
from svdcompress.pipeline._baked import baked
from svdcompress.pipeline._open import OpenRun
from svdcompress.pipeline._select import bare
from svdcompress.sources import Examples
from svdcompress.train import evaluate

FEWEST, MOST = 3, 8


def fewest_bits(opened: OpenRun) -> dict[str, int]:
    """Bits of each layer's weight, 3 to 8, such that the validation error of the rounded model stays within what fewer bits
    may cost (0.1 points, or one answer; or the run's own search.max_drop and search.max_error).

    All layers start with 3 bits; then the layer whose rounding costs the most NLL for its bytes gets one more, until the error
    is allowed. The posterior decides the size of the rounding steps.

    Raises UsageError for a model without variational layers, or if 8 bits lose too much.
    """
    units = baked(opened.preprocessing, opened.recipe.task, opened.dim)
    known = budget(opened.recipe, (opened.results.get("dense") or {}).get("validation"))
    allowed = Allowed(opened.file("model.onnx"), opened.data, units, **known)
    sizes = {name: int(layer.relevant().sum()) for name, layer in variational_layers(bare(opened.model))}

    def tried(bits: dict[str, int], examples: Examples | None = None, figure: str | None = None) -> float:
        model = copy.deepcopy(opened.model)
        round_weights(bare(model), bits)
        found = evaluate(model, examples or opened.data.validation, **told(opened.data))
        return found[figure] if figure else found.get("error", found.get("rmse", float("nan")))

    bits = dict.fromkeys((name for name, size in sizes.items() if size), FEWEST)
    if not bits:
        raise UsageError("--precision auto: the model has no variational layers with weights left")
    most = dict.fromkeys(bits, MOST)
    if not (error := tried(most)) <= allowed.limit:
        found = f"with {MOST} bits the validation error is {error:.4g}, and the limit is {allowed.limit:.4g}"
        raise UsageError(f"--precision auto: {found}; use float16")
    least = tried(most, allowed.few, "nll")
    alone = {name: tried({**most, name: FEWEST}, allowed.few, "nll") - least for name in bits}
    costs = {name: max(cost, 1e-9) / sizes[name] for name, cost in alone.items()}
    while not tried(bits) <= allowed.limit:  # a further bit leaves a quarter of the squared rounding errors
        name = max((name for name in bits if bits[name] < MOST), key=lambda name: costs[name] / 4 ** bits[name])
        bits[name] += 1
    return bits
