#include "shadow.h"

#include <string.h>

/* The same value as in shadow_memory.py: up to this number of rows, each row is stored as a range. */
enum { MAX_SEPARATE_ROWS = 16 };

/* ---- conflicts -------------------------------------------------------------------------------------------- */

/* Return the MemoryAccess objects of the accesses in shadow->unordered as a list, or NULL with an exception. */
static PyObject *unordered_objects(const struct shadow *shadow)
{
    PyObject *objects = PyList_New((Py_ssize_t)shadow->unordered.count);
    for (size_t i = 0; objects && i < shadow->unordered.count; i++) {
        PyObject *object = access_object(shadow->unordered.items[i], shadow->access_type);
        if (!object)
            Py_CLEAR(objects);
        else
            PyList_SET_ITEM(objects, (Py_ssize_t)i, Py_NewRef(object));
    }
    return objects;
}

/* Pass the accesses in shadow->unordered, which belong to a state, to ConflictChecker.check. */
static int check_unordered(struct shadow *shadow, struct state *state, struct access *access,
                           struct range shared_range, bool certainly_overlap, bool approximate)
{
    if (!shadow->unordered.count)
        return 0;
    shadow->has_check = true;
    PyObject *previous_accesses = unordered_objects(shadow),
             *current_access = access_object(access, shadow->access_type);
    PyObject *reported_pairs = state->already_reported ? Py_NewRef(state->already_reported) : PyTuple_New(0);
    PyObject *new_pairs = NULL;
    if (previous_accesses && current_access && reported_pairs)
        new_pairs = PyObject_CallMethod(shadow->checker, "check", "OOOO(KK)OO", reported_pairs, previous_accesses,
                                        current_access, shadow->clock.list, (unsigned long long)shared_range.lo,
                                        (unsigned long long)shared_range.hi,
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
    Py_XSETREF(state->already_reported, new_pairs);
    return 0;
}

/* Check an access against the state of a range. */
static int check_range(struct shadow *shadow, struct state *state, struct access *access,
                       struct range shared_range, bool certainly_overlap)
{
    if (state_find_unordered(state, access->mode, &shadow->clock, &shadow->unordered))
        return -1;
    return check_unordered(shadow, state, access, shared_range, certainly_overlap, state->merged);
}

/* Check an access against the state of a pointer. */
static int check_pointer(struct shadow *shadow, struct state *pointer, struct access *access,
                         struct range shared_range)
{
    if (pointer_find_unordered(pointer, access->mode, &shadow->clock, &shadow->unordered))
        return -1;
    return check_unordered(shadow, pointer, access, shared_range, true, false);
}

/* ---- ranges: divide states, check and store accesses, merge states ----------------------------------------------------- */

/* Append an uninitialized state to the replacements, and return the state. Return NULL with an exception if memory
 * runs out. */
static struct state *add_piece(struct pieces *pieces)
{
    if (pieces->count == pieces->capacity) {
        size_t capacity = pieces->capacity ? 2 * pieces->capacity : 64;
        struct state *new_items = PyMem_Realloc(pieces->items, capacity * sizeof *new_items);
        if (!new_items) {
            PyErr_NoMemory();
            return NULL;
        }
        pieces->items = new_items;
        pieces->capacity = capacity;
    }
    return &pieces->items[pieces->count++];
}

/* Append a copy of a state for other bytes to the replacements. */
static int add_copied_piece(struct pieces *pieces, const struct state *state, uint64_t lo, uint64_t hi)
{
    struct state *piece = add_piece(pieces);
    if (!piece)
        return -1;
    if (state_copy(piece, state, lo, hi)) {
        pieces->count--;
        return -1;
    }
    return 0;
}

/* Move the content of a state to a new replacement for other bytes. The state stays in the map, without any access. */
static int add_moved_piece(struct pieces *pieces, struct state *state, uint64_t lo, uint64_t hi)
{
    struct state *piece = add_piece(pieces);
    if (!piece)
        return -1;
    *piece = *state;
    piece->lo = lo;
    piece->hi = hi;
    *state = (struct state){.lo = state->lo, .hi = state->hi};
    return 0;
}

/* Append an empty state for the bytes from lo up to hi, which have no state yet. Do nothing if lo equals hi. */
static int add_gap_piece(struct pieces *pieces, uint64_t lo, uint64_t hi)
{
    struct state *piece = lo < hi ? add_piece(pieces) : NULL;
    if (piece)
        *piece = (struct state){.lo = lo, .hi = hi};
    return lo < hi && !piece ? -1 : 0;
}

static void clear_pieces(struct pieces *pieces)
{
    while (pieces->count)
        state_clear(&pieces->items[--pieces->count]);
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
    struct state_map *map = &shadow->ranges;
    struct pieces *pieces = &shadow->pieces;
    *run = (struct state_run){map_first_ending_above(map, lo), 0};
    struct position position = run->begin;
    struct state *state;
    uint64_t covered_end = lo;
    for (; (state = map_state(map, position)) && state->lo < hi; position = map_next(map, position)) {
        size_t first_piece = pieces->count;
        uint64_t begin = Py_MAX(state->lo, lo), end = Py_MIN(state->hi, hi);
        if ((fills_gaps && add_gap_piece(pieces, covered_end, begin)) ||
            (state->lo < lo && add_copied_piece(pieces, state, state->lo, lo)) ||
            (hi < state->hi && add_copied_piece(pieces, state, begin, end)) ||
            add_moved_piece(pieces, state, end < state->hi ? hi : begin, state->hi))
            return -1;
        if (state->lo < lo || hi < state->hi)
            for (size_t i = first_piece; i < pieces->count; i++)
                pieces->items[i].approximate |= pieces->items[i].merged;
        covered_end = end;
        run->count++;
    }
    return fills_gaps ? add_gap_piece(pieces, covered_end, hi) : 0;
}

/* Replace states of the map by the replacements, which the map then owns. */
static int replace_by_pieces(struct shadow *shadow, struct state_run run)
{
    struct position position = run.begin;
    for (size_t i = 0; i < run.count; i++, position = map_next(&shadow->ranges, position))
        state_clear(map_state(&shadow->ranges, position));
    struct pieces *pieces = &shadow->pieces;
    size_t count = pieces->count;
    pieces->count = 0;
    return map_replace(&shadow->ranges, run.begin, run.count, pieces->items, count);
}

/* Merge adjacent equivalent replacements. */
static void merge_pieces(struct pieces *pieces)
{
    size_t last_index = 0;
    for (size_t i = 1; i < pieces->count; i++) {
        struct state *piece = &pieces->items[i], *merged_piece = &pieces->items[last_index];
        if (merged_piece->hi == piece->lo && states_are_equivalent(merged_piece, piece)) {
            merged_piece->hi = piece->hi;
            state_clear(piece);
        } else if (++last_index != i)
            pieces->items[last_index] = *piece;
    }
    pieces->count = pieces->count ? last_index + 1 : 0;
}

/* Merge the replacements with adjacent equivalent states of the map, which become part of `run`. */
static void merge_with_adjacent(struct shadow *shadow, const struct access *access, struct state_run *run)
{
    struct state_map *map = &shadow->ranges;
    struct pieces *pieces = &shadow->pieces;
    struct position end = run->begin;
    for (size_t i = 0; i < run->count; i++)
        end = map_next(map, end);
    const struct state *next_state = map_state(map, end);
    struct state *last_piece = &pieces->items[pieces->count - 1], *first_piece = &pieces->items[0];
    if (next_state && next_state->lo == access->hi && last_piece->hi == access->hi &&
        states_are_equivalent(last_piece, next_state)) {
        last_piece->hi = next_state->hi;
        run->count++;
    }
    if (is_map_begin(run->begin) || first_piece->lo < access->lo)
        return;
    struct position previous_position = map_previous(map, run->begin);
    const struct state *previous_state = map_state(map, previous_position);
    if (previous_state->hi == first_piece->lo && states_are_equivalent(previous_state, first_piece)) {
        /* The earlier state stays, as in RangeStates.merge, because reports show the range of its access. */
        struct state merged_state;
        if (state_copy(&merged_state, previous_state, previous_state->lo, first_piece->hi)) {
            PyErr_Clear(); /* the two states stay separate, which is correct, too */
            return;
        }
        state_clear(first_piece);
        *first_piece = merged_state;
        run->begin = previous_position;
        run->count++;
    }
}

/* Check and store an access to a range whose states are among the replacements. */
static int add_to_pieces(struct shadow *shadow, struct access *access)
{
    struct pieces *pieces = &shadow->pieces;
    for (size_t i = 0; i < pieces->count; i++) {
        struct state *piece = &pieces->items[i];
        if (piece->lo < access->lo || access->hi < piece->hi)
            continue; /* the part of a divided state that the access does not touch */
        struct range shared_range = {piece->lo, piece->hi};
        if (check_range(shadow, piece, access, shared_range, !piece->approximate) ||
            state_store(piece, access, &shadow->clock))
            return -1;
    }
    return 0;
}

/* Return whether the states before and after a state differ from it, so that nothing can be merged. */
static bool is_separate(struct state_map *map, struct position position)
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
    struct position position = map_lower_bound(&shadow->ranges, access->lo);
    struct state *state = map_state(&shadow->ranges, position);
    if (!state || state->lo != access->lo || state->hi != access->hi)
        return 0;
    if (state_find_unordered(state, access->mode, &shadow->clock, &shadow->unordered))
        return -1;
    if (shadow->unordered.count)
        return 0;
    if (state_store(state, access, &shadow->clock))
        return -1;
    if (is_separate(&shadow->ranges, position))
        return 1;
    struct state_run run = {position, 1};
    if (add_copied_piece(&shadow->pieces, state, state->lo, state->hi))
        return -1;
    merge_with_adjacent(shadow, access, &run);
    return replace_by_pieces(shadow, run) ? -1 : 1;
}

