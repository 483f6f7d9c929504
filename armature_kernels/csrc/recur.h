/* Layers with a recurrent state: the gated delta rule (arXiv 2412.06464) and Mamba-2 (arXiv 2405.21060), with the short
 * convolution before them and the gated norm after them. fp32 throughout. Tokens are computed one after the other, so that
 * a token's result does not depend on the rest of the batch or on the parts in which its prompt came. */
#ifndef ARMATURE_RECUR_H
#define ARMATURE_RECUR_H

#include "activate.h"
#include "rowwise.h"

/* log(1 + e^x): the logarithm as a series of z = y / (2 + y) <= 1/3 with y = e^-|x|. */
INLINE vf softplus(vf x) {
    const vf y = vf_exp(-(vf)((vi)x & 0x7fffffff)), z = y / (2.0f + y), square = z * z;
    vf sum = square * (1.0f / 15) + 1.0f / 13;
    sum = sum * square + 1.0f / 11;
    sum = sum * square + 1.0f / 9;
    sum = sum * square + 1.0f / 7;
    sum = sum * square + 1.0f / 5;
    sum = sum * square + 1.0f / 3;
    sum = sum * square + 1.0f;
    return vf_select(x != x, x, relu(x) + 2.0f * (z * sum));
}

/* ---- what the recurrence reads ---- */

#define CHANNELS (8 * LANES) /* of a task */

/* `count` channels from `from` on of the tokens of one sequence; the last inputs become the state. */
static void convolve_inputs(const recur_inputs_arguments *a, const state_run *run, int64_t from, int64_t count) {
    float window[MOST_WIDTH][CHANNELS] __attribute__((aligned(64))), sum[CHANNELS] __attribute__((aligned(64)));
    const int64_t before = a->width - 1;
    float *tail = a->states + run->slot * a->slot_stride + from;
    for (int64_t k = 0; k < before; k++)
        for (int64_t i = 0; i < count; i += LANES) vf_store(window[k] + i, run->start ? vf_load_part(tail + k * a->channels + i, count - i) : vf_all(0));
    for (int64_t t = 0; t < run->num_tokens; t++) {
        const void *x = element_of(a->wide, a->x, (run->first + t) * a->x_stride + from);
        float *out = a->out + (run->first + t) * a->channels + from, *newest = window[(before + t) % a->width];
        for (int64_t i = 0; i < count; i += LANES) {
            vf_store(newest + i, row_load_part(a->wide, x, i, count - i));
            vf_store(sum + i, a->bias ? vf_load_part(a->bias + from + i, count - i) : vf_all(0));
        }
        for (int64_t k = 0; k < a->width; k++) {
            const float *filter = a->filters + k * a->channels + from, *input = window[(t + k) % a->width];
            for (int64_t i = 0; i < count; i += LANES) vf_store(sum + i, vf_load(sum + i) + vf_load(input + i) * vf_load_part(filter + i, count - i));
        }
        for (int64_t i = 0; i < count; i += LANES) vf_store_part(out + i, silu(vf_load(sum + i)), count - i);
    }
    for (int64_t k = 0; k < before; k++) memcpy(tail + k * a->channels, window[(run->num_tokens + k) % a->width], (size_t)count * sizeof *tail);
}

/* The decay and the factor of each head of a token. */
static void token_scales(const recur_inputs_arguments *a, int64_t row) {
    float *decays = a->scales + row * 2 * a->heads, *factors = decays + a->heads;
    const void *steps = element_of(a->wide_steps, a->steps, row * a->step_stride), *betas = a->betas ? element_of(a->wide_steps, a->betas, row * a->step_stride) : NULL;
    for (int64_t i = 0; i < a->heads; i += LANES) {
        const int64_t left = a->heads - i;
        vf step = softplus(row_load_part(a->wide_steps, steps, i, left) * (float)a->step_scale + vf_load_part(a->step_bias + i, left));
        step = vf_select(step < (float)a->least, vf_all((float)a->least), vf_select(step > (float)a->most, vf_all((float)a->most), step));
        vf_store_part(decays + i, vf_exp(-vf_load_part(a->rates + i, left) * step), left);
        vf_store_part(factors + i, betas ? (float)a->beta_scale / (1.0f + vf_exp(-row_load_part(a->wide_steps, betas, i, left))) : step, left);
    }
}

