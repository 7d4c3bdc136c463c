/* Operations between the lanes of a warp: shuffles, votes, reductions, matrix products. */
#include <time.h>

#include "ops.h"

void op_nop(Warp *w, char *R, const Inst *I, u32 m) { (void)w, (void)R, (void)I, (void)m; }

void op_clock(Warp *w, char *R, const Inst *I, u32 m) {
    struct timespec t;
    UNUSED;
    clock_gettime(CLOCK_MONOTONIC, &t);
    u64 now = (u64)t.tv_sec * 1000000000ull + (u64)t.tv_nsec;
    if (I->k == 8) { u64 *d = REG(u64, I->d); LANES if (m >> l & 1) d[l] = now; }
    else { u32 *d = REG(u32, I->d); LANES if (m >> l & 1) d[l] = (u32)now; }
}

void op_shfl(Warp *w, char *R, const Inst *I, u32 m) {
    const u32 *a = REG(u32, I->a), *b = REG(u32, I->b), *c = REG(u32, I->c);
    u32 out[WARP], from[WARP], *d = REG(u32, I->d);
    u8 ok[WARP];
    switch (I->k) {
#define FROM(lane, test)                                                                                               \
    LANES {                                                                                                            \
        u32 seg = c[l] >> 8 & 31, cv = c[l] & 31, low = (u32)l & seg, top = low | (cv & ~seg), bv = b[l] & 31, j = lane; \
        (void)bv, (void)top, (void)low;                                                                                \
        u32 good = test;                                                                                               \
        ok[l] = (u8)good, from[l] = good ? j : (u32)l;                                                                 \
    }                                                                                                                  \
    break;
    case 0: FROM((u32)l - bv, (s32)j >= (s32)top)
    case 1: FROM((u32)l + bv, j <= top)
    case 2: FROM((u32)l ^ bv, j <= top)
    default: FROM(low | (bv & ~seg), j <= top)
    }
    u32 in_range = pack_mask(ok);
    if (m != ~0u)
        for (int l = 0; l < WARP; l++)
            if ((in_range & m) >> l & 1 && !(m >> from[l] & 1) && !(w->exited >> from[l] & 1) && (int)from[l] < w->lanes)
                finding(w, I, 1u << l, "shfl reads lane %u, which does not take part", from[l]);
    LANES out[l] = a[from[l]];
    LANES if (m >> l & 1) d[l] = out[l];
    s32 p = I->imm >= 0 ? w->block->launch->f->vec[I->imm] : -1;
    if (p >= 0) {
        u32 *q = REG(u32, p);
        *q = (*q & ~m) | (in_range & m);
    }
}

void op_vote(Warp *w, char *R, const Inst *I, u32 m) {
    u32 p = *REG(u32, I->a);
    UNUSED;
    if (!m) return;
    if (I->imm) p = ~p;
    p &= m;
    if (I->k == 3) {
        u32 *d = REG(u32, I->d);
        LANES if (m >> l & 1) d[l] = p;
        return;
    }
    bool r = I->k == 0 ? p == m : I->k == 1 ? p != 0 : p == m || p == 0;
    u32 *d = REG(u32, I->d);
    *d = (*d & ~m) | (r ? m : 0);
}

void op_match(Warp *w, char *R, const Inst *I, u32 m) {
    u64 v[WARP];
    u32 out[WARP], *d = REG(u32, I->d);
    for (int l = 0; l < WARP; l++) v[l] = (I->k & 15) == 8 ? REG(u64, I->a)[l] : REG(u32, I->a)[l];
    bool same = true;
    for (int l = 0; l < WARP; l++) {
        out[l] = 0;
        for (int j = 0; j < WARP; j++)
            if ((m >> j & 1) && v[j] == v[l]) out[l] |= 1u << j;
        if (m >> l & 1) same &= out[l] == m;
    }
    for (int l = 0; l < WARP; l++)
        if (m >> l & 1) d[l] = I->k & 16 ? (same ? m : 0) : out[l];
    s32 p = I->imm >= 0 ? w->block->launch->f->vec[I->imm] : -1;
    if (p >= 0) *REG(u32, p) = (*REG(u32, p) & ~m) | (same ? m : 0);
}

void op_redux(Warp *w, char *R, const Inst *I, u32 m) {
    const u32 *a = REG(u32, I->a);
    u32 *d = REG(u32, I->d), r = 0;
    bool first = true;
    UNUSED;
    for (int l = 0; l < WARP; l++) {
        if (!(m >> l & 1)) continue;
        u32 x = a[l];
        if (first) r = x;
        else switch (I->k) {
            case 0: case 16: r += x; break;
            case 1: r = x < r ? x : r; break;
            case 17: r = (s32)x < (s32)r ? x : r; break;
            case 2: r = x > r ? x : r; break;
            case 18: r = (s32)x > (s32)r ? x : r; break;
            case 3: case 19: r &= x; break;
            case 4: case 20: r |= x; break;
            default: r ^= x; break;
            }
        first = false;
    }
    LANES if (m >> l & 1) d[l] = r;
}

