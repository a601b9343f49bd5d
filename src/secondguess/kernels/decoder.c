// The layers of a Llama-shaped decoder over the rows of a pass, in float32 and in place, with K/V in a slot cache.
//
// A row's result is the same bits whatever other rows there are: sums run in an order that the row alone fixes. In
// attention that is the columns it sees, in ascending order, which is the order of their positions, for a node of a
// tree as for the same token in plain decoding.
//
// R requests, N rows of each, M = R N, H hidden size, A query heads, G K/V heads, D head dimension, I intermediate
// size, C columns of a slot, W of which may be seen.

#include <math.h>
#include <stdlib.h>

#include "linear.c"

enum {
    FEW_ROWS = 16,  // not worth waking the other threads for what is done to each row
    MOST_VECTORS = 32,  // head dimensions up to 32 LANES
    MOST_SUMS = 16,  // that registers hold beside what they are made of
};

struct weights {
    int64_t form, inputs, outputs;
    const char *packed;
    const float *bias;  // or NULL
};

struct layer {
    struct weights qkv, o, gate_up, down;
    const float *input_norm, *post_norm, *q_norm, *k_norm;  // the last two or NULL
    const float *hidden_norm;  // of a drafter's first layer, which attends by embedding and state side by side; or NULL
    float eps;
};

struct pass {
    int64_t R, N, H, A, G, D, I, C, W;
    const int64_t *slots;  // [R]
    const int64_t *columns;  // [M]
    const float *cos, *sin;  // [M][D]; the sine's first half is negated
    float *x;  // [M][H], in and out
    const float *e;  // [M][H], for layers with a hidden_norm
    float *scratch;  // scratch_size floats
    float scale;
};

// What a layer has of its own in a pass.
struct place {
    float *k, *v;  // [slots][G][C][D]
    const uint8_t *visible;  // [M][W]
    float *tap;  // [M][H]: its input is copied here, or NULL
};

static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

int64_t scratch_size(int64_t M, int64_t H, int64_t A, int64_t G, int64_t D, int64_t I) {
    return M * (most(most(2 * H, A * D), I) + H + most((A + 2 * G) * D, 2 * I));
}

// Lanes are added to each other by halves.
static float total(vec v) {
    float a[LANES];
    memcpy(a, &v, sizeof v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) a[i] += a[i + half];
    return a[0];
}

static float dot(const float *a, const float *b, int64_t n) {
    vec sum = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) sum = sum + *(const vec *)(a + i) * *(const vec *)(b + i);
    float rest = total(sum);
    for (; i < n; i++) rest += a[i] * b[i];
    return rest;
}

// Lanes of two vectors side by side, by runs of so many: the first of each two runs, and the second.
#ifdef __AVX512F__
#define FIRST_8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define SECOND_8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#define FIRST_4 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27
#define SECOND_4 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31
#define FIRST_2 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29
#define SECOND_2 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31
#define FIRST_1 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define SECOND_1 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#else
#define FIRST_4 0, 1, 2, 3, 8, 9, 10, 11
#define SECOND_4 4, 5, 6, 7, 12, 13, 14, 15
#define FIRST_2 0, 1, 4, 5, 8, 9, 12, 13
#define SECOND_2 2, 3, 6, 7, 10, 11, 14, 15
#define FIRST_1 0, 2, 4, 6, 8, 10, 12, 14
#define SECOND_1 1, 3, 5, 7, 9, 11, 13, 15
#endif
#define ADD_RUNS(n, first, second)  \
    UNROLL for (int i = 0; i < n; i++) \
        v[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], first) + \
               __builtin_shufflevector(v[2 * i], v[2 * i + 1], second);

// The total of each of LANES vectors, with the bits of `total`.
ALWAYS_INLINE vec totals(vec *v) {
#ifdef __AVX512F__
    ADD_RUNS(8, FIRST_8, SECOND_8)
#endif
    ADD_RUNS(4, FIRST_4, SECOND_4)
    ADD_RUNS(2, FIRST_2, SECOND_2)
    ADD_RUNS(1, FIRST_1, SECOND_1)
    return v[0];
}

static vec smaller(vec a, vec b) {
    ivec less = (ivec)(a < b);
    return (vec)(((ivec)a & less) | ((ivec)b & ~less));
}

// Within 2 units of the last place. Below -87 it stays at e^-87, which is as good as 0 beside 1.
static vec exponential(vec x) {
    const vec zero = {0};
    x = smaller(-smaller(-x, zero + 87.f), zero + 88.f);
    vec n = x * 1.44269504f + 12582912.f;  // the addend rounds to whole numbers
    ivec bits = (ivec)n;
    n = n - 12582912.f;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.f;
    return p * (vec)((bits - 0x4B400000 + 127) << 23);
}

