"""A small BERT, and a task with tokens for it: which of ten letters occurs more than once in the sequence."""

from __future__ import annotations

import torch
from torch import Tensor, nn

LENGTH, VOCABULARY, CLASSES = 24, 64, 10
LETTERS = 5
Split = tuple[dict[str, Tensor], Tensor]


def bert(hidden: int = 128, layers: int = 2) -> nn.Module:
    """BertForSequenceClassification with four heads, no dropout and random weights; takes {"input_ids"} (N, LENGTH)."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=4 * hidden,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    config.num_labels = CLASSES
    return BertForSequenceClassification(config)


def examples(count: int, seed: int) -> Split:
    """Sequences of random tokens with letters at five places, one of them twice, and that letter (N,)."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1 + CLASSES, VOCABULARY, (count, LENGTH), generator=generator)
    tokens[:, 0] = 0  # the position that BERT's head reads
    places = 1 + torch.rand(count, LENGTH - 1, generator=generator).argsort(1)[:, :LETTERS]
    label = torch.randint(CLASSES, (count,), generator=generator)
    others = (label[:, None] + torch.rand(count, CLASSES - 1, generator=generator).argsort(1) + 1) % CLASSES
    letters = torch.cat([label[:, None].expand(-1, 2), others[:, : LETTERS - 2]], 1)
    tokens.scatter_(1, places, 1 + letters)
    return {"input_ids": tokens}, label


def data(train: int = 6000, held: int = 1000) -> tuple[Split, Split, Split]:
    """Training, validation and test examples."""
    return examples(train, 0), examples(held, 1), examples(held, 2)
