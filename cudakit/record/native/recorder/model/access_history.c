#include "model/access_history.h"

#include <stdlib.h>
#include <string.h>

#include "containers.h"

/* Maximum number of accesses to one interval. With more, such as reads of many streams, the interval is contested:
 * see access_history.h. */
#define MAX_INTERVAL_ACCESSES 8
/* Number of accesses for which bytes stay contested after an unordered access. This is enough to record the
 * launches that race, and to report them exactly. */
#define CONTESTED_ACCESSES 64
/* A history without conflicts is removed after the host has waited for all work this number of times, if all
 * accesses meanwhile were ordered. */
#define IDLE_COUNT_TO_REMOVE 64
#define ALWAYS_CONTESTED 255 /* some accesses to the bytes are not stored */
/* Accesses that the host has waited for are removed when a history has this number of intervals, and again when
 * the number of intervals has doubled since the last removal. */
#define MIN_INTERVALS_TO_CLEAN 64
/* Maximum number of intervals of all histories; beyond it, all bytes of an allocation that needs a new interval
 * become contested. */
#define MAX_INTERVALS (1u << 18)

/* The bytes from ``begin`` up to the begin of the next interval. */
typedef struct {
    uint64_t begin;
    uint8_t access_count;
    uint8_t contested_count; /* number of accesses for which the bytes stay contested, or ALWAYS_CONTESTED */
    byte_access accesses[MAX_INTERVAL_ACCESSES];
} byte_interval;

struct access_history {
    byte_interval *intervals; /* sorted by address; the last one begins at the end of the allocation */
    size_t interval_count, interval_capacity;
    size_t clean_count; /* number of intervals at which completed accesses are removed */
    bool is_contested;  /* whether all bytes are contested */
    bool has_conflicts; /* whether bytes were contested at any time */
    /* Values of order_idle_count() at the last access, and at the last access that was unordered with an earlier one */
    uint32_t last_idle_count, last_unordered_idle_count;
};

static size_t total_interval_count; /* number of intervals of all histories */

/* --- intervals ------------------------------------------------------------------------------------- */

access_history *history_create(uint64_t lo, uint64_t hi, byte_access last_access)
{
    access_history *history = calloc(1, sizeof *history);
    if (!history)
        return NULL;
    history->intervals =
        array_reserve(NULL, &history->interval_capacity, 2, sizeof *history->intervals, MIN_INTERVALS_TO_CLEAN);
    if (!history->intervals) {
        free(history);
        return NULL;
    }
    history->intervals[0] = (byte_interval){.begin = lo, .access_count = 1, .accesses = {last_access}};
    history->intervals[1] = (byte_interval){.begin = hi};
    history->interval_count = 2;
    history->clean_count = MIN_INTERVALS_TO_CLEAN;
    history->last_idle_count = history->last_unordered_idle_count = order_idle_count();
    total_interval_count += 2;
    return history;
}

void history_free(access_history *history)
{
    if (!history)
        return;
    total_interval_count -= history->interval_count;
    free(history->intervals);
    free(history);
}