static void rms_norm(const float *x, const float *weight, int64_t n, float eps, float *y) {
    float factor = 1.f / sqrtf(dot(x, x, n) / n + eps);
    for (int64_t i = 0; i < n; i++) y[i] = weight[i] * (x[i] * factor);
}

// y[M][H] = norm(x), in rows of `stride`.
static void norm_rows(const struct pass *p, const float *x, const float *weight, float eps, int64_t stride, float *y) {
    int64_t M = p->R * p->N;
#pragma omp parallel for schedule(static) if (M > FEW_ROWS)
    for (int64_t m = 0; m < M; m++) rms_norm(x + m * p->H, weight, p->H, eps, y + m * stride);
}

static void apply(const struct weights *w, const float *x, int64_t M, float *y) {
    linear(w->form, x, M, w->inputs, w->outputs, w->packed, y);
    if (w->bias)
        for (int64_t m = 0; m < M; m++)
            for (int64_t n = 0; n < w->outputs; n++) y[m * w->outputs + n] += w->bias[n];
}

// x += W y
static void add_applied(const struct pass *p, const struct weights *w, const float *y, float *product) {
    int64_t M = p->R * p->N;
    apply(w, y, M, product);
    for (int64_t i = 0; i < M * p->H; i++) p->x[i] += product[i];
}

// Half-split rotary embedding: y[i] = x[i] cos[i] + x[i + D / 2] sin[i].
static void rotate(float *x, const float *cos, const float *sin, int64_t D, float *y) {
    int64_t half = D / 2;
    for (int64_t i = 0; i < half; i++) y[i] = x[i] * cos[i] + x[i + half] * sin[i];
    for (int64_t i = half; i < D; i++) y[i] = x[i] * cos[i] + x[i - half] * sin[i];
}

// Norms and rotates q and k of a row, and stores k and v in its column. q stays in `qkv`.
static void place_row(const struct layer *l, const struct pass *p, const struct place *at, int64_t m, float *qkv) {
    int64_t D = p->D;
    float turned[D];
    const float *cos = p->cos + m * D, *sin = p->sin + m * D;
    for (int64_t a = 0; a < p->A; a++) {
        float *q = qkv + a * D;
        if (l->q_norm) rms_norm(q, l->q_norm, D, l->eps, q);
        rotate(q, cos, sin, D, turned);
        memcpy(q, turned, D * sizeof(float));
    }
    for (int64_t g = 0; g < p->G; g++) {
        float *k = qkv + (p->A + g) * D, *v = qkv + (p->A + p->G + g) * D;
        int64_t i = ((p->slots[m / p->N] * p->G + g) * p->C + p->columns[m]) * D;
        if (l->k_norm) rms_norm(k, l->k_norm, D, l->eps, k);
        rotate(k, cos, sin, D, at->k + i);
        memcpy(at->v + i, v, D * sizeof(float));
    }
}

// One query over the `n` columns in `seen`, the last of which is there LANES times more: weight[n] = e^(score - best
// score), and their sum. `vectors` is D / LANES, known to the compiler.
ALWAYS_INLINE float weigh(int vectors, const float *q, const float *k, const int64_t *seen, int64_t n, float scale,
                          float *weight) {
    vec best = (vec){0} - INFINITY, sum = {0};
    for (int64_t i = 0; i < n; i += LANES) {
        vec sums[LANES] = {{0}};
        UNROLL for (int c = 0; c < LANES; c++) {
            const float *row = k + seen[i + c] * vectors * LANES;
            for (int d = 0; d < vectors; d++)
                sums[c] = sums[c] + *(const vec *)(q + d * LANES) * *(const vec *)(row + d * LANES);
        }
        vec score = totals(sums) * scale;
        *(vec *)(weight + i) = score;
        best = -smaller(-best, -score);
    }
    float highest = best[0];
    for (int i = 1; i < LANES; i++)
        if (best[i] > highest) highest = best[i];
    for (int64_t i = 0; i < n; i += LANES) *(vec *)(weight + i) = exponential(*(const vec *)(weight + i) - highest);
    memset(weight + n, 0, LANES * sizeof *weight);
    for (int64_t i = 0; i < n; i += LANES) sum = sum + *(const vec *)(weight + i);
    return total(sum);
}

// out[heads][D] = sum of weight[i] v[seen[i]] / sum[head], for weights in rows of `stride`. Heads share the loads of v.
ALWAYS_INLINE void average(int vectors, int heads, const float *weight, int64_t stride, const float *v,
                           const int64_t *seen, int64_t n, const float *sum, float *out) {
    vec acc[MOST_VECTORS] = {{0}};
    for (int64_t i = 0; i < n; i++) {
        const float *row = v + seen[i] * vectors * LANES;
        UNROLL for (int j = 0; j < heads * vectors; j++)
            acc[j] = acc[j] + weight[j / vectors * stride + i] * *(const vec *)(row + j % vectors * LANES);
    }
    UNROLL for (int j = 0; j < heads * vectors; j++) *(vec *)(out + j * LANES) = acc[j] / sum[j / vectors];
}

