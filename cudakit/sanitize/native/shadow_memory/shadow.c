#include "shadow.h"

#include <string.h>

/* The same value as in shadow.py: up to this number of rows, each row is stored as a range. */
enum { MAX_SEPARATE_ROWS = 16 };

/* ---- conflicts -------------------------------------------------------------------------------------------- */

/* Return whether a node of the current graph launch happens before another one. */
static bool node_precedes(const struct node_order *order, uint32_t position, uint32_t later_position)
{
    return order->ancestor_bytes[later_position * order->bytes_per_node + position / 8] >> position % 8 & 1;
}

/* Remove the accesses from shadow->unordered_accesses that belong to the same graph launch as an access, if the edges
 * of the graph order them. All nodes of a launch have the same tick, so the clock does not order them. */
static void remove_ordered_nodes(struct shadow *shadow, const struct access *access)
{
    const struct node_order *order = &shadow->node_order;
    struct unordered_accesses *unordered = &shadow->unordered_accesses;
    if (!unordered->access_count || !order->node_count)
        return;
    uint32_t position = access->operation->position;
    if (position >= order->node_count)
        return;
    size_t remaining_count = 0;
    for (size_t i = 0; i < unordered->access_count; i++) {
        const struct access *earlier = unordered->accesses[i];
        uint32_t earlier_position = earlier->operation->position;
        bool is_ordered = earlier->slot == access->slot && earlier->tick == access->tick &&
                          earlier_position < order->node_count &&
                          (earlier_position == position || node_precedes(order, earlier_position, position) ||
                           node_precedes(order, position, earlier_position));
        if (!is_ordered)
            unordered->accesses[remaining_count++] = unordered->accesses[i];
    }
    unordered->access_count = remaining_count;
}

/* Return the MemoryAccess objects of the accesses in shadow->unordered as a list, or NULL with an exception. */
static PyObject *unordered_objects(const struct shadow *shadow)
{
    PyObject *objects = PyList_New((Py_ssize_t)shadow->unordered_accesses.access_count);
    for (size_t i = 0; objects && i < shadow->unordered_accesses.access_count; i++) {
        PyObject *object = access_object(shadow->unordered_accesses.accesses[i], shadow->access_type);
        if (!object)
            Py_CLEAR(objects);
        else
            PyList_SET_ITEM(objects, (Py_ssize_t)i, Py_NewRef(object));
    }
    return objects;
}

/* Pass the accesses in shadow->unordered, which belong to a state, to ConflictChecker.check. */
static int check_unordered(struct shadow *shadow, struct state *state, struct access *access,
                           struct range common_range, bool certainly_overlap, bool approximate)
{
    remove_ordered_nodes(shadow, access);
    if (!shadow->unordered_accesses.access_count)
        return 0;
    shadow->must_report = true;
    PyObject *previous_accesses = unordered_objects(shadow),
             *current_access = access_object(access, shadow->access_type);
    PyObject *reported_pairs = state->reported_pairs ? Py_NewRef(state->reported_pairs) : PyTuple_New(0);
    PyObject *new_pairs = NULL;
    if (previous_accesses && current_access && reported_pairs)
        new_pairs = PyObject_CallMethod(shadow->checker, "check", "OOOO(KK)OO", reported_pairs, previous_accesses,
                                        current_access, shadow->clock.list, (unsigned long long)common_range.lo,
                                        (unsigned long long)common_range.hi,
                                        certainly_overlap ? Py_True : Py_False, approximate ? Py_True : Py_False);
    Py_XDECREF(previous_accesses);
    Py_XDECREF(reported_pairs);
    if (new_pairs && !PyTuple_Check(new_pairs)) {
        PyErr_SetString(PyExc_TypeError, "check must return a tuple");
        Py_CLEAR(new_pairs);
    }
    if (!new_pairs)
        return -1;
    if (!PyTuple_GET_SIZE(new_pairs))
        Py_CLEAR(new_pairs);
    Py_XSETREF(state->reported_pairs, new_pairs);
    return 0;
}

