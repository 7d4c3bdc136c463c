/* Loads, stores, atomics and asynchronous copies, with the checks that a GPU does not make.
 *
 * Global: every lane's access lies inside one living allocation the device may use, and is aligned. Shared: inside the
 * block's memory, written before it is read, and not touched by two warps between two barriers if one of them writes.
 */
#include "ops.h"

#define EACH(m) for (u32 t_ = (m), l = 0; t_ && (l = (u32)__builtin_ctz(t_), 1); t_ &= t_ - 1)
enum { ATOMIC_TAG = 0xfe, MANY = 0xff };

static u32 lane_bit(u32 l) { return 1u << l; }

static void check_one(Warp *w, const Inst *I, u32 l, u64 at, u32 bytes, const char *what) {
    Allocation a;
    int ok = memory_find(at, &a), device = w->block->launch->device;
    if (at % bytes) finding(w, I, lane_bit(l), "%s of %u bytes at 0x%lx, which is not a multiple of %u", what, bytes, (long)at, bytes);
    if (!ok || at + bytes > a.address + a.size) {
        u64 end = a.address + a.size;
        if (memory_was_freed(at)) finding(w, I, lane_bit(l), "%s of %u bytes at 0x%lx, in memory that has been freed", what, bytes, (long)at);
        if (a.size && at + bytes > end && at - a.address < a.size + 65536)
            finding(w, I, lane_bit(l), "%s of %u bytes at 0x%lx, %ld bytes after the end of an allocation of %lu bytes", what,
                    bytes, (long)at, (long)(at - end), (long)a.size);
        finding(w, I, lane_bit(l), "%s of %u bytes at 0x%lx, where nothing is allocated", what, bytes, (long)at);
    }
    if (a.device >= 0 && !memory_peer(device, a.device))
        finding(w, I, lane_bit(l), "%s of %u bytes at 0x%lx, memory of device %d, which device %d has no peer access to", what,
                bytes, (long)at, a.device, device);
    Block *b = w->block;
    int slot = b->next_cached++ & 3;
    b->cached[slot][0] = a.address, b->cached[slot][1] = a.address + a.size;
}

static inline bool cached(const Block *b, u64 lo, u64 hi) {
    for (int i = 0; i < 4; i++)
        if (lo >= b->cached[i][0] && hi <= b->cached[i][1]) return true;
    return false;
}

static int by_value(const void *x, const void *y) {
    u64 a = *(const u64 *)x, b = *(const u64 *)y;
    return a < b ? -1 : a > b;
}
static u32 distinct(u64 *v, u32 n) {
    qsort(v, n, sizeof *v, by_value);
    u32 r = n ? 1 : 0;
    for (u32 i = 1; i < n; i++) r += v[i] != v[i - 1];
    return r;
}
static void count_global(Warp *w, u32 m, const u64 *ad, u32 bytes, bool write) {
    u64 v[WARP * 2];
    u32 n = 0;
    EACH(m) {
        v[n++] = ad[l] / 32;
        if ((ad[l] + bytes - 1) / 32 != ad[l] / 32) v[n++] = (ad[l] + bytes - 1) / 32;
    }
    Stats *s = &w->block->stats;
    u64 sectors = distinct(v, n), all = (u64)__builtin_popcount(m) * bytes;
    if (write) s->store_bytes += all, s->store_sectors += sectors;
    else s->load_bytes += all, s->load_sectors += sectors;
}
/* extra wavefronts: distinct words of the same bank; 8-byte accesses go in halves of a warp, 16-byte ones in quarters */
static void count_shared(Warp *w, u32 m, const u64 *off, u32 bytes) {
    u32 parts = bytes > 4 ? bytes / 4 : 1, lanes = WARP / parts;
    Stats *s = &w->block->stats;
    for (u32 p = 0; p < parts; p++) {
        u32 part = m & (lanes == 32 ? ~0u : ((1u << lanes) - 1) << (p * lanes)), n = 0, banks[32] = {0}, most = 0;
        if (!part) continue;
        u64 v[WARP * 4];
        EACH(part) for (u32 j = 0; j < parts; j++) v[n++] = off[l] / 4 + j;
        distinct(v, n);
        for (u32 i = 0; i < n; i++)
            if ((!i || v[i] != v[i - 1]) && ++banks[v[i] & 31] > most) most = banks[v[i] & 31];
        s->shared_access++;
        s->shared_extra += most - 1;
    }
}

