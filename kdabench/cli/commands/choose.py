"""choose: what a policy picks for a step."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kdabench import library
from kdabench.cli import console
from kdabench.cli.arguments import RESULTS, Json, Results

Kind = Annotated[
    str | None,
    typer.Option(help="decode, spec, record or replay; decode for 1 token, else record."),
]
Streamable = Annotated[bool, typer.Option(help="Whether the streaming variants may be picked.")]


def command(
    heads: Annotated[int, typer.Option(help="KDA heads on the GPU.")],
    requests: Annotated[int, typer.Option(help="Requests in the batch.")],
    tokens: Annotated[int, typer.Option(help="Tokens per request.")] = 1,
    kind: Kind = None,
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="A recorded device.")
    ] = "nvidia-h200",
    streamable: Streamable = True,
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
    with console.user_input():
        policy = library.load_policy(device, results)
        why = library.choose(policy, heads, requests, tokens, kind, streamable=streamable)
    choice = why.choice
    if as_json:
        console.emit_json(_json(why))
        return
    options = ", ".join(f"{name}={value}" for name, value in choice.options.items())
    console.line(f"{'flush, then ' if choice.flush else ''}{choice.variant}({options})")
    console.line(f"rule    {why.rule}")
    console.line(f"margin  {_margin(why.margin)}")
    console.line(f"place   {why.note}")


def _json(why: Any) -> dict[str, Any]:
    return {
        "variant": why.choice.variant,
        "options": dict(why.choice.options),
        "flush": why.choice.flush,
        "rule": why.rule,
        "margin": why.margin,
        "place": why.place,
        "note": why.note,
    }


def _margin(ratio: float | None) -> str:
    if ratio is None:
        return "not measured against another variant here"
    percent = 100 * (ratio - 1)
    word = "faster" if percent >= 0 else "slower"
    return f"{abs(percent):.1f} % {word} than the best other variant"
