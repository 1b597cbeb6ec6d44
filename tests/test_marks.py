"""Parts of a page that commands rewrite, and the summary table."""

import json

from marks import put


def test_a_part_is_replaced_and_the_rest_stays(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Reliability\n\n<!-- summary -->\n<!-- /summary -->\n\nBy hand.\n")
    put("one", ["first", "second"], page)
    put("two", ["third"], page)
    put("one", ["fourth"], page)
    text = page.read_text()
    assert "By hand.\n" in text and "first" not in text
    assert "<!-- one -->\nfourth\n<!-- /one -->" in text and "<!-- two -->\nthird\n<!-- /two -->" in text
    assert text.count("<!-- summary -->") == 1 and text.index("summary") < text.index("By hand")


def test_the_table_adds_up_what_is_stored(tmp_path):
    fuzz = {"idx": {"tried": 1500, "refused": 900, "right": 599, "faults": [[3, "x"]]}}
    fuzz["npz"] = {"tried": 500, "refused": 400, "right": 100, "faults": []}
    (tmp_path / "reliability_fuzz.json").write_text(json.dumps(fuzz))
    (tmp_path / "reliability_kill.json").write_text(json.dumps({"records": [{"fault": ""}, {"fault": "x"}, {"fault": ""}]}))
    places = [{"fault": "", "said": "OutputError: full"}, {"fault": "x", "said": "KeyError"}]
    (tmp_path / "reliability_places.json").write_text(json.dumps(places))
    put("any", [], tmp_path / "page.md")
    rows = [line for line in (tmp_path / "page.md").read_text().splitlines() if "`make" in line]
    assert rows == [
        "| damaged and hostile files | 2,000 | 1,300 | 699 | 1 | `make fuzz` |",
        "| killed runs | 3 | 0 | 2 | 1 | `make test-kill` |",
        "| places that fail a run | 2 | 1 | 1 | 1 | `make test-kill` |",
    ]
