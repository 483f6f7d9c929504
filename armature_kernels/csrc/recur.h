/* Layers with a recurrent state: the gated delta rule (arXiv 2412.06464) and Mamba-2 (arXiv 2405.21060), with the short
 * convolution before them and the gated norm after them. fp32 throughout. The tokens of a prompt are computed in chunks
 * (recur_chunks.h), others one after the other. With `by_token` all are, and then a token's result does not depend on the
 * parts in which its prompt came. */
#ifndef ARMATURE_RECUR_H
#define ARMATURE_RECUR_H

#include <omp.h>

#include "activate.h"
#include "recur_chunks.h"
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

#define CHANNELS 512 /* of a task: a few adjacent lines of each token, which are prefetched */

/* Convolve `count` channels of a token, of which `window[k]` has the inputs at place k; the last of them are stored there. */
INLINE void convolve_token(const recur_inputs_arguments *a, int64_t width, int64_t gated, float *const *window, const void *x, int64_t from, int64_t count, float *out) {
    const float *filters = a->filters + from, *bias = a->bias ? a->bias + from : NULL;
    const void *gates = element_of(a->wide, x, a->channels), *factors = element_of(a->wide, x, 2 * a->channels);
    for (int64_t i = 0; i < count; i += LANES) {
        const int64_t left = count - i;
        const vf given = row_load_part(a->wide, x, i, left), newest = gated ? given * row_load_part(a->wide, factors, i, left) : given;
        vf sum = newest * vf_load_part(filters + (width - 1) * a->channels + i, left);
        if (bias) sum += vf_load_part(bias + i, left);
#pragma GCC unroll 8
        for (int64_t k = 0; k < width - 1; k++) sum += vf_load(window[k] + i) * vf_load_part(filters + k * a->channels + i, left);
        vf_store(window[width - 1] + i, newest);
        vf_store_part(out + i, gated ? sum * row_load_part(a->wide, gates, i, left) : silu(sum), left);
    }
}

/* `count` channels from `from` on of the tokens of one sequence; the last inputs become the state. */
static void convolve_inputs(const recur_inputs_arguments *a, const state_run *run, int64_t from, int64_t count) {
    float inputs[MOST_WIDTH][CHANNELS] __attribute__((aligned(64)));
    const int64_t before = a->width - 1;
    float *tail = a->states + run->slot * a->slot_stride + from;
    for (int64_t k = 0; k < before; k++)
        for (int64_t i = 0; i < count; i += LANES) vf_store(inputs[k] + i, run->start ? vf_load_part(tail + k * a->channels + i, count - i) : vf_all(0));
    for (int64_t t = 0; t < run->num_tokens; t++) {
        const void *x = element_of(a->wide, a->x, (run->first + t) * a->x_stride + from);
        float *out = a->out + (run->first + t) * a->channels + from, *window[MOST_WIDTH];
        for (int64_t k = 0; k < a->width; k++) window[k] = inputs[(t + k) % a->width];
        if (a->gated && a->width == 3) convolve_token(a, 3, 1, window, x, from, count, out);
        else if (!a->gated && a->width == 4) convolve_token(a, 4, 0, window, x, from, count, out);
        else convolve_token(a, a->width, a->gated, window, x, from, count, out);
        if (run->drafts && a->kept) memcpy(a->kept + (run->first + t) * (a->channels + 2 * a->heads) + from, window[before], (size_t)count * sizeof *tail);
    }
    if (run->drafts) return;
    float *saved = run->saved < 0 ? NULL : a->states + run->saved * a->slot_stride + from;
    for (int64_t k = 0; k < before; k++) {
        const float *input = inputs[(run->num_tokens + k) % a->width];
        memcpy(tail + k * a->channels, input, (size_t)count * sizeof *tail);
        if (saved) memcpy(saved + k * a->channels, input, (size_t)count * sizeof *tail);
    }
}

