#include "model/graph_contents.h"

#include <stdlib.h>

static graph_contents **all_contents; /* NULL: the place is unused, and its index is in ``unused_indices`` */
static size_t contents_count, contents_capacity;
static uint32_t *unused_indices;
static size_t unused_count, unused_capacity;
static hash_table contents_indices; /* index in ``all_contents`` plus 1, by graph id */

/* --- graphs ----------------------------------------------------------------------------------------- */

/* Return the index of an unused place in ``all_contents``. Return SIZE_MAX if no memory is left. */
static size_t find_unused_index(void)
{
    if (unused_count)
        return unused_indices[--unused_count];
    /* There is space for the index of each graph, so that graph_contents_free() cannot fail. */
    graph_contents **new_contents =
        array_reserve(all_contents, &contents_capacity, contents_count + 1, sizeof(graph_contents *), 64);
    if (!new_contents)
        return SIZE_MAX;
    all_contents = new_contents;
    uint32_t *new_indices =
        array_reserve(unused_indices, &unused_capacity, contents_count + 1, sizeof *new_indices, 64);
    if (!new_indices)
        return SIZE_MAX;
    unused_indices = new_indices;
    return contents_count++;
}

graph_contents *graph_contents_add(uint32_t graph)
{
    graph_contents *contents = calloc(1, sizeof *contents);
    const size_t index = contents ? find_unused_index() : SIZE_MAX;
    if (index == SIZE_MAX) {
        free(contents);
        return NULL;
    }
    if (hash_table_put(&contents_indices, graph, (uint32_t)index + 1)) {
        unused_indices[unused_count++] = (uint32_t)index;
        free(contents);
        return NULL;
    }
    return all_contents[index] = contents;
}

graph_contents *graph_contents_find(uint32_t graph)
{
    const uint32_t index_plus_one = hash_table_get(&contents_indices, graph);
    return index_plus_one ? all_contents[index_plus_one - 1] : NULL;
}

static void free_contents(graph_contents *contents)
{
    for (size_t i = 0; i < contents->node_count; i++) {
        free(contents->nodes[i].addresses);
        free(contents->nodes[i].unwritten_records);
    }
    for (size_t i = 0; i < contents->map_count; i++)
        free(contents->maps[i].maps);
    hash_table_clear(&contents->node_ids);
    hash_table_clear(&contents->map_indices);
    free(contents->maps);
    free(contents->nodes);
    free(contents->addresses);
    free(contents);
}

void graph_contents_free(uint32_t graph)
{
    const uint32_t index_plus_one = hash_table_remove(&contents_indices, graph);
    if (!index_plus_one)
        return;
    free_contents(all_contents[index_plus_one - 1]);
    all_contents[index_plus_one - 1] = NULL;
    unused_indices[unused_count++] = index_plus_one - 1;
}

void graph_contents_clear(void)
{
    for (size_t i = 0; i < contents_count; i++)
        if (all_contents[i])
            free_contents(all_contents[i]);
    hash_table_clear(&contents_indices);
    contents_count = unused_count = 0;
}

/* --- nodes ------------------------------------------------------------------------------------------ */

node_contents *graph_contents_node(graph_contents *contents, uint32_t node)
{
    node_contents *nodes = array_reserve(contents->nodes, &contents->node_capacity, node + 1u, sizeof *nodes, 4);
    if (!nodes)
        return NULL;
    contents->nodes = nodes;
    for (; contents->node_count <= node; contents->node_count++)
        nodes[contents->node_count] = (node_contents){0};
    return nodes + node;
}

/* Return a key that differs from all handles: no address is that high. */
static uint64_t position_key(uint32_t kernel_position)
{
    return ~(uint64_t)kernel_position;
}

void graph_contents_add_node(graph_contents *contents, uint32_t node, CUgraphNode handle, uint32_t kernel_position)
{
    hash_table_put(&contents->node_ids, (uint64_t)(uintptr_t)handle, node);
    if (kernel_position)
        hash_table_put(&contents->node_ids, position_key(kernel_position), node);
}

uint32_t graph_contents_node_id(const graph_contents *contents, CUgraphNode handle)
{
    return hash_table_get(&contents->node_ids, (uint64_t)(uintptr_t)handle);
}

uint32_t graph_contents_kernel_id(const graph_contents *contents, uint32_t kernel_position)
{
    return hash_table_get(&contents->node_ids, position_key(kernel_position));
}

/* --- tensor maps ------------------------------------------------------------------------------------ */

static uint64_t maps_key(uint32_t executable, uint32_t node)
{
    return (uint64_t)executable << 32 | node;
}

const node_maps *graph_contents_maps(const graph_contents *contents, uint32_t executable, uint32_t node)
{
    const uint32_t index_plus_one = hash_table_get(&contents->map_indices, maps_key(executable, node));
    return index_plus_one ? contents->maps + index_plus_one - 1 : NULL;
}

void graph_contents_set_maps(graph_contents *contents, uint32_t executable, uint32_t node, node_maps maps)
{
    const uint32_t index_plus_one = hash_table_get(&contents->map_indices, maps_key(executable, node));
    if (index_plus_one) {
        free(contents->maps[index_plus_one - 1].maps);
        contents->maps[index_plus_one - 1] = maps;
        return;
    }
    node_maps *new_maps = maps.map_count ? array_reserve(contents->maps, &contents->map_capacity,
                                                         contents->map_count + 1, sizeof *new_maps, 4)
                                         : NULL;
    contents->maps = new_maps ? new_maps : contents->maps;
    if (!new_maps ||
        hash_table_put(&contents->map_indices, maps_key(executable, node), (uint32_t)contents->map_count + 1)) {
        free(maps.maps);
        return;
    }
    contents->maps[contents->map_count++] = maps;
}

/* --- addresses -------------------------------------------------------------------------------------- */

static int compare_addresses(const void *left, const void *right)
{
    const uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return (a > b) - (a < b);
}

bool graph_contents_update_addresses(graph_contents *contents)
{
    size_t address_count = 0;
    for (size_t i = 0; i < contents->node_count; i++)
        address_count += contents->nodes[i].address_count;
    uint64_t *addresses =
        array_reserve(contents->addresses, &contents->address_capacity, address_count + 1, sizeof *addresses, 4);
    if (!addresses)
        return false;
    contents->addresses = addresses;
    contents->address_count = 0;
    for (size_t i = 0; i < contents->node_count; i++)
        for (size_t j = 0; j < contents->nodes[i].address_count; j++)
            addresses[contents->address_count++] = contents->nodes[i].addresses[j];
    qsort(addresses, contents->address_count, sizeof *addresses, compare_addresses);
    address_count = contents->address_count;
    contents->address_count = 0;
    for (size_t i = 0; i < address_count; i++)
        if (!i || addresses[i] != addresses[i - 1])
            addresses[contents->address_count++] = addresses[i];
    contents->is_outdated = false;
    return true;
}
