"""What one launch has to do: its sizes and the bytes it must move.

Every kernel variant is divided by the bytes computed here, so efficiencies compare.
Source: docs/operation.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Kind = Literal["decode", "spec", "record", "replay", "flush", "commit"]
StateDtype = Literal["fp32", "bf16"]
ConvLayout = Literal["dim-first", "window-major"]
Pending = int | Literal["mix"] | None

KINDS: tuple[Kind, ...] = ("decode", "spec", "record", "replay", "flush", "commit")
STATE_DTYPES: tuple[StateDtype, ...] = ("fp32", "bf16")
CONV_LAYOUTS: tuple[ConvLayout, ...] = ("dim-first", "window-major")

HEAD_DIM = 128
"""K = V: rows and columns of a state."""
CONV_WIDTH = 4
"""Taps of the depthwise convolution."""
HISTORY = CONV_WIDTH - 1
"""Entries of a window that the first token's convolution looks back on."""
MAX_TOKENS = 8
"""Longest speculative window."""

BF16, FP32 = 2, 4
"""Bytes of an element."""
_WINDOW_ENTRY_BYTES = 3 * HEAD_DIM * BF16  # q, k and v of one head
_PROJECTED_BYTES = 4 * HEAD_DIM * BF16  # q, k, v and output gate of one head and token
_RECORD_BYTES = HEAD_DIM * FP32 + 2 * HEAD_DIM * BF16  # a token's correction; its key and raw gate
_OUT_BYTES = HEAD_DIM * BF16  # one head and token
_WEIGHT_BYTES = HEAD_DIM * HEAD_DIM * BF16 + 3 * CONV_WIDTH * HEAD_DIM * FP32  # gate; convolution

