/* A sorted sequence of states with disjoint bytes, in chunks, so that an insertion moves only a few states. */
#ifndef CUDAKIT_SANITIZE_STATE_MAP_H
#define CUDAKIT_SANITIZE_STATE_MAP_H

#include "state.h"

enum { CHUNK_STATES = 64 };

struct chunk {
    uint32_t state_count;             /* number of states; not 0 while the chunk is in a map */
    uint64_t addresses[CHUNK_STATES]; /* `lo` of each state: a search reads fewer cache lines than in the states */
    struct state states[CHUNK_STATES];
};

struct state_map {
    struct chunk **chunks;
    uint64_t *first_addresses; /* `lo` of the first state of each chunk */
    size_t chunk_count, chunk_capacity;
    size_t state_count;
    size_t last_chunk; /* chunk of the last search, where the next search begins */
};

/* A position between two states: before the state with this index in this chunk. The position after the last state
 * is index 0 of the chunk after the last one. */
struct position {
    size_t chunk_index, state_index;
};

/* Return the position before the first state whose `lo` is at or above an address. */
struct position map_lower_bound(struct state_map *map, uint64_t address);
/* Return the state after a position, or NULL at the end. The pointer is valid until the map changes. */
struct state *map_state(const struct state_map *map, struct position position);
/* Return the last state whose `lo` is at or below an address, or NULL. */
struct state *map_last_at_or_below(struct state_map *map, uint64_t address);
/* Return the position of the first state that ends above an address. */
struct position map_first_ending_above(struct state_map *map, uint64_t address);
/* Move a position past the next state, or before the previous state. */
struct position map_next(const struct state_map *map, struct position position);
struct position map_previous(const struct state_map *map, struct position position);
/* Return whether the position is before all states. */
static inline bool is_map_begin(struct position position)
{
    return position.chunk_index == 0 && position.state_index == 0;
}

/* Replace `removed_count` states after a position by `count` new ones, which the map takes over. The caller has cleared or
 * moved the removed states. Return -1 with an exception if memory runs out; new states that were not stored are cleared. */
int map_replace(struct state_map *map, struct position position, size_t removed_count, struct state *states,
                size_t count);
/* Move all states to a new array, and empty the map. Return NULL with an exception if memory runs out. */
struct state *map_take_all(struct state_map *map);
/* Clear all states and release the memory of the map. */
void map_release(struct state_map *map);
/* Remove states from a map. `keep` returns 1 for a state that stays; for a state to remove it clears the state and
 * returns 0; on errors it returns -1 with an exception. */
int map_filter(struct state_map *map, int (*keep)(struct state *, const void *), const void *context);

#endif
