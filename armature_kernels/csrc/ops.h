/* The interface between Python and the library: the operations and the arguments of each. Every field has eight
 * bytes, so that a caller needs only addresses and 64-bit numbers; `armature_kernels/native/arguments.py` mirrors this
 * file.
 *
 * An operation is a *team function*: `armature_run` opens one parallel region in which every thread walks the same
 * list. Each kernel divides its work among the threads, and none returns before all have done their part.
 *
 * Quantized activations
 *   A row of `size` inputs is padded with zeros to a multiple of `group`, itself a multiple of 32. Each group of a row has a scale:
 *   value = scale * code, code int8 in [-127, 127]. A group with NaN or infinity in it has the scale NaN. Each `shared` groups of
 *   a row have the same scale, which counts the largest value of all of them; a product may then add them before it multiplies
 *   by the scale. Rows are stored in
 *   *tiles* of `height` rows (the last may have fewer), so that a product reads a tile from the first to the last byte. A tile with
 *   `count` rows (rounded up to TILE_ALIGN) that begins at row `first` has
 *     codes at first * padded + (k / BLOCK) * count * BLOCK + row * BLOCK + k % BLOCK;
 *     scales (fp32) and sums (int32, the NEGATED sum of a group's codes) at first * groups + g * count + row.
 *   The level defines `height`, BLOCK and TILE_ALIGN: BLOCK is 4 for dot products and 8 for matrix products.
 *
 * Packed weights
 *   A *panel* holds 32 outputs, the last one padded with zeros. For each group of inputs: 32 scales (bf16), 32 minimums (bf16, if
 *   the form has them), then the codes. int4: value = scale * (code - 8), or scale * code + minimum; int8: value = scale * code.
 *   Double quantization (int4): a panel begins with one scale per output (32, bf16), followed by the codes of the groups' scales, 32
 *   signed bytes for each group, padded to a multiple of 64 bytes, and then by the weights' codes of all groups.
 *   Scale of a group = output's scale * c * |c|: squares are precise to 1% down to 1/100 of the largest scale of an output.
 *   Dot products (BLOCK 4): for each 8 inputs two lines of 64 bytes, outputs 0 to 15 and 16 to 31. int4: byte 4 * output + i holds
 *   input i in its low half and input 4 + i in its high half. int8: four lines, inputs 0 to 3 of both halves of the outputs, then
 *   inputs 4 to 7.
 *   Matrix products (BLOCK 8): the same bytes, but int4: byte 8 * o + i holds input i of output o (0 to 7) in its low half and of
 *   output o + 8 in its high half; int8: for each half of the outputs 128 bytes, byte 8 * output + i. */
#ifndef ARMATURE_OPS_H
#define ARMATURE_OPS_H

#include <stdint.h>

#define PANEL_OUTPUTS 32

typedef struct {
    int64_t code;
    const void *arguments;
} operation;

/* Every operation: its code is its place in this list, OP_<NAME>, and its arguments are <name>_arguments. */
#define EACH_OPERATION(row) \
    row(QUANTIZE, quantize)                   /* bf16 rows to quantized rows */ \
    row(NORM, norm)                           /* RMSNorm, then bf16 or quantized, or added to the residual stream */ \
    row(GATE, gate)                           /* act(gate) * up, then bf16 or quantized */ \
    row(TURN, turn)                           /* norms of query and key heads, RoPE, keys and values to the cache */ \
    row(LINEAR_INT, linear_int)               /* quantized rows times int4 or int8 panels */ \
    row(PICK, pick)                           /* the same, but only each row's top outputs are written */ \
    row(ATTENTION, attention)                 /* queries over cached keys and values */ \
    row(ROWS, rows)                           /* rows of weights, widened: an embedding */ \
    row(GATHER, gather)                       /* some rows of an fp32 matrix */ \
    row(LINEAR_BF16, linear_bf16) \
    row(ANGLES, angles)                       /* RoPE angles of positions */ \
    row(LAYER_NORM, layer_norm)               /* LayerNorm, then bf16 or quantized, and in place */ \
    row(ACTIVATE, activate)                   /* act(x), then bf16 or quantized */ \
    row(TEXTS, texts)                         /* attention of whole texts, without a cache */ \
    row(INT4_SCALES, int4_scales)             /* the scale of each group of weights, while weights are packed */ \
    row(INT4_GPTQ, int4_gptq)                 /* codes of some inputs of a weight by GPTQ */ \
    row(LINEAR_FP32, linear_fp32)             /* rows times fp32 panels, or bf16 panels that are widened while they are read */ \
    row(TOP, top)                             /* each row's top elements of an fp32 matrix */ \
    row(POOL, pool)                           /* rows of each text to one, or rows to unit length */ \
    row(LORA, lora)                           /* the products of LoRA adapters, added to a product's rows */ \
    row(ROUTE, route)                         /* each row's experts and their weights, from the router's logits */ \
    row(EXPERTS, experts)                     /* each row's experts, added to the residual stream */ \
    row(LATENT, latent)                       /* queries, keys and values of multi-head latent attention as rows of heads */ \
    row(ALTUP, altup)                         /* the streams of a row before a layer, or after it */ \
    row(MATCH, match)                         /* rows times a factor that gives them the rms of other rows */ \
    row(RECUR_INPUTS, recur_inputs)           /* a short convolution with a state, and what decays and is added */ \
    row(RECUR, recur)                         /* the gated delta rule or Mamba-2, over the states of a step's sequences */ \
    row(GATED_NORM, gated_norm)               /* norm(x) * act(gate), then bf16 or quantized */

