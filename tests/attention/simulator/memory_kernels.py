"""TLX kernels that share, slice and fill shared memory in every way."""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx


@triton.jit
def bulk_kernel(X, OUT, size, FAULT: tl.constexpr = ""):
    """64 numbers in and out by bulk copies."""
    tile = tlx.local_alloc((64,), tl.float32, 2)
    full = tlx.alloc_barriers(1)
    tlx.barrier_expect_bytes(full[0], 256)
    tlx.async_load(X + 64, tile[0], bulk=True, barrier=full[0], bulk_size=size)
    if FAULT != "no wait":
        tlx.barrier_wait(full[0], 0)
    x = tlx.local_load(tile[0])
    tlx.local_store(tile[1], x * 2.0)
    if FAULT != "no fence":
        tlx.fence("async_shared")
    tlx.async_store(OUT, tile[1], size)
    if FAULT == "no store wait":
        tlx.local_store(tile[1], x)
    tlx.async_descriptor_store_wait(0)


@triton.jit
def handed_kernel(OUT, FENCE: tl.constexpr):
    """One task writes and another copies out; FENCE tells where the fence between them is."""
    tile = tlx.local_alloc((64,), tl.float32, 1)
    written = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.local_store(tile[0], tl.full([64], 3.0, tl.float32))
            if FENCE == "by the writer":
                tlx.fence("async_shared")
            tlx.barrier_arrive(written[0])
        with tlx.async_task(num_warps=1):
            if FENCE == "too early":
                tlx.fence("async_shared")
            tlx.barrier_wait(written[0], 0)
            if FENCE == "by the reader":
                tlx.fence("async_shared")
            tlx.async_store(OUT, tile[0], 256)
            tlx.async_descriptor_store_wait(0)


@triton.jit
def group_kernel(X, OUT, rows, STAGES: tl.constexpr, FAULT: tl.constexpr = ""):
    """A pipeline of copies by pointers, waited for by groups."""
    j = tl.arange(0, 32)
    tiles = tlx.local_alloc((32,), tl.float32, STAGES)
    for x in tl.static_range(STAGES - 1):
        tlx.async_load(X + x * 32 + j, tiles[x], mask=j < 30, other=7.0)
        tlx.async_load_commit_group()
    for x in tl.range(0, rows):
        PENDING: tl.constexpr = STAGES - 1 if FAULT == "one too many" else STAGES - 2
        tlx.async_load_wait_group(PENDING)
        number = tlx.local_load(tiles[x % STAGES])
        tl.store(OUT + x * 32 + j, number)
        ahead = x + STAGES - 1
        token = tlx.async_load(X + ahead * 32 + j, tiles[ahead % STAGES], mask=ahead < rows)
        tlx.async_load_commit_group([token])
    tlx.async_load_wait_group(0)


@triton.jit
def alias_kernel(OUT, SIZE: tl.constexpr, KIND: tl.constexpr):
    """Two views of one region, or two regions of it."""
    i = tl.arange(0, 64)
    spec = tlx.storage_alias_spec(storage=tlx.storage_kind.smem, buffer_size_bytes=SIZE)
    a = tlx.local_alloc((64,), tl.float32, 2, reuse=spec)
    b = tlx.local_alloc((32,), tl.int32, 4, reuse=spec)
    c = tlx.local_alloc((64,), tl.float32, 2, reuse=spec)
    if KIND == "distinct":
        spec.set_buffer_overlap(
            tlx.reuse_group(
                a,
                tlx.reuse_group(
                    tlx.reuse_group(b, group_size=2),
                    c,
                    group_type=tlx.reuse_group_type.distinct,
                ),
            )
        )
    tlx.local_store(a[1], tl.full([64], 1.0, tl.float32))
    tlx.local_store(c[1], tl.full([64], 2.0, tl.float32))
    tl.store(OUT + i, tlx.local_load(a[1]))
    tlx.local_store(b[3], tl.full([32], 0, tl.int32))
    tl.store(OUT + 64 + i, tlx.local_load(a[1]))


@triton.jit
def view_kernel(X, OUT):
    """Slices, transposes and other types of the same bytes."""
    i = tl.arange(0, 32)
    tile = tlx.local_alloc((32, 32), tl.float32, 1)
    tlx.local_store(tile[0], tl.load(X + i[:, None] * 32 + i[None, :]))
    part = tlx.local_slice(tile[0], [8, 16], [16, 16])
    k = tl.arange(0, 16)
    tlx.local_store(part, tlx.local_load(part) + 1.0)
    tl.store(OUT + i[:, None] * 32 + i[None, :], tlx.local_load(tlx.local_trans(tile[0])))
    bits = tlx.local_reinterpret(tile[0], tl.int32, [1024])
    tl.store(OUT + 1024 + tl.arange(0, 1024), tlx.local_load(bits).to(tl.float32, bitcast=True))
    flat = tlx.local_reshape(tile[0], [16, 64])
    j = tl.arange(0, 64)
    tl.store(OUT + 2048 + k[:, None] * 64 + j[None, :], tlx.local_load(flat))
    again = tlx.local_alloc((16, 32), tl.float32, 2, reuse=tile)
    tl.store(OUT + 3072 + k[:, None] * 32 + i[None, :], tlx.local_load(again[1]))
