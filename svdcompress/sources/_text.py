"""Turns text into the inputs of a language model, with its own tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from svdcompress.errors import DataError, shortened
from svdcompress.sources._names import check_folder
from svdcompress.sources._raw import optional
from svdcompress.sources._tokenizer import NO_LIMIT, check_tokenizer, most_tokens

MAX_LENGTH = 128
"""Tokens to which texts are cut or padded, unless `max_length` says otherwise."""

LONGEST = 2**20
"""The largest `max_length`, in tokens."""

ARGS = ("tokenizer", "max_length", "text")
"""The keys of `data.args` for text: the tokenizer's folder or id, the length in tokens, the column."""


def tokens(
    texts: Sequence[str], args: Mapping[str, Any], origin: str, said: list[str] | None = None
) -> dict[str, torch.Tensor]:
    """Texts as input_ids, attention_mask, ..., each (N, length): `max_length` of the arguments, else 128 or the tokenizer's own
    limit, if that is less.

    said: gets warnings, such as about texts that are cut. Raises DataError for a tokenizer that cannot be loaded or used.
    """
    if not args.get("tokenizer"):
        raise DataError(
            f"data.args.tokenizer: {origin} holds text; name the folder or id of its tokenizer (--data-arg tokenizer=FOLDER)"
        )
    check_folder(str(args["tokenizer"]), DataError, "data.args.tokenizer")
    check_tokenizer(str(args["tokenizer"]), "data.args.tokenizer")
    transformers = optional("transformers", "transformers", "text")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(args["tokenizer"], trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds of errors
        reason = shortened((str(error).splitlines() or [type(error).__name__])[0])
        raise DataError(f"data.args.tokenizer: {args['tokenizer']}: {reason}") from error
    most = most_tokens(tokenizer, f"data.args.tokenizer: {args['tokenizer']}")
    length = args["max_length"] if args.get("max_length") is not None else min(MAX_LENGTH, most)
    if not isinstance(length, int) or isinstance(length, bool) or not 1 <= length <= LONGEST:
        raise DataError(f"data.args.max_length: {length!r:.40} is not a number of tokens from 1 to {LONGEST:,}")
    try:
        encoded = tokenizer(list(texts), padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    except Exception as error:  # a damaged tokenizer may raise anything
        reason = shortened((str(error).splitlines() or [type(error).__name__])[0])
        raise DataError(f"data.args.tokenizer: {args['tokenizer']} cannot read the texts of {origin}: {reason}") from error
    if said is not None:
        said += _lengths(tokenizer, list(texts), encoded, length, most, args.get("max_length") is not None, origin)
    return {name: encoded[name] for name in encoded}


def _lengths(tokenizer: Any, texts: list[str], encoded: Any, length: int, most: int, asked: bool, origin: str) -> list[str]:
    """Warnings about texts that are cut, and about a `max_length` above the tokenizer's own limit."""
    found = []
    if asked and length > most:
        found.append(
            f"data.args.max_length: {length} tokens, but the tokenizer's model_max_length is {most}: a model made for it may "
            f"not take more (--data-arg max_length={most})"
        )
    if "attention_mask" not in encoded:
        return found
    full = (encoded["attention_mask"].sum(1) >= length).nonzero().flatten().tolist()
    whole = tokenizer([texts[row] for row in full], verbose=False)["input_ids"] if full else []
    longer = [len(ids) for ids in whole if len(ids) > length]
    if longer:
        longest, better = max(longer), min(max(longer), most)
        way = f"--data-arg max_length={better}" if better > length else "more than the tokenizer's model takes"
        share = 100 * len(longer) / len(texts)
        found.append(
            f"{origin}: {len(longer):,} of {len(texts):,} texts ({share:.0f}%) are cut to {length} tokens; the longest has "
            f"{longest:,} (model_max_length: {most if most < NO_LIMIT else 'not known'}; {way})"
        )
    return found