/* Check an access against the state of a range. */
static int check_range(struct shadow *shadow, struct state *state, struct access *access,
                       struct range common_range, bool certainly_overlap)
{
    if (state_find_unordered(state, access->mode, &shadow->clock, &shadow->unordered_accesses))
        return -1;
    return check_unordered(shadow, state, access, common_range, certainly_overlap, state->is_merged);
}

/* Check an access against the state of a pointer. */
static int check_pointer(struct shadow *shadow, struct state *pointer, struct access *access,
                         struct range common_range)
{
    if (pointer_find_unordered(pointer, access->mode, &shadow->clock, &shadow->unordered_accesses))
        return -1;
    return check_unordered(shadow, pointer, access, common_range, true, false);
}

/* ---- ranges: divide states, check and store accesses, merge states ----------------------------------------------------- */

/* Append an uninitialized state to the replacements, and return the state. Return NULL with an exception if memory
 * runs out. */
static struct state *append_replacement(struct replacements *replacements)
{
    if (replacements->state_count == replacements->capacity) {
        size_t capacity = replacements->capacity ? 2 * replacements->capacity : 64;
        struct state *new_items = PyMem_Realloc(replacements->states, capacity * sizeof *new_items);
        if (!new_items) {
            PyErr_NoMemory();
            return NULL;
        }
        replacements->states = new_items;
        replacements->capacity = capacity;
    }
    return &replacements->states[replacements->state_count++];
}

/* Append a copy of a state for other bytes to the replacements. */
static int append_copy(struct replacements *replacements, const struct state *state, uint64_t lo, uint64_t hi)
{
    struct state *replacement = append_replacement(replacements);
    if (!replacement)
        return -1;
    if (state_copy(replacement, state, lo, hi)) {
        replacements->state_count--;
        return -1;
    }
    return 0;
}

/* Move the accesses of a state to a new replacement, which covers other bytes. The state stays in the map, empty. */
static int append_moved(struct replacements *replacements, struct state *state, uint64_t lo, uint64_t hi)
{
    struct state *replacement = append_replacement(replacements);
    if (!replacement)
        return -1;
    *replacement = *state;
    replacement->lo = lo;
    replacement->hi = hi;
    *state = (struct state){.lo = state->lo, .hi = state->hi};
    return 0;
}

/* Append an empty state for the bytes from lo up to hi, which have no state yet. Do nothing if lo equals hi. */
static int append_gap_state(struct replacements *replacements, uint64_t lo, uint64_t hi)
{
    struct state *replacement = lo < hi ? append_replacement(replacements) : NULL;
    if (replacement)
        *replacement = (struct state){.lo = lo, .hi = hi};
    return lo < hi && !replacement ? -1 : 0;
}

static void clear_replacements(struct replacements *replacements)
{
    while (replacements->state_count)
        state_clear(&replacements->states[--replacements->state_count]);
}

/* A run of consecutive states of the map that are about to be replaced. */
struct state_run {
    struct position begin;
    size_t count;
};

/* Move the states that overlap the bytes from lo up to hi to the replacements. Divide them at lo and hi and, if
 * `fills_gaps`, add new states in the gaps. */
static int divide_states(struct shadow *shadow, uint64_t lo, uint64_t hi, bool fills_gaps, struct state_run *run)
{
    struct state_map *map = &shadow->range_states;
    struct replacements *replacements = &shadow->replacements;
    *run = (struct state_run){map_first_ending_above(map, lo), 0};
    struct position position = run->begin;
    struct state *state;
    uint64_t covered_end = lo;
    for (; (state = map_state(map, position)) && state->lo < hi; position = map_next(map, position)) {
        size_t first_replacement = replacements->state_count;
        uint64_t begin = Py_MAX(state->lo, lo), end = Py_MIN(state->hi, hi);
        if ((fills_gaps && append_gap_state(replacements, covered_end, begin)) ||
            (state->lo < lo && append_copy(replacements, state, state->lo, lo)) ||
            (hi < state->hi && append_copy(replacements, state, begin, end)) ||
            append_moved(replacements, state, end < state->hi ? hi : begin, state->hi))
            return -1;
        if (state->lo < lo || hi < state->hi)
            for (size_t i = first_replacement; i < replacements->state_count; i++)
                replacements->states[i].is_approximate |= replacements->states[i].is_merged;
        covered_end = end;
        run->count++;
    }
    return fills_gaps ? append_gap_state(replacements, covered_end, hi) : 0;
}