/* Return the index of the last interval that begins at or below an address, which is inside the allocation. */
static size_t interval_at(const access_history *history, uint64_t address)
{
    size_t low = 0, high = history->interval_count - 1;
    while (high - low > 1) {
        const size_t middle = (low + high) / 2;
        if (history->intervals[middle].begin <= address)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Make an interval begin at an address inside the allocation, and return the index of the interval. If no memory
 * is left, mark all bytes of the allocation as contested: see access_history.h. */
static size_t divide_at(access_history *history, uint64_t address)
{
    const size_t index = interval_at(history, address);
    if (history->intervals[index].begin == address)
        return index;
    byte_interval *new_intervals =
        total_interval_count < MAX_INTERVALS
            ? array_reserve(history->intervals, &history->interval_capacity, history->interval_count + 1,
                            sizeof *new_intervals, MIN_INTERVALS_TO_CLEAN)
            : NULL;
    if (!new_intervals) {
        history->is_contested = true;
        return index;
    }
    history->intervals = new_intervals;
    memmove(new_intervals + index + 2, new_intervals + index + 1,
            (history->interval_count - index - 1) * sizeof *new_intervals);
    new_intervals[index + 1] = new_intervals[index];
    new_intervals[index + 1].begin = address;
    history->interval_count++;
    total_interval_count++;
    return index + 1;
}

/* Return the part of a range inside the allocation; it is empty if ``lo`` is not below ``hi``. */
static void clip(const access_history *history, uint64_t *lo, uint64_t *hi)
{
    const uint64_t begin = history->intervals[0].begin,
                   end = history->intervals[history->interval_count - 1].begin;
    *lo = *lo > begin ? *lo : begin;
    *hi = *hi < end ? *hi : end;
}

/* --- completed accesses ------------------------------------------------------------------------------ */

static void remove_completed_accesses(byte_interval *interval)
{
    uint8_t kept_count = 0;
    for (uint8_t i = 0; i < interval->access_count; i++)
        if (!order_host_waited_for(interval->accesses[i].operation))
            interval->accesses[kept_count++] = interval->accesses[i];
    interval->access_count = kept_count;
}

static bool is_same_access(const byte_access *left, const byte_access *right)
{
    return left->operation.slot == right->operation.slot && left->operation.number == right->operation.number &&
           left->is_write == right->is_write && left->is_assumed == right->is_assumed;
}

static bool has_same_accesses(const byte_interval *left, const byte_interval *right)
{
    bool are_same = left->access_count == right->access_count && !left->contested_count == !right->contested_count;
    for (uint8_t i = 0; are_same && i < left->access_count; i++)
        are_same = is_same_access(left->accesses + i, right->accesses + i);
    return are_same;
}

/* Remove the accesses that the host has waited for, and join adjacent intervals with the same accesses. */
static void clean(access_history *history)
{
    size_t kept_count = 0;
    for (size_t i = 0; i < history->interval_count; i++) {
        byte_interval *interval = history->intervals + i;
        const bool is_end = i == history->interval_count - 1;
        remove_completed_accesses(interval);
        byte_interval *last = kept_count ? history->intervals + kept_count - 1 : NULL;
        if (last && !is_end && has_same_accesses(last, interval)) {
            if (last->contested_count < interval->contested_count)
                last->contested_count = interval->contested_count;
            continue;
        }
        history->intervals[kept_count++] = *interval;
    }
    total_interval_count -= history->interval_count - kept_count;
    history->interval_count = kept_count;
    history->clean_count = 2 * kept_count > MIN_INTERVALS_TO_CLEAN ? 2 * kept_count : MIN_INTERVALS_TO_CLEAN;
}

/* --- accesses -------------------------------------------------------------------------------------- */

static bool are_in_conflict(const byte_access *earlier, const byte_access *later)
{
    return (earlier->is_write || later->is_write) && !order_happens_before(earlier->operation, later->operation);
}

bool history_is_ordered(const access_history *history, uint64_t lo, uint64_t hi, byte_access access)
{
    bool is_ordered = !history->is_contested;
    clip(history, &lo, &hi);
    if (lo >= hi)
        return is_ordered;
    for (size_t i = interval_at(history, lo); is_ordered && history->intervals[i].begin < hi; i++) {
        const byte_interval *interval = history->intervals + i;
        is_ordered = !interval->contested_count;
        for (uint8_t j = 0; is_ordered && j < interval->access_count; j++)
            is_ordered = !are_in_conflict(interval->accesses + j, &access);
    }
    return is_ordered;
}

bool history_has_contested_bytes(const access_history *history, uint64_t lo, uint64_t hi)
{
    bool is_contested = history->is_contested;
    clip(history, &lo, &hi);
    if (lo >= hi)
        return is_contested;
    for (size_t i = interval_at(history, lo); !is_contested && history->intervals[i].begin < hi; i++)
        is_contested = history->intervals[i].contested_count;
    return is_contested;
}

static void add_to_interval(access_history *history, byte_interval *interval, byte_access access)
{
    uint8_t kept_count = 0;
    if (interval->contested_count && interval->contested_count != ALWAYS_CONTESTED)
        interval->contested_count--;
    if (interval->access_count == MAX_INTERVAL_ACCESSES)
        remove_completed_accesses(interval);
    for (uint8_t i = 0; i < interval->access_count; i++) {
        const byte_access earlier = interval->accesses[i];
        const bool is_covered =
            order_happens_before(earlier.operation, access.operation) && (access.is_write || !earlier.is_write);
        if (are_in_conflict(&earlier, &access) && !earlier.is_assumed && !access.is_assumed &&
            interval->contested_count < CONTESTED_ACCESSES)
            interval->contested_count = CONTESTED_ACCESSES;
        if (!order_happens_before(earlier.operation, access.operation))
            history->last_unordered_idle_count = order_idle_count();
        if (!is_covered)
            interval->accesses[kept_count++] = earlier;
    }
    if (kept_count == MAX_INTERVAL_ACCESSES)
        interval->contested_count = ALWAYS_CONTESTED;
    else
        interval->accesses[kept_count++] = access;
    interval->access_count = kept_count;
    history->has_conflicts = history->has_conflicts || interval->contested_count;
}

void history_note_unordered(access_history *history)
{
    history->last_unordered_idle_count = order_idle_count();
}

bool history_is_obsolete(const access_history *history)
{
    return !history->is_contested && !history->has_conflicts && history->last_idle_count != order_idle_count() &&
           order_idle_count() - history->last_unordered_idle_count >= IDLE_COUNT_TO_REMOVE;
}

void history_add(access_history *history, uint64_t lo, uint64_t hi, byte_access access)
{
    clip(history, &lo, &hi);
    if (lo >= hi)
        return;
    if (history->interval_count >= history->clean_count)
        clean(history);
    history->last_idle_count = order_idle_count();
    const uint64_t end = history->intervals[history->interval_count - 1].begin;
    const size_t first = divide_at(history, lo);
    if (hi < end)
        divide_at(history, hi);
    for (size_t i = first; history->intervals[i].begin < hi; i++)
        add_to_interval(history, history->intervals + i, access);
}
