#include "model/stream_order.h"

#include <stdlib.h>
#include <string.h>

#include "containers.h"
#include "recorder.h"

/* Maximum number of streams with work that the host has not waited for. Work on further streams counts as unordered. */
#define MAX_STREAMS 128
#define SEVERAL_CONTEXTS UINT32_MAX
/* The reason of a gap. sanitize/detector.py has the same text. */
#define TOO_MANY_STREAMS "work on more than 128 streams at the same time"

typedef struct {
    /* Number of the last operation that happens before the clock, by slot; 0: none. */
    uint64_t last_operations[MAX_STREAMS + 1];
} vector_clock;

static int
    active_captures; /* number of streams that are being captured; read and written with atomic operations */

/* The clock of each stream, by slot. The clock of a stream includes the stream's last operation. */
static vector_clock stream_clocks[MAX_STREAMS + 1];
static struct {
    uint32_t stream, context;     /* ids of the stream and of its context */
    bool is_destroyed;            /* whether the stream is destroyed; its enqueued work may still run */
} slot_streams[MAX_STREAMS + 1];  /* stream of each slot */
static uint32_t slot_count;       /* number of slots that were ever in use; their numbers are 1 to slot_count */
static hash_table slot_by_stream; /* slot of each stream id that has one */
/* Id of the context of the work on streams without a slot, until the host has waited for this context; 0: there is
 * no such work; SEVERAL_CONTEXTS: several contexts have such work. */
static uint32_t untracked_context;
static bool has_reported_limit; /* whether a gap for streams without a slot was written */
static vector_clock host_clock; /* operations that happen before all later work of the host */
/* Operations that a synchronizing call of the host has waited for. Operations that are known to be complete only
 * because a host function ran after them are not included: while such a function runs, the device is not idle. */
static vector_clock waited_clock;
static uint32_t idle_count; /* number of times that the host had waited for all work, with new work in between */
static uint64_t operation_count,
    idle_operation_count; /* number of operations so far, and when the device was idle last */

static vector_clock
    *event_clocks; /* clocks of recorded events; ``free_clock_indices`` has the indices of the unused ones */
static uint32_t *free_clock_indices;
static size_t event_clock_count, event_clock_capacity, free_clock_count, free_clock_capacity;
static hash_table event_clock_indices; /* index in ``event_clocks`` plus 1, by event id */

/* Add to a clock the operations that happen before another clock. */
static void clock_join(vector_clock *clock, const vector_clock *other_clock)
{
    for (uint32_t slot = 1; slot <= slot_count; slot++)
        if (clock->last_operations[slot] < other_clock->last_operations[slot])
            clock->last_operations[slot] = other_clock->last_operations[slot];
}

/* Return whether calls of the host have waited for all work of a slot. */
static bool slot_is_complete(uint32_t slot)
{
    return waited_clock.last_operations[slot] == stream_clocks[slot].last_operations[slot];
}

/* Return whether the host's clock covers all operations that the clock of a slot covers. */
static bool slot_has_clock_of_host(uint32_t slot)
{
    bool is_equal = true;
    for (uint32_t i = 1; is_equal && i <= slot_count; i++)
        is_equal = stream_clocks[slot].last_operations[i] <= host_clock.last_operations[i];
    return is_equal;
}

/* Return a slot for a new stream, or 0 if there is none: the slot of a destroyed stream whose work is complete, else a
 * slot that was never in use, else the slot of another stream whose work is complete. The other stream gets a slot
 * again at its next work; it loses no order, because its clock is part of the clock of the host. */
static uint32_t find_unused_slot(void)
{
    for (uint32_t slot = 1; slot <= slot_count; slot++)
        if (slot_streams[slot].is_destroyed && slot_is_complete(slot))
            return slot;
    if (slot_count < MAX_STREAMS)
        return ++slot_count;
    for (uint32_t slot = 1; slot <= slot_count; slot++)
        if (slot_is_complete(slot) && slot_has_clock_of_host(slot)) {
            hash_table_remove(&slot_by_stream, slot_streams[slot].stream);
            return slot;
        }
    return 0;
}