/* Replace states of the map by the replacements, which the map then owns. */
static int replace_states(struct shadow *shadow, struct state_run run)
{
    struct position position = run.begin;
    for (size_t i = 0; i < run.count; i++, position = map_next(&shadow->range_states, position))
        state_clear(map_state(&shadow->range_states, position));
    struct replacements *replacements = &shadow->replacements;
    size_t count = replacements->state_count;
    replacements->state_count = 0;
    return map_replace(&shadow->range_states, run.begin, run.count, replacements->states, count);
}

/* Merge adjacent equivalent replacements. */
static void merge_replacements(struct replacements *replacements)
{
    size_t last_index = 0;
    for (size_t i = 1; i < replacements->state_count; i++) {
        struct state *replacement = &replacements->states[i],
                     *merged_replacement = &replacements->states[last_index];
        if (merged_replacement->hi == replacement->lo && states_are_equivalent(merged_replacement, replacement)) {
            merged_replacement->hi = replacement->hi;
            state_clear(replacement);
        } else if (++last_index != i)
            replacements->states[last_index] = *replacement;
    }
    replacements->state_count = replacements->state_count ? last_index + 1 : 0;
}

/* Merge the replacements with adjacent equivalent states of the map, which become part of `run`. */
static void merge_with_adjacent(struct shadow *shadow, const struct access *access, struct state_run *run)
{
    struct state_map *map = &shadow->range_states;
    struct replacements *replacements = &shadow->replacements;
    struct position end = run->begin;
    for (size_t i = 0; i < run->count; i++)
        end = map_next(map, end);
    const struct state *next_state = map_state(map, end);
    struct state *last_replacement = &replacements->states[replacements->state_count - 1],
                 *first_replacement = &replacements->states[0];
    if (next_state && next_state->lo == access->hi && last_replacement->hi == access->hi &&
        states_are_equivalent(last_replacement, next_state)) {
        last_replacement->hi = next_state->hi;
        run->count++;
    }
    if (is_map_begin(run->begin) || first_replacement->lo < access->lo)
        return;
    struct position previous_position = map_previous(map, run->begin);
    const struct state *previous_state = map_state(map, previous_position);
    if (previous_state->hi == first_replacement->lo && states_are_equivalent(previous_state, first_replacement)) {
        /* The earlier state stays, as in RangeStates.merge, because reports show the range of its access. */
        struct state merged_state;
        if (state_copy(&merged_state, previous_state, previous_state->lo, first_replacement->hi)) {
            PyErr_Clear(); /* the two states stay separate, which is correct, too */
            return;
        }
        state_clear(first_replacement);
        *first_replacement = merged_state;
        run->begin = previous_position;
        run->count++;
    }
}

/* Check and store an access to a range whose states are among the replacements. */
static int store_in_replacements(struct shadow *shadow, struct access *access)
{
    struct replacements *replacements = &shadow->replacements;
    for (size_t i = 0; i < replacements->state_count; i++) {
        struct state *replacement = &replacements->states[i];
        if (replacement->lo < access->lo || access->hi < replacement->hi)
            continue; /* the part of a divided state that the access does not touch */
        struct range common_range = {replacement->lo, replacement->hi};
        if (check_range(shadow, replacement, access, common_range, !replacement->is_approximate) ||
            state_store(replacement, access, &shadow->clock))
            return -1;
    }
    return 0;
}

