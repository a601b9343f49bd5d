// y = x W^T for few rows x: the weights are read once, as they are stored, and expanded to float32 tile by tile.
//
// A block is BLOCK outputs; its weights lie together, input by input, so that one load fills a vector with the weights
// of LANES outputs. Every output is one chain of multiply-adds over the inputs in ascending order: its bits depend
// neither on how many rows there are nor on how the work is split.
//
// M rows, K inputs, N outputs. GCC's and Clang's vector types; AVX-512 where the machine has it.

#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#ifdef __AVX512F__
enum { LANES = 16, WIDTH = 4 };  // 4 x 4 accumulators, 4 weights and a row's input fit 32 registers
#else
enum { LANES = 8, WIDTH = 2 };  // 4 x 2 accumulators and 2 weights fit 16
#endif
enum { BLOCK = LANES * WIDTH, ROWS = 4, CHUNK = 64, GROUP = 32, SLAB = 256 };
enum format { FLOAT32, BFLOAT16, INT8, INT4 };

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef int8_t bvec __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef uint8_t ubvec __attribute__((vector_size(LANES), aligned(1), may_alias));

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

int64_t block_size(void) { return BLOCK; }
int64_t lanes(void) { return LANES; }

// Bytes of a block's weights. INT8: a group of GROUP inputs has its scales, then its weights. INT4: scales, offsets,
// then the weights, where a byte has output i in its low and output i + BLOCK / 2 in its high half.
static int64_t block_bytes(enum format format, int64_t K) {
    switch (format) {
        case FLOAT32: return K * BLOCK * 4;
        case BFLOAT16: return K * BLOCK * 2;
        case INT8: return K / GROUP * (4 + GROUP) * BLOCK;
        default: return K / GROUP * (8 + GROUP / 2) * BLOCK;
    }
}

static void expand_bfloat16(const uint16_t *w, int64_t depth, float *out) {
    for (int64_t i = 0; i < depth * BLOCK; i += LANES) {
        ivec bits = __builtin_convertvector(*(const hvec *)(w + i), ivec) << 16;
        memcpy(out + i, &bits, sizeof bits);
    }
}

