"""Text to what a language model takes, by its own tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from svdcompress.errors import DataError
from svdcompress.sources._names import check_folder
from svdcompress.sources._raw import optional

MAX_LENGTH = 128
"""Tokens to which texts are cut or padded, unless `max_length` says otherwise."""

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
        raise DataError(f"data.args.tokenizer: {args['tokenizer']}: {str(error).splitlines()[0]}") from error
    length = args["max_length"] if args.get("max_length") is not None else MAX_LENGTH
    if not isinstance(length, int) or length < 1:
        raise DataError(f"data.args.max_length: {length!r} is no number of tokens")
    encoded = tokenizer(list(texts), padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    return {name: encoded[name] for name in encoded}
