// The layers of a Llama-shaped decoder over the rows of a pass, in float32 and in place, with K/V in a slot cache.
//
// A row's result is the same bits whatever other rows there are: sums run in an order that the row alone fixes. In
// attention that is the columns it sees, in ascending order, which is the order of their positions, for a node of a
// tree as for the same token in plain decoding.
//
// R requests, N rows of each, M = R N, H hidden size, A query heads, G K/V heads, D head dimension, I intermediate
// size, C columns of a slot, W of which may be seen.

#pragma once

#include <math.h>

#include "linear.h"

enum {
    FEW_ROWS = 8,  // not worth waking the other threads for what is done to each row
    MOST_VECTORS = 32,  // head dimensions up to 32 LANES
    MOST_SUMS = 16,  // that registers hold beside what they are made of
    QUERIES = 4,  // scored at once, over
    COLUMNS = 2 * LANES,  // so many keys
    NEAR_FLOATS = 1 << 16,  // a quarter of a megabyte
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
    char *workspace;  // layers_room bytes
    float scale;
};

// What a layer has of its own in a pass.
struct place {
    float *k, *v;  // [slots][G][C][D]
    const uint8_t *visible;  // [M][W]
    float *tap;  // [M][H]: its input is copied here, or NULL
};

SHOW_SIZE(weights);
SHOW_SIZE(layer);
SHOW_SIZE(pass);
SHOW_SIZE(place);
SHOW(most_vectors, MOST_VECTORS);

static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// Memory to work in, of which pieces are taken one after the other. Nothing is allocated here: the caller measures what
// is taken of a room without a start, and hands so many bytes in.
struct room {
    char *start;
    int64_t used;
};

