/* The instructions that sm_90 adds: barriers in shared memory (mbarrier), copies by the tensor memory accelerator (TMA)
 * and products of warpgroups (wgmma). Names in quotes are sections of the PTX ISA.
 *
 * A copy or a product takes effect when it is issued, so a missing wait is not seen here. (The copies of cp.async in
 * access.c do arrive late.) Races that a barrier in shared memory should prevent are not seen either. The emulator reports
 *
 *     - a phase of a barrier that nobody completes: too few arrivals, too few or too many bytes
 *     - shared memory that a product reads and nobody has written
 *     - maps, addresses and descriptors that are not aligned as TMA and wgmma require
 */
#include <stdarg.h>

#include "ops.h"

#define EACH(m) for (u32 t_ = (m), l = 0; t_ && (l = (u32)__builtin_ctz(t_), 1); t_ &= t_ - 1)

/* Bytes of shared memory at an address, which may be generic. Reports an address outside the block's memory. */
static u8 *place(Warp *w, const Inst *I, u32 l, u64 at, u64 bytes, u32 align, const char *what) {
    Block *b = w->block;
    if (at - shared_window < WINDOW) at -= shared_window;
    if (at % align) finding(w, I, 1u << l, "%s at %ld of shared memory, which is not a multiple of %u", what, (long)at, align);
    if (at > WINDOW || at + bytes > b->shared_bytes)
        finding(w, I, 1u << l, "%s of %lu bytes at %ld of shared memory, of which the block has %u bytes", what, (long)bytes, (long)at, b->shared_bytes);
    return b->shared + at;
}
static u64 lane_address(char *R, s32 reg, bool narrow, u32 l) { return narrow ? (u64)REG(u32, reg)[l] : REG(u64, reg)[l]; }

/* ---- barriers in shared memory ------------------------------------------------------------------------------------
 * "Parallel Synchronization and Communication Instructions: mbarrier". The real 8 bytes are opaque. Here bits 0-19 hold
 * the arrivals of a phase, 20-39 the arrivals that are still missing, 40-61 the bytes that are still missing (with a
 * bias, because bytes may come before they are announced) and 62 the parity of the current phase.
 */
enum { BIAS = 1 << 21, MOST_BYTES = (1 << 20) - 1, MOST_ARRIVALS = (1 << 20) - 1 };
typedef struct { u32 all, left; s32 bytes; u32 parity; } Mbar;

static Mbar unpack(const u8 *p) {
    u64 v;
    memcpy(&v, p, 8);
    return (Mbar){(u32)(v & 0xfffff), (u32)(v >> 20 & 0xfffff), (s32)(v >> 40 & 0x3fffff) - BIAS, (u32)(v >> 62 & 1)};
}
static u8 *mbar_place(Warp *w, const Inst *I, u32 l, u64 at) { return place(w, I, l, at, 8, 8, "a barrier"); }
static Mbar mbar_get(Warp *w, const Inst *I, u32 l, u64 at) {
    u8 *p = mbar_place(w, I, l, at);
    if (!w->block->init[p - w->block->shared]) finding(w, I, 1u << l, "the barrier at %ld of shared memory was not initialised", (long)(p - w->block->shared));
    return unpack(p);
}
static void mbar_put(Warp *w, const Inst *I, u32 l, u64 at, Mbar m) {
    u8 *p = mbar_place(w, I, l, at);
    if (m.bytes > MOST_BYTES || m.bytes < -MOST_BYTES)
        finding(w, I, 1u << l, "the barrier at %ld of shared memory waits for %d bytes; it can count %d", (long)(p - w->block->shared), m.bytes, MOST_BYTES);
    if (!m.left && !m.bytes) { /* the phase is complete */
        m.left = m.all;
        m.parity ^= 1;
    }
    u64 v = m.all | (u64)m.left << 20 | (u64)(u32)(m.bytes + BIAS) << 40 | (u64)m.parity << 62;
    memcpy(p, &v, 8);
    memset(w->block->init + (p - w->block->shared), 1, 8);
    w->block->events++;
}
static void mbar_bytes_came(Warp *w, const Inst *I, u32 l, u64 at, u32 bytes) {
    Mbar m = mbar_get(w, I, l, at);
    m.bytes -= (s32)bytes;
    mbar_put(w, I, l, at, m);
}