#define OPERATION_CODE(NAME, name) OP_##NAME,
enum { EACH_OPERATION(OPERATION_CODE) OP_COUNT };

/* Destination of rows of activations: quantized if `tiles` is given, else `rows` bf16 or `wide` fp32, [rows, size]. A scale
 * is that of `shared` groups: 1, or 2, 4 or 8 groups of 32. */
typedef struct {
    uint16_t *rows;
    int8_t *tiles;
    float *scales;
    int32_t *sums;
    int64_t group, height;
    float *wide;
    int64_t shared;
} sink;

/* x [rows, size] bf16, row stride in elements. */
typedef struct {
    const uint16_t *x;
    int64_t stride, rows, size;
    sink out;
} quantize_arguments;

/* out = hidden / rms(hidden) * weight, hidden [rows, size] fp32 (row stride in elements), weight [size] fp32. If
 * `branch` [rows, size] is given, bf16 or, if `wide`, fp32, its norm is added to hidden instead, and `out` is not used:
 * hidden = (hidden + branch / rms(branch) * weight) * factor. Without `hidden`, out is the norm of `branch`, whose rows have the stride. */
typedef struct {
    float *hidden;
    const void *branch;
    const float *weight;
    int64_t stride, rows, size, wide;
    double eps;
    sink out;
    double factor;
} norm_arguments;

/* out = (hidden - mean) / sqrt(variance + eps) * weight (+ bias), hidden [rows, size] fp32 (row stride in elements),
 * weight and, if given, bias [size] fp32. `in_place`: the same result in fp32 also replaces hidden. */
typedef struct {
    float *hidden;
    const float *weight, *bias;
    int64_t stride, rows, size, in_place;
    double eps;
    sink out;
} layer_norm_arguments;

enum { IDENTITY, SILU, GELU_TANH, GELU_ERF, RELU, TANH, RELU_SQUARED, XIELU, SWIGLU_OAI };

/* x [rows, size] bf16 or, if `wide`, fp32 (row stride in elements) to act(x). Only this operation has XIELU, whose two
 * factors are `positive` and `negative`. */
typedef struct {
    const void *x;
    int64_t stride, rows, size, activation, wide;
    double positive, negative;
    sink out;
} activate_arguments;

/* gate_up [rows, 2 * size] bf16 or, if `wide`, fp32 to act(gate) * up. Only gates have SWIGLU_OAI, the clamped gate of
 * gpt-oss (activate.h). With `up` [rows, size] fp32 (row stride in elements) gate_up is [rows, size], the gates alone. With
 * `cutoffs` [rows], which is overwritten, a gate is lowered by its row's cutoff, the mean of the row's gates plus `deviations`
 * times their standard deviation, and is at least 0 then. */
typedef struct {
    const void *gate_up;
    int64_t rows, size, activation, wide;
    sink out;
    const float *up;
    float *cutoffs;
    int64_t up_stride;
    double deviations;
} gate_arguments;

#define MOST_INT4_GROUP 256

