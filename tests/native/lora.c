/* Products of LoRA adapters, added to rows. */
#include "activations.h"

#define SLOTS 3

static int64_t up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

/* Random weights of a part at most once in three times absent; `a` and `b` are in plain order, the part's are packed. */
static lora_part random_part(int64_t wide, int64_t inputs, int64_t outputs, int64_t rank, float *a, float *b) {
    const int64_t ranks = up(rank, 4), columns = up(inputs, 16), panels = up(outputs, PANEL_OUTPUTS);
    void *packed_a = room(ranks * columns * (wide ? 4 : 2)), *packed_b = room(panels * rank * (wide ? 4 : 2));
    for (int64_t r = 0; r < ranks; r++)
        for (int64_t k = 0; k < columns; k++) {
            const float x = r < rank && k < inputs ? float_of_bf16(bf16_of_float(number())) : 0;
            if (r < rank && k < inputs) a[r * inputs + k] = x;
            set_element(packed_a, wide, (r / 4 * (columns / 16) + k / 16) * 64 + r % 4 * 16 + k % 16, x);
        }
    for (int64_t o = 0; o < panels; o++)
        for (int64_t r = 0; r < rank; r++) {
            const float x = o < outputs ? float_of_bf16(bf16_of_float(number())) : 0;
            if (o < outputs) b[o * rank + r] = x;
            set_element(packed_b, wide, (o / PANEL_OUTPUTS * rank + r) * PANEL_OUTPUTS + o % PANEL_OUTPUTS, x);
        }
    return (lora_part){packed_a, packed_b, rank};
}

/* Check the rows of y, which were 1 before. x [rows, inputs] is what the kernel read. */
static void check_rows(const lora_arguments *a, const float *x, float *const *plain_a, float *const *plain_b, const int64_t *slots) {
    for (int64_t row = 0; row < a->rows; row++)
        for (int64_t part = 0; part < a->num_parts; part++) {
            const int64_t at = slots[row] * a->num_parts + part;
            const int64_t rank = slots[row] < 0 ? 0 : a->parts[at].rank;
            for (int64_t o = 0; o < a->outputs[part]; o++) {
                double sum = 1, size = 1;
                for (int64_t r = 0; r < rank; r++) {
                    double inner = 0;
                    for (int64_t k = 0; k < a->inputs; k++) inner += (double)plain_a[at][r * a->inputs + k] * x[row * a->inputs + k];
                    sum += inner * plain_b[at][o * rank + r], size += fabs(inner * plain_b[at][o * rank + r]);
                }
                const float found = get_element(a->y, a->wide_y, row * a->y_stride + a->first_outputs[part] + o);
                if (!close_to(found, sum, (a->wide_y ? 1e-5 : 1e-2) * size)) failed("row %d, part %d, output %d: %g for %g", (int)row, (int)part, (int)o, found, sum);
            }
        }
}

static void one_adapter_step(int64_t i) {
    const int64_t rows = between(1, 19), inputs = i % 5 ? between(1, 200) : between(500, 1100), num_parts = between(1, LORA_PARTS), wide = i % 3 == 0;
    const int64_t wide_x = i & 1, wide_y = i >> 1 & 1, stride = inputs + below(3);
    lora_arguments a = {.rows = rows, .inputs = inputs, .x_stride = stride, .num_parts = num_parts, .max_rank = 20, .wide_x = wide_x, .wide_y = wide_y, .wide_weights = wide};
    lora_part parts[SLOTS * LORA_PARTS];
    float *plain_a[SLOTS * LORA_PARTS], *plain_b[SLOTS * LORA_PARTS];
    for (int64_t part = 0, first = 0; part < num_parts; part++) a.outputs[part] = between(1, 100), a.first_outputs[part] = first, first += a.outputs[part], a.y_stride = first;
    for (int64_t at = 0; at < SLOTS * num_parts; at++) {
        const int64_t rank = below(3) ? between(1, 20) : 0, outputs = a.outputs[at % num_parts];
        plain_a[at] = room(rank * inputs * 4 + 1), plain_b[at] = room(outputs * rank * 4 + 1);
        parts[at] = rank ? random_part(wide, inputs, outputs, rank, plain_a[at], plain_b[at]) : (lora_part){NULL, NULL, 0};
    }
    int64_t slots[19];
    lora_step *step = room(sizeof(int64_t) + rows * sizeof(lora_block));
    step->num_blocks = 0;
    for (int64_t row = 0; row < rows; row++) {
        slots[row] = below(SLOTS + 1) - 1;
        lora_block *last = step->num_blocks ? step->blocks + step->num_blocks - 1 : NULL;
        if (slots[row] < 0) continue;
        if (last && last->slot == slots[row] && last->count < LORA_ROWS) last->rows[last->count++] = row;
        else step->blocks[step->num_blocks++] = (lora_block){slots[row], 1, {row}};
    }
    activations quantized = new_activations(rows, inputs, between(1, 3) * 32, ANY);
    void *x = room(((rows - 1) * stride + inputs) * (wide_x ? 4 : 2)), *y = room(rows * a.y_stride * (wide_y ? 4 : 2));
    float *plain = room(rows * inputs * 4), *shrunk = room(rows * num_parts * a.max_rank * 4);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t k = 0; k < inputs; k++) {
            set_element(x, wide_x, row * stride + k, number());
            plain[row * inputs + k] = get_element(x, wide_x, row * stride + k);
        }
    if (i % 4 == 1) {
        quantize_activations(&quantized);
        for (int64_t row = 0; row < rows; row++)
            for (int64_t k = 0; k < inputs; k++) {
                const plain_group g = from_tiles(&quantized, row, k / quantized.group);
                plain[row * inputs + k] = g.codes[k % quantized.group] * g.scale;
            }
        a.tiles = quantized.tiles, a.scales = quantized.scales, a.padded = quantized.padded, a.group = quantized.group, a.height = quantized.height;
    }
    for (int64_t at = 0; at < rows * a.y_stride; at++) set_element(y, wide_y, at, 1);
    a.x = x, a.y = y, a.parts = parts, a.step = step, a.shrunk = shrunk;
    run(OP_LORA, &a);
    check_rows(&a, plain, plain_a, plain_b, slots);
    for (int64_t at = 0; at < SLOTS * num_parts; at++) free(plain_a[at]), free(plain_b[at]), free((void *)parts[at].a), free((void *)parts[at].b);
    free_activations(&quantized);
    free(step), free(x), free(y), free(plain), free(shrunk);
}

int64_t adapters(void) {
    for (int64_t i = 0; i < 24; i++) one_adapter_step(i);
    return 24;
}
