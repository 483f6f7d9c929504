/* Tests of attention over whole texts: lengths, heads, windows, caps, relative positions, ALiBi and sinks, of bf16 and of fp32,
 * against plain loops. */
#include "proof.h"

static const int64_t TEXT_HEADS[] = {64, 32, 80, 256, 18, 128};

static double element(const texts_arguments *a, const void *rows, int64_t token, int64_t at) {
    return a->wide ? ((const float *)rows)[token * a->stride + at] : float_of_bf16(((const uint16_t *)rows)[token * a->stride + at]);
}

static double score_of(const texts_arguments *a, int64_t head, int64_t query, int64_t key) {
    double dot = 0;
    for (int64_t i = 0; i < a->head_dim; i++)
        dot += element(a, a->query, query, head * a->head_dim + i) * element(a, a->key, key, head / (a->heads / a->kv_heads) * a->head_dim + i);
    dot *= a->scale;
    if (a->softcap > 0) dot = a->softcap * tanh(dot / a->softcap);
    const int64_t ahead = key - query < -a->most ? -a->most : key - query > a->most ? a->most : key - query;
    if (a->slopes) dot += a->slopes[head] * (double)(key - query);
    return a->bias ? dot + a->bias[head * (2 * a->most + 1) + a->most + ahead] : dot;
}

static void check_query(const texts_arguments *a, int64_t head, int64_t query, int64_t begin, int64_t end) {
    const int64_t low = query - a->before > begin ? query - a->before : begin, high = query + a->after + 1 < end ? query + a->after + 1 : end;
    double *weights = room((high - low) * 8), total = a->sinks ? exp(a->sinks[head]) : 0;
    for (int64_t key = low; key < high; key++) total += weights[key - low] = exp(score_of(a, head, query, key));
    for (int64_t i = 0; i < a->head_dim; i++) {
        double expected = 0;
        for (int64_t key = low; key < high; key++)
            expected += weights[key - low] / total * element(a, a->value, key, head / (a->heads / a->kv_heads) * a->head_dim + i);
        const int64_t at = query * a->out_stride + head * a->head_dim + i;
        const double found = a->wide ? ((const float *)a->out)[at] : float_of_bf16(((const uint16_t *)a->out)[at]);
        if (!close_to(found, expected, a->wide ? 1e-4 : 0.03)) failed("head %d, token %d, element %d: %g for %g", (int)head, (int)query, (int)i, found, expected);
    }
    free(weights);
}

int64_t whole_texts(void) {
    for (int64_t i = 0; i < 12; i++) {
        const int64_t kv_heads = between(1, 2), heads = kv_heads * between(1, 3), size = TEXT_HEADS[i % 6], count = between(1, 3), wide = i / 6, bytes = wide ? 4 : 2;
        text_list *list = room(8 * (count + 2));
        list->count = count, list->starts[0] = 0;
        for (int64_t n = 0; n < count; n++) list->starts[n + 1] = list->starts[n] + (n ? between(1, 40) : i % 6 < 2 ? between(260, 330) : between(60, 140)); /* longer than one block */
        const int64_t tokens = list->starts[count], columns = (heads + 2 * kv_heads) * size, stride = columns + below(3), values = (tokens - 1) * stride + columns;
        const int64_t most = between(1, 50), reach = i % 3 == 1 ? below(70) : (int64_t)1 << 40;
        char *x = room(values * bytes), *out = room(tokens * heads * size * bytes);
        float *bias = i % 4 == 3 ? room(heads * (2 * most + 1) * 4) : NULL;
        for (int64_t at = 0; at < values; at++) {
            const float value = 2 * number();
            const uint16_t narrow = bf16_of_float(value);
            memcpy(x + at * bytes, wide ? (const void *)&value : &narrow, (size_t)bytes);
        }
        float *sinks = i % 5 == 1 ? room(heads * 4) : NULL, *slopes = i % 4 == 1 ? room(heads * 4) : NULL;
        for (int64_t head = 0; sinks && head < heads; head++) sinks[head] = 4 * number();
        for (int64_t head = 0; slopes && head < heads; head++) slopes[head] = number() / 8;
        for (int64_t at = 0; bias && at < heads * (2 * most + 1); at++) bias[at] = number();
        const texts_arguments a = {
            x, x + heads * size * bytes, x + (heads + kv_heads) * size * bytes, out, list, bias, stride, heads * size, heads, kv_heads, size,
            reach, i % 2 ? reach : 0, most, wide, 1 / sqrt((double)size), i % 5 == 2 ? 5 : 0, sinks, slopes,
        };
        run(OP_TEXTS, &a);
        for (int64_t n = 0; n < count; n++)
            for (int64_t query = list->starts[n]; query < list->starts[n + 1]; query += 1 + below(9))
                for (int64_t head = 0; head < heads; head++) check_query(&a, head, query, list->starts[n], list->starts[n + 1]);
        free(list), free(x), free(out), free(bias), free(sinks), free(slopes);
    }
    return 12;
}
