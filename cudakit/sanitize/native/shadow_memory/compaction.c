/* Remove or merge states, so that the memory of a long trace stays bounded. */
#include "shadow.h"

#include <stddef.h>
#include <string.h>

/* ---- pruning ----------------------------------------------------------------------------------------------- */

static int prune_state(struct state *state, const void *past_clock)
{
    int has_accesses = state_prune(state, past_clock);
    if (!has_accesses)
        state_clear(state);
    return has_accesses;
}

int shadow_prune(struct shadow *shadow, const struct clock *past_clock)
{
    if (map_filter(&shadow->range_states, prune_state, past_clock) ||
        map_filter(&shadow->pointer_states, prune_state, past_clock))
        return -1;
    return strided_filter(&shadow->strided_states, prune_state, past_clock);
}

/* ---- merging ----------------------------------------------------------------------------------------------- */

/* Accesses in any order, borrowed from states. */
struct access_array {
    struct access **accesses;
    size_t access_count;
};

/* Sort accesses by tick; accesses with equal ticks keep their order. Insertion sort: most lists are short and sorted. */
static void sort_by_tick(struct access_array *array)
{
    for (size_t i = 1; i < array->access_count; i++) {
        struct access *access = array->accesses[i];
        size_t j = i;
        for (; j && array->accesses[j - 1]->tick > access->tick; j--)
            array->accesses[j] = array->accesses[j - 1];
        array->accesses[j] = access;
    }
}

/* Remove all but the last access of each slot and graph node. The last access takes the place of the first. */
static void keep_last_per_stream(struct access_array *array)
{
    size_t kept_count = 0;
    sort_by_tick(array);
    for (size_t i = 0; i < array->access_count; i++) {
        struct access *access = array->accesses[i];
        size_t j = 0;
        while (j < kept_count && (array->accesses[j]->slot != access->slot ||
                                  array->accesses[j]->operation->node != access->operation->node))
            j++;
        array->accesses[j] = access;
        kept_count += j == kept_count;
    }
    array->access_count = kept_count;
}

/* Merge one list of each of several states into `merged_list`, which gets the last accesses of each stream. `offset` is
 * the offset of the list in a state. Return -1 with an exception if memory runs out. */
static int merge_access_lists(struct access_list *merged_list, const struct state *states, size_t count,
                              size_t offset)
{
    struct access_array sorted_accesses = {0};
    size_t access_count = 0;
    for (size_t i = 0; i < count; i++)
        access_count += ((const struct access_list *)((const char *)&states[i] + offset))->access_count;
    if (!access_count)
        return 0;
    sorted_accesses.accesses = PyMem_Malloc(access_count * sizeof(struct access *));
    if (!sorted_accesses.accesses) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < count; i++) {
        const struct access_list *list = (const struct access_list *)((const char *)&states[i] + offset);
        if (list->access_count)
            memcpy(&sorted_accesses.accesses[sorted_accesses.access_count], access_list_items(list),
                   list->access_count * sizeof *sorted_accesses.accesses);
        sorted_accesses.access_count += list->access_count;
    }
    keep_last_per_stream(&sorted_accesses);
    struct access_list list_view = {.access_count = (uint32_t)sorted_accesses.access_count};
    if (sorted_accesses.access_count == 1)
        list_view.single = sorted_accesses.accesses[0];
    else
        list_view.accesses = sorted_accesses.accesses;
    int result = access_list_copy(merged_list, &list_view);
    PyMem_Free(sorted_accesses.accesses);
    return result;
}

/* Make `merged_state` a state of the bytes of several adjacent states. Return -1 with an exception if memory runs out. */
static int merge_states(struct state *merged_state, const struct state *states, size_t count)
{
    *merged_state = (struct state){.lo = states[0].lo, .hi = states[count - 1].hi, .is_merged = true};
    for (size_t i = 0; i < count; i++) {
        struct access *write = states[i].write;
        if (write && (!merged_state->write || write->operation->seq > merged_state->write->operation->seq))
            merged_state->write = write;
        merged_state->is_approximate |= states[i].is_approximate;
    }
    if (merged_state->write)
        access_share(merged_state->write);
    for (size_t i = 0; i < count; i++) {
        if (!states[i].reported_pairs)
            continue;
        PyObject *reported_pairs = merged_state->reported_pairs
                                       ? PySequence_Concat(merged_state->reported_pairs, states[i].reported_pairs)
                                       : Py_NewRef(states[i].reported_pairs);
        if (!reported_pairs)
            goto fail;
        Py_XSETREF(merged_state->reported_pairs, reported_pairs);
    }
    if (!merge_access_lists(&merged_state->reads, states, count, offsetof(struct state, reads)) &&
        !merge_access_lists(&merged_state->atomics, states, count, offsetof(struct state, atomics)))
        return 0;
fail:
    state_clear(merged_state);
    return -1;
}

/* Merge the states of one allocation to half of `max_states`, and drop those of freed memory. `*count` becomes
 * the number of states. Return -1 with an exception if memory runs out; the states are then still valid. */
