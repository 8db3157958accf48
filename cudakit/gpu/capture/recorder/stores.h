/* What kernels store through tensor maps.
 *
 * The Sanitizer API (13.5) tells of loads through tensor maps, and of stores only by name: its callback never
 * comes. But the maps are among the parameters of a kernel. Each that it does not load by is one that it
 * stores by, and the tensor of it is taken to be written as a whole.
 */
#ifndef CK_STORES_H
#define CK_STORES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../patch/arena.h"
#include "record.h"
#include "tensor_maps.h"

typedef struct {
    uint32_t launch;
    bool loaded; /* its launch loads by it */
    ck_u64 content[CK_MAP_WORDS];
} store_map;

typedef struct {
    store_map *maps; /* in the order of launches, once sorted */
    size_t count, room;
} store_set;

/* Add the tensor maps among the parameters of a kernel; false where there is none, or no memory. The lock is
 * held. */
struct kernel_layout;
bool stores_add(store_set *set, uint32_t launch, const struct kernel_layout *layout, void **parameters,
                void **extra);

/* Find the maps that their launch loads by, and put all into the order of launches. False without memory. */
bool stores_settle(store_set *set, const ck_map *maps, size_t map_count, const ck_box *boxes, size_t box_count);

/* Hand over the rows of a tensor: ``count`` of ``bytes``, the first at ``lo``, each ``stride`` behind the one
 * before. */
void stores_rows(const store_map *of,
                 void (*row)(void *to, uint64_t lo, uint64_t bytes, uint64_t stride, uint64_t count), void *to);

#endif