void op_activemask(Warp *w, char *R, const Inst *I, u32 m) {
    u32 *d = REG(u32, I->d);
    UNUSED;
    LANES if (m >> l & 1) d[l] = m;
}

/* elect.sync d|p, mask: d is the lane that is elected, here the first one; p is true in that lane alone */
void op_elect(Warp *w, char *R, const Inst *I, u32 m) {
    u32 first = (u32)__builtin_ctz(m), *p = REG(u32, w->block->launch->f->vec[I->imm]);
    if (I->d >= 0) {
        u32 *d = REG(u32, I->d);
        LANES if (m >> l & 1) d[l] = first;
    }
    *p = (*p & ~m) | 1u << first;
}

/* mma.m16n8kK: fragments as in the ISA, section 9.7.14. Each product is exact; the sum over k is in float64 and rounded
 * once, so it is at least as exact as a tensor core's, whose order of sums is not documented. `bt` is B transposed. */
static inline __attribute__((always_inline)) void multiply(Warp *w, char *R, const Inst *I, float (*a)[16], float (*bt)[16], int K) {
    const s32 *v = w->block->launch->f->vec + I->d, *vc = v + I->imm;
    double wide[16][8], sum[16][8];
    for (int k = 0; k < K; k++)
        for (int n = 0; n < 8; n++) wide[k][n] = bt[n][k];
    for (int r = 0; r < 16; r++) {
        int first = (r & 7) * 4, e = (r >> 3) * 2;
        const float *even = REG(float, vc[e]) + first, *odd = REG(float, vc[e + 1]) + first;
        double s[8];
        for (int n = 0; n < 4; n++) s[2 * n] = even[n], s[2 * n + 1] = odd[n];
        for (int k = 0; k < K; k++) {
            double x = a[r][k];
            for (int n = 0; n < 8; n++) s[n] = __builtin_fma(x, wide[k][n], s[n]);
        }
        memcpy(sum[r], s, sizeof s);
    }
    for (int r = 0; r < 16; r++) {
        int first = (r & 7) * 4, e = (r >> 3) * 2;
        float *even = REG(float, v[e]) + first, *odd = REG(float, v[e + 1]) + first;
        for (int n = 0; n < 4; n++) even[n] = (float)sum[r][2 * n], odd[n] = (float)sum[r][2 * n + 1];
    }
    if (settings.stats) w->block->stats.mma++;
}

void op_mma_half(Warp *w, char *R, const Inst *I, u32 m) {
    int K = I->k & 31, na = K / 4;
    const s32 *v = w->block->launch->f->vec + I->d;
    float a[16][16], bt[8][16];
    if (m != ~0u) finding(w, I, ~m, "mma is not executed by all lanes of the warp");
    /* eight values of a row (of A, of a column of B) lie one after another in four lanes of a register */
    for (int k = 0; k < K; k += 8) {
        for (int half = 0; half < 2; half++) {
            const u16 *s = REG(u16, v[4 + half + k / 4]);
            for (int r = 0; r < 8; r++)
                for (int j = 0; j < 8; j++) a[half * 8 + r][k + j] = (I->k & 64) ? widen_bf16(s[8 * r + j]) : widen_half(s[8 * r + j]);
        }
        const u16 *s = REG(u16, v[4 + na + k / 8]);
        for (int n = 0; n < 8; n++)
            for (int j = 0; j < 8; j++) bt[n][k + j] = (I->k & 64) ? widen_bf16(s[8 * n + j]) : widen_half(s[8 * n + j]);
    }
    if (K == 16) multiply(w, R, I, a, bt, 16);
    else multiply(w, R, I, a, bt, 8);
}

void op_mma_tf32(Warp *w, char *R, const Inst *I, u32 m) {
    int K = I->k & 31, na = K / 2;
    const s32 *v = w->block->launch->f->vec + I->d;
    float a[16][16], bt[8][16];
    if (m != ~0u) finding(w, I, ~m, "mma is not executed by all lanes of the warp");
    for (int k = 0; k < K; k += 4) {
        for (int half = 0; half < 2; half++) {
            const u32 *s = REG(u32, v[4 + half + k / 2]);
            for (int r = 0; r < 8; r++)
                for (int j = 0; j < 4; j++) {
                    u32 x = s[4 * r + j] & 0xffffe000; /* the low bits are not read */
                    memcpy(&a[half * 8 + r][k + j], &x, 4);
                }
        }
        const u32 *s = REG(u32, v[4 + na + k / 4]);
        for (int n = 0; n < 8; n++)
            for (int j = 0; j < 4; j++) {
                u32 x = s[4 * n + j] & 0xffffe000;
                memcpy(&bt[n][k + j], &x, 4);
            }
    }
    if (K == 8) multiply(w, R, I, a, bt, 8);
    else multiply(w, R, I, a, bt, 4);
}
