"""`svdc inspect`: what would be done with a model, layer by layer, and why."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.table import Table

from svdcompress.cli import _settings as s
from svdcompress.cli._common import Debug, Json, out_console, print_json
from svdcompress.cli._sparsify import plan_table
from svdcompress.errors import UsageError


@s.with_settings
def inspect(settings: s.Settings, json: Json = False, debug: Debug = False) -> None:
    """Say which layers would be converted and which units could be removed, and why not the others. Nothing is trained.

    Without --data it is the layers alone: the model is not run.

    Example: svdc inspect --model ./model.py:make --data npz:examples.npz
    """
    from dataclasses import asdict

    from svdcompress import cost
    from svdcompress.convert import plan
    from svdcompress.pipeline import check_model, converted, dense_model
    from svdcompress.prune import groups
    from svdcompress.sources import example_inputs, open_data

    made = settings.resolved(needs_data=False)
    if made.experiment is not None:
        raise UsageError(f"the experiment {made.experiment.name} makes its models itself; there is nothing to inspect")
    data = open_data(made.data, made.task) if made.data.name else None
    net, _ = dense_model(made)
    entries = plan(net, made.convert.include, made.convert.exclude)
    found: dict[str, Any] = {"plan": [asdict(entry) for entry in entries]}
    if data is not None:
        inputs = example_inputs(data.train, 2)
        check_model(net, made, data, inputs)
        found["cost"] = cost.measure(net, inputs).to_dict()
        found["pruning"] = groups(converted(net, made), inputs).to_dict()
    if json:
        print_json(found)
        return
    console = out_console()
    size = found.get("cost") or {"parameters": sum(p.numel() for p in net.parameters())}
    macs = f", {size['macs']:,} MACs for one example" if "macs" in size else ""
    console.print(f"{size['parameters']:,} parameters{macs}\n", highlight=False)
    console.print(plan_table(entries))
    if data is None:
        console.print("\nWith --data also: the cost of one example, and which units can be removed.")
    elif found["pruning"].get("groups"):
        console.print()
        console.print(_groups_table(found["pruning"]["groups"]))


def _groups_table(groups: list[dict[str, Any]]) -> Table:
    table = Table(title="units that go together", title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("group", no_wrap=True)
    table.add_column("units", justify="right", no_wrap=True)
    table.add_column("")
    for group in groups:
        what = f"[dim]stays: {escape(group['reason'])}[/]" if group.get("reason") else "[green]can go[/]"
        table.add_row(group["name"], f"{group['kept'] + group['removed']:,}", what)
    return table
