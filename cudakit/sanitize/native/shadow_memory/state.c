#include "state.h"

#include <string.h>

void state_clear(struct state *state)
{
    access_release(state->write);
    state->write = NULL;
    access_list_clear(&state->reads);
    access_list_clear(&state->atomics);
    Py_CLEAR(state->reported_pairs);
    state->is_merged = state->is_approximate = false;
}

int state_copy(struct state *new_state, const struct state *state, uint64_t lo, uint64_t hi)
{
    *new_state =
        (struct state){.lo = lo, .hi = hi, .is_merged = state->is_merged, .is_approximate = state->is_approximate};
    new_state->write = state->write ? access_share(state->write) : NULL;
    new_state->reported_pairs = Py_XNewRef(state->reported_pairs);
    if (access_list_copy(&new_state->reads, &state->reads) ||
        access_list_copy(&new_state->atomics, &state->atomics)) {
        state_clear(new_state);
        return -1;
    }
    return 0;
}

bool states_are_equivalent(const struct state *first, const struct state *second)
{
    return accesses_are_equivalent(first->write, second->write) &&
           access_lists_are_equivalent(&first->reads, &second->reads) &&
           access_lists_are_equivalent(&first->atomics, &second->atomics) && !first->reported_pairs &&
           !second->reported_pairs && first->is_merged == second->is_merged &&
           first->is_approximate == second->is_approximate;
}

/* ---- unordered accesses ----------------------------------------------------------------------------------- */

/* Append an access if it does not happen before the clock. Return -1 with an exception if memory runs out. */
static int add_unordered(struct unordered_accesses *unordered_accesses, struct access *access,
                         const struct clock *clock)
{
    if (access_is_ordered(access, clock))
        return 0;
    if (unordered_accesses->access_count == unordered_accesses->capacity) {
        size_t capacity = unordered_accesses->capacity ? 2 * unordered_accesses->capacity : 16;
        struct access **items = PyMem_Realloc(unordered_accesses->accesses, capacity * sizeof(struct access *));
        if (!items) {
            PyErr_NoMemory();
            return -1;
        }
        unordered_accesses->accesses = items;
        unordered_accesses->capacity = capacity;
    }
    unordered_accesses->accesses[unordered_accesses->access_count++] = access;
    return 0;
}

static int add_all_unordered(struct unordered_accesses *unordered_accesses, const struct access_list *list,
                             const struct clock *clock)
{
    struct access *const *items = access_list_items(list);
    for (uint32_t i = 0; i < list->access_count; i++)
        if (add_unordered(unordered_accesses, items[i], clock))
            return -1;
    return 0;
}

/* Reads and atomics are ordered after the last write, or were reported. So if there is a conflicting read or atomic,
 * the write needs no check, except in a merged state, whose accesses may be to different bytes. */
int state_find_unordered(const struct state *state, uint8_t mode, const struct clock *clock,
                         struct unordered_accesses *unordered_accesses)
{
    bool checks_reads = mode & (MODE_WRITE | MODE_ATOMIC), checks_atomics = !(mode & MODE_ATOMIC);
    unordered_accesses->access_count = 0;
    if (checks_reads && add_all_unordered(unordered_accesses, &state->reads, clock))
        return -1;
    if (checks_atomics && add_all_unordered(unordered_accesses, &state->atomics, clock))
        return -1;
    bool has_candidates =
        (checks_reads && state->reads.access_count) || (checks_atomics && state->atomics.access_count);
    if (state->write && (!has_candidates || state->is_merged))
        return add_unordered(unordered_accesses, state->write, clock);
    return 0;
}

int pointer_find_unordered(const struct state *pointer, uint8_t mode, const struct clock *clock,
                           struct unordered_accesses *unordered_accesses)
{
    unordered_accesses->access_count = 0;
    if (add_all_unordered(unordered_accesses, &pointer->atomics, clock))
        return -1;
    return mode & MODE_WRITE ? add_all_unordered(unordered_accesses, &pointer->reads, clock) : 0;
}

/* ---- storing and pruning ---------------------------------------------------------------------------------- */

int state_store(struct state *state, struct access *access, const struct clock *clock)
{
    if (state->write && state->write->tick == TICK_NEVER)
        return 0; /* the memory was freed, and one use after a free is enough to report */
    if (access->mode & MODE_ATOMIC)
        return access_list_replace_ordered(&state->atomics, clock, access);
    if (!(access->mode & MODE_WRITE))
        return access_list_replace_ordered(&state->reads, clock, access);
    access_share(access);
    state_clear(state);
    state->write = access;
    return 0;
}

int pointer_store(struct state *pointer, struct access *access, const struct clock *clock)
{
    if (!(access->mode & MODE_WRITE))
        return access_list_replace_ordered(&pointer->reads, clock, access);
    if (access_list_replace_ordered(&pointer->atomics, clock, access))
        return -1;
    return access_list_replace_ordered(&pointer->reads, clock, NULL);
}

/* Return whether a MemoryAccess is that of an access in a list. */
static bool list_has_object(const struct access_list *list, const PyObject *object)
{
    struct access *const *items = access_list_items(list);
    for (uint32_t i = 0; i < list->access_count; i++)
        if (items[i]->object == object)
            return true;
    return false;
}

/* Remove the reported pairs whose earlier access is not in the state. Return -1 with an exception on errors. */
static int prune_reported_pairs(struct state *state)
{
    PyObject *pairs = state->reported_pairs;
    if (!pairs)
        return 0;
    PyObject *remaining_pairs = PyList_New(0);
    if (!remaining_pairs)
        return -1;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(pairs); i++) {
        PyObject *pair = PyTuple_GET_ITEM(pairs, i);
        PyObject *earlier_access =
            PyTuple_Check(pair) && PyTuple_GET_SIZE(pair) ? PyTuple_GET_ITEM(pair, 0) : NULL;
        bool is_stored = earlier_access && ((state->write && state->write->object == earlier_access) ||
                                            list_has_object(&state->reads, earlier_access) ||
                                            list_has_object(&state->atomics, earlier_access));
        if (is_stored && PyList_Append(remaining_pairs, pair)) {
            Py_DECREF(remaining_pairs);
            return -1;
        }
    }
    PyObject *remaining_tuple = PyList_GET_SIZE(remaining_pairs) ? PyList_AsTuple(remaining_pairs) : NULL;
    bool has_failed = PyList_GET_SIZE(remaining_pairs) && !remaining_tuple;
    Py_DECREF(remaining_pairs);
    if (has_failed)
        return -1;
    Py_SETREF(state->reported_pairs, remaining_tuple);
    return 0;
}

int state_prune(struct state *state, const struct clock *past_clock)
{
    if (state->write && access_is_ordered(state->write, past_clock)) {
        access_release(state->write);
        state->write = NULL;
    }
    if (access_list_replace_ordered(&state->reads, past_clock, NULL) ||
        access_list_replace_ordered(&state->atomics, past_clock, NULL) || prune_reported_pairs(state))
        return -1;
    return state->write || state->reads.access_count || state->atomics.access_count;
}

static uint64_t list_last_seq(const struct access_list *list, uint64_t last_seq)
{
    struct access *const *items = access_list_items(list);
    for (uint32_t i = 0; i < list->access_count; i++)
        last_seq = Py_MAX(last_seq, items[i]->operation->seq);
    return last_seq;
}

uint64_t state_last_seq(const struct state *state)
{
    uint64_t last_seq = state->write ? state->write->operation->seq : 0;
    return list_last_seq(&state->atomics, list_last_seq(&state->reads, last_seq));
}
