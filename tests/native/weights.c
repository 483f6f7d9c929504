/* Weights: generated, and packed by the library. */
#include "weights.h"

/* As csrc/pack_int.c declares it. */
typedef struct {
    const uint8_t *codes, *scales;
    const uint16_t *others;
    uint8_t *panels;
    int64_t outputs, first, padded, group, bits, header;
} pack_arguments;

void armature_pack_int(const pack_arguments *arguments);

static uint8_t random_code(int64_t bits, int kind) {
    if (bits == 4) return (uint8_t)(kind == EXTREME ? below(2) * 15 : below(16));
    return (uint8_t)(int8_t)(kind == EXTREME ? (below(2) ? 127 : -128) : between(-127, 127));
}

/* In two parts, as from the shards of a checkpoint. */
static void pack(const weights *w) {
    const int64_t ends[] = {0, below(w->outputs + 1), w->outputs};
    for (int i = 0; i < 2; i++) {
        const int64_t first = ends[i], at = first * w->groups;
        const int doubly = w->header == DOUBLE_QUANTIZED;
        const pack_arguments arguments = {
            w->codes + first * w->padded, doubly ? (const uint8_t *)w->scale_codes + at : (const uint8_t *)(w->scales + at),
            doubly ? w->scales + first : w->low ? w->low + at : NULL, w->panels, ends[i + 1] - first, first, w->padded, w->group, w->bits, w->header,
        };
        armature_pack_int(&arguments);
    }
}

