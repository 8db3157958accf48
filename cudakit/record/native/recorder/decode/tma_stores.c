#include "decode/tensor_maps.h"

#include <stdlib.h>
#include <string.h>

#include "containers.h"
#include "model/allocations.h"
#include "model/kernels.h"

/* Maximum number of groups of rows of a tensor; a tensor with more groups is emitted as one range. */
#define MAX_ROWS 4096

static bool reserve_map(tma_store_set *set)
{
    tma_store *maps = array_reserve(set->maps, &set->map_capacity, set->map_count + 1, sizeof *maps, 64);
    if (maps)
        set->maps = maps;
    return maps;
}

/* Return whether parameter words are a tensor map. Words that only look like one are excluded: the tensor must be
 * inside a live allocation. The recorder lock is held. */
static bool is_tensor_map(const ck_u64 content[CK_MAP_WORDS])
{
    tensor_map map;
    uint64_t end;
    const allocation *container = content[0] % 16 ? NULL : allocations_find(content[0]);
    if (!container || !tensor_map_decode(content, &map) || map.rank < 2)
        return false;
    for (unsigned i = 1; i < map.rank; i++)
        if (map.dims[i] > 1 && map.strides[i] && map.strides[i] < map.strides[0])
            return false;
    return tensor_map_end(&map, &end) && end <= container->hi;
}

static bool add_map(tma_store_set *set, uint32_t launch, uint8_t mode, const ck_u64 content[CK_MAP_WORDS])
{
    if (!reserve_map(set))
        return false;
    tma_store *store = set->maps + set->map_count++;
    *store = (tma_store){.launch = launch, .mode = mode};
    memcpy(store->map_words, content, sizeof store->map_words);
    return true;
}

bool tma_stores_add(tma_store_set *set, uint32_t launch, uint8_t mode, const struct kernel_layout *layout,
                    void **parameters, void **extra)
{
    ck_u64 map_words[CK_MAP_WORDS];
    size_t old_map_count = set->map_count;
    for (size_t i = 0; kernels_read_words(layout, parameters, extra, i, map_words, CK_MAP_WORDS) >= 0; i++)
        if (is_tensor_map(map_words) && !add_map(set, launch, mode, map_words)) {
            set->map_count = old_map_count;
            break;
        }
    return set->map_count > old_map_count;
}

bool tma_stores_copy(tma_store_set *set, uint32_t launch, uint8_t mode, const tma_store *maps, size_t count)
{
    size_t old_map_count = set->map_count;
    for (size_t i = 0; i < count; i++)
        if (!add_map(set, launch, mode, maps[i].map_words)) {
            set->map_count = old_map_count;
            return false;
        }
    return count > 0;
}

/* --- maps through which launches load ------------------------------------------------------------- */

static uint64_t load_key(uint32_t launch, uint32_t map_slot)
{
    return (uint64_t)launch << 17 | (uint64_t)map_slot << 1 | 1;
}

static bool loads_through_map(const tma_store *store, const hash_table *loads, const ck_map *maps,
                              size_t map_count)
{
    for (size_t i = 0; i < map_count; i++)
        if (!memcmp(maps[i].content, store->map_words, sizeof store->map_words) &&
            hash_table_get(loads, load_key(store->launch, maps[i].slot)))
            return true;
    return false;
}

static int compare_launches(const void *left, const void *right)
{
    uint32_t a = ((const tma_store *)left)->launch, b = ((const tma_store *)right)->launch;
    return (a > b) - (a < b);
}

bool tma_stores_resolve(tma_store_set *set, const ck_map *maps, size_t map_count, const ck_box *boxes,
                        size_t box_count)
{
    hash_table load_keys = {0};
    for (size_t i = 0; set->map_count && i < box_count; i++)
        if (boxes[i].mode == CK_READ && hash_table_put(&load_keys, load_key(boxes[i].launch, boxes[i].map), 1)) {
            hash_table_clear(&load_keys);
            return false;
        }
    for (size_t i = 0; i < set->map_count; i++)
        set->maps[i].is_load = loads_through_map(set->maps + i, &load_keys, maps, map_count);
    hash_table_clear(&load_keys);
    if (set->map_count)
        qsort(set->maps, set->map_count, sizeof *set->maps, compare_launches);
    return true;
}

/* --- rows ------------------------------------------------------------------------------------- */

void tma_store_rows(const tma_store *store,
                    void (*emit_rows)(void *context, uint64_t lo, uint64_t bytes, uint64_t stride, uint64_t count),
                    void *context)
{
    tensor_map map;
    uint64_t end;
    if (!tensor_map_decode(store->map_words, &map) || !tensor_map_end(&map, &end))
        return;
    for (unsigned i = 1; i < map.rank; i++)
        if (!map.strides[i])
            map.dims[i] =
                1; /* cuBLAS adds dimensions of arbitrary size and stride 0, which do not change the address */
    unsigned row_dimension = 1;
    uint64_t bytes = map.dims[0] * map.strides[0], row_group_count = 1;
    while (row_dimension < map.rank && (map.strides[row_dimension] == bytes || map.dims[row_dimension] == 1))
        bytes *= map.dims[row_dimension++];
    for (unsigned i = row_dimension + 1; i < map.rank; i++)
        row_group_count *= map.dims[i];
    if (row_dimension == map.rank) {
        emit_rows(context, map.address, bytes, 0, 1);
        return;
    }
    if (row_group_count > MAX_ROWS || map.strides[row_dimension] < bytes) {
        emit_rows(context, map.address, end - map.address, 0, 1);
        return;
    }
    for (uint64_t i = 0; i < row_group_count; i++) {
        uint64_t lo = map.address, remainder = i;
        for (unsigned dimension = row_dimension + 1; dimension < map.rank; remainder /= map.dims[dimension++])
            lo += remainder % map.dims[dimension] * map.strides[dimension];
        emit_rows(context, lo, bytes, map.strides[row_dimension], map.dims[row_dimension]);
    }
}
