/* The inner product shared by linear layers and attention scores: a few rows of x against a block of packed columns.
 *
 * A packed block holds NB = 32 columns (outputs of a linear layer, keys of an attention block) side by side:
 *   float: [K][NB]                 bf16: [ceil(K / 2)][NB][2], two neighbouring k in one 32-bit lane
 * Lanes run over the columns and k runs in order, so each output is one chain of additions over k = 0, 1, 2, ... in one
 * accumulator. Nothing about the chain depends on the number of rows of the tile, which is what makes the result of a
 * row independent of the other rows. The tile's rows times its vectors are independent chains and hide their latency.
 *
 * bf16 products are exact in fp32. With AVX-512-BF16 a lane adds its two products of a pair in one instruction;
 * without, rows come as floats (`bf16_row_t`) and the pair is two fused multiply-adds.
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

/* out[m][column] = sum over k < K of x[m][k] * columns[k][column], for 1 <= rows <= MAX_ROWS and NB columns.
 *
 * x: rows of float, or of bf16_row_t padded to an even number of elements that read as 0; strides in elements. */
void dot_tile(const void *x, size_t stride, int rows, const void *columns, int K, int is_float, float *out,
              size_t out_stride);
