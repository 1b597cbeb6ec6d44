"""`svdc inspect`: what would be done with a model, layer by layer, and why."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from svdcompress.cli import _settings as s
from svdcompress.cli._common import Debug, Json, out_console, print_json
from svdcompress.cli._sparsify import plan_table


def inspect(
    recipe: s.RecipeArgument = None,
    model: s.Model = None,
    model_arg: s.ModelArg = [],  # noqa: B006 (Typer reads the default, nothing changes it)
    weights: s.Weights = None,
    strip_prefix: s.StripPrefix = None,
    data: s.DataName = None,
    data_arg: s.DataArg = [],  # noqa: B006
    target: s.Target = None,
    loss: s.LossName = None,
    set_: s.Set = [],  # noqa: B006
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Say which layers would be converted and which units could be removed, and why not the others. Nothing is trained.

    Example: svdc inspect --model ./model.py:make --data npz:examples.npz
    """
    from dataclasses import asdict

    from svdcompress import cost
    from svdcompress.convert import plan
    from svdcompress.pipeline import converted
    from svdcompress.prune import groups
    from svdcompress.sources import example_inputs, load_weights, make_model, open_data

    made = s.settings(
        recipe,
        overrides=set_,
        model_arg=model_arg,
        data_arg=data_arg,
        model=model,
        weights=weights,
        weights__strip_prefix=strip_prefix,
        data=data,
        data__target=target,
        loss=loss,
    )
    inputs = example_inputs(open_data(made.data, made.task).train, 2)
    net = make_model(made.model)
    if made.weights.file:
        load_weights(net, made.weights.file, made.weights.strip_prefix)
    entries = plan(net, made.convert.include, made.convert.exclude)
    size = cost.measure(net, inputs)
    found = groups(converted(net, made), inputs).to_dict()
    if json:
        print_json({"plan": [asdict(entry) for entry in entries], "cost": size.to_dict(), "pruning": found})
        return
    console = out_console()
    console.print(f"{size.parameters:,} parameters, {size.macs:,} MACs for one example\n", highlight=False)
    console.print(plan_table(entries))
    if found.get("groups"):
        console.print()
        console.print(_groups_table(found["groups"]))


def _groups_table(groups: list[dict[str, Any]]) -> Table:
    table = Table(title="units that go together", title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("group")
    table.add_column("units", justify="right")
    table.add_column("")
    for group in groups:
        reason = group.get("reason")
        table.add_row(
            group["name"], f"{group['kept'] + group['removed']:,}", f"[dim]stays: {reason}[/]" if reason else "[green]can go[/]"
        )
    return table
