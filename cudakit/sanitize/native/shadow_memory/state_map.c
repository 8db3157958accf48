#include "state_map.h"

#include <string.h>

/* Number of states in a chunk after a full chunk was divided: the chunk has space for more states. */
enum { FILLED_STATES = 48 };

/* ---- search ----------------------------------------------------------------------------------------------- */

/* Return the index of the last chunk whose first state begins below an address; 0 if there is none. */
static size_t find_chunk(struct state_map *map, uint64_t address)
{
    const uint64_t *first_addresses = map->first_addresses;
    size_t hint_index = map->last_chunk;
    if (hint_index < map->chunk_count && first_addresses[hint_index] < address) {
        if (hint_index + 1 == map->chunk_count || address <= first_addresses[hint_index + 1])
            return hint_index;
        if (hint_index + 2 == map->chunk_count || address <= first_addresses[hint_index + 2])
            return map->last_chunk = hint_index + 1;
    }
    size_t begin = 0, end = map->chunk_count; /* the last chunk that begins below the address is before `end` */
    while (begin < end) {
        size_t middle = begin + (end - begin) / 2;
        if (first_addresses[middle] < address)
            begin = middle + 1;
        else
            end = middle;
    }
    return map->last_chunk = begin ? begin - 1 : 0;
}

struct position map_lower_bound(struct state_map *map, uint64_t address)
{
    if (!map->chunk_count)
        return (struct position){0, 0};
    size_t chunk_index = find_chunk(map, address);
    const struct chunk *chunk = map->chunks[chunk_index];
    size_t begin = 0, end = chunk->state_count;
    while (begin < end) {
        size_t middle = begin + (end - begin) / 2;
        if (chunk->addresses[middle] < address)
            begin = middle + 1;
        else
            end = middle;
    }
    if (begin == chunk->state_count)
        return (struct position){chunk_index + 1, 0};
    return (struct position){chunk_index, begin};
}

struct state *map_state(const struct state_map *map, struct position position)
{
    if (position.chunk_index >= map->chunk_count)
        return NULL;
    struct chunk *chunk = map->chunks[position.chunk_index];
    return position.state_index < chunk->state_count ? &chunk->states[position.state_index] : NULL;
}

struct state *map_last_at_or_below(struct state_map *map, uint64_t address)
{
    struct position position = map_lower_bound(map, address);
    struct state *state = map_state(map, position);
    if (state && state->lo == address)
        return state;
    return is_map_begin(position) ? NULL : map_state(map, map_previous(map, position));
}

struct position map_first_ending_above(struct state_map *map, uint64_t address)
{
    struct position position = map_lower_bound(map, address);
    if (!is_map_begin(position)) {
        struct position previous_position = map_previous(map, position);
        if (map_state(map, previous_position)->hi > address)
            return previous_position;
    }
    return position;
}

struct position map_next(const struct state_map *map, struct position position)
{
    if (position.state_index + 1 < map->chunks[position.chunk_index]->state_count)
        return (struct position){position.chunk_index, position.state_index + 1};
    return (struct position){position.chunk_index + 1, 0};
}

struct position map_previous(const struct state_map *map, struct position position)
{
    if (position.state_index)
        return (struct position){position.chunk_index, position.state_index - 1};
    return (struct position){position.chunk_index - 1, map->chunks[position.chunk_index - 1]->state_count - 1};
}

/* ---- changes ---------------------------------------------------------------------------------------------- */

/* Move states within a chunk or to another one, with their addresses. */
static void move_states(struct chunk *target, size_t target_index, const struct chunk *source, size_t index,
                        size_t count)
{
    memmove(&target->states[target_index], &source->states[index], count * sizeof *target->states);
    memmove(&target->addresses[target_index], &source->addresses[index], count * sizeof *target->addresses);
}

/* Move states from an array to a chunk. */
static void fill_chunk(struct chunk *chunk, size_t index, const struct state *states, size_t count)
{
    memcpy(&chunk->states[index], states, count * sizeof *states);
    for (size_t i = 0; i < count; i++)
        chunk->addresses[index + i] = states[i].lo;
}

/* Enlarge the arrays of a map if they are too small for a number of chunks. Return -1 with an exception if memory runs out. */
static int reserve_chunks(struct state_map *map, size_t count)
{
    if (count <= map->chunk_capacity)
        return 0;
    size_t capacity = Py_MAX(2 * map->chunk_capacity, Py_MAX(count, 16));
    struct chunk **chunks = PyMem_Realloc(map->chunks, capacity * sizeof *chunks);
    if (chunks)
        map->chunks = chunks;
    uint64_t *new_first_addresses = PyMem_Realloc(map->first_addresses, capacity * sizeof *new_first_addresses);
    if (new_first_addresses)
        map->first_addresses = new_first_addresses;
    if (!chunks || !new_first_addresses) {
        PyErr_NoMemory();
        return -1;
    }
    map->chunk_capacity = capacity;
    return 0;
}

