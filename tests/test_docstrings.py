"""The examples in docstrings of public names run and give the output shown."""

import doctest
import inspect

import pytest
import torch

import svdcompress as svdc

NEED_A_RUN = {"load_run", "plot_tradeoff", "sparsify"}
"""Names whose examples need or make a finished run; tests/pipeline covers them."""


def examples(name):
    return doctest.DocTestParser().get_examples(inspect.getdoc(getattr(svdc, name)) or "")


NAMES = [name for name in svdc.__all__ if examples(name)]


def test_the_verbs_of_the_first_page_have_an_example():
    verbs = {"convert", "ELBO", "relevance", "prune", "save", "load", "to_dense", "plan", "groups", "hold", "load_run"}
    assert verbs <= set(NAMES)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NEED_A_RUN])
def test_an_example_gives_what_it_shows(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    namespace = {"svdc": svdc, "torch": torch, "model": model, "x": torch.randn(4, 8), "y": torch.tensor([0, 1, 2, 0])}
    for example in examples(name):
        if not example.want:
            exec(example.source, namespace)
        else:
            assert repr(eval(example.source, namespace)) == example.want.strip()
