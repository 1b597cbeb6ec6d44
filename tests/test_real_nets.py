"""The tools of benchmarks/real_nets.py: fitted noise, differences with intervals, results of several processes."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from sklearn.metrics import r2_score

from svdcompress.layers import BernoulliDropout
from svdcompress.recipe import dump_recipe, load_recipe
from svdcompress.sources import InMemory

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
NAMES = [file.stem for file in BENCHMARKS.iterdir()]


@pytest.fixture
def module(monkeypatch):
    """Imports a file of benchmarks/; its modules are removed again, because other tests have files of the same names."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    known = {name: sys.modules.pop(name, None) for name in NAMES}
    yield importlib.import_module
    for name, earlier in known.items():
        sys.modules.pop(name, None)
        if earlier is not None:
            sys.modules[name] = earlier


@pytest.fixture
def figures(module):
    return module("real_nets_figures")


def predictions(rng, targets, spread):
    """Means, and deviations that match the size of their errors."""
    deviation = rng.uniform(0.2, 2.0, len(targets)) * spread
    return targets + deviation * rng.standard_normal(len(targets)), deviation


def each(means, deviation, targets):
    error = torch.from_numpy(np.abs(means - targets))
    spread = torch.tensor(targets.var())
    return {"square": error**2, "spread": spread, "error": error, "deviation": torch.from_numpy(deviation)}


def test_noise_is_what_makes_the_targets_likeliest(figures):
    rng = np.random.default_rng(0)
    target, variance = rng.standard_normal(400), rng.uniform(0.0, 0.2, 400)
    mean = target + np.sqrt(variance + 0.3) * rng.standard_normal(400)
    wanted = optimize.minimize_scalar(
        lambda extra: -stats.norm(mean, np.sqrt(variance + extra)).logpdf(target).mean(), bounds=(1e-3, 3), method="bounded"
    )
    found = figures.noise(*(torch.from_numpy(part) for part in (mean, variance, np.ones(400), target)))
    assert found == pytest.approx(wanted.x, rel=0.02)


def test_noise_that_the_network_names_is_scaled(figures):
    rng = np.random.default_rng(4)
    variance, own = rng.uniform(0.0, 0.2, 4000), rng.uniform(0.1, 2.0, 4000)
    target = np.sqrt(variance + 1.7 * own) * rng.standard_normal(4000)
    found = figures.noise(*(torch.from_numpy(part) for part in (np.zeros(4000), variance, own, target)))
    assert found == pytest.approx(1.7, rel=0.1)


class Named(torch.nn.Module):
    """Predicts a yield near 0, with dropout, and uses its input as the log variance."""

    def __init__(self):
        super().__init__()
        self.dropout = BernoulliDropout(0.5)

    def forward(self, x):
        return torch.cat([1e-4 * self.dropout(torch.ones_like(x)), x], 1)


def test_doubts_of_a_network_with_a_noise_of_its_own(figures):
    rng = np.random.default_rng(5)

    def examples(count):
        x = rng.uniform(-3, 1, (count, 1))
        y = np.sqrt(2 * np.exp(x)) * rng.standard_normal((count, 1))
        return InMemory(torch.from_numpy(x).float(), torch.from_numpy(y).float())

    data = SimpleNamespace(validation=examples(4000), test=examples(4000), target_scale=(5.0, 3.0))
    opened = SimpleNamespace(data=data, recipe=SimpleNamespace(task="gaussian"))
    found = figures.doubts(Named(), opened, 2, None, torch.device("cpu"))
    x, y = data.test.inputs.double().flatten(), data.test.targets.double().flatten()
    assert found["spearman"] == pytest.approx(stats.spearmanr(x, abs(y))[0], abs=1e-4)
    assert abs(found["spearman_draws"]) < 0.05
    assert found["coverage"] == pytest.approx(0.9, abs=0.02)
    deviation = 3 * np.sqrt(2 * np.exp(x.numpy()))
    assert found["width"] == pytest.approx(2 * 1.6449 * deviation.mean(), rel=0.05)
    assert found["nll"] == pytest.approx(-stats.norm(0, deviation).logpdf(3 * y.numpy()).mean(), abs=0.01)


