/* What sm_90 has beside the rest: barriers in shared memory (mbarrier), TMA, products of warpgroups (wgmma).
 *
 * A copy is made, and a product computed, when it is issued: nothing that a kernel must wait for is late, so a missing wait is
 * not seen (a copy of cp.async in access.c is). What is seen: bytes beyond a barrier's count, a phase that nobody completes,
 * shared memory that was never written, maps and addresses that are not aligned as TMA and wgmma want them.
 *
 * A barrier's 8 bytes: bits 0-19 arrivals that a phase has, 20-39 those that are still to come, 40-61 bytes that are still to
 * come, biased, 62 parity of the phase that is under way.
 */
#include "ops.h"

enum { BIAS = 1 << 21 };
typedef struct { u32 all, left; s32 bytes; u32 parity; } Mbar;

static u8 *place(Warp *w, const Inst *I, u32 l, u64 at, u32 bytes, u32 align, const char *what) {
    Block *b = w->block;
    if (at - shared_window < WINDOW) at -= shared_window;
    if (at + bytes > b->shared_bytes) finding(w, I, 1u << l, "%s at %ld of shared memory, of which the block has %u bytes", what, (long)at, b->shared_bytes);
    if (at % align) finding(w, I, 1u << l, "%s at %ld of shared memory, which is not a multiple of %u", what, (long)at, align);
    return b->shared + at;
}
static u64 lane_address(char *R, s32 reg, bool narrow, u32 l) { return narrow ? (u64)REG(u32, reg)[l] : REG(u64, reg)[l]; }

static Mbar mbar_get(Warp *w, const Inst *I, u32 l, u64 at) {
    u8 *p = place(w, I, l, at, 8, 8, "barrier");
    if (!w->block->init[p - w->block->shared]) finding(w, I, 1u << l, "a barrier that was not initialised");
    u64 v;
    memcpy(&v, p, 8);
    return (Mbar){(u32)(v & 0xfffff), (u32)(v >> 20 & 0xfffff), (s32)(v >> 40 & 0x3fffff) - BIAS, (u32)(v >> 62 & 1)};
}
static void mbar_put(Warp *w, const Inst *I, u32 l, u64 at, Mbar m) {
    u8 *p = place(w, I, l, at, 8, 8, "barrier");
    if (!m.left && !m.bytes) m.left = m.all, m.parity ^= 1;
    u64 v = m.all | (u64)m.left << 20 | (u64)(u32)(m.bytes + BIAS) << 40 | (u64)m.parity << 62;
    memcpy(p, &v, 8);
    memset(w->block->init + (p - w->block->shared), 1, 8);
    w->block->events++;
}
static void mbar_bytes(Warp *w, const Inst *I, u32 l, u64 at, s32 bytes) {
    Mbar m = mbar_get(w, I, l, at);
    m.bytes += bytes;
    mbar_put(w, I, l, at, m);
}

#define EACH(m) for (u32 t_ = (m), l = 0; t_ && (l = (u32)__builtin_ctz(t_), 1); t_ &= t_ - 1)