// Of one row, the query heads of a group.
ALWAYS_INLINE void attend_group(int vectors, const struct pass *p, const struct place *at, int64_t m, int64_t g,
                                const float *qkv, int64_t *seen, float *weight, float *out) {
    int64_t D = vectors * LANES, per = p->A / p->G, stride = p->W + LANES, n = 0;
    int64_t first = (p->slots[m / p->N] * p->G + g) * p->C * D;
    const float *q = qkv + (m * (p->A + 2 * p->G) + g * per) * D, *k = at->k + first, *v = at->v + first;
    float sum[per];
    for (int64_t w = 0; w < p->W; w++) {
        seen[n] = w;
        n += at->visible[m * p->W + w];
    }
    for (int i = 0; i < LANES; i++) seen[n + i] = seen[n - 1];  // a row sees itself at least
    for (int64_t h = 0; h < per; h++) sum[h] = weigh(vectors, q + h * D, k, seen, n, p->scale, weight + h * stride);
    int64_t h = 0;
    out += (m * p->A + g * per) * D;
    for (; h + 3 <= per && 3 * vectors <= MOST_SUMS; h += 3)
        average(vectors, 3, weight + h * stride, stride, v, seen, n, sum + h, out + h * D);
    for (; h + 2 <= per && 2 * vectors <= MOST_SUMS; h += 2)
        average(vectors, 2, weight + h * stride, stride, v, seen, n, sum + h, out + h * D);
    for (; h < per; h++) average(vectors, 1, weight + h * stride, stride, v, seen, n, sum + h, out + h * D);
}

// qkv [M][A + 2 G][D] -> out [M][A][D]
static void attend(const struct pass *p, const struct place *at, const float *qkv, float *out) {
#pragma omp parallel
    {
        int64_t *seen = malloc((p->W + LANES) * sizeof *seen);
        float *weight = malloc(p->A / p->G * (p->W + LANES) * sizeof *weight);
        // All rows over the same keys and values, which then come from a near cache.
#pragma omp for schedule(static) collapse(3)
        for (int64_t r = 0; r < p->R; r++)
            for (int64_t g = 0; g < p->G; g++)
                for (int64_t n = 0; n < p->N; n++) switch (p->D / LANES) {
                        case 4: attend_group(4, p, at, r * p->N + n, g, qkv, seen, weight, out); break;
                        case 8: attend_group(8, p, at, r * p->N + n, g, qkv, seen, weight, out); break;
                        default: attend_group(p->D / LANES, p, at, r * p->N + n, g, qkv, seen, weight, out);
                    }
        free(seen);
        free(weight);
    }
}

// gate_up [M][2 I] -> y [M][I] = silu(gate) up
static void gate(const struct pass *p, const float *gate_up, float *y) {
    int64_t M = p->R * p->N, I = p->I;
#pragma omp parallel for schedule(static)
    for (int64_t m = 0; m < M; m++)
        for (int64_t i = 0; i < I; i += LANES) {
            vec g = *(const vec *)(gate_up + m * 2 * I + i), u = *(const vec *)(gate_up + m * 2 * I + I + i);
            *(vec *)(y + m * I + i) = g / (1.f + exponential(-g)) * u;
        }
}

static void run_layer(const struct layer *l, const struct pass *p, const struct place *at) {
    int64_t M = p->R * p->N, width = (p->A + 2 * p->G) * p->D;
    float *narrow = p->scratch, *product = narrow + M * most(most(2 * p->H, p->A * p->D), p->I);
    float *wide = product + M * p->H;
    if (l->hidden_norm) {
        norm_rows(p, p->e, l->input_norm, l->eps, 2 * p->H, narrow);
        norm_rows(p, p->x, l->hidden_norm, l->eps, 2 * p->H, narrow + p->H);
    } else {
        norm_rows(p, p->x, l->input_norm, l->eps, p->H, narrow);
    }
    apply(&l->qkv, narrow, M, wide);
#pragma omp parallel for schedule(static) if (M > FEW_ROWS)
    for (int64_t m = 0; m < M; m++) place_row(l, p, at, m, wide + m * width);
    attend(p, at, wide, narrow);
    add_applied(p, &l->o, narrow, product);
    norm_rows(p, p->x, l->post_norm, l->eps, p->H, narrow);
    apply(&l->gate_up, narrow, M, wide);
    gate(p, wide, narrow);
    add_applied(p, &l->down, narrow, product);
}

void run_layers(const struct layer *const *layers, const struct place *places, int64_t count, const struct pass *p) {
    for (int64_t i = 0; i < count; i++) {
        if (places[i].tap) memcpy(places[i].tap, p->x, p->R * p->N * p->H * sizeof *p->x);
        run_layer(layers[i], p, places + i);
    }
}