/* k: 1 the address has 32 bits */
void op_mbar_init(Warp *w, char *R, const Inst *I, u32 m) {
    EACH(m) {
        u32 n = REG(u32, I->b)[l];
        if (!n || n > MOST_ARRIVALS) finding(w, I, 1u << l, "a barrier for %u arrivals; it must be 1 to %d", n, MOST_ARRIVALS);
        mbar_put(w, I, l, lane_address(R, I->a, I->k & 1, l), (Mbar){n, n, 0, 0});
    }
}
/* The memory may hold something else afterwards. A later use as a barrier is reported. */
void op_mbar_inval(Warp *w, char *R, const Inst *I, u32 m) {
    EACH(m) {
        u64 at = lane_address(R, I->a, I->k & 1, l);
        mbar_get(w, I, l, at);
        memset(w->block->init + (mbar_place(w, I, l, at) - w->block->shared), 0, 8);
    }
}
/* k: 1 the address has 32 bits, 2 expect_tx: b holds bytes, and one arrives */
void op_mbar_arrive(Warp *w, char *R, const Inst *I, u32 m) {
    if (m) w->block->no_races = true; /* this may order accesses of two warps, which only bar.sync does otherwise */
    EACH(m) {
        u64 at = lane_address(R, I->a, I->k & 1, l);
        Mbar b = mbar_get(w, I, l, at);
        u32 n = I->k & 2 ? 1 : REG(u32, I->b)[l];
        if (I->k & 2) b.bytes += (s32)REG(u32, I->b)[l];
        if (!n || n > b.left) finding(w, I, 1u << l, "%u arrive at a barrier for %u, at which %u are missing", n, b.all, b.left);
        b.left -= n;
        if (I->d >= 0) REG(u64, I->d)[l] = b.parity;
        mbar_put(w, I, l, at, b);
    }
}
/* test_wait.parity and try_wait.parity: true if the phase of this parity is complete */
void op_mbar_test(Warp *w, char *R, const Inst *I, u32 m) {
    u32 *d = REG(u32, I->d), complete = 0;
    EACH(m) {
        u64 at = lane_address(R, I->a, I->k & 1, l);
        Mbar b = mbar_get(w, I, l, at);
        if (b.parity != (REG(u32, I->b)[l] & 1)) complete |= 1u << l;
        else w->waits_at = (u32)(mbar_place(w, I, l, at) - w->block->shared);
    }
    if (complete != m) w->waits = true;
    *d = (*d & ~m) | complete;
}
static int what_is_missing(char *text, size_t size, Mbar b) {
    if (b.bytes > 0) return snprintf(text, size, "%u of %u arrivals and %d bytes are missing", b.left, b.all, b.bytes);
    if (b.bytes < 0) return snprintf(text, size, "%u of %u arrivals are missing, and %d bytes too many came", b.left, b.all, -b.bytes);
    return snprintf(text, size, "%u of %u arrivals are missing", b.left, b.all);
}
/* Reports that this warp waits for a phase that no warp of the block will complete, and for what the others wait: the cause
 * may be at their barriers. */
void mbar_never(Warp *w, const Inst *I, u32 lanes) {
    Block *block = w->block;
    Mbar b = unpack(block->shared + w->waits_at);
    char own[96], others[320] = "";
    size_t used = 0;
    what_is_missing(own, sizeof own, b);
    for (int i = 0; i < block->nwarps; i++) {
        Warp *other = &block->warps[i];
        bool told = other->state != READY || other->waits_at == w->waits_at;
        for (int j = 0; j < i; j++) told |= block->warps[j].state == READY && block->warps[j].waits_at == other->waits_at;
        if (told || used + 128 > sizeof others) continue;
        used += (size_t)snprintf(others + used, sizeof others - used, "; warp %d waits for the barrier at %u: ", i, other->waits_at);
        used += (size_t)what_is_missing(others + used, sizeof others - used, unpack(block->shared + other->waits_at));
    }
    finding(w, I, lanes, "waits for the barrier at %u of shared memory, whose phase %u nobody completes: %s%s", w->waits_at, b.parity, own, others);
}

/* ---- TMA -----------------------------------------------------------------------------------------------------------
 * "Tensors" (boxes, coordinates, out-of-bound access, swizzling modes) and "cp.async.bulk.tensor".
 */
typedef struct TensorMap { /* what a CUtensorMap of 128 bytes holds here */
    u32 magic;
    u8 bytes, rank, swizzle, unused; /* bytes: of an element; swizzle: 0 none, 1 to 3: 32, 64 and 128 bytes */
    u64 address, dims[5], strides[5]; /* strides in bytes, from one element to the next along each dimension */
    u16 box[5];
} TensorMap;
enum { TENSOR_MAP = 0x7e45072a, MAP_BYTES = 128 };
_Static_assert(sizeof(TensorMap) <= MAP_BYTES, "CUtensorMap");

