# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (Triton traces Python: its functions carry no usable types.)
"""The Triton kernels of the unfused chain; `stock` validates operands and launches them.

stock_convolution   (channel blocks, requests)               projection -> SiLU outputs, window
                    moved on
stock_verify        (value tiles, requests, heads)           recurrence; state pages or records
                    written
stock_norm          (requests * tokens, head blocks)         gated RMSNorm
stock_fold          (value tiles * heads, requests, layers)  commit: recorded tokens into the state
stock_roll_window   (channel blocks, requests, layers)       commit: window moved on by the accepted
                    tokens
stock_defer, stock_flush_plan   (requests)                   bookkeeping of deferred commits

A state tile is held as [K_OUTER, rows, K_INNER]: the 128 columns of a row are then spread over 4
lanes, most of a dot product stays inside a thread, and each lane group still loads 64 consecutive
bytes. Source: docs/operation.md.
"""

from __future__ import annotations

import triton
import triton.language as tl

K: tl.constexpr = tl.constexpr(128)
"""Rows and columns of a state."""
KEY_EPS: tl.constexpr = tl.constexpr(1e-6)
INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _request(slots, slot_stride, accepted, b, TOKENS: tl.constexpr, SPEC: tl.constexpr):
    """Convolution page (<= 0 for a null request), state page to read and first history entry of
    request b."""
    page = tl.load(slots + b * slot_stride)
    read = page
    entry = 0
    if SPEC:
        entry = tl.minimum(tl.maximum(tl.load(accepted + b) - 1, 0), TOKENS - 1)
        read = tl.load(slots + b * slot_stride + entry)
        page = tl.where(read > 0, page, read)
    return page.to(tl.int64), read.to(tl.int64), entry


@triton.jit
def _rows(query_start, b, TOKENS: tl.constexpr, RAGGED: tl.constexpr):
    """First row and number of tokens of request b."""
    first = b * TOKENS
    length = tl.full([], TOKENS, tl.int32)
    if RAGGED:
        first = tl.load(query_start + b)
        length = tl.minimum(tl.load(query_start + b + 1) - first, TOKENS)
    return tl.cast(first, tl.int64), length


@triton.jit
def _upto(index, size, condition):
    """index < size where the scalar condition holds, else nothing: a mask. (The interpreter can't
    splat a bool.)"""
    return index < tl.where(condition, size, 0)


