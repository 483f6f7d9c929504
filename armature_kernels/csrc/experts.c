/* The scratch size that the experts of a step need. */
#include "experts_memory.h"

/* Bytes of scratch for the rows of the arguments. */
EXPORT int64_t armature_experts_scratch(const experts_arguments *arguments) {
    experts_arguments a = *arguments;
    a.scratch = (uint8_t *)&a; /* only offsets from it are used */
    return memory_of_experts(&a, armature_now()->align).bytes;
}