/* scales [groups] of values [groups, group], not rounded: the best of the candidates, each fitted to its codes. A
 * candidate is the number of steps from zero to the value of largest magnitude. A group has at most MOST_INT4_GROUP
 * values. */
typedef struct {
    const float *values, *divisors;
    float *scales;
    int64_t groups, group, candidates;
} int4_scales_arguments;

#define MOST_GPTQ_INPUTS 512

/* Round a weight [outputs, inputs] (row stride in elements) by GPTQ, input by input. `order` [inputs] lists the inputs in
 * the order of rounding; scales [outputs, groups]. With U the upper triangular factor of the inverse Hessian in that order,
 * root [inputs, inputs] (row stride in elements) is its transpose: row k has the factors by which input k absorbs the errors
 * of those before it. Writes codes [outputs, inputs] (row stride in bytes), 0 to 15. */
typedef struct {
    const float *weight, *scales, *root;
    const int64_t *order;
    uint8_t *codes;
    int64_t inputs, outputs, groups, group, stride, root_stride, code_stride;
} int4_gptq_arguments;

/* What precedes the codes of a panel's weights. */
enum { SCALES, SCALES_AND_MINIMUMS, DOUBLE_QUANTIZED };

enum { OUTPUT_BF16, OUTPUT_FP32, OUTPUT_ADD_FP32 };

/* y [rows, outputs] (row stride in elements; ADD: += into fp32) = act(quantized rows times panels, plus bias
 * [outputs] fp32 if given). */
typedef struct {
    const uint8_t *panels;
    const float *bias;
    const int8_t *tiles;
    const float *scales;
    const int32_t *sums;
    void *y;
    int64_t y_stride, rows, padded, outputs, group, height, bits, header, output, activation, shared;
} linear_int_arguments;

/* Each row's `k` best outputs of a product whose logits are not needed otherwise, best first, and the lower id first
 * among equals: values [rows, k] fp32, ids [rows, k]. A row with a NaN has NaN as its best value. With `softcap` > 0
 * a logit is softcap * tanh(logit / softcap). `logsumexp` [rows] if given, over all outputs. `product.y` and its stride
 * are not used. `allowed` if given: a bit per output, rows of `allowed_stride` words of 32 bits; only outputs whose bit
 * is set are selected, and panels without any are not multiplied unless `logsumexp` needs them. Places without an
 * output have the value -inf. scratch: PICK_TASKS * rows * (8 * k + 16) bytes. */
#define PICK_TASKS 64
typedef struct {
    linear_int_arguments product;
    float *values;
    int64_t *ids;
    float *logsumexp;
    void *scratch;
    const uint32_t *allowed;
    int64_t k, allowed_stride;
    double softcap;
} pick_arguments;

/* Layout of the weight of OP_ROWS: packed (4 and 8 with groups), or rows as a checkpoint stores them. */
enum { FORM_INT4 = 4, FORM_INT8 = 8, FORM_BF16_PANELS = 16, FORM_STORED_BF16, FORM_STORED_FP16, FORM_STORED_FP32, FORM_FP32_PANELS };

/* Rows ids[i] of a weight [outputs, inputs], out [count, inputs] fp32, times `factor` and, if given, `factors`
 * [inputs]; `add`: += into out. An id without a row reads nothing and gives NaN, or if `absent_first` it reads row 0. */
typedef struct {
    const uint8_t *weight;
    const int64_t *ids;
    const float *factors;
    float *out;
    int64_t count, outputs, inputs, padded, group, form, header, add;
    double factor;
    int64_t absent_first;
} rows_arguments;

/* out [count, size] fp32 = rows ids[i] of x; without `ids`, row i. Row strides in elements. */
typedef struct {
    const float *x;
    const int64_t *ids;
    float *out;
    int64_t stride, count, size, out_stride;
} gather_arguments;

/* out [texts, size] fp32 = the sum (or, if `mean`, the mean) of rows [starts[i] + skipped[i], starts[i + 1]) of x (row stride in
 * elements), divided by its length if `unit`. Without `starts`, row i; without `skipped`, 0. A sum of no rows is 0. */
typedef struct {
    const float *x;
    const int64_t *starts, *skipped;
    float *out;
    int64_t texts, stride, size, mean, unit;
} pool_arguments;