/* Return whether the states before and after a state differ from it, so that nothing can be merged. */
static bool differs_from_adjacent_states(struct state_map *map, struct position position)
{
    const struct state *state = map_state(map, position), *next_state = map_state(map, map_next(map, position));
    if (next_state && next_state->lo == state->hi && states_are_equivalent(state, next_state))
        return false;
    if (is_map_begin(position))
        return true;
    const struct state *previous_state = map_state(map, map_previous(map, position));
    return previous_state->hi != state->lo || !states_are_equivalent(previous_state, state);
}

/* Store an access whose bytes are exactly one stored range and that races with nothing, the most frequent case. Return
 * 1 if the access was stored, 0 if this is another case, or -1 with an exception. */
static int add_to_equal_range(struct shadow *shadow, struct access *access)
{
    struct position position = map_lower_bound(&shadow->range_states, access->lo);
    struct state *state = map_state(&shadow->range_states, position);
    if (!state || state->lo != access->lo || state->hi != access->hi)
        return 0;
    if (state_find_unordered(state, access->mode, &shadow->clock, &shadow->unordered_accesses))
        return -1;
    remove_ordered_nodes(shadow, access);
    if (shadow->unordered_accesses.access_count)
        return 0;
    if (state_store(state, access, &shadow->clock))
        return -1;
    if (differs_from_adjacent_states(&shadow->range_states, position))
        return 1;
    struct state_run run = {position, 1};
    if (append_copy(&shadow->replacements, state, state->lo, state->hi))
        return -1;
    merge_with_adjacent(shadow, access, &run);
    return replace_states(shadow, run) ? -1 : 1;
}

static int add_to_ranges(struct shadow *shadow, struct access *access)
{
    int result = add_to_equal_range(shadow, access);
    if (result)
        return result < 0 ? -1 : 0;
    struct state_run run;
    if (divide_states(shadow, access->lo, access->hi, true, &run) || store_in_replacements(shadow, access)) {
        clear_replacements(&shadow->replacements);
        return -1;
    }
    merge_replacements(&shadow->replacements);
    merge_with_adjacent(shadow, access, &run);
    return replace_states(shadow, run);
}

/* ---- strided ranges and pointers --------------------------------------------------------------------------- */

/* Check an access to a range, or to the address of a pointer, against all strided ranges. */
static int check_strided(struct shadow *shadow, struct access *access, struct range range, bool certainly_overlap)
{
    if (!shadow->strided_states.state_count)
        return 0;
    const struct strided_list *overlapping_list =
        strided_find_overlapping(&shadow->strided_states, range.lo, range.hi);
    for (size_t i = 0; overlapping_list && i < overlapping_list->count; i++) {
        struct strided_state *item = overlapping_list->items[i];
        struct range common_range;
        if (strided_shared_with_range(&item->range, range, &common_range) &&
            check_range(shadow, &item->state, access, common_range, certainly_overlap))
            return -1;
    }
    return overlapping_list ? 0 : -1;
}

/* Check an access to a range against the pointers from which a kernel may reach the range. */
static int check_pointers_below(struct shadow *shadow, struct access *access)
{
    struct position position = {0, 0};
    struct state *pointer;
    for (; (pointer = map_state(&shadow->pointer_states, position)) && pointer->lo < access->lo;
         position = map_next(&shadow->pointer_states, position)) {
        struct unordered_accesses *unordered_accesses = &shadow->unordered_accesses;
        if (pointer_find_unordered(pointer, access->mode, &shadow->clock, unordered_accesses))
            return -1;
        size_t reaching_count = 0;
        for (size_t i = 0; i < unordered_accesses->access_count; i++)
            if (unordered_accesses->accesses[i]->hi > access->lo)
                unordered_accesses->accesses[reaching_count++] = unordered_accesses->accesses[i];
        unordered_accesses->access_count = reaching_count;
        struct range common_range = {access->lo, access->hi};
        if (check_unordered(shadow, pointer, access, common_range, false, false))
            return -1;
    }
    return 0;
}