static void __attribute__((noinline)) explain_shared(Warp *w, const Inst *I, u32 lanes, u64 off, u32 bytes, int how) {
    Block *b = w->block;
    for (u64 i = off; i < off + bytes; i++) {
        u8 wr = b->writer[i], rd = b->reader[i], me = (u8)(w->id + 1);
        if (how != 1 && !b->init[i])
            finding(w, I, lanes, "reads byte %lu of shared memory, which no thread of the block has written", (long)i);
        if (b->no_races || b->nwarps == 1) continue;
        if (wr && wr != me && !(how == 2 && wr == ATOMIC_TAG)) {
            if (wr == ATOMIC_TAG)
                finding(w, I, lanes, "race: byte %lu of shared memory was changed by an atomic of another warp and no barrier is between", (long)i);
            finding(w, I, lanes, "race: byte %lu of shared memory was written by warp %d (threads %d to %d) and no barrier is between", (long)i,
                    wr - 1, (wr - 1) * 32, (wr - 1) * 32 + 31);
        }
        if (how && rd && rd != me) {
            if (rd == MANY) finding(w, I, lanes, "race: writes byte %lu of shared memory, which several warps have read since the last barrier", (long)i);
            finding(w, I, lanes, "race: writes byte %lu of shared memory, which warp %d (threads %d to %d) has read since the last barrier",
                    (long)i, rd - 1, (rd - 1) * 32, (rd - 1) * 32 + 31);
        }
        if (how) b->init[i] = 1, b->writer[i] = how == 2 ? ATOMIC_TAG : me;
        else b->reader[i] = rd == 0 || rd == me ? me : MANY;
    }
}

/* one access; how: 0 reads, 1 writes, 2 atomic */
static inline void touch(Warp *w, const Inst *I, u32 lanes, u64 off, u32 bytes, int how) {
    Block *b = w->block;
    if (bytes < 4 || how == 2) {
        explain_shared(w, I, lanes, off, bytes, how);
        return;
    }
    const u32 me = 0x01010101u * (u32)(w->id + 1);
    for (u64 i = off; i < off + bytes; i += 4) {
        u32 wr, rd, in;
        memcpy(&wr, b->writer + i, 4), memcpy(&rd, b->reader + i, 4);
        if (how) {
            if ((wr && wr != me) || (rd && rd != me)) { explain_shared(w, I, lanes, i, 4, how); continue; }
            u32 ones = 0x01010101;
            memcpy(b->init + i, &ones, 4), memcpy(b->writer + i, &me, 4);
        } else {
            memcpy(&in, b->init + i, 4);
            if ((wr && wr != me) || in != 0x01010101) { explain_shared(w, I, lanes, i, 4, how); continue; }
            if (rd == me) continue;
            if (!rd) memcpy(b->reader + i, &me, 4);
            else if (rd != ~0u) explain_shared(w, I, lanes, i, 4, how);
        }
    }
}

