// One layer of a Llama-shaped decoder over the rows of a pass, in float32 and in place, with K/V in a slot cache.
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
    const uint8_t *visible;  // [M][W]
    const float *cos, *sin;  // [M][D]; the sine's first half is negated
    float *k, *v;  // the layer's: [slots][G][C][D]
    float *x;  // [M][H], in and out
    const float *e;  // [M][H], for layers with a hidden_norm
    float *scratch;  // scratch_size floats
    float scale;
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
static void place_row(const struct layer *l, const struct pass *p, int64_t m, float *qkv) {
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
        int64_t at = ((p->slots[m / p->N] * p->G + g) * p->C + p->columns[m]) * D;
        if (l->k_norm) rms_norm(k, l->k_norm, D, l->eps, k);
        rotate(k, cos, sin, D, p->k + at);
        memcpy(p->v + at, v, D * sizeof(float));
    }
}

// out[D] = sum of weight[i] v[seen[i]] / sum of weight[i]; `vectors` is D / LANES, known to the compiler.
ALWAYS_INLINE void average(int vectors, const float *weight, const float *v, const int64_t *seen, int64_t n,
                           float *out) {
    vec acc[MOST_VECTORS] = {{0}};
    float sum = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += weight[i];
        const float *row = v + seen[i] * vectors * LANES;
        UNROLL for (int d = 0; d < vectors; d++) acc[d] = acc[d] + weight[i] * *(const vec *)(row + d * LANES);
    }
    UNROLL for (int d = 0; d < vectors; d++) *(vec *)(out + d * LANES) = acc[d] / sum;
}

// softmax(q K^T) V of one query head over the `n` columns in `seen`; D is a multiple of LANES.
static void attend_head(const float *q, const float *k, const float *v, const int64_t *seen, int64_t n,
                        const struct pass *p, float *score, float *out) {
    int64_t D = p->D;
    float best = -INFINITY;
    for (int64_t i = 0; i < n; i++) {
        score[i] = dot(q, k + seen[i] * D, D) * p->scale;
        if (score[i] > best) best = score[i];
    }
    for (int64_t i = 0; i < n; i += LANES) {  // `score` has room for a vector more
        vec e = exponential(*(const vec *)(score + i) - best);
        memcpy(score + i, &e, sizeof e);
    }
    switch (D / LANES) {
        case 4: average(4, score, v, seen, n, out); break;
        case 8: average(8, score, v, seen, n, out); break;
        default: average(D / LANES, score, v, seen, n, out);
    }
}

// qkv [M][A + 2 G][D] -> out [M][A][D]
static void attend(const struct pass *p, const float *qkv, float *out) {
    int64_t M = p->R * p->N, width = (p->A + 2 * p->G) * p->D, per = p->A / p->G;
#pragma omp parallel
    {
        int64_t *seen = malloc(p->W * sizeof *seen);
        float *score = calloc(p->W + LANES, sizeof *score);
#pragma omp for schedule(static) collapse(2)
        for (int64_t m = 0; m < M; m++)
            for (int64_t g = 0; g < p->G; g++) {
                int64_t n = 0, at = (p->slots[m / p->N] * p->G + g) * p->C * p->D;
                for (int64_t w = 0; w < p->W; w++) {
                    seen[n] = w;
                    n += p->visible[m * p->W + w];
                }
                for (int64_t a = g * per; a < (g + 1) * per; a++)
                    attend_head(qkv + m * width + a * p->D, p->k + at, p->v + at, seen, n, p, score,
                                out + (m * p->A + a) * p->D);
            }
        free(seen);
        free(score);
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

void run_layer(const struct layer *l, const struct pass *p) {
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
    for (int64_t m = 0; m < M; m++) place_row(l, p, m, wide + m * width);
    attend(p, wide, narrow);
    add_applied(p, &l->o, narrow, product);
    norm_rows(p, p->x, l->post_norm, l->eps, p->H, narrow);
    apply(&l->gate_up, narrow, M, wide);
    gate(p, wide, narrow);
    add_applied(p, &l->down, narrow, product);
}