/* Check an access to a range against the pointers to its bytes. A write replaces the states of these pointers. */
static int check_pointers(struct shadow *shadow, struct access *access)
{
    if (!shadow->pointer_states.state_count)
        return 0;
    struct position position = map_lower_bound(&shadow->pointer_states, access->lo);
    struct state *pointer;
    for (; (pointer = map_state(&shadow->pointer_states, position)) && pointer->lo < access->hi;
         position = map_next(&shadow->pointer_states, position)) {
        if (check_pointer(shadow, pointer, access, (struct range){pointer->lo, access->hi}))
            return -1;
        if (access->mode & MODE_WRITE)
            state_clear(pointer);
    }
    return shadow->finds_possible ? check_pointers_below(shadow, access) : 0;
}

static int add_range(struct shadow *shadow, struct access *access)
{
    struct range range = {access->lo, access->hi};
    if (add_to_ranges(shadow, access) ||
        check_strided(shadow, access, range, access->precision != PRECISION_MERGED))
        return -1;
    if (access->mode & MODE_WRITE && strided_clear(&shadow->strided_states, access->lo, access->hi))
        return -1;
    return check_pointers(shadow, access);
}

/* Add each row of a strided access as a range. */
static int add_rows(struct shadow *shadow, struct access *access, const struct strided_range *strided_range)
{
    for (uint64_t i = 0; i < strided_range->count; i++) {
        uint64_t lo = strided_range->lo + i * strided_range->stride;
        struct access *row = access_new(access->operation, access->slot, access->tick, lo,
                                        lo + strided_range->width, access->mode, access->precision);
        int result = row ? add_range(shadow, row) : -1;
        access_release(row);
        if (result)
            return -1;
    }
    return 0;
}

/* Check a strided access against the ranges of contiguous accesses. */
static int check_strided_with_ranges(struct shadow *shadow, struct access *access,
                                     const struct strided_range *strided_range)
{
    struct position position = map_first_ending_above(&shadow->range_states, strided_range->lo);
    struct state *state;
    for (; (state = map_state(&shadow->range_states, position)) && state->lo < strided_range->hi;
         position = map_next(&shadow->range_states, position)) {
        struct range common_range;
        if (!strided_shared_with_range(strided_range, (struct range){state->lo, state->hi}, &common_range))
            continue;
        if (state_find_unordered(state, access->mode, &shadow->clock, &shadow->unordered_accesses))
            return -1;
        bool certainly_overlap = !state->is_merged;
        for (size_t i = 0; i < shadow->unordered_accesses.access_count; i++)
            certainly_overlap &= shadow->unordered_accesses.accesses[i]->precision != PRECISION_MERGED;
        if (check_unordered(shadow, state, access, common_range, certainly_overlap, state->is_merged))
            return -1;
    }
    return 0;
}

static int add_strided(struct shadow *shadow, struct access *access, const struct strided_range *strided_range)
{
    if (strided_range->count <= MAX_SEPARATE_ROWS)
        return add_rows(shadow, access, strided_range);
    if (access_set_accessed_bytes(access, strided_range->count * strided_range->width))
        return -1;
    if (check_strided_with_ranges(shadow, access, strided_range))
        return -1;
    struct range common_range;
    const struct strided_list *overlapping_list =
        strided_find_overlapping(&shadow->strided_states, strided_range->lo, strided_range->hi);
    for (size_t i = 0; overlapping_list && i < overlapping_list->count; i++) {
        struct strided_state *item = overlapping_list->items[i];
        if (!strided_are_equal(&item->range, strided_range) &&
            strided_shared_with(strided_range, &item->range, &common_range) &&
            check_range(shadow, &item->state, access, common_range, true))
            return -1;
    }
    if (!overlapping_list)
        return -1;
    struct position position = map_lower_bound(&shadow->pointer_states, strided_range->lo);
    struct state *pointer;
    for (; (pointer = map_state(&shadow->pointer_states, position)) && pointer->lo < strided_range->hi;
         position = map_next(&shadow->pointer_states, position))
        if (strided_shared_with_range(strided_range, (struct range){pointer->lo, pointer->lo + 1},
                                      &common_range) &&
            check_pointer(shadow, pointer, access, common_range))
            return -1;
    struct state *equal_state = strided_get_or_create(&shadow->strided_states, strided_range);
    if (!equal_state ||
        check_range(shadow, equal_state, access, (struct range){strided_range->lo, strided_range->hi}, true))
        return -1;
    return state_store(equal_state, access, &shadow->clock);
}