static int add_to_ranges(struct shadow *shadow, struct access *access)
{
    int is_stored = add_to_equal_range(shadow, access);
    if (is_stored)
        return is_stored < 0 ? -1 : 0;
    struct state_run run;
    if (divide_states(shadow, access->lo, access->hi, true, &run) || add_to_pieces(shadow, access)) {
        clear_pieces(&shadow->pieces);
        return -1;
    }
    merge_pieces(&shadow->pieces);
    merge_with_adjacent(shadow, access, &run);
    return replace_by_pieces(shadow, run);
}

/* ---- strided ranges and pointers --------------------------------------------------------------------------- */

/* Check an access to a range, or to the address of a pointer, against all strided ranges. */
static int check_strided(struct shadow *shadow, struct access *access, struct range range, bool certainly_overlap)
{
    struct strided_states *strided_states = &shadow->strided;
    if (range.hi <= strided_states->bounds.lo || strided_states->bounds.hi <= range.lo)
        return 0;
    for (size_t i = 0; i < strided_states->count; i++) {
        struct range shared_range;
        if (strided_states->ranges[i].lo < range.hi && range.lo < strided_states->ranges[i].hi &&
            strided_shared_with_range(&strided_states->ranges[i], range, &shared_range) &&
            check_range(shadow, &strided_states->states[i], access, shared_range, certainly_overlap))
            return -1;
    }
    return 0;
}