weights new_weights(int64_t outputs, int64_t inputs, int64_t group, int64_t bits, int64_t header, int kind) {
    weights w = {outputs, inputs, 0, group, (inputs + group - 1) / group, bits, header, NULL, NULL, NULL, NULL, NULL};
    w.padded = w.groups * group;
    w.codes = room(outputs * w.padded);
    w.scales = room(outputs * w.groups * 2);
    w.low = header == SCALES_AND_MINIMUMS ? room(outputs * w.groups * 2) : NULL;
    w.scale_codes = header == DOUBLE_QUANTIZED ? room(outputs * w.groups) : NULL;
    for (int64_t i = 0; i < outputs * w.padded; i++) w.codes[i] = random_code(bits, kind);
    for (int64_t i = 0; i < outputs * w.groups; i++) {
        const float power = bits == 4 ? (float)(1 << below(2)) : 1, scale = kind == ANY ? number() / 16 : power;
        w.scales[i] = bf16_of_float(scale);
        if (w.low) w.low[i] = bf16_of_float(kind == ANY ? number() / 2 : power * (float)between(-15, 15));
    }
    const int64_t panels = (outputs + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS;
    for (int64_t i = 0; w.scale_codes && i < outputs * w.groups; i++) w.scale_codes[i] = (int8_t)(kind == ANY ? between(-127, 127) : between(-1, 1) * (int64_t)(below(2) + 1));
    const int64_t own = w.groups * (header == SCALES_AND_MINIMUMS ? 128 : 64), doubly = 64 + (w.groups * 32 + 63) / 64 * 64;
    const int64_t bytes = panels * ((header == DOUBLE_QUANTIZED ? doubly : own) + w.groups * group * PANEL_OUTPUTS * bits / 8);
    w.panels = memset(room(bytes), 0, (size_t)bytes);
    pack(&w);
    return w;
}

void free_weights(weights *w) {
    free(w->codes), free(w->scales), free(w->low), free(w->scale_codes), free(w->panels);
    *w = (weights){0};
}

int32_t code_of(const weights *w, int64_t output, int64_t k) {
    const uint8_t code = w->codes[output * w->padded + k];
    return w->bits == 8 ? (int8_t)code : w->header == SCALES_AND_MINIMUMS ? code : code - 8;
}

float scale_of(const weights *w, int64_t output, int64_t g) {
    if (w->header != DOUBLE_QUANTIZED) return float_of_bf16(w->scales[output * w->groups + g]);
    const int code = w->scale_codes[output * w->groups + g];
    return float_of_bf16(w->scales[output]) * (float)(code * abs(code));
}

float minimum_of(const weights *w, int64_t output, int64_t g) { return w->low ? float_of_bf16(w->low[output * w->groups + g]) : 0; }

/* The error of values [group] rounded with a scale. */
static double rounding_error(const float *values, int64_t group, double scale) {
    double error = 0;
    for (int64_t i = 0; i < group; i++) {
        const double code = scale == 0 ? 0 : fmin(fmax(nearbyint(values[i] / scale), -8), 7), rest = values[i] - code * scale;
        error += rest * rest;
    }
    return error;
}

/* The error with the best scale for the codes of a candidate. */
static double fitted_error(const float *values, int64_t group, float divisor) {
    float top = 0;
    for (int64_t i = 0; i < group; i++) top = fabsf(values[i]) > fabsf(top) ? values[i] : top;
    double along = 0, length = 0, square = 0;
    for (int64_t i = 0; i < group && top != 0; i++) {
        const double code = fmin(fmax(nearbyint((double)values[i] / top * divisor), -8), 7);
        along += code * values[i], length += code * code, square += (double)values[i] * values[i];
    }
    return length > 0 ? square - along * along / length : square;
}

int64_t int4_scales(void) {
    static const float divisors[] = {-7.5f, -8.2f, 7.2f};
    int64_t shapes = 0;
    for (int64_t group = 32; group <= 128; group *= 2, shapes++) {
        const int64_t groups = below(70) + 1;
        float *values = room(groups * group * 4), *scales = room(groups * 4);
        for (int64_t i = 0; i < groups * group; i++) values[i] = i < group && groups > 3 ? 0 : number();
        const int4_scales_arguments arguments = {values, divisors, scales, groups, group, 3};
        run(OP_INT4_SCALES, &arguments);
        for (int64_t g = 0; g < groups; g++) {
            double least = 1e30;
            for (int d = 0; d < 3; d++) least = fmin(least, fitted_error(values + g * group, group, divisors[d]));
            const double error = rounding_error(values + g * group, group, scales[g]); /* a tie may choose another candidate */
            if (!(error <= least * 1.25 + 1e-9)) failed("scale %d of groups of %d leaves %g, not %g", (int)g, (int)group, error, least);
        }
        free(values), free(scales);
    }
    return shapes;
}

int64_t gptq_codes(void) {
    static const int64_t sizes[] = {1, 15, 16, 17, 35, 64, 130, MOST_GPTQ_INPUTS};
    for (int64_t shape = 0; shape < 8; shape++) {
        const int64_t inputs = sizes[shape], outputs = below(90) + 1, group = 32, groups = (inputs + group - 1) / group;
        const int64_t root_stride = inputs + below(5), stride = inputs + below(5), code_stride = inputs + below(9);
        float *weight = room(((outputs - 1) * stride + inputs) * 4), *scales = room(groups * outputs * 4);
        float *root = room(((inputs - 1) * root_stride + inputs) * 4);
        int64_t *order = room(inputs * 8);
        uint8_t *codes = memset(room((outputs - 1) * code_stride + inputs), 99, (size_t)((outputs - 1) * code_stride + inputs));
        for (int64_t i = 0; i < (outputs - 1) * stride + inputs; i++) weight[i] = number();
        for (int64_t i = 0; i < groups * outputs; i++) scales[i] = below(5) ? number() / 8 : 0;
        for (int64_t i = 0; i < (inputs - 1) * root_stride + inputs; i++) root[i] = number() / (float)inputs;
        for (int64_t j = 0; j < inputs; j++) root[j * root_stride + j] = 1 + number() / 2, order[j] = j;
        for (int64_t j = inputs - 1; j > 0; j--) { /* shuffled */
            const int64_t other = below(j + 1), kept = order[j];
            order[j] = order[other], order[other] = kept;
        }
        const int4_gptq_arguments arguments = {weight, scales, root, order, codes, inputs, outputs, groups, group, stride, root_stride, code_stride};
        run(OP_INT4_GPTQ, &arguments);
        for (int64_t o = 0; o < outputs; o++) {
            double x[MOST_GPTQ_INPUTS];
            for (int64_t j = 0; j < inputs; j++) x[j] = weight[o * stride + order[j]];
            for (int64_t j = 0; j < inputs; j++) { /* its own codes are followed: a tie may fall either way */
                const double scale = scales[o * groups + order[j] / group], code = codes[o * code_stride + order[j]] - 8.0;
                const double exact = scale == 0 ? 0 : fmin(fmax(x[j] / scale, -8), 7), error = (x[j] - code * scale) / root[j * root_stride + j];
                if (fabs(code - exact) > 0.51) failed("code %d of output %d: %g for %g", (int)j, (int)o, code, exact);
                for (int64_t k = j + 1; k < inputs; k++) x[k] -= error * root[k * root_stride + j];
            }
            for (int64_t i = inputs; i < code_stride && o + 1 < outputs; i++)
                if (codes[o * code_stride + i] != 99) failed("a byte beyond the codes was written");
        }
        free(weight), free(scales), free(root), free(order), free(codes);
    }
    return 8;
}