/* cos and signed sin [count, 2 * half] fp32 of angle = positions[i] * frequencies[k], which is first rounded to fp32:
 * cos is (c, c), sin is (-s, s), each times `scale`; frequencies [half] fp32. */
typedef struct {
    const int64_t *positions;
    const float *frequencies;
    float *cos, *sin;
    int64_t count, half;
    double scale;
} angles_arguments;

/* y [rows, outputs] (row stride in elements; ADD: += into fp32) = act(x [rows, inputs] bf16 (row stride in elements)
 * times panels, plus bias [outputs] fp32 if given). `bits` 0: panels of bf16 (tile_bf16.h). 4 or 8: packed weights with
 * `group` and `header`, on levels with `wide_rows`. `tiles`: a buffer of ceil(inputs / 32) * 64 bytes for each row, whose
 * number is rounded up to a multiple of 2, or of 16 beyond 16. `fixed`: one row is summed in the same order as many. */
typedef struct {
    const uint16_t *x;
    const uint8_t *panels;
    const float *bias;
    uint32_t *tiles;
    void *y;
    int64_t x_stride, y_stride, rows, inputs, outputs, output, fixed, activation, bits, group, header;
} linear_bf16_arguments;

/* y [rows, outputs] (row stride in elements; ADD: += into fp32) = act(x [rows, inputs] (row stride in elements) times
 * panels, plus bias [outputs] fp32 if given), in fp32 and in the order of inputs for any number of rows. x is fp32, or
 * bf16 if `narrow_x`. Panels are fp32, for each input the 32 outputs, or bf16 (tile_bf16.h) if `narrow_panels`. `tiles`:
 * a buffer of rows * (inputs rounded up to a multiple of 2) fp32, not used for a single row unless inputs are odd. */
typedef struct {
    const void *x;
    const uint8_t *panels;
    const float *bias;
    float *tiles;
    void *y;
    int64_t x_stride, y_stride, rows, inputs, outputs, output, activation, narrow_x, narrow_panels;
} linear_fp32_arguments;

/* As `pick_arguments`, from logits [rows, outputs] fp32 (row stride in elements). */
typedef struct {
    const float *logits;
    float *values;
    int64_t *ids;
    float *logsumexp;
    void *scratch;
    const uint32_t *allowed;
    int64_t stride, rows, outputs, k, allowed_stride;
    double softcap;
} top_arguments;

/* The LoRA adapter of one slot in a product, or in one part of it: the parts are layers of the model whose outputs follow
 * each other. bf16, or fp32 if `wide_weights`. a: for each 4 ranks and 16 inputs, the 16 inputs of each rank; ranks and
 * inputs are padded with zeros. b: for each panel of outputs (the last padded with zeros) and rank, its outputs. `rank` 0:
 * the adapter does not change this part, and has no weights there. */
typedef struct {
    const void *a, *b;
    int64_t rank;
} lora_part;

#define LORA_ROWS 4
#define LORA_PARTS 3

/* Up to LORA_ROWS rows of the step with the same adapter. */
typedef struct {
    int64_t slot, count, rows[LORA_ROWS];
} lora_block;

/* Every row of the step that has an adapter, once. Read when the operation runs. */
typedef struct {
    int64_t num_blocks;
    lora_block blocks[];
} lora_step;

/* y [rows, first_outputs[part] + i] += b (a x) for i < outputs[part] and each row in `step`; row strides in elements. x is
 * bf16, fp32 if `wide_x`, or quantized if `tiles` is given; y is bf16, or fp32 if `wide_y`. parts [slots, num_parts].
 * shrunk [rows, num_parts, max_rank] is a buffer; max_rank is a multiple of 4 and at least every rank. */
typedef struct {
    const void *x;
    const int8_t *tiles;
    const float *scales;
    void *y;
    const lora_part *parts;
    const lora_step *step;
    float *shrunk;
    int64_t x_stride, y_stride, rows, inputs, padded, group, height, num_parts, max_rank, wide_x, wide_y, wide_weights;
    int64_t first_outputs[LORA_PARTS], outputs[LORA_PARTS];
} lora_arguments;

/* How a score follows from the router's logits of a row. */
enum { SCORE_SOFTMAX, SCORE_SIGMOID, SCORE_SPARSEMIXER };

/* How a group of experts is rated: not at all, by its best score, or by the sum of its two best. */
enum { GROUPS_ALL, GROUPS_BY_BEST, GROUPS_BY_TWO };

