"""Text to what a language model takes, by its own tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from svdcompress.errors import DataError, shortened
from svdcompress.sources._names import check_folder
from svdcompress.sources._raw import optional

MAX_LENGTH = 128
"""Tokens to which texts are cut or padded, unless `max_length` says otherwise."""

LONGEST = 2**20
"""Tokens that one text may have."""

ARGS = ("tokenizer", "max_length", "text")
"""What `data.args` says of text: the tokenizer's folder or id, the length in tokens, the column."""


def tokens(texts: Sequence[str], args: Mapping[str, Any], origin: str) -> dict[str, torch.Tensor]:
    """Texts as input_ids, attention_mask, ..., each (N, max_length). Raises DataError for a tokenizer that cannot be had."""
    if not args.get("tokenizer"):
        raise DataError(
            f"data.args.tokenizer: {origin} holds text; name the folder or id of its tokenizer (--data-arg tokenizer=FOLDER)"
        )
    check_folder(str(args["tokenizer"]), DataError, "data.args.tokenizer")
    transformers = optional("transformers", "transformers", "text")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(args["tokenizer"], trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds
        reason = shortened((str(error).splitlines() or [type(error).__name__])[0])
        raise DataError(f"data.args.tokenizer: {args['tokenizer']}: {reason}") from error
    length = args["max_length"] if args.get("max_length") is not None else MAX_LENGTH
    if not isinstance(length, int) or isinstance(length, bool) or not 1 <= length <= LONGEST:
        raise DataError(f"data.args.max_length: {length!r:.40} is no number of tokens from 1 to {LONGEST:,}")
    try:
        encoded = tokenizer(list(texts), padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    except Exception as error:  # whatever a damaged tokenizer makes of the texts
        reason = shortened((str(error).splitlines() or [type(error).__name__])[0])
        raise DataError(f"data.args.tokenizer: {args['tokenizer']} cannot read the texts of {origin}: {reason}") from error
    return {name: encoded[name] for name in encoded}
