/* See amx_tile.h. */
#define _GNU_SOURCE
#include "amx_tile.h"

#include <stdlib.h>

#include "dot_tile.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)

#include <sys/syscall.h>
#include <unistd.h>

enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18, NUM_REGISTERS = 8, TILE_ROWS = 16, TILE_BYTES = 64 };
enum { COLUMN_BYTES = 2 * TILE_BYTES }; /* from a pair of k to the next in a packed block */

/* The registers' numbers, which become part of an instruction's text. Sums are of rows first (top) and last (bottom) by
 * columns first (left) and last (right). */
#define TOP_LEFT 0
#define TOP_RIGHT 1
#define BOTTOM_LEFT 2
#define BOTTOM_RIGHT 3
#define TOP 4
#define BOTTOM 5
#define LEFT 6
#define RIGHT 7

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_a_row[16];
    uint8_t rows[16];
} TileShapes;

void amx_begin(int *rows_set) { *rows_set = 0; }

void amx_end(void) { _tile_release(); }

static void set_rows(int top, int bottom, int *rows_set) {
    __asm__ volatile("" ::: "memory"); /* tile loads do not say that they read: what is stored before them stays so */
    if (*rows_set == top + (bottom << 8)) return;
    *rows_set = top + (bottom << 8);
    TileShapes shapes = {.palette = 1};
    for (int i = 0; i < NUM_REGISTERS; i++) shapes.bytes_a_row[i] = TILE_BYTES, shapes.rows[i] = TILE_ROWS;
    shapes.rows[TOP_LEFT] = shapes.rows[TOP_RIGHT] = shapes.rows[TOP] = (uint8_t)top;
    shapes.rows[BOTTOM_LEFT] = shapes.rows[BOTTOM_RIGHT] = shapes.rows[BOTTOM] = (uint8_t)(bottom ? bottom : 1);
    __asm__ volatile("" : : "r"(&shapes) : "memory"); /* the next line's header tells the compiler of 8 bytes only */
    _tile_loadconfig(&shapes);
}

/* At most 16 rows: half of the registers lie idle. */
static void dot_few(const bf16 *x, size_t row_bytes, const bf16 *columns, int K, float *out, size_t out_bytes) {
    _tile_zero(TOP_LEFT);
    _tile_zero(TOP_RIGHT);
    for (int k = 0; k < K; k += AMX_DEPTH) {
        const bf16 *rows = x + k, *left = columns + (size_t)k * NB, *right = left + NB;
        _tile_loadd(TOP, rows, row_bytes);
        _tile_loadd(LEFT, left, COLUMN_BYTES);
        _tile_dpbf16ps(TOP_LEFT, TOP, LEFT);
        _tile_loadd(RIGHT, right, COLUMN_BYTES);
        _tile_dpbf16ps(TOP_RIGHT, TOP, RIGHT);
    }
    float *out_right = out + NB / 2;
    _tile_stored(TOP_LEFT, out, out_bytes);
    _tile_stored(TOP_RIGHT, out_right, out_bytes);
}

static void dot_many(const bf16 *x, size_t row_bytes, const bf16 *columns, int K, float *out, size_t out_bytes) {
    const bf16 *below = (const bf16 *)((const char *)x + TILE_ROWS * row_bytes);
    _tile_zero(TOP_LEFT);
    _tile_zero(TOP_RIGHT);
    _tile_zero(BOTTOM_LEFT);
    _tile_zero(BOTTOM_RIGHT);
    for (int k = 0; k < K; k += AMX_DEPTH) {
        const bf16 *top = x + k, *bottom = below + k, *left = columns + (size_t)k * NB, *right = left + NB;
        _tile_loadd(LEFT, left, COLUMN_BYTES);
        _tile_loadd(TOP, top, row_bytes);
        _tile_dpbf16ps(TOP_LEFT, TOP, LEFT);
        _tile_loadd(RIGHT, right, COLUMN_BYTES);
        _tile_dpbf16ps(TOP_RIGHT, TOP, RIGHT);
        _tile_loadd(BOTTOM, bottom, row_bytes);
        _tile_dpbf16ps(BOTTOM_LEFT, BOTTOM, LEFT);
        _tile_dpbf16ps(BOTTOM_RIGHT, BOTTOM, RIGHT);
    }
    float *out_right = out + NB / 2, *out_below = (float *)((char *)out + TILE_ROWS * out_bytes);
    float *out_corner = out_below + NB / 2;
    _tile_stored(TOP_LEFT, out, out_bytes);
    _tile_stored(TOP_RIGHT, out_right, out_bytes);
    _tile_stored(BOTTOM_LEFT, out_below, out_bytes);
    _tile_stored(BOTTOM_RIGHT, out_corner, out_bytes);
}

