/* How an operation without side effects is written: an expression of A, B, C, for each lane of the mask. */
#ifndef OPS_H
#define OPS_H
#include "emulator.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif

/* without branches, so that a loop of it is vectors; exact */
static inline float widen_half(u16 h) {
    u32 x = (u32)(h & 0x7fff) << 13, y;
    float f;
    memcpy(&f, &x, 4);
    f *= 0x1p112f;
    memcpy(&y, &f, 4);
    y |= (h & 0x7c00) == 0x7c00 ? 0x7f800000 : 0;
    y |= (u32)(h & 0x8000) << 16;
    memcpy(&f, &y, 4);
    return f;
}
static inline float widen_bf16(u16 h) {
    u32 x = (u32)h << 16;
    float f;
    memcpy(&f, &x, 4);
    return f;
}

#define LANES _Pragma("GCC ivdep") for (int l = 0; l < WARP; l++)
#define UNUSED (void)w

/* the plain loop, when all lanes take part, is the one that has to be fast */
#define U1(name, TD, TA, expr)                                                                                         \
    static void h_##name(Warp *w, char *R, const Inst *I, u32 m) {                                                     \
        UNUSED;                                                                                                        \
        TD *d = REG(TD, I->d);                                                                                         \
        const TA *a = REG(TA, I->a);                                                                                   \
        if (m == ~0u) LANES { TA A = a[l]; d[l] = (TD)(expr); }                                                        \
        else LANES { TA A = a[l]; TD r = (TD)(expr); if (m >> l & 1) d[l] = r; }                                       \
    }
#define B2(name, TD, TA, TB, expr)                                                                                     \
    static void h_##name(Warp *w, char *R, const Inst *I, u32 m) {                                                     \
        UNUSED;                                                                                                        \
        TD *d = REG(TD, I->d);                                                                                         \
        const TA *a = REG(TA, I->a);                                                                                   \
        const TB *b = REG(TB, I->b);                                                                                   \
        if (m == ~0u) LANES { TA A = a[l]; TB B = b[l]; d[l] = (TD)(expr); }                                           \
        else LANES { TA A = a[l]; TB B = b[l]; TD r = (TD)(expr); if (m >> l & 1) d[l] = r; }                          \
    }
#define T3(name, TD, TA, TB, TC, expr)                                                                                 \
    static void h_##name(Warp *w, char *R, const Inst *I, u32 m) {                                                     \
        UNUSED;                                                                                                        \
        TD *d = REG(TD, I->d);                                                                                         \
        const TA *a = REG(TA, I->a);                                                                                   \
        const TB *b = REG(TB, I->b);                                                                                   \
        const TC *c = REG(TC, I->c);                                                                                   \
        if (m == ~0u) LANES { TA A = a[l]; TB B = b[l]; TC C = c[l]; d[l] = (TD)(expr); }                              \
        else LANES { TA A = a[l]; TB B = b[l]; TC C = c[l]; TD r = (TD)(expr); if (m >> l & 1) d[l] = r; }             \
    }

/* 32 bytes of 0 or 1 as a mask */
static inline u32 pack_mask(const u8 *t) {
#ifdef __AVX2__
    __m256i v = _mm256_loadu_si256((const __m256i *)t);
    return (u32)_mm256_movemask_epi8(_mm256_sub_epi8(_mm256_setzero_si256(), v));
#else
    u32 r = 0;
    for (int l = 0; l < WARP; l++) r |= (u32)(t[l] & 1) << l;
    return r;
#endif
}

/* predicates are a bit per lane; comparisons take two operands and give one */
#define CMP(name, TA, expr)                                                                                            \
    static void h_##name(Warp *w, char *R, const Inst *I, u32 m) {                                                     \
        UNUSED;                                                                                                        \
        const TA *a = REG(TA, I->a), *b = REG(TA, I->b);                                                               \
        u8 t[WARP];                                                                                                    \
        LANES { TA A = a[l], B = b[l]; (void)B; t[l] = (u8)((expr) ? 1 : 0); }                                                  \
        u32 *d = REG(u32, I->d);                                                                                       \
        *d = (*d & ~m) | (pack_mask(t) & m);                                                                           \
    }
#define PRED(name, expr)                                                                                               \
    static void h_##name(Warp *w, char *R, const Inst *I, u32 m) {                                                     \
        UNUSED;                                                                                                        \
        u32 A = *REG(u32, I->a), B = I->b < 0 ? 0 : *REG(u32, I->b), *d = REG(u32, I->d);                                             \
        (void)A, (void)B;                                                                                              \
        *d = (*d & ~m) | ((expr) & m);                                                                                 \
    }
#define SEL(name, T)                                                                                                   \
    static void h_##name(Warp *w, char *R, const Inst *I, u32 m) {                                                     \
        UNUSED;                                                                                                        \
        T *d = REG(T, I->d);                                                                                           \
        const T *a = REG(T, I->a), *b = REG(T, I->b);                                                                  \
        u32 p = *REG(u32, I->c);                                                                                       \
        if (m == ~0u) LANES { T A = a[l], B = b[l]; d[l] = (p >> l & 1) ? A : B; }                                     \
        else LANES { T A = a[l], B = b[l]; T r = (p >> l & 1) ? A : B; if (m >> l & 1) d[l] = r; }                     \
    }

#define ENTRY1(name, d, a) {#name, h_##name, d, a, 0, 0},
#define ENTRY2(name, d, a, b) {#name, h_##name, d, a, b, 0},
#define ENTRY3(name, d, a, b, c) {#name, h_##name, d, a, b, c},
#endif