def test_differences_are_those_of_the_figures(figures):
    rng = np.random.default_rng(1)
    targets = rng.standard_normal(500)
    (ours, deviation), (other, doubt) = (predictions(rng, targets, spread) for spread in (0.4, 0.6))
    doubt = 0.7 * rng.permutation(doubt)  # unrelated to its own errors, and too small
    found = figures.beside(each(ours, deviation, targets), each(other, doubt, targets))
    wanted = {
        "r2_ahead": r2_score(targets, ours) - r2_score(targets, other),
        "coverage_ahead": np.mean((targets >= ours - 1.6449 * deviation) & (targets <= ours + 1.6449 * deviation))
        - np.mean((targets >= other - 1.6449 * doubt) & (targets <= other + 1.6449 * doubt)),
        "nll_ahead": stats.norm(other, doubt).logpdf(targets).mean() - stats.norm(ours, deviation).logpdf(targets).mean(),
        "spearman_ahead": stats.spearmanr(deviation, abs(ours - targets))[0] - stats.spearmanr(doubt, abs(other - targets))[0],
    }
    assert found.keys() == wanted.keys()
    for key, difference in wanted.items():
        middle, low, high = found[key]
        assert middle == pytest.approx(difference, abs=1e-12)
        assert low < middle < high and high - low < (2 if key == "nll_ahead" else 0.3)
        assert high < 0 if key == "nll_ahead" else low > 0


def test_a_network_is_not_ahead_of_itself(figures):
    rng = np.random.default_rng(2)
    targets = rng.standard_normal(50)
    own = each(*predictions(rng, targets, 0.4), targets)
    assert figures.beside(own, own) == {key: [0.0] * 3 for key in ("r2_ahead", "coverage_ahead", "nll_ahead", "spearman_ahead")}


def test_what_was_not_measured_is_not_compared(figures):
    rng = np.random.default_rng(3)
    targets = rng.standard_normal(20)
    own = each(*predictions(rng, targets, 0.4), targets)
    means_alone = {key: own[key] for key in ("square", "spread")}
    fewer = own | {key: own[key][:10] for key in ("error", "deviation")}
    assert figures.beside({}, {}) == {}
    assert figures.beside(own, means_alone).keys() == figures.beside(own, fewer).keys() == {"r2_ahead"}


def test_processes_add_to_the_same_network(module, tmp_path, monkeypatch):
    real_nets = module("real_nets")
    monkeypatch.setattr(real_nets, "table", lambda results: ", ".join(results["crepe"]["nets"]))
    path = tmp_path / "real_nets.json"
    first, second = ({"run": "a", "nets": {"ours": {"macs": 1}}} for _ in range(2))
    real_nets.store(path, "crepe", first)
    second["nets"]["tiny"] = {"macs": 2}
    real_nets.store(path, "crepe", second)
    first["nets"]["ours"] = {"macs": 3}  # recomputed: a process's own value is newer than the stored one
    real_nets.store(path, "crepe", first)
    real_nets.store(path, "suzuki-0", {"run": "b", "nets": {"ours": {}}})
    stored = {name: one["nets"] for name, one in json.loads(path.read_text()).items()}
    assert stored == {"crepe": {"ours": {"macs": 3}, "tiny": {"macs": 2}}, "suzuki-0": {"ours": {}}}
    assert path.with_suffix(".md").read_text() == "ours, tiny"
    real_nets.store(path, "crepe", {"run": "c", "nets": {"ours": {"macs": 4}}})
    assert json.loads(path.read_text())["crepe"]["nets"] == {"ours": {"macs": 4}}


