/* AVX2 with AVX-VNNI: Intel Alder Lake, Meteor Lake and similar processors without AVX-512. */
#define LEVEL level_avxvnni
#define NAME "avxvnni"
#define LANES 8
#define BLOCK 4
#define TILE_ROWS 6
#define TILE_ALIGN 1

#include "../tile_avx2.h"
#include "../kernels.h"
