/* The weighted sum of values of paged attention (attention.c). */
#pragma once
#include <stdint.h>

#include "simd.h"

/* Rows times vectors held in registers while values are summed up */
#if VL == 16
#define SUM_ROWS 6
#define SUM_VECTORS 4
#elif VL == 8
#define SUM_ROWS 3
#define SUM_VECTORS 4
#elif defined(__aarch64__)
#define SUM_ROWS 3
#define SUM_VECTORS 8
#else
#define SUM_ROWS 1
#define SUM_VECTORS 8
#endif

/* The arguments of a sum of values that do not change within a tile */
typedef struct {
    const char *cache; /* of the head */
    const int64_t *offsets;
    const float *weights; /* rows of weight_stride */
    int64_t weight_stride;
    float *out; /* rows of padded_dim */
    int64_t head_dim, padded_dim;
    int is_float;
    /* The rows of the same head that are wanted next: next_step of them are prefetched at each position from next_begin
     * on */
    const char *next_keys, *next_values;
    const int64_t *next_offsets;
    int next_begin, next_step, next_count;
} ValueSum;

/* The values of positions first .. first + num - 1, num even, as amx_add_values reads them; bf16, head_dim a multiple of
 * 32. The rows wanted next are prefetched by the way. */
void pack_values(const ValueSum *sum, int first, int num, bf16 *packed);

/* out[row + m] += sum over low <= j < high of weights[row + m][j] * value j, for m < rows <= SUM_ROWS, in the order of
 * j: one chain of additions for each element of out, whatever `rows` is. */
void sum_block(const ValueSum *sum, int64_t rows, int64_t row, int low, int high);