#define MOST_EXPERTS 1024

/* Each row's `k` experts with the best scores, best first, and the lower id first among equals: ids [rows, k], and their
 * weights [rows, k]: scores, divided by their sum plus `epsilon` if `renormalise`, times `scale` and, if given, the
 * expert's of `factors` [experts]. logits [rows, experts] fp32 (row stride in elements). `bias` [experts], if given, is added to the scores for the selection only. With
 * `groups` > 1 experts are selected from the `best_groups` of these groups, which are rated as `rating` says. A row with
 * a NaN has weights that are NaN. At most MOST_EXPERTS experts. SCORE_SPARSEMIXER: the weight of an expert is its softmax
 * over those that are not yet taken and whose logit x is near: (best - x) / max(|x|, best) <= 2 jitter, times `scale`. */
typedef struct {
    const float *logits, *bias;
    int64_t *ids;
    float *weights;
    int64_t stride, rows, experts, k, scoring, renormalise, groups, best_groups, rating;
    double scale, epsilon, jitter;
    const float *factors; /* not with SCORE_SPARSEMIXER */
} route_arguments;

/* One product of all experts: their packed weights [outputs, inputs] and, if given, biases [outputs] fp32. `form` 4 or 8:
 * panels of integers with `group` and `header`, and rows with `shared`; they are multiplied with bf16 rows from `wide_from`
 * rows of an expert on (0: never). FORM_BF16_PANELS: the product of OP_LINEAR_BF16, in the order that `fixed` says. FORM_FP32_PANELS: the
 * product of OP_LINEAR_FP32, of bf16 panels if `narrow_panels`. */
typedef struct {
    const uint8_t *const *panels;
    const float *const *biases;
    int64_t outputs, inputs, form, group, header, wide_from, fixed, narrow_panels, shared;
} expert_weights;

/* hidden [rows, down.outputs] fp32 += the sum over j < k, in this order, of weights[i, j] times expert ids[i, j] of x[i]:
 * down(act(gate x) * up x), gate and up being the halves of one product, or down(act(up x)) if that product has no more
 * outputs than `down` has inputs. x [rows, inputs] is bf16 or, if `wide`, fp32;
 * row strides in elements. ids and weights [rows, k] are read when the operation runs, and each expert's weights are read
 * once for all of its rows. If `scales_inputs`, k is 1 and weights[i] times x[i] is the expert's input instead. `scratch` has
 * `armature_experts_scratch` bytes. */
typedef struct {
    const void *x;
    float *hidden;
    const int64_t *ids;
    const float *weights;
    uint8_t *scratch;
    expert_weights gate_up, down;
    int64_t x_stride, hidden_stride, rows, experts, k, wide, activation, scales_inputs;
} experts_arguments;

/* Keys and values
 *   A layer's cache is rows of `token_bytes`, one per token: the keys of all heads, then their values, bf16, or fp32 where an
 *   operation is `wide`. Or int8 codes for
 *   both, then a scale (fp32) for each head's key, then for each head's value: key = scale * code, code in [-127, 127], and a key
 *   that is not finite has the scale NaN. `keys`, `values`, `key_scales` and `value_scales` are the addresses in row 0; both
 *   scales are NULL for bf16 and fp32. A row of int8 is padded to a multiple of 64 bytes. */
typedef struct {
    uint8_t *keys, *values, *key_scales, *value_scales;
    int64_t token_bytes;
} kv_rows;

/* A contiguous run of a sequence's tokens: rows [first, first + tokens) of every layer, the first at absolute `position`. */
typedef struct {
    int64_t first, tokens, position;
} segment;

/* One sequence: its queries are batch rows [first, first + num_tokens) at positions from `start`; the segments cover [0, start + num_tokens). */
typedef struct {
    int64_t first, num_tokens, start, num_segments;
    segment segments[2];
} sequence;

/* A step's batch for attention, the same for all layers. It is read when the operation runs, so a recorded list of
 * operations uses the current batch. `scratch` has at least `armature_attention_scratch` bytes. */
typedef struct {
    int64_t num_sequences;
    uint8_t *scratch;
    sequence sequences[];
} attention_step;