void amx_dot_tile(const bf16 *x, size_t stride, int rows, const bf16 *columns, int K, float *out, size_t out_stride,
                  int *rows_set) {
    int top = rows < TILE_ROWS ? rows : TILE_ROWS;
    set_rows(top, rows - top, rows_set);
    (rows > TILE_ROWS ? dot_many : dot_few)(x, stride * sizeof(bf16), columns, K, out, out_stride * sizeof(float));
}

void amx_add_values(const bf16 *high, const bf16 *low, size_t stride, int rows, const bf16 *values, int D, float *out,
                    size_t out_stride, int *rows_set) {
    size_t weight_bytes = stride * sizeof(bf16), value_bytes = (size_t)D * 2 * sizeof(bf16);
    size_t out_bytes = out_stride * sizeof(float);
    set_rows(rows, rows, rows_set);
    _tile_loadd(TOP, high, weight_bytes);
    _tile_loadd(BOTTOM, low, weight_bytes);
    for (int d = 0; d < D; d += NB) {
        const bf16 *left = values + 2 * d, *right = left + NB;
        float *out_left = out + d, *out_right = out_left + NB / 2;
        _tile_loadd(TOP_LEFT, out_left, out_bytes);
        _tile_loadd(TOP_RIGHT, out_right, out_bytes);
        _tile_loadd(LEFT, left, value_bytes);
        _tile_dpbf16ps(TOP_LEFT, TOP, LEFT);
        _tile_dpbf16ps(TOP_LEFT, BOTTOM, LEFT);
        _tile_loadd(RIGHT, right, value_bytes);
        _tile_dpbf16ps(TOP_RIGHT, TOP, RIGHT);
        _tile_dpbf16ps(TOP_RIGHT, BOTTOM, RIGHT);
        _tile_stored(TOP_LEFT, out_left, out_bytes);
        _tile_stored(TOP_RIGHT, out_right, out_bytes);
    }
}

/* Small integers, whose products and sums are exact: a toolchain that gets tiles wrong does so without a word. */
static int multiplies_rightly(void) {
    enum { M = AMX_ROWS, K = 2 * AMX_DEPTH };
    bf16 x[M * K], columns[K * NB];
    float out[M * NB];
    int rows_set;
    for (int m = 0; m < M; m++)
        for (int k = 0; k < K; k++) x[m * K + k] = float_to_bf16((float)((m + 3 * k) % 7 - 3));
    for (int k = 0; k < K; k++)
        for (int n = 0; n < NB; n++) columns[(k / 2 * NB + n) * 2 + k % 2] = float_to_bf16((float)((2 * k + n) % 5 - 2));
    for (int rows = M; rows >= TILE_ROWS; rows -= TILE_ROWS) {
        amx_begin(&rows_set);
        amx_dot_tile(x, K, rows, columns, K, out, NB, &rows_set);
        amx_end();
        for (int m = 0; m < rows; m++) {
            for (int n = 0; n < NB; n++) {
                int sum = 0;
                for (int k = 0; k < K; k++) sum += ((m + 3 * k) % 7 - 3) * ((2 * k + n) % 5 - 2);
                if (out[m * NB + n] != (float)sum) return 0;
            }
        }
    }
    return 1;
}

int has_amx(void) {
    static int answer = -1; /* threads that ask at once find the same */
    int known = __atomic_load_n(&answer, __ATOMIC_RELAXED);
    if (known >= 0) return known;
    const char *forbidden = getenv("FORERUN_NO_AMX");
    known = !(forbidden && strcmp(forbidden, "1") == 0) &&
            syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 && multiplies_rightly();
    __atomic_store_n(&answer, known, __ATOMIC_RELAXED);
    return known;
}

#else

int has_amx(void) { return 0; }
void amx_begin(int *rows_set) { (void)rows_set; }
void amx_end(void) {}
void amx_dot_tile(const bf16 *x, size_t stride, int rows, const bf16 *columns, int K, float *out, size_t out_stride,
                  int *rows_set) {
    (void)x, (void)stride, (void)rows, (void)columns, (void)K, (void)out, (void)out_stride, (void)rows_set;
}
void amx_add_values(const bf16 *high, const bf16 *low, size_t stride, int rows, const bf16 *values, int D, float *out,
                    size_t out_stride, int *rows_set) {
    (void)high, (void)low, (void)stride, (void)rows, (void)values, (void)D, (void)out, (void)out_stride, (void)rows_set;
}

#endif
