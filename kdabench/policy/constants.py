"""A dispatch policy as data: what a fit yields and what is written as a module. See
docs/policy.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import ModuleType
from typing import Any

from kda_kernels import variants
from kdabench.data.measurements import OptionValue

Options = Mapping[str, OptionValue]
"""Compile-time and launch choices of a variant, `pdl` always among them."""
ScheduleTable = Mapping[int, Mapping[int, Options]]
"""heads -> requests -> schedule: options of the variant that has such tables."""

ChoiceTable = Mapping[tuple[str, int], Mapping[int, Mapping[int, tuple[str, Options]]]]
"""(kind, tokens) -> heads -> items -> what takes a step from there on: a variant and its
options."""

STEP_KINDS = ("decode", "spec", "record")
"""Kinds that have thresholds of their own."""
WINDOW_KINDS = ("record", "spec")
FITTED_KINDS = (*STEP_KINDS, "replay")
"""Kinds that a fit covers. A replay below its threshold is a flush and a record."""


@dataclass(frozen=True)
class Origin:
    """Where a policy comes from: the device, and the records it was fitted on.

    capability  compute capability, (major, minor)
    digest      sha256 of the records
    ok, total   how many of them have a time
    versions    what they were measured with
    """

    device: str
    slug: str
    sms: int
    capability: tuple[int, int]
    digest: str
    ok: int
    total: int
    versions: Mapping[str, str]


def never() -> dict[str, int | None]:
    return dict.fromkeys(STEP_KINDS)


@dataclass(frozen=True)
class Policy:
    """The constants of the decision list, under the names of the generated module in lower case.
    None is never.

    choices          what decides; a step that it has no row for goes by the thresholds and
                     schedules
    spec_schedule    the best table that all windows can share: for kinds that window_schedule
                     lacks, and to copy
    window_schedule  (kind, tokens) -> table, without the entries between two of the same schedule
    options          of the variants that have no schedule table
    step_options     variant -> (kind, tokens) -> options, before `options`
    fused_split      items -> CTAs per item of the variant that `fused_items` hands steps to, from
                     there on; empty: a rule of thumb
    policies         heads -> (requests, tokens) -> (row pitch in elements, gate mode)
    measured         kind -> heads -> tokens -> requests -> time of the best other variant over that
                     of the choice, or None if no other variant has one
    """

    origin: Origin
    schedule: ScheduleTable
    spec_schedule: ScheduleTable
    stock_items: Mapping[str, int | None]
    options: Mapping[str, Options]
    policies: Mapping[int, Mapping[tuple[int, int], tuple[int, int]]]
    choices: ChoiceTable = field(default_factory=dict)
    window_schedule: Mapping[tuple[str, int], ScheduleTable] = field(default_factory=dict)
    step_options: Mapping[str, Mapping[tuple[str, int], Options]] = field(default_factory=dict)
    measured: Mapping[str, Mapping[int, Mapping[int, Mapping[int, float | None]]]] = field(
        default_factory=dict
    )
    fused_items: Mapping[int, int | None] = field(default_factory=dict)
    fused_default_items: int | None = None
    fused_split: Mapping[int, int] = field(default_factory=dict)
    fused_ws_items: int | None = None
    ws_items: Mapping[str, int | None] = field(default_factory=never)
    ws_small: int | None = None
    ws_small_end: int | None = None
    stream_items: Mapping[str, int | None] = field(default_factory=never)
    stream_heads: int | None = None
    wide_items: Mapping[str, int | None] = field(default_factory=never)

    def to_json(self) -> dict[str, Any]:
        """The constants by the names of the generated module."""
        rules = {name.upper(): getattr(self, name) for name in RULES}
        keys = {
            heads: {
                f"{requests},{tokens}": list(value) for (requests, tokens), value in row.items()
            }
            for heads, row in self.policies.items()
        }
        choices = {
            f"{kind},{tokens}": {
                heads: {
                    items: {"variant": variant, "options": options}
                    for items, (variant, options) in row.items()
                }
                for heads, row in table.items()
            }
            for (kind, tokens), table in self.choices.items()
        }
        windows = {
            f"{kind},{tokens}": table for (kind, tokens), table in self.window_schedule.items()
        }
        steps = {
            variant: {f"{kind},{tokens}": options for (kind, tokens), options in row.items()}
            for variant, row in self.step_options.items()
        }
        return {
            "DEVICE": self.origin.device, "SMS": self.origin.sms, "CAPABILITY": list(self.origin.capability),
            "RECORDS": self.origin.digest, "CHOICES": choices, **rules, "OPTIONS": self.options, "STEP_OPTIONS": steps,
            "SCHEDULE": self.schedule, "SPEC_SCHEDULE": self.spec_schedule, "WINDOW_SCHEDULE": windows,
            "POLICIES": keys, "MEASURED": self.measured,
        }  # fmt: skip


RULES = (
    "fused_items",
    "fused_default_items",
    "fused_split",
    "fused_ws_items",
    "ws_items",
    "ws_small",
    "ws_small_end",
    "stream_items",
    "stream_heads",
    "wide_items",
    "stock_items",
)
"""The thresholds, in the order of the decision list."""


def with_pdl(options: Options) -> dict[str, OptionValue]:
    """A candidate's spec as options: `pdl` is always said."""
    return dict(sorted({"pdl": False, **options}.items()))


def policy_of(module: ModuleType, origin: Origin) -> Policy:
    """The policy that a generated module holds, of an older version too, but with another
    origin."""
    values = {
        f.name: getattr(module, f.name.upper())
        for f in fields(Policy)
        if hasattr(module, f.name.upper())
    }
    return Policy(origin, **values)


def default_schedule() -> dict[str, Any]:
    """Give the default options, in full, of the variant that a policy has schedules of."""
    name = variants.of_rule("schedule")
    return {} if name is None else dict(variants.declared(name).defaults)