/* Causal attention: query, out [tokens, heads, head_dim], strides between tokens in elements. They are bf16 or, if
 * `wide`, fp32 as keys and values are then. window <= 0 and softcap <= 0 mean none. `sinks` and `slopes` [heads] fp32, if
 * given: e^sink is part of a softmax's denominator, and slope * (key position - query position) is added to a score
 * (ALiBi). */
typedef struct {
    const void *query;
    void *out;
    const attention_step *step;
    kv_rows kv;
    int64_t query_stride, out_stride, heads, kv_heads, head_dim, window, wide;
    double scale, softcap;
    const float *sinks, *slopes;
} attention_arguments;

/* Texts one after the other: text i is rows [starts[i], starts[i + 1]). Read when the operation runs. */
typedef struct {
    int64_t count, starts[];
} text_list;

/* Attention within each text: query, key and value are columns of rows that a product wrote (stride between rows in
 * elements), bf16 or, if `wide`, fp32; out [rows, heads, head_dim] of the same dtype with stride out_stride. head_dim
 * is even and at most 256. A token at p sees positions p - before to p + after of its text. Scores are scaled and
 * capped if softcap > 0. If bias [heads, 2 * most + 1] fp32 is given, it is added to them: column most + key - query,
 * or the outermost column beyond. `sinks` and `slopes` as in `attention_arguments`. */
typedef struct {
    const void *query, *key, *value;
    void *out;
    const text_list *texts;
    const float *bias;
    int64_t stride, out_stride, heads, kv_heads, head_dim, before, after, most, wide;
    double scale, softcap;
    const float *sinks, *slopes;
} texts_arguments;

/* heads [rows, heads + 2 * kv_heads, head_dim] (stride between rows in elements): queries, keys, values, bf16 or, if
 * `wide`, fp32 as the cache is then. Queries
 * and keys are normalised (weights fp32, if given: [head_dim], or [heads, head_dim] with `own_weights`), and RoPE is applied
 * to the first `dim` elements of each: (a, b) to (a cos - b sin, b cos + a sin), cos and sin [rows, dim] fp32, the sign of
 * sin in the angle (dim 0: none). Queries stay in place; keys and values go to rows written[i] of the cache. The norm
 * divides by the rms of a head, after `subtracts_mean` the mean; with `scales` [rows, 2], which is overwritten, by the rms
 * of all heads of a row. It comes before RoPE, or after it if `norm_last`. With `value_norm` [head_dim] values are normalised
 * too. kv_heads 0: there are queries alone. With `norm_bias` the weights of a norm are followed by [head_dim] to add. */
typedef struct {
    void *x;
    const float *query_norm, *key_norm, *cos, *sin;
    const int64_t *written;
    kv_rows kv;
    int64_t stride, rows, heads, kv_heads, head_dim, dim, wide;
    double eps;
    float *scales;
    int64_t own_weights, subtracts_mean, norm_last;
    const float *value_norm;
    int64_t norm_bias;
} turn_arguments;

/* Rows as OP_TURN reads them, out [rows, 3 * heads, rotated + plain], from the products of multi-head latent attention:
 * queries [rows, heads, plain + rotated], others [rows, heads, plain + value] with keys and values, and one rotated part
 * of the keys of all heads, rotated_keys [rows, rotated]. Row strides in elements; bf16, or fp32 if `wide`. In `out` the
 * rotated part of a head comes first, and values are padded with zeros. `interleaved`: element 2i + j of a rotated part
 * becomes element i + j * rotated / 2. value <= rotated + plain. */
typedef struct {
    const void *queries, *others, *rotated_keys;
    void *out;
    int64_t query_stride, other_stride, key_stride, rows, heads, plain, rotated, value, interleaved, wide;
} latent_arguments;

#define MOST_STREAMS 8

/* Rows of x (row stride in elements) begin with `streams` parts [size] fp32: the streams of a token (AltUp, arXiv 2301.13310).
 * With m = tanh(logits) [rows, streams], part k += the sum over i of c[k, i] * part i, where c[k, i] = the sum over j of
 * weights[k * streams + i, j] * m[j]. With `activated` [rows, size], what a layer made of part 0, part k += (1 + c[k]) * (scale *
 * activated - part 0) instead, where c[k] = the sum over j of weights[k, j] * m[j]; then out = part 0 * factors, factors [size]. */
