/* Tests of what takes the place of plain heads: the rows of latent attention, recurrences. */
#include "cache.h"

static void *elements(int64_t count, int64_t wide) {
    void *x = room(count * (wide ? 4 : 2));
    for (int64_t at = 0; at < count; at++) set_element(x, wide, at, 2 * number());
    return x;
}

/* Element `at` of the rotated part of a head in the order of the file. */
static int64_t stored_at(const latent_arguments *a, int64_t at) {
    const int64_t half = a->rotated / 2;
    return a->interleaved ? 2 * (at % half) + at / half : at;
}

static float latent_element(const latent_arguments *a, int64_t row, int64_t part, int64_t head, int64_t i) {
    const int64_t size = a->rotated + a->plain, other = row * a->other_stride + head * (a->plain + a->value);
    if (part == 2) return i < a->value ? get_element(a->others, a->wide, other + a->plain + i) : 0;
    if (i < a->rotated && part) return get_element(a->rotated_keys, a->wide, row * a->key_stride + stored_at(a, i));
    const int64_t query = row * a->query_stride + head * size;
    if (i < a->rotated) return get_element(a->queries, a->wide, query + a->plain + stored_at(a, i));
    return part ? get_element(a->others, a->wide, other + i - a->rotated) : get_element(a->queries, a->wide, query + i - a->rotated);
}

int64_t latent_rows(void) {
    for (int64_t i = 0; i < 12; i++) {
        const int64_t rows = between(1, 9), heads = between(1, 5), plain = 8 * between(1, 16), rotated = 2 * between(1, 32), size = plain + rotated;
        const int64_t value = between(1, size), wide = i % 2, strides[3] = {heads * size + below(3), heads * (plain + value) + below(3), rotated + below(3)};
        void *queries = elements((rows - 1) * strides[0] + heads * size, wide), *others = elements((rows - 1) * strides[1] + heads * (plain + value), wide);
        void *keys = elements((rows - 1) * strides[2] + rotated, wide), *out = room(rows * 3 * heads * size * (wide ? 4 : 2));
        const latent_arguments a = {queries, others, keys, out, strides[0], strides[1], strides[2], rows, heads, plain, rotated, value, i % 3 > 0, wide};
        run(OP_LATENT, &a);
        for (int64_t at = 0; at < rows * 3 * heads * size; at++) {
            const int64_t head = at / size % (3 * heads);
            const float expected = latent_element(&a, at / size / (3 * heads), head / heads, head % heads, at % size);
            if (!same(get_element(out, wide, at), expected)) failed("element %d: %g for %g", (int)at, get_element(out, wide, at), expected);
        }
        free(queries), free(others), free(keys), free(out);
    }
    return 12;
}

/* The state of a head, one key of the matrix after the other, in the library's order of columns. */
static int64_t state_at(const recur_arguments *a, int64_t head, int64_t key, int64_t value) {
    const int64_t tiles = (a->value_size + STATE_COLUMNS - 1) / STATE_COLUMNS;
    return ((head * tiles + value / STATE_COLUMNS) * a->key_size + key) * STATE_COLUMNS + value % STATE_COLUMNS;
}

/* A token of a head in double precision, in the state of one sequence. */
static void recurred(const recur_arguments *a, double *state, int64_t row, int64_t head, double *out) {
    const int64_t group = head / (a->heads / a->key_heads);
    const float *x = a->x + row * a->channels, *key = x + a->key + group * a->key_size, *query = x + a->query + group * a->key_size;
    const double decay = a->scales[row * 2 * a->heads + head], factor = a->scales[(row * 2 + 1) * a->heads + head];
    double keys = 1e-6, queries = 1e-6;
    for (int64_t k = 0; k < a->key_size; k++) keys += (double)key[k] * key[k], queries += (double)query[k] * query[k];
    const double of_key = a->delta ? 1 / sqrt(keys) : 1, of_query = a->delta ? 1 / sqrt(queries * (double)a->key_size) : 1;
    for (int64_t v = 0; v < a->value_size; v++) {
        const double value = x[a->value + head * a->value_size + v];
        double known = 0, sum = a->skips ? a->skips[head] * value : 0;
        for (int64_t k = 0; a->delta && k < a->key_size; k++) known += key[k] * of_key * decay * state[state_at(a, head, k, v)];
        for (int64_t k = 0; k < a->key_size; k++) {
            double *at = &state[state_at(a, head, k, v)];
            *at = decay * *at + key[k] * of_key * factor * (value - known);
            sum += query[k] * of_query * *at;
        }
        out[v] = sum;
    }
}