// LANES bytes as whole numbers. (GCC 12 takes them apart one by one if it is left to __builtin_convertvector.)
#if defined(__AVX512F__)
static ivec widen(const int8_t *p) { return (ivec)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)); }
static ivec widen_unsigned(const uint8_t *p) { return (ivec)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }
#elif defined(__AVX2__)
static ivec widen(const int8_t *p) { return (ivec)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
static ivec widen_unsigned(const uint8_t *p) { return (ivec)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
#else
static ivec widen(const int8_t *p) { return __builtin_convertvector(*(const bvec *)p, ivec); }
static ivec widen_unsigned(const uint8_t *p) { return __builtin_convertvector(*(const ubvec *)p, ivec); }
#endif

static void expand_int8(const char *group, float *out) {
    const float *scale = (const float *)group;
    const int8_t *q = (const int8_t *)(group + 4 * BLOCK);
    for (int k = 0; k < GROUP; k++)
        for (int n = 0; n < BLOCK; n += LANES) {
            vec value = __builtin_convertvector(widen(q + k * BLOCK + n), vec);
            *(vec *)(out + k * BLOCK + n) = *(const vec *)(scale + n) * value;
        }
}

static void expand_int4(const char *group, float *out) {
    const float *scale = (const float *)group, *offset = scale + BLOCK;
    const uint8_t *q = (const uint8_t *)(group + 8 * BLOCK);
    for (int k = 0; k < GROUP; k++)
        for (int n = 0; n < BLOCK / 2; n += LANES) {
            ivec pair = widen_unsigned(q + k * BLOCK / 2 + n);
            vec low = __builtin_convertvector(pair & 15, vec), high = __builtin_convertvector(pair >> 4, vec);
            int h = n + BLOCK / 2;
            *(vec *)(out + k * BLOCK + n) = *(const vec *)(scale + n) * low + *(const vec *)(offset + n);
            *(vec *)(out + k * BLOCK + h) = *(const vec *)(scale + h) * high + *(const vec *)(offset + h);
        }
}

// The weights of inputs k .. k + depth of a block as float32 [depth][BLOCK], in `out` or where they lie.
static const float *expand(enum format format, const char *block, int64_t k, int64_t depth, float *out) {
    if (format == FLOAT32) return (const float *)block + k * BLOCK;
    if (format == BFLOAT16) {
        expand_bfloat16((const uint16_t *)block + k * BLOCK, depth, out);
        return out;
    }
    for (int64_t g = k / GROUP; g < (k + depth) / GROUP; g++) {
        const char *group = block + g * block_bytes(format, GROUP);
        float *there = out + (g * GROUP - k) * BLOCK;
        if (format == INT8) expand_int8(group, there);
        else expand_int4(group, there);
    }
    return out;
}

// sum[rows][BLOCK] += x[rows][depth] w[depth][BLOCK]; `rows` is known to the compiler.
ALWAYS_INLINE void tile(int rows, const float *x, int64_t K, const float *w, int64_t depth, float *sum) {
    // Flat loops, unrolled: only then do the compilers keep all sums in registers.
    vec s[ROWS * WIDTH];
    UNROLL for (int i = 0; i < rows * WIDTH; i++) s[i] = *(const vec *)(sum + i * LANES);
    for (int64_t k = 0; k < depth; k++) {
        vec wk[WIDTH];
        UNROLL for (int p = 0; p < WIDTH; p++) {
            wk[p] = *(const vec *)(w + k * BLOCK + p * LANES);
            KEEP(wk[p]);
        }
        UNROLL for (int i = 0; i < rows * WIDTH; i++) s[i] = s[i] + x[i / WIDTH * K + k] * wk[i % WIDTH];
    }
    UNROLL for (int i = 0; i < rows * WIDTH; i++) *(vec *)(sum + i * LANES) = s[i];
}

static void tiles(int64_t rows, const float *x, int64_t K, const float *w, int64_t depth, float *sum) {
    for (; rows >= 4; rows -= 4, x += 4 * K, sum += 4 * BLOCK) tile(4, x, K, w, depth, sum);
    if (rows == 3) tile(3, x, K, w, depth, sum);
    if (rows == 2) tile(2, x, K, w, depth, sum);
    if (rows == 1) tile(1, x, K, w, depth, sum);
}

// y[M][N] = x[M][K] W^T. `weights`: ceil(N / BLOCK) blocks. K is a multiple of GROUP in the grouped formats.
void linear(int64_t format, const float *x, int64_t M, int64_t K, int64_t N, const char *weights, float *y) {
    int64_t num_blocks = (N + BLOCK - 1) / BLOCK, bytes = block_bytes(format, K);
#pragma omp parallel for schedule(static)
    for (int64_t b = 0; b < num_blocks; b++) {
        float buffer[CHUNK * BLOCK] __attribute__((aligned(64))), sum[SLAB * BLOCK] __attribute__((aligned(64)));
        int64_t width = N - b * BLOCK < BLOCK ? N - b * BLOCK : BLOCK;
        for (int64_t m = 0; m < M; m += SLAB) {
            int64_t rows = M - m < SLAB ? M - m : SLAB;
            memset(sum, 0, rows * BLOCK * sizeof(float));
            for (int64_t k = 0; k < K; k += CHUNK) {
                int64_t depth = K - k < CHUNK ? K - k : CHUNK;
                const float *w = expand(format, weights + b * bytes, k, depth, buffer);
                tiles(rows, x + m * K + k, K, w, depth, sum);
            }
            for (int64_t r = 0; r < rows; r++)
                memcpy(y + (m + r) * N + b * BLOCK, sum + r * BLOCK, width * sizeof(float));
        }
    }
}
