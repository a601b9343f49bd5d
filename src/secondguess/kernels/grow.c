// Growing a draft tree: what `tree/grow.py` does with the paper's rules, without a tensor operation for each line of it.
// `tests/test_compiled_grow.py` compares both.
//
// R requests, C candidates that there is room for (0 is the root; offer k of row y is 1 + y K + k), Y rows that there is
// room for (0 is the root's), K offers of a row, P nodes that may wait for a second look, F rows of level 0, E of them
// extra, and M of level 1 in a forward, X = F + M, N nodes of the final tree.

#include <math.h>
#include <stdint.h>
#include <string.h>

struct table {
    int64_t R, C, Y, K, P;
    int64_t num_rows, num_waiting;  // so far; there are 1 + K num_rows candidates
    int64_t *keys;  // [R][C]: depth, parent, token, see `candidates.pack`
    float *logps, *scores;  // [R][C]
    int64_t *holders;  // [R][C]: the row that holds the edge
    uint8_t *fresh, *forwarded;  // [R][C]
    uint8_t *lineage;  // [R][Y][Y]: the rows that whoever is fed by a row may see
    int64_t *own;  // [R][Y]: the level-0 row of the row's node
    int64_t *waiting, *waiting_rows;  // [R][P]: nodes, and the rows that feed their second looks
    float *confidence;  // [R][P]
    uint8_t *waiting_valid;  // [R][P]
    int64_t *left;  // [R]: second looks that a draft may still take
    int64_t *places;  // [C]: of a request's candidates in its final tree
};

struct rows {
    int64_t F, E, M;  // the E last of the F rows advance children of nodes that would get a second look
    int64_t *nodes, *tokens, *feature_rows, *depths;  // [R][X]
    uint8_t *visible;  // [R][X][num_rows + X]
    uint8_t *valid;  // [R][X]
};

enum { DEPTH_SHIFT = 52, PARENT_SHIFT = 32 };

// As Python has them: `build.py` compares.
const int64_t size_of_table = sizeof(struct table), size_of_rows = sizeof(struct rows);
const int64_t depth_shift = DEPTH_SHIFT, parent_shift = PARENT_SHIFT;

static int64_t depth_of(int64_t key) { return key >> DEPTH_SHIFT; }
static int64_t parent_of(int64_t key) { return key >> PARENT_SHIFT & ((1 << (DEPTH_SHIFT - PARENT_SHIFT)) - 1); }
static int64_t token_of(int64_t key) { return key & (((int64_t)1 << PARENT_SHIFT) - 1); }
static int64_t pack(int64_t depth, int64_t parent, int64_t token) {
    return (depth << DEPTH_SHIFT) + (parent << PARENT_SHIFT) + token;
}

// The order of candidates: the larger score, then the smaller key.
static int precedes(const float *scores, const int64_t *keys, int64_t a, int64_t b) {
    return scores[a] != scores[b] ? scores[a] > scores[b] : keys[a] < keys[b];
}

// Into the `count` best so far, of at most `most`; returns how many there are now.
static int64_t insert(const float *scores, const int64_t *keys, int64_t *best, int64_t count, int64_t most, int64_t c) {
    if (count == most && (most == 0 || !precedes(scores, keys, c, best[most - 1]))) return count;
    int64_t i = count == most ? most - 1 : count;
    for (; i > 0 && precedes(scores, keys, c, best[i - 1]); i--) best[i] = best[i - 1];
    best[i] = c;
    return count == most ? most : count + 1;
}

static int64_t num_candidates(const struct table *t) { return 1 + t->num_rows * t->K; }

