/* Tests of what takes the place of plain heads: the rows of latent attention, and short convolutions over a cache. */
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

int64_t convolved(void) {
    for (int64_t i = 0; i < 8; i++) {
        const int64_t rows = between(1, 9), size = between(1, 200), wide = i % 2, stride = 3 * size + below(3);
        void *x = elements((rows - 1) * stride + 3 * size, wide), *out = room(rows * 2 * size * (wide ? 4 : 2));
        const convolved_rows_arguments a = {x, out, stride, rows, size, wide};
        run(OP_CONVOLVED_ROWS, &a);
        for (int64_t at = 0; at < rows * size; at++) {
            const int64_t row = at / size, column = at % size, from = row * stride + column, to = row * 2 * size + column;
            const float expected = get_element(x, wide, from) * get_element(x, wide, from + 2 * size), found = get_element(out, wide, to + size);
            if (!same(get_element(out, wide, to), get_element(x, wide, from + size))) failed("row %d, column %d is another gate", (int)row, (int)column);
            if (!close_to(found, expected, wide ? 1e-6 : fabsf(expected) / 200 + 1e-6)) failed("row %d, column %d: %g for %g", (int)row, (int)column, found, expected);
        }
        free(x), free(out);
    }
    return 8;
}

/* A prefix of a sequence may be in another place. */
static int64_t cached_row(const sequence *s, int64_t position) {
    const segment *part = s->num_segments > 1 && position >= s->segments[1].position ? s->segments + 1 : s->segments;
    return part->first + position - part->position;
}

static double convolution(const convolve_arguments *a, const cache *c, const sequence *s, int64_t token, int64_t channel) {
    const int64_t channels = 2 * a->heads * a->head_dim, block = channel / a->head_dim;
    double sum = 0;
    for (int64_t k = 0; k < a->width; k++) {
        const int64_t position = s->start + token - a->width + 1 + k;
        if (position < 0) continue;
        const float x = cached(c, block >= a->heads, cached_row(s, position), block % a->heads, channel % a->head_dim);
        sum += (double)x * a->filters[k * channels + channel];
    }
    return sum * get_element(a->query, a->wide, (s->first + token) * a->query_stride + channel);
}

int64_t convolutions(void) {
    static const int64_t HEAD_DIMS[] = {64, 8, 80, 256, 12, 72};
    for (int64_t i = 0; i < 12; i++) {
        const int64_t heads = between(1, 3), head_dim = HEAD_DIMS[i % 6], channels = 2 * heads * head_dim, count = between(1, 4), width = between(1, 4);
        const int kind = (int)(i % 3), wide = kind == CACHE_FP32;
        attention_step *step = room((int64_t)sizeof *step + count * (int64_t)sizeof(sequence));
        int64_t tokens = 0, held = 0;
        for (int64_t n = 0; n < count; n++) {
            const int64_t start = below(9), own = n % 2 ? between(1, 20) : 1, prefix = start ? below(start) : 0;
            sequence s = {.first = tokens, .num_tokens = own, .start = start, .num_segments = prefix ? 2 : 1};
            if (prefix) s.segments[0] = (segment){held, prefix, 0}, held += prefix + 1;
            s.segments[s.num_segments - 1] = (segment){held, start + own - prefix, prefix};
            held += start + own - prefix, tokens += own, step->sequences[n] = s;
        }
        step->num_sequences = count, step->scratch = NULL;
        cache c = new_cache(held, heads, head_dim, kind, 1);
        const int64_t strides[2] = {channels + below(3), channels + below(3)};
        void *query = elements((tokens - 1) * strides[0] + channels, wide), *out = room(((tokens - 1) * strides[1] + channels) * (wide ? 4 : 2));
        float *filters = elements(width * channels, 1);
        const convolve_arguments a = {query, out, step, c.kv, filters, strides[0], strides[1], heads, head_dim, width, wide};
        run(OP_CONVOLVE, &a);
        for (int64_t n = 0; n < count; n++)
            for (int64_t at = 0; at < step->sequences[n].num_tokens * channels; at++) {
                const int64_t token = at / channels, channel = at % channels;
                const double expected = convolution(&a, &c, &step->sequences[n], token, channel);
                const float found = get_element(out, wide, (step->sequences[n].first + token) * strides[1] + channel);
                if (!close_to(found, expected, (wide ? 1e-5 : fabs(expected) / 200) + 1e-5)) failed("sequence %d, token %d, channel %d: %g for %g", (int)n, (int)token, (int)channel, found, expected);
            }
        free(step), free(c.bytes), free(query), free(out), free(filters);
    }
    return 12;
}
