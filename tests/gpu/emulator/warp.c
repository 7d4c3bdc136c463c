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
    u32 out[WARP], in_range = 0, *d = REG(u32, I->d);
    for (u32 l = 0; l < WARP; l++) {
        u32 bv = b[l] & 31, cv = c[l] & 31, seg = c[l] >> 8 & 31, top = (l & seg) | (cv & ~seg & 31), low = l & seg, j = l;
        bool ok;
        switch (I->k) {
        case 0: j = l - bv, ok = (s32)j >= (s32)top; break;
        case 1: j = l + bv, ok = j <= top; break;
        case 2: j = l ^ bv, ok = j <= top; break;
        default: j = low | (bv & ~seg), ok = j <= top; break;
        }
        if (!ok) j = l;
        else in_range |= 1u << l;
        if (ok && (m >> l & 1) && !(m >> j & 1) && !(w->exited >> j & 1) && (int)j < w->lanes)
            finding(w, I, 1u << l, "shfl reads lane %u, which does not take part", j);
        out[l] = a[j];
    }
    for (int l = 0; l < WARP; l++)
        if (m >> l & 1) d[l] = out[l];
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

/* mma.m16n8kK: fragments as in the ISA, section 9.7.14. Each product is exact; the sum over k is in float64 and rounded
 * once, so it is at least as exact as a tensor core's, whose order of sums is not documented. */
static void multiply(Warp *w, char *R, const Inst *I, const float *A, const float *B, int K) {
    const s32 *v = w->block->launch->f->vec + I->d;
    const s32 *vc = v + I->imm;
    for (int r = 0; r < 16; r++) {
        double s[8];
        for (int n = 0; n < 8; n++) {
            int lane = (r & 7) * 4 + n / 2, e = (r >> 3) * 2 + (n & 1);
            s[n] = REG(float, vc[e])[lane];
        }
        for (int k = 0; k < K; k++) {
            double a = A[r * K + k];
            for (int n = 0; n < 8; n++) s[n] += a * (double)B[k * 8 + n];
        }
        for (int n = 0; n < 8; n++) {
            int lane = (r & 7) * 4 + n / 2, e = (r >> 3) * 2 + (n & 1);
            REG(float, v[e])[lane] = (float)s[n];
        }
    }
    if (settings.stats) w->block->stats.mma++;
}

static float widen(u16 x, bool bf) {
    if (!bf) return half_to_float(x);
    u32 b = (u32)x << 16;
    float f;
    memcpy(&f, &b, 4);
    return f;
}

void op_mma_half(Warp *w, char *R, const Inst *I, u32 m) {
    int K = I->k & 31;
    bool bf = I->k & 64;
    const s32 *v = w->block->launch->f->vec + I->d;
    float A[16 * 16], B[16 * 8];
    if (m != ~0u) finding(w, I, ~m, "mma is not executed by all lanes of the warp");
    int na = K / 4, nb = K / 8;
    for (int l = 0; l < WARP; l++) {
        int g = l / 4, t = l % 4;
        for (int j = 0; j < na; j++) {
            u32 x = REG(u32, v[4 + j])[l];
            int row = g + (j & 1) * 8, col = t * 2 + (j >> 1) * 8;
            A[row * K + col] = widen((u16)x, bf), A[row * K + col + 1] = widen((u16)(x >> 16), bf);
        }
        for (int j = 0; j < nb; j++) {
            u32 x = REG(u32, v[4 + na + j])[l];
            int k = t * 2 + j * 8;
            B[k * 8 + g] = widen((u16)x, bf), B[(k + 1) * 8 + g] = widen((u16)(x >> 16), bf);
        }
    }
    multiply(w, R, I, A, B, K);
}

void op_mma_tf32(Warp *w, char *R, const Inst *I, u32 m) {
    int K = I->k & 31, na = K / 2, nb = K / 4;
    const s32 *v = w->block->launch->f->vec + I->d;
    float A[16 * 16], B[16 * 8];
    if (m != ~0u) finding(w, I, ~m, "mma is not executed by all lanes of the warp");
    for (int l = 0; l < WARP; l++) {
        int g = l / 4, t = l % 4;
        for (int j = 0; j < na + nb; j++) {
            u32 x = REG(u32, v[4 + j])[l] & 0xffffe000; /* the low bits are not read */
            float f;
            memcpy(&f, &x, 4);
            if (j < na) A[(g + (j & 1) * 8) * K + t + (j >> 1) * 4] = f;
            else B[(t + (j - na) * 4) * 8 + g] = f;
        }
    }
    multiply(w, R, I, A, B, K);
}
