/* The shadow memory of one process: the C counterpart of shadow_memory.PythonShadow. */
#ifndef CUDAKIT_SANITIZE_SHADOW_H
#define CUDAKIT_SANITIZE_SHADOW_H

#include "state_map.h"
#include "strided.h"

/* The same value as shadow.MAX_POINTER_STATES. */
enum { MAX_POINTER_STATES = 1 << 16 };

/* States that are about to replace a run of states in a map, such as the parts of a divided state. */
struct replacements {
    struct state *states;
    size_t state_count, capacity;
};

/* The order of the nodes of a graph, from conflicts.NodeOrder. For each position in the order there are
 * `bytes_per_node` bytes: a bit mask of the positions of the nodes that happen before the node. */
struct node_order {
    const uint8_t *ancestor_bytes;
    size_t node_count, bytes_per_node;
};

struct shadow {
    PyObject *checker;     /* a conflicts.ConflictChecker */
    PyObject *access_type; /* clocks.MemoryAccess */
    bool finds_possible;   /* whether to find races that are only possible */
    bool is_busy; /* whether a call is in progress; Python code that the call runs must not call this object */
    bool
        must_report; /* whether the checker got a conflict of the current access, which it must report after the access */
    struct state_map range_states, pointer_states;
    struct strided_states strided_states;
    struct clock clock; /* clock of the current operation */
    struct node_order
        node_order; /* order of the graph whose launch is being added; without nodes if there is none */
    struct unordered_accesses unordered_accesses;
    struct replacements replacements;
};

/* Check an access for races, and store it; if `count` is greater than 1, the access is strided. All functions return
 * -1 with an exception on errors, and need the clock of the operation in shadow->clock. */
int shadow_add(struct shadow *shadow, struct access *access, int64_t stride, uint64_t count);
/* Return a list of the MemoryAccess objects of the stored accesses to the bytes from lo up to hi that conflict with an
 * access in this mode, and do not happen before the operation. Pointers are ignored. Return NULL with an exception on
 * errors. */
PyObject *shadow_find_unordered(struct shadow *shadow, uint64_t lo, uint64_t hi, unsigned mode);
/* Remove all accesses to the bytes from lo up to hi. */
int shadow_clear(struct shadow *shadow, uint64_t lo, uint64_t hi);
/* Remove the accesses that happen before the clock `past_clock`. */
int shadow_prune(struct shadow *shadow, const struct clock *past_clock);
/* Merge the ranges of each allocation that has more than `max_states`, which is at least 2. `allocation_at` is a
 * function that returns the races.Allocation with an address, or None. */
int shadow_coarsen(struct shadow *shadow, PyObject *allocation_at, size_t max_states);
void shadow_release(struct shadow *shadow);

#endif
