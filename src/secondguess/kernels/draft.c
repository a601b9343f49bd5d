// A forward of a draft's round: what `drafter/passes.py` does with the paper's second looks, in one call.
// `tests/test_native_drafter.py` compares both.
//
// R requests, X rows of each in a forward, the first F of which are of level 0, M = R X, Y rows of the round so far
// (these included), H hidden size, D head dimension, V draft vocabulary, K offers of a row.

#include "decoder.h"

struct drafter {
    int64_t H, V, count;  // count: of layers
    const float *embedding;  // [target vocabulary][H]
    const float *norm;  // [H]: of the output
    float eps;
    int64_t norm_output;  // whether a feature is normed before it is fed back; the head always reads it so
    struct weights head, lens;  // no lens: `packed` is NULL
    const struct layer *const *layers;
    const int64_t *target_ids;  // [V]
};

struct round {
    int64_t R, room, C, length;  // rows that there is room for, columns of a slot, most columns up to a root's
    int64_t A, G, D, I;  // of the layers
    const int64_t *slots, *roots;  // [R]: and the roots' columns, which are their positions, too
    float *features;  // [R][room][H]
    const float *cos, *sin;  // [positions][D]
    const float *noise;  // [R][depths][V] of the tokens to come; or NULL
    int64_t depths;
    const float *query;  // [H]: what second looks have in place of their token's embedding; or NULL
    int64_t query_ahead;  // positions that they stand further than their node
    const struct place *places;  // of the layers, but for what is visible
};

struct forward {
    int64_t X, F, Y, K;
    const int64_t *tokens, *feature_rows, *depths;  // [R][X]
    const uint8_t *visible;  // [R][X][Y]
    int64_t *offered;  // [R][X][K]: target ids
    float *logps, *confidence;  // [R][X][K], [R][X]
    char *workspace;  // draft_room bytes
};

SHOW_SIZE(drafter);
SHOW_SIZE(round);
SHOW_SIZE(forward);

// Where a forward works.
struct sheet {
    float *e, *g, *cos, *sin;  // [M][H], [M][H], [M][D], [M][D]
    int64_t *columns;  // [M]
    uint8_t *visible;  // [M][W]
    void *rest;  // for second looks, then for the layers, then for what is offered
};

static struct pass pass_of(const struct drafter *d, const struct round *c, const struct forward *x) {
    return (struct pass){
        .R = c->R, .N = x->X, .H = d->H, .A = c->A, .G = c->G, .D = c->D, .I = c->I, .C = c->C,
        .W = c->length + x->Y - 1, .slots = c->slots, .scale = 1.f / sqrtf(c->D),
    };
}

static struct sheet sheet_in(struct room *room, const struct drafter *d, const struct round *c,
                             const struct forward *x) {
    struct pass p = pass_of(d, c, x);
    int64_t M = p.R * p.N, asked = p.R * (x->X - x->F) * 3 * d->H, offered = M * (d->V + d->H);
    struct sheet s;
    s.e = take(room, M * p.H * sizeof *s.e);
    s.g = take(room, M * p.H * sizeof *s.g);
    s.cos = take(room, M * p.D * sizeof *s.cos);
    s.sin = take(room, M * p.D * sizeof *s.sin);
    s.columns = take(room, M * sizeof *s.columns);
    s.visible = take(room, M * p.W);
    s.rest = take(room, most(most(asked, offered) * sizeof(float), layers_room(&p)));
    return s;
}

// Bytes that `draft_forward` and `draft_offer` work in.
int64_t draft_room(const struct drafter *d, const struct round *c, const struct forward *x) {
    struct room room = {0};
    sheet_in(&room, d, c, x);
    return room.used;
}

// The K best of n scores, best first; of equal ones the first.
static void best_of(const float *scores, int64_t n, int64_t K, float *best, int64_t *where) {
    for (int64_t k = 0; k < K; k++) {
        best[k] = -INFINITY;
        where[k] = k;
    }
    for (int64_t i = 0; i < n; i++) {
        if (!(scores[i] > best[K - 1])) continue;
        int64_t k = K - 1;
        for (; k > 0 && scores[i] > best[k - 1]; k--) {
            best[k] = best[k - 1];
            where[k] = where[k - 1];
        }
        best[k] = scores[i];
        where[k] = i;
    }
}

static float log_sum_exp(const float *scores, int64_t n, float highest) {
    vec sum = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) sum = sum + exponential(*(const vec *)(scores + i) - highest);
    float rest = total(sum);
    for (; i < n; i++) rest += expf(scores[i] - highest);
    return highest + logf(rest);
}

