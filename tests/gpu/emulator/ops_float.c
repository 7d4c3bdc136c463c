/* Floating-point operations: float32, float64, half, bfloat16 and their pairs, rounded to nearest even as PTX's .rn.
 *
 * The .approx functions are computed in float64 and rounded: a GPU's differ from them by an ulp or two.
 */
#include <math.h>

#include "ops.h"

static inline u32 bits(float x) { u32 r; memcpy(&r, &x, 4); return r; }
static inline float real(u32 x) { float r; memcpy(&r, &x, 4); return r; }
static inline u64 bits64(double x) { u64 r; memcpy(&r, &x, 8); return r; }
static inline double real64(u64 x) { double r; memcpy(&r, &x, 8); return r; }

float half_to_float(u16 h) { return widen_half(h); }
/* round to nearest even by hand: `keep` bits of mantissa, smallest exponent `emin`, largest `emax` */
static u32 round_double(double x, int keep, int emin, int emax) {
    u64 b = bits64(x);
    u32 sign = (u32)(b >> 63) << (keep + (emax == 15 ? 5 : 8));
    double a = fabs(x);
    if (isnan(x)) return 0x7fff;
    u32 inf = (u32)(2 * emax + 1) << keep;
    if (isinf(a)) return sign | inf;
    if (a == 0) return sign;
    int e;
    frexp(a, &e);
    e -= 1;
    if (e < emin) e = emin;
    double scaled = ldexp(a, keep - e); /* exact: |x| in units of the last place */
    u64 n = (u64)scaled;
    double rest = scaled - (double)n;
    if (rest > 0.5 || (rest == 0.5 && (n & 1))) n++;
    if (n >> keep == 0) return sign | (u32)n; /* subnormal */
    if (n >> (keep + 1)) n >>= 1, e++;
    if (e > emax) return sign | inf;
    return sign | (u32)((u64)(e + emax) << keep) | (u32)(n & ((1u << keep) - 1));
}
u16 double_to_half(double x) { return (u16)round_double(x, 10, -14, 15); }
u16 double_to_bf16(double x) { return (u16)round_double(x, 7, -126, 127); }
static inline u32 half_bits(u32 x) { /* of the bits of a float; without branches, so that loops become vectors */
    u32 s = x >> 16 & 0x8000, a = x & 0x7fffffff;
    u32 normal = (a - 0x38000000 + 0xfff + (a >> 13 & 1)) >> 13;
    float f = real(a) + 0.5f; /* subnormal halves: the addition rounds at 2^-24 */
    u32 tiny = bits(f) - 0x3f000000;
    u32 r = a < 0x38800000 ? tiny : normal;
    r = a >= 0x47800000 ? 0x7c00 : r;
    r = a > 0x7f800000 ? 0x7fff : r;
    return a > 0x7f800000 ? r : (s | (r > 0x7c00 ? 0x7c00 : r));
}
u16 float_to_half(float x) { return (u16)half_bits(bits(x)); }
static inline u32 bf_bits(u32 x) {
    u32 r = (x + 0x7fff + (x >> 16 & 1)) >> 16;
    return (x & 0x7fffffff) > 0x7f800000 ? 0x7fff : r;
}
static inline u32 half_zero(u32 x) { /* towards zero */
    u32 s = x >> 16 & 0x8000, a = x & 0x7fffffff;
    if (a > 0x7f800000) return 0x7fff;
    if (a == 0x7f800000) return s | 0x7c00;
    if (a >= 0x47800000) return s | 0x7bff;
    if (a < 0x38800000) return s | (u32)(real(a) * 0x1p24f);
    return s | (a - 0x38000000) >> 13;
}
static inline u32 tf32_bits(u32 x) { /* .rna: nearest, ties away from zero */
    return (x & 0x7f800000) == 0x7f800000 ? x : (x + 0x1000) & 0xffffe000;
}
static inline u32 tf32_even(u32 x) {
    return (x & 0x7f800000) == 0x7f800000 ? x : (x + 0xfff + (x >> 13 & 1)) & 0xffffe000;
}
static inline float flush(float x) {
    return (bits(x) & 0x7f800000) ? x : real(bits(x) & 0x80000000);
}
static inline float min32(float a, float b) {
    return a != a ? b : b != b ? a : a == b ? real(bits(a) | bits(b)) : a < b ? a : b;
}
static inline float max32(float a, float b) {
    return a != a ? b : b != b ? a : a == b ? real(bits(a) & bits(b)) : a > b ? a : b;
}
static inline double min64(double a, double b) {
    return a != a ? b : b != b ? a : a == b ? real64(bits64(a) | bits64(b)) : a < b ? a : b;
}
static inline double max64(double a, double b) {
    return a != a ? b : b != b ? a : a == b ? real64(bits64(a) & bits64(b)) : a > b ? a : b;
}
#define NAN32 real(0x7fffffff)
static inline float min32n(float a, float b) { return a != a || b != b ? NAN32 : min32(a, b); }
static inline float max32n(float a, float b) { return a != a || b != b ? NAN32 : max32(a, b); }

