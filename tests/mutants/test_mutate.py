"""The mutants of `make mutants`: which edits are made of a file, and who calls what in an instrumented copy."""

from __future__ import annotations

import ast
import subprocess
import sys

from calls import instrument
from mutate import mutants

SOURCE = '''"""A file with a number, 3."""
from __future__ import annotations

LIMIT = 5


class Room:
    """One."""

    def count(self, x: int, most: int = 2) -> int:
        """At most `most`, 7."""
        if x > most and not self.closed:
            raise ValueError(f"more than {most + 1}")
        x += 1
        self.tell("a")
        return min(abs(x.abs()) * 2, LIMIT)

    def __repr__(self):
        return "Room" * 2


def is_int(value: int | float) -> bool:
    return isinstance(value, int | float) and value is not True
'''


OTHER = "import os\n\n\n\ndef other():\n    return os.sep == 'x'\n"


def made(tmp_path, source=SOURCE):
    path = tmp_path / "svdcompress" / "room.py"
    path.parent.mkdir(exist_ok=True)
    (path.parent / "__init__.py").write_text("")
    path.write_text(source)
    return mutants(path, tmp_path)


def test_each_mutant_is_another_program(tmp_path):
    found = made(tmp_path)
    programs = {ast.dump(ast.parse(each.applied(SOURCE))) for each in found}
    assert len(programs) == len(found) and ast.dump(ast.parse(SOURCE)) not in programs
    assert {(each.function, each.old, each.new) for each in found} >= {
        ("", "5", "6"),
        ("Room.count", "2", "3"),
        ("Room.count", "x > most", "x >= most"),
        ("Room.count", "x > most and not self.closed", "(x > most or not self.closed)"),
        ("Room.count", "not self.closed", "(self.closed)"),
        ("Room.count", "x += 1", "pass"),
        ("Room.count", 'self.tell("a")', "pass"),
        ("Room.count", "x.abs()", "x"),
        ("Room.count", "min(abs(x.abs()) * 2, LIMIT)", "max(abs(x.abs()) * 2, LIMIT)"),
        ("is_int", "value is not True", "value is True"),
    }
    text = " ".join(each.key for each in found)
    assert "more than" not in text and 'Room"' not in text and "int & float" not in text


def test_the_order_of_mutants_does_not_depend_on_other_code(tmp_path):
    before = made(tmp_path)
    after = made(tmp_path, OTHER + SOURCE.partition("annotations\n")[2])
    orders = {each.key: each.order(3) for each in before}
    assert {each.key: each.order(3) for each in after if each.function != "other"} == orders
    assert [each.order(4) for each in before] != list(orders.values())


def test_characters_of_several_bytes_do_not_move_an_edit(tmp_path):
    source = 'def f(x):\n    return "größe" if x < 1 else "ü"\n'
    found = made(tmp_path, source)
    assert 'return "größe" if x <= 1 else "ü"' in {each.applied(source).splitlines()[1].strip() for each in found}


def test_functions_of_an_instrumented_copy_tell_that_they_were_called(tmp_path):
    made(tmp_path)
    instrument(tmp_path)
    code = "import mutant_hits, svdcompress.room as r; r.is_int(3); print(*mutant_hits.hits); print(r.Room.count.__doc__)"
    said = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == ["svdcompress/room.py is_int", "At most `most`, 7."]
