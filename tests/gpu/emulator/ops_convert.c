/* Conversions between integers, and between integers and floats. Names: icvt_<dst bytes>_<type>_<src bytes>. */
#include <math.h>

#include "ops.h"

#define SRC(d, dt, t, n, T) U1(icvt_##d##_##t##_##n, dt, T, (dt)(t)A)
#define TO(d, dt)                                                                                                      \
    SRC(d, dt, u8, 2, u16) SRC(d, dt, s8, 2, u16) SRC(d, dt, u16, 2, u16) SRC(d, dt, s16, 2, u16)                      \
    SRC(d, dt, u8, 4, u32) SRC(d, dt, s8, 4, u32) SRC(d, dt, u16, 4, u32) SRC(d, dt, s16, 4, u32)                      \
    SRC(d, dt, u32, 4, u32) SRC(d, dt, s32, 4, u32)                                                                    \
    SRC(d, dt, u8, 8, u64) SRC(d, dt, s8, 8, u64) SRC(d, dt, u16, 8, u64) SRC(d, dt, s16, 8, u64)                      \
    SRC(d, dt, u32, 8, u64) SRC(d, dt, s32, 8, u64) SRC(d, dt, u64, 8, u64) SRC(d, dt, s64, 8, u64)
TO(2, u16)
TO(4, u32)
TO(8, u64)

#define FROM_INT(t)                                                                                                    \
    U1(cvt_f32_##t, f32, t, (f32)A)                                                                                    \
    U1(cvt_f64_##t, f64, t, (f64)A)                                                                                    \
    U1(cvt_f16_##t, u16, t, double_to_half((f64)A))                                                                    \
    U1(cvt_bf16_##t, u16, t, double_to_bf16((f64)A))
FROM_INT(u32)
FROM_INT(s32)
FROM_INT(u64)
FROM_INT(s64)

/* float to integer saturates and gives 0 for NaN */
#define SAT(T, lo, hi, x) ((x) != (x) ? 0 : (x) <= (lo) ? (T)(lo) : (x) >= (hi) ? (T)~(T)0 ^ ((T)-1 < 0 ? (T)((u64)1 << (sizeof(T) * 8 - 1)) : 0) : (T)(x))
#define INT_FROM(f, F, r, fn)                                                                                          \
    U1(cvt_##r##_s32_##f, s32, F, SAT(s32, -0x1p31, 0x1p31, fn(A)))                                                    \
    U1(cvt_##r##_u32_##f, u32, F, SAT(u32, 0.0, 0x1p32, fn(A)))                                                        \
    U1(cvt_##r##_s64_##f, s64, F, SAT(s64, -0x1p63, 0x1p63, fn(A)))                                                    \
    U1(cvt_##r##_u64_##f, u64, F, SAT(u64, 0.0, 0x1p64, fn(A)))                                                        \
    U1(cvt_##r##_s16_##f, s16, F, SAT(s16, -0x1p15, 0x1p15, fn(A)))                                                    \
    U1(cvt_##r##_u16_##f, u16, F, SAT(u16, 0.0, 0x1p16, fn(A)))                                                        \
    U1(cvt_##r##_s8_##f, s16, F, SAT(s8, -0x1p7, 0x1p7, fn(A)))                                                        \
    U1(cvt_##r##_u8_##f, u16, F, SAT(u8, 0.0, 0x1p8, fn(A)))
#define ROUNDS(f, F, suffix) INT_FROM(f, F, rzi, trunc##suffix) INT_FROM(f, F, rni, rint##suffix) INT_FROM(f, F, rmi, floor##suffix) INT_FROM(f, F, rpi, ceil##suffix)
ROUNDS(f32, f32, f)
ROUNDS(f64, f64, )

#define ESRC(d, t, n) ENTRY1(icvt_##d##_##t##_##n, d, n)
#define ETO(d)                                                                                                         \
    ESRC(d, u8, 2) ESRC(d, s8, 2) ESRC(d, u16, 2) ESRC(d, s16, 2) ESRC(d, u8, 4) ESRC(d, s8, 4) ESRC(d, u16, 4)        \
    ESRC(d, s16, 4) ESRC(d, u32, 4) ESRC(d, s32, 4) ESRC(d, u8, 8) ESRC(d, s8, 8) ESRC(d, u16, 8) ESRC(d, s16, 8)      \
    ESRC(d, u32, 8) ESRC(d, s32, 8) ESRC(d, u64, 8) ESRC(d, s64, 8)
#define EFROM(t, n) ENTRY1(cvt_f32_##t, 4, n) ENTRY1(cvt_f64_##t, 8, n) ENTRY1(cvt_f16_##t, 2, n) ENTRY1(cvt_bf16_##t, 2, n)
#define EINT(f, n, r)                                                                                                  \
    ENTRY1(cvt_##r##_s32_##f, 4, n) ENTRY1(cvt_##r##_u32_##f, 4, n) ENTRY1(cvt_##r##_s64_##f, 8, n)                    \
    ENTRY1(cvt_##r##_u64_##f, 8, n) ENTRY1(cvt_##r##_s16_##f, 2, n) ENTRY1(cvt_##r##_u16_##f, 2, n)                    \
    ENTRY1(cvt_##r##_s8_##f, 2, n) ENTRY1(cvt_##r##_u8_##f, 2, n)
#define EROUNDS(f, n) EINT(f, n, rzi) EINT(f, n, rni) EINT(f, n, rmi) EINT(f, n, rpi)
const OpInfo ops_convert[] = {ETO(2) ETO(4) ETO(8) EFROM(u32, 4) EFROM(s32, 4) EFROM(u64, 8) EFROM(s64, 8)
                              EROUNDS(f32, 4) EROUNDS(f64, 8) {NULL, NULL, 0, 0, 0, 0}};