static void *take(struct room *room, int64_t bytes) {
    int64_t at = room->used;
    room->used += (bytes + LINE - 1) / LINE * LINE;
    return room->start ? room->start + at : NULL;
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

// Of two vectors' lanes side by side, every second one.
#ifdef __AVX512F__
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#else
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define ODD 1, 3, 5, 7, 9, 11, 13, 15
#endif

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif

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

// y[M][H] = norm(x)
void norm(const float *x, int64_t M, int64_t H, const float *weight, float eps, float *y) {
    for (int64_t m = 0; m < M; m++) rms_norm(x + m * H, weight, H, eps, y + m * H);
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

// A square of LANES vectors: vector i, lane l becomes vector l, lane i. A round moves the lowest bit of (i, l) to the top.
ALWAYS_INLINE void transpose(vec *v) {
    UNROLL for (int round = 1; round < LANES; round *= 2) {
        vec w[LANES];
        UNROLL for (int i = 0; i < LANES / 2; i++) {
            w[i] = SHUFFLE(v[2 * i], v[2 * i + 1], EVEN);
            w[i + LANES / 2] = SHUFFLE(v[2 * i], v[2 * i + 1], ODD);
        }
        UNROLL for (int i = 0; i < LANES; i++) v[i] = w[i];
    }
}

// Of keys k [columns][D] those from column `first` on, no further than `end`, as kt [D][COLUMNS].
static void turn(const float *k, int64_t D, int64_t first, int64_t end, float *kt) {
    for (int64_t c = 0; c < COLUMNS; c += LANES)
        for (int64_t d = 0; d < D; d += LANES) {
            vec v[LANES];
            UNROLL for (int i = 0; i < LANES; i++) v[i] = *(const vec *)(k + least(first + c + i, end - 1) * D + d);
            transpose(v);
            UNROLL for (int i = 0; i < LANES; i++) *(vec *)(kt + (d + i) * COLUMNS + c) = v[i];
        }
}

// scores[i][COLUMNS] = q[i] . kt, of QUERIES queries. Each is one chain of multiply-adds over d in ascending order.
static void score(const float *const *q, int64_t D, const float *kt, float scale, float *const *scores) {
    vec s[QUERIES * COLUMNS / LANES] = {{0}};
    for (int64_t d = 0; d < D; d++) {
        vec kd[COLUMNS / LANES];
        UNROLL for (int c = 0; c < COLUMNS / LANES; c++) {
            kd[c] = *(const vec *)(kt + d * COLUMNS + c * LANES);
            KEEP(kd[c]);
        }
        UNROLL for (int i = 0; i < QUERIES * COLUMNS / LANES; i++)
            s[i] = s[i] + q[i * LANES / COLUMNS][d] * kd[i % (COLUMNS / LANES)];
    }
    UNROLL for (int i = 0; i < QUERIES * COLUMNS / LANES; i++)
        *(vec *)(scores[i * LANES / COLUMNS] + i % (COLUMNS / LANES) * LANES) = s[i] * scale;
}

// scores[count][stride] of queries q over the first `end` columns of k.
static void score_all(const float *const *q, int64_t count, int64_t D, const float *k, int64_t end, float scale,
                      float *scores, int64_t stride, float *kt) {
    for (int64_t w = 0; w < end; w += COLUMNS) {
        turn(k, D, w, end, kt);
        for (int64_t i = 0; i < count; i += QUERIES) {
            const float *some[QUERIES];
            float *out[QUERIES];
            for (int64_t j = 0; j < QUERIES; j++) {
                int64_t at = least(i + j, count - 1);
                some[j] = q[at];
                out[j] = scores + at * stride + w;
            }
            score(some, D, kt, scale, out);
        }
    }
}

// The columns that a row sees, of the first W; returns how many there are: one at least, itself.
static int64_t seen_by(const uint8_t *visible, int64_t W, int64_t *seen) {
    const uint8_t *hidden = memchr(visible, 0, W);
    int64_t before = hidden ? hidden - visible : W, n = before;
    for (int64_t w = 0; w < before; w++) seen[w] = w;
    for (int64_t w = before; w < W; w++) {
        seen[n] = w;
        n += visible[w];
    }
    return n;
}

// Scores of the columns in `seen`, in place, become e^(score - best score), side by side; returns their sum.
static float weigh(float *scores, const int64_t *seen, int64_t n) {
    vec best = (vec){0} - INFINITY, sum = {0};
    int64_t moved = n;
    while (moved > 0 && seen[moved - 1] != moved - 1) moved--;  // what precedes a tree is where it should be
    for (; moved < n; moved++) scores[moved] = scores[seen[moved]];
    for (int64_t i = 0; i < LANES; i++) scores[n + i] = scores[n - 1];
    for (int64_t i = 0; i < n; i += LANES) best = -smaller(-best, -*(const vec *)(scores + i));
    float highest = best[0];
    for (int i = 1; i < LANES; i++)
        if (best[i] > highest) highest = best[i];
    for (int64_t i = 0; i < n; i += LANES) *(vec *)(scores + i) = exponential(*(const vec *)(scores + i) - highest);
    memset(scores + n, 0, LANES * sizeof *scores);
    for (int64_t i = 0; i < n; i += LANES) sum = sum + *(const vec *)(scores + i);
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

// Where a thread attends.
struct desk {
    int64_t stride;  // floats of a query's scores
    int64_t *seen, *counts;  // [rows][W], [rows]: of the rows that attend together
    const float **q;  // [rows * heads of a group]
    float *scores, *kt;  // [rows * heads of a group][stride], [D][COLUMNS]
};

static int64_t stride_of(const struct pass *p) { return (p->W + COLUMNS - 1) / COLUMNS * COLUMNS + LANES; }

// Rows that attend together, so that keys are turned once for them: as many as leave every thread work and a near cache
// room for their scores.
static int64_t rows_together(const struct pass *p) {
    int64_t shares = (2 * omp_get_max_threads() + p->R * p->G - 1) / (p->R * p->G);
    int64_t room = most(NEAR_FLOATS / (p->A / p->G * stride_of(p)), 4);
    return least((p->N + shares - 1) / shares, room);
}

static struct desk desk_in(struct room *room, const struct pass *p, int64_t rows) {
    struct desk d = {stride_of(p)};
    int64_t queries = rows * (p->A / p->G);
    d.seen = take(room, rows * p->W * sizeof *d.seen);
    d.counts = take(room, rows * sizeof *d.counts);
    d.q = take(room, queries * sizeof *d.q);
    d.scores = take(room, queries * d.stride * sizeof *d.scores);
    d.kt = take(room, p->D * COLUMNS * sizeof *d.kt);
    return d;
}

// Where the layers of a pass work.
struct bench {
    float *narrow, *product, *wide;  // [M][2 H, A D or I], [M][H], [M][(A + 2 G) D or 2 I]
    char *desks;  // one for each thread
    int64_t desk_bytes, desk_rows;
};

static struct bench bench_in(struct room *room, const struct pass *p) {
    int64_t M = p->R * p->N;
    struct room one = {0};
    struct bench b;
    b.narrow = take(room, M * most(most(2 * p->H, p->A * p->D), p->I) * sizeof *b.narrow);
    b.product = take(room, M * p->H * sizeof *b.product);
    b.wide = take(room, M * most((p->A + 2 * p->G) * p->D, 2 * p->I) * sizeof *b.wide);
    b.desk_rows = rows_together(p);
    desk_in(&one, p, b.desk_rows);
    b.desk_bytes = one.used;
    b.desks = take(room, omp_get_max_threads() * b.desk_bytes);
    return b;
}

// Bytes that `run_layers` works in.
int64_t layers_room(const struct pass *p) {
    struct room room = {0};
    bench_in(&room, p);
    return room.used;
}

// The query heads of group g in some rows of a request, from row m on.
ALWAYS_INLINE void attend_rows(int vectors, const struct pass *p, const struct place *at, int64_t m, int64_t rows,
                               int64_t g, const float *qkv, const struct desk *desk, float *out) {
    int64_t D = vectors * LANES, per = p->A / p->G, end = 0, stride = desk->stride;
    int64_t first = (p->slots[m / p->N] * p->G + g) * p->C * D;
    const float *v = at->v + first;
    for (int64_t i = 0; i < rows; i++) {
        int64_t *seen = desk->seen + i * p->W;
        desk->counts[i] = seen_by(at->visible + (m + i) * p->W, p->W, seen);
        end = most(end, seen[desk->counts[i] - 1] + 1);
        for (int64_t h = 0; h < per; h++)
            desk->q[i * per + h] = qkv + ((m + i) * (p->A + 2 * p->G) + g * per + h) * D;
    }
    score_all(desk->q, rows * per, D, at->k + first, end, p->scale, desk->scores, stride, desk->kt);
    for (int64_t i = 0; i < rows; i++) {
        const int64_t *seen = desk->seen + i * p->W, n = desk->counts[i];
        float *weight = desk->scores + i * per * stride, *o = out + ((m + i) * p->A + g * per) * D, sum[per];
        int64_t h = 0;
        for (; h < per; h++) sum[h] = weigh(weight + h * stride, seen, n);
        for (h = 0; h + 3 <= per && 3 * vectors <= MOST_SUMS; h += 3)
            average(vectors, 3, weight + h * stride, stride, v, seen, n, sum + h, o + h * D);
        for (; h + 2 <= per && 2 * vectors <= MOST_SUMS; h += 2)
            average(vectors, 2, weight + h * stride, stride, v, seen, n, sum + h, o + h * D);
        for (; h < per; h++) average(vectors, 1, weight + h * stride, stride, v, seen, n, sum + h, o + h * D);
    }
}

// qkv [M][A + 2 G][D] -> out [M][A][D]
static void attend(const struct pass *p, const struct place *at, const struct bench *b, const float *qkv, float *out) {
    int64_t rows = b->desk_rows;
#pragma omp parallel
    {
        struct room room = {b->desks + omp_get_thread_num() * b->desk_bytes, 0};
        struct desk desk = desk_in(&room, p, rows);
#pragma omp for schedule(static) collapse(3)
        for (int64_t r = 0; r < p->R; r++)
            for (int64_t g = 0; g < p->G; g++)
                for (int64_t n = 0; n < p->N; n += rows) {
                    int64_t m = r * p->N + n, some = least(rows, p->N - n);
                    switch (p->D / LANES) {
                        case 4: attend_rows(4, p, at, m, some, g, qkv, &desk, out); break;
                        case 8: attend_rows(8, p, at, m, some, g, qkv, &desk, out); break;
                        case 16: attend_rows(16, p, at, m, some, g, qkv, &desk, out); break;
                        default: attend_rows(p->D / LANES, p, at, m, some, g, qkv, &desk, out);
                    }
                }
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

static void run_layer(const struct layer *l, const struct pass *p, const struct place *at, const struct bench *b) {
    int64_t M = p->R * p->N, width = (p->A + 2 * p->G) * p->D;
    float *narrow = b->narrow, *wide = b->wide;
    if (l->hidden_norm) {
        norm_rows(p, p->e, l->input_norm, l->eps, 2 * p->H, narrow);
        norm_rows(p, p->x, l->hidden_norm, l->eps, 2 * p->H, narrow + p->H);
    } else {
        norm_rows(p, p->x, l->input_norm, l->eps, p->H, narrow);
    }
    apply(&l->qkv, narrow, M, wide);
#pragma omp parallel for schedule(static) if (M > FEW_ROWS)
    for (int64_t m = 0; m < M; m++) place_row(l, p, at, m, wide + m * width);
    attend(p, at, b, wide, narrow);
    add_applied(p, &l->o, narrow, b->product);
    norm_rows(p, p->x, l->post_norm, l->eps, p->H, narrow);
    apply(&l->gate_up, narrow, M, wide);
    gate(p, wide, narrow);
    add_applied(p, &l->down, narrow, b->product);
}

void run_layers(const struct layer *const *layers, const struct place *places, int64_t count, const struct pass *p) {
    struct room room = {p->workspace, 0};
    struct bench b = bench_in(&room, p);
    for (int64_t i = 0; i < count; i++) {
        if (places[i].tap) memcpy(places[i].tap, p->x, p->R * p->N * p->H * sizeof *p->x);
        run_layer(layers[i], p, places + i, &b);
    }
}