_STATE_ITEM_BYTES = {"fp32": FP32, "bf16": BF16}
_WINDOWS = ("spec", "record", "replay")


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True, order=True)
class Problem:
    """One step of one layer (kinds decode .. replay), or one commit over `layers` layers (commit,
    flush).

    requests   sequences in the launch
    heads      KDA heads on this GPU
    tokens     tokens per request; for commit and flush the window that was recorded
    layers     layers that one launch covers; more than 1 only for commit and flush
    pending    tokens to fold per request (replay, flush, commit): a count, or "mix" for all of
               0..tokens in turn. None for commit and flush means all `tokens`.
    lower_bound   of the log-decays, negative; None: the gate is unbounded

    Raises ValueError for sizes or words outside these rules.
    """

    kind: Kind
    requests: int
    heads: int
    tokens: int = 1
    layers: int = 1
    state_dtype: StateDtype = "fp32"
    pending: Pending = None
    conv_layout: ConvLayout = "dim-first"
    lower_bound: float | None = -5.0

    def __post_init__(self) -> None:
        for name, allowed in (
            ("kind", KINDS),
            ("state_dtype", STATE_DTYPES),
            ("conv_layout", CONV_LAYOUTS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not one of {', '.join(allowed)}"
                )
        for name in ("requests", "heads", "tokens", "layers"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} must be an integer >= 1")
        if self.tokens > MAX_TOKENS:
            raise ValueError(f"tokens={self.tokens} exceeds the window limit of {MAX_TOKENS}")
        if self.kind == "decode" and self.tokens != 1:
            raise ValueError(f"tokens={self.tokens}: kind decode takes exactly 1")
        if self.kind in _WINDOWS and self.tokens < 2:
            raise ValueError(f"tokens={self.tokens}: kind {self.kind} takes 2..{MAX_TOKENS}")
        if self.layers > 1 and not self.folds_only:
            raise ValueError(
                f"layers={self.layers}: only commit and flush cover several layers in a launch"
            )
        if self.pending is not None:
            if self.kind not in ("replay", "flush", "commit"):
                raise ValueError(
                    f"pending={self.pending!r}: kind {self.kind} has no pending tokens"
                )
            if self.pending != "mix" and not (
                type(self.pending) is int and 0 <= self.pending <= self.tokens
            ):
                raise ValueError(
                    f"pending={self.pending!r} must be 'mix' or an integer in 0..{self.tokens}"
                )
        elif self.kind == "replay":
            raise ValueError("kind replay needs pending: a count or 'mix'")

    @property
    def items(self) -> int:
        """(request, head) pairs: what every dispatch threshold counts."""
        return self.requests * self.heads

    @property
    def folds_only(self) -> bool:
        return self.kind in ("flush", "commit")

    @property
    def channels(self) -> int:
        """D, the channels of each of q, k and v."""
        return HEAD_DIM * self.heads

    @property
    def rows(self) -> int:
        """B, rows of the packed projection."""
        return self.requests * self.tokens

    @property
    def window(self) -> int:
        """W, entries of a convolution window: 3 before a decode, tokens + 2 around a speculative
        window."""
        return self.tokens + 2

    @property
    def used_columns(self) -> int:
        """Columns of the packed projection: q, k, v, output gate, gate bottleneck, raw beta."""
        return 4 * self.channels + HEAD_DIM + self.heads

    @property
    def pitch(self) -> int:
        """Row pitch of the packed projection in elements: `used_columns` rounded up to 16."""
        return 16 * ceil_div(self.used_columns, 16)

    @property
    def state_item_bytes(self) -> int:
        return _STATE_ITEM_BYTES[self.state_dtype]

    @property
    def page_bytes(self) -> int:
        """One item's state."""
        return HEAD_DIM * HEAD_DIM * self.state_item_bytes

    @cached_property
    def pending_counts(self) -> tuple[int, ...]:
        """Tokens to fold, per request. "mix" goes round 0..tokens, so that all counts meet in one
        batch."""
        if self.kind not in ("replay", "flush", "commit"):
            return (0,) * self.requests
        if self.pending == "mix":
            return tuple((11 * b + self.tokens) % (self.tokens + 1) for b in range(self.requests))
        return (self.tokens if self.pending is None else int(self.pending),) * self.requests

    @property
    def bytes_read(self) -> int:
        """Bytes that must come from memory at least once per launch."""
        pending = sum(self.pending_counts)
        folding = sum(n > 0 for n in self.pending_counts)
        if self.folds_only:
            folded = folding * self.page_bytes + _RECORD_BYTES * pending
            return self.layers * self.heads * folded
        window = _WINDOW_ENTRY_BYTES * self.window
        item = self.page_bytes + window + _PROJECTED_BYTES * self.tokens
        return self.items * item + self.heads * (_RECORD_BYTES * pending + _WEIGHT_BYTES)

    @property
    def bytes_written(self) -> int:
        """Bytes that must go to memory at least once per launch."""
        folding = sum(n > 0 for n in self.pending_counts)
        if self.folds_only:
            return self.layers * self.heads * folding * self.page_bytes
        pages = {
            "decode": self.items,
            "spec": self.items * self.tokens,
            "record": 0,
            "replay": self.heads * folding,
        }
        item = _WINDOW_ENTRY_BYTES * self.window + _OUT_BYTES * self.tokens
        if self.kind in ("record", "replay"):
            item += _RECORD_BYTES * self.tokens
        return pages[self.kind] * self.page_bytes + self.items * item

    @property
    def bytes_moved(self) -> int:
        return self.bytes_read + self.bytes_written

    @property
    def operand_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of one layer's operands; `slots` below stands for request pages plus the null
        slot.

        Commit and flush take theirs from `commit_shapes` of the kernels' package.
        """
        slots = 1 + self.requests * (self.tokens if self.kind == "spec" else 1)
        shapes: dict[str, tuple[int, ...]] = {
            "projected": (self.rows, self.pitch),
            "conv_weight": (3, CONV_WIDTH, self.channels),
            "conv_bias": (3 * self.channels,),
            "conv_state": (slots, 3 * self.channels, self.window),
            "f_b": (self.channels, HEAD_DIM),
            "A_log": (self.heads,),
            "dt_bias": (self.channels,),
            "norm_weight": (HEAD_DIM,),
            "state": (slots, self.heads, HEAD_DIM, HEAD_DIM),
            "slots": {"decode": (self.requests,), "spec": (self.requests, self.tokens)}.get(
                self.kind, (self.requests, 1)
            ),
            "out": (self.rows, self.channels),
        }
        if self.kind == "spec":
            shapes["accepted"] = (self.requests,)
        if self.kind in ("record", "replay"):
            shapes["corrections"] = (self.requests, self.heads, self.tokens, HEAD_DIM)
            shapes["key_gates"] = (self.requests, self.heads, self.tokens, 2 * HEAD_DIM)
            shapes["record_rows"] = (self.requests,)
        if self.kind == "replay":
            shapes["pending"] = (self.requests,)
        return shapes
