/* Access states: for some bytes, the earlier accesses that a later access may race with (shadow.py). */
#ifndef CUDAKIT_SANITIZE_STATE_H
#define CUDAKIT_SANITIZE_STATE_H

#include "access.h"

/* The state of the bytes from lo up to hi, all of which have the same accesses.
 *
 * The state of a pointer argument is at the address lo, and has other rules: `reads` are the kernels that only read,
 * `atomics` the kernels that may write, and `write` is NULL. */
struct state {
    uint64_t lo, hi;
    struct access *write;
    struct access_list reads, atomics;
    PyObject *reported_pairs; /* a tuple, see shadow.ReportedPairs; NULL if it is empty */
    bool is_merged; /* whether the state was merged from several states: each access is to some of the bytes */
    bool
        is_approximate; /* whether the state was split off a merged state: an access may be to none of the bytes */
};

/* Accesses that conflict with an access and do not happen before it. They are borrowed from a state. */
struct unordered_accesses {
    struct access **accesses;
    size_t access_count, capacity;
};

/* Remove and release the accesses of a state; lo and hi stay. */
void state_clear(struct state *state);
/* Make a new state a copy of another one, with other bytes. Return -1 with an exception if memory runs out. */
int state_copy(struct state *new_state, const struct state *state, uint64_t lo, uint64_t hi);
/* Return whether two states conflict with the same accesses and are reported in the same way. */
bool states_are_equivalent(const struct state *first, const struct state *second);
/* List the accesses of a range that may race with an access of this mode. Return -1 with an exception on errors. */
int state_find_unordered(const struct state *state, uint8_t mode, const struct clock *clock,
                         struct unordered_accesses *unordered_accesses);
/* Store an access in the state of a range. Return -1 with an exception if memory runs out. */
int state_store(struct state *state, struct access *access, const struct clock *clock);
/* List the kernels that may race with an access through a pointer, and store a kernel in the state of a pointer. */
int pointer_find_unordered(const struct state *pointer, uint8_t mode, const struct clock *clock,
                           struct unordered_accesses *unordered_accesses);
int pointer_store(struct state *pointer, struct access *access, const struct clock *clock);
/* Remove the accesses that happen before the clock `past_clock`, and their reported pairs. Return whether any access is
 * left, or -1 with an exception. */
int state_prune(struct state *state, const struct clock *past_clock);
/* Return the number of the last call that has an access in a state; 0 if there is none. */
uint64_t state_last_seq(const struct state *state);

#endif