static int map_refused(int code, const char *fmt, ...) {
    char text[256];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    fprintf(stderr, "[emulated GPU] cuTensorMapEncodeTiled: %s\n", text);
    return code;
}

/* Makes a map of a tensor. An error has one line on stderr: CUDA refuses it too (invalid value), or it is not emulated. */
API int cuTensorMapEncodeTiled(void *out, int type, u32 rank, void *address, const u64 *dims, const u64 *strides, const u32 *box, const u32 *steps,
                               int interleave, int swizzle, int promotion, int fill) {
    static const u8 bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4}; /* CUtensorMapDataType */
    const u64 most = 1ull << 32, widest = 1ull << 40;
    (void)promotion;
    if (settings.cc < 90) return map_refused(CU_NOT_SUPPORTED, "requires a GPU of compute capability 9.0, and this one has %d.%d", settings.cc / 10, settings.cc % 10);
    if (rank < 1 || rank > 5) return map_refused(CU_INVALID_VALUE, "rank %u; it must be 1 to 5", rank);
    if (type < 0 || type >= (int)sizeof bytes) return map_refused(CU_NOT_SUPPORTED, "data type %d is not emulated; use 0 to %d", type, (int)sizeof bytes - 1);
    if (interleave) return map_refused(CU_NOT_SUPPORTED, "interleave %d is not emulated; use 0 (none)", interleave);
    if (swizzle < 0 || swizzle > 3) return map_refused(CU_NOT_SUPPORTED, "swizzle %d is not emulated; use 0 to 3", swizzle);
    if (fill) return map_refused(CU_NOT_SUPPORTED, "fill %d is not emulated; use 0 (zeros)", fill);
    if ((u64)out % 64) return map_refused(CU_INVALID_VALUE, "the map is at %p; its address must be a multiple of 64", out);
    if ((u64)address % 16) return map_refused(CU_INVALID_VALUE, "the tensor is at %p; its address must be a multiple of 16", address);
    TensorMap m = {.magic = TENSOR_MAP, .bytes = bytes[type], .rank = (u8)rank, .swizzle = (u8)swizzle, .address = (u64)address};
    for (u32 i = 0; i < rank; i++) {
        m.dims[i] = dims[i];
        m.box[i] = (u16)box[i];
        m.strides[i] = i ? strides[i - 1] : m.bytes;
        if (!dims[i] || dims[i] > most) return map_refused(CU_INVALID_VALUE, "dimension %u is %lu; it must be 1 to 2^32", i, (long)dims[i]);
        if (!box[i] || box[i] > 256) return map_refused(CU_INVALID_VALUE, "the box is %u along dimension %u; it must be 1 to 256", box[i], i);
        if (i && (m.strides[i] % 16 || m.strides[i] >= widest))
            return map_refused(CU_INVALID_VALUE, "the stride of dimension %u is %lu bytes; it must be a multiple of 16 below 2^40", i, (long)m.strides[i]);
        if (i && steps[i] != 1) /* CUDA ignores the step of dimension 0 */
            return steps[i] && steps[i] <= 8 ? map_refused(CU_NOT_SUPPORTED, "step %u along dimension %u is not emulated; use 1", steps[i], i)
                                             : map_refused(CU_INVALID_VALUE, "step %u along dimension %u; it must be 1 to 8", steps[i], i);
    }
    u32 inner = box[0] * m.bytes;
    if (inner % 16) return map_refused(CU_INVALID_VALUE, "the box is %u bytes wide; it must be a multiple of 16", inner);
    u32 span = 16u << swizzle;
    if (swizzle && inner > span) return map_refused(CU_INVALID_VALUE, "the box is %u bytes wide; the swizzle allows %u", inner, span);
    if (swizzle && inner < span) return map_refused(CU_NOT_SUPPORTED, "a box of %u bytes in a swizzle of %u is not emulated; use the whole width", inner, span);
    memset(out, 0, MAP_BYTES);
    memcpy(out, &m, sizeof m);
    return CU_OK;
}

/* "Swizzling Modes": pieces of 16 bytes change places within rows of 32, 64 or 128 bytes (mode 1, 2, 3). */
static inline u64 swizzled(u64 at, int mode) {
    return at ^ ((at >> 7 & ((1u << mode) - 1)) << 4);
}