/* Move the chunks from an index on by `shift` places, up or down. */
static void move_chunks(struct state_map *map, size_t from, size_t to)
{
    size_t count = map->chunk_count - from;
    memmove(&map->chunks[to], &map->chunks[from], count * sizeof *map->chunks);
    memmove(&map->first_addresses[to], &map->first_addresses[from], count * sizeof *map->first_addresses);
    map->chunk_count = to + count;
}

/* Remove states, which were cleared or moved, after a position. Free the chunks that become empty. */
static void remove_states(struct state_map *map, struct position position, size_t count)
{
    size_t first_empty_chunk = position.chunk_index + (position.state_index > 0),
           chunk_index = position.chunk_index;
    map->state_count -= count;
    for (size_t index = position.state_index; count; index = 0, chunk_index++) {
        struct chunk *chunk = map->chunks[chunk_index];
        size_t removed_count = Py_MIN(count, chunk->state_count - index);
        size_t later_state_count = chunk->state_count - index - removed_count;
        move_states(chunk, index, chunk, index + removed_count, later_state_count);
        chunk->state_count -= (uint32_t)removed_count;
        count -= removed_count;
        if (chunk->state_count)
            map->first_addresses[chunk_index] = chunk->states[0].lo;
        if (later_state_count)
            break;
    }
    size_t end_empty_chunk = first_empty_chunk;
    while (end_empty_chunk < map->chunk_count && !map->chunks[end_empty_chunk]->state_count)
        PyMem_Free(map->chunks[end_empty_chunk++]);
    if (end_empty_chunk > first_empty_chunk)
        move_chunks(map, end_empty_chunk, first_empty_chunk);
    /* Merge two chunks with few states, so that the number of chunks stays in proportion to that of the states. */
    size_t left_index = first_empty_chunk ? first_empty_chunk - 1 : 0;
    if (left_index + 1 < map->chunk_count) {
        struct chunk *left_chunk = map->chunks[left_index], *right_chunk = map->chunks[left_index + 1];
        if (left_chunk->state_count + right_chunk->state_count <= FILLED_STATES / 2) {
            move_states(left_chunk, left_chunk->state_count, right_chunk, 0, right_chunk->state_count);
            left_chunk->state_count += right_chunk->state_count;
            PyMem_Free(right_chunk);
            move_chunks(map, left_index + 2, left_index + 1);
        }
    }
}

/* Allocate chunks. Return -1 with an exception, having allocated none, if memory runs out. */
static int new_chunks(struct chunk **chunks, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        chunks[i] = PyMem_Malloc(sizeof **chunks);
        if (!chunks[i]) {
            while (i)
                PyMem_Free(chunks[--i]);
            PyErr_NoMemory();
            return -1;
        }
        chunks[i]->state_count = 0;
    }
    return 0;
}

/* Insert states that do not fit into the chunk at the position: distribute the states of the chunk and the new ones
 * over this chunk and new chunks after it. Return -1 with an exception if memory runs out. */
static int insert_in_new_chunks(struct state_map *map, struct position position, const struct state *states,
                                size_t count)
{
    bool is_end = position.chunk_index == map->chunk_count;
    size_t old_state_count = is_end ? 0 : map->chunks[position.chunk_index]->state_count;
    size_t total_state_count = old_state_count + count,
           chunk_count = (total_state_count + FILLED_STATES - 1) / FILLED_STATES;
    size_t new_chunk_count = chunk_count - !is_end, first_new_chunk = position.chunk_index + !is_end;
    struct state *all_states = PyMem_Malloc(total_state_count * sizeof *all_states);
    struct chunk **chunks = PyMem_Malloc(chunk_count * sizeof(struct chunk *));
    if (!all_states || !chunks) {
        PyErr_NoMemory();
        goto fail;
    }
    if (reserve_chunks(map, map->chunk_count + new_chunk_count) || new_chunks(chunks, new_chunk_count))
        goto fail;
    if (!is_end) {
        const struct state *old_states = map->chunks[position.chunk_index]->states;
        memcpy(all_states, old_states, position.state_index * sizeof *all_states);
        memcpy(&all_states[position.state_index + count], &old_states[position.state_index],
               (old_state_count - position.state_index) * sizeof *all_states);
    }
    memcpy(&all_states[position.state_index], states, count * sizeof *all_states);
    move_chunks(map, first_new_chunk, first_new_chunk + new_chunk_count);
    memcpy(&map->chunks[first_new_chunk], chunks, new_chunk_count * sizeof *chunks);
    size_t begin = 0;
    for (size_t i = 0; i < chunk_count; i++) {
        size_t end = total_state_count * (i + 1) / chunk_count;
        struct chunk *chunk = map->chunks[position.chunk_index + i];
        fill_chunk(chunk, 0, &all_states[begin], end - begin);
        chunk->state_count = (uint32_t)(end - begin);
        map->first_addresses[position.chunk_index + i] = chunk->states[0].lo;
        begin = end;
    }
    PyMem_Free(all_states);
    PyMem_Free(chunks);
    return 0;
fail:
    PyMem_Free(all_states);
    PyMem_Free(chunks);
    return -1;
}

