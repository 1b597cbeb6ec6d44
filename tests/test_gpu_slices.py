"""The order of steps that need a GPU, and the message if a package is missing."""

import importlib
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    sys.modules.pop("gpu", None)
    yield importlib.import_module("gpu")
    sys.modules.pop("gpu", None)


def test_what_failed_waits_for_what_was_never_tried_or_was_stopped(gpu):
    all_steps = [gpu.Step(name, []) for name in ("tests", "a", "b", "c", "d")]
    known = {"tests": {"rc": 1}, "a": {"rc": 0}, "b": {"rc": None}, "c": {"rc": 2}}
    assert [step.name for step in gpu.in_turn(all_steps, known)] == ["b", "d", "tests", "c"]
    assert [step.name for step in gpu.in_turn(all_steps, {})] == ["tests", "a", "b", "c", "d"]


def test_a_missing_package_is_named_before_anything_is_done(tmp_path):
    """With a Python that sees none of our packages."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(BENCHMARKS / "gpu.py")], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 1 and "lacks torch, numpy, pydantic" in done.stderr and "Traceback" not in done.stderr


def test_results_are_brought_along_to_a_folder_elsewhere(gpu, tmp_path, monkeypatch):
    results = tmp_path / "benchmarks" / "results"
    (results / "gpu").mkdir(parents=True)
    for name in ("speed.json", "real_nets.md", "other.json"):
        (results / name).write_text(name)
    monkeypatch.setattr(gpu, "HERE", tmp_path / "benchmarks")
    gpu.bring_along(results / "gpu")
    assert not list((results / "gpu").iterdir())
    (away := tmp_path / "away").mkdir()
    gpu.bring_along(away)
    assert {file.name: file.read_text() for file in away.iterdir()} == {n: n for n in ("speed.json", "real_nets.md")}


def test_all_that_a_step_has_started_ends_with_it(gpu, tmp_path):
    """The step itself dies at once; its child takes longer, and is waited for."""
    child = "import signal, sys, time; signal.signal(15, lambda *_: (time.sleep(1), open('done', 'w').close(), sys.exit()))"
    child += "; open('ready', 'w').close(); time.sleep(60)"
    step = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    process = subprocess.Popen([sys.executable, "-c", step], cwd=tmp_path, start_new_session=True)
    end = time.monotonic() + 30
    while not (tmp_path / "ready").exists() and time.monotonic() < end:
        time.sleep(0.05)
    gpu.end_group(process)
    assert (tmp_path / "done").exists() and process.poll() == -15


def test_commands_of_a_step_run_side_by_side(gpu, tmp_path, monkeypatch):
    """Each command waits for what another one writes; commands in `beside` are waited for too, and may fail."""
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    wait = "import sys, time, pathlib; a, b = map(pathlib.Path, sys.argv[1:]); a.touch(); end = time.monotonic() + 20\n"
    wait += "while not b.exists() and time.monotonic() < end: time.sleep(0.02)\nsys.exit(not b.exists())"
    commands = [[sys.executable, "-c", wait, "one", "two"], [sys.executable, "-c", wait, "two", "one"]]
    beside = ([sys.executable, "-c", "import time; time.sleep(0.5); open('late', 'w').close(); raise SystemExit(3)"],)
    assert gpu.run(gpu.Step("both", commands, beside=beside), 60) == 0
    assert (tmp_path / "late").exists()
    assert gpu.run(gpu.Step("endless", [[sys.executable, "-c", "import time; time.sleep(60)"]]), 0.2) is None


@pytest.mark.parametrize(("codes", "found"), [([0, 0], 0), ([0, 2], 2), ([2, None], None), ([75, 0], None)])
def test_a_step_is_as_far_as_the_least_of_its_commands(gpu, codes, found):
    assert gpu.outcome(codes) == found


def test_steps_are_chosen_by_how_their_names_begin(gpu):
    from types import SimpleNamespace

    folders = dict.fromkeys(("cifar", "resnet", "rxnfp", "yields", "crepe", "speech", "dncnn"), Path("there"))
    options = SimpleNamespace(**folders, out=Path("out"), epochs=7, only=None)
    names = [step.name for step in gpu.steps(options)]
    assert names[:4] == ["tests", *(f"speed: {name}" for name in gpu.SPEED)] and names[4:6] == [
        "at once: ours",
        "at once: 4x, peers",
    ]
    assert len(gpu.steps(options)[0].beside) == len(gpu.COMPILED)
    options.only = ["at once", "speed: VGG"]
    assert [step.name for step in gpu.steps(options)] == [name for name in names if name.startswith(("at once", "speed: VGG"))]
    ours, peers = gpu.steps(options)[1:3]
    assert [command[-1] for command in ours.commands] == ["--peer"] * 2 and len(peers.commands) == 4
    options.only = ["VGG-16: "]
    of_vgg = {step.name.removeprefix("VGG-16: "): step.commands[0] for step in gpu.steps(options) if "peers" not in step.name}
    assert list(of_vgg) == ["macs5x", "parameters25x", "nonzero80x"]
    for goal, command in of_vgg.items():  # what counts single weights cannot do without pressure
        at = command.index("--epochs") + 1
        assert command[at : at + 2] == (["18", "30"] if goal == "nonzero80x" else ["0", "40"])
        assert ("train.lr_log_sigma2=auto" in command) is (goal == "nonzero80x")
        assert "dense.epochs=40" in command and command[-3:] == ["--only", f"vgg16-{goal}", "--peer"]
    for step in gpu.steps(options):  # torch-pruning collapses on VGG-16 unless each layer loses the same share
        if "peers" in step.name:
            assert {"torch-pruning, Taylor, evenly", "torch-pruning, Taylor"} <= {command[-1] for command in step.commands}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--cifar", "data"], r"--resnet: also needed for the rows of --cifar"),
        (["--speech", "data"], r"--crepe: also needed for the rows of --speech"),
        (["--cifar", "data", "--resnet", "nowhere"], r"--resnet: .*nowhere does not exist"),
        (["--cifar", "data", "--resnet", "data"], r"--resnet: .*data has no resnet20-\*\.th and resnet56-\*\.th"),
        (["--only", "nonsense"], r"--only: no step begins with nonsense"),
        (["--only", "VGG-16"], r"--only: no step begins with VGG-16, of those whose folders are given"),
        (["--only", "speed"], "no CUDA device"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="would run the steps")
def test_folders_that_rows_need_are_asked_for_before_anything_is_done(tmp_path, given, said):
    """From another folder than the root, to which the paths are relative."""
    (tmp_path / "data").mkdir()
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), *given]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode and re.search(said, done.stderr) and "Traceback" not in done.stderr, done.stderr


def test_folders_of_steps_do_not_depend_on_where_it_is_started(gpu, tmp_path, monkeypatch):
    for name in ("resnet20-a.th", "resnet56-b.th"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    options = gpu.parser().parse_args(["--cifar", ".", "--resnet", ".", "--out", "out"])
    assert gpu.problem(options) is None
    (vgg,) = (step for step in gpu.steps(options) if step.name == "VGG-16: macs5x")
    assert {str(tmp_path), str(tmp_path / "out")} <= set(vgg.commands[0]) and "." not in vgg.commands[0]