@triton.jit
def _as(x, dtype: tl.constexpr):
    """An FP32 tensor in the dtype of memory, to nearest even: a GPU's cast does that, the
    interpreter's truncates."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        x = (
            ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000)
            .to(tl.uint32)
            .to(tl.float32, bitcast=True)
        )
    return x.to(dtype)


@triton.jit
def _unit(x):
    """x over its norm, [K]."""
    return x * tl.rsqrt(tl.sum(x * x, 0) + KEY_EPS)


@triton.jit
def _decay(raw, A, dt_bias, lower_bound, BOUNDED: tl.constexpr):
    """Decay per key channel from raw gates; A = exp(A_log)."""
    x = raw + dt_bias
    if BOUNDED:
        log = lower_bound * tl.sigmoid(A * x)
    else:
        # softplus, without overflow
        log = -A * (tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x))))
    return tl.exp(log)


@triton.jit
def stock_convolution(
    projected,
    weight,
    bias,
    window,
    slots,
    accepted,
    query_start,
    convolved,
    pitch,
    channels,
    page_stride,
    channel_stride,
    entry_stride,
    slot_stride,
    TOKENS: tl.constexpr,
    SPEC: tl.constexpr,
    RAGGED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """SiLU of the convolution, [rows, 3 * channels]; then the window holds the two inputs before,
    and these.

    ENTRIES is a power of two >= TOKENS + 2.
    """
    b = tl.program_id(1)
    page, _, entry = _request(slots, slot_stride, accepted, b, TOKENS, SPEC)
    first, length = _rows(query_start, b, TOKENS, RAGGED)
    if (page <= 0) | (length <= 0):
        return
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = channel < 3 * channels
    taps = weight + channel // channels * 4 * channels + channel % channels
    w0 = tl.load(taps, mask=mine, other=0.0).to(tl.float32)
    w1 = tl.load(taps + channels, mask=mine, other=0.0).to(tl.float32)
    w2 = tl.load(taps + 2 * channels, mask=mine, other=0.0).to(tl.float32)
    w3 = tl.load(taps + 3 * channels, mask=mine, other=0.0).to(tl.float32)
    start = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        start = tl.load(bias + channel, mask=mine, other=0.0).to(tl.float32)
    window += page * page_stride
    history = window + channel * channel_stride + entry * entry_stride
    h0 = tl.load(history, mask=mine, other=0.0).to(tl.float32)
    h1 = tl.load(history + entry_stride, mask=mine, other=0.0).to(tl.float32)
    h2 = tl.load(history + 2 * entry_stride, mask=mine, other=0.0).to(tl.float32)
    x_rows = projected + first * pitch
    y_rows = convolved + first * 3 * channels
    for t in tl.static_range(TOKENS):
        taken = _upto(channel, 3 * channels, length > t)
        x = tl.load(x_rows + t * pitch + channel, mask=taken, other=0.0).to(tl.float32)
        y = start + w0 * h0 + w1 * h1 + w2 * h2 + w3 * x
        silu = y / (1.0 + tl.exp(-y))
        tl.store(
            y_rows + t * 3 * channels + channel, _as(silu, convolved.dtype.element_ty), mask=taken
        )
        h0 = h1
        h1 = h2
        h2 = x

    # The window as a tile: entries of a channel, or channels of an entry, are stored together,
    # whichever are adjacent.
    e = tl.arange(0, ENTRIES)[None, :]
    column = channel[:, None]
    cells = window + column * channel_stride + e * entry_stride
    old = tl.load(cells + (entry + 1) * entry_stride, mask=mine[:, None] & (e < 2), other=0.0)
    new_mask = mine[:, None] & (e >= 2) & (e < length + 2)
    new = tl.load(x_rows + (e - 2) * pitch + column, mask=new_mask, other=0.0)
    tile = tl.where(e < 2, old, new.to(old.dtype))
    # Cells are read and written by different threads.
    tl.debug_barrier()
    tl.store(cells, tile, mask=mine[:, None] & (e < length + 2))


@triton.jit
def stock_verify(
    convolved,
    raw_gates,
    projected,
    A_log,
    dt_bias,
    state,
    slots,
    accepted,
    query_start,
    corrections,
    key_gates,
    record_rows,
    attended,
    pitch,
    channels,
    page_stride,
    slot_stride,
    corrections_stride,
    key_gates_stride,
    record_tokens,
    scale,
    lower_bound,
    TOKENS: tl.constexpr,
    SPEC: tl.constexpr,
    RAGGED: tl.constexpr,
    UPDATE: tl.constexpr,
    RECORD: tl.constexpr,
    BOUNDED: tl.constexpr,
    V_TILE: tl.constexpr,
    K_INNER: tl.constexpr,
):
    """The recurrence of one item's V_TILE state rows over its tokens; attended [rows, channels]
    before the norm.

    UPDATE stores the state after token t to page slots[b, t]; RECORD stores corrections, keys and
    raw gates.
    """
    K_OUTER: tl.constexpr = K // K_INNER
    tile = tl.program_id(0)
    b = tl.program_id(1)
    h = tl.program_id(2)
    page, read, _ = _request(slots, slot_stride, accepted, b, TOKENS, SPEC)
    first, length = _rows(query_start, b, TOKENS, RAGGED)
    if (page <= 0) | (length <= 0):
        return
    v = tile * V_TILE + tl.arange(0, V_TILE)
    k = tl.arange(0, K)
    k_outer = tl.arange(0, K_OUTER)[:, None, None]
    k_inner = tl.arange(0, K_INNER)[None, None, :]
    cells = state + h * K * K + v[None, :, None] * K + k_outer * K_INNER + k_inner
    S = tl.load(cells + read * page_stride).to(tl.float32)  # [K_OUTER, V_TILE, K_INNER]

    A = tl.exp(tl.load(A_log + h))
    bias = tl.load(dt_bias + h * K + k)
    row = -1
    if RECORD:
        row = tl.load(record_rows + b)
        corrections += row.to(tl.int64) * corrections_stride + h * record_tokens * K
        key_gates += row.to(tl.int64) * key_gates_stride + h * record_tokens * 2 * K
    vectors = convolved + first * 3 * channels + h * K
    for t in tl.static_range(TOKENS):
        taken = length > t
        k_taken = _upto(k, K, taken)
        v_taken = _upto(v, K, taken)
        q_raw = tl.load(vectors + t * 3 * channels + k, mask=k_taken, other=0.0)
        k_raw = tl.load(vectors + (t * 3 + 1) * channels + k, mask=k_taken, other=0.0)
        value = tl.load(vectors + (t * 3 + 2) * channels + v, mask=v_taken, other=0.0).to(
            tl.float32
        )
        gate = tl.load(raw_gates + (first + t) * channels + h * K + k, mask=k_taken, other=0.0)
        raw_beta = tl.load(
            projected + (first + t) * pitch + 4 * channels + K + h, mask=taken, other=0.0
        )
        if RECORD:
            mine = _upto(k, K, taken & (row >= 0) & (tile == 0))
            tl.store(key_gates + t * 2 * K + k, k_raw, mask=mine)
            tl.store(key_gates + (t * 2 + 1) * K + k, gate, mask=mine)
        query = tl.reshape(scale * _unit(q_raw.to(tl.float32)), [K_OUTER, K_INNER])[:, None, :]
        key = tl.reshape(_unit(k_raw.to(tl.float32)), [K_OUTER, K_INNER])[:, None, :]
        d = tl.reshape(
            _decay(gate.to(tl.float32), A, bias, lower_bound, BOUNDED), [K_OUTER, K_INNER]
        )[:, None, :]
        S *= d
        u = tl.sigmoid(raw_beta.to(tl.float32)) * (value - tl.sum(tl.sum(S * key, 0), 1))
        S += u[None, :, None] * key
        o = tl.sum(tl.sum(S * query, 0), 1)
        tl.store(
            attended + (first + t) * channels + h * K + v,
            _as(o, attended.dtype.element_ty),
            mask=v_taken,
        )
        if RECORD:
            tl.store(corrections + t * K + v, u, mask=_upto(v, K, taken & (row >= 0)))
        if UPDATE:
            slot = tl.load(slots + b * slot_stride + t).to(tl.int64)
            mine = _upto(v, K, taken & (slot > 0))[None, :, None]
            tl.store(cells + slot * page_stride, _as(S, state.dtype.element_ty), mask=mine)


@triton.jit
def stock_norm(
    attended,
    projected,
    norm_weight,
    slots,
    accepted,
    query_start,
    out,
    pitch,
    channels,
    heads,
    slot_stride,
    eps,
    TOKENS: tl.constexpr,
    SPEC: tl.constexpr,
    RAGGED: tl.constexpr,
    HEADS: tl.constexpr,
):
    """RMSNorm of each head's outputs times the sigmoid of the output gate; zeros for null requests.

    `out` may be `attended`.
    """
    b = tl.program_id(0) // TOKENS
    t = tl.program_id(0) % TOKENS
    page, _, _ = _request(slots, slot_stride, accepted, b, TOKENS, SPEC)
    first, length = _rows(query_start, b, TOKENS, RAGGED)
    if t >= length:
        return
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    mine = (h < heads)[:, None]
    live = _upto(h, heads, page > 0)[:, None]
    k = tl.arange(0, K)
    at = h[:, None] * K + k[None, :]
    cells = (first + t) * channels + at
    o = tl.load(attended + cells, mask=live, other=0.0).to(tl.float32)
    gate = tl.load(projected + (first + t) * pitch + 3 * channels + at, mask=live, other=0.0).to(
        tl.float32
    )
    weight = tl.load(norm_weight + k)[None, :]
    y = o * tl.rsqrt(tl.sum(o * o, 1) / K + eps)[:, None] * weight * tl.sigmoid(gate)
    tl.store(out + cells, _as(tl.where(live, y, 0.0), out.dtype.element_ty), mask=mine)


@triton.jit
def stock_fold(
    state_table,
    corrections_table,
    key_gates_table,
    A_log,
    dt_bias,
    source,
    length,
    destination,
    record_rows,
    boundary_length,
    boundary_slot,
    heads,
    record_tokens,
    lower_bound,
    TOKENS: tl.constexpr,
    ALIGN: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
    V_TILE: tl.constexpr,
):
    """The first `length` recorded tokens folded into V_TILE state rows of one item of one layer.

    The tables hold base address and leading stride in elements per layer. At most TOKENS tokens are
    folded.
    """
    tiles: tl.constexpr = K // V_TILE
    h = tl.program_id(0) // tiles
    b = tl.program_id(1)
    layer = tl.program_id(2)
    n = tl.minimum(tl.load(length + b), TOKENS)
    origin = tl.load(source + b).to(tl.int64)
    target = tl.load(destination + b).to(tl.int64)
    if (n <= 0) | (origin <= 0) | (target <= 0):
        return
    boundary = 0
    boundary_page = tl.zeros([], tl.int64)
    if ALIGN:
        boundary = tl.load(boundary_length + b)
        boundary_page = tl.load(boundary_slot + b).to(tl.int64)
    row = tl.load(record_rows + b).to(tl.int64)
    v = tl.program_id(0) % tiles * V_TILE + tl.arange(0, V_TILE)
    k = tl.arange(0, K)

    state = _layer_base(state_table, layer, STATE_DTYPE)
    page_stride = tl.load(state_table + 2 * layer + 1)
    # Pages are read and written in vectors: both a page's address and the stride between pages are
    # multiples of 16.
    page_stride = tl.multiple_of(page_stride, 16)
    cells = h * K * K + v[:, None] * K + k[None, :]
    S = tl.load(state + origin * page_stride + cells).to(tl.float32)  # [V_TILE, K]
    u_rows = _layer_base(corrections_table, layer, tl.float32)
    u_rows += row * tl.load(corrections_table + 2 * layer + 1) + h * record_tokens * K
    k_rows = _layer_base(key_gates_table, layer, tl.bfloat16)
    k_rows += row * tl.load(key_gates_table + 2 * layer + 1) + h * record_tokens * 2 * K

    A = tl.exp(tl.load(A_log + layer * heads + h))
    bias = tl.load(dt_bias + (layer * heads + h) * K + k)
    for t in tl.static_range(TOKENS):
        taken = _upto(k, K, n > t)
        key = _unit(tl.load(k_rows + t * 2 * K + k, mask=taken, other=0.0).to(tl.float32))
        gate = tl.load(k_rows + (t * 2 + 1) * K + k, mask=taken, other=0.0).to(tl.float32)
        u = tl.load(u_rows + t * K + v, mask=_upto(v, K, n > t), other=0.0)
        d = tl.where(taken, _decay(gate, A, bias, lower_bound, True), 1.0)
        S = S * d[None, :] + u[:, None] * key[None, :]
        if ALIGN:  # noqa: SIM102 (compile time, then run time)
            if (boundary == t + 1) & (n > t) & (boundary_page > 0):
                tl.store(state + boundary_page * page_stride + cells, _as(S, STATE_DTYPE))
    tl.store(state + target * page_stride + cells, _as(S, STATE_DTYPE))


@triton.jit
def _layer_base(table, layer, DTYPE: tl.constexpr):
    address = tl.load(table + 2 * layer)
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def stock_roll_window(
    window_table,
    source,
    length,
    destination,
    boundary_length,
    boundary_slot,
    width,
    channel_stride,
    entry_stride,
    ALIGN: tl.constexpr,
    WINDOW_DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Entries 0..2 of the destination's window become entries n-1..n+1 of the source's, so that
    taps start at 0."""
    b = tl.program_id(1)
    layer = tl.program_id(2)
    n = tl.load(length + b)
    origin = tl.load(source + b).to(tl.int64)
    target = tl.load(destination + b).to(tl.int64)
    if (n <= 0) | (origin <= 0) | (target <= 0):
        return
    window = tl.load(window_table + 2 * layer).to(tl.pointer_type(WINDOW_DTYPE))
    page_stride = tl.load(window_table + 2 * layer + 1)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = channel < width
    cells = window + channel * channel_stride
    old = cells + origin * page_stride
    x0 = tl.load(old + (n - 1) * entry_stride, mask=mine)
    x1 = tl.load(old + n * entry_stride, mask=mine)
    x2 = tl.load(old + (n + 1) * entry_stride, mask=mine)
    if ALIGN:
        m = tl.load(boundary_length + b)
        page = tl.load(boundary_slot + b).to(tl.int64)
        if (m > 0) & (m <= n) & (page > 0):
            new = cells + page * page_stride
            for e in tl.static_range(3):
                x = tl.load(old + (m - 1 + e) * entry_stride, mask=mine)
                tl.store(new + e * entry_stride, x, mask=mine)
    # Destination and source may be one page, its cells read and written by different threads.
    tl.debug_barrier()
    new = cells + target * page_stride
    tl.store(new, x0, mask=mine)
    tl.store(new + entry_stride, x1, mask=mine)
    tl.store(new + 2 * entry_stride, x2, mask=mine)