/* Handle work of a stream for which no slot is left. */
static void count_untracked_work(uint32_t context)
{
    untracked_context = !untracked_context || untracked_context == context ? context : SEVERAL_CONTEXTS;
    if (templates_are_enabled() && !has_reported_limit)
        record_gap(TOO_MANY_STREAMS);
    has_reported_limit = true;
}

/* Return the slot of a stream; a new stream gets an unused slot. Return 0 if there are too many streams.
 *
 * The operations of a stream continue the numbers of the stream that had the slot before. All new work is ordered after
 * the operations of that stream, because the host has waited for them, so a clock with the number of a new operation
 * may include them. */
static uint32_t stream_slot(uint32_t stream, uint32_t context)
{
    uint32_t slot = stream ? hash_table_get(&slot_by_stream, stream) : 0;
    if (slot || !stream)
        return slot;
    slot = find_unused_slot();
    if (!slot || hash_table_put(&slot_by_stream, stream, slot)) {
        count_untracked_work(context);
        return 0;
    }
    const uint64_t last_operation = stream_clocks[slot].last_operations[slot];
    stream_clocks[slot] = (vector_clock){0};
    stream_clocks[slot].last_operations[slot] = last_operation;
    slot_streams[slot].stream = stream;
    slot_streams[slot].context = context;
    slot_streams[slot].is_destroyed = false;
    return slot;
}

void order_stream_destroyed(uint32_t stream)
{
    const uint32_t slot = stream ? hash_table_remove(&slot_by_stream, stream) : 0;
    if (slot)
        slot_streams[slot].is_destroyed = true;
}

void order_context_destroyed(uint32_t context)
{
    order_host_waited_for_context(context);
    for (uint32_t slot = 1; slot <= slot_count; slot++)
        if (slot_streams[slot].context == context && !slot_streams[slot].is_destroyed)
            order_stream_destroyed(slot_streams[slot].stream);
}

stream_operation order_enqueue(uint32_t stream, uint32_t context)
{
    stream_operation operation = {stream_slot(stream, context), 0};
    if (!operation.slot)
        return operation;
    vector_clock *clock = stream_clocks + operation.slot;
    clock_join(clock, &host_clock);
    operation.number = ++clock->last_operations[operation.slot];
    operation_count++;
    return operation;
}

bool order_happens_before(stream_operation earlier, stream_operation later)
{
    return earlier.slot && later.slot && earlier.number <= stream_clocks[later.slot].last_operations[earlier.slot];
}

bool order_happens_before_next(stream_operation earlier, uint32_t stream)
{
    const uint32_t slot = stream ? hash_table_get(&slot_by_stream, stream) : 0;
    return earlier.slot && (earlier.number <= host_clock.last_operations[earlier.slot] ||
                            (slot && earlier.number <= stream_clocks[slot].last_operations[earlier.slot]));
}

/* --- events ---------------------------------------------------------------------------------------- */

/* Return the clock of an event, or NULL if it was not recorded. */
static vector_clock *event_clock(uint32_t event)
{
    uint32_t index_plus_one = event ? hash_table_get(&event_clock_indices, event) : 0;
    return index_plus_one ? event_clocks + index_plus_one - 1 : NULL;
}

/* Return a clock for an event that has none. Return NULL if no memory is left. */
static vector_clock *new_event_clock(uint32_t event)
{
    uint32_t index = free_clock_count ? free_clock_indices[free_clock_count - 1] : (uint32_t)event_clock_count;
    if (!free_clock_count) {
        vector_clock *new_clocks =
            array_reserve(event_clocks, &event_clock_capacity, event_clock_count + 1, sizeof *event_clocks, 64);
        if (!new_clocks)
            return NULL;
        event_clocks = new_clocks;
    }
    if (!event || hash_table_put(&event_clock_indices, event, index + 1))
        return NULL;
    if (free_clock_count)
        free_clock_count--;
    else
        event_clock_count++;
    return event_clocks + index;
}

void order_event_destroyed(uint32_t event)
{
    uint32_t index_plus_one = event ? hash_table_remove(&event_clock_indices, event) : 0;
    uint32_t *new_indices = index_plus_one ? array_reserve(free_clock_indices, &free_clock_capacity,
                                                           free_clock_count + 1, sizeof *free_clock_indices, 64)
                                           : NULL;
    if (!new_indices)
        return;
    free_clock_indices = new_indices;
    free_clock_indices[free_clock_count++] = index_plus_one - 1;
}

