"""What a variant's file says about itself, read from its text: to import it takes seconds, and the
DSL.

Literals at the top of the file, by these names; all but the first two may be left out.

KERNELS        names of the GPU kernels that a launch enqueues, or their beginnings: by them a
               measurement proves what it timed
KINDS          of steps or commits that it takes; `unsupported` refuses all others
RULE           the rule of a policy that hands steps to it, one of `RULES`. If several variants name
               the same one, the first in the registry has it. Without a rule of its own a variant
               takes steps by the rows of a policy alone
STREAMS        it needs a streamable step (docs/operation.md, "Streamable")
BINARIES       False: its kernels are compiled where they first run, not ahead of time
WINDOW_DTYPES  that the convolution window may have
REQUESTS       with which its forms are verified, in every usual head count
TRIED          option -> values that a tuner tries; of flags and words all, unless they are listed
GIVEN          options that operands or the wanted precision decide, not speed: no tuner tries them

Of the class `Options` it reads names, types and defaults of the options. Others look at some options,
so these mean the same wherever they occur:

split              CTAs that share an item. Sweeps measure where waves of them end, and figures show
                   a line for each value
ctas, ctas_per_sm  CTAs of an SM to have room for
gate_mode          order of the gate's accumulations; the key of a serving engine may fix it
pdl                programmatic dependent launch: of the launch, and of some binaries, too
streamable         False: operands are read element by element
window             entries of the convolution window; None: those of the problem
conv_weight_dtype  of convolution weight and bias
align              a commit also stores states at block boundaries
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_type_hints

from kda_kernels import problem
from kda_kernels.problem import KINDS, STATE_DTYPES, Kind, StateDtype

Value = int | str | bool | None

RULES = (
    "schedule",
    "ws_items",
    "stream_items",
    "wide_items",
    "stock_items",
    "fused_items",
    "fused_ws_items",
)
"""Constants of a policy, docs/policy.md. `schedule` stands for its tables of options by heads and
requests, which serve what no threshold takes; the variant of `stock_items` is also the last resort.
"""


@dataclass(frozen=True)
class Option:
    """A field of an Options class. values: all that it can have, of flags and words; empty of what counts"""

    type: type
    default: Value
    values: tuple[Value, ...] = ()


@dataclass(frozen=True)
class Declaration:
    """What a variant declares; the module's docstring explains each name. options: of its Options, in
    order"""

    kernels: tuple[str, ...]
    kinds: tuple[Kind, ...]
    options: Mapping[str, Option]
    rule: str | None = None
    streams: bool = False
    binaries: bool = True
    window_dtypes: tuple[StateDtype, ...] = ("bf16",)
    requests: tuple[int, ...] = (1, 37, 90)
    tried: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    given: tuple[str, ...] = ()

    @property
    def defaults(self) -> dict[str, Value]:
        """Options of nothing but defaults, as plain values."""
        return {name: option.default for name, option in self.options.items()}

    def values_to_try(self, option: str) -> tuple[Value, ...]:
        """Raises ValueError, naming the option, if it counts something and no values are listed."""
        found = self.tried.get(option, self.options[option].values)
        if not found:
            raise ValueError(
                f"option {option} counts something: TRIED must list values, or GIVEN name it"
            )
        return found


_NAMES = {f.name.upper(): f.name for f in fields(Declaration) if f.name != "options"}


def read(path: Path) -> Declaration:
    """The declaration in a file. Raises ValueError, naming file, name and rule, for what is
    none."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    said, options = {}, None
    for node in body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name in _NAMES:
                said[name] = _literal(value, f"{path}: {name}")
            case ast.ClassDef(name="Options", body=members):
                fields_ = [member for member in members if isinstance(member, ast.AnnAssign)]
                options = {ast.unparse(f.target): _option(f, f"{path}: Options") for f in fields_}
    if options is None:
        raise ValueError(f"{path}: Options: missing")
    return _checked(said, options, str(path))


def of_module(module: ModuleType) -> Declaration:
    """The same of an imported module. Raises ValueError as `read` does."""
    hints = get_type_hints(module.Options)
    assert is_dataclass(module.Options)
    options = {}
    for f in fields(module.Options):
        first, *others = get_args(hints[f.name]) or (hints[f.name],)
        words = get_args(first) or (() if isinstance(first, type) else (first, *others))
        kind = type(words[0]) if words else first
        options[f.name] = Option(kind, f.default, (False, True) if kind is bool else words)  # type: ignore[arg-type]
    said = {name: getattr(module, name) for name in _NAMES if hasattr(module, name)}
    return _checked(said, options, module.__name__)


def _checked(said: Mapping[str, Any], options: Mapping[str, Option], where: str) -> Declaration:
    for name in ("KERNELS", "KINDS"):
        if not said.get(name):
            raise ValueError(f"{where}: {name}: missing")
    known: Iterable[tuple[str, Iterable[object], Iterable[object]]] = (
        ("KINDS", said["KINDS"], KINDS),
        ("RULE", [said["RULE"]] if said.get("RULE") is not None else [], RULES),
        ("WINDOW_DTYPES", said.get("WINDOW_DTYPES", ()), STATE_DTYPES),
        ("TRIED", said.get("TRIED", ()), options),
        ("GIVEN", said.get("GIVEN", ()), options),
    )
    for name, values, allowed in known:
        for value in values:
            if value not in allowed:
                raise ValueError(
                    f"{where}: {name}: {value!r} is not one of {', '.join(map(str, allowed))}"
                )
    return Declaration(options=options, **{_NAMES[name]: value for name, value in said.items()})


def _option(node: ast.AnnAssign, where: str) -> Option:
    where = f"{where}: {ast.unparse(node)}"
    if node.value is None:
        raise ValueError(f"{where}: needs a default")
    kind, values = _type(node.annotation, where)
    return Option(kind, _literal(node.value, where), values)


def _type(annotation: ast.expr, where: str) -> tuple[type, tuple[Value, ...]]:
    """int, str or bool, of `int | None` and of literals that of the first; values, if it counts
    nothing."""
    match annotation:
        case ast.Name(id="int" | "str" | "bool" as name):
            kind = {"int": int, "str": str, "bool": bool}[name]
            return kind, (False, True) if kind is bool else ()
        case ast.BinOp(left=first, op=ast.BitOr()):
            return _type(first, where)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=slice):
            words = slice.elts if isinstance(slice, ast.Tuple) else [slice]
            values = tuple(_literal(word, where) for word in words)
            return type(values[0]), values
    raise ValueError(f"{where}: its type must be int, int | None, bool, str or a Literal")


def _literal(node: ast.expr, where: str) -> Any:
    """What is written there: a literal, or a constant of `kda_kernels.problem` by its name."""
    if isinstance(node, ast.Name) and hasattr(problem, node.id):
        return getattr(problem, node.id)
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(f"{where}: {ast.unparse(node)}: must be a literal") from None