/* n contiguous bytes of one warp, a multiple of 4; blocks of 64 with vector code, what is not plain byte by byte */
static inline void touch_run(Warp *w, const Inst *I, u32 lanes, u64 off, u32 n, int how) {
    Block *b = w->block;
    const u8 me = (u8)(w->id + 1);
    const u64 me8 = 0x0101010101010101ull * me, ones = 0x0101010101010101ull;
    u8 *restrict wr = b->writer + off, *restrict rd = b->reader + off, *restrict in = b->init + off;
    u32 i = 0;
    for (; i + 64 <= n; i += 64) {
        u8 bad = 0;
        if (how) {
            for (u32 j = i; j < i + 64; j++) bad |= (u8)((wr[j] != 0) & (wr[j] != me)) | (u8)((rd[j] != 0) & (rd[j] != me));
            if (bad) touch(w, I, lanes, off + i, 64, how);
            else memset(wr + i, me, 64), memset(in + i, 1, 64);
        } else {
            for (u32 j = i; j < i + 64; j++) bad |= (u8)((wr[j] != 0) & (wr[j] != me)) | (u8)(in[j] ^ 1);
            if (bad) touch(w, I, lanes, off + i, 64, how);
            else for (u32 j = i; j < i + 64; j++) rd[j] = (rd[j] == 0) | (rd[j] == me) ? me : MANY;
        }
    }
    for (; i + 8 <= n; i += 8) {
        u64 x, y, z;
        memcpy(&x, wr + i, 8), memcpy(&y, rd + i, 8), memcpy(&z, in + i, 8);
        bool ok = x == 0 || x == me8;
        if (how) {
            if (!ok || (y != 0 && y != me8)) touch(w, I, lanes, off + i, 8, how);
            else memcpy(wr + i, &me8, 8), memcpy(in + i, &ones, 8);
        } else {
            if (!ok || z != ones) touch(w, I, lanes, off + i, 8, how);
            else if (y == 0) memcpy(rd + i, &me8, 8);
            else if (y != me8 && y != ~0ull) touch(w, I, lanes, off + i, 8, how);
        }
    }
    if (i < n) touch(w, I, lanes, off + i, n - i, how);
}

enum { RUN = 1, SAME = 2 }; /* lane l is l accesses behind lane 0; all lanes have one address */

/* off has the offsets of all lanes, of those that do not take part that of one that does */
static void check_shared(Warp *w, const Inst *I, u32 m, const u64 *off, u64 lo, u64 hi, u64 any, int shape, u32 bytes, int how) {
    Block *b = w->block;
    const char *what = how == 0 ? "load" : how == 1 ? "store" : "atomic";
    if (hi + bytes > b->shared_bytes || hi > WINDOW)
        EACH(m) if (off[l] + bytes > b->shared_bytes || off[l] > WINDOW)
            finding(w, I, lane_bit(l), "%s of %u bytes at %ld of shared memory, of which the block has %u bytes", what, bytes, (long)off[l],
                    b->shared_bytes);
    if (any & (bytes - 1))
        EACH(m) if (off[l] & (bytes - 1))
            finding(w, I, lane_bit(l), "%s of %u bytes at %ld of shared memory, which is not a multiple of %u", what, bytes, (long)off[l], bytes);
    if (settings.stats) count_shared(w, m, off, bytes);
    if (lo < b->dirty_lo) b->dirty_lo = (u32)lo;
    if (hi + bytes > b->dirty_hi) b->dirty_hi = (u32)(hi + bytes);
    if (b->no_races) { /* only what has been written is known then */
        EACH(m) for (u64 i = off[l]; i < off[l] + bytes; i++) {
            if (how) b->init[i] = 1;
            else if (!b->init[i]) explain_shared(w, I, lane_bit(l), i, 1, 0);
        }
        return;
    }
    if (how == 2 || bytes < 4) {
        EACH(m) touch(w, I, lane_bit(l), off[l], bytes, how);
        return;
    }
    if (shape) {
        touch_run(w, I, m, lo, (u32)(hi - lo) + bytes, how);
        return;
    }
    for (u32 l = 0; l < WARP;) { /* lanes whose accesses follow each other, or are the same, together */
        u64 first = off[l], end = first + bytes;
        u32 j = l + 1;
        for (; j < WARP; j++) {
            if (off[j] == end) end += bytes;
            else if (off[j] + bytes != end) break;
        }
        u32 lanes = (j == 32 ? ~0u : (1u << j) - 1) & ~((1u << l) - 1) & m;
        if (lanes || l == 0) touch_run(w, I, lanes ? lanes : m, first, (u32)(end - first), how);
        l = j;
    }
}

/* bounds of the addresses, and their shape; vector code */
static inline int survey(const u64 *ad, u32 bytes, u64 *lo, u64 *hi, u64 *any) {
    u64 a = ~0ull, z = 0, o = 0, run = 0, same = 0, first = ad[0];
    for (u32 l = 0; l < WARP; l++) {
        u64 x = ad[l];
        a = x < a ? x : a, z = x > z ? x : z, o |= x;
        run |= x ^ (first + l * bytes), same |= x ^ first;
    }
    *lo = a, *hi = z, *any = o;
    return same == 0 ? SAME : run == 0 ? RUN : 0;
}

