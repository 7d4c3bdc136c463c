/* Integer operations, comparisons, predicates, selection and moves. Names: opcode_type as in PTX (see ptx.c). */
#include "ops.h"

#define WIDTHS(M) M(16) M(32) M(64)
#define SIGNLESS(n)                                                                                                    \
    B2(add_b##n, u##n, u##n, u##n, A + B)                                                                              \
    B2(sub_b##n, u##n, u##n, u##n, A - B)                                                                              \
    B2(mul_lo_b##n, u##n, u##n, u##n, (u64)A * B)                                                                      \
    T3(mad_lo_b##n, u##n, u##n, u##n, u##n, (u64)A * B + C)                                                            \
    B2(and_b##n, u##n, u##n, u##n, A &B)                                                                               \
    B2(or_b##n, u##n, u##n, u##n, A | B)                                                                               \
    B2(xor_b##n, u##n, u##n, u##n, A ^ B)                                                                              \
    U1(not_b##n, u##n, u##n, ~A)                                                                                       \
    U1(neg_b##n, u##n, u##n, 0 - A)                                                                                    \
    U1(abs_s##n, s##n, s##n, A < 0 ? (u##n)0 - (u##n)A : (u##n)A)                                                      \
    U1(mov_b##n, u##n, u##n, A)                                                                                        \
    B2(min_s##n, s##n, s##n, s##n, A < B ? A : B)                                                                      \
    B2(max_s##n, s##n, s##n, s##n, A > B ? A : B)                                                                      \
    B2(min_u##n, u##n, u##n, u##n, A < B ? A : B)                                                                      \
    B2(max_u##n, u##n, u##n, u##n, A > B ? A : B)                                                                      \
    B2(shl_b##n, u##n, u##n, u32, B >= n ? 0 : (u##n)(A << (B & (n - 1))))                                             \
    B2(shr_u##n, u##n, u##n, u32, B >= n ? 0 : A >> (B & (n - 1)))                                                     \
    B2(shr_s##n, s##n, s##n, u32, A >> (B >= n ? n - 1 : B))                                                           \
    B2(div_u##n, u##n, u##n, u##n, B ? A / B : (u##n)~0ull)                                                            \
    B2(rem_u##n, u##n, u##n, u##n, B ? A % B : A)                                                                      \
    B2(div_s##n, s##n, s##n, s##n, B == 0 ? -1 : B == -1 ? (s##n)(0 - (u##n)A) : A / B)                                \
    B2(rem_s##n, s##n, s##n, s##n, B == 0 ? A : B == -1 ? 0 : A % B)                                                   \
    SEL(selp_b##n, u##n)                                                                                               \
    CMP(setp_eq_b##n, u##n, A == B)                                                                                    \
    CMP(setp_ne_b##n, u##n, A != B)                                                                                    \
    CMP(setp_lt_s##n, s##n, A < B)                                                                                     \
    CMP(setp_le_s##n, s##n, A <= B)                                                                                    \
    CMP(setp_gt_s##n, s##n, A > B)                                                                                     \
    CMP(setp_ge_s##n, s##n, A >= B)                                                                                    \
    CMP(setp_lt_u##n, u##n, A < B)                                                                                     \
    CMP(setp_le_u##n, u##n, A <= B)                                                                                    \
    CMP(setp_gt_u##n, u##n, A > B)                                                                                     \
    CMP(setp_ge_u##n, u##n, A >= B)
WIDTHS(SIGNLESS)

#define PART(n, w2)                                                                                                    \
    B2(mul_wide_u##n, u##w2, u##n, u##n, (u##w2)A *(u##w2)B)                                                           \
    B2(mul_wide_s##n, s##w2, s##n, s##n, (s##w2)A *(s##w2)B)                                                           \
    T3(mad_wide_u##n, u##w2, u##n, u##n, u##w2, (u##w2)A *(u##w2)B + C)                                                \
    T3(mad_wide_s##n, s##w2, s##n, s##n, s##w2, (u##w2)((s##w2)A *(s##w2)B) + (u##w2)C)                                \
    B2(mul_hi_u##n, u##n, u##n, u##n, ((u##w2)A * (u##w2)B) >> n)                                                      \
    B2(mul_hi_s##n, s##n, s##n, s##n, ((s##w2)A * (s##w2)B) >> n)                                                      \
    T3(mad_hi_u##n, u##n, u##n, u##n, u##n, (((u##w2)A * (u##w2)B) >> n) + C)                                          \
    T3(mad_hi_s##n, s##n, s##n, s##n, s##n, (((s##w2)A * (s##w2)B) >> n) + (s##w2)C)
PART(16, 32)
PART(32, 64)
B2(mul_hi_u64, u64, u64, u64, (u64)(((unsigned __int128)A * B) >> 64))
B2(mul_hi_s64, s64, s64, s64, (s64)(((__int128)A * B) >> 64))
T3(mad_hi_u64, u64, u64, u64, u64, (u64)(((unsigned __int128)A * B) >> 64) + C)

U1(popc_b32, u32, u32, __builtin_popcount(A))
U1(popc_b64, u32, u64, __builtin_popcountll(A))
U1(clz_b32, u32, u32, A ? __builtin_clz(A) : 32)
U1(clz_b64, u32, u64, A ? __builtin_clzll(A) : 64)
U1(bfind_u32, u32, u32, A ? 31 - __builtin_clz(A) : ~0u)
U1(bfind_u64, u32, u64, A ? 63 - __builtin_clzll(A) : ~0u)
static u32 reverse32(u32 x) {
    x = (x >> 1 & 0x55555555) | (x & 0x55555555) << 1;
    x = (x >> 2 & 0x33333333) | (x & 0x33333333) << 2;
    x = (x >> 4 & 0x0f0f0f0f) | (x & 0x0f0f0f0f) << 4;
    return __builtin_bswap32(x);
}
U1(brev_b32, u32, u32, reverse32(A))
U1(brev_b64, u64, u64, ((u64)reverse32((u32)A) << 32) | reverse32((u32)(A >> 32)))
T3(shf_l_wrap_b32, u32, u32, u32, u32, (u32)(((((u64)B << 32) | A) << (C & 31)) >> 32))
T3(shf_r_wrap_b32, u32, u32, u32, u32, (u32)((((u64)B << 32) | A) >> (C & 31)))
T3(shf_l_clamp_b32, u32, u32, u32, u32, (u32)(((((u64)B << 32) | A) << (C > 32 ? 32 : C)) >> 32))
T3(shf_r_clamp_b32, u32, u32, u32, u32, (u32)((((u64)B << 32) | A) >> (C > 32 ? 32 : C)))
T3(sad_u32, u32, u32, u32, u32, C + (A > B ? A - B : B - A))
T3(sad_s32, s32, s32, s32, u32, C + (A > B ? (u32)A - (u32)B : (u32)B - (u32)A))
static u32 field_u(u64 a, u32 pos, u32 len, u32 bits) {
    pos &= 255, len &= 255;
    if (pos >= bits || !len) return 0;
    return (u32)(a >> pos) & (len >= 32 ? ~0u : (1u << len) - 1);
}
T3(bfe_u32, u32, u32, u32, u32, field_u(A, B, C, 32))
static s32 field_s(s32 a, u32 pos, u32 len) {
    pos &= 255, len &= 255;
    if (!len) return 0;
    u32 top = pos + len - 1 > 31 ? 31 : pos + len - 1;
    s64 v = pos >= 32 ? (a < 0 ? -1 : 0) : (s64)a >> pos;
    u32 n = pos >= 32 ? 1 : top - pos + 1;
    return n >= 32 ? (s32)v : (s32)((u32)v << (32 - n)) >> (32 - n);
}
T3(bfe_s32, s32, s32, u32, u32, field_s(A, B, C))
static u64 field64(u64 a, u32 pos, u32 len) {
    pos &= 255, len &= 255;
    if (pos >= 64 || !len) return 0;
    return a >> pos & (len >= 64 ? ~0ull : (1ull << len) - 1);
}
T3(bfe_u64, u64, u64, u32, u32, field64(A, B, C))
/* 1.4 of the ISA: a 4-bit selector per byte, bit 3 replicates the sign */
static u32 permute(u32 a, u32 b, u32 c) {
    u64 x = ((u64)b << 32) | a;
    u32 r = 0;
    for (int i = 0; i < 4; i++) {
        u32 s = c >> (4 * i) & 15, v = (u32)(x >> (8 * (s & 7))) & 255;
        if (s & 8) v = v & 128 ? 255 : 0;
        r |= v << (8 * i);
    }
    return r;
}
T3(prmt_b32, u32, u32, u32, u32, permute(A, B, C))
static int dot4(u32 a, u32 b, bool sa, bool sb) {
    int r = 0;
    for (int i = 0; i < 4; i++) {
        int x = a >> 8 * i & 255, y = b >> 8 * i & 255;
        r += (sa ? (s8)x : x) * (sb ? (s8)y : y);
    }
    return r;
}
T3(dp4a_u32_u32, u32, u32, u32, u32, C + (u32)dot4(A, B, false, false))
T3(dp4a_s32_s32, u32, u32, u32, u32, C + (u32)dot4(A, B, true, true))
/* bfi and lop3 have a fourth operand: bfi's length and lop3's table are constants, in imm */
static u32 insert(u32 a, u32 b, u32 pos, u32 len) {
    pos &= 255, len &= 255;
    if (pos >= 32 || !len) return b;
    u32 mask = (len >= 32 ? ~0u : (1u << len) - 1) << pos;
    return (b & ~mask) | (a << pos & mask);
}
T3(bfi_b32, u32, u32, u32, u32, insert(A, B, C, (u32)I->imm))
static inline u32 logic(u32 a, u32 b, u32 c, u32 t) {
    u32 r = 0;
    if (t & 1) r |= ~a & ~b & ~c;
    if (t & 2) r |= ~a & ~b & c;
    if (t & 4) r |= ~a & b & ~c;
    if (t & 8) r |= ~a & b & c;
    if (t & 16) r |= a & ~b & ~c;
    if (t & 32) r |= a & ~b & c;
    if (t & 64) r |= a & b & ~c;
    if (t & 128) r |= a & b & c;
    return r;
}
T3(lop3_b32, u32, u32, u32, u32, logic(A, B, C, (u32)I->imm))
U1(cnot_b32, u32, u32, A == 0)

PRED(mov_pred, A)
PRED(not_pred, ~A)
PRED(and_pred, A &B)
PRED(or_pred, A | B)
PRED(xor_pred, A ^ B)
PRED(setp_eq_pred, ~(A ^ B))

/* packing: mov.b32 {lo, hi} and back */
B2(pack_b32, u32, u16, u16, (u32)B << 16 | A)
B2(pack_b64, u64, u32, u32, (u64)B << 32 | A)
U1(low_b32, u16, u32, A)
U1(high_b32, u16, u32, A >> 16)
U1(low_b64, u32, u64, A)
U1(high_b64, u32, u64, A >> 32)

#define E16(n)                                                                                                         \
    ENTRY2(add_b##n, n / 8, n / 8, n / 8) ENTRY2(sub_b##n, n / 8, n / 8, n / 8)                                        \
    ENTRY2(mul_lo_b##n, n / 8, n / 8, n / 8) ENTRY3(mad_lo_b##n, n / 8, n / 8, n / 8, n / 8)                           \
    ENTRY2(and_b##n, n / 8, n / 8, n / 8) ENTRY2(or_b##n, n / 8, n / 8, n / 8) ENTRY2(xor_b##n, n / 8, n / 8, n / 8)   \
    ENTRY1(not_b##n, n / 8, n / 8) ENTRY1(neg_b##n, n / 8, n / 8) ENTRY1(abs_s##n, n / 8, n / 8)                       \
    ENTRY1(mov_b##n, n / 8, n / 8)                                                                                     \
    ENTRY2(min_s##n, n / 8, n / 8, n / 8) ENTRY2(max_s##n, n / 8, n / 8, n / 8)                                        \
    ENTRY2(min_u##n, n / 8, n / 8, n / 8) ENTRY2(max_u##n, n / 8, n / 8, n / 8)                                        \
    ENTRY2(shl_b##n, n / 8, n / 8, 4) ENTRY2(shr_u##n, n / 8, n / 8, 4) ENTRY2(shr_s##n, n / 8, n / 8, 4)              \
    {"shr_b" #n, h_shr_u##n, n / 8, n / 8, 4, 0},                                                                      \
    ENTRY2(div_u##n, n / 8, n / 8, n / 8) ENTRY2(rem_u##n, n / 8, n / 8, n / 8)                                        \
    ENTRY2(div_s##n, n / 8, n / 8, n / 8) ENTRY2(rem_s##n, n / 8, n / 8, n / 8)                                        \
    ENTRY3(selp_b##n, n / 8, n / 8, n / 8, -1)                                                                         \
    ENTRY2(setp_eq_b##n, -1, n / 8, n / 8) ENTRY2(setp_ne_b##n, -1, n / 8, n / 8)                                      \
    ENTRY2(setp_lt_s##n, -1, n / 8, n / 8) ENTRY2(setp_le_s##n, -1, n / 8, n / 8)                                      \
    ENTRY2(setp_gt_s##n, -1, n / 8, n / 8) ENTRY2(setp_ge_s##n, -1, n / 8, n / 8)                                      \
    ENTRY2(setp_lt_u##n, -1, n / 8, n / 8) ENTRY2(setp_le_u##n, -1, n / 8, n / 8)                                      \
    ENTRY2(setp_gt_u##n, -1, n / 8, n / 8) ENTRY2(setp_ge_u##n, -1, n / 8, n / 8)                                      \
    {"setp_lo_u" #n, h_setp_lt_u##n, -1, n / 8, n / 8, 0}, {"setp_ls_u" #n, h_setp_le_u##n, -1, n / 8, n / 8, 0},      \
    {"setp_hi_u" #n, h_setp_gt_u##n, -1, n / 8, n / 8, 0}, {"setp_hs_u" #n, h_setp_ge_u##n, -1, n / 8, n / 8, 0},
#define EPART(n, x)                                                                                                    \
    ENTRY2(mul_wide_u##n, x / 8, n / 8, n / 8) ENTRY2(mul_wide_s##n, x / 8, n / 8, n / 8)                              \
    ENTRY3(mad_wide_u##n, x / 8, n / 8, n / 8, x / 8) ENTRY3(mad_wide_s##n, x / 8, n / 8, n / 8, x / 8)                \
    ENTRY2(mul_hi_u##n, n / 8, n / 8, n / 8) ENTRY2(mul_hi_s##n, n / 8, n / 8, n / 8)                                  \
    ENTRY3(mad_hi_u##n, n / 8, n / 8, n / 8, n / 8) ENTRY3(mad_hi_s##n, n / 8, n / 8, n / 8, n / 8)

const OpInfo ops_int[] = {
    WIDTHS(E16) EPART(16, 32) EPART(32, 64)
    ENTRY2(mul_hi_u64, 8, 8, 8) ENTRY2(mul_hi_s64, 8, 8, 8) ENTRY3(mad_hi_u64, 8, 8, 8, 8)
    ENTRY1(popc_b32, 4, 4) ENTRY1(popc_b64, 4, 8) ENTRY1(clz_b32, 4, 4) ENTRY1(clz_b64, 4, 8)
    ENTRY1(bfind_u32, 4, 4) ENTRY1(bfind_u64, 4, 8) ENTRY1(brev_b32, 4, 4) ENTRY1(brev_b64, 8, 8)
    ENTRY3(shf_l_wrap_b32, 4, 4, 4, 4) ENTRY3(shf_r_wrap_b32, 4, 4, 4, 4)
    ENTRY3(shf_l_clamp_b32, 4, 4, 4, 4) ENTRY3(shf_r_clamp_b32, 4, 4, 4, 4)
    ENTRY3(sad_u32, 4, 4, 4, 4) ENTRY3(sad_s32, 4, 4, 4, 4)
    ENTRY3(bfe_u32, 4, 4, 4, 4) ENTRY3(bfe_s32, 4, 4, 4, 4) ENTRY3(bfe_u64, 8, 8, 4, 4)
    ENTRY3(prmt_b32, 4, 4, 4, 4) ENTRY3(bfi_b32, 4, 4, 4, 4) ENTRY3(lop3_b32, 4, 4, 4, 4) ENTRY1(cnot_b32, 4, 4)
    ENTRY3(dp4a_u32_u32, 4, 4, 4, 4) ENTRY3(dp4a_s32_s32, 4, 4, 4, 4)
    ENTRY1(mov_pred, -1, -1) ENTRY1(not_pred, -1, -1) ENTRY2(and_pred, -1, -1, -1) ENTRY2(or_pred, -1, -1, -1)
    ENTRY2(xor_pred, -1, -1, -1) ENTRY2(setp_eq_pred, -1, -1, -1)
    ENTRY2(pack_b32, 4, 2, 2) ENTRY2(pack_b64, 8, 4, 4)
    ENTRY1(low_b32, 2, 4) ENTRY1(high_b32, 2, 4) ENTRY1(low_b64, 4, 8) ENTRY1(high_b64, 4, 8)
    {NULL, NULL, 0, 0, 0, 0}};