typedef struct {
    float *x;
    const float *logits, *weights, *activated, *factors;
    int64_t stride, rows, size, streams;
    double scale;
    sink out;
} altup_arguments;

/* out = x * rms(like) / sqrt(max(the mean of squares of x, floor)), or `add`: += into out. x [rows, size] bf16 or, if `wide`,
 * fp32, like and out [rows, size] fp32; row strides in elements. */
typedef struct {
    const void *x;
    const float *like;
    float *out;
    int64_t stride, like_stride, out_stride, rows, size, wide, add;
    double floor;
} match_arguments;

/* Recurrent states
 *   A sequence has one slot with a state for each layer: the last width - 1 inputs of the convolution [width - 1, channels], and
 *   for each head and each STATE_COLUMNS elements of its values (the last padded) [key_size, STATE_COLUMNS], all fp32. */
#define STATE_COLUMNS 32
#define MOST_WIDTH 8
#define MOST_KEYS 256 /* elements of a key */

/* Rows [first, first + num_tokens) of the batch continue the state of a slot; from position 0 it is zero. If there are `drafts` among
 * them, at most STATE_COLUMNS rows after position 0, the state stays as it is before the first of them. Else slot `saved` gets a
 * copy of the state after the last one, unless it is negative; a later run of the step may go on from there. */
typedef struct {
    int64_t first, num_tokens, start, slot, drafts, saved;
} state_run;

/* A step's batch for recurrent layers, the same for all of them; it is read when the operation runs. */
typedef struct {
    int64_t num_runs;
    state_run runs[];
} state_step;

/* out [tokens, channels] fp32 = silu(bias + the sum over i < width of filters[i] * x of position p - width + 1 + i), x being bf16
 * or, if `wide`, fp32 with a stride between tokens in elements; filters [width, channels] fp32, bias [channels] or NULL. And
 * scales [tokens, 2, heads]: with step = softplus(step_scale * steps + step_bias), at least `least` and at most `most`, the
 * decay e^(-rates * step), and beta_scale * sigmoid(betas) if given, else the step. steps and betas [tokens, heads] have a stride and are
 * bf16 or, if `wide_steps`, fp32. `states`: the layer's convolution in slot 0, slots are slot_stride floats apart. kept [tokens,
 * channels + 2 * heads] fp32, or NULL, gets x, steps and betas of the rows of runs with drafts. If `gated`, x is a c, and out is b times
 * the sum, of given rows (a, b, c), each of `channels`. There may be no heads. */
typedef struct {
    const void *x, *steps, *betas;
    const state_step *step;
    float *out, *scales, *states, *kept;
    const float *filters, *bias, *rates, *step_bias;
    int64_t x_stride, step_stride, slot_stride, channels, heads, width, wide, wide_steps, gated;
    double least, most, step_scale, beta_scale;
} recur_inputs_arguments;

/* out [tokens, heads, value_size] fp32 from x [tokens, channels] and scales of OP_RECUR_INPUTS. `query`, `key` and `value` are the
 * first channels of each; head h has the query and the key h / (heads / key_heads), of key_size elements. With the state S
 * of a head, its decay d and its factor f: S = d S + key (f value), out = query S + skips value, or with `delta`, keys and queries
 * being divided by their lengths and queries also by sqrt(key_size): S = d S + key (f (value - key d S)), out = query S. With `by_token`, tokens
 * are never computed in chunks. */
typedef struct {
    const float *x, *scales, *skips;
    const state_step *step;
    float *out, *states;
    int64_t slot_stride, channels, query, key, value, heads, key_heads, key_size, value_size, delta, by_token;
} recur_arguments;

/* out [rows, size] = x times act(gate_scale * gate), silu or, if `sigmoid`, a sigmoid. With `group`, each so many elements are
 * first divided by their rms, or if `gate_first` the result is; then element i is multiplied by weight[i % weights], where `weights`
 * is a multiple of `group`. Without `group` there is no norm, and `weight` may be NULL or have `size` elements. x and gate are
 * bf16 or, if `wide` and `wide_gate`, fp32; row strides in elements. */
typedef struct {
    const void *x, *gate;
    const float *weight;
    int64_t x_stride, gate_stride, rows, size, group, weights, gate_first, sigmoid, wide, wide_gate;
    double eps, gate_scale;
    sink out;
} gated_norm_arguments;

#include "lanes.h"

#endif