/* where each lane's access goes, lanes that do not take part where one goes that does; the shape of all.
 * how: 0 reads, 1 writes, 2 atomic */
static int resolve(Warp *w, char *R, const Inst *I, u32 m, int space, bool addr32, s32 reg, s64 imm, u32 bytes, int how, u8 **p) {
    u64 ad[WARP], lo, hi, any;
    u32 f = (u32)__builtin_ctz(m);
    Block *b = w->block;
    if (addr32) {
        const u32 *a = REG(u32, reg);
        LANES ad[l] = (u64)(u32)(a[l] + (u32)imm);
    } else {
        const u64 *a = REG(u64, reg);
        LANES ad[l] = a[l] + (u64)imm;
    }
    if (m != ~0u) {
        u64 one = ad[f];
        LANES ad[l] = (m >> l & 1) ? ad[l] : one;
    }
    int shape = survey(ad, bytes, &lo, &hi, &any);
    if (space == GENERIC) {
        if (lo - shared_window < WINDOW && hi - shared_window < WINDOW) {
            LANES ad[l] -= shared_window;
            lo -= shared_window, hi -= shared_window, space = SHARED;
        } else if (lo - local_window < WINDOW && hi - local_window < WINDOW) {
            LANES ad[l] -= local_window;
            lo -= local_window, hi -= local_window, space = LOCAL;
        } else if (hi < shared_window || lo >= local_window + WINDOW) space = GLOBAL;
        else { /* perhaps lanes of different kinds: one after the other */
            EACH(m) {
                u64 one[WARP];
                bool sh = ad[l] - shared_window < WINDOW, lc = ad[l] - local_window < WINDOW;
                u64 o = sh ? ad[l] - shared_window : lc ? ad[l] - local_window : ad[l];
                for (int j = 0; j < WARP; j++) one[j] = o;
                if (sh) {
                    check_shared(w, I, lane_bit(l), one, o, o, o, SAME, bytes, how);
                    p[l] = b->shared + o;
                } else if (lc) {
                    if (o + bytes > (u64)b->launch->f->local_bytes) finding(w, I, lane_bit(l), "access at %lu of local memory, of which a thread has %d bytes", (long)o, b->launch->f->local_bytes);
                    p[l] = (u8 *)w->local + (size_t)l * (size_t)b->launch->f->local_bytes + o;
                } else {
                    if (!cached(b, o, o + bytes) || (o & (bytes - 1))) check_one(w, I, l, o, bytes, how == 0 ? "load" : how == 1 ? "store" : "atomic");
                    p[l] = (u8 *)o;
                }
            }
            u8 *one = p[f];
            LANES p[l] = (m >> l & 1) ? p[l] : one;
            return 0;
        }
    }
    if (space == SHARED) {
        check_shared(w, I, m, ad, lo, hi, any, shape, bytes, how);
        u64 base = (u64)b->shared;
        LANES p[l] = (u8 *)(base + ad[l]);
        return shape;
    }
    if (space == PARAM) {
        u64 size = (u64)b->launch->f->param_bytes;
        EACH(m) if (ad[l] + bytes > size) finding(w, I, lane_bit(l), "access at %ld of the parameters, which are %ld bytes", (long)ad[l], (long)size);
        LANES p[l] = (u8 *)b->launch->params + ad[l];
        return 0;
    }
    if (space == LOCAL) {
        u64 size = (u64)b->launch->f->local_bytes;
        if (hi + bytes > size || hi > WINDOW)
            EACH(m) if (ad[l] + bytes > size) finding(w, I, lane_bit(l), "access at %ld of local memory, of which a thread has %ld bytes", (long)ad[l], (long)size);
        u64 base = (u64)w->local;
        LANES p[l] = (u8 *)(base + (u64)l * size + ad[l]);
        return 0;
    }
    if (!cached(b, lo, hi + bytes) || (any & (bytes - 1))) {
        const char *what = how == 0 ? "load" : how == 1 ? "store" : "atomic";
        EACH(m) if (!cached(b, ad[l], ad[l] + bytes) || (ad[l] & (bytes - 1))) check_one(w, I, l, ad[l], bytes, what);
    }
    if (settings.stats) count_global(w, m, ad, bytes, how != 0);
    memcpy(p, ad, sizeof ad);
    return shape;
}

