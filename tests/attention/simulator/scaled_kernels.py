"""Small TLX kernels of 8-bit floats, scaled products and pairs of CTAs, with planted faults."""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx


@triton.jit
def convert_kernel(X, BYTES, BACK, DTYPE: tl.constexpr, N: tl.constexpr, KIND: tl.constexpr = ""):
    """Numbers to an 8-bit float and back."""
    i = tl.arange(0, N)
    x = tl.load(X + i).to(DTYPE)
    if KIND == "arithmetic":
        x = x + x
    tl.store(BYTES + i, x.to(tl.uint8, bitcast=True))
    tl.store(BACK + i, x.to(tl.float32))


@triton.jit
def eight_bit_kernel(
    desc_a, desc_b, C, K: tl.constexpr, REGISTERS: tl.constexpr, PLAIN: tl.constexpr
):
    """C = A @ B.T, 64x64 of 8-bit floats, for Hopper."""
    a = tlx.local_alloc((64, K), tlx.dtype_of(desc_a), 1)
    b = tlx.local_alloc((64, K), tlx.dtype_of(desc_b), 1)
    full = tlx.alloc_barriers(1)
    tlx.barrier_expect_bytes(full[0], 2 * 64 * K)
    tlx.async_descriptor_load(desc_a, a[0], [0, 0], full[0])
    tlx.async_descriptor_load(desc_b, b[0], [0, 0], full[0])
    tlx.barrier_wait(full[0], 0)
    zero = tl.zeros([64, 64], tl.float32)
    if PLAIN:
        c = tlx.async_dot(a[0], b[0], zero)
    elif REGISTERS:
        c = tlx.async_dot(tlx.local_load(a[0]), tlx.local_trans(b[0]), zero)
    else:
        c = tlx.async_dot(a[0], tlx.local_trans(b[0]), zero)
    c = tlx.async_dot_wait(0, c)
    i = tl.arange(0, 64)
    tl.store(C + i[:, None] * 64 + i[None, :], c)