/* a b + c in float64, rounded to odd, so that the rounding to 11 or 8 bits that follows is the only one */
static double fma_odd(double a, double b, double c) {
    double p = a * b, s = p + c; /* the product of two short mantissas is exact */
    double v = s - p, e = (p - (s - v)) + (c - v);
    if (isfinite(s) && e != 0 && !(bits64(s) & 1)) {
        u64 u = bits64(s);
        u += (e > 0) == (s > 0) ? 1 : -1;
        s = real64(u);
    }
    return s;
}

B2(add_f32, f32, f32, f32, A + B)
B2(sub_f32, f32, f32, f32, A - B)
B2(mul_f32, f32, f32, f32, A *B)
B2(div_f32, f32, f32, f32, A / B)
T3(fma_f32, f32, f32, f32, f32, __builtin_fmaf(A, B, C))
B2(min_f32, f32, f32, f32, min32(A, B))
B2(max_f32, f32, f32, f32, max32(A, B))
B2(min_NaN_f32, f32, f32, f32, min32n(A, B))
B2(max_NaN_f32, f32, f32, f32, max32n(A, B))
U1(neg_f32, u32, u32, A ^ 0x80000000)
U1(abs_f32, u32, u32, A & 0x7fffffff)
U1(sqrt_f32, f32, f32, sqrtf(A))
U1(rcp_f32, f32, f32, 1.0f / A)
U1(flush_f32, f32, f32, flush(A))
U1(sat_f32, f32, f32, A != A ? 0 : A < 0 ? 0 : A > 1 ? 1 : A)
U1(rsqrt_f32, f32, f32, (float)(1.0 / sqrt((double)A)))
/* 2^x: a polynomial for 2^f, |f| <= 1/2, in float64, relative error below 2^-33, so a loop of it is vectors */
static inline float ex2(float a) {
    double x = a < -160.0f ? -160.0 : a > 160.0f ? 160.0 : (double)a;
    double t = x + 0x1.8p52, n = t - 0x1.8p52, f = (x - n) * 0x1.62e42fefa39efp-1;
    double p = 1.0 + f * (1.0 + f * (1.0 / 2 + f * (1.0 / 6 + f * (1.0 / 24 + f * (1.0 / 120 +
               f * (1.0 / 720 + f * (1.0 / 5040 + f * (1.0 / 40320 + f * (1.0 / 362880)))))))));
    double s = real64((bits64(t) + 1023) << 52);
    float r = (float)(p * s);
    return a != a ? a : r;
}
U1(ex2_f32, f32, f32, ex2(A))
U1(lg2_f32, f32, f32, (float)log2((double)A))
U1(sin_f32, f32, f32, (float)sin((double)A))
U1(cos_f32, f32, f32, (float)cos((double)A))
U1(tanh_f32, f32, f32, (float)tanh((double)A))
B2(copysign_f32, u32, u32, u32, (B & 0x7fffffff) | (A & 0x80000000))