/* k of a load or store: bits 0-3 elements, 4-5 log2 of their bytes, 6-7 log2 of the register's, 8 signed, 9-11 space,
 * 12 the address is 32 bits */
#define K_N(k) ((k) & 15)
#define K_BYTES(k) (1u << ((k) >> 4 & 3))
#define K_REG(k) (1u << ((k) >> 6 & 3))
#define K_SPACE(k) ((k) >> 9 & 7)

void op_ld(Warp *w, char *R, const Inst *I, u32 m) {
    u8 *p[WARP];
    u32 k = I->k, n = K_N(k), e = K_BYTES(k), r = K_REG(k);
    if (!m) return;
    int shape = resolve(w, R, I, m, K_SPACE(k), k >> 12 & 1, I->a, I->imm, n * e, 0, p);
    const s32 *vec = w->block->launch->f->vec + I->d;
    if (n == 1 && m == ~0u && e == r && shape == RUN) {
        memcpy(REG(u8, vec[0]), p[0], WARP * e);
        return;
    }
    if (e == 4 && r == 4) { /* lanes that do not take part have an address that can be read */
        for (u32 i = 0; i < n; i++) {
            if (vec[i] < 0) continue;
            u32 *d = REG(u32, vec[i]), v[WARP];
            if (shape == SAME) {
                u32 x = ((const u32 *)p[0])[i];
                LANES v[l] = x;
            } else if (shape == RUN && n == 4) {
                const u32 *q = (const u32 *)p[0] + i;
                LANES v[l] = q[4 * l];
            } else LANES v[l] = ((const u32 *)p[l])[i];
            if (m == ~0u) memcpy(d, v, sizeof v);
            else LANES if (m >> l & 1) d[l] = v[l];
        }
        return;
    }
    for (u32 i = 0; i < n; i++) {
        if (vec[i] < 0) continue;
        void *d = REG(void, vec[i]);
        u32 o = i * e;
#define GET(E, D) EACH(m) { E v; memcpy(&v, p[l] + o, sizeof v); ((D *)d)[l] = (D)v; }
        switch (e * 16 + r + (k & 256)) {
        case 4 * 16 + 4 + 256: GET(u32, u32) break;
        case 8 * 16 + 8: case 8 * 16 + 8 + 256: GET(u64, u64) break;
        case 2 * 16 + 2: case 2 * 16 + 2 + 256: GET(u16, u16) break;
        case 4 * 16 + 8: GET(u32, u64) break;
        case 4 * 16 + 8 + 256: GET(s32, s64) break;
        case 1 * 16 + 2: GET(u8, u16) break;
        case 1 * 16 + 2 + 256: GET(s8, s16) break;
        case 1 * 16 + 4: GET(u8, u32) break;
        case 1 * 16 + 4 + 256: GET(s8, s32) break;
        case 1 * 16 + 8: GET(u8, u64) break;
        case 1 * 16 + 8 + 256: GET(s8, s64) break;
        case 2 * 16 + 4: GET(u16, u32) break;
        case 2 * 16 + 4 + 256: GET(s16, s32) break;
        case 2 * 16 + 8: GET(u16, u64) break;
        case 2 * 16 + 8 + 256: GET(s16, s64) break;
        default: finding(w, I, m, "a load of this shape is not emulated");
        }
    }
}