static const u8 *from_global(Warp *w, const Inst *I, u32 l, u64 at, u64 bytes) {
    Allocation a;
    if (!memory_find(at, &a) || at + bytes > a.address + a.size)
        finding(w, I, 1u << l, "copies %lu bytes from 0x%lx, where no allocation has them", (long)bytes, (long)at);
    if (a.device >= 0 && !memory_peer(w->block->launch->device, a.device))
        finding(w, I, 1u << l, "copies from memory of device %d, which device %d has no peer access to", a.device, w->block->launch->device);
    return (const u8 *)at;
}

/* The map, which is a parameter of the kernel (then the address is an offset) or in global memory. */
static TensorMap read_map(Warp *w, const Inst *I, u32 l, u64 at) {
    const Launch *L = w->block->launch;
    u64 parameters = (u64)L->f->param_bytes;
    TensorMap map;
    if (at % 64) finding(w, I, 1u << l, "a tensor map at 0x%lx, which is not a multiple of 64", (long)at);
    bool parameter = parameters >= MAP_BYTES && at <= parameters - MAP_BYTES;
    memcpy(&map, parameter ? (const u8 *)L->params + at : from_global(w, I, l, at, MAP_BYTES), sizeof map);
    if (map.magic != TENSOR_MAP || map.rank != I->k) finding(w, I, 1u << l, "no tensor map of %u dimensions at 0x%lx; make it with cuTensorMapEncodeTiled", I->k, (long)at);
    return map;
}

/* One row of a box, of `inner` bytes, to shared memory from offset `to` on. Elements outside the tensor are zeros. */
static void copy_row(Warp *w, const Inst *I, u32 l, const TensorMap *map, const s64 *at, u64 to, u32 inner) {
    Block *b = w->block;
    u8 row[256 * 8] = {0};
    u64 from = map->address;
    bool inside = true;
    for (int i = 1; i < map->rank; i++) {
        inside &= at[i] >= 0 && (u64)at[i] < map->dims[i];
        from += (u64)at[i] * map->strides[i];
    }
    s64 first = at[0] < 0 ? -at[0] : 0, end = map->box[0];
    if (at[0] + end > (s64)map->dims[0]) end = (s64)map->dims[0] - at[0];
    if (inside && first < end) {
        u64 n = (u64)(end - first) * map->bytes;
        memcpy(row + (u64)first * map->bytes, from_global(w, I, l, from + (u64)(at[0] + first) * map->bytes, n), n);
    }
    for (u32 j = 0; j < inner; j += 16) {
        u64 q = swizzled(to + j, map->swizzle);
        memcpy(b->shared + q, row + j, 16);
        memset(b->init + q, 1, 16);
    }
}

/* cp.async.bulk.tensor: a is the place in shared memory, b the map, c the barrier, imm the first of k coordinates. The
 * barrier counts all bytes of the box, those outside the tensor too. */
void op_tma(Warp *w, char *R, const Inst *I, u32 m) {
    Block *b = w->block;
    const s32 *coordinates = b->launch->f->vec + I->imm;
    EACH(m) {
        TensorMap map = read_map(w, I, l, REG(u64, I->b)[l]);
        s64 first[5] = {0};
        u32 box[5] = {1, 1, 1, 1, 1};
        u64 bytes = map.bytes;
        for (int i = 0; i < map.rank; i++) {
            first[i] = (s32)REG(u32, coordinates[i])[l];
            box[i] = map.box[i];
            bytes *= box[i];
        }
        u64 to = (u64)(place(w, I, l, REG(u32, I->a)[l], bytes, 128, "a box") - b->shared);
        u32 inner = box[0] * map.bytes;
        for (u32 n = 0; n < bytes / inner; n++) { /* rows of the box, the second dimension fastest */
            s64 at[5] = {first[0]};
            u32 rest = n;
            for (int i = 1; i < 5; i++) {
                at[i] = first[i] + rest % box[i];
                rest /= box[i];
            }
            copy_row(w, I, l, &map, at, to + (u64)n * inner, inner);
        }
        if (settings.stats) {
            b->stats.load_bytes += bytes;
            b->stats.load_sectors += bytes / 32;
        }
        mbar_bytes_came(w, I, l, REG(u32, I->c)[l], (u32)bytes);
    }
}

