// y = x W^T for few rows x: the weights are read once, as they are stored, and expanded to float32 tile by tile.
//
// A block is BLOCK outputs; its weights lie together, input by input, so that one load fills a vector with the weights
// of LANES outputs. Every output is one chain of multiply-adds over the inputs in ascending order: its bits depend
// neither on how many rows there are nor on how the work is split.
//
// For few rows reading the weights takes as long as multiplying with them, so the next CHUNK is fetched meanwhile: the
// processor's own prefetching does not reach that far, and never across pages.
//
// M rows, K inputs, N outputs. GCC's and Clang's vector types; AVX-512 where the machine has it.

#pragma once

#include <omp.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#ifdef __AVX512F__
enum { LANES = 16, WIDTH = 4 };  // 6 x 4 accumulators, 4 weights and a row's input fit 32 registers
#else
enum { LANES = 8, WIDTH = 2 };  // 6 x 2 accumulators, 2 weights and a row's input fit 16
#endif
enum { BLOCK = LANES * WIDTH, ROWS = 6, CHUNK = 64, GROUP = 32, PACK = 8, SLAB = 256, LINE = 64 };
enum format { FLOAT32, BFLOAT16, INT8, INT4 };

// What Python must know, or knows too: `build.py` compares.
#define SHOW(name, number) const int64_t name = number
#define SHOW_SIZE(name) SHOW(size_of_##name, sizeof(struct name))
SHOW(lanes, LANES);
SHOW(block_size, BLOCK);
SHOW(group_size, GROUP);
SHOW(pack_size, PACK);
SHOW(form_float32, FLOAT32);
SHOW(form_bfloat16, BFLOAT16);
SHOW(form_int8, INT8);
SHOW(form_int4, INT4);

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef int8_t bvec __attribute__((vector_size(LANES), aligned(1), may_alias));

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")
// In a register from here on; else GCC loads it anew for each use, and loads are what limits the loop.
#if defined(__AVX512F__)
#define KEEP(v) __asm__("" : "+v"(v))
#elif defined(__AVX2__)
#define KEEP(v) __asm__("" : "+x"(v))
#else
#define KEEP(v)
#endif

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Bytes of a block's weights. INT8: a group of GROUP inputs has its scales, then its weights. INT4: scales, offsets,
// then the weights, PACK inputs of an output in a word, the first in its lowest bits.
static int64_t block_bytes(enum format format, int64_t K) {
    switch (format) {
        case FLOAT32: return K * BLOCK * 4;
        case BFLOAT16: return K * BLOCK * 2;
        case INT8: return K / GROUP * (4 + GROUP) * BLOCK;
        default: return K / GROUP * (8 + GROUP / 2) * BLOCK;
    }
}