void op_st(Warp *w, char *R, const Inst *I, u32 m) {
    u8 *p[WARP];
    u32 k = I->k, n = K_N(k), e = K_BYTES(k), r = K_REG(k);
    if (!m) return;
    int shape = resolve(w, R, I, m, K_SPACE(k), k >> 12 & 1, I->a, I->imm, n * e, 1, p);
    const s32 *vec = w->block->launch->f->vec + I->d;
    if (n == 1 && m == ~0u && e == r && shape == RUN) {
        memcpy(p[0], REG(u8, vec[0]), WARP * e);
        return;
    }
    for (u32 i = 0; i < n; i++) {
        const u8 *s = REG(u8, vec[i]);
        u32 o = i * e;
        switch (e) {
        case 4:
            if (m == ~0u && r == 4) for (int l = 0; l < WARP; l++) memcpy(p[l] + o, s + l * 4, 4); /* in order: the last lane wins */
            else EACH(m) memcpy(p[l] + o, s + l * r, 4);
            break;
        case 8: EACH(m) memcpy(p[l] + o, s + l * r, 8); break;
        case 2: EACH(m) memcpy(p[l] + o, s + l * r, 2); break;
        default: EACH(m) p[l][o] = s[l * r]; break;
        }
    }
}

/* a kernel parameter by its name: the same for all lanes */
void op_ld_param(Warp *w, char *R, const Inst *I, u32 m) {
    u32 k = I->k, n = K_N(k), e = K_BYTES(k), r = K_REG(k);
    const s32 *vec = w->block->launch->f->vec + I->d;
    for (u32 i = 0; i < n; i++) {
        u64 v = 0;
        memcpy(&v, w->block->launch->params + I->imm + i * e, e);
        if (k & 256) v = (u64)((s64)(v << (64 - 8 * e)) >> (64 - 8 * e));
        if (r == 8) { u64 *d = REG(u64, vec[i]); LANES if (m >> l & 1) d[l] = v; }
        else if (r == 4) { u32 *d = REG(u32, vec[i]); LANES if (m >> l & 1) d[l] = (u32)v; }
        else { u16 *d = REG(u16, vec[i]); LANES if (m >> l & 1) d[l] = (u16)v; }
    }
}

#define ATOM_LOOP(T, expr)                                                                                             \
    {                                                                                                                  \
        T old = __atomic_load_n((T *)p[l], __ATOMIC_RELAXED), new;                                                     \
        do { new = (T)(expr); } while (!__atomic_compare_exchange_n((T *)p[l], &old, new, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)); \
        got = old;                                                                                                     \
    }
static float as_float(u32 x) { float f; memcpy(&f, &x, 4); return f; }
static u32 as_bits(float x) { u32 b; memcpy(&b, &x, 4); return b; }
static double as_double(u64 x) { double f; memcpy(&f, &x, 8); return f; }
static u64 as_bits64(double x) { u64 b; memcpy(&b, &x, 8); return b; }
static u32 pair_add(u32 a, u32 b, bool bf) {
    u32 r = 0;
    for (int s = 0; s < 32; s += 16) {
        u16 x = (u16)(a >> s), y = (u16)(b >> s);
        u16 z = bf ? double_to_bf16((double)as_float((u32)x << 16) + as_float((u32)y << 16)) : double_to_half((double)half_to_float(x) + half_to_float(y));
        r |= (u32)z << s;
    }
    return r;
}