static int merge_allocation(struct state *states, size_t *count, size_t max_states)
{
    size_t group_size = (2 * *count + max_states - 1) / max_states;
    size_t used_count = 0, merged_count = 0;
    for (size_t i = 0; i < *count; i++) {
        if (states[i].write && states[i].write->tick == TICK_NEVER)
            state_clear(&states[i]);
        else
            states[used_count++] = states[i];
    }
    *count = used_count;
    for (size_t begin = 0; begin < used_count; begin += group_size) {
        size_t group_count = Py_MIN(group_size, used_count - begin);
        struct state merged_state;
        if (merge_states(&merged_state, &states[begin], group_count)) {
            memmove(&states[merged_count], &states[begin], (used_count - begin) * sizeof *states);
            *count = merged_count + used_count - begin;
            return -1;
        }
        for (size_t i = begin; i < begin + group_count; i++)
            state_clear(&states[i]);
        states[merged_count++] = merged_state;
    }
    *count = merged_count;
    return 0;
}

static int compare_seqs(const void *first, const void *second)
{
    uint64_t seq = *(const uint64_t *)first, second_seq = *(const uint64_t *)second;
    return (seq > second_seq) - (seq < second_seq);
}

/* Remove all but the most recently accessed states: half of `max_states` remain, more only if one call accessed them. */
static int keep_most_recent(struct state *states, size_t *count, size_t max_states)
{
    uint64_t *seqs = PyMem_Malloc(*count * sizeof *seqs);
    if (!seqs) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < *count; i++)
        seqs[i] = state_last_seq(&states[i]);
    qsort(seqs, *count, sizeof *seqs, compare_seqs);
    uint64_t oldest_seq = seqs[*count - (max_states + 1) / 2];
    PyMem_Free(seqs);
    size_t recent_count = 0, remaining_count = 0;
    for (size_t i = 0; i < *count; i++)
        recent_count += state_last_seq(&states[i]) >= oldest_seq;
    size_t excess_count = recent_count > max_states ? recent_count - max_states : 0;
    for (size_t i = 0; i < *count; i++) {
        if (state_last_seq(&states[i]) < oldest_seq || excess_count) {
            excess_count -= state_last_seq(&states[i]) >= oldest_seq;
            state_clear(&states[i]);
        } else
            states[remaining_count++] = states[i];
    }
    *count = remaining_count;
    return 0;
}

/* Read an attribute that is an address or a size. Return -1 with an exception on errors. */
static int read_number(PyObject *object, const char *name, uint64_t *value_read)
{
    PyObject *value = PyObject_GetAttrString(object, name);
    if (!value)
        return -1;
    *value_read = PyLong_AsUnsignedLongLong(value);
    Py_DECREF(value);
    return *value_read == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

/* Find the end of the allocation with an address; `*end` becomes 0 if there is none. */
static int find_allocation_end(PyObject *allocation_at, uint64_t address, uint64_t *end)
{
    PyObject *allocation = PyObject_CallFunction(allocation_at, "K", (unsigned long long)address);
    uint64_t begin = 0, size_bytes = 0;
    int result = allocation ? 0 : -1;
    if (allocation && allocation != Py_None)
        result = read_number(allocation, "address", &begin) || read_number(allocation, "size_bytes", &size_bytes)
                     ? -1
                     : 0;
    Py_XDECREF(allocation);
    *end = begin + size_bytes;
    return result;
}

/* Return the number of states, from the first, that are in the same allocation, or all outside of allocations.
 * `*has_allocation` becomes false in the second case. Return 0 with an exception on errors. */
static size_t count_in_allocation(const struct state *states, size_t count, PyObject *allocation_at,
                                  bool *has_allocation)
{
    uint64_t allocation_end, next_allocation_end;
    size_t group_count = 1;
    if (find_allocation_end(allocation_at, states[0].lo, &allocation_end))
        return 0;
    *has_allocation = allocation_end != 0;
    for (; group_count < count; group_count++) {
        if (allocation_end && states[group_count].lo >= allocation_end)
            break;
        if (!allocation_end && find_allocation_end(allocation_at, states[group_count].lo, &next_allocation_end))
            return 0;
        if (!allocation_end && next_allocation_end)
            break;
    }
    return group_count;
}

int shadow_coarsen(struct shadow *shadow, PyObject *allocation_at, size_t max_states)
{
    size_t count = shadow->range_states.state_count, remaining_count = 0;
    struct state *states = map_take_all(&shadow->range_states);
    if (!states)
        return -1;
    int result = 0;
    for (size_t begin = 0; begin < count;) {
        bool has_allocation = false;
        size_t group_count =
            result ? 0 : count_in_allocation(&states[begin], count - begin, allocation_at, &has_allocation);
        size_t end =
            begin + (group_count ? group_count : count - begin); /* after an error, all later states stay */
        size_t kept_count = end - begin;
        if (!group_count)
            result = -1;
        else if (group_count > max_states)
            result = has_allocation ? merge_allocation(&states[begin], &kept_count, max_states)
                                    : keep_most_recent(&states[begin], &kept_count, max_states);
        memmove(&states[remaining_count], &states[begin], kept_count * sizeof *states);
        remaining_count += kept_count;
        begin = end;
    }
    if (remaining_count && map_replace(&shadow->range_states, (struct position){0, 0}, 0, states, remaining_count))
        result = -1;
    PyMem_Free(states);
    return result;
}