@pytest.fixture
def compare(module, tmp_path, monkeypatch):
    """Compares a stubbed run with the dense network trained as long; returns the models judged, in order."""
    real_nets = module("real_nets")
    monkeypatch.setattr(real_nets, "setting", lambda opened, device: {})
    net = torch.nn.Linear(2, 1)

    def compare(run, samples, known, net=net):
        judged = []

        def judge(opened, model, options, *, drawn=False):
            judged.append("ours" if drawn else "other")
            error = torch.rand(20, dtype=torch.double)
            more = {"error": error, "deviation": error + 0.1} if options.samples else {}
            found = {"r2": 0.5} | ({"spearman": 0.4, "coverage": 0.9} if options.samples else {})
            return found | {"each": {"square": error**2, "spread": torch.tensor(1.0), **more}}

        def train(model, *given):
            judged.append("trained")
            return model, 7.0

        reported = {"macs": 1, "parameters": 3, "latency_ms": {}}
        results = {
            "history": [{"stage": "train", "epoch": 1}],
            "seconds": {"train": 1.0},
            "sparse": reported,
            "dense": reported,
        }
        results |= {"files": {"model.safetensors": {"sha256": run}}, "search": {"max_drop": None}}
        opened = SimpleNamespace(results=results, model=net, dense=net)
        for name, stub in {"open_run": lambda *given, **more: opened, "yield_figures": judge, "train": train}.items():
            monkeypatch.setattr(real_nets, name, stub)
        options = SimpleNamespace(runs=tmp_path, samples=samples, peer=["dense, trained as long"])
        real_nets.compared("suzuki-0", tmp_path / "suzuki-0", options, None, known, lambda: None)
        return judged

    return compare


def test_what_is_known_is_not_made_again(compare):
    everything, known = ["ours", "other", "trained", "other"], {}
    assert compare("a", 0, known) == everything
    assert compare("a", 0, known) == []
    assert compare("a", 20, known) == everything  # now with draws
    assert compare("a", 20, known) == compare("a", 0, known) == []
    assert list(known["nets"]) == ["ours", "dense start", "dense, trained as long"]
    assert known["nets"]["dense, trained as long"]["seconds"] == 7 and "spearman_ahead" in known["nets"]["dense start"]
    known["nets"]["dense, trained as long"] = {"failed": "no memory"}
    assert compare("a", 20, known) == []


def test_what_the_weights_alone_say_is_told_where_dropout_draws_too(compare):
    known = {}
    net = torch.nn.Sequential(torch.nn.Linear(2, 1), BernoulliDropout(0.5))
    assert compare("a", 20, known, net) == ["ours", "ours", "other", "trained", "other"]
    assert [*known["nets"]][:2] == ["ours", "ours, without draws of dropout"] and net[1].p == 0.5
    assert "spearman_ahead" in known["nets"]["ours, without draws of dropout"]
    assert compare("a", 20, known, net) == []


def test_figures_of_another_run_are_not_taken_for_those_of_this(compare, capsys):
    """For example, results of a few epochs on a CPU may be stored where the full run is made on a GPU."""
    known = {}
    compare("a", 0, known)
    assert not capsys.readouterr().out.count("another run")
    assert compare("b", 0, known) == ["ours", "other", "trained", "other"] and known["run"] == "b"
    assert "suzuki-0: the stored figures are of another run; all are made anew" in capsys.readouterr().out


def test_a_cache_of_fewer_images_is_no_cache_of_more(module, tmp_path):
    import io
    import tarfile

    from PIL import Image

    rng = np.random.default_rng(6)
    for part, count in (("train", 4), ("test", 2)):
        with tarfile.open(tmp_path / f"{part}.tar.gz", "w:gz") as tar:
            for name in ("cat", "dog"):
                for index in range(count):
                    file = io.BytesIO()
                    Image.fromarray(rng.integers(0, 255, (32, 32, 3), np.uint8)).save(file, "WEBP", lossless=True)
                    member = tarfile.TarInfo(f"{part}/{name}/{index}.webp")
                    member.size = len(file.getvalue())
                    tar.addfile(member, io.BytesIO(file.getvalue()))
    data = importlib.import_module("models.cifar10").data
    cache = str(tmp_path / "cache.npz")
    few, again, more = (data(str(tmp_path), count, cache) for count in (3, 3, 6))
    assert [len(split[0][1]) for split in (few, again, more)] == [3, 3, 6]
    assert torch.equal(few[0][0], again[0][0]) and torch.equal(few[2][0], more[2][0])