/* k: bits 0-3 operation, 4-6 type, 7-8 log2 bytes, 9-11 space, 12 address of 32 bits, 13 a result is wanted */
void op_atom(Warp *w, char *R, const Inst *I, u32 m) {
    u8 *p[WARP];
    u32 k = I->k, kind = k & 15, type = k >> 4 & 7, e = 1u << (k >> 7 & 3);
    if (!m) return;
    resolve(w, R, I, m, K_SPACE(k), k >> 12 & 1, I->a, I->imm, e, 2, p);
    EACH(m) {
        u64 got = 0, v = 0, c = 0;
        memcpy(&v, REG(u8, I->b) + l * e, e);
        if (kind == A_CAS) memcpy(&c, REG(u8, I->c) + l * e, e);
        if (e == 4 && type == E_F) {
            float x = as_float((u32)v);
            if (kind == A_ADD) ATOM_LOOP(u32, as_bits(as_float(old) + x))
            else if (kind == A_EXCH) ATOM_LOOP(u32, v)
            else finding(w, I, m, "this atomic is not emulated");
        } else if (e == 8 && type == E_F) {
            if (kind == A_ADD) ATOM_LOOP(u64, as_bits64(as_double(old) + as_double(v)))
            else finding(w, I, m, "this atomic is not emulated");
        } else if (type == E_H || type == E_BF) {
            if (kind == A_ADD && e == 4) ATOM_LOOP(u32, pair_add(old, (u32)v, type == E_BF))
            else if (kind == A_ADD) ATOM_LOOP(u16, pair_add(old, (u32)v, type == E_BF))
            else finding(w, I, m, "this atomic is not emulated");
        } else if (e == 4) {
            u32 x = (u32)v;
            switch (kind) {
            case A_ADD: ATOM_LOOP(u32, old + x) break;
            case A_MIN: if (type == E_S) ATOM_LOOP(u32, (s32)old < (s32)x ? old : x) else ATOM_LOOP(u32, old < x ? old : x) break;
            case A_MAX: if (type == E_S) ATOM_LOOP(u32, (s32)old > (s32)x ? old : x) else ATOM_LOOP(u32, old > x ? old : x) break;
            case A_AND: ATOM_LOOP(u32, old & x) break;
            case A_OR: ATOM_LOOP(u32, old | x) break;
            case A_XOR: ATOM_LOOP(u32, old ^ x) break;
            case A_EXCH: ATOM_LOOP(u32, x) break;
            case A_CAS: ATOM_LOOP(u32, old == x ? (u32)c : old) break;
            case A_INC: ATOM_LOOP(u32, old >= x ? 0 : old + 1) break;
            default: ATOM_LOOP(u32, old == 0 || old > x ? x : old - 1) break;
            }
        } else if (e == 8) {
            switch (kind) {
            case A_ADD: ATOM_LOOP(u64, old + v) break;
            case A_MIN: if (type == E_S) ATOM_LOOP(u64, (s64)old < (s64)v ? old : v) else ATOM_LOOP(u64, old < v ? old : v) break;
            case A_MAX: if (type == E_S) ATOM_LOOP(u64, (s64)old > (s64)v ? old : v) else ATOM_LOOP(u64, old > v ? old : v) break;
            case A_AND: ATOM_LOOP(u64, old & v) break;
            case A_OR: ATOM_LOOP(u64, old | v) break;
            case A_XOR: ATOM_LOOP(u64, old ^ v) break;
            case A_EXCH: ATOM_LOOP(u64, v) break;
            case A_CAS: ATOM_LOOP(u64, old == v ? c : old) break;
            default: finding(w, I, m, "this atomic is not emulated");
            }
        } else if (e == 2 && kind == A_CAS) ATOM_LOOP(u16, old == (u16)v ? (u16)c : old)
        else finding(w, I, m, "this atomic is not emulated");
        if (k >> 13 & 1) memcpy(REG(u8, I->d) + l * e, &got, e);
    }
}

/* cp.async: the bytes arrive when the copy is waited for, not before, so that a missing wait is seen */
void op_cp_async(Warp *w, char *R, const Inst *I, u32 m) {
    u8 *p[WARP];
    if (!m) return;
    if (w->ncopies == w->capcopies) w->copies = realloc(w->copies, sizeof *w->copies * (size_t)(w->capcopies = w->capcopies ? 2 * w->capcopies : 16));
    CopyItem *c = &w->copies[w->ncopies++];
    c->mask = m, c->inst = I, c->bytes = (u8)I->imm, c->group = w->group;
    u32 need = 0;
    EACH(m) {
        u32 n = I->c >= 0 ? REG(u32, I->c)[l] : (u32)I->imm;
        c->from[l] = (u8)(n > (u32)I->imm ? (u32)I->imm : n);
        if (c->from[l]) need |= lane_bit(l);
    }
    s32 to = w->block->launch->f->vec[I->d], offset = w->block->launch->f->vec[I->d + 1];
    s32 from = w->block->launch->f->vec[I->d + 2], from_offset = w->block->launch->f->vec[I->d + 3];
    if (need) resolve(w, R, I, need, (I->k & 2) ? GENERIC : GLOBAL, false, from, from_offset, (u32)I->imm, 0, p);
    EACH(m) {
        c->src[l] = (need >> l & 1) ? (u64)p[l] : 0;
        c->dst[l] = (I->k & 1) ? REG(u32, to)[l] + (u32)offset : (u32)(REG(u64, to)[l] + (u64)offset);
    }
}
static void complete(Warp *w, CopyItem *c) {
    u64 off[WARP], lo, hi, any;
    u32 one = c->dst[__builtin_ctz(c->mask)];
    LANES off[l] = (c->mask >> l & 1) ? c->dst[l] : one;
    int shape = survey(off, c->bytes, &lo, &hi, &any);
    check_shared(w, c->inst, c->mask, off, lo, hi, any, shape, c->bytes, 1);
    EACH(c->mask) {
        memset(w->block->shared + off[l], 0, c->bytes);
        if (c->from[l]) memcpy(w->block->shared + off[l], (void *)c->src[l], c->from[l]);
    }
}
void op_cp_commit(Warp *w, char *R, const Inst *I, u32 m) {
    (void)R, (void)I;
    if (m) w->group++;
}
/* imm: groups that may still be on their way; -1: wait for all, committed or not */
void op_cp_wait(Warp *w, char *R, const Inst *I, u32 m) {
    (void)R;
    if (!m) return;
    int kept = 0;
    for (int i = 0; i < w->ncopies; i++) {
        CopyItem *c = &w->copies[i];
        if (I->imm < 0 || c->group < w->group - (int)I->imm) complete(w, c);
        else w->copies[kept++] = *c;
    }
    w->ncopies = kept;
}