// The root, and what the extend pass offers after it. A draft takes `most_looks` second looks at most.
void grow_plant(struct table *t, const int64_t *roots, const int64_t *tokens, const float *logps,
                const float *confidence, int64_t root_waits, int64_t most_looks) {
    t->num_rows = 1;
    t->num_waiting = root_waits;
    for (int64_t r = 0; r < t->R; r++) {
        int64_t *keys = t->keys + r * t->C;
        float *logp = t->logps + r * t->C, *score = t->scores + r * t->C;
        keys[0] = roots[r];
        logp[0] = score[0] = 0;
        t->holders[r * t->C] = t->fresh[r * t->C] = 0;
        t->forwarded[r * t->C] = 1;
        for (int64_t k = 0; k < t->K; k++) {
            int64_t c = r * t->C + 1 + k;
            t->keys[c] = pack(1, 0, tokens[r * t->K + k]);
            t->logps[c] = t->scores[c] = logps[r * t->K + k];
            t->holders[c] = t->forwarded[c] = 0;
            t->fresh[c] = t->logps[c] > -INFINITY;
        }
        memset(t->lineage + r * t->Y * t->Y, 0, t->Y);
        t->lineage[r * t->Y * t->Y] = 1;
        t->own[r * t->Y] = 0;
        t->left[r] = most_looks;
        if (root_waits) {
            t->waiting[r * t->P] = t->waiting_rows[r * t->P] = 0;
            t->confidence[r * t->P] = confidence[r];
            t->waiting_valid[r * t->P] = 1;
        }
    }
}

// The F - E best fresh candidates of a request; padding is the root.
static void pick_grown(const struct table *t, int64_t r, const struct rows *x) {
    int64_t X = x->F + x->M, most = x->F - x->E, found = 0, *nodes = x->nodes + r * X;
    const uint8_t *fresh = t->fresh + r * t->C;
    for (int64_t c = 1; c < num_candidates(t); c++)
        if (fresh[c]) found = insert(t->scores + r * t->C, t->keys + r * t->C, nodes, found, most, c);
    for (int64_t f = 0; f < most; f++) {
        if (f >= found) nodes[f] = 0;
        x->valid[r * X + f] = f < found;
    }
}

// Whether waiting node a is more doubtful than b, of those that may be looked at again.
static int more_doubtful(const struct table *t, int64_t r, int64_t a, int64_t b) {
    const float *confidence = t->confidence + r * t->P;
    const int64_t *nodes = t->waiting + r * t->P;
    if (confidence[a] != confidence[b]) return confidence[a] < confidence[b];
    return precedes(t->scores + r * t->C, t->keys + r * t->C, nodes[a], nodes[b]);
}

// Waiting node p into the `count` most doubtful so far, of at most `room`; returns how many there are now. `most` has
// one place more.
static int64_t insert_doubtful(const struct table *t, int64_t r, int64_t *most, int64_t count, int64_t room, int64_t p) {
    int64_t i = count;
    for (; i > 0 && more_doubtful(t, r, p, most[i - 1]); i--) most[i] = most[i - 1];
    most[i] = p;
    return count < room ? count + 1 : room;
}

// The best fresh child of waiting node p that is not among the `count` nodes; 0 if there is none.
static int64_t best_child(const struct table *t, int64_t r, int64_t p, const int64_t *nodes, int64_t count) {
    const float *scores = t->scores + r * t->C;
    const int64_t *keys = t->keys + r * t->C;
    int64_t first = 1 + t->waiting_rows[r * t->P + p] * t->K, best = 0;
    for (int64_t c = first; c < first + t->K; c++) {
        int taken = !t->fresh[r * t->C + c];
        for (int64_t i = 0; i < count; i++) taken |= nodes[i] == c;
        if (!taken && (best == 0 || precedes(scores, keys, c, best))) best = c;
    }
    return best;
}

// After the nodes that grow, a child more of each of the E most doubtful nodes that have one; padding is the root.
static void pick_extra(const struct table *t, int64_t r, const struct rows *x) {
    int64_t X = x->F + x->M, grown = x->F - x->E, found = 0, most[x->E + 1], *nodes = x->nodes + r * X;
    for (int64_t p = 0; p < t->num_waiting; p++)
        if (t->waiting_valid[r * t->P + p] && best_child(t, r, p, nodes, grown))
            found = insert_doubtful(t, r, most, found, x->E, p);
    for (int64_t e = 0; e < x->E; e++) {
        nodes[grown + e] = e < found ? best_child(t, r, most[e], nodes, grown) : 0;
        x->valid[r * X + grown + e] = e < found;
    }
}