def test_a_dense_network_trained_on_other_images_is_not_taken(module, tmp_path, monkeypatch):
    real = module("real")
    setting = {"images": 10, "augment": [], "recovery": {"lr": 0.1}, "precision": "no", "torch": "2", "device": "cpu"}
    stored = {"setting": setting, "nets": {"dense, trained as long": {"epochs": 4}}}
    monkeypatch.setattr(real, "read", lambda path: {"resnet56-macs4x": stored})
    (tmp_path / "resnet56-macs4x-dense-trained-as-long.done.pt").touch()
    assert real._same_dense("resnet56-macs2.6x", tmp_path, "", 4, setting) == "resnet56-macs4x"
    assert real._same_dense("resnet56-macs2.6x", tmp_path, "", 5, setting) is None
    assert real._same_dense("resnet56-macs2.6x", tmp_path, "", 4, setting | {"images": 20}) is None
    assert real._same_dense("resnet20-macs2x", tmp_path, "", 4, setting) is None
    assert real._same_dense("resnet56-macs2.6x", tmp_path, "short", 4, setting) is None  # stored under another name
    monkeypatch.setattr(real, "read", lambda path: {"resnet56-macs4x-short": stored})
    assert real._same_dense("resnet56-macs2.6x", tmp_path, "short", 4, setting) is None  # for another label
    (tmp_path / "resnet56-macs4x-short-dense-trained-as-long.done.pt").touch()
    assert real._same_dense("resnet56-macs2.6x", tmp_path, "short", 4, setting) == "resnet56-macs4x"


def test_peers_that_another_process_has_judged_meanwhile_stay_beside_the_same_network_alone(module):
    real = module("real")

    def row(accuracy, *peers):
        ours = {"ours": {"macs": 5, "accuracy": accuracy}}
        return {"epochs": 4, "setting": {"images": 10}, "nets": ours | {peer: {"change": [peer]} for peer in peers}}

    assert list(real.joined(row(90, "one"), row(90, "two"))["nets"]) == ["ours", "two", "one"]
    assert list(real.joined(row(91, "one"), row(90, "two"))["nets"]) == ["ours", "two"]  # from another network of ours
    assert list(real.joined(row(90, "one") | {"epochs": 5}, row(90, "two"))["nets"]) == ["ours", "two"]
    assert list(real.joined(None, row(90, "two"))["nets"]) == ["ours", "two"]


def test_vgg_is_trained_once_for_its_goals(module, tmp_path):
    """Never from a copy or with other settings: what trained it is read from the recipe."""
    real = module("real")

    def asked(*settings, name="vgg16-parameters25x", label="short"):
        options = SimpleNamespace(runs=tmp_path, label=label, set=list(settings), epochs=None, cifar="cifar", resnet=None)
        found = real.arguments(name, options)
        return Path(found[found.index("--weights") + 1]) if "--weights" in found else None

    folder = tmp_path / "vgg16-macs5x-short"
    folder.mkdir()
    recipe = load_recipe(real.HERE / "models" / "vgg16.yaml", ["dense.epochs=12"])
    (folder / "recipe.yaml").write_text(dump_recipe(recipe))
    assert asked("dense.epochs=12") is None  # not trained to its end
    (folder / "dense.safetensors").touch()  # while the run itself goes on
    assert asked("dense.epochs=12") == folder / "dense.safetensors"
    assert asked("dense.epochs=13") is asked("dense.epochs=12", "seed=1") is asked("dense.epochs=12", label="") is None
    assert asked("dense.epochs=12", name="vgg16-macs5x") is None
    assert real.dense_training(recipe) == {"optimizer": "sgd", "lr": 0.1, "weight_decay": 5e-4, "epochs": 12}
    (folder / "recipe.yaml").write_text(
        dump_recipe(load_recipe(folder / "recipe.yaml", ["weights.file=other/dense.safetensors"]))
    )
    assert asked("dense.epochs=12") is None