/* "cp.async.bulk" to shared memory: a is the place, b the source, c the barrier, imm the register of the number of bytes */
void op_bulk(Warp *w, char *R, const Inst *I, u32 m) {
    Block *b = w->block;
    EACH(m) {
        u32 n = REG(u32, b->launch->f->vec[I->imm])[l];
        u64 at = REG(u64, I->b)[l];
        if (!n || n % 16 || at % 16) finding(w, I, 1u << l, "a bulk copy of %u bytes from 0x%lx; both must be multiples of 16", n, (long)at);
        u8 *to = place(w, I, l, REG(u32, I->a)[l], n, 16, "a bulk copy");
        memcpy(to, from_global(w, I, l, at, n), n);
        memset(b->init + (to - b->shared), 1, n);
        mbar_bytes_came(w, I, l, REG(u32, I->c)[l], n);
    }
}

/* ---- wgmma ---------------------------------------------------------------------------------------------------------
 * "Asynchronous Warpgroup Level Matrix Instructions". Each product is exact. The sum of the terms of one instruction is
 * in float64 and rounded once. NVIDIA documents neither the order nor the rounding of a tensor core, so bits of results
 * that are not exact may differ from a GPU's.
 */
enum { BF16_TERMS = 1, F16_TERMS = 2, TF32_TERMS = 3 };

/* The byte of number (x, k) of an operand in shared memory: x is a row of A or a column of B, k a term, e the bytes of a
 * number. "Shared Memory Matrix Layout" and "Matrix Descriptor Format": the descriptor has the start, the leading and the
 * stride byte offset, each in 16 bytes, and the swizzle in bits 62-63 (0 none, 1 128, 2 64, 3 32 bytes).
 *
 * K-major: terms of a row follow each other, eight rows are a core matrix. Without a swizzle a core matrix has 16 bytes
 * of terms, leading is between core matrices along k and stride along x. With a swizzle leading is not used.
 * MN-major (major_x): rows of a term follow each other. With a swizzle leading is between atoms along x and stride
 * between eight terms and the next eight. Without one it is the other way round.
 */
static u64 where(u64 desc, bool major_x, u32 x, u32 k, u32 e) {
    u64 start = (desc & 0x3fff) << 4, leading = (desc >> 16 & 0x3fff) << 4, stride = (desc >> 32 & 0x3fff) << 4;
    int code = (int)(desc >> 62);
    int mode = code ? 4 - code : 0; /* as TMA counts: 1, 2, 3 for 32, 64, 128 bytes */
    u32 span = 16u << mode; /* bytes of a row of an atom */
    u64 at;
    if (!major_x) {
        if (mode) at = x % 8 * span + x / 8 * stride + k * e;
        else at = x % 8 * 16 + x / 8 * stride + k / (16 / e) * leading + k % (16 / e) * e;
    } else {
        u32 wide = span / e;
        if (mode) at = x % wide * e + x / wide * leading + k % 8 * span + k / 8 * stride;
        else at = x % wide * e + x / wide * stride + k % 8 * 16 + k / 8 * leading;
    }
    return swizzled(start + at, mode);
}
/* 16 bytes of an operand that lie side by side, all of them written */
static const u8 *chunk(Warp *w, const Inst *I, u64 at) {
    Block *b = w->block;
    if (at + 16 > b->shared_bytes) finding(w, I, ~0u, "wgmma reads byte %ld of shared memory, of which the block has %u bytes", (long)at, b->shared_bytes);
    for (u64 i = at; i < at + 16; i++)
        if (!b->init[i]) finding(w, I, ~0u, "wgmma reads byte %lu of shared memory, which nobody has written", (long)i);
    return b->shared + at;
}
static inline float tf32(u32 x) { /* the low 13 bits do not count */
    float f;
    x &= 0xffffe000;
    memcpy(&f, &x, 4);
    return f;
}
static inline float number(const u8 *p, u32 i, int kind) {
    if (kind == TF32_TERMS) {
        u32 x;
        memcpy(&x, p + 4 * i, 4);
        return tf32(x);
    }
    u16 h;
    memcpy(&h, p + 2 * i, 2);
    return kind == BF16_TERMS ? widen_bf16(h) : widen_half(h);
}
/* Rows x0 to x0 + n - 1 of an operand, and K terms, to out[k * step_k + x * step_x]. */
static void operand(Warp *w, const Inst *I, u64 desc, bool major_x, u32 x0, u32 n, u32 K, int kind, double *out, u32 step_x, u32 step_k) {
    u32 e = kind == TF32_TERMS ? 4 : 2, together = 16 / e;
    if (major_x) {
        for (u32 k = 0; k < K; k++)
            for (u32 x = 0; x < n; x += together) {
                const u8 *p = chunk(w, I, where(desc, true, x0 + x, k, e));
                for (u32 i = 0; i < together; i++) out[k * step_k + (x + i) * step_x] = number(p, i, kind);
            }
    } else {
        for (u32 x = 0; x < n; x++)
            for (u32 k = 0; k < K; k += together) {
                const u8 *p = chunk(w, I, where(desc, false, x0 + x, k, e));
                for (u32 i = 0; i < together; i++) out[(k + i) * step_k + x * step_x] = number(p, i, kind);
            }
    }
}
/* The 16 rows of A of this warp from four registers of each lane: "Register Fragments". Register r has rows 8 (r % 2) + l / 4
 * of lane l, and of each half of the terms the second half if r is 2 or 3. */
