/* AVX2 with FMA: Intel Haswell, AMD Excavator and newer. */
#define LEVEL level_avx2
#define NAME "avx2"
#define LANES 8
#define BLOCK 4
#define TILE_ROWS 6
#define TILE_ALIGN 1

#include "../tile_avx2.h"
#include "../kernels.h"