/* ---- pointers ---------------------------------------------------------------------------------------------- */

static int compare_seqs(const void *first, const void *second)
{
    uint64_t first_seq = *(const uint64_t *)first, second_seq = *(const uint64_t *)second;
    return (first_seq > second_seq) - (first_seq < second_seq);
}

static int is_used_after(struct state *pointer, const void *seq)
{
    if (state_last_seq(pointer) > *(const uint64_t *)seq)
        return 1;
    state_clear(pointer);
    return 0;
}

/* Remove the least recently used half of the pointers. */
static int remove_half_of_pointers(struct shadow *shadow)
{
    struct state_map *map = &shadow->pointer_states;
    uint64_t *seqs = PyMem_Malloc(map->state_count * sizeof *seqs);
    if (!seqs) {
        PyErr_NoMemory();
        return -1;
    }
    size_t seq_count = 0;
    for (struct position position = {0, 0}; map_state(map, position); position = map_next(map, position))
        seqs[seq_count++] = state_last_seq(map_state(map, position));
    qsort(seqs, seq_count, sizeof *seqs, compare_seqs);
    uint64_t median_seq = seqs[seq_count / 2];
    PyMem_Free(seqs);
    return map_filter(map, is_used_after, &median_seq);
}

/* Return the state of a pointer; create it if there is none. Return NULL with an exception on errors. */
static struct state *get_or_create_pointer(struct shadow *shadow, uint64_t address)
{
    struct state_map *map = &shadow->pointer_states;
    struct state *pointer = map_state(map, map_lower_bound(map, address));
    if (pointer && pointer->lo == address)
        return pointer;
    if (map->state_count >= MAX_POINTER_STATES && remove_half_of_pointers(shadow))
        return NULL;
    struct state new_pointer = {.lo = address, .hi = address};
    if (map_replace(map, map_lower_bound(map, address), 0, &new_pointer, 1))
        return NULL;
    return map_state(map, map_lower_bound(map, address));
}

/* Check a pointer against the ranges above it, which a kernel may reach from it. */
static int check_ranges_above(struct shadow *shadow, struct access *access)
{
    struct position position = map_lower_bound(&shadow->range_states, access->lo + 1);
    struct state *state;
    for (; (state = map_state(&shadow->range_states, position)) && state->lo < access->hi;
         position = map_next(&shadow->range_states, position))
        if (check_range(shadow, state, access, (struct range){state->lo, state->hi}, false))
            return -1;
    return 0;
}

/* Check and store a pointer argument of a kernel. */
static int add_pointer(struct shadow *shadow, struct access *access)
{
    uint64_t lo = access->lo;
    struct state *pointer = get_or_create_pointer(shadow, lo);
    if (!pointer || check_pointer(shadow, pointer, access, (struct range){lo, lo + 1}) ||
        pointer_store(pointer, access, &shadow->clock))
        return -1;
    struct state *state = map_last_at_or_below(&shadow->range_states, lo);
    if (state && state->hi > lo &&
        check_range(shadow, state, access, (struct range){lo, Py_MIN(state->hi, access->hi)}, !state->is_merged))
        return -1;
    if (check_strided(shadow, access, (struct range){lo, lo + 1}, true))
        return -1;
    return shadow->finds_possible ? check_ranges_above(shadow, access) : 0;
}

/* ---- the calls of Python ----------------------------------------------------------------------------------- */

static int add_access(struct shadow *shadow, struct access *access, int64_t stride, uint64_t count)
{
    struct strided_range strided_range;
    if (access->precision == PRECISION_UNCERTAIN && !shadow->finds_possible)
        return 0;
    if (access->precision >= PRECISION_ASSUMED)
        return add_pointer(shadow, access);
    if (access->lo >= access->hi)
        return 0;
    if (count > 1 && strided_from_access(&strided_range, access->lo, access->hi, stride, count))
        return add_strided(shadow, access, &strided_range);
    return add_range(shadow, access);
}