void op_mbar_init(Warp *w, char *R, const Inst *I, u32 m) {
    EACH(m) {
        u32 n = REG(u32, I->b)[l];
        if (!n || n > 0xfffff) finding(w, I, 1u << l, "a barrier for %u arrivals", n);
        mbar_put(w, I, l, lane_address(R, I->a, I->k & 1, l), (Mbar){n, n, 0, 0});
    }
}
/* k: 1 address of 32 bits, 2 expect_tx: b is bytes and one arrives */
void op_mbar_arrive(Warp *w, char *R, const Inst *I, u32 m) {
    EACH(m) {
        u64 at = lane_address(R, I->a, I->k & 1, l);
        Mbar b = mbar_get(w, I, l, at);
        u32 n = I->k & 2 ? 1 : REG(u32, I->b)[l];
        if (I->k & 2) b.bytes += (s32)REG(u32, I->b)[l];
        if (n > b.left) finding(w, I, 1u << l, "more arrive at a barrier than the %u that it is for", b.all);
        b.left -= n;
        mbar_put(w, I, l, at, b);
        if (I->d >= 0) REG(u64, I->d)[l] = b.parity;
    }
}
/* try_wait.parity: true once the phase of this parity is complete */
void op_mbar_test(Warp *w, char *R, const Inst *I, u32 m) {
    u32 *d = REG(u32, I->d), got = 0;
    EACH(m) {
        Mbar b = mbar_get(w, I, l, lane_address(R, I->a, I->k & 1, l));
        if (b.parity != (REG(u32, I->b)[l] & 1)) got |= 1u << l;
    }
    if (got != m) w->waits = true;
    *d = (*d & ~m) | got;
}

static inline u64 swizzled(u64 at, int mode) { /* 0, 1, 2, 3: none, 32, 64, 128 bytes */
    return at ^ ((at >> 7 & ((1u << mode) - 1)) << 4);
}

static const u8 *from_global(Warp *w, const Inst *I, u32 l, u64 at, u32 bytes) {
    Allocation a;
    if (!memory_find(at, &a) || at + bytes > a.address + a.size)
        finding(w, I, 1u << l, "copies %u bytes from 0x%lx, where nothing is allocated", bytes, (long)at);
    if (a.device >= 0 && !memory_peer(w->block->launch->device, a.device))
        finding(w, I, 1u << l, "copies from device %d without peer access", a.device);
    return (const u8 *)at;
}

void op_tma(Warp *w, char *R, const Inst *I, u32 m) {
    Block *b = w->block;
    const s32 *vec = b->launch->f->vec + I->imm;
    EACH(m) {
        u64 at = REG(u64, I->b)[l];
        const TensorMap *map = at + 128 <= (u64)b->launch->f->param_bytes ? (const TensorMap *)(b->launch->params + at) : (const TensorMap *)from_global(w, I, l, at, 128);
        if (map->magic != TENSOR_MAP || map->rank != I->k) finding(w, I, 1u << l, "no tensor map of %u dimensions", I->k);
        s64 c[5] = {0};
        u32 n = map->bytes;
        for (int i = 0; i < map->rank; i++) c[i] = (s32)REG(u32, vec[i])[l], n *= map->box[i];
        u64 to = REG(u32, I->a)[l];
        u8 *base = place(w, I, l, to, n, 128, "a box");
        to = (u64)(base - b->shared);
        u32 inner = (u32)map->box[0] * map->bytes;
        u64 out = to;
        for (u32 i4 = 0; i4 < (map->rank > 4 ? map->box[4] : 1u); i4++)
        for (u32 i3 = 0; i3 < (map->rank > 3 ? map->box[3] : 1u); i3++)
        for (u32 i2 = 0; i2 < (map->rank > 2 ? map->box[2] : 1u); i2++)
        for (u32 i1 = 0; i1 < (map->rank > 1 ? map->box[1] : 1u); i1++, out += inner) {
            s64 p[5] = {c[0], c[1] + i1, c[2] + i2, c[3] + i3, c[4] + i4};
            bool inside = true;
            u64 row = map->address;
            for (int i = 1; i < map->rank; i++) inside &= p[i] >= 0 && (u64)p[i] < map->dims[i], row += (u64)p[i] * map->strides[i];
            for (u32 j = 0; j < inner; j += 16) {
                u8 chunk[16] = {0};
                for (u32 e = 0; e < 16; e += map->bytes) {
                    s64 x = p[0] + (j + e) / map->bytes;
                    if (inside && x >= 0 && (u64)x < map->dims[0]) memcpy(chunk + e, from_global(w, I, l, row + (u64)x * map->bytes, map->bytes), map->bytes);
                }
                u64 q = swizzled(out + j, map->swizzle);
                memcpy(b->shared + q, chunk, 16), memset(b->init + q, 1, 16);
            }
        }
        if (settings.stats) b->stats.load_bytes += n, b->stats.load_sectors += n / 32;
        mbar_bytes(w, I, l, REG(u32, I->c)[l], -(s32)n);
    }
}