static void recur_inputs(const void *arguments) {
    const recur_inputs_arguments *a = arguments;
    const int64_t blocks = (a->channels + CHANNELS - 1) / CHANNELS;
    for (int64_t i = 0; i < a->step->num_runs; i++) {
        const state_run *run = &a->step->runs[i];
#pragma omp for schedule(static) nowait
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t from = block * CHANNELS, left = a->channels - from;
            convolve_inputs(a, run, from, left < CHANNELS ? left : CHANNELS);
        }
#pragma omp for schedule(static) nowait
        for (int64_t t = 0; t < run->num_tokens; t++) token_scales(a, run->first + t);
    }
#pragma omp barrier
}

/* ---- the recurrence ---- */

#define VECTORS (STATE_COLUMNS / LANES)

/* The sums over keys of x[k] * state row k and of y[k] * state row k. */
INLINE void read_state(const float *state, int64_t size, const float *x, const float *y, vf *of_x, vf *of_y) {
#pragma GCC unroll 8
    for (int n = 0; n < VECTORS; n++) of_x[n] = of_y[n] = vf_all(0);
    for (int64_t k = 0; k < size; k++) {
#pragma GCC unroll 8
        for (int n = 0; n < VECTORS; n++) {
            const vf row = vf_load(state + k * STATE_COLUMNS + n * LANES);
            of_x[n] += x[k] * row, of_y[n] += y[k] * row;
        }
    }
}

/* state row k = decay * state row k + key[k] * added; returns the sums over keys of query[k] * state row k. */
INLINE void write_state(float *state, int64_t size, float decay, const float *key, const float *query, const vf *added, vf *sums) {
    if (query)
#pragma GCC unroll 8
        for (int n = 0; n < VECTORS; n++) sums[n] = vf_all(0);
    for (int64_t k = 0; k < size; k++) {
#pragma GCC unroll 8
        for (int n = 0; n < VECTORS; n++) {
            float *at = state + k * STATE_COLUMNS + n * LANES;
            const vf row = vf_load(at) * decay + key[k] * added[n];
            vf_store(at, row);
            if (query) sums[n] += query[k] * row;
        }
    }
}

INLINE float dot(const float *x, const float *y, int64_t size) {
    vf sum = vf_all(0);
    for (int64_t i = 0; i < size; i += LANES) sum += vf_load_part(x + i, size - i) * vf_load_part(y + i, size - i);
    return vf_sum(sum);
}

/* One token in STATE_COLUMNS elements of the values of a head, of which `left` are not padding. */
INLINE void recur_token(const recur_arguments *a, float *state, int64_t row, int64_t head, int64_t from, int64_t left) {
    const int64_t group = head / (a->heads / a->key_heads);
    const float *x = a->x + row * a->channels, *query = x + a->query + group * a->key_size, *key = x + a->key + group * a->key_size;
    const float *value = x + a->value + head * a->value_size + from, decay = a->scales[row * 2 * a->heads + head], factor = a->scales[(row * 2 + 1) * a->heads + head];
    vf values[VECTORS], read[VECTORS], result[VECTORS];
    for (int n = 0; n < VECTORS; n++) values[n] = n * LANES < left ? vf_load_part(value + n * LANES, left - n * LANES) : vf_all(0);
    if (a->delta) {
        const float size = (float)a->key_size, of_key = 1.0f / float_sqrt(dot(key, key, a->key_size) + 1e-6f);
        const float of_query = 1.0f / float_sqrt((dot(query, query, a->key_size) + 1e-6f) * size), both = dot(query, key, a->key_size) * of_query * of_key;
        read_state(state, a->key_size, key, query, read, result);
        for (int n = 0; n < VECTORS; n++) {
            const vf added = (values[n] - read[n] * (decay * of_key)) * factor;
            result[n] = result[n] * (decay * of_query) + both * added;
            values[n] = added * of_key;
        }
        write_state(state, a->key_size, decay, key, NULL, values, NULL);
    } else {
        const float skip = a->skips ? a->skips[head] : 0.0f;
        for (int n = 0; n < VECTORS; n++) read[n] = values[n] * factor;
        write_state(state, a->key_size, decay, key, query, read, result);
        for (int n = 0; n < VECTORS; n++) result[n] += values[n] * skip;
    }
    float *out = a->out + (row * a->heads + head) * a->value_size + from;
    for (int n = 0; n < VECTORS; n++)
        if (n * LANES < left) vf_store_part(out + n * LANES, result[n], left - n * LANES);
}

