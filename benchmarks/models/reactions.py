"""A BERT that predicts the yields of chemical reactions, and the two sets of measured yields that it is tested on.

The encoder is rxnfp's (Schwaller et al. 2021, MIT): 12 blocks of width 256, pretrained on reactions as SMILES. Its files are
in a wheel on PyPI, and not part of this repository:

    pip download --no-deps rxnfp==0.1.0 && unzip rxnfp-0.1.0-py3-none-any.whl -d rxnfp
    ... --weights rxnfp/rxnfp/models/transformers/bert_pretrained/pytorch_model.bin --set weights.trained=false
    ... --data-arg vocabulary=rxnfp/rxnfp/models/transformers/bert_pretrained/vocab.txt --data-arg folder=YIELDS

YIELDS: a folder with suzuki_split_0.tsv.gz and the other splits, and the sheet of Buchwald-Hartwig yields, from
rxn4chemistry/rxn_yields.
"""

from __future__ import annotations

import csv
import gzip
import re
import zipfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import BertConfig, BertForSequenceClassification

TOKENS = re.compile(
    r"(\%\([0-9]{3}\)|\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\||\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|\%[0-9]{2}|[0-9])"
)
"""The tokens of SMILES (Schwaller et al. 2019; this form is rxnfp's)."""

SUZUKI_LENGTH, REACTANTS_LENGTH = 246, 206
"""Tokens of the longest of the 5,760 Suzuki reactions, both ends included, with and without the product; none is truncated."""

SUZUKI_TRAIN = 4032
"""The first rows of each split's 5,760 that are for training (Ahneman et al.'s 70%)."""

SHEETS = {"Test1": 3057, "Test2": 3055, "Test3": 3058, "Test4": 3055}
"""Out-of-sample tests of the Buchwald-Hartwig sheet: the number of training rows; the rest have five other additives."""

AMINE, PALLADIUM = "Cc1ccc(N)cc1", "O=S(=O)(O[Pd]1c2ccccc2-c2ccccc2N~1)C(F)(F)F"
"""What all Buchwald-Hartwig reactions of the sheet have in common: toluidine, and the precatalyst as rxn_yields writes it."""

BUCHWALD_LENGTH = 267
"""Tokens of the longest of the 3,955 Buchwald-Hartwig reactions, both ends included, as `buchwald` writes them."""

Split = tuple[dict[str, Tensor], Tensor]


class Bert(BertForSequenceClassification):
    """Trains on a CPU without torch's fused attention, whose backward pass took a third of a step on a Xeon with AMX."""

    def forward(self, *args: Any, **options: Any) -> Any:
        plain = self.training and self.device.type == "cpu"
        with sdpa_kernel(SDPBackend.MATH) if plain else nullcontext():
            return super().forward(*args, **options)


def bert(dropout: float = 0.1, outputs: int = 1) -> nn.Module:
    """The encoder and a new head; takes {"input_ids", "attention_mask"} (N, tokens), returns logits (N, outputs).

    dropout: of hidden states, only in `train()`. Attention has none, so that the fused kernels are used. outputs: 2 for a
    yield and its log variance (--loss gaussian-nll).
    """
    config = BertConfig(
        vocab_size=591,
        hidden_size=256,
        num_hidden_layers=12,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=512,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=0.0,
    )
    config.num_labels = outputs
    return Bert(config)


def encode(reactions: list[str], vocabulary: str | Path, length: int) -> dict[str, Tensor]:
    """Padded token ids (N, length), and the mask of what is not padding. Raises ValueError for a too long or unknown one."""
    ids = {token: number for number, token in enumerate(Path(vocabulary).read_text(encoding="utf-8").splitlines())}
    tokens = torch.zeros(len(reactions), length, dtype=torch.int64)
    for row, reaction in enumerate(reactions):
        found = TOKENS.findall(reaction)
        if "".join(found) != reaction:
            raise ValueError(f"reaction {row} is no SMILES that the tokenizer knows: {reaction}")
        whole = [ids["[CLS]"], *(ids.get(token, ids["[UNK]"]) for token in found), ids["[SEP]"]]
        if len(whole) > length:
            raise ValueError(f"reaction {row} has {len(whole)} tokens, more than {length}: {reaction}")
        tokens[row, : len(whole)] = torch.tensor(whole)
    return {"input_ids": tokens, "attention_mask": (tokens != ids["[PAD]"]).long()}