// What features f [M][H] of the forward's rows offer.
static void offer(const struct drafter *d, const struct round *c, const struct forward *x, const float *f, void *room) {
    int64_t M = c->R * x->X, K = x->K;
    float *scores = room, *read = scores + M * d->V;
    for (int64_t m = 0; m < M; m++)
        if (d->norm_output) memcpy(read + m * d->H, f + m * d->H, d->H * sizeof *f);
        else rms_norm(f + m * d->H, d->norm, d->H, d->eps, read + m * d->H);
    apply(&d->head, read, M, scores);
#pragma omp parallel for schedule(static) if (M > 1)
    for (int64_t m = 0; m < M; m++) {
        float *row = scores + m * d->V, *logp = x->logps + m * K;
        int64_t *ids = x->offered + m * K;
        const float *noise = c->noise ? c->noise + (m / x->X * c->depths + x->depths[m]) * d->V : NULL;
        for (int64_t i = 0; noise && i < d->V; i++) row[i] += noise[i];
        best_of(row, d->V, K, logp, ids);
        float all = log_sum_exp(row, d->V, logp[0]);
        for (int64_t k = 0; k < K; k++) {
            ids[k] = d->target_ids[ids[k]];
            logp[k] -= all;
        }
        x->confidence[m] = expf(logp[0]);
    }
}

// What features f [R][H] offer, the roots' for instance: one row of each request.
void draft_offer(const struct drafter *d, const struct round *c, const struct forward *x, const float *f) {
    struct room room = {x->workspace, 0};
    offer(d, c, x, f, sheet_in(&room, d, c, x).rest);
}

// Second looks ask with the query and, through the lens, with their node's feature. e, g: [R][X][H].
static void ask(const struct drafter *d, const struct round *c, const struct forward *x, const struct sheet *s) {
    int64_t H = d->H, L = x->X - x->F;
    float *e = s->e, *g = s->g, *read = s->rest, *seen = read + c->R * L * H;
    for (int64_t i = 0; i < c->R * L; i++) {
        int64_t row = (i / L * x->X + x->F + i % L) * H;
        if (c->query) memcpy(e + row, c->query, H * sizeof *e);
        memcpy(read + i * H, g + row, H * sizeof *g);
    }
    if (d->lens.packed) {
        apply(&d->lens, read, c->R * L, seen);
        for (int64_t i = 0; i < c->R * L; i++) {
            int64_t row = (i / L * x->X + x->F + i % L) * H;
            for (int64_t h = 0; h < H; h++) {
                e[row + h] += seen[i * 2 * H + h];
                g[row + h] += seen[i * 2 * H + H + h];
            }
        }
    }
}

// Everything before a root's column is visible to all rows of its round.
static void look(const struct round *c, const struct forward *x, int64_t W, uint8_t *visible) {
    for (int64_t m = 0; m < c->R * x->X; m++) {
        int64_t root = c->roots[m / x->X];
        memset(visible + m * W, 1, root);
        memcpy(visible + m * W + root, x->visible + m * x->Y, x->Y);
        memset(visible + m * W + root + x->Y, 0, W - root - x->Y);
    }
}

// The block over new rows of the round; their features are kept for the forwards to come.
void draft_forward(const struct drafter *d, const struct round *c, const struct forward *x) {
    int64_t H = d->H, D = c->D, X = x->X, M = c->R * X, first = x->Y - X;
    struct room room = {x->workspace, 0};
    struct sheet s = sheet_in(&room, d, c, x);
    struct pass p = pass_of(d, c, x);
    struct place places[d->count];
    for (int64_t m = 0; m < M; m++) {
        int64_t r = m / X, i = m % X, position = c->roots[r] + x->depths[m] + (i < x->F ? 0 : c->query_ahead);
        memcpy(s.g + m * H, c->features + (r * c->room + x->feature_rows[m]) * H, H * sizeof *s.g);
        memcpy(s.e + m * H, d->embedding + x->tokens[m] * H, H * sizeof *s.e);
        memcpy(s.cos + m * D, c->cos + position * D, D * sizeof *s.cos);
        memcpy(s.sin + m * D, c->sin + position * D, D * sizeof *s.sin);
        s.columns[m] = c->roots[r] + first + i;
    }
    if (x->F < X) ask(d, c, x, &s);
    look(c, x, p.W, s.visible);
    for (int64_t i = 0; i < d->count; i++) {
        places[i] = c->places[i];
        places[i].visible = s.visible;
    }
    p.columns = s.columns, p.cos = s.cos, p.sin = s.sin, p.x = s.g, p.e = s.e, p.workspace = s.rest;
    run_layers(d->layers, places, d->count, &p);
    for (int64_t m = 0; m < M; m++) {
        float *f = c->features + (m / X * c->room + first + m % X) * H;
        if (d->norm_output) rms_norm(s.g + m * H, d->norm, H, d->eps, s.g + m * H);
        memcpy(f, s.g + m * H, H * sizeof *f);
    }
    offer(d, c, x, s.g, s.rest);
}
