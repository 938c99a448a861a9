"""What a notebook asks for in one call: `import kdabench` gives these.

A source is the slug of a recorded device, a journal (.db), a file of measurements (.jsonl), or what
`open_source` gave.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

from kdabench import sources
from kdabench.data import results as recorded
from kdabench.data.measurements import Measurement
from kdabench.review import compare as comparing
from kdabench.review import plot as plotting
from kdabench.review.compare import Comparison, Gates, Mode, Side
from kdabench.sources import Source

RESULTS = Path("results")


def load(
    source: str | Path | Source, *, sweep: str | None = None, results: str | Path = RESULTS
) -> list[Measurement]:
    """Load measurements; each cell comes from one sweep, the fullest that has it.

    sweep  of a device: its measurements alone

    >>> len(load("nvidia-h200", sweep="targets"))
    2818

    Raises ValueError for a source or a sweep that is not there, JournalError for a journal that
    can't be read.
    """
    return _opened(source, results, sweep).measurements()


def load_policy(device: str | Path, results: str | Path = RESULTS) -> ModuleType:
    """Load the policy of a recorded device, or of a generated file.

    Raises ValueError if there is none.
    """
    path = Path(device)
    return sources.load_policy(path if path.suffix == ".py" else Path(results) / path / "policy.py")


def choose(
    policy: ModuleType,
    heads: int,
    requests: int,
    tokens: int = 1,
    kind: str | None = None,
    *,
    streamable: bool = True,
) -> Any:
    """Ask a policy what takes a step, and why: `choice`, `rule`, `margin`, `place`, `note`.

    kind  decode for one token, else record, if not said

    >>> choose(load_policy("nvidia-h200"), heads=24, requests=8).choice.variant
    'KdaSplit'

    Raises ValueError for a step that does not exist.
    """
    kind = kind or ("decode" if tokens == 1 else "record")
    return policy.explain(heads, requests, tokens, kind, streamable=streamable)


def compare(
    a: str | Path | Source,
    b: str | Path | Source,
    mode: Mode = "same",
    *,
    relative: float = 0.01,
    absolute_us: float = 0.05,
    results: str | Path = RESULTS,
) -> Comparison:
    """Judge every cell of two sessions, b against a.

    mode      "same" pairs equal candidates, "best" the fastest of each side, "policy" what the
              policy of each side picks; a side without one has that of the other
    relative, absolute_us   what differs by less than either is the same

    Raises ValueError if no cell has a time on both sides, or if no side has a policy where one is
    asked for.
    """
    sides = _opened(a, results), _opened(b, results)
    policies = _policies(*sides) if mode == "policy" else (None, None)
    first, second = (
        _side(own, other, policy)
        for own, other, policy in zip(sides, reversed(sides), policies, strict=True)
    )
    return comparing.compare(first, second, mode, Gates(relative, absolute_us))


def plot(
    source: str | Path | Source,
    folder: str | Path,
    *,
    policy: str | Path | None = None,
    results: str | Path = RESULTS,
) -> list[Path]:
    """Draw a source's latency curves into a folder, an SVG and a PNG per kind, tokens and
    circumstances.

    policy  file of the policy to show; the source's own, if it has one, when not said

    Gives the files. Raises ValueError if there is nothing to draw.
    """
    opened = _opened(source, results)
    found = recorded.fullest(opened.sweeps)
    if not found:
        raise ValueError(f"{opened.name}: no records to draw")
    name, sms = recorded.device_of(opened.envs, opened.name)
    file = Path(policy) if policy is not None else opened.policy
    shown = sources.load_policy(file) if policy is not None or file.is_file() else None
    return plotting.write_plots(
        found,
        Path(folder),
        device=name,
        sms=sms,
        policy=shown,
        replay=opened.replay,
        held=() if opened.journal else tuple(recorded.held(opened.home)),
    )


def _opened(source: str | Path | Source, results: str | Path, sweep: str | None = None) -> Source:
    if isinstance(source, Source):
        return source
    return sources.open_source(source, results, sweep)


def _policies(a: Source, b: Source) -> tuple[ModuleType, ModuleType]:
    own = [source.policy if source.policy.is_file() else None for source in (a, b)]
    first = next((path for path in own if path is not None), None)
    if first is None:
        raise ValueError(f"{a.policy}, {b.policy}: no policy there")
    for name, path in zip("AB", own, strict=True):
        if path is None:
            warnings.warn(
                f"{name} has no policy of its own; its picks are those of {first}", stacklevel=3
            )
    one, two = (sources.load_policy(path or first) for path in own)
    return one, two


def _side(source: Source, other: Source, policy: ModuleType | None) -> Side:
    return Side(
        source.name,
        source.measurements(tuple(other.sweeps)),
        source.envs,
        source.replay,
        None if policy is None else policy.ranked,
    )