static void recur(const void *arguments) {
    const recur_arguments *a = arguments;
    const int64_t tiles = (a->value_size + STATE_COLUMNS - 1) / STATE_COLUMNS, tile_size = a->key_size * STATE_COLUMNS;
    for (int64_t i = 0; i < a->step->num_runs; i++) {
        const state_run *run = &a->step->runs[i];
#pragma omp for schedule(static) nowait
        for (int64_t task = 0; task < a->heads * tiles; task++) {
            float *state = a->states + run->slot * a->slot_stride + task * tile_size;
            const int64_t from = task % tiles * STATE_COLUMNS;
            if (!run->start) memset(state, 0, (size_t)tile_size * sizeof *state);
            for (int64_t t = 0; t < run->num_tokens; t++) recur_token(a, state, run->first + t, task / tiles, from, a->value_size - from);
        }
    }
#pragma omp barrier
}

/* ---- the gated norm ---- */

INLINE vf gated_value(const gated_norm_arguments *a, const void *gate, const void *x, int64_t i, int64_t left) {
    const vf z = row_load_part(a->wide_gate, gate, i, left) * (float)a->gate_scale, value = row_load_part(a->wide, x, i, left);
    return value / (1.0f + vf_exp(-z)) * (a->sigmoid ? vf_all(1) : z);
}

/* 1 / the rms of a group, which is that of the gated values if `gate_first`. */
static float group_scale(const gated_norm_arguments *a, const void *gate, const void *x) {
    vf squares = vf_all(0);
    for (int64_t i = 0; i < a->group; i += LANES) {
        const vf value = a->gate_first ? gated_value(a, gate, x, i, a->group - i) : row_load_part(a->wide, x, i, a->group - i);
        squares += value * value;
    }
    return 1.0f / float_sqrt(vf_sum(squares) / (float)a->group + (float)a->eps);
}

static void gated_norm(const void *arguments) {
    const gated_norm_arguments *a = arguments;
    float values[MOST_GROUP + LANES] __attribute__((aligned(64)));
#pragma omp for schedule(static)
    for (int64_t index = 0; index < a->rows * parts_of(&a->out, a->size); index++) {
        const part p = nth_part(&a->out, a->size, index);
        for (int64_t at = p.from, end; at < p.from + p.count; at = end) {
            const int64_t first = a->group ? at / a->group * a->group : at, last = a->group ? first + a->group : p.from + p.count;
            const void *gate = element_of(a->wide_gate, a->gate, p.row * a->gate_stride + first), *x = element_of(a->wide, a->x, p.row * a->x_stride + first);
            const float scale = a->group ? group_scale(a, gate, x) : 1.0f, *weight = a->weight ? a->weight + first % a->weights : NULL;
            end = last < p.from + p.count ? last : p.from + p.count;
            for (int64_t i = at - first; i < end - first; i += LANES) {
                const int64_t left = end - first - i;
                const vf value = gated_value(a, gate, x, i, left) * scale;
                vf_store(values + first - p.from + i, weight ? value * vf_load_part(weight + i, left) : value);
            }
        }
        emit(&a->out, a->rows, a->size, p, values);
    }
}

#endif