// The rows of level 0 are fed by those that hold their edges.
static void feed(const struct table *t, int64_t r, int fed_by_level0, const struct rows *x) {
    int64_t X = x->F + x->M;
    for (int64_t f = 0; f < x->F; f++) {
        int64_t holder = t->holders[r * t->C + x->nodes[r * X + f]];
        x->feature_rows[r * X + f] = fed_by_level0 ? t->own[r * t->Y + holder] : holder;
    }
}

// The M most doubtful nodes that wait, of those that the drafter is not too sure of, as far as the draft may take second
// looks; the rest is padding.
static void pick_hesitant(struct table *t, int64_t r, float threshold, const struct rows *x) {
    int64_t X = x->F + x->M, found = 0, most[x->M + 1];
    for (int64_t p = 0; p < t->num_waiting; p++) {
        if (!t->waiting_valid[r * t->P + p] || !(t->confidence[r * t->P + p] <= threshold)) continue;
        found = insert_doubtful(t, r, most, found, x->M, p);
    }
    if (found > t->left[r]) found = t->left[r];
    t->left[r] -= found;
    for (int64_t m = 0; m < x->M; m++) {
        int64_t at = r * X + x->F + m, p = r * t->P + (m < found ? most[m] : 0);
        x->nodes[at] = t->waiting[p];
        x->feature_rows[at] = t->waiting_rows[p];
        x->valid[at] = m < found;
    }
}

// The rows of the next forward, and the lineage with these rows added.
void grow_lay(struct table *t, struct rows *x, float threshold, int64_t fed_by_level0, int64_t see_own_level0) {
    int64_t X = x->F + x->M, old = t->num_rows, wide = old + X;
    for (int64_t r = 0; r < t->R; r++) {
        pick_grown(t, r, x);
        if (x->E) pick_extra(t, r, x);
        feed(t, r, fed_by_level0, x);
        pick_hesitant(t, r, threshold, x);
        for (int64_t i = 0; i < X; i++) {
            int64_t fed = x->feature_rows[r * X + i], level0 = i < x->F;
            int64_t key = t->keys[r * t->C + x->nodes[r * X + i]];
            uint8_t *lineage = t->lineage + (r * t->Y + old + i) * t->Y, *visible = x->visible + (r * X + i) * wide;
            x->tokens[r * X + i] = token_of(key);
            x->depths[r * X + i] = depth_of(key);
            memset(lineage, 0, t->Y);
            memcpy(lineage, t->lineage + (r * t->Y + fed) * t->Y, old);
            memcpy(visible, lineage, wide);
            if (!level0 && !see_own_level0) visible[fed] = 0;
            visible[old + i] = 1;
            lineage[old + i] = level0;
            t->own[r * t->Y + old + i] = level0 ? old + i : fed;
        }
    }
}

// Level 1's offers [K] after a node, whose own row of level 0 is `fed`: a token that level 0 offers there, too, keeps the
// larger log-prob. Leaves in `logps` the new tokens alone.
static void merge(struct table *t, int64_t r, float parent_score, int64_t fed, int64_t row, const int64_t *tokens,
                  float *logps) {
    for (int64_t j = 0; j < t->K; j++) {
        int64_t c = r * t->C + 1 + fed * t->K + j;
        if (!(t->logps[c] > -INFINITY)) continue;
        for (int64_t i = 0; i < t->K; i++) {
            if (tokens[i] != token_of(t->keys[c])) continue;
            if (logps[i] > t->logps[c]) {
                t->logps[c] = logps[i];
                t->scores[c] = parent_score + logps[i];
                t->holders[c] = row;
                t->fresh[c] = !t->forwarded[c];
            }
            logps[i] = -INFINITY;
        }
    }
}

