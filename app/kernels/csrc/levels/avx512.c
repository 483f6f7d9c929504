/* AVX-512 with VNNI: Intel Ice Lake, AMD Zen 4 and newer. */
#define LEVEL level_avx512
#define NAME "avx512"
#define LANES 16
#define BLOCK 4
#define TILE_ROWS 12
#define TILE_ALIGN 1
/* As amx.c: the processors without bf16 are Intel's. Sapphire Rapids at this level takes 747 us, past the caches 2,549. */
#define KV_PREFETCH 2

#include "../tile_avx512.h"
#include "../kernels.h"
