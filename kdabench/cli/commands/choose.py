"""choose: what a policy picks for a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kdabench.cli import arguments, console
from kdabench.cli.arguments import (
    RESULTS,
    Json,
    Results,
)

if TYPE_CHECKING:
    pass


def choose(
    heads: Annotated[int, typer.Option(help="KDA heads on the GPU.")],
    requests: Annotated[int, typer.Option(help="Requests in the batch.")],
    tokens: Annotated[int, typer.Option(help="Tokens per request.")] = 1,
    kind: Annotated[
        str | None,
        typer.Option(help="decode, spec, record or replay; decode for 1 token, else record."),
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="A recorded device.")
    ] = "nvidia-h200",
    streamable: Annotated[
        bool, typer.Option(help="Whether the streaming variants may be picked.")
    ] = True,
    results: Results = RESULTS,
    as_json: Json = False,
) -> None:
    """Print what a device's policy picks for a step, and why.

    \b
    Examples:
      kdabench choose --heads 24 --requests 8
      kdabench choose --heads 24 --requests 8 --tokens 4 --kind record
      kdabench choose --heads 12 --requests 64 --tokens 8 --kind replay --json
    """
    module = arguments.load_policy(results / device / "policy.py")
    kind = kind or ("decode" if tokens == 1 else "record")
    with console.user_input():
        why = module.explain(heads, requests, tokens, kind, streamable=streamable)
    choice = why.choice
    if as_json:
        console.emit_json(
            {
                "variant": choice.variant,
                "options": dict(choice.options),
                "flush": choice.flush,
                "rule": why.rule,
                "margin": why.margin,
                "place": why.place,
                "note": why.note,
            }
        )
        return
    options = ", ".join(f"{name}={value}" for name, value in choice.options.items())
    console.line(f"{'flush, then ' if choice.flush else ''}{choice.variant}({options})")
    console.line(f"rule    {why.rule}")
    console.line(f"margin  {_margin(why.margin)}")
    console.line(f"place   {why.note}")


def _margin(ratio: float | None) -> str:
    if ratio is None:
        return "not measured against another variant here"
    percent = 100 * (ratio - 1)
    return (
        f"{abs(percent):.1f} % {'faster' if percent >= 0 else 'slower'} than the best other variant"
    )