def suzuki(folder: str, vocabulary: str, split: int = 0, product: bool = True, validation: int = 403) -> tuple[Split, ...]:
    """Training, validation and test examples of one of the random splits; yields from 0 to 1, (N, 1).

    product: False leaves out the product, which all Suzuki reactions here share: a sixth of the tokens, without information.
    validation: how many of the last training rows are used for validation; they are in random order.
    """
    with gzip.open(Path(folder) / f"suzuki_split_{split}.tsv.gz", "rt", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    reactions = [row["rxn"] if product else row["rxn"].partition(">>")[0] for row in rows]
    inputs = encode(reactions, vocabulary, SUZUKI_LENGTH if product else REACTANTS_LENGTH)
    targets = torch.tensor([[float(row["y"])] for row in rows])
    cuts = (0, SUZUKI_TRAIN - validation), (SUZUKI_TRAIN - validation, SUZUKI_TRAIN), (SUZUKI_TRAIN, len(rows))
    return tuple(_part(inputs, targets, slice(*cut)) for cut in cuts)


def _part(inputs: dict[str, Tensor], targets: Tensor, where: slice | Tensor) -> Split:
    return {name: tensor[where] for name, tensor in inputs.items()}, targets[where]


def buchwald(folder: str, vocabulary: str, sheet: str = "Test1", validation: int = 300) -> tuple[Split, ...]:
    """Training, validation and test examples of an out-of-sample test; yields from 0 to 1, (N, 1).

    The sheet's 44 molecules are put into rxnfp's form by `buchwald.tsv`: canonical SMILES by RDKit 2026.9.1, and the product
    of each halide with toluidine by the reaction template of rxn_yields. validation: how many examples are drawn from the
    training rows.
    """
    with (Path(__file__).parent / "buchwald.tsv").open(encoding="utf-8") as file:
        known = {row["sheet"]: row for row in csv.DictReader(file, delimiter="\t")}
    rows = sheet_rows(Path(folder) / "buchwald_hartwig.xlsx", sheet)
    reactions = []
    for row in rows:
        halide = known[row["Aryl halide"]]
        others = (known[row[name]]["canonical"] for name in ("Ligand", "Base", "Additive"))
        reactions.append(f"{'.'.join([halide['canonical'], AMINE, PALLADIUM, *others])}>>{halide['product']}")
    inputs = encode(reactions, vocabulary, BUCHWALD_LENGTH)
    targets = torch.tensor([[float(row["Output"]) / 100] for row in rows])
    end = SHEETS[sheet]
    order = torch.randperm(end, generator=torch.Generator().manual_seed(0))
    cuts = order[validation:], order[:validation], torch.arange(end, len(rows))
    return tuple(_part(inputs, targets, cut) for cut in cuts)


def sheet_rows(file: Path, name: str) -> list[dict[str, str]]:
    """The rows of one sheet of an .xlsx file (a zip of XML), with the names in its first row as keys."""
    space = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"
    link = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}id"
    with zipfile.ZipFile(file) as archive:
        parts = {part: ElementTree.fromstring(archive.read(f"xl/{part}.xml")) for part in ("sharedStrings", "workbook")}
        shared = ["".join(each.text or "" for each in entry.iter(f"{space}t")) for entry in parts["sharedStrings"]]
        ids = {sheet.get("name"): sheet.get(link) for sheet in parts["workbook"].iter(f"{space}sheet")}
        links = ElementTree.fromstring(archive.read("xl/_rels/workbook.xml.rels"))
        target = next(each.get("Target") for each in links if each.get("Id") == ids[name])
        root = ElementTree.fromstring(archive.read(f"xl/{target}"))
    table = []
    for row in root.iter(f"{space}row"):
        cells = [(cell.get("t"), cell.find(f"{space}v")) for cell in row]
        values = ["" if value is None else value.text or "" for _, value in cells]
        table.append([shared[int(value)] if kind == "s" else value for (kind, _), value in zip(cells, values, strict=True)])
    return [dict(zip(table[0], row, strict=True)) for row in table[1:]]