/* The decay and the factor of each head of a token. */
static void token_scales(const recur_inputs_arguments *a, const state_run *run, int64_t row) {
    float *decays = a->scales + row * 2 * a->heads, *factors = decays + a->heads;
    const void *steps = element_of(a->wide_steps, a->steps, row * a->step_stride), *betas = a->betas ? element_of(a->wide_steps, a->betas, row * a->step_stride) : NULL;
    for (int64_t i = 0; i < a->heads; i += LANES) {
        const int64_t left = a->heads - i;
        vf step = softplus(row_load_part(a->wide_steps, steps, i, left) * (float)a->step_scale + vf_load_part(a->step_bias + i, left));
        step = vf_select(step < (float)a->least, vf_all((float)a->least), vf_select(step > (float)a->most, vf_all((float)a->most), step));
        vf_store_part(decays + i, vf_exp(-vf_load_part(a->rates + i, left) * step), left);
        vf_store_part(factors + i, betas ? (float)a->beta_scale / (1.0f + vf_exp(-row_load_part(a->wide_steps, betas, i, left))) : step, left);
        if (!run->drafts || !a->kept) continue;
        float *kept = a->kept + row * (a->channels + 2 * a->heads) + a->channels + i;
        vf_store_part(kept, row_load_part(a->wide_steps, steps, i, left), left);
        if (betas) vf_store_part(kept + a->heads, row_load_part(a->wide_steps, betas, i, left), left);
    }
}

/* A thread has the same channels of all runs, which may follow each other in one slot. */
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
        for (int64_t t = 0; t < run->num_tokens; t++) token_scales(a, run, run->first + t);
    }
#pragma omp barrier
}

/* ---- the recurrence ---- */

#define VECTORS (STATE_COLUMNS / LANES)
#define TOGETHER (VECTORS < 4 ? VECTORS : 4) /* whose sums fit the registers */

/* The sums over keys of x[k] * state row k and of y[k] * state row k, of the columns from `state` on. */
INLINE void read_state(const float *state, int64_t size, const float *x, const float *y, vf *of_x, vf *of_y) {
    vf sums[TOGETHER], others[TOGETHER];
#pragma GCC unroll 8
    for (int n = 0; n < TOGETHER; n++) sums[n] = others[n] = vf_all(0);
    for (int64_t k = 0; k < size; k++) {
#pragma GCC unroll 8
        for (int n = 0; n < TOGETHER; n++) {
            const vf row = vf_load(state + k * STATE_COLUMNS + n * LANES);
            sums[n] += x[k] * row, others[n] += y[k] * row;
        }
    }
#pragma GCC unroll 8
    for (int n = 0; n < TOGETHER; n++) of_x[n] = sums[n], of_y[n] = others[n];
}

/* state row k = decay * state row k + key[k] * added. */
INLINE void write_state(float *state, int64_t size, float decay, const float *key, const vf *added) {
    vf values[TOGETHER];
#pragma GCC unroll 8
    for (int n = 0; n < TOGETHER; n++) values[n] = added[n];
    for (int64_t k = 0; k < size; k++) {
#pragma GCC unroll 8
        for (int n = 0; n < TOGETHER; n++) {
            float *at = state + k * STATE_COLUMNS + n * LANES;
            vf_store(at, vf_load(at) * decay + key[k] * values[n]);
        }
    }
}

/* The same, and the sums over keys of query[k] * state row k. */
INLINE void write_and_read_state(float *state, int64_t size, float decay, const float *key, const float *query, const vf *added, vf *result) {
    vf values[TOGETHER], sums[TOGETHER];
#pragma GCC unroll 8
    for (int n = 0; n < TOGETHER; n++) values[n] = added[n], sums[n] = vf_all(0);
    for (int64_t k = 0; k < size; k++) {
#pragma GCC unroll 8
        for (int n = 0; n < TOGETHER; n++) {
            float *at = state + k * STATE_COLUMNS + n * LANES;
            const vf row = vf_load(at) * decay + key[k] * values[n];
            vf_store(at, row);
            sums[n] += query[k] * row;
        }
    }
#pragma GCC unroll 8
    for (int n = 0; n < TOGETHER; n++) result[n] = sums[n];
}