static int insert_states(struct state_map *map, struct position position, const struct state *states, size_t count)
{
    /* If the position is at the end of the map or of a chunk, append the states to the chunk before it, provided that
     * they fit. */
    if (!position.state_index && position.chunk_index &&
        map->chunks[position.chunk_index - 1]->state_count + count <= CHUNK_STATES)
        position = (struct position){position.chunk_index - 1, map->chunks[position.chunk_index - 1]->state_count};
    if (position.chunk_index < map->chunk_count &&
        map->chunks[position.chunk_index]->state_count + count <= CHUNK_STATES) {
        struct chunk *chunk = map->chunks[position.chunk_index];
        move_states(chunk, position.state_index + count, chunk, position.state_index,
                    chunk->state_count - position.state_index);
        fill_chunk(chunk, position.state_index, states, count);
        chunk->state_count += (uint32_t)count;
        map->first_addresses[position.chunk_index] = chunk->states[0].lo;
    } else if (insert_in_new_chunks(map, position, states, count))
        return -1;
    map->state_count += count;
    return 0;
}

int map_replace(struct state_map *map, struct position position, size_t removed_count, struct state *states,
                size_t count)
{
    size_t overwritten_count = Py_MIN(removed_count, count);
    for (size_t i = 0; i < overwritten_count; i++) {
        struct chunk *chunk = map->chunks[position.chunk_index];
        fill_chunk(chunk, position.state_index, &states[i], 1);
        map->first_addresses[position.chunk_index] = chunk->states[0].lo;
        position = map_next(map, position);
    }
    if (removed_count > overwritten_count)
        remove_states(map, position, removed_count - overwritten_count);
    else if (count > overwritten_count &&
             insert_states(map, position, &states[overwritten_count], count - overwritten_count)) {
        for (size_t i = overwritten_count; i < count; i++)
            state_clear(&states[i]);
        return -1;
    }
    return 0;
}

struct state *map_take_all(struct state_map *map)
{
    struct state *states = PyMem_Malloc(Py_MAX(map->state_count, 1) * sizeof *states);
    if (!states) {
        PyErr_NoMemory();
        return NULL;
    }
    size_t end = 0;
    for (size_t i = 0; i < map->chunk_count; i++) {
        memcpy(&states[end], map->chunks[i]->states, map->chunks[i]->state_count * sizeof *states);
        end += map->chunks[i]->state_count;
        PyMem_Free(map->chunks[i]);
    }
    map->chunk_count = map->state_count = map->last_chunk = 0;
    return states;
}

void map_release(struct state_map *map)
{
    for (size_t i = 0; i < map->chunk_count; i++) {
        for (uint32_t j = 0; j < map->chunks[i]->state_count; j++)
            state_clear(&map->chunks[i]->states[j]);
        PyMem_Free(map->chunks[i]);
    }
    PyMem_Free(map->chunks);
    PyMem_Free(map->first_addresses);
    *map = (struct state_map){0};
}

int map_filter(struct state_map *map, int (*keep)(struct state *, const void *), const void *context)
{
    size_t count = map->state_count, remaining_count = 0;
    struct state *states = map_take_all(map);
    int result = states ? 0 : -1;
    for (size_t i = 0; states && i < count; i++) {
        int is_kept = result ? 1 : keep(&states[i], context);
        if (is_kept < 0)
            result = -1;
        if (is_kept)
            states[remaining_count++] = states[i];
    }
    if (states && remaining_count && map_replace(map, (struct position){0, 0}, 0, states, remaining_count))
        result = -1;
    PyMem_Free(states);
    return result;
}
