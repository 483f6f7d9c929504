/* The scratch size that a step's attention needs. */
#include "attention.h"

/* Bytes of scratch for any window: the caller asks once per step, and layers may have different windows. */
EXPORT int64_t armature_attention_scratch(const attention_arguments *arguments) {
    attention_arguments widest = *arguments;
    int64_t bytes = 0;
    widest.window = 0;
    for (int64_t i = 0; i < widest.step->num_sequences; i++) bytes += scratch_of(&widest, &widest.step->sequences[i], armature_now()->attention_panels && !widest.wide);
    return bytes;
}
