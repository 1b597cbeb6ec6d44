"""`svdc inspect`: what would be done with a model, layer by layer, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.markup import escape
from rich.table import Table

from svdcompress.cli import _settings as s
from svdcompress.cli._common import Debug, Json, out_console, print_json
from svdcompress.cli._sparsify import plan_table, what_is_done
from svdcompress.errors import UsageError


@s.with_settings
def inspect(settings: s.Settings, json: Json = False, debug: Debug = False) -> None:
    """Show which layers would be converted and which units can be removed, what each costs, and why not the others.

    Nothing is trained. Lists parameters and multiply-accumulates (MACs, for one example) of each layer, and those removed with
    one unit of each group. Without --data only the layers are listed, as the model is not run.

    Example: svdc inspect --model ./model.py:make --data npz:examples.npz
    """
    from dataclasses import asdict

    from svdcompress import cost
    from svdcompress.pipeline import (
        about_frozen,
        check_model,
        converted,
        dense_model,
        final_beta,
        out_of_reach,
        planned,
        rate_of_variances,
        reach_of,
    )
    from svdcompress.prune import groups
    from svdcompress.sources import example_inputs, open_data

    made = settings.resolved(needs_data=False)
    if made.experiment is not None:
        raise UsageError(f"the experiment {made.experiment.name} makes its models itself; there is nothing to inspect")
    data = open_data(made.data, made.task) if made.data.name else None
    of_weights: list[str] = []
    net, trained = dense_model(made, of_weights)
    inputs = None
    if data is not None:
        inputs = example_inputs(data.train, 2)
        check_model(net, made, data, inputs)
    entries = planned(net, made, inputs)
    found: dict[str, Any] = {"plan": [asdict(entry) for entry in entries]}
    if of_weights:
        found["warnings"] = of_weights
    if data is not None:
        found["warnings"] = [*data.notes, *of_weights, *data.warnings]
        found["cost"] = cost.measure(net, inputs).to_dict()
        found["plan"] = _with_costs(found["plan"], cost.by_layer(net, inputs))
        count, final = len(data.train), final_beta(made, net, len(data.train), inputs)
        net = converted(net, made, inputs)
        found["pruning"] = groups(net, inputs).to_dict()
        warned = about_frozen(made, net)
        if trained:  # it would say nothing about newly drawn weights
            way = reach_of(made, net, count, final, rate_of_variances(made, net, count, final))
            found["reach"] = way.to_dict()
            warned += out_of_reach(made, way)
    if json:
        print_json(found)
        return
    console = out_console()
    size = found.get("cost") or {"parameters": sum(p.numel() for p in net.parameters())}
    macs = f", {size['macs']:,} MACs for one example" if "macs" in size else ""
    console.print(f"{size['parameters']:,} parameters{macs}\n", highlight=False)
    console.print(plan_table(entries) if data is None else _layers_table(found["plan"]))
    if data is None:
        console.print(
            "\nWith --data also shown: cost per example, layers whose weight is read directly, and units that can be removed."
        )
    elif found["pruning"].get("groups"):
        console.print()
        console.print(_groups_table(found["pruning"]["groups"]))
    if "reach" in found:
        console.print(f"\nway to the threshold: {way}", highlight=False)
    if data is not None:
        for line in warned:
            console.print(f"[yellow]warning:[/] {escape(line)}", highlight=False)
    for line in found.get("warnings", ()):
        console.print(f"\n[yellow]note:[/] {escape(line)}")
    for note in found.get("pruning", {}).get("notes", ()):
        console.print(f"\n[yellow]note:[/] {escape(note)}")


def _with_costs(plan: list[dict[str, Any]], costs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The plan's entries with all parameters of the layer (`parameters` counts the weight alone), its MACs and whether it ran.

    A shared layer costs nothing under its further names.
    """
    return [
        {
            **entry,
            "all_parameters": found.parameters if (found := costs.get(entry["name"])) else 0,
            "macs": found.macs if found else 0,
            "ran": found is None or found.ran,
        }
        for entry in plan
    ]


def _layers_table(plan: list[dict[str, Any]]) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    for heading in ("layer", "type"):
        table.add_column(heading, no_wrap=True)
    for heading in ("parameters", "MACs"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for entry in plan:
        what = what_is_done(entry["converted"], entry["kind"], entry["reason"], entry["note"])
        if entry["converted"] and not entry["ran"]:
            what += "[yellow], but never ran on the example inputs[/]"
        table.add_row(escape(entry["name"]), entry["kind"], f"{entry['all_parameters']:,}", f"{entry['macs']:,}", what)
    return table


def _groups_table(groups: list[dict[str, Any]]) -> Table:
    table = Table(title="units that are removed together", title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("group", no_wrap=True)
    wide = any(group["units"] != group["kept"] + group["removed"] for group in groups)  # such as heads of many channels
    for heading in ("units", *(["channels"] if wide else []), "parameters each", "MACs each"):
        table.add_column(heading, justify="right", no_wrap=heading[0] in "uc")
    table.add_column("")
    for group in groups:
        what = f"[dim]stays: {escape(group['reason'])}[/]" if group.get("reason") else "[green]can go[/]"
        channels = [group["kept"] + group["removed"]] if wide else []
        numbers = (group["units"], *channels, group["unit_parameters"], group["unit_macs"])
        table.add_row(escape(group["name"]), *(f"{number:,}" for number in numbers), what)
    return table