// Adds what a forward over the rows `x` offers: tokens, logps [R][X][K] (changed), confidence [R][X]. The rows of level 0
// wait from now on.
void grow_absorb(struct table *t, const struct rows *x, const int64_t *tokens, float *logps, const float *confidence,
                 int64_t refined_offers) {
    int64_t X = x->F + x->M, first = t->num_rows, count = num_candidates(t);
    float before[X];
    for (int64_t r = 0; r < t->R; r++) {
        const int64_t *nodes = x->nodes + r * X;
        float *scores = t->scores + r * t->C;
        for (int64_t i = 0; i < X; i++) {
            before[i] = scores[nodes[i]];
            if (i < x->F && x->valid[r * X + i]) t->forwarded[r * t->C + nodes[i]] = 1;
            for (int64_t k = 0; k < t->K; k++)
                if (!x->valid[r * X + i] || (i >= x->F && k >= refined_offers)) logps[(r * X + i) * t->K + k] = -INFINITY;
        }
        memset(t->fresh + r * t->C, 0, count);
        for (int64_t i = x->F; i < X; i++) {
            int64_t at = (r * X + i) * t->K;
            merge(t, r, before[i], x->feature_rows[r * X + i], first + i, tokens + at, logps + at);
        }
        for (int64_t i = 0; i < X; i++)
            for (int64_t k = 0; k < t->K; k++) {
                int64_t c = r * t->C + 1 + (first + i) * t->K + k, at = (r * X + i) * t->K + k;
                t->keys[c] = pack(x->depths[r * X + i] + 1, nodes[i], tokens[at]);
                t->logps[c] = logps[at];
                t->scores[c] = scores[nodes[i]] + logps[at];
                t->holders[c] = first + i;
                t->fresh[c] = logps[at] > -INFINITY;
                t->forwarded[c] = 0;
            }
        for (int64_t f = 0; f < x->F; f++) {
            int64_t p = r * t->P + f;
            t->waiting[p] = nodes[f];
            t->waiting_rows[p] = first + f;
            t->confidence[p] = confidence[r * X + f];
            t->waiting_valid[p] = x->valid[r * X + f];
        }
    }
    t->num_rows += X;
    t->num_waiting = x->F;
}

// The best candidates, the root first and `budgets` [R] others, in the order in which they were created; [R][N] each. No
// score may be above its parent's: then the best ones are a tree.
void grow_cut(const struct table *t, const int64_t *budgets, int64_t N, int64_t *tokens, int64_t *parents,
              int64_t *depths, int64_t *levels, float *out_scores, uint8_t *valid) {
    int64_t count = num_candidates(t), best[N], *place = t->places;
    for (int64_t r = 0; r < t->R; r++) {
        const float *scores = t->scores + r * t->C;
        const int64_t *keys = t->keys + r * t->C;
        int64_t found = 0, n = 0;
        for (int64_t c = 0; c < count; c++)
            if (scores[c] > -INFINITY) found = insert(scores, keys, best, found, budgets[r] + 1, c);
        memset(place, -1, count * sizeof *place);
        for (int64_t i = 0; i < found; i++) place[best[i]] = 0;
        for (int64_t c = 0; c < count; c++) {
            if (place[c] < 0) continue;
            int64_t at = r * N + n, row = t->holders[r * t->C + c];
            place[c] = n++;
            tokens[at] = token_of(keys[c]);
            depths[at] = depth_of(keys[c]);
            parents[at] = c ? place[parent_of(keys[c])] : -1;
            levels[at] = !t->lineage[(r * t->Y + row) * t->Y + row];
            out_scores[at] = scores[c];
            valid[at] = 1;
        }
        for (; n < N; n++) {
            int64_t at = r * N + n;
            tokens[at] = depths[at] = levels[at] = valid[at] = 0;
            parents[at] = -1;
            out_scores[at] = -INFINITY;
        }
    }
}
