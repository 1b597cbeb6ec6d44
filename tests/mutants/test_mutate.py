"""The mutants of `make mutants`: the edits of a file, the tests nearest to it, and what a fork reports."""

from __future__ import annotations

import ast

from mutants import forked
from mutate import mutants
from nearest import Nearest

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


NEAR = {
    "svdcompress/room.py": SOURCE + "\n\n@register\ndef hidden(x):\n    return 3\n",
    "svdcompress/hall.py": "def walk(room):\n    return room.count(LIMIT)\n",
    "tests/test_room.py": "def test_room(fixture):\n    Room()\n\n\ndef test_whole():\n    assert is_int(3)\n",
    "tests/test_hall.py": "class TestHall:\n    def test_walk(self):\n        walk(1)\n\n"
    "    def test_count(self):\n        x.count()\n",
    "tests/conftest.py": "def fixture():\n    return is_int(walk)\n\n\ndef test_no_test():\n    is_int(1)\n",
}


def nearest(tmp_path, function, line=0, own=()):
    for name, text in NEAR.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return [test.removeprefix("tests/") for test in Nearest(tmp_path).tests("svdcompress/room.py", function, line, own)]


def test_the_nearest_tests_are_those_by_the_fewest_steps_of_names(tmp_path):
    hall = "test_hall.py::TestHall::test_count", "test_hall.py::TestHall::test_walk"
    room = "test_room.py::test_room"
    assert nearest(tmp_path, "Room.count") == [room, hall[0], hall[1]]
    assert nearest(tmp_path, "Room.count", own=("test_hall.py",)) == [hall[0], hall[1], room], "those of a file that is named"
    assert nearest(tmp_path, "is_int") == ["test_room.py::test_whole", room], "by a fixture; conftest.py has no tests"
    line = SOURCE.splitlines().index("LIMIT = 5") + 1
    assert set(nearest(tmp_path, "", line)) >= {hall[0], hall[1]}, "a constant"
    assert nearest(tmp_path, "hidden") == nearest(tmp_path, "hidden", own=("none",)) != [], (
        "a decorator's: by its file's others"
    )


def test_a_fork_tells_what_failed_and_how_many_passed(tmp_path):
    (tmp_path / "test_one.py").write_text(
        "import os, time\ndef test_a(): pass\ndef test_b(): assert 0\ndef test_c(): assert 0\n"
        "def test_d(): os._exit(7)\ndef test_e():\n    while True: pass\n"
    )
    tests = [f"test_one.py::test_{each}" for each in "abcde"]
    assert forked(tmp_path, tests[:3]) == (1, tests[1:2])
    assert forked(tmp_path, tests[:3], first=False) == (1, tests[1:3])
    assert forked(tmp_path, tests[:1]) == (1, [])
    assert forked(tmp_path, [tests[3]]) == (0, ["pytest ended with 7"])
    assert forked(tmp_path, [tests[4]], seconds=1) == (0, ["no end within 9 s"])  # 1: startup takes part of it
    assert forked(tmp_path, [tests[0]], seconds=0) == (0, []), "no further test once the time is up"