@triton.jit
def stock_defer(length, pending, record_rows, slots, eager, slot_stride, HAS_EAGER: tl.constexpr):
    """A request's commit length becomes pending and then 0; with its eager flag set: pending 0,
    length kept."""
    b = tl.program_id(0)
    row = tl.load(record_rows + b)
    slot = tl.load(slots + b * slot_stride)
    if (row < 0) | (slot <= 0):
        return
    n = tl.load(length + b)
    now = 0
    if HAS_EAGER:
        now = tl.load(eager + b).to(tl.int32)
    tl.store(pending + row, tl.where(now != 0, 0, n))
    tl.store(length + b, tl.where(now != 0, n, 0))


@triton.jit
def stock_flush_plan(
    pending, record_rows, slots, source, length, destination, slot_stride, TOKENS: tl.constexpr
):
    """Pending tokens as a commit in place: length 0..TOKENS, 0 for null slots and requests without
    a record row."""
    b = tl.program_id(0)
    row = tl.load(record_rows + b)
    slot = tl.load(slots + b * slot_stride)
    live = (row >= 0) & (slot > 0)
    n = tl.load(pending + row, mask=live, other=0)
    tl.store(source + b, slot)
    tl.store(destination + b, slot)
    tl.store(length + b, tl.minimum(tl.maximum(n, 0), TOKENS))