B2(add_f64, f64, f64, f64, A + B)
B2(sub_f64, f64, f64, f64, A - B)
B2(mul_f64, f64, f64, f64, A *B)
B2(div_f64, f64, f64, f64, A / B)
T3(fma_f64, f64, f64, f64, f64, __builtin_fma(A, B, C))
B2(min_f64, f64, f64, f64, min64(A, B))
B2(max_f64, f64, f64, f64, max64(A, B))
U1(neg_f64, u64, u64, A ^ 0x8000000000000000ull)
U1(abs_f64, u64, u64, A & 0x7fffffffffffffffull)
U1(sqrt_f64, f64, f64, sqrt(A))
U1(rcp_f64, f64, f64, 1.0 / A)
U1(rsqrt_f64, f64, f64, 1.0 / sqrt(A))
B2(copysign_f64, u64, u64, u64, (B & 0x7fffffffffffffffull) | (A & 0x8000000000000000ull))

/* half and bfloat16: sums and products of two are exact enough in float32 for one rounding */
#define H(x) widen_half(x)
#define RH(x) half_bits(bits(x))
#define HALVES(t, TO, FROM, FROMD)                                                                                     \
    B2(add_##t, u16, u16, u16, FROM(TO(A) + TO(B)))                                                                    \
    B2(sub_##t, u16, u16, u16, FROM(TO(A) - TO(B)))                                                                    \
    B2(mul_##t, u16, u16, u16, FROM(TO(A) * TO(B)))                                                                    \
    T3(fma_##t, u16, u16, u16, u16, FROMD(fma_odd(TO(A), TO(B), TO(C))))                                               \
    T3(fma_relu_##t, u16, u16, u16, u16, FROMD(max64(fma_odd(TO(A), TO(B), TO(C)), 0)))                                \
    B2(min_##t, u16, u16, u16, FROM(min32(TO(A), TO(B))))                                                              \
    B2(max_##t, u16, u16, u16, FROM(max32(TO(A), TO(B))))                                                              \
    B2(min_NaN_##t, u16, u16, u16, FROM(min32n(TO(A), TO(B))))                                                         \
    B2(max_NaN_##t, u16, u16, u16, FROM(max32n(TO(A), TO(B))))                                                         \
    U1(neg_##t, u16, u16, A ^ 0x8000)                                                                                  \
    U1(abs_##t, u16, u16, A & 0x7fff)                                                                                  \
    U1(ex2_##t, u16, u16, FROMD(exp2((double)TO(A))))                                                                  \
    U1(tanh_##t, u16, u16, FROMD(tanh((double)TO(A))))                                                                 \
    CMP(setp_eq_##t, u16, TO(A) == TO(B))                                                                              \
    CMP(setp_ne_##t, u16, TO(A) < TO(B) || TO(A) > TO(B))                                                              \
    CMP(setp_lt_##t, u16, TO(A) < TO(B))                                                                               \
    CMP(setp_le_##t, u16, TO(A) <= TO(B))                                                                              \
    CMP(setp_gt_##t, u16, TO(A) > TO(B))                                                                               \
    CMP(setp_ge_##t, u16, TO(A) >= TO(B))                                                                              \
    CMP(setp_neu_##t, u16, TO(A) != TO(B))                                                                             \
    CMP(setp_ltu_##t, u16, !(TO(A) >= TO(B)))                                                                          \
    CMP(setp_leu_##t, u16, !(TO(A) > TO(B)))                                                                           \
    CMP(setp_gtu_##t, u16, !(TO(A) <= TO(B)))                                                                          \
    CMP(setp_geu_##t, u16, !(TO(A) < TO(B)))                                                                           \
    CMP(setp_equ_##t, u16, !(TO(A) < TO(B) || TO(A) > TO(B)))                                                          \
    CMP(setp_nan_##t, u16, TO(A) != TO(A) || TO(B) != TO(B))                                                           \
    CMP(setp_num_##t, u16, TO(A) == TO(A) && TO(B) == TO(B))                                                           \
    B2(add_##t##x2, u32, u32, u32, PAIR(FROM(TO(LO(A)) + TO(LO(B))), FROM(TO(HI(A)) + TO(HI(B)))))                     \
    B2(sub_##t##x2, u32, u32, u32, PAIR(FROM(TO(LO(A)) - TO(LO(B))), FROM(TO(HI(A)) - TO(HI(B)))))                     \
    B2(mul_##t##x2, u32, u32, u32, PAIR(FROM(TO(LO(A)) * TO(LO(B))), FROM(TO(HI(A)) * TO(HI(B)))))                     \
    T3(fma_##t##x2, u32, u32, u32, u32,                                                                                \
       PAIR(FROMD(fma_odd(TO(LO(A)), TO(LO(B)), TO(LO(C)))), FROMD(fma_odd(TO(HI(A)), TO(HI(B)), TO(HI(C))))))         \
    B2(min_##t##x2, u32, u32, u32, PAIR(FROM(min32(TO(LO(A)), TO(LO(B)))), FROM(min32(TO(HI(A)), TO(HI(B))))))         \
    B2(max_##t##x2, u32, u32, u32, PAIR(FROM(max32(TO(LO(A)), TO(LO(B)))), FROM(max32(TO(HI(A)), TO(HI(B))))))         \
    B2(min_NaN_##t##x2, u32, u32, u32, PAIR(FROM(min32n(TO(LO(A)), TO(LO(B)))), FROM(min32n(TO(HI(A)), TO(HI(B))))))   \
    B2(max_NaN_##t##x2, u32, u32, u32, PAIR(FROM(max32n(TO(LO(A)), TO(LO(B)))), FROM(max32n(TO(HI(A)), TO(HI(B))))))   \
    U1(neg_##t##x2, u32, u32, A ^ 0x80008000)                                                                          \
    U1(abs_##t##x2, u32, u32, A & 0x7fff7fff)
#define LO(x) ((u16)(x))
#define HI(x) ((u16)((x) >> 16))
#define PAIR(lo, hi) ((u32)(u16)(lo) | (u32)(u16)(hi) << 16)
#define RB(x) bf_bits(bits(x))
HALVES(f16, H, RH, double_to_half)
HALVES(bf16, widen_bf16, RB, double_to_bf16)

#define COMPARE(t)                                                                                                     \
    CMP(setp_eq_##t, t, A == B)                                                                                        \
    CMP(setp_ne_##t, t, (A < B) | (A > B))                                                                             \
    CMP(setp_lt_##t, t, A < B)                                                                                         \
    CMP(setp_le_##t, t, A <= B)                                                                                        \
    CMP(setp_gt_##t, t, A > B)                                                                                         \
    CMP(setp_ge_##t, t, A >= B)                                                                                        \
    CMP(setp_equ_##t, t, !((A < B) | (A > B)))                                                                         \
    CMP(setp_neu_##t, t, A != B)                                                                                       \
    CMP(setp_ltu_##t, t, !(A >= B))                                                                                    \
    CMP(setp_leu_##t, t, !(A > B))                                                                                     \
    CMP(setp_gtu_##t, t, !(A <= B))                                                                                    \
    CMP(setp_geu_##t, t, !(A < B))                                                                                     \
    CMP(setp_num_##t, t, (A == A) & (B == B))                                                                          \
    CMP(setp_nan_##t, t, (A != A) | (B != B))
COMPARE(f32)
COMPARE(f64)
CMP(testp_nan_f32, f32, A != A)
CMP(testp_finite_f32, u32, (A & 0x7f800000) != 0x7f800000)
CMP(testp_infinite_f32, u32, (A & 0x7fffffff) == 0x7f800000)
CMP(testp_number_f32, f32, A == A)

/* conversions between floats */
U1(cvt_f32_f16, f32, u16, H(A))
U1(cvt_f16_f32, u16, f32, RH(A))
U1(cvt_rz_f16_f32, u16, u32, half_zero(A))
U1(cvt_f32_bf16, f32, u16, widen_bf16(A))
U1(cvt_bf16_f32, u16, f32, RB(A))
U1(cvt_rz_bf16_f32, u16, u32, (A & 0x7fffffff) > 0x7f800000 ? 0x7fff : A >> 16)
U1(cvt_bf16_f16, u16, u16, RB(H(A)))
U1(cvt_f16_bf16, u16, u16, RH(widen_bf16(A)))
U1(cvt_f64_f32, f64, f32, A)
U1(cvt_f32_f64, f32, f64, A)
U1(cvt_f16_f64, u16, f64, double_to_half(A))
U1(cvt_f64_f16, f64, u16, H(A))
U1(cvt_f64_bf16, f64, u16, widen_bf16(A))
U1(cvt_bf16_f64, u16, f64, double_to_bf16(A))
U1(cvt_rna_tf32_f32, u32, u32, tf32_bits(A))
U1(cvt_tf32_f32, u32, u32, tf32_even(A))
B2(cvt_f16x2_f32, u32, f32, f32, PAIR(RH(B), RH(A)))
B2(cvt_bf16x2_f32, u32, f32, f32, PAIR(RB(B), RB(A)))
B2(cvt_relu_f16x2_f32, u32, f32, f32, PAIR(RH(max32n(B, 0)), RH(max32n(A, 0))))
B2(cvt_relu_bf16x2_f32, u32, f32, f32, PAIR(RB(max32n(B, 0)), RB(max32n(A, 0))))
U1(cvt_rni_f32_f32, f32, f32, rintf(A))
U1(cvt_rzi_f32_f32, f32, f32, truncf(A))
U1(cvt_rmi_f32_f32, f32, f32, floorf(A))
U1(cvt_rpi_f32_f32, f32, f32, ceilf(A))
U1(cvt_rni_f64_f64, f64, f64, rint(A))
U1(cvt_rzi_f64_f64, f64, f64, trunc(A))
U1(cvt_rmi_f64_f64, f64, f64, floor(A))
U1(cvt_rpi_f64_f64, f64, f64, ceil(A))

#define ARITH(t, n)                                                                                                    \
    ENTRY2(add_##t, n, n, n) ENTRY2(sub_##t, n, n, n) ENTRY2(mul_##t, n, n, n) ENTRY3(fma_##t, n, n, n, n)             \
    ENTRY2(min_##t, n, n, n) ENTRY2(max_##t, n, n, n) ENTRY1(neg_##t, n, n) ENTRY1(abs_##t, n, n)
#define NANS(t, n) ENTRY2(min_NaN_##t, n, n, n) ENTRY2(max_NaN_##t, n, n, n)
#define COMPS(t, n)                                                                                                    \
    ENTRY2(setp_eq_##t, -1, n, n) ENTRY2(setp_ne_##t, -1, n, n) ENTRY2(setp_lt_##t, -1, n, n)                          \
    ENTRY2(setp_le_##t, -1, n, n) ENTRY2(setp_gt_##t, -1, n, n) ENTRY2(setp_ge_##t, -1, n, n)                          \
    ENTRY2(setp_equ_##t, -1, n, n) ENTRY2(setp_neu_##t, -1, n, n) ENTRY2(setp_ltu_##t, -1, n, n)                       \
    ENTRY2(setp_leu_##t, -1, n, n) ENTRY2(setp_gtu_##t, -1, n, n) ENTRY2(setp_geu_##t, -1, n, n)                       \
    ENTRY2(setp_num_##t, -1, n, n) ENTRY2(setp_nan_##t, -1, n, n)
#define SMALL(t)                                                                                                       \
    ARITH(t, 2) NANS(t, 2) COMPS(t, 2) ARITH(t##x2, 4) NANS(t##x2, 4)                                                  \
    ENTRY3(fma_relu_##t, 2, 2, 2, 2) ENTRY1(ex2_##t, 2, 2) ENTRY1(tanh_##t, 2, 2)

const OpInfo ops_float[] = {
    ARITH(f32, 4) NANS(f32, 4) COMPS(f32, 4) ARITH(f64, 8) COMPS(f64, 8) SMALL(f16) SMALL(bf16)
    ENTRY2(div_f32, 4, 4, 4) ENTRY2(div_f64, 8, 8, 8)
    ENTRY1(sqrt_f32, 4, 4) ENTRY1(sqrt_f64, 8, 8) ENTRY1(rcp_f32, 4, 4) ENTRY1(rcp_f64, 8, 8)
    ENTRY1(rsqrt_f32, 4, 4) ENTRY1(rsqrt_f64, 8, 8) ENTRY1(flush_f32, 4, 4) ENTRY1(sat_f32, 4, 4)
    ENTRY1(ex2_f32, 4, 4) ENTRY1(lg2_f32, 4, 4) ENTRY1(sin_f32, 4, 4) ENTRY1(cos_f32, 4, 4) ENTRY1(tanh_f32, 4, 4)
    ENTRY2(copysign_f32, 4, 4, 4) ENTRY2(copysign_f64, 8, 8, 8)
    {"testp_nan_f32", h_testp_nan_f32, -1, 4, 0, 0}, {"testp_finite_f32", h_testp_finite_f32, -1, 4, 0, 0},
    {"testp_infinite_f32", h_testp_infinite_f32, -1, 4, 0, 0}, {"testp_number_f32", h_testp_number_f32, -1, 4, 0, 0},
    ENTRY1(cvt_f32_f16, 4, 2) ENTRY1(cvt_f16_f32, 2, 4) ENTRY1(cvt_rz_f16_f32, 2, 4)
    ENTRY1(cvt_f32_bf16, 4, 2) ENTRY1(cvt_bf16_f32, 2, 4) ENTRY1(cvt_rz_bf16_f32, 2, 4)
    ENTRY1(cvt_bf16_f16, 2, 2) ENTRY1(cvt_f16_bf16, 2, 2)
    ENTRY1(cvt_f64_f32, 8, 4) ENTRY1(cvt_f32_f64, 4, 8) ENTRY1(cvt_f16_f64, 2, 8) ENTRY1(cvt_f64_f16, 8, 2)
    ENTRY1(cvt_f64_bf16, 8, 2) ENTRY1(cvt_bf16_f64, 2, 8)
    ENTRY1(cvt_rna_tf32_f32, 4, 4) ENTRY1(cvt_tf32_f32, 4, 4)
    ENTRY2(cvt_f16x2_f32, 4, 4, 4) ENTRY2(cvt_bf16x2_f32, 4, 4, 4)
    ENTRY2(cvt_relu_f16x2_f32, 4, 4, 4) ENTRY2(cvt_relu_bf16x2_f32, 4, 4, 4)
    ENTRY1(cvt_rni_f32_f32, 4, 4) ENTRY1(cvt_rzi_f32_f32, 4, 4) ENTRY1(cvt_rmi_f32_f32, 4, 4) ENTRY1(cvt_rpi_f32_f32, 4, 4)
    ENTRY1(cvt_rni_f64_f64, 8, 8) ENTRY1(cvt_rzi_f64_f64, 8, 8) ENTRY1(cvt_rmi_f64_f64, 8, 8) ENTRY1(cvt_rpi_f64_f64, 8, 8)
    {NULL, NULL, 0, 0, 0, 0}};