int64_t recurrences(void) {
    static const int64_t TOKENS[] = {1, 3, 4, 32, 33, 70};
    for (int64_t i = 0; i < 16; i++) {
        const int64_t groups = between(1, 3), heads = groups * between(1, 3), key_size = i == 15 ? MOST_KEYS : between(1, 70), value_size = between(1, 70), runs = between(1, 3), delta = i % 2;
        const int64_t channels = 2 * groups * key_size + heads * value_size, stride = heads * ((value_size + STATE_COLUMNS - 1) / STATE_COLUMNS) * STATE_COLUMNS * key_size;
        state_step *step = room((int64_t)sizeof *step + runs * (int64_t)sizeof *step->runs);
        int64_t tokens = 0;
        step->num_runs = runs;
        for (int64_t n = 0; n < runs; n++) {
            step->runs[n] = (state_run){tokens, TOKENS[below(6)], n % 2, n, n % 2 && i % 3 == 0, n ? -1 : runs};
            if (step->runs[n].drafts && step->runs[n].num_tokens > STATE_COLUMNS) step->runs[n].num_tokens = STATE_COLUMNS;
            tokens += step->runs[n].num_tokens;
        }
        float *x = elements(tokens * channels, 1), *scales = room(tokens * 2 * heads * 4), *skips = elements(heads, 1), *out = room(tokens * heads * value_size * 4);
        float *states = room((runs + 1) * stride * 4);
        double *known = room(stride * 8), expected[70];
        for (int64_t at = 0; at < tokens * 2 * heads; at++) scales[at] = fabsf(number());
        for (int64_t at = 0; at < (runs + 1) * stride; at++) states[at] = number();
        const recur_arguments a = {x, scales, delta ? NULL : skips, step, out, states, stride, channels, 0, groups * key_size, 2 * groups * key_size, heads, groups, key_size, value_size, delta, i % 4 == 0};
        float *before = room(runs * stride * 4);
        memcpy(before, states, (size_t)(runs * stride) * 4);
        run(OP_RECUR, &a);
        for (int64_t n = 0; n < runs; n++) {
            for (int64_t at = 0; at < stride; at++) known[at] = step->runs[n].start ? before[n * stride + at] : 0;
            for (int64_t at = 0; at < step->runs[n].num_tokens * heads; at++) {
                const int64_t row = step->runs[n].first + at / heads, head = at % heads;
                recurred(&a, known, row, head, expected);
                for (int64_t v = 0; v < value_size; v++) {
                    const float found = out[(row * heads + head) * value_size + v];
                    if (!close_to(found, expected[v], 1e-4 * (fabs(expected[v]) + sqrt((double)key_size)))) failed("row %d, head %d, value %d: %g for %g", (int)row, (int)head, (int)v, found, expected[v]);
                }
            }
            for (int64_t at = 0; at < heads * key_size * value_size; at++) {
                const int64_t place = state_at(&a, at / value_size / key_size, at / value_size % key_size, at % value_size);
                const double kept = step->runs[n].drafts ? before[n * stride + place] : known[place];
                if (!close_to(states[n * stride + place], kept, 1e-4 * (fabs(kept) + 10))) failed("state %d of sequence %d: %g for %g", (int)place, (int)n, states[n * stride + place], kept);
            }
        }
        if (memcmp(states, states + runs * stride, (size_t)stride * 4)) failed("another state is saved");
        free(step), free(x), free(scales), free(skips), free(out), free(states), free(before), free(known);
    }
    return 16;
}

static float input_of(const recur_inputs_arguments *a, int64_t token, int64_t channel) {
    const int64_t at = token * a->x_stride + channel;
    return get_element(a->x, a->wide, at) * (a->gated ? get_element(a->x, a->wide, at + 2 * a->channels) : 1.0f);
}