void order_event_recorded(uint32_t event, uint32_t stream, uint32_t context)
{
    uint32_t slot = stream_slot(stream, context);
    if (!slot || order_is_capturing()) {
        order_event_destroyed(event); /* this record replaces the earlier record of the event */
        return;
    }
    clock_join(stream_clocks + slot, &host_clock);
    vector_clock *clock = event_clock(event);
    if (!clock)
        clock = new_event_clock(event);
    if (clock)
        *clock = stream_clocks[slot];
}

void order_stream_waits(uint32_t stream, uint32_t context, uint32_t event)
{
    uint32_t slot = stream_slot(stream, context);
    const vector_clock *clock = event_clock(event);
    if (slot && clock && !order_is_capturing())
        clock_join(stream_clocks + slot, clock);
}

/* --- waits of the host ------------------------------------------------------------------------------- */

bool order_host_waited_for_all_work(void)
{
    bool is_all_complete = !untracked_context;
    for (uint32_t slot = 1; is_all_complete && slot <= slot_count; slot++)
        is_all_complete = slot_is_complete(slot);
    return is_all_complete;
}

uint32_t order_idle_count(void)
{
    return idle_count;
}

static void add_wait(const vector_clock *clock)
{
    clock_join(&host_clock, clock);
    clock_join(&waited_clock, clock);
}

/* Increment idle_count if the host has waited for all work, and work was added since the last increment. */
static void count_idle_moment(void)
{
    if (operation_count == idle_operation_count || !order_host_waited_for_all_work())
        return;
    idle_operation_count = operation_count;
    idle_count++;
}

void order_host_waited_for_event(uint32_t event)
{
    const vector_clock *clock = event_clock(event);
    if (clock)
        add_wait(clock);
    count_idle_moment();
}

void order_host_waited_for_stream(uint32_t stream)
{
    const uint32_t slot =
        hash_table_get(&slot_by_stream, stream); /* a stream without a slot has no tracked work */
    if (slot)
        add_wait(stream_clocks + slot);
    count_idle_moment();
}

void order_host_waited_for_context(uint32_t context)
{
    for (uint32_t slot = 1; slot <= slot_count; slot++)
        if (slot_streams[slot].context == context)
            add_wait(stream_clocks + slot);
    if (untracked_context == context)
        untracked_context = 0;
    count_idle_moment();
}

struct order_point {
    vector_clock clock;
};

order_point *order_point_of_stream(uint32_t stream, uint32_t context)
{
    const uint32_t slot = stream_slot(stream, context);
    order_point *point = slot ? malloc(sizeof *point) : NULL;
    if (point)
        point->clock = stream_clocks[slot];
    return point;
}

void order_host_reached(order_point *point)
{
    if (point)
        clock_join(&host_clock, &point->clock);
    free(point);
}

bool order_host_waited_for(stream_operation operation)
{
    return operation.slot && operation.number <= host_clock.last_operations[operation.slot];
}

bool order_host_waited_for_other_contexts(uint32_t context)
{
    bool is_all_complete = !untracked_context || untracked_context == context;
    for (uint32_t slot = 1; is_all_complete && slot <= slot_count; slot++)
        is_all_complete = slot_streams[slot].context == context || slot_is_complete(slot);
    return is_all_complete;
}

/* --- captures ------------------------------------------------------------------------------------ */

void order_count_captures(int change)
{
    __atomic_add_fetch(&active_captures, change, __ATOMIC_RELAXED);
}

bool order_is_capturing(void)
{
    return __atomic_load_n(&active_captures, __ATOMIC_RELAXED) > 0;
}

void stream_order_clear(void)
{
    __atomic_store_n(&active_captures, 0, __ATOMIC_RELAXED);
    memset(stream_clocks, 0, sizeof stream_clocks);
    memset(&host_clock, 0, sizeof host_clock);
    memset(&waited_clock, 0, sizeof waited_clock);
    hash_table_clear(&slot_by_stream);
    hash_table_clear(&event_clock_indices);
    slot_count = untracked_context = 0;
    has_reported_limit = false;
    event_clock_count = free_clock_count = 0;
}
