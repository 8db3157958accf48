/* Strided ranges, and the bytes that they share (shadow.py). */
#ifndef CUDAKIT_SANITIZE_STRIDED_H
#define CUDAKIT_SANITIZE_STRIDED_H

#include "state.h"

/* The first address of a range, and the first address after it. */
struct range {
    uint64_t lo, hi;
};

/* `count` rows of `width` bytes each, which begin at `lo`, `lo + stride` and so on. The last row ends at `hi`. */
struct strided_range {
    uint64_t lo, hi, width, stride, count;
};

/* Return the rows of a strided access. Return false if its rows are contiguous or its numbers contradict each other;
 * it then counts as one range. */
bool strided_from_access(struct strided_range *strided_range, uint64_t lo, uint64_t hi, int64_t stride,
                         uint64_t count);
/* Find the bytes of a range in the first row that overlaps the range. Return false if no row overlaps it. */
bool strided_shared_with_range(const struct strided_range *strided_range, struct range range,
                               struct range *common_range);
/* Find the first bytes that are in rows of both strided ranges. Return false if there are none. */
bool strided_shared_with(const struct strided_range *strided_range, const struct strided_range *stored_range,
                         struct range *common_range);

/* The same value as strided.MAX_STRIDED_STATES. */
enum { MAX_STRIDED_STATES = 1 << 16 };

/* The access state of a strided range. */
struct strided_state {
    struct strided_range range;
    struct state state;
    uint64_t number; /* number of strided states that were created before */
};

/* Strided states whose ranges have a similar length in bytes, in order of address and number. */
struct strided_list {
    struct strided_state **items;
    size_t count, capacity;
};

/* The states of strided ranges. The list with index i has the ranges of 2^i to 2^(i+1) - 1 bytes, so that a search by
 * address looks at few ranges that do not overlap. */
struct strided_states {
    struct strided_list lists[64];
    uint64_t nonempty_lists;              /* bit i is set if the list with index i has items */
    size_t state_count;                   /* number of states in all lists */
    uint64_t created_count;               /* number of states that were ever created */
    struct strided_list overlapping_list; /* result of the last strided_find_overlapping() */
};

/* Find the states whose ranges begin below hi and end above lo, the oldest first. The result is valid until the next
 * call of a function below. Return NULL with an exception if memory runs out. */
const struct strided_list *strided_find_overlapping(struct strided_states *states, uint64_t lo, uint64_t hi);
/* Return the state of a strided range. Create it if there is none; if there are too many, remove the older half.
 * Return NULL with an exception if memory runs out. */
struct state *strided_get_or_create(struct strided_states *states, const struct strided_range *strided_range);
/* Remove the strided ranges that lie completely between two addresses. Return -1 with an exception if memory runs out. */
int strided_clear(struct strided_states *states, uint64_t lo, uint64_t hi);
/* Remove states. `keep` returns 1 for a state that stays; for a state to remove it clears the state and returns 0; on
 * errors it returns -1 with an exception. */
int strided_filter(struct strided_states *states, int (*keep)(struct state *, const void *), const void *context);
/* Remove all states, and release the memory. */
void strided_release(struct strided_states *states);
bool strided_are_equal(const struct strided_range *first, const struct strided_range *second);

#endif