@triton.jit
def scaled_kernel(
    desc_a,
    desc_b,
    desc_sa,
    desc_sb,
    C,
    blocks,
    N: tl.constexpr,
    K: tl.constexpr,
    A_FORMAT: tl.constexpr,
    B_FORMAT: tl.constexpr,
    WHERE: tl.constexpr,
    FAULT: tl.constexpr = "",
):
    """C = (A * its scales) @ (B * its scales), 128xN, in blocks of K; scales in WHERE."""
    A_PACK: tl.constexpr = 2 if A_FORMAT == "e2m1" else 1
    B_PACK: tl.constexpr = 2 if B_FORMAT == "e2m1" else 1
    REP_N: tl.constexpr = (N + 127) // 128
    REP_K: tl.constexpr = (K + 127) // 128
    a = tlx.local_alloc((128, K // A_PACK), tlx.dtype_of(desc_a), 1)
    b = tlx.local_alloc((K // B_PACK, N), tlx.dtype_of(desc_b), 1)
    sa = tlx.local_alloc((1, 1, REP_K, 2, 256), tl.uint8, 1)
    sb = tlx.local_alloc((1, REP_N, REP_K, 2, 256), tl.uint8, 1)
    acc = tlx.local_alloc((128, N), tl.float32, 1, tlx.storage_kind.tmem)
    ta = tlx.local_alloc((128, 4 * REP_K), tl.uint8, 1, tlx.storage_kind.tmem)
    tb = tlx.local_alloc((128 * REP_N, 4 * REP_K), tl.uint8, 1, tlx.storage_kind.tmem)
    full = tlx.alloc_barriers(1)
    done = tlx.alloc_barriers(1)
    for x in tl.range(0, blocks):
        BYTES: tl.constexpr = 128 * K // A_PACK + K * N // B_PACK + (1 + REP_N) * REP_K * 512
        tlx.barrier_expect_bytes(full[0], BYTES)
        tlx.async_descriptor_load(desc_a, a[0], [0, x * (K // A_PACK)], full[0])
        tlx.async_descriptor_load(desc_b, b[0], [x * (K // B_PACK), 0], full[0])
        tlx.async_descriptor_load(desc_sa, sa[0], [0, 0, x * REP_K, 0, 0], full[0])
        tlx.async_descriptor_load(desc_sb, sb[0], [0, 0, x * REP_K, 0, 0], full[0])
        tlx.barrier_wait(full[0], x & 1)
        use = x > 0
        if WHERE == "shared":
            tlx.async_dot_scaled(
                a[0], b[0], acc[0], sa[0], A_FORMAT, sb[0], B_FORMAT, use_acc=use,
                mBarriers=[done[0]],
            )  # fmt: skip
        else:
            tlx.tmem_copy(sa[0], ta[0])
            if FAULT != "no copy":
                tlx.tmem_copy(sb[0], tb[0])
            if FAULT == "read while copied":
                tl.device_assert(tl.max(tlx.local_load(ta[0]).to(tl.int32)) >= 0)
            if FAULT == "released early":
                tlx.barrier_arrive(done[0])
            tlx.async_dot_scaled(
                a[0], b[0], acc[0], ta[0], A_FORMAT, tb[0], B_FORMAT, use_acc=use,
                force_async=True,
            )  # fmt: skip
            if FAULT != "released early":
                tlx.tcgen05_commit(done[0])
        tlx.barrier_wait(done[0], x & 1)
    i = tl.arange(0, 128)
    j = tl.arange(0, N)
    tl.store(C + i[:, None] * N + j[None, :], tlx.local_load(acc[0]))


@triton.jit
def copy_kernel(X, OUT, FAULT: tl.constexpr = ""):
    """Numbers through shared and tensor memory."""
    i = tl.arange(0, 128)[:, None] * 32 + tl.arange(0, 32)[None, :]
    tile = tlx.local_alloc((128, 32), tl.float32, 1)
    to = tlx.local_alloc((128, 32), tl.float32, 1, tlx.storage_kind.tmem)
    done = tlx.alloc_barriers(1)
    tlx.local_store(tile[0], tl.load(X + i))
    if FAULT != "no fence":
        tlx.fence("async_shared")
    if FAULT == "from tensor memory":
        tlx.tmem_copy(to[0], to[0])
    elif FAULT == "other shape":
        tlx.tmem_copy(tlx.local_slice(tile[0], [0, 0], [128, 16]), to[0])
    else:
        tlx.tmem_copy(tile[0], to[0])
    if FAULT == "written while copied":
        tlx.local_store(tile[0], tl.zeros([128, 32], tl.float32))
    tlx.tcgen05_commit(done[0])
    if FAULT != "no wait":
        tlx.barrier_wait(done[0], 0)
    tl.store(OUT + i, tlx.local_load(to[0]))


@triton.jit
def scale_store_kernel(X, OUT, ROWS: tl.constexpr, FAULT: tl.constexpr = ""):
    """Scales that a task stores to tensor memory, beside an accumulator that stays as it is."""
    i = tl.arange(0, ROWS)[:, None] * 8 + tl.arange(0, 8)[None, :]
    acc = tlx.local_alloc((128, 496), tl.float32, 1, tlx.storage_kind.tmem)
    scales = tlx.local_alloc((ROWS, 8), tl.uint8, 1, tlx.storage_kind.tmem)
    if FAULT == "too many":
        tlx.local_alloc((ROWS, 12), tl.uint8, 1, tlx.storage_kind.tmem)
    tlx.local_store(acc[0], tl.zeros([128, 496], tl.float32))
    tlx.local_store(scales[0], tl.load(X + i))
    if ROWS == 128:
        right = tlx.subslice(scales[0], 4, 4)
        tlx.local_store(right, tlx.local_load(right) + 1)
    tl.store(OUT + i, tlx.local_load(scales[0]))
    tl.device_assert(tl.max(tlx.local_load(acc[0])) == 0.0)


@triton.jit
def pair_kernel(
    desc_a, desc_b, C, COUNT, ROWS: tl.constexpr, K: tl.constexpr, FAULT: tl.constexpr = ""
):
    """C = A @ B by pairs of CTAs: each has ROWS rows of A and half of the 128 columns of B.

    Their result takes 128 * ROWS / 128 columns, so that with 64 rows there are 64 more.
    """
    MORE: tl.constexpr = 512 - ROWS + (4 if FAULT == "too many columns" else 0)
    a = tlx.local_alloc((ROWS, K), tl.float16, 1)
    b = tlx.local_alloc((K, 64), tl.float16, 1)
    acc = tlx.local_alloc((ROWS, 128), tl.float32, 1, tlx.storage_kind.tmem)
    more = tlx.local_alloc((128, MORE), tl.float32, 1, tlx.storage_kind.tmem)
    full = tlx.alloc_barriers(1)
    both = tlx.alloc_barriers(1, arrive_count=2)
    done = tlx.alloc_barriers(1)
    rank = tlx.cluster_cta_rank()
    tl.atomic_add(COUNT + rank, 1)
    tlx.local_store(more[0], tl.zeros([128, MORE], tl.float32))
    tlx.barrier_expect_bytes(full[0], (ROWS + 64) * K * 2)
    tlx.async_descriptor_load(desc_a, a[0], [rank * ROWS, 0], full[0])
    tlx.async_descriptor_load(desc_b, b[0], [0, rank * 64], full[0])
    tlx.barrier_wait(full[0], 0)
    if FAULT != "no word from the other":
        tlx.barrier_arrive(both[0], 1, remote_cta_rank=0)
        tlx.barrier_wait(both[0], 0, pred=rank == 0)
    tlx.async_dot(a[0], b[0], acc[0], use_acc=False, two_ctas=True, mBarriers=[done[0]])
    if FAULT == "no wait":
        tlx.barrier_wait(done[0], 0, pred=rank == 0)
    else:
        tlx.barrier_wait(done[0], 0)
    i = rank * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, 128)
    tl.store(C + i[:, None] * 128 + j[None, :], tlx.local_load(acc[0]))
    tl.device_assert(tl.max(tlx.local_load(more[0])) == 0.0)


@triton.jit
def whole_kernel(desc_a, desc_b, OUT, WIDTH: tl.constexpr, FAULT: tl.constexpr = ""):
    """A pair's result of 64 rows each, read as it lies in 128 lanes, and added to OUT."""
    a = tlx.local_alloc((64, 64), tl.float16, 1)
    b = tlx.local_alloc((64, 64), tl.float16, 1)
    spec = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    acc = tlx.local_alloc((64, 128), tl.float32, 1, tlx.storage_kind.tmem, reuse=spec)
    whole = tlx.local_alloc((128, WIDTH), tl.float32, 1, tlx.storage_kind.tmem, reuse=spec)
    full = tlx.alloc_barriers(1)
    both = tlx.alloc_barriers(1, arrive_count=2)
    done = tlx.alloc_barriers(1)
    rank = tlx.cluster_cta_rank()
    tlx.barrier_expect_bytes(full[0], 2 * 64 * 64 * 2)
    tlx.async_descriptor_load(desc_a, a[0], [rank * 64, 0], full[0])
    tlx.async_descriptor_load(desc_b, b[0], [0, rank * 64], full[0])
    tlx.barrier_wait(full[0], 0)
    tlx.barrier_arrive(both[0], 1, remote_cta_rank=0)
    tlx.barrier_wait(both[0], 0, pred=rank == 0)
    tlx.async_dot(a[0], b[0], acc[0], use_acc=False, two_ctas=True, mBarriers=[done[0]])
    tlx.barrier_wait(done[0], 0)
    i = tl.arange(0, 128)
    j = tl.arange(0, WIDTH)
    if FAULT == "slice":
        tlx.local_load(tlx.local_slice(acc[0], [0, 0], [64, 32]))
    part = tlx.local_load(whole[0])
    tl.store(OUT + rank * 8192 + i[:, None] * WIDTH + j[None, :], part)


@triton.jit
def scaled_pair_kernel(desc_a, desc_b, desc_sa, desc_sb, C, FAULT: tl.constexpr = ""):
    """A scaled product of a pair: half of B's columns each, the scales of all of them both."""
    a = tlx.local_alloc((128, 128), tl.float8e4nv, 1)
    b = tlx.local_alloc((128, 64), tl.float8e4nv, 1)
    sa = tlx.local_alloc((1, 1, 1, 2, 256), tl.uint8, 1)
    sb = tlx.local_alloc((1, 1, 1, 2, 256), tl.uint8, 1)
    acc = tlx.local_alloc((128, 128), tl.float32, 1, tlx.storage_kind.tmem)
    full = tlx.alloc_barriers(1)
    both = tlx.alloc_barriers(1, arrive_count=2)
    done = tlx.alloc_barriers(1)
    rank = tlx.cluster_cta_rank()
    tlx.barrier_expect_bytes(full[0], 128 * 128 + 128 * 64 + 1024)
    tlx.async_descriptor_load(desc_a, a[0], [rank * 128, 0], full[0])
    tlx.async_descriptor_load(desc_b, b[0], [0, rank * 64], full[0])
    tlx.async_descriptor_load(desc_sa, sa[0], [0, rank, 0, 0, 0], full[0])
    tlx.async_descriptor_load(desc_sb, sb[0], [0, 0, 0, 0, 0], full[0])
    tlx.barrier_wait(full[0], 0)
    tlx.barrier_arrive(both[0], 1, remote_cta_rank=0)
    tlx.barrier_wait(both[0], 0, pred=rank == 0)
    tlx.async_dot_scaled(
        a[0], b[0], acc[0], sa[0], "e4m3", sb[0], "e4m3", use_acc=False, two_ctas=True,
        mBarriers=[done[0]],
    )  # fmt: skip
    tlx.barrier_wait(done[0], 0)
    i = rank * 128 + tl.arange(0, 128)
    j = tl.arange(0, 128)
    tl.store(C + i[:, None] * 128 + j[None, :], tlx.local_load(acc[0]))
    tlx.cluster_barrier()


@triton.jit
def unsupported_kernel(KIND: tl.constexpr):
    """Scaled products that the hardware does not have."""
    ROWS: tl.constexpr = 64 if KIND == "64 rows" else 128
    a = tlx.local_alloc((ROWS, 128), tl.float8e5 if KIND == "format" else tl.float8e4nv, 1)
    b = tlx.local_alloc((128, 64), tl.float8e4nv, 1)
    if KIND == "unpacked":
        s = tlx.local_alloc((128, 4), tl.uint8, 1)
    else:
        s = tlx.local_alloc((1, 1, 1, 2, 256), tl.uint8, 1)
    acc = tlx.local_alloc((ROWS, 64), tl.float32, 1, tlx.storage_kind.tmem)
    few = tlx.local_alloc((128, 2), tl.uint8, 1, tlx.storage_kind.tmem)
    if KIND == "few":
        tlx.async_dot_scaled(a[0], b[0], acc[0], few[0], "e4m3", s[0], "e4m3", use_acc=False)
    elif KIND == "copy":
        tlx.tmem_copy(s[0], few[0])
    else:
        tlx.async_dot_scaled(a[0], b[0], acc[0], s[0], "e4m3", s[0], "e4m3", use_acc=False)


@triton.jit
def hopper_kernel(KIND: tl.constexpr):
    """Operations of Blackwell, in shared memory so far as there is no other."""
    a = tlx.local_alloc((128, 128), tl.float8e4nv, 1)
    s = tlx.local_alloc((1, 1, 1, 2, 256), tl.uint8, 1)
    if KIND == "tmem_copy":
        tlx.tmem_copy(a[0], a[0])
    else:
        tlx.async_dot_scaled(a[0], a[0], a[0], s[0], "e4m3", s[0], "e4m3", use_acc=False)
