/* Tests the native library without Python: every operation, at every level that this processor has, against plain
 * loops.
 *
 *   driver             every level, on one thread and on two
 *   driver avx2 ...    these levels; one that the processor does not have is a failure
 *   driver -2 avx2 ... the same on two threads alone: an emulated processor takes minutes
 *   driver --level     print the level in use, and nothing else
 *
 * Buffers have exactly the size that the library gets, so that a sanitizer detects each byte too many. */
#include "proof.h"

static const char *const LEVELS[] = {"amx", "avx512bf16", "avx512", "avxvnni", "avx2", "i8mm", "dotprod", "neon", "portable"};

static const struct {
    const char *says;
    check *runs;
    int64_t needs; /* an operation that the level must have, -1 for none */
} CHECKS[] = {
    {"quantized rows, bit for bit", quantized_rows, OP_QUANTIZE},
    {"products in powers of two, bit for bit", exact_products, OP_LINEAR_INT},
    {"products in any scale, with bias, all outputs", near_products, OP_LINEAR_INT},
    {"NaN and infinity stay in their rows", bad_activations, OP_LINEAR_INT},
    {"a row alone has the bits it has among others", rows_alone, OP_LINEAR_INT},
    {"rows of packed weights", widened_rows, OP_ROWS},
    {"norms, as bf16, fp32 or in tiles", norms, OP_NORM},
    {"layer norms, as bf16, fp32 or in tiles, in place", layer_norms, OP_LAYER_NORM},
    {"activations, as bf16, fp32 or in tiles", activated_rows, OP_ACTIVATE},
    {"attention of whole texts", whole_texts, OP_TEXTS},
    {"texts in lanes, bit for bit", texts_in_lanes, OP_TEXTS},
    {"gates, as bf16, fp32 or in tiles", gates, OP_GATE},
    {"gathered rows", gathers, OP_GATHER},
    {"pooled texts, and rows of unit length", pools, OP_POOL},
    {"rows of stored tables", stored_rows, OP_ROWS},
    {"angles of positions", turning_angles, OP_ANGLES},
    {"the best outputs of a product", picks, OP_PICK},
    {"products in bf16", bf16_products, OP_LINEAR_BF16},
    {"a row of bf16 alone, summed as among others", bf16_rows_alone, OP_LINEAR_BF16},
    {"rows of bf16 times integer weights", wide_products, OP_LINEAR_BF16},
    {"rows of weights in bf16", bf16_rows, OP_ROWS},
    {"products in fp32, of fp32 and bf16", fp32_products, OP_LINEAR_FP32},
    {"a row of fp32 alone, bit for bit", fp32_rows_alone, OP_LINEAR_FP32},
    {"rows of weights in fp32", fp32_rows, OP_ROWS},
    {"the top elements of rows", top_elements, OP_TOP},
    {"products of adapters, added to rows", adapters, OP_LORA},
    {"experts that a router selects", routes, OP_ROUTE},
    {"experts, added to rows", mixtures, OP_EXPERTS},
    {"attention", attends, OP_ATTENTION},
    {"positions turned, keys and values cached", turns, OP_TURN},
    {"rows of latent attention, bit for bit", latent_rows, OP_LATENT},
    {"recurrences, in chunks and by token", recurrences, OP_RECUR},
    {"what a recurrence reads", recurrent_inputs, OP_RECUR_INPUTS},
    {"streams before and after a layer", altered_streams, OP_ALTUP},
    {"rows with the magnitude of others", matched_rows, OP_MATCH},
    {"scales of weights in four bits", int4_scales, OP_INT4_SCALES},
    {"codes of weights by GPTQ", gptq_codes, OP_INT4_GPTQ},
    {"nothing to do, too many threads, no such kernel", odd_calls, -1},
};

/* Return the number of checks. */
static int prove(const char *level) {
    int done = 0;
    for (size_t i = 0; i < sizeof CHECKS / sizeof *CHECKS; i++) {
        if (CHECKS[i].needs >= 0 && !armature_has(CHECKS[i].needs)) continue;
        const int64_t before = failures, shapes = CHECKS[i].runs();
        printf("%s, %d thread%s: %s: %s (%d)\n", level, (int)threads, threads == 1 ? "" : "s", CHECKS[i].says, failures > before ? "FAILED" : "ok", (int)shapes);
        done++;
    }
    return done;
}

static int prove_level(const char *level, int least_threads) {
    int done = 0;
    for (threads = least_threads; threads <= 2; threads++) done += prove(level);
    return done;
}

int main(int count, char **words) {
    if (count == 2 && strcmp(words[1], "--level") == 0) {
        printf("%s\n", armature_level() ? armature_level() : "none");
        return 0;
    }
    const size_t known = sizeof LEVELS / sizeof *LEVELS;
    const int only_two = count > 1 && strcmp(words[1], "-2") == 0;
    int done = 0;
    for (size_t i = 0; count == 1 && i < known; i++)
        if (armature_select(LEVELS[i]) == 0) done += prove_level(LEVELS[i], 1);
    for (int i = 1 + only_two; i < count; i++) {
        if (armature_select(words[i]) == 0) done += prove_level(words[i], 1 + only_two);
        else failed("this processor or this library has no level %s", words[i]);
    }
    printf("%d checks, %d failures\n", done, (int)failures);
    return failures > 0 || done == 0;
}