// LANES bytes as whole numbers. (GCC 12 takes them apart one by one if it is left to __builtin_convertvector.)
#if defined(__AVX512F__)
static ivec widen(const int8_t *p) { return (ivec)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)); }
#elif defined(__AVX2__)
static ivec widen(const int8_t *p) { return (ivec)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
#else
static ivec widen(const int8_t *p) { return __builtin_convertvector(*(const bvec *)p, ivec); }
#endif

// Of input k + j of a chunk, for vector p of the outputs. `j` is known to the compiler, k a multiple of PACK.
ALWAYS_INLINE vec weight(enum format format, const char *chunk, int64_t k, int j, int p) {
    if (format == FLOAT32) return ((const vec *)chunk)[(k + j) * WIDTH + p];
    const hvec *halves = (const hvec *)chunk + (k + j) * WIDTH;
    if (format == BFLOAT16) return (vec)(__builtin_convertvector(halves[p], ivec) << 16);
    const char *group = chunk + k / GROUP * block_bytes(format, GROUP);
    const vec *scale = (const vec *)group, *offset = scale + WIDTH;
    if (format == INT8) {
        const int8_t *q = (const int8_t *)offset + (k % GROUP + j) * BLOCK;
        return scale[p] * __builtin_convertvector(widen(q + p * LANES), vec);
    }
    const ivec *words = (const ivec *)(offset + WIDTH) + k % GROUP / PACK * WIDTH;
    return scale[p] * __builtin_convertvector((words[p] >> (4 * j)) & 15, vec) + offset[p];
}

// Into the second-level cache what is read CHUNK inputs after input k: as much as `count` inputs take.
ALWAYS_INLINE void fetch_ahead(enum format format, const char *chunk, int64_t k, int64_t count) {
    const int64_t bytes = block_bytes(format, GROUP) / GROUP;
    const char *ahead = chunk + block_bytes(format, CHUNK) + k * bytes;
    UNROLL for (int64_t i = 0; i < count * bytes; i += LINE) __builtin_prefetch(ahead + i, 0, 2);
}

// Which inputs a tile fetches for: every `of`-th step, from number `turn` on. So the tiles of a chunk can take turns.
struct turns {
    int64_t turn, of;
};

// sum[rows][BLOCK] += x[rows][depth] w[depth][BLOCK]; where `expanded` is not NULL it takes the weights as float32.
// The compiler knows `rows`, `format` and whether there are `turns` to fetch what lies behind them; else nothing is.
ALWAYS_INLINE void tile(int rows, enum format format, const struct turns *turns, const float *x, int64_t K,
                        const char *chunk, int64_t depth, float *expanded, float *sum) {
    const int step = format == INT4 ? PACK : 1;
    int64_t due = turns ? turns->turn : 0;
    // Flat loops, unrolled: only then do the compilers keep all sums in registers.
    vec s[ROWS * WIDTH];
    UNROLL for (int i = 0; i < rows * WIDTH; i++) s[i] = *(const vec *)(sum + i * LANES);
    for (int64_t k = 0; k < depth; k += step) {
        if (turns && due-- == 0) {
            fetch_ahead(format, chunk, k, step);
            due = turns->of - 1;
        }
        UNROLL for (int j = 0; j < step; j++) {
            vec wk[WIDTH];
            UNROLL for (int p = 0; p < WIDTH; p++) {
                wk[p] = weight(format, chunk, k, j, p);
                KEEP(wk[p]);
                if (expanded) *(vec *)(expanded + (k + j) * BLOCK + p * LANES) = wk[p];
            }
            UNROLL for (int i = 0; i < rows * WIDTH; i++) s[i] = s[i] + x[i / WIDTH * K + k + j] * wk[i % WIDTH];
        }
    }
    UNROLL for (int i = 0; i < rows * WIDTH; i++) *(vec *)(sum + i * LANES) = s[i];
}

#define TILE_OF(name, format, fetches)                                                                                \
    static void name(int64_t rows, const struct turns *turns, const float *x, int64_t K, const char *chunk,           \
                     int64_t depth, float *expanded, float *sum) {                                                    \
        const struct turns *some = fetches ? turns : NULL;                                                            \
        switch (rows) {                                                                                               \
            case 1: tile(1, format, some, x, K, chunk, depth, expanded, sum); break;                                  \
            case 2: tile(2, format, some, x, K, chunk, depth, expanded, sum); break;                                  \
            case 3: tile(3, format, some, x, K, chunk, depth, expanded, sum); break;                                  \
            case 4: tile(4, format, some, x, K, chunk, depth, expanded, sum); break;                                  \
            case 5: tile(5, format, some, x, K, chunk, depth, expanded, sum); break;                                  \
            default: tile(ROWS, format, some, x, K, chunk, depth, expanded, sum);                                     \
        }                                                                                                             \
    }
TILE_OF(tile_float32, FLOAT32, 1)
TILE_OF(tile_bfloat16, BFLOAT16, 1)
TILE_OF(tile_int8, INT8, 1)
TILE_OF(tile_int4, INT4, 1)
TILE_OF(tile_again, FLOAT32, 0)

// sum[rows][BLOCK] += x[rows][depth] times the weights of a chunk, in tiles of as even sizes as can be. The first one
// expands the weights for the others, and fetches what is read next; of float32 there is so much that all take turns.
static void multiply(enum format format, const float *x, int64_t rows, int64_t K, const char *chunk, int64_t depth,
                     float *sum) {
    float buffer[CHUNK * BLOCK] __attribute__((aligned(64)));
    int64_t num_tiles = (rows + ROWS - 1) / ROWS;
    float *expanded = num_tiles == 1 ? NULL : buffer;
    struct turns turns = {0, format == FLOAT32 ? num_tiles : 1};
    for (; turns.turn < num_tiles; turns.turn++) {
        int64_t n = rows / num_tiles + (turns.turn < rows % num_tiles);
        if (format == FLOAT32) tile_float32(n, &turns, x, K, chunk, depth, NULL, sum);
        else if (turns.turn > 0) tile_again(n, &turns, x, K, (const char *)buffer, depth, NULL, sum);
        else if (format == BFLOAT16) tile_bfloat16(n, &turns, x, K, chunk, depth, expanded, sum);
        else if (format == INT8) tile_int8(n, &turns, x, K, chunk, depth, expanded, sum);
        else tile_int4(n, &turns, x, K, chunk, depth, expanded, sum);
        x += n * K, sum += n * BLOCK;
    }
}

// Of y[M][N] = x[M][K] W^T the rows `from` to `to`, for the outputs of block b.
static void one_block(enum format format, const float *x, int64_t from, int64_t to, int64_t K, int64_t N,
                      const char *weights, int64_t b, float *y) {
    const char *block = weights + b * block_bytes(format, K);
    float sum[SLAB * BLOCK] __attribute__((aligned(64)));
    for (int64_t m = from; m < to; m += SLAB) {
        int64_t rows = least(to - m, SLAB), width = least(N - b * BLOCK, BLOCK);
        memset(sum, 0, rows * BLOCK * sizeof(float));
        for (int64_t k = 0; k < K; k += CHUNK)
            multiply(format, x + m * K + k, rows, K, block + block_bytes(format, k), least(K - k, CHUNK), sum);
        for (int64_t r = 0; r < rows; r++)
            memcpy(y + (m + r) * N + b * BLOCK, sum + r * BLOCK, width * sizeof(float));
    }
}

// y[M][N] = x[M][K] W^T. `weights`: ceil(N / BLOCK) blocks. K is a multiple of GROUP in the grouped formats.
void linear(int64_t format, const float *x, int64_t M, int64_t K, int64_t N, const char *weights, float *y) {
    int64_t num_blocks = (N + BLOCK - 1) / BLOCK, threads = omp_get_max_threads();
    // Each thread takes as many blocks. Of what is left over each takes some of the rows, unless there are too few of
    // them to be worth reading the weights twice.
    int64_t whole = num_blocks - num_blocks % threads, parts = M < 2 * threads ? 1 : threads;
#pragma omp parallel
    {
#pragma omp for schedule(static) nowait
        for (int64_t b = 0; b < whole; b++) one_block(format, x, 0, M, K, N, weights, b, y);
#pragma omp for schedule(static)
        for (int64_t u = 0; u < (num_blocks - whole) * parts; u++) {
            int64_t part = u % parts;
            one_block(format, x, part * M / parts, (part + 1) * M / parts, K, N, weights, whole + u / parts, y);
        }
    }
}