/* ldmatrix and stmatrix: k: bits 0-3 matrices, 4 transposed, 12 address of 32 bits; lane 8 j + i has the address of row i
 * of matrix j. `off`: the rows' offsets in shared memory, which are checked here. */
static void matrix_rows(Warp *w, char *R, const Inst *I, u32 m, u64 *off, int how, const char *name) {
    u32 n = I->k & 15;
    bool narrow = I->k >> 12 & 1;
    LANES off[l] = narrow ? (u64)(REG(u32, I->a)[l] + (u32)I->imm) : REG(u64, I->a)[l] + (u64)I->imm;
    if (!narrow) LANES if (off[l] - shared_window < WINDOW) off[l] -= shared_window;
    if (m != ~0u) finding(w, I, ~m, "%s is not executed by all lanes of the warp", name);
    u32 lanes = n == 4 ? ~0u : (1u << (8 * n)) - 1;
    u64 lo, hi, any, one = off[0], all[WARP];
    LANES all[l] = (lanes >> l & 1) ? off[l] : one;
    int shape = survey(all, 16, &lo, &hi, &any);
    check_shared(w, I, lanes, all, lo, hi, any, shape, 16, how);
}
/* the 16 bits of matrix j that lane l has in half h of its register */
static u8 *matrix_number(Warp *w, const Inst *I, const u64 *off, u32 j, u32 l, u32 h) {
    u32 row = l / 4, col = l % 4 * 2 + h;
    bool transposed = I->k >> 4 & 1;
    return w->block->shared + off[8 * j + (transposed ? col : row)] + 2 * (transposed ? row : col);
}
void op_ldmatrix(Warp *w, char *R, const Inst *I, u32 m) {
    u64 off[WARP];
    matrix_rows(w, R, I, m, off, 0, "ldmatrix");
    const s32 *vec = w->block->launch->f->vec + I->d;
    for (u32 j = 0; j < (I->k & 15); j++) {
        u32 *d = REG(u32, vec[j]);
        for (u32 l = 0; l < WARP; l++) {
            u16 v[2];
            for (u32 h = 0; h < 2; h++) memcpy(&v[h], matrix_number(w, I, off, j, l, h), 2);
            d[l] = (u32)v[0] | (u32)v[1] << 16;
        }
    }
}
void op_stmatrix(Warp *w, char *R, const Inst *I, u32 m) {
    u64 off[WARP];
    matrix_rows(w, R, I, m, off, 1, "stmatrix");
    const s32 *vec = w->block->launch->f->vec + I->d;
    for (u32 j = 0; j < (I->k & 15); j++)
        for (u32 l = 0; l < WARP; l++)
            for (u32 h = 0; h < 2; h++) {
                u16 x = (u16)(REG(u32, vec[j])[l] >> (16 * h));
                memcpy(matrix_number(w, I, off, j, l, h), &x, 2);
            }
}
