"""The page's section on the test examples that the small model is least sure of."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from svdcompress.report import _html as html

NOTE = (
    "The test examples with the highest predictive entropy, by the small model with samples. Wrong labels and inputs of "
    "another kind end up here."
)


def doubts(results: Mapping[str, Any], folder: Path | None) -> str:
    """Pictures with prediction and truth, or a table if the inputs are not pictures; "" if there are none."""
    found = results.get("doubts") or ()
    if not found:
        return ""
    shown = [_shown(row) for row in found]
    if all(shown):
        return html.paragraph(NOTE) + f'<ul class="pictures">{"".join(shown)}</ul>'
    known = [key for key in ("entropy", "mutual_information") if any(row.get(key) is not None for row in found)]
    body = [
        [
            html.right(f"{row['example']:,}"),
            escape(str(row["truth"])),
            escape(str(row["guess"])),
            html.right(f"{100 * row['confidence']:.1f} %"),
            *(html.right(html.number(key, row.get(key))) for key in known),
        ]
        for row in found
    ]
    heads = [">test example", "true", "predicted", ">confidence", *(f">{html.words(key)}" for key in known)]
    return html.paragraph(NOTE) + html.table(heads, body, "narrow")


def _shown(row: Mapping[str, Any]) -> str:
    """One example as a picture; "" if it is not one."""
    pixels = _pixels(row.get("picture"))
    if pixels is None:
        return ""
    truth, guess = escape(str(row["truth"])), escape(str(row["guess"]))
    sure = f"{100 * row['confidence']:.0f} %"
    right = row["truth"] == row["guess"]
    words = f'<b class="{"good" if right else "poor"}">{guess}</b> {sure}' + ("" if right else f"; it is {truth}")
    known = [f"entropy {row['entropy']:.3f} nats"]
    if row.get("mutual_information") is not None:
        known.append(f"mutual information {row['mutual_information']:.3f}")
    title = escape(f"test example {row['example']:,}; {', '.join(known)}")
    alt = f"Test example {row['example']:,}: predicted {guess} ({sure}), true {truth}"
    return f'<li><img src="{_png(pixels)}" alt="{alt}" title="{title}"><span>{words}</span></li>'


def _pixels(stored: Any) -> np.ndarray | None:
    """A picture from its stored shape and bytes; None if they do not make one."""
    try:
        data = np.frombuffer(base64.b64decode(stored["base64"], validate=True), dtype=np.uint8)
        pixels = data.reshape([int(size) for size in stored["shape"]])
    except (TypeError, ValueError, KeyError, OverflowError):
        return None
    good = pixels.ndim in (2, 3) and pixels.size and pixels.shape[2:] in ((), (3,))
    return pixels if good else None


def _png(pixels: np.ndarray) -> str:
    from PIL import Image  # matplotlib needs it anyway

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="png", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
