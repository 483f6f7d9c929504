/* How a product is divided among threads, whatever it multiplies. */
#ifndef ARMATURE_DIVISION_H
#define ARMATURE_DIVISION_H

#include <omp.h>
#include <stdint.h>

#define FEW_TILES 4

/* `panels` panels and `tiles` tiles a task. */
typedef struct {
    int64_t num_panels, num_tiles, panels, tiles, panel_tasks, tile_tasks;
} division;

/* Few rows: memory is the cost, so a task is one panel and the loop hands out a megabyte at a time. Many: tiles meet several panels, `fit` of which
 * lie in the cache meanwhile, and where outputs are too few for all threads, rows are divided too. */
static inline division divide(int64_t num_panels, int64_t num_tiles, int64_t fit) {
    division d = {.num_panels = num_panels, .num_tiles = num_tiles};
    const int64_t wanted = 4 * omp_get_num_threads();
    d.panels = d.num_tiles <= FEW_TILES ? 1 : d.num_panels / wanted < fit ? d.num_panels / wanted : fit;
    if (d.panels < 1) d.panels = 1;
    d.panel_tasks = (d.num_panels + d.panels - 1) / d.panels;
    d.tile_tasks = d.panel_tasks >= wanted || d.num_tiles <= FEW_TILES ? 1 : (wanted + d.panel_tasks - 1) / d.panel_tasks;
    if (d.tile_tasks > d.num_tiles) d.tile_tasks = d.num_tiles;
    d.tiles = (d.num_tiles + d.tile_tasks - 1) / d.tile_tasks;
    d.tile_tasks = (d.num_tiles + d.tiles - 1) / d.tiles;
    return d;
}

#endif
