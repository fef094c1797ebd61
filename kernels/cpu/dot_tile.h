/* The inner product shared by linear layers and attention scores: a few rows of x against a block of packed columns.
 *
 * A packed block holds NB = 32 columns (outputs of a linear layer, keys of an attention block) side by side:
 *   float: [K][NB]                 bf16: [ceil(K / 2)][NB][2], two neighbouring k in one 32-bit lane
 * Lanes run over the columns and k runs in order, so each output is one chain of additions over k = 0, 1, 2, ... in one
 * accumulator. Nothing about the chain depends on the number of rows of the tile, which is what makes the result of a
 * row independent of the other rows. The tile's rows times its vectors are independent chains and hide their latency.
 *
 * bf16 products are exact in fp32. With AVX-512-BF16 a lane adds its two products of a pair in one instruction; without,
 * rows come as floats (`row_t`) and the pair is two fused multiply-adds.
 */
#pragma once
#include "simd.h"

#define NB 32
#define NV (NB / VL)

#if defined(__AVX512BF16__)
typedef bf16 bf16_row_t; /* what a row of x is read as when the columns are bf16 */
#define BF16_ROWS_AS_FLOAT 0
#else
typedef float bf16_row_t;
#define BF16_ROWS_AS_FLOAT 1
#endif

/* Rows in a tile at most: accumulators + one block row + one broadcast value must fit the vector registers. */
#if VL == 16
#define MAX_ROWS 12
#elif VL == 8 || defined(__aarch64__)
#define MAX_ROWS 3
#else
#define MAX_ROWS 1
#endif

/* acc[m][v] = sum over k of x[m][k] * columns[k][v]; `stride` floats from row to row */
ALWAYS_INLINE void dot_tile_float(int rows, vf (*acc)[NV], const float *x, size_t stride, const float *columns, int K) {
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

/* The same over pairs; rows are padded to an even number of elements that read as 0. `stride` in elements. */
ALWAYS_INLINE void dot_tile_bf16(int rows, vf (*acc)[NV], const bf16_row_t *x, size_t stride, const bf16 *columns, int pairs) {
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
