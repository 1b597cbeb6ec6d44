"""A user's file that imports other files in its folder."""

import sys
import warnings

import pytest

from svdcompress.errors import DataError
from svdcompress.recipe import DataSection
from svdcompress.sources import FromDataset, import_name, open_data


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        del sys.modules[name]


def write(folder, **files):
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return f"{folder}/one.py:make"


def test_a_file_imports_what_is_beside_it_at_once_and_later(tmp_path):
    name = write(
        tmp_path,
        one="import svdc_beside\ndef make():\n    import svdc_later\n    return svdc_beside.A + svdc_later.B\n",
        svdc_beside="A = 1\n",
        svdc_later="B = 2\n",
    )
    before = [*sys.path]
    assert import_name(name, DataError, "data.name")() == 3
    assert sys.path == [*before, str(tmp_path)]  # last in the path
    assert import_name(name, DataError, "data.name")() == 3 and sys.path.count(str(tmp_path)) == 1


def test_processes_of_loaders_import_it_too(tmp_path):
    rows = (
        "import torch\n"
        "class Rows(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 20\n"
        "    def __getitem__(self, i):\n"
        "        from svdc_label import label\n"
        "        return torch.ones(2) * i, label(i)\n"
    )
    name = write(
        tmp_path, one="from svdc_rows import Rows as make\n", svdc_rows=rows, svdc_label="def label(i): return i % 2\n"
    )
    data = open_data(DataSection(name=name, workers=1), "classification")
    assert isinstance(data.train, FromDataset)
    assert sum(len(y) for _, y in data.train.batches(4)) == len(data.train)


def test_a_file_that_fails_leaves_no_folder_behind(tmp_path):
    before = [*sys.path]
    with pytest.raises(DataError, match="No module named 'svdc_not_there'"):
        import_name(write(tmp_path, one="import svdc_not_there\n"), DataError, "data.name")
    assert sys.path == before


def test_another_module_of_the_name_is_told_of(tmp_path):
    one = "import json\nfrom svdc_twice import make\n"
    first = write(tmp_path / "a", one=one, svdc_twice="def make(): return 1\n")
    second = write(tmp_path / "b", one=one, svdc_twice="def make(): return 2\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert import_name(first, DataError, "data.name")() == 1
    with pytest.warns(
        UserWarning, match=r"one\.py: import svdc_twice loaded .*a.svdc_twice\.py instead of .*b.svdc_twice\.py: rename"
    ):
        import_name(second, DataError, "data.name")
    third = write(tmp_path / "c", one="import json\nmake = json.dumps\n", json="")
    with pytest.warns(UserWarning, match=r"import json loaded .* instead of .*c.json\.py: rename"):  # the installed module wins
        import_name(third, DataError, "data.name")
