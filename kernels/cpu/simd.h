/* One float vector type, `vf`, of the widest lanes the compiler's target has.
 *
 * VL lanes: 16 with AVX-512F, 8 with AVX2+FMA, 4 with NEON and elsewhere. Arithmetic is that of the GCC/Clang vector
 * extensions; only what they cannot express (fused multiply-add, maximum, the bf16 dot product) is written per target.
 * Contraction is off (see compiler.py), so a product and a sum are fused exactly where `v_fma` says so: every kernel
 * that is instantiated for several numbers of rows then rounds alike in each of them.
 */
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define VL 16
#elif defined(__AVX2__) && defined(__FMA__)
#define VL 8
#else
#define VL 4
#endif

#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

#define ALWAYS_INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16; /* the upper half of a float's bits */

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef uint16_t vh __attribute__((vector_size(VL * 2)));

ALWAYS_INLINE vf v_set1(float x) { return x - (vf){0}; }
ALWAYS_INLINE vi v_set1i(int32_t x) { return x - (vi){0}; }

ALWAYS_INLINE vf v_load(const float *p) {
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}

ALWAYS_INLINE void v_store(float *p, vf x) { memcpy(p, &x, sizeof x); }

ALWAYS_INLINE vf v_fma(vf a, vf b, vf c) {
#if VL == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif VL == 8
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

/* mask is all ones or all zeros in each lane */
ALWAYS_INLINE vf v_select(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

ALWAYS_INLINE vf v_max(vf a, vf b) {
#if VL == 16
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif VL == 8
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return v_select((vi)(a > b), a, b);
#endif
}

/* Horizontal reductions halve the vector until one lane is left: one order, whatever the target. */
ALWAYS_INLINE float v_sum(vf x) {
    float lanes[VL];
    v_store(lanes, x);
    for (int width = VL / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
}

ALWAYS_INLINE float v_hmax(vf x) {
    float lanes[VL];
    v_store(lanes, x);
    for (int width = VL / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
    return lanes[0];
}

ALWAYS_INLINE float bf16_to_float(bf16 h) {
    uint32_t bits = (uint32_t)h << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Round to nearest, ties to even; a NaN stays one. */
ALWAYS_INLINE bf16 float_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return (bf16)((bits >> 16) | 0x40);
    return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* Compilers widen and narrow vectors of 16-bit elements in halves where one instruction does it. */
ALWAYS_INLINE vu v_widen(vh h) {
#if VL == 16
    return (vu)_mm512_cvtepu16_epi32((__m256i)h);
#elif VL == 8
    return (vu)_mm256_cvtepu16_epi32((__m128i)h);
#else
    return __builtin_convertvector(h, vu);
#endif
}

ALWAYS_INLINE vh v_narrow(vu x) {
#if VL == 16
    return (vh)_mm512_cvtepi32_epi16((__m512i)x);
#else
    return __builtin_convertvector(x, vh);
#endif
}

ALWAYS_INLINE vf v_load_bf16(const bf16 *p) {
    vh h;
    memcpy(&h, p, sizeof h);
    return (vf)(v_widen(h) << 16);
}

ALWAYS_INLINE void v_store_bf16(bf16 *p, vf x) {
#if defined(__AVX512BF16__)
    __m256bh h = _mm512_cvtneps_pbh((__m512)x); /* what is below the normal numbers becomes 0 */
#else
    vu bits = (vu)x;
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vu nan = (bits >> 16) | 0x40;
    vu is_nan = (vu)(vi)(x != x);
    vh h = v_narrow((is_nan & nan) | (~is_nan & rounded));
#endif
    memcpy(p, &h, sizeof h);
}

ALWAYS_INLINE vf v_round_bf16(vf x) {
#if defined(__AVX512BF16__)
    return (vf)(v_widen((vh)_mm512_cvtneps_pbh((__m512)x)) << 16);
#else
    bf16 lanes[VL];
    v_store_bf16(lanes, x);
    return v_load_bf16(lanes);
#endif
}

/* The first n < VL lanes; the others read as 0 and are not written. */
ALWAYS_INLINE vf v_load_n(const float *p, int n) {
    float lanes[VL] = {0};
    memcpy(lanes, p, n * sizeof *p);
    return v_load(lanes);
}

ALWAYS_INLINE vf v_load_bf16_n(const bf16 *p, int n) {
    bf16 lanes[VL] = {0};
    memcpy(lanes, p, n * sizeof *p);
    return v_load_bf16(lanes);
}

ALWAYS_INLINE void v_store_n(float *p, vf x, int n) {
    float lanes[VL];
    v_store(lanes, x);
    memcpy(p, lanes, n * sizeof *p);
}

ALWAYS_INLINE void v_store_bf16_n(bf16 *p, vf x, int n) {
    bf16 lanes[VL];
    v_store_bf16(lanes, x);
    memcpy(p, lanes, n * sizeof *p);
}

/* Element i onwards of an array of either type; `lanes` of VL, those missing read as 0 and not written. */
ALWAYS_INLINE vf v_load_any(const void *p, int64_t i, int lanes, int is_float) {
    if (is_float) return lanes == VL ? v_load((const float *)p + i) : v_load_n((const float *)p + i, lanes);
    return lanes == VL ? v_load_bf16((const bf16 *)p + i) : v_load_bf16_n((const bf16 *)p + i, lanes);
}

ALWAYS_INLINE void v_store_any(void *p, int64_t i, vf x, int lanes, int is_float) {
    if (is_float && lanes == VL)
        v_store((float *)p + i, x);
    else if (is_float)
        v_store_n((float *)p + i, x, lanes);
    else if (lanes == VL)
        v_store_bf16((bf16 *)p + i, x);
    else
        v_store_bf16_n((bf16 *)p + i, x, lanes);
}

ALWAYS_INLINE int lanes_left(int64_t i, int64_t end) { return end - i < VL ? (int)(end - i) : VL; }

/* Lanes of a and b alternating: the first halves of both, or the second */
#if VL == 16
#define ZIP_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define ZIP_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif VL == 8
#define ZIP_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define ZIP_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define ZIP_LOW 0, 4, 1, 5
#define ZIP_HIGH 2, 6, 3, 7
#endif
#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif

/* Transposes VL x VL words: log2(VL) times, row i and row i + VL / 2 are zipped into rows 2i and 2i + 1. */
ALWAYS_INLINE void v_transpose(vi *rows) {
    UNROLL
    for (int stage = 1; stage < VL; stage *= 2) {
        vi zipped[VL];
        UNROLL
        for (int i = 0; i < VL / 2; i++) {
            zipped[2 * i] = SHUFFLE(rows[i], rows[i + VL / 2], ZIP_LOW);
            zipped[2 * i + 1] = SHUFFLE(rows[i], rows[i + VL / 2], ZIP_HIGH);
        }
        UNROLL
        for (int i = 0; i < VL; i++) rows[i] = zipped[i];
    }
}

/* exp(x) to about 1e-7 relative for -87 < x < 88; exactly 0 below, infinity above, NaN stays NaN.
 * x = n ln2 + r with |r| <= ln2 / 2; e^r by its Taylor polynomial of degree 7 with the range's ends below half an ulp.
 */
ALWAYS_INLINE vf v_exp(vf x) {
    const vf low = v_set1(-87.33654f);
    const vf shifter = v_set1(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer kept in the low bits */
#if VL == 16
    /* In this order of operands a NaN outlasts the minimum; the mask lets it through. */
    __mmask16 in_range = _mm512_cmp_ps_mask((__m512)x, (__m512)low, _CMP_NLT_UQ);
    x = (vf)_mm512_min_ps(_mm512_set1_ps(89.0f), (__m512)x);
#else
    vi below = (vi)(x < low), above = (vi)(x > v_set1(88.72283f));
#endif
    vf t = v_fma(x, v_set1(1.44269504088896341f), shifter);
    vf n = t - shifter;
    vf r = v_fma(n, v_set1(-0.693145751953125f), x);
    r = v_fma(n, v_set1(-1.42860682030941723e-6f), r);
    vf e = v_set1(1.0f / 5040);
    e = v_fma(e, r, v_set1(1.0f / 720));
    e = v_fma(e, r, v_set1(1.0f / 120));
    e = v_fma(e, r, v_set1(1.0f / 24));
    e = v_fma(e, r, v_set1(1.0f / 6));
    e = v_fma(e, r, v_set1(0.5f));
    e = v_fma(e, r, v_set1(1.0f));
    e = v_fma(e, r, v_set1(1.0f));
#if VL == 16
    return (vf)_mm512_maskz_scalef_ps(in_range, (__m512)e, (__m512)n);
#else
    /* n = 128 would overflow the exponent field: scale by 2^(n-1) and double */
    vi power = (((vi)t - v_set1i(0x4b400000)) + v_set1i(126)) << 23;
    vf y = e * (vf)power * 2.0f;
    y = v_select(below, v_set1(0.0f), y);
    return v_select(above, v_set1(__builtin_inff()), y);
#endif
}

/* x / (1 + e^-x) */
ALWAYS_INLINE vf v_silu(vf x) {
#if VL == 16
    /* A reciprocal to 14 bits and one step of Newton's, which would have infinity times 0 where e^-x is infinite: there
     * the quotient is 0, but for -infinity, which is NaN. */
    __mmask16 is_small = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_LT_OQ);
    vf d = v_set1(1.0f) + v_exp((vf)_mm512_min_ps(_mm512_set1_ps(87.0f), (__m512)-x));
    vf reciprocal = (vf)_mm512_rcp14_ps((__m512)d);
    vf quotient = x * (reciprocal * (v_set1(2.0f) - d * reciprocal));
    return (vf)_mm512_mask_mul_ps((__m512)quotient, is_small, (__m512)x, _mm512_setzero_ps());
#else
    return x / (v_set1(1.0f) + v_exp(-x));
#endif
}