void op_bulk(Warp *w, char *R, const Inst *I, u32 m) {
    Block *b = w->block;
    EACH(m) {
        u32 n = REG(u32, b->launch->f->vec[I->imm])[l];
        u64 at = REG(u64, I->b)[l];
        if (n % 16 || at % 16) finding(w, I, 1u << l, "a bulk copy of %u bytes from 0x%lx: multiples of 16 are allowed", n, (long)at);
        u8 *to = place(w, I, l, REG(u32, I->a)[l], n, 16, "a bulk copy");
        memcpy(to, from_global(w, I, l, at, n), n), memset(b->init + (to - b->shared), 1, n);
        mbar_bytes(w, I, l, REG(u32, I->c)[l], -(s32)n);
    }
}

/* Where number (x, k) of an operand is: x a row of A or column of B, k a term; e bytes each. Canonical layouts of the ISA
 * (asynchronous warpgroup-level matrix shared memory layout); the swizzle is of the address. */
static u64 where(u64 desc, bool major_x, u32 x, u32 k, u32 e) {
    u64 start = (desc & 0x3fff) << 4, leading = (desc >> 16 & 0x3fff) << 4, stride = (desc >> 32 & 0x3fff) << 4;
    int mode = (int)(desc >> 62), span = mode == 0 ? 16 : mode == 1 ? 128 : mode == 2 ? 64 : 32;
    u64 at;
    if (!major_x) {
        if (mode) at = x % 8 * (u32)span + x / 8 * stride + k * e;
        else at = x % 8 * 16 + x / 8 * stride + k / (16 / e) * leading + k % (16 / e) * e;
    } else {
        u32 wide = (u32)span / e;
        if (mode) at = x % wide * e + x / wide * leading + k % 8 * (u32)span + k / 8 * stride;
        else at = x / wide * stride + x % wide * e + k % 8 * 16 + k / 8 * leading;
    }
    return swizzled(start + at, mode ? 4 - mode : 0);
}
/* 16 bytes of an operand: numbers that follow each other, of one row and eight (tf32: four) terms or the other way round */
static const u8 *chunk(Warp *w, const Inst *I, u64 at) {
    Block *b = w->block;
    if (at + 16 > b->shared_bytes) finding(w, I, ~0u, "wgmma reads %ld of shared memory, of which the block has %u bytes", (long)at, b->shared_bytes);
    for (int i = 0; i < 16; i++)
        if (!b->init[at + i]) finding(w, I, ~0u, "wgmma reads byte %ld of shared memory, which nobody has written", (long)at + i);
    return b->shared + at;
}
static inline float number(const u8 *p, u32 i, int kind) {
    if (kind == 3) {
        u32 x;
        float f;
        memcpy(&x, p + 4 * i, 4), x &= 0xffffe000, memcpy(&f, &x, 4);
        return f;
    }
    u16 h;
    memcpy(&h, p + 2 * i, 2);
    return kind == 1 ? widen_bf16(h) : widen_half(h);
}
/* rows x0 to x0 + n - 1 of an operand, and K terms; out[k * step_k + x * step_x] */
static void operand(Warp *w, const Inst *I, u64 desc, bool major_x, u32 x0, u32 n, u32 K, int kind, double *out, u32 step_x, u32 step_k) {
    u32 e = kind == 3 ? 4 : 2, c = 16 / e;
    if (major_x)
        for (u32 k = 0; k < K; k++)
            for (u32 x = 0; x < n; x += c) {
                const u8 *p = chunk(w, I, where(desc, true, x0 + x, k, e));
                for (u32 i = 0; i < c; i++) out[k * step_k + (x + i) * step_x] = number(p, i, kind);
            }
    else
        for (u32 x = 0; x < n; x++)
            for (u32 k = 0; k < K; k += c) {
                const u8 *p = chunk(w, I, where(desc, false, x0 + x, k, e));
                for (u32 i = 0; i < c; i++) out[(k + i) * step_k + x * step_x] = number(p, i, kind);
            }
}