int64_t recurrent_inputs(void) {
    for (int64_t i = 0; i < 8; i++) {
        const int64_t channels = between(1, 600), heads = between(1, 40), width = between(2, MOST_WIDTH), wide = i % 2, tokens = between(1, 9), start = i % 3, gated = i > 5, x_stride = (gated ? 3 : 1) * channels + below(3), step_stride = heads + below(3);
        state_step *step = room((int64_t)sizeof *step + (int64_t)sizeof *step->runs);
        step->num_runs = 1, step->runs[0] = (state_run){0, tokens, start, 1, start > 1, start ? -1 : 0};
        const int64_t stride = (width - 1) * channels;
        void *x = elements((tokens - 1) * x_stride + (gated ? 3 : 1) * channels, wide), *steps = elements((tokens - 1) * step_stride + heads, wide), *betas = elements((tokens - 1) * step_stride + heads, wide);
        float *out = room(tokens * channels * 4), *scales = room(tokens * 2 * heads * 4), *states = elements(2 * stride, 1), *filters = elements(width * channels, 1), *kept = room(tokens * (channels + 2 * heads) * 4);
        float *bias = elements(channels, 1), *rates = elements(heads, 1), *step_bias = elements(heads, 1), *before = room(stride * 4);
        memcpy(before, states + stride, (size_t)stride * 4);
        const recur_inputs_arguments a = {x, steps, i % 2 ? betas : NULL, step, out, scales, states, kept, filters, bias, rates, step_bias, x_stride, step_stride, stride, channels, heads, width, wide, wide, gated, 0.1, 1.5, 0.5, 1.0};
        run(OP_RECUR_INPUTS, &a);
        for (int64_t at = 0; at < tokens * channels; at++) {
            const int64_t t = at / channels, c = at % channels;
            double sum = bias[c];
            for (int64_t k = 0; k < width; k++) {
                const int64_t from = t - width + 1 + k;
                sum += filters[k * channels + c] * (from >= 0 ? input_of(&a, from, c) : start ? before[(from + width - 1) * channels + c] : 0);
            }
            const double expected = gated ? sum * get_element(x, wide, t * x_stride + channels + c) : sum / (1 + exp(-sum));
            if (!close_to(out[at], expected, 1e-4 * (1 + fabs(expected)))) failed("token %d, channel %d: %g for %g", (int)t, (int)c, out[at], expected);
        }
        for (int64_t at = 0; at < tokens * heads; at++) {
            const int64_t t = at / heads, h = at % heads;
            const double plain = log1p(exp(get_element(steps, wide, t * step_stride + h) * 0.5 + step_bias[h])), kept = plain < 0.1 ? 0.1 : plain > 1.5 ? 1.5 : plain;
            const double factor = i % 2 ? 1 / (1 + exp(-get_element(betas, wide, t * step_stride + h))) : kept;
            if (!close_to(scales[t * 2 * heads + h], exp(-rates[h] * kept), 1e-4)) failed("token %d, head %d: another decay", (int)t, (int)h);
            if (!close_to(scales[(t * 2 + 1) * heads + h], factor, 1e-4)) failed("token %d, head %d: another factor", (int)t, (int)h);
        }
        for (int64_t at = 0; at < stride; at++) {
            const int64_t from = tokens * channels + at - stride, k = at / channels, c = at % channels;
            const float newest = from >= 0 ? input_of(&a, tokens - width + 1 + k, c) : start ? before[at + tokens * channels] : 0;
            if (!start && states[at] != newest) failed("input %d of the saved state: %g for %g", (int)at, states[at], newest);
            if (states[stride + at] != (start > 1 ? before[at] : newest)) failed("input %d of the state: %g for %g", (int)at, states[stride + at], newest);
        }
        for (int64_t at = 0; start > 1 && at < tokens * (channels + 2 * heads); at++) {
            const int64_t t = at / (channels + 2 * heads), c = at % (channels + 2 * heads), h = c - channels;
            const float given = h < 0 ? input_of(&a, t, c) : h < heads ? get_element(steps, wide, t * step_stride + h) : get_element(betas, wide, t * step_stride + h - heads);
            if ((h < heads || i % 2) && kept[at] != given) failed("token %d keeps %g for %g", (int)t, kept[at], given);
        }
        free(step), free(x), free(steps), free(betas), free(out), free(scales), free(states), free(filters), free(bias), free(rates), free(step_bias), free(before), free(kept);
    }
    return 8;
}