def test_a_budget_is_asked_for_and_told(module, tmp_path):
    real, tables = module("real"), module("real_table")
    (tmp_path / "resnet20-1.th").touch()
    options = SimpleNamespace(runs=tmp_path, label="", set=[], epochs=(0, 4), cifar="cifar", resnet=tmp_path)
    budget, goal = (real.arguments(name, options)[1:3] for name in ("resnet20-drop2", "resnet20-macs2x"))
    assert (budget, goal) == (["--max-drop", "2"], ["--goal", "macs=2x"])
    stored = json.loads((BENCHMARKS / "results" / "real.json").read_text())
    one = stored["resnet20-macs2x"]
    one["goal"], ours = "max-drop=2", one["nets"]["ours"]
    ours["budget"] = {"max_drop": 2.0, "confidence": 0.9, "met": True, "drop": 1.5, "upper": 1.94}
    ours["trials"] = 5
    told = tables.table({"row": one})
    assert "`--max-drop 2`; 16 epochs" in told
    assert "of 2 points was kept: 1.50 on the images that choose, at most 1.94 with 90% confidence; trials: 5" in told
    ours["budget"]["met"] = False
    assert "of 2 points was not kept: 1.50" in tables.table({"row": one})


def test_a_budget_of_the_other_networks_is_asked_for_and_told(module, tmp_path):
    nets, tables = module("real_nets"), module("real_nets_table")
    options = SimpleNamespace(crepe=tmp_path, speech=tmp_path, dncnn=tmp_path, runs=tmp_path, rxnfp=None, yields=None)
    options.dense = options.goal = None
    given = {name: found[1:] for name, found in nets.cases(options).items()}
    assert given["denoise-drop3"][:2] == ["--max-drop", "3"] and given["denoise-macs2x"][:2] == ["--goal", "macs=2x"]
    assert given["crepe"][:3] == ["--goal", "latency=15ms", "--latency-command"]
    options.goal = "max-drop=5"
    assert nets.cases(options)["crepe"][1:4] == ["--max-drop", "5", "--weights"]
    stored = json.loads((BENCHMARKS / "results" / "real_nets.json").read_text())
    one = stored["denoise-macs2x"]
    one["setting"] |= {"goal": "max-drop=3", "trials": 4}
    trial = {"number": 2, "drop": 1.5, "upper": 2.25}
    search = {"max_drop": 3.0, "confidence": 0.9, "met": True, "chosen": 2, "trials": [{"number": 1}, trial]}
    one["nets"]["ours"] |= module("real_table").kept_of(search)
    told = tables.table({"denoise-row": one})
    assert "- `--max-drop 3`, 4 trial(s)" in told
    assert (
        "of 3% of the dense network's RMSE was kept: 1.50 on the validation examples that choose, at most 2.25 with 90%" in told
    )
    assert "of 3 points was kept" in tables.table({"crepe-row": one})
    assert module("real_table").kept_of(search | {"max_drop": None}) == {}


def test_a_recovery_that_was_repeated_counts_once_for_the_peers(module):
    rows = [("dense", 1), ("level 1", 1), ("trial 1", 1), ("trial 1", 2), ("trial 1", 1), ("trial 1", 2)]
    assert module("real_table").epochs_of([{"stage": stage, "epoch": epoch} for stage, epoch in rows]) == 3


def test_peers_of_another_setting_are_not_told_beside_ours(module):
    real = module("real")
    stored = {"epochs": 6, "setting": {"images": 10, "lr": 0.1, "old": 1}, "nets": {"torch-pruning, Taylor": {"epochs": 6}}}
    now = {"epochs": 6, "setting": {"images": 10, "lr": 0.1}}
    assert real.beside(stored, now) == stored["nets"]
    assert real.beside(stored, now | {"epochs": 8}) == {} == real.beside({}, now)
    assert real.beside(stored, {"epochs": 6, "setting": {"images": 10, "lr": 0.05}}) == {}
    assert real.beside(stored, {"epochs": 6, "setting": {"images": 10, "lr": 0.1, "recovery": "sgd"}}) == {}
    assert (real.row("a", ""), real.row("a", "short")) == ("a", "a-short")


def test_the_tables_say_what_is_stored(module):
    """Also what was noted of single networks, such as one that was trained on two machines."""
    for name in ("real", "real_nets", "reconstruction"):
        results = BENCHMARKS / "results"
        stored = json.loads((results / f"{name}.json").read_text())
        table = module("reconstruction" if name == "reconstruction" else f"{name}_table").table(stored)
        assert table == (results / f"{name}.md").read_text(), name
        noted = [net["note"] for one in stored.values() for net in one["nets"].values() if "note" in net]
        assert all(note in table for note in noted) and (noted or name != "real")
