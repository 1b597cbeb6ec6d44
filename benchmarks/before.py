"""Compares the time of a training step and of 100 samples with another checkout of this package, as ratios.

    git worktree add /tmp/other COMMIT
    python benchmarks/before.py /tmp/other --rounds 7 --out benchmarks/results/before.json

Each round starts one process for each checkout, in alternating order. Times are CPU times of one thread, so that other work
on the machine hardly affects them. Reported are the median of the rounds' ratios (this checkout over the other; below 1 it is
faster), the smallest and the largest.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
WORK = """
import json, time, torch, svdcompress as svdc
from torch import nn
torch.set_num_threads(1); torch.manual_seed(0)
relu, pool = nn.ReLU(), nn.MaxPool2d(2)
lenet300 = nn.Sequential(nn.Linear(784, 300), relu, nn.Linear(300, 100), relu, nn.Linear(100, 10))
convolutions = nn.Conv2d(1, 20, 5), pool, relu, nn.Conv2d(20, 50, 5), pool, relu
lenet5 = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(800, 500), relu, nn.Linear(500, 10))
nets = {"LeNet-300-100": (lenet300, (784,)), "LeNet-5": (lenet5, (1, 28, 28))}
def timed(work, count):
    for _ in range(3): work()
    start = time.process_time()
    for _ in range(count): work()
    return (time.process_time() - start) / count
found = {}
for name, (net, shape) in nets.items():
    model = svdc.convert(net).train(); x, y = torch.randn(100, *shape), torch.randint(0, 10, (100,))
    elbo = svdc.ELBO(model, nn.functional.cross_entropy, num_examples=50000)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    def step():
        optimizer.zero_grad(); elbo(model(x), y).backward(); optimizer.step()
    found[name + ", training step, batch 100"] = timed(step, 40)
    model.eval()
    found[name + ", 100 samples, batch 64"] = timed(lambda: svdc.mc_predict(model, x[:64], samples=100), 3)
print(json.dumps(found))
"""


def measured(checkout: Path) -> dict[str, float]:
    """CPU seconds by the name of the work, with the package of a checkout."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", WORK], env=environment, cwd=checkout, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def main() -> None:
    """Run the rounds, print the ratios and store them if --out is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    here, other = HERE.parent, options.other.resolve()
    ratios: dict[str, list[float]] = {}
    for number in range(options.rounds):
        order = [here, other] if number % 2 else [other, here]
        times = {checkout: measured(checkout) for checkout in order}
        for name, seconds in times[here].items():
            ratios.setdefault(name, []).append(seconds / times[other][name])
    commits = {
        name: subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=path, capture_output=True, text=True).stdout.strip()
        for name, path in (("this", here), ("other", other))
    }
    rows = {name: {"median": median(each), "least": min(each), "most": max(each)} for name, each in ratios.items()}
    for name, row in rows.items():
        print(f"{name}: {row['median']:.2f} ({row['least']:.2f} to {row['most']:.2f})")
    if options.out:
        text = json.dumps({"commits": commits, "rounds": options.rounds, "ratios": rows}, indent=1)
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