static void operand_in_registers(char *R, const s32 *registers, int kind, double (*a)[16]) {
    for (int r = 0; r < 4; r++)
        for (int l = 0; l < WARP; l++) {
            double *row = a[r % 2 * 8 + l / 4];
            u32 x = REG(u32, registers[r])[l];
            if (kind == TF32_TERMS) row[r / 2 * 4 + l % 4] = tf32(x);
            else
                for (int h = 0; h < 2; h++) {
                    u16 half = (u16)(x >> (16 * h));
                    row[r / 2 * 8 + l % 4 * 2 + h] = kind == BF16_TERMS ? widen_bf16(half) : widen_half(half);
                }
        }
}
static u64 descriptor(Warp *w, char *R, const Inst *I, s32 reg) {
    u64 desc = REG(u64, reg)[0];
    for (int l = 1; l < WARP; l++)
        if (REG(u64, reg)[l] != desc) finding(w, I, 1u << l, "a descriptor of wgmma is not the same in all lanes of the warp");
    if (desc >> 49 & 7) finding(w, I, ~0u, "a descriptor of wgmma has a base offset, which is not emulated; let its pattern start at a multiple of its size");
    return desc;
}

/* k: bits 0-1 the kind of terms, 2 A is in registers, 3 A is MN-major, 4 B is MN-major. imm: N, the columns. d: the first
 * of N / 2 sums, and of the registers of A behind them. c: add to the sums (else they start at zero). Warp number i of a
 * warpgroup has rows 16 i to 16 i + 15 of the 64. */
void op_wgmma(Warp *w, char *R, const Inst *I, u32 m) {
    int kind = I->k & 3, N = (int)I->imm, K = kind == TF32_TERMS ? 8 : 16;
    u32 add = *REG(u32, I->c);
    const s32 *sums = w->block->launch->f->vec + I->d;
    double a[16][16], b[16][256];
    if (m != ~0u) finding(w, I, ~m, "wgmma is not executed by all lanes of the warp");
    if (w->id / 4 * 4 + 4 > w->block->nwarps) finding(w, I, m, "wgmma needs four warps, and the block has no four from warp %d on", w->id / 4 * 4);
    if (add != 0 && add != ~0u) finding(w, I, add, "scale-d of wgmma is not the same in all lanes of the warp");
    if (I->k & 4) operand_in_registers(R, sums + N / 2, kind, a);
    else operand(w, I, descriptor(w, R, I, I->a), I->k >> 3 & 1, (u32)(w->id % 4 * 16), 16, (u32)K, kind, &a[0][0], 16, 1);
    operand(w, I, descriptor(w, R, I, I->b), I->k >> 4 & 1, 0, (u32)N, (u32)K, kind, &b[0][0], 1, 256);
    for (int r = 0; r < 16; r++) {
        double s[256];
        for (int n = 0; n < N; n++) s[n] = add ? REG(float, sums[n / 8 * 4 + r / 8 * 2 + n % 2])[r % 8 * 4 + n % 8 / 2] : 0;
        for (int k = 0; k < K; k++)
            for (int n = 0; n < N; n++) s[n] = __builtin_fma(a[r][k], b[k][n], s[n]);
        for (int n = 0; n < N; n++) REG(float, sums[n / 8 * 4 + r / 8 * 2 + n % 2])[r % 8 * 4 + n % 8 / 2] = (float)s[n];
    }
    if (settings.stats) w->block->stats.mma += (u64)N / 8; /* as many as mma instructions with 16 rows and 8 columns */
}
