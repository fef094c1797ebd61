/* See value_sum.h. One instance for each number of rows and type, so that the accumulators are registers. */
#include "value_sum.h"

/* Blocks lie scattered, out of reach of the CPU's own prefetching. A few positions are fetched into the L2 cache for
 * each that is summed up, so that memory is read while there is something to compute. */
ALWAYS_INLINE void prefetch_positions(const ValueSum *sum, int j) {
    int64_t bytes = sum->head_dim * (sum->is_float ? 4 : 2);
    for (int next = j * sum->next_step; next < (j + 1) * sum->next_step && next < sum->next_count; next++) {
        for (int64_t i = 0; i < bytes; i += 64) {
            __builtin_prefetch(sum->next_keys + sum->next_offsets[next] + i, 0, 2);
            __builtin_prefetch(sum->next_values + sum->next_offsets[next] + i, 0, 2);
        }
    }
}

void pack_values(const ValueSum *sum, int first, int num, bf16 *packed) {
    int64_t D = sum->head_dim;
    for (int j = first; j < first + num; j += 2, packed += 2 * D) {
        const bf16 *even = (const bf16 *)(sum->cache + sum->offsets[j]);
        const bf16 *odd = (const bf16 *)(sum->cache + sum->offsets[j + 1]);
        if (j >= sum->next_begin) {
            prefetch_positions(sum, j);
            prefetch_positions(sum, j + 1);
        }
        for (int64_t d = 0; d < D; d += VL) {
            vh lower, upper;
            memcpy(&lower, even + d, sizeof lower);
            memcpy(&upper, odd + d, sizeof upper);
            vu pair = v_widen(lower) | (v_widen(upper) << 16);
            memcpy(packed + 2 * d, &pair, sizeof pair);
        }
    }
}

/* out[row + m] += sum over low <= j < high of weight[row + m][j] * value[j], for `vectors` vectors from dimension d */
ALWAYS_INLINE void sum_vectors(const ValueSum *sum, int is_float, int rows, int vectors, int64_t row, int64_t d,
                               int low, int high) {
    vf acc[SUM_ROWS][SUM_VECTORS];
    int64_t padded_dim = sum->padded_dim, weight_stride = sum->weight_stride;
    float *out = sum->out + row * padded_dim + d;
    const float *weights = sum->weights + row * weight_stride;
    int lanes = vectors > 1 ? VL : lanes_left(d, sum->head_dim);
    UNROLL
    for (int m = 0; m < rows; m++) UNROLL
    for (int v = 0; v < vectors; v++) acc[m][v] = v_load(out + m * padded_dim + v * VL);
    for (int j = low; j < high; j++) {
        vf value[SUM_VECTORS];
        if (d == 0 && j >= sum->next_begin) prefetch_positions(sum, j);
        UNROLL
        for (int v = 0; v < vectors; v++)
            value[v] = v_load_any(sum->cache + sum->offsets[j], d + v * VL, lanes, is_float);
        UNROLL
        for (int m = 0; m < rows; m++) {
            vf weight = v_set1(weights[m * weight_stride + j]);
            UNROLL
            for (int v = 0; v < vectors; v++) acc[m][v] = v_fma(weight, value[v], acc[m][v]);
        }
    }
    UNROLL
    for (int m = 0; m < rows; m++) UNROLL
    for (int v = 0; v < vectors; v++) v_store(out + m * padded_dim + v * VL, acc[m][v]);
}

ALWAYS_INLINE void sum_dimensions(const ValueSum *sum, int is_float, int rows, int64_t row, int low, int high) {
    int64_t d = 0;
    for (; d + SUM_VECTORS * VL <= sum->head_dim; d += SUM_VECTORS * VL)
        sum_vectors(sum, is_float, rows, SUM_VECTORS, row, d, low, high);
    for (; d < sum->head_dim; d += VL) sum_vectors(sum, is_float, rows, 1, row, d, low, high);
}

#define CASE(R)                                        \
    case R:                                            \
        if (sum->is_float)                             \
            sum_dimensions(sum, 1, R, row, low, high); \
        else                                           \
            sum_dimensions(sum, 0, R, row, low, high); \
        break;

void sum_block(const ValueSum *sum, int64_t rows, int64_t row, int low, int high) {
    if (low >= high) return;
    switch (rows) {
        CASE(1)
#if SUM_ROWS >= 3
        CASE(2)
        CASE(3)
#endif
#if SUM_ROWS >= 6
            CASE(4) CASE(5) CASE(6)
#endif
    }
}
