/* See dot_tile.h. One instance for each number of rows and type, so that the accumulators are registers. */
#include "dot_tile.h"

ALWAYS_INLINE void dot_float(int rows, vf (*acc)[NV], const float *x, size_t stride, const float *columns, int K) {
    for (int m = 0; m < rows; m++)
        for (int v = 0; v < NV; v++) acc[m][v] = (vf){0};
    for (int k = 0; k < K; k++) {
        vf w[NV];
        UNROLL
        for (int v = 0; v < NV; v++) w[v] = v_load(columns + (size_t)k * NB + v * VL);
        UNROLL
        for (int m = 0; m < rows; m++) {
            vf value = v_set1(x[m * stride + k]);
            UNROLL
            for (int v = 0; v < NV; v++) acc[m][v] = v_fma(value, w[v], acc[m][v]);
        }
    }
}

ALWAYS_INLINE void dot_bf16(int rows, vf (*acc)[NV], const bf16_row_t *x, size_t stride, const bf16 *columns,
                            int pairs) {
    for (int m = 0; m < rows; m++)
        for (int v = 0; v < NV; v++) acc[m][v] = (vf){0};
    for (int k = 0; k < pairs; k++) {
        const bf16 *block_row = columns + (size_t)k * NB * 2;
#if defined(__AVX512BF16__)
        __m512bh w[NV];
        UNROLL
        for (int v = 0; v < NV; v++) memcpy(&w[v], block_row + v * VL * 2, sizeof w[v]);
        UNROLL
        for (int m = 0; m < rows; m++) {
            int32_t pair;
            memcpy(&pair, x + m * stride + 2 * k, sizeof pair);
            __m512bh value = (__m512bh)_mm512_set1_epi32(pair);
            UNROLL
            for (int v = 0; v < NV; v++) acc[m][v] = (vf)_mm512_dpbf16_ps((__m512)acc[m][v], value, w[v]);
        }
#else
        UNROLL
        for (int v = 0; v < NV; v++) {
            vu pair;
            memcpy(&pair, block_row + v * VL * 2, sizeof pair);
            vf even = (vf)(pair << 16), odd = (vf)(pair & 0xffff0000u);
            UNROLL
            for (int m = 0; m < rows; m++) {
                acc[m][v] = v_fma(v_set1(x[m * stride + 2 * k]), even, acc[m][v]);
                acc[m][v] = v_fma(v_set1(x[m * stride + 2 * k + 1]), odd, acc[m][v]);
            }
        }
#endif
    }
}

ALWAYS_INLINE void dot_rows(const void *x, size_t stride, int rows, const void *columns, int K, int is_float,
                            float *out, size_t out_stride) {
    vf acc[MAX_ROWS][NV];
    if (is_float)
        dot_float(rows, acc, x, stride, columns, K);
    else
        dot_bf16(rows, acc, x, stride, columns, (K + 1) / 2);
    for (int m = 0; m < rows; m++)
        for (int v = 0; v < NV; v++) v_store(out + m * out_stride + v * VL, acc[m][v]);
}

#define CASE(R)                                                     \
    case R:                                                         \
        if (is_float)                                               \
            dot_rows(x, stride, R, columns, K, 1, out, out_stride); \
        else                                                        \
            dot_rows(x, stride, R, columns, K, 0, out, out_stride); \
        break;

void dot_tile(const void *x, size_t stride, int rows, const void *columns, int K, int is_float, float *out,
              size_t out_stride) {
    switch (rows) {
        CASE(1)
#if MAX_ROWS >= 3
        CASE(2)
        CASE(3)
#endif
#if MAX_ROWS >= 12
            CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
}