/* k: bits 0-1 kind (1 bf16, 2 f16, 3 tf32), 2 A in registers, 3 A by rows, 4 B by columns; imm: columns. A warp has 16 rows. */
void op_wgmma(Warp *w, char *R, const Inst *I, u32 m) {
    int kind = I->k & 3, N = (int)I->imm, K = kind == 3 ? 8 : 16;
    u32 p = *REG(u32, I->c);
    const s32 *v = w->block->launch->f->vec + I->d;
    double a[16][16], bt[16][256];
    if (m != ~0u) finding(w, I, ~m, "wgmma is not executed by all lanes of the warp");
    if (p != 0 && p != ~0u) finding(w, I, ~m, "scale-d of wgmma is not the same in all lanes");
    u64 db = REG(u64, I->b)[0];
    if (I->k & 4) {
        for (int k = 0; k < 16; k += 8)
            for (int half = 0; half < 2; half++) {
                const u16 *s = REG(u16, v[N / 2 + half + k / 4]);
                for (int r = 0; r < 8; r++)
                    for (int j = 0; j < 8; j++) a[half * 8 + r][k + j] = kind == 1 ? widen_bf16(s[8 * r + j]) : widen_half(s[8 * r + j]);
            }
    } else {
        u64 da = REG(u64, I->a)[0];
        operand(w, I, da, I->k >> 3 & 1, (u32)(w->id % 4 * 16), 16, (u32)K, kind, &a[0][0], 16, 1);
    }
    operand(w, I, db, I->k >> 4 & 1, 0, (u32)N, (u32)K, kind, &bt[0][0], 1, 256);
    for (int r = 0; r < 16; r++) {
        double s[256];
        for (int n = 0; n < N; n++) s[n] = p ? REG(float, v[n / 8 * 4 + r / 8 * 2 + n % 2])[r % 8 * 4 + n % 8 / 2] : 0;
        for (int k = 0; k < K; k++)
            for (int n = 0; n < N; n++) s[n] = __builtin_fma(a[r][k], bt[k][n], s[n]);
        for (int n = 0; n < N; n++) REG(float, v[n / 8 * 4 + r / 8 * 2 + n % 2])[r % 8 * 4 + n % 8 / 2] = (float)s[n];
    }
    if (settings.stats) w->block->stats.mma += (u64)N / 8 * (u64)K / 16;
}

/* stmatrix: the inverse of ldmatrix (access.c) */
void op_stmatrix(Warp *w, char *R, const Inst *I, u32 m) {
    u32 n = I->k & 15;
    const s32 *vec = w->block->launch->f->vec + I->d;
    if (m != ~0u) finding(w, I, ~m, "stmatrix is not executed by all lanes of the warp");
    for (u32 j = 0; j < n; j++)
        for (u32 l = 0; l < WARP; l++)
            for (u32 h = 0; h < 2; h++) {
                u32 row = l / 4, col = l % 4 * 2 + h;
                if (I->k >> 4 & 1) { u32 t = row; row = col, col = t; }
                u64 at = lane_address(R, I->a, I->k >> 12 & 1, 8 * j + row) + (u64)I->imm;
                u8 *p = place(w, I, l, at + 2 * col, 2, 2, "stmatrix");
                u16 x = (u16)(REG(u32, vec[j])[l] >> (16 * h));
                memcpy(p, &x, 2), memset(w->block->init + (p - w->block->shared), 1, 2);
            }
}
