/* The router of a mixture of experts: each row's experts, and how much each counts. */
#ifndef ARMATURE_ROUTE_H
#define ARMATURE_ROUTE_H

#include "simd.h"

/* Scores [experts] of a row's logits, padded to whole vectors. */
INLINE void score_row(const route_arguments *a, const float *logits, float *scores) {
    vf largest = vf_all(-INFINITY), sum = vf_all(0);
    for (int64_t i = 0; i < a->experts; i += LANES) {
        const int64_t left = a->experts - i;
        vf x = vf_load_part(logits + i, left);
        if (a->scoring == SCORE_SIGMOID) x = 1.0f / (1.0f + vf_exp(-x));
        vf_store(scores + i, x);
        for (int64_t k = left; k < LANES; k++) scores[i + k] = -INFINITY;
        largest = vf_max(largest, vf_load(scores + i));
    }
    if (a->scoring == SCORE_SIGMOID) return;
    float most = -INFINITY;
    for (int k = 0; k < LANES; k++) most = largest[k] > most ? largest[k] : most;
    for (int64_t i = 0; i < a->experts; i += LANES) {
        const vf x = vf_exp(vf_load(scores + i) - most);
        vf_store(scores + i, x);
        sum += x;
    }
    const float total = vf_sum(sum);
    for (int64_t i = 0; i < a->experts; i += LANES) vf_store(scores + i, vf_load(scores + i) / total);
}

/* The best of `rated` [count] that is not taken: the lower index among equals, and NaN only if nothing else is left. */
INLINE int64_t best_of(const float *rated, const uint8_t *taken, int64_t count) {
    int64_t best = 0;
    for (int64_t i = 0; i < count; i++)
        if (!taken[i] && (taken[best] || rated[i] > rated[best] || (rated[best] != rated[best] && rated[i] == rated[i]))) best = i;
    return best;
}

/* Mark the experts of all groups but the best ones as taken. */
INLINE void keep_best_groups(const route_arguments *a, const float *rated, uint8_t *taken) {
    float ratings[MOST_EXPERTS];
    uint8_t kept[MOST_EXPERTS] = {0};
    const int64_t size = a->experts / a->groups;
    for (int64_t g = 0; g < a->groups; g++) {
        float best = -INFINITY, second = -INFINITY;
        for (int64_t i = g * size; i < (g + 1) * size; i++) {
            second = rated[i] > best ? best : rated[i] > second ? rated[i] : second;
            best = rated[i] > best ? rated[i] : best;
        }
        ratings[g] = a->rating == GROUPS_BY_TWO ? best + second : best;
    }
    for (int64_t n = 0; n < a->best_groups; n++) kept[best_of(ratings, kept, a->groups)] = 1;
    for (int64_t i = 0; i < a->experts; i++) taken[i] = !kept[i / size];
}

/* Route a row by SCORE_SPARSEMIXER. */
static void mix_row(const route_arguments *a, int64_t row) {
    const float *logits = a->logits + row * a->stride;
    float near[MOST_EXPERTS + LANES] __attribute__((aligned(64)));
    uint8_t taken[MOST_EXPERTS] = {0};
    for (int64_t j = 0; j < a->k; j++) {
        const int64_t id = best_of(logits, taken, a->experts);
        const float best = logits[id];
        for (int64_t i = 0; i < a->experts; i++) {
            const float size = fabsf(logits[i]), far = (best - logits[i]) / (size > best ? size : best);
            near[i] = taken[i] || far > 2 * (float)a->jitter ? -INFINITY : logits[i] - best;
        }
        for (int64_t i = a->experts; i < a->experts + LANES; i++) near[i] = -INFINITY;
        vf sum = vf_all(0);
        for (int64_t i = 0; i < a->experts; i += LANES) sum += vf_exp(vf_load(near + i));
        taken[id] = 1;
        a->ids[row * a->k + j] = id;
        a->weights[row * a->k + j] = (float)a->scale / vf_sum(sum);
    }
}

static void route_row(const route_arguments *a, int64_t row) {
    float scores[MOST_EXPERTS + LANES] __attribute__((aligned(64))), rated[MOST_EXPERTS], total = 0;
    uint8_t taken[MOST_EXPERTS] = {0};
    score_row(a, a->logits + row * a->stride, scores);
    for (int64_t i = 0; i < a->experts; i++) rated[i] = a->bias ? scores[i] + a->bias[i] : scores[i];
    if (a->rating != GROUPS_ALL) keep_best_groups(a, rated, taken);
    for (int64_t j = 0; j < a->k; j++) {
        const int64_t id = best_of(rated, taken, a->experts);
        taken[id] = 1;
        a->ids[row * a->k + j] = id;
        a->weights[row * a->k + j] = scores[id];
        total += scores[id];
    }
    const float factor = (float)a->scale, divisor = a->renormalise ? total + (float)a->epsilon : 1.0f;
    for (int64_t j = 0; j < a->k; j++) {
        const int64_t at = row * a->k + j;
        a->weights[at] = a->weights[at] / divisor * factor * (a->factors ? a->factors[a->ids[at]] : 1.0f);
    }
}

static void route(const void *arguments) {
    const route_arguments *a = arguments;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < a->rows; row++)
        if (a->scoring == SCORE_SPARSEMIXER)
            mix_row(a, row);
        else
            route_row(a, row);
}

#endif