int shadow_add(struct shadow *shadow, struct access *access, int64_t stride, uint64_t count)
{
    shadow->must_report = false;
    if (add_access(shadow, access, stride, count))
        return -1;
    if (shadow->must_report) {
        PyObject *result = PyObject_CallMethod(shadow->checker, "report", NULL);
        if (!result)
            return -1;
        Py_DECREF(result);
    }
    return 0;
}

/* Append the accesses of a state that do not happen before the current operation to a list. */
static int append_unordered(struct shadow *shadow, struct state *state, unsigned mode, PyObject *found)
{
    if (state_find_unordered(state, mode, &shadow->clock, &shadow->unordered_accesses))
        return -1;
    PyObject *accesses = unordered_objects(shadow);
    int result = accesses ? 0 : -1;
    for (Py_ssize_t i = 0; !result && i < PyList_GET_SIZE(accesses); i++)
        result = PyList_Append(found, PyList_GET_ITEM(accesses, i));
    Py_XDECREF(accesses);
    return result;
}

PyObject *shadow_find_unordered(struct shadow *shadow, uint64_t lo, uint64_t hi, unsigned mode)
{
    PyObject *found = PyList_New(0);
    struct position position = map_first_ending_above(&shadow->range_states, lo);
    struct state *state;
    for (; found && (state = map_state(&shadow->range_states, position)) && state->lo < hi;
         position = map_next(&shadow->range_states, position))
        if (append_unordered(shadow, state, mode, found))
            Py_CLEAR(found);
    const struct strided_list *overlapping_list =
        found ? strided_find_overlapping(&shadow->strided_states, lo, hi) : NULL;
    if (!overlapping_list)
        Py_CLEAR(found);
    struct range common_range;
    for (size_t i = 0; found && i < overlapping_list->count; i++)
        if (strided_shared_with_range(&overlapping_list->items[i]->range, (struct range){lo, hi}, &common_range) &&
            append_unordered(shadow, &overlapping_list->items[i]->state, mode, found))
            Py_CLEAR(found);
    return found;
}

int shadow_clear(struct shadow *shadow, uint64_t lo, uint64_t hi)
{
    struct state_run run;
    if (lo >= hi)
        return 0;
    if (divide_states(shadow, lo, hi, false, &run)) {
        clear_replacements(&shadow->replacements);
        return -1;
    }
    struct replacements *replacements = &shadow->replacements;
    size_t remaining_count = 0;
    for (size_t i = 0; i < replacements->state_count; i++) {
        if (replacements->states[i].lo < lo || replacements->states[i].lo >= hi)
            replacements->states[remaining_count++] = replacements->states[i];
        else
            state_clear(&replacements->states[i]);
    }
    replacements->state_count = remaining_count;
    if (run.count && replace_states(shadow, run))
        return -1;
    if (strided_clear(&shadow->strided_states, lo, hi))
        return -1;
    struct position begin = map_lower_bound(&shadow->pointer_states, lo), position = begin;
    struct state *pointer;
    size_t removed_count = 0;
    for (; (pointer = map_state(&shadow->pointer_states, position)) && pointer->lo < hi;
         position = map_next(&shadow->pointer_states, position), removed_count++)
        state_clear(pointer);
    return map_replace(&shadow->pointer_states, begin, removed_count, NULL, 0);
}

void shadow_release(struct shadow *shadow)
{
    map_release(&shadow->range_states);
    map_release(&shadow->pointer_states);
    strided_release(&shadow->strided_states);
    clock_release(&shadow->clock);
    PyMem_Free(shadow->unordered_accesses.accesses);
    clear_replacements(&shadow->replacements);
    PyMem_Free(shadow->replacements.states);
    shadow->unordered_accesses = (struct unordered_accesses){0};
    shadow->replacements = (struct replacements){0};
    Py_CLEAR(shadow->checker);
    Py_CLEAR(shadow->access_type);
}