/* One token in STATE_COLUMNS elements of the values of a head, of which `left` are not padding. */
INLINE void recur_token(const recur_arguments *a, const token_keys *of, float *state, int64_t row, int64_t head, int64_t from, int64_t left) {
    const float *value = a->x + row * a->channels + a->value + head * a->value_size + from, *query = of->query, *key = of->key;
    const float decay = a->scales[row * 2 * a->heads + head], factor = a->scales[(row * 2 + 1) * a->heads + head], skip = a->skips ? a->skips[head] : 0.0f;
    float *out = a->out + (row * a->heads + head) * a->value_size + from;
    for (int part = 0; part < VECTORS && part * LANES < left; part += TOGETHER) {
        vf values[TOGETHER], read[TOGETHER], result[TOGETHER];
        for (int n = 0; n < TOGETHER; n++) values[n] = (part + n) * LANES < left ? vf_load_part(value + (part + n) * LANES, left - (part + n) * LANES) : vf_all(0);
        float *columns = state + part * LANES;
        if (a->delta) {
            read_state(columns, a->key_size, key, query, read, result);
            for (int n = 0; n < TOGETHER; n++) {
                const vf added = (values[n] - read[n] * (decay * of->key_scale)) * factor;
                result[n] = result[n] * (decay * of->query_scale) + of->both * added;
                values[n] = added * of->key_scale;
            }
            write_state(columns, a->key_size, decay, key, values);
        } else {
            for (int n = 0; n < TOGETHER; n++) read[n] = values[n] * factor;
            write_and_read_state(columns, a->key_size, decay, key, query, read, result);
            for (int n = 0; n < TOGETHER; n++) result[n] += values[n] * skip;
        }
        for (int n = 0; n < TOGETHER; n++)
            if ((part + n) * LANES < left) vf_store_part(out + (part + n) * LANES, result[n], left - (part + n) * LANES);
    }
}

/* The same tokens as `recur_run` computes one after the other, from a copy of the state. */
static void recur_drafts(const recur_arguments *a, const state_run *run, const float *states, int64_t first, int64_t end) {
    float state[MOST_KEYS * STATE_COLUMNS] __attribute__((aligned(64)));
    const int64_t tiles = (a->value_size + STATE_COLUMNS - 1) / STATE_COLUMNS, tile_size = a->key_size * STATE_COLUMNS, per_group = a->heads / a->key_heads;
    for (int64_t unit = first; unit < end; unit++) {
        const int64_t head = unit / tiles, from = unit % tiles * STATE_COLUMNS;
        memcpy(state, states + unit * tile_size, (size_t)tile_size * sizeof *state);
        for (int64_t row = run->first; row < run->first + run->num_tokens; row++) {
            const token_keys of = keys_of(a, row, head / per_group);
            recur_token(a, &of, state, row, head, from, a->value_size - from);
        }
    }
}

/* The units [first, end), each STATE_COLUMNS elements of the values of a head, of one sequence. */
static void recur_run(const recur_arguments *a, const state_run *run, int64_t first, int64_t end) {
    const int64_t tiles = (a->value_size + STATE_COLUMNS - 1) / STATE_COLUMNS, tile_size = a->key_size * STATE_COLUMNS, per_group = a->heads / a->key_heads;
    float *states = a->states + run->slot * a->slot_stride;
    if (!run->start) memset(states + first * tile_size, 0, (size_t)((end - first) * tile_size) * sizeof *states);
    if (!a->by_token && (run->drafts || run->num_tokens >= LEAST_CHUNK)) {
        recur_chunks(a, run, states, first, end);
        return;
    }
    if (run->drafts) {
        recur_drafts(a, run, states, first, end);
        return;
    }
    for (int64_t row = run->first; row < run->first + run->num_tokens; row++) {
        token_keys of = {0};
        for (int64_t unit = first, group = -1; unit < end; unit++) {
            const int64_t head = unit / tiles, from = unit % tiles * STATE_COLUMNS;
            if (head / per_group != group) group = head / per_group, of = keys_of(a, row, group);
            recur_token(a, &of, states + unit * tile_size, row, head, from, a->value_size - from);
        }
    }
}

static void recur(const void *arguments) {
    const recur_arguments *a = arguments;
    const int64_t units = a->heads * ((a->value_size + STATE_COLUMNS - 1) / STATE_COLUMNS), thread = omp_get_thread_num(), threads = omp_get_num_threads();
    const int64_t first = units * thread / threads, end = units * (thread + 1) / threads;
    for (int64_t i = 0; i < a->step->num_runs && first < end; i++) {
        const state_run *run = &a->step->runs[i];
        recur_run(a, run, first, end);
        if (run->drafts || run->saved < 0) continue;
        const int64_t tile_size = a->key_size * STATE_COLUMNS;
        memcpy(a->states + run->saved * a->slot_stride + first * tile_size, a->states + run->slot * a->slot_stride + first * tile_size, (size_t)((end - first) * tile_size) * sizeof *a->states);
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