/* Check an access to a range against the pointers from which a kernel may reach the range. */
static int check_pointers_below(struct shadow *shadow, struct access *access)
{
    struct position position = {0, 0};
    struct state *pointer;
    for (; (pointer = map_state(&shadow->pointers, position)) && pointer->lo < access->lo;
         position = map_next(&shadow->pointers, position)) {
        struct unordered_accesses *unordered = &shadow->unordered;
        if (pointer_find_unordered(pointer, access->mode, &shadow->clock, unordered))
            return -1;
        size_t reaching_count = 0;
        for (size_t i = 0; i < unordered->count; i++)
            if (unordered->items[i]->hi > access->lo)
                unordered->items[reaching_count++] = unordered->items[i];
        unordered->count = reaching_count;
        struct range shared_range = {access->lo, access->hi};
        if (check_unordered(shadow, pointer, access, shared_range, false, false))
            return -1;
    }
    return 0;
}

/* Check an access to a range against the pointers to its bytes. A write replaces the states of these pointers. */
static int check_pointers(struct shadow *shadow, struct access *access)
{
    if (!shadow->pointers.state_count)
        return 0;
    struct position position = map_lower_bound(&shadow->pointers, access->lo);
    struct state *pointer;
    for (; (pointer = map_state(&shadow->pointers, position)) && pointer->lo < access->hi;
         position = map_next(&shadow->pointers, position)) {
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
    if (access->mode & MODE_WRITE)
        strided_clear(&shadow->strided, access->lo, access->hi);
    return check_pointers(shadow, access);
}

/* Add each row of a strided access as a range. */
static int add_rows(struct shadow *shadow, struct access *access, const struct strided_range *strided)
{
    for (uint64_t i = 0; i < strided->count; i++) {
        uint64_t lo = strided->lo + i * strided->stride;
        struct access *row = access_new(access->operation, access->slot, access->tick, lo, lo + strided->width,
                                        access->mode, access->precision);
        int result = row ? add_range(shadow, row) : -1;
        access_release(row);
        if (result)
            return -1;
    }
    return 0;
}

/* Check a strided access against the ranges of contiguous accesses. */
static int check_strided_with_ranges(struct shadow *shadow, struct access *access,
                                     const struct strided_range *strided)
{
    struct position position = map_first_ending_above(&shadow->ranges, strided->lo);
    struct state *state;
    for (; (state = map_state(&shadow->ranges, position)) && state->lo < strided->hi;
         position = map_next(&shadow->ranges, position)) {
        struct range shared_range;
        if (!strided_shared_with_range(strided, (struct range){state->lo, state->hi}, &shared_range))
            continue;
        if (state_find_unordered(state, access->mode, &shadow->clock, &shadow->unordered))
            return -1;
        bool certainly_overlap = !state->merged;
        for (size_t i = 0; i < shadow->unordered.count; i++)
            certainly_overlap &= shadow->unordered.items[i]->precision != PRECISION_MERGED;
        if (check_unordered(shadow, state, access, shared_range, certainly_overlap, state->merged))
            return -1;
    }
    return 0;
}

static int add_strided(struct shadow *shadow, struct access *access, const struct strided_range *strided)
{
    if (strided->count <= MAX_SEPARATE_ROWS)
        return add_rows(shadow, access, strided);
    if (check_strided_with_ranges(shadow, access, strided))
        return -1;
    struct range shared_range;
    for (size_t i = 0; i < shadow->strided.count; i++) {
        const struct strided_range *stored_range = &shadow->strided.ranges[i];
        bool is_equal = stored_range->lo == strided->lo && stored_range->width == strided->width &&
                        stored_range->stride == strided->stride && stored_range->count == strided->count;
        if (!is_equal && strided_shared_with(strided, stored_range, &shared_range) &&
            check_range(shadow, &shadow->strided.states[i], access, shared_range, true))
            return -1;
    }
    struct position position = map_lower_bound(&shadow->pointers, strided->lo);
    struct state *pointer;
    for (; (pointer = map_state(&shadow->pointers, position)) && pointer->lo < strided->hi;
         position = map_next(&shadow->pointers, position))
        if (strided_shared_with_range(strided, (struct range){pointer->lo, pointer->lo + 1}, &shared_range) &&
            check_pointer(shadow, pointer, access, shared_range))
            return -1;
    struct state *equal_state = strided_get_or_create(&shadow->strided, strided);
    if (check_range(shadow, equal_state, access, (struct range){strided->lo, strided->hi}, true))
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
    struct state_map *map = &shadow->pointers;
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
    struct state_map *map = &shadow->pointers;
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
    struct position position = map_lower_bound(&shadow->ranges, access->lo + 1);
    struct state *state;
    for (; (state = map_state(&shadow->ranges, position)) && state->lo < access->hi;
         position = map_next(&shadow->ranges, position))
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
    struct state *state = map_last_at_or_below(&shadow->ranges, lo);
    if (state && state->hi > lo &&
        check_range(shadow, state, access, (struct range){lo, Py_MIN(state->hi, access->hi)}, !state->merged))
        return -1;
    if (check_strided(shadow, access, (struct range){lo, lo + 1}, true))
        return -1;
    return shadow->finds_possible ? check_ranges_above(shadow, access) : 0;
}

/* ---- the calls of Python ----------------------------------------------------------------------------------- */

static int add_access(struct shadow *shadow, struct access *access, int64_t stride, uint64_t count)
{
    struct strided_range strided;
    if (access->precision == PRECISION_UNCERTAIN && !shadow->finds_possible)
        return 0;
    if (access->precision >= PRECISION_ASSUMED)
        return add_pointer(shadow, access);
    if (access->lo >= access->hi)
        return 0;
    if (count > 1 && strided_from_access(&strided, access->lo, access->hi, stride, count))
        return add_strided(shadow, access, &strided);
    return add_range(shadow, access);
}

int shadow_add(struct shadow *shadow, struct access *access, int64_t stride, uint64_t count)
{
    shadow->has_check = false;
    if (add_access(shadow, access, stride, count))
        return -1;
    if (shadow->has_check) {
        PyObject *result = PyObject_CallMethod(shadow->checker, "report", NULL);
        if (!result)
            return -1;
        Py_DECREF(result);
    }
    return 0;
}

int shadow_clear(struct shadow *shadow, uint64_t lo, uint64_t hi)
{
    struct state_run run;
    if (lo >= hi)
        return 0;
    if (divide_states(shadow, lo, hi, false, &run)) {
        clear_pieces(&shadow->pieces);
        return -1;
    }
    struct pieces *pieces = &shadow->pieces;
    size_t remaining = 0;
    for (size_t i = 0; i < pieces->count; i++) {
        if (pieces->items[i].lo < lo || pieces->items[i].lo >= hi)
            pieces->items[remaining++] = pieces->items[i];
        else
            state_clear(&pieces->items[i]);
    }
    pieces->count = remaining;
    if (run.count && replace_by_pieces(shadow, run))
        return -1;
    strided_clear(&shadow->strided, lo, hi);
    struct position begin = map_lower_bound(&shadow->pointers, lo), position = begin;
    struct state *pointer;
    size_t removed = 0;
    for (; (pointer = map_state(&shadow->pointers, position)) && pointer->lo < hi;
         position = map_next(&shadow->pointers, position), removed++)
        state_clear(pointer);
    return map_replace(&shadow->pointers, begin, removed, NULL, 0);
}

void shadow_release(struct shadow *shadow)
{
    map_release(&shadow->ranges);
    map_release(&shadow->pointers);
    while (shadow->strided.count)
        state_clear(&shadow->strided.states[--shadow->strided.count]);
    clock_release(&shadow->clock);
    PyMem_Free(shadow->unordered.items);
    clear_pieces(&shadow->pieces);
    PyMem_Free(shadow->pieces.items);
    shadow->unordered = (struct unordered_accesses){0};
    shadow->pieces = (struct pieces){0};
    Py_CLEAR(shadow->checker);
    Py_CLEAR(shadow->access_type);
}
