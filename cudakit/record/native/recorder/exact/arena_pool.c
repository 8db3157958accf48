#include "exact/arena_pool.h"

#include <stdlib.h>
#include <string.h>

#include "exact/emit_accesses.h"
#include "exact/reader_lock.h"
#include "exact/space_estimates.h"
#include "exact/templates.h"
#include "model/allocations.h"
#include "model/ids.h"
#include "model/stream_order.h"
#include "recorder.h"
#include "vendor/driver_api.h"

#define MAX_POOLS 32
#define READ_INTERVAL_NS 100000000
/* A program that did not wait for this time is treated as one that never waits. */
#define INTERVAL_WITHOUT_WAIT_NS 1000000000
/* Minimum number of launches in an arena before it is replaced, and in the current arena before the replaced one is
 * read. With fewer, a device that lags behind the host would run out of queued launches during the read. With more,
 * the bitmaps of two arenas no longer fit into the L2 cache. */
#define MIN_LAUNCHES_PER_READ 256
/* Maximum delay of a launch while no arena has space. After this delay the launch loses accesses, which is reported
 * as a gap. */
#define LAUNCH_WAIT_LIMIT_NS 500000000
#define FINISH_WAIT_LIMIT_NS 5000000000

static arena_pool *pools[MAX_POOLS];
static size_t pool_count;

arena_pool *pool_find(CUcontext context)
{
    for (size_t i = 0; i < pool_count; i++)
        if (pools[i]->context == context)
            return pools[i];
    return NULL;
}

uint32_t pool_count_entering_launches(void)
{
    uint32_t entering_count = 0;
    for (size_t i = 0; i < pool_count; i++)
        for (size_t j = 0; j < ARENAS; j++)
            entering_count += pools[i]->arenas[j].entering_launch_count;
    return entering_count;
}

bool pool_is_recorder_stream(Sanitizer_StreamHandle stream)
{
    for (size_t i = 0; i < pool_count; i++)
        if (stream && pools[i]->stream == stream)
            return true;
    return false;
}

static void reset_arena(launch_arena *arena)
{
    pthread_mutex_lock(&recorder_lock);
    if (arena->launch_count)
        memset(arena->launches, 0, arena->launch_count * sizeof *arena->launches);
    arena->launch_count = arena->streams.marker_count = 0;
    arena->expected_space = (arena_space){0};
    arena->group_count = arena->tma_stores.map_count = arena->streams.stream_count = arena->reached_range_count =
        0;
    arena->pointer_count = 0;
    arena->is_attribution_lost = arena->is_retired = false;
    pthread_mutex_unlock(&recorder_lock);
}

/* --- memory ------------------------------------------------------------------------------------ */

/* Memory budget of the arenas of a context: a tenth of the device memory that the program has allocated, but at least
 * 361 MiB (two arenas of 2^17 entries), at most 1 GiB, and at most half of the free device memory. */
#define MIN_ENTRIES_LOG2 17
#define MIN_ENTRIES_LOG2_IF_FULL 12 /* minimum on a device with little free memory */
#define MAX_BYTES (1ull << 30)

/* Create a stream for the recorder in the current context. Return NULL on failure. Calls CUDA. */
static Sanitizer_StreamHandle arena_stream_create(CUcontext context, CUstream *stream)
{
    const driver_functions *driver = driver_api();
    Sanitizer_StreamHandle handle = NULL;
    if (driver && !driver->cuStreamCreate(stream, STREAM_NON_BLOCKING) &&
        sanitizer.stream_handle(context, *stream, &handle))
        handle = NULL;
    return handle;
}

static uint64_t allocated_bytes(const arena_pool *pool)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < ARENAS; i++)
        bytes += pool->arenas[i].memory.device_memory ? pool->arenas[i].memory.size_bytes : 0;
    return bytes;
}

static void record_arena_size(const arena_pool *pool)
{
    const uint64_t bytes = allocated_bytes(pool);
    pthread_mutex_lock(&recorder_lock);
    record rec = record_begin(KIND_ARENAS, context_id(pool->context), 0, 0);
    rec.arenas.size_bytes = bytes;
    record_append(&rec);
    pthread_mutex_unlock(&recorder_lock);
}

/* Return the log2 of the number of entries of an arena within the budget, without regard to free memory. */
static unsigned target_entries_log2(void)
{
    pthread_mutex_lock(&recorder_lock);
    uint64_t budget_bytes = allocations_device_bytes() / 10;
    pthread_mutex_unlock(&recorder_lock);
    if (budget_bytes > MAX_BYTES)
        budget_bytes = MAX_BYTES;
    unsigned entries_log2 = MIN_ENTRIES_LOG2;
    while (entries_log2 < CK_MAX_ENTRIES_LOG2 && ARENAS * arena_bytes(entries_log2 + 1) <= budget_bytes)
        entries_log2++;
    return entries_log2;
}

/* Return the log2 of the number of entries of an arena within the budget and the free memory. */
static unsigned affordable_entries_log2(const arena_pool *pool)
{
    unsigned entries_log2 = target_entries_log2();
    while (entries_log2 > MIN_ENTRIES_LOG2_IF_FULL && ARENAS * arena_bytes(entries_log2) > pool->free_bytes / 2)
        entries_log2--;
    return entries_log2;
}

void arena_budget_query(arena_pool *pool)
{
    const driver_functions *driver = driver_api();
    size_t free_bytes = 0, total_bytes = 0;
    const uint64_t arena_bytes_held = allocated_bytes(pool);
    if (arena_bytes_held >= ARENAS * arena_bytes(target_entries_log2()) || order_is_capturing() || !driver)
        return;
    const bool was_in_recorder_call = this_thread.in_recorder_call;
    this_thread.in_recorder_call = true;
    if (!driver->cuMemGetInfo_v2(&free_bytes, &total_bytes))
        pool->free_bytes = free_bytes + arena_bytes_held;
    this_thread.in_recorder_call = was_in_recorder_call;
}

/* Make sure that an unused arena has as much memory as the budget allows. Return false if no unused arena has
 * memory. Calls CUDA. */
static bool arena_memory_provide(const arena_pool *pool, launch_arena *unused)
{
    unsigned entries_log2 = affordable_entries_log2(pool);
    arena_memory new_memory;
    if (unused->memory.device_memory && unused->memory.entries_log2 >= entries_log2)
        return true;
    if (order_is_capturing() || !arena_create(&new_memory, pool->context, pool->stream, entries_log2))
        return unused->memory
            .device_memory; /* during a stream capture, an allocation could invalidate the capture */
    arena_free(&unused->memory);
    unused->memory = new_memory;
    record_arena_size(pool);
    return true;
}

/* Free all arenas. Also destroy the stream of the pool if ``destroy_stream``; otherwise it is destroyed with its
 * context. Calls CUDA. */
static void arena_memory_release(arena_pool *pool, bool destroy_stream)
{
    const driver_functions *driver = driver_api();
    bool has_freed_memory = false;
    for (size_t i = 0; i < ARENAS; i++) {
        has_freed_memory = has_freed_memory || pool->arenas[i].memory.device_memory;
        arena_free(&pool->arenas[i].memory);
    }
    if (has_freed_memory)
        record_arena_size(pool);
    if (driver && destroy_stream)
        driver->cuStreamDestroy_v2(pool->driver_stream);
}

/* --- creation --------------------------------------------------------------------------------- */

/* Return an empty pool. Pools are never freed, because another thread may be about to use one; the pool of a destroyed
 * context is reused. The reader lock is held. */
static arena_pool *new_pool(CUcontext context)
{
    pthread_mutex_lock(&recorder_lock);
    arena_pool *pool = pool_find(NULL);
    if (pool)
        pool->context = context;
    pthread_mutex_unlock(&recorder_lock);
    for (size_t i = 0; pool && i < ARENAS; i++) {
        pool->arenas[i].memory.device_memory = NULL; /* the memory was freed with its context */
        reset_arena(pool->arenas + i);
    }
    if (!pool && pool_count < MAX_POOLS && (pool = calloc(1, sizeof *pool)))
        pool->context = context;
    return pool;
}

static arena_pool *create_pool(CUcontext context)
{
    arena_pool *pool = new_pool(context);
    if (!pool)
        return NULL;
    pool->stream = arena_stream_create(context, &pool->driver_stream);
    pool->free_bytes = UINT64_MAX; /* the free memory is unknown */
    arena_budget_query(pool);
    bool has_memory = pool->stream && arena_memory_provide(pool, pool->arenas);
    pthread_mutex_lock(&recorder_lock);
    pool->last_poll_ns = monotonic_ns();
    pool->last_read_ns = 0;
    pool->current = has_memory ? pool->arenas : NULL;
    pool->is_disabled = !has_memory;
    pool->wait_timed_out = false;
    if (!pool_find(context))
        pools[pool_count++] = pool;
    if (!has_memory)
        record_gap("no device memory for arenas: accesses inferred from arguments");
    pthread_mutex_unlock(&recorder_lock);
    return pool;
}

arena_pool *pool_open(CUcontext context, bool may_create)
{
    pthread_mutex_lock(&recorder_lock);
    arena_pool *pool = context ? pool_find(context) : NULL;
    bool must_create = !pool && may_create && !order_is_capturing();
    pthread_mutex_unlock(&recorder_lock);
    if (!must_create || !reader_lock_acquire(LAUNCH_WAIT_LIMIT_NS))
        return pool;
    pool = pool_find(context); /* another thread may have created the pool meanwhile */
    if (!pool)
        pool = create_pool(context);
    reader_lock_release();
    return pool;
}

/* --- reading ---------------------------------------------------------------------------------- */

/* Return whether all launches in an arena are complete. The reader lock is held. */
static bool is_arena_complete(const launch_arena *arena)
{
    arena_top top;
    pthread_mutex_lock(&recorder_lock);
    bool all_enqueued = !arena->entering_launch_count;
    pthread_mutex_unlock(&recorder_lock);
    if (!all_enqueued || arena_streams_are_complete(&arena->streams, NULL))
        return all_enqueued;
    return arena->streams.marker_count && arena_copy_top(&arena->memory, &top) &&
           arena_streams_are_complete(&arena->streams, &top);
}

#define SWAP(left, right) \
    do { \
        __typeof__(left) swapped_value = (left); \
        (left) = (right); \
        (right) = swapped_value; \
    } while (0)

/* Exchange the lists of launches of an arena with the empty ones of a job. */
static void swap_launches(launch_arena *arena, launch_arena *job)
{
    SWAP(arena->launches, job->launches);
    SWAP(arena->launch_count, job->launch_count);
    SWAP(arena->launch_capacity, job->launch_capacity);
    SWAP(arena->groups, job->groups);
    SWAP(arena->group_count, job->group_count);
    SWAP(arena->group_capacity, job->group_capacity);
    SWAP(arena->reached_ranges, job->reached_ranges);
    SWAP(arena->reached_range_count, job->reached_range_count);
    SWAP(arena->reached_range_capacity, job->reached_range_capacity);
    SWAP(arena->pointers, job->pointers);
    SWAP(arena->pointer_count, job->pointer_count);
    SWAP(arena->pointer_capacity, job->pointer_capacity);
    SWAP(arena->tma_stores, job->tma_stores);
}

/* Copy an arena to the host, have the copy converted to records, and clear the arena for reuse. If an earlier copy is
 * still being converted, return without reading, unless ``must_wait`` is true; then all records are written when the
 * function returns. The reader lock is held. */
static void read_arena(arena_pool *pool, launch_arena *arena, bool must_wait)
{
    decode_job *job = decode_acquire(must_wait);
    if (!job)
        return;
    const bool is_copied = arena->memory.device_memory && arena_copy_all(&arena->memory, &job->copy);
    if (is_copied)
        space_count_used(arena->launch_count, &job->copy);
    pthread_mutex_lock(&recorder_lock);
    if (is_copied && !arena->is_attribution_lost)
        space_store_needed(arena, &job->copy);
    swap_launches(arena, &job->launches);
    pthread_mutex_unlock(&recorder_lock);
    if (!is_copied)
        memset(&job->copy.top, 0, sizeof job->copy.top), job->copy.pages.page_count = 0;
    job->is_attribution_lost = arena->is_attribution_lost || !is_copied;
    if (!is_copied || !arena_clear(&arena->memory, &job->copy.top.header))
        arena_free(&arena->memory); /* the arena gets new memory before its next use */
    reset_arena(arena);
    __atomic_store_n(&pool->wait_timed_out, false, __ATOMIC_RELAXED);
    pool->last_read_ns = monotonic_ns();
    decode_submit(job, must_wait);
}

static void read_arena_if_complete(arena_pool *pool, launch_arena *arena)
{
    arena_streams_enqueue_markers(&arena->streams, &arena->memory,
                                  NULL); /* enqueue markers on streams that have none yet */
    if (is_arena_complete(arena))
        read_arena(pool, arena, false);
}

static void read_retired_arenas(arena_pool *pool)
{
    for (size_t i = 0; i < ARENAS; i++)
        if (pool->arenas[i].is_retired)
            read_arena_if_complete(pool, pool->arenas + i);
}

/* Return whether an arena is so full that the next launches may need its space and would be delayed. */
static bool is_nearly_full(const launch_arena *arena)
{
    return arena->expected_space.pages > arena->memory.page_count / 4 ||
           arena->expected_space.boxes > CK_MAX_BOXES / 4;
}

/* Return whether a retired arena should be read now. After the host has waited, the device is idle. Reading is then
 * deferred until new launches keep the device busy, but at most by READ_INTERVAL_NS: there may be no further
 * launches. */
static bool is_read_due(const arena_pool *pool, const launch_arena *arena)
{
    return is_nearly_full(arena) || !pool->current || pool->current->launch_count >= MIN_LAUNCHES_PER_READ ||
           monotonic_ns() - pool->last_read_ns >= READ_INTERVAL_NS;
}

static void read_due_arenas(arena_pool *pool)
{
    for (size_t i = 0; i < ARENAS; i++)
        if (pool->arenas[i].is_retired && is_read_due(pool, pool->arenas + i))
            read_arena_if_complete(pool, pool->arenas + i);
}

/* --- replacing the current arena -------------------------------------------------------------- */

static launch_arena *unused_arena(arena_pool *pool)
{
    for (size_t i = 0; i < ARENAS; i++)
        if (pool->arenas + i != pool->current && !pool->arenas[i].is_retired)
            return pool->arenas + i;
    return NULL;
}

/* Retire the current arena and continue with the unused one. Return false if no arena is unused, or no memory is
 * left. The reader lock is held. */
static bool replace_current_arena(arena_pool *pool)
{
    launch_arena *next_arena = unused_arena(pool);
    bool has_memory = next_arena && arena_memory_provide(pool, next_arena);
    pthread_mutex_lock(&recorder_lock);
    launch_arena *replaced_arena = pool->current;
    bool is_replaced = has_memory && (!replaced_arena ||
                                      (replaced_arena->launch_count && !replaced_arena->entering_launch_count));
    if (is_replaced) {
        if (replaced_arena)
            replaced_arena->is_retired = true;
        pool->current = next_arena;
        pool->last_replacement_ns = monotonic_ns();
    }
    pthread_mutex_unlock(&recorder_lock);
    if (is_replaced && replaced_arena)
        arena_streams_enqueue_markers(&replaced_arena->streams, &replaced_arena->memory, NULL);
    return is_replaced;
}

/* --- polling ---------------------------------------------------------------------------------- */

#define SEVEN_EIGHTHS(total) ((total) / 8 * 7)

enum { HAS_SPACE, HALF_FULL, FULL };

static int fill_level(const launch_arena *arena)
{
    arena_top top;
    pthread_mutex_lock(&recorder_lock);
    uint32_t launch_count = arena->launch_count;
    bool has_many_streams = arena->streams.stream_count > MAX_MARKERS / 2;
    bool is_nearly_empty = !is_nearly_full(arena) && launch_count <= CK_MAX_LAUNCHES / 2 && !has_many_streams;
    pthread_mutex_unlock(&recorder_lock);
    if (launch_count > SEVEN_EIGHTHS(CK_MAX_LAUNCHES))
        return FULL;
    if (is_nearly_empty || !arena_copy_top(&arena->memory, &top)) /* a copy takes as long as several launches */
        return HAS_SPACE;
    if (top.header.requested_pages > SEVEN_EIGHTHS(arena->memory.page_count) ||
        top.header.requested_boxes > SEVEN_EIGHTHS(CK_MAX_BOXES))
        return FULL;
    bool is_half_full = top.header.requested_pages > arena->memory.page_count / 2 ||
                        top.header.requested_boxes > CK_MAX_BOXES / 2 || launch_count > CK_MAX_LAUNCHES / 2;
    return is_half_full || has_many_streams ? HALF_FULL : HAS_SPACE;
}

/* Delay the calling launch until the current arena can be replaced, or the time limit is over. After a timeout, later
 * launches are not delayed: a kernel may be waiting for the host. The reader lock is held. */
static void wait_for_free_arena(arena_pool *pool)
{
    const int64_t deadline_ns = monotonic_ns() + LAUNCH_WAIT_LIMIT_NS;
    read_retired_arenas(pool);
    while (!replace_current_arena(pool)) {
        if (pool->wait_timed_out || monotonic_ns() >= deadline_ns) {
            __atomic_store_n(&pool->wait_timed_out, true, __ATOMIC_RELAXED);
            return;
        }
        sleep_briefly();
        read_retired_arenas(pool);
    }
}

/* Return whether the current arena should be replaced, although the host does not wait: with templates, so that the
 * launches of programs that never wait are compared soon. */
static bool is_replacement_due(const arena_pool *pool)
{
    const int64_t now_ns = monotonic_ns();
    return templates_are_enabled() && pool->current->launch_count &&
           now_ns - pool->last_wait_ns >= INTERVAL_WITHOUT_WAIT_NS &&
           now_ns - pool->last_replacement_ns >= READ_INTERVAL_NS;
}

static void poll_pool(arena_pool *pool, bool host_waits)
{
    read_due_arenas(pool);
    pthread_mutex_lock(&recorder_lock);
    pool->last_poll_ns = monotonic_ns();
    pool->recorded_since_poll = 0;
    pthread_mutex_unlock(&recorder_lock);
    if (!pool->current || (host_waits && pool->current->launch_count) || is_replacement_due(pool)) {
        if (replace_current_arena(pool))
            read_due_arenas(pool);
        return;
    }
    int level = fill_level(pool->current);
    if (level != HAS_SPACE)
        read_retired_arenas(pool);
    if (level == HALF_FULL)
        replace_current_arena(pool);
    if (level == FULL && !host_waits)
        launch_begin_delay();
    if (level == FULL)
        wait_for_free_arena(pool);
}

/* Return whether the launches of a pool are not read, although it was not polled for some time, because the program has
 * continued in another context. The recorder lock is held. */
static bool is_poll_overdue(const arena_pool *pool)
{
    return pool->context && !pool->is_disabled && pool_has_unread_launches(pool) &&
           monotonic_ns() - pool->last_poll_ns >= INTERVAL_WITHOUT_WAIT_NS;
}

/* Return a pool that must be polled by calls in another context, or NULL. The recorder lock is held. */
static arena_pool *find_overdue_pool(const arena_pool *polled_pool)
{
    for (size_t i = 0; i < pool_count; i++)
        if (pools[i] != polled_pool && is_poll_overdue(pools[i]))
            return pools[i];
    return NULL;
}

void pool_poll(arena_pool *pool, bool host_waits)
{
    pthread_mutex_lock(&recorder_lock);
    arena_pool *overdue_pool = find_overdue_pool(pool);
    if (host_waits)
        pool->last_wait_ns = monotonic_ns();
    bool is_too_early = host_waits && pool->current &&
                        (!pool_has_unread_launches(pool) ||
                         (pool->current->launch_count < MIN_LAUNCHES_PER_READ && !is_nearly_full(pool->current) &&
                          monotonic_ns() - pool->last_poll_ns < POLL_INTERVAL_NS));
    pthread_mutex_unlock(&recorder_lock);
    if ((is_too_early && !overdue_pool) || !reader_lock_acquire(0))
        return;
    if (!pool->is_disabled && !is_too_early)
        poll_pool(pool, host_waits);
    if (overdue_pool && !overdue_pool->is_disabled)
        poll_pool(overdue_pool, true); /* the analysis holds back all later records until its launches are read */
    reader_lock_release();
}

/* Return whether the next launch fits into an arena. An empty arena is used even if it is too small; the launch then
 * loses accesses. The recorder lock or the reader lock is held. */
static bool has_space(const launch_arena *arena, arena_space needed)
{
    return !arena->launch_count ||
           (arena->expected_space.pages + needed.pages <= SEVEN_EIGHTHS(arena->memory.page_count) &&
            arena->expected_space.boxes + needed.boxes <= SEVEN_EIGHTHS(CK_MAX_BOXES) &&
            arena->launch_count + needed.launch_indices <= CK_MAX_LAUNCHES);
}

bool pool_has_unread_launches(const arena_pool *pool)
{
    bool has_unread_launches = false;
    for (size_t i = 0; i < ARENAS; i++)
        has_unread_launches = has_unread_launches || pool->arenas[i].launch_count;
    return has_unread_launches;
}

bool pool_try_reserve(arena_pool *pool, arena_space needed)
{
    launch_arena *current = pool->current;
    if (pool->is_disabled || !current || !has_space(current, needed))
        return false;
    current->expected_space.pages += needed.pages;
    current->expected_space.boxes += needed.boxes;
    return true;
}

void pool_reserve(arena_pool *pool, arena_space needed)
{
    pthread_mutex_lock(&recorder_lock);
    bool must_wait = pool->current && !has_space(pool->current, needed);
    const bool timed_out = __atomic_load_n(&pool->wait_timed_out, __ATOMIC_RELAXED);
    const int64_t timeout_ns = timed_out ? 0 : LAUNCH_WAIT_LIMIT_NS;
    pthread_mutex_unlock(&recorder_lock);
    if (must_wait)
        launch_begin_delay();
    if (must_wait && reader_lock_acquire(timeout_ns)) {
        if (pool->current && !has_space(pool->current, needed))
            wait_for_free_arena(pool);
        reader_lock_release();
    }
    pthread_mutex_lock(&recorder_lock);
    if (pool->current) {
        pool->current->expected_space.pages += needed.pages;
        pool->current->expected_space.boxes += needed.boxes;
    }
    pthread_mutex_unlock(&recorder_lock);
}

/* --- destruction of streams and contexts ------------------------------------------------------ */

void pool_stream_destroying(arena_pool *pool, Sanitizer_StreamHandle stream)
{
    bool needs_marker = false;
    pthread_mutex_lock(&recorder_lock);
    for (size_t i = 0; i < ARENAS; i++)
        needs_marker = needs_marker || arena_streams_have_pending(&pool->arenas[i].streams, stream);
    pthread_mutex_unlock(&recorder_lock);
    if (needs_marker && reader_lock_acquire(LAUNCH_WAIT_LIMIT_NS)) {
        for (size_t i = 0; i < ARENAS; i++)
            arena_streams_enqueue_markers(&pool->arenas[i].streams, &pool->arenas[i].memory, stream);
        reader_lock_release();
    }
    pthread_mutex_lock(&recorder_lock);
    for (size_t i = 0; i < ARENAS; i++)
        arena_streams_forget(&pool->arenas[i].streams, stream);
    pthread_mutex_unlock(&recorder_lock);
}

/* Wait for the launches in an arena, and read it. The wait is for markers and has a time limit, because a kernel that
 * never ends must not keep the process from exiting. Memory that such a kernel may still write to is not freed. The
 * reader lock is held. */
static void finish_arena(arena_pool *pool, launch_arena *arena)
{
    const int64_t deadline_ns = monotonic_ns() + FINISH_WAIT_LIMIT_NS;
    arena_top top;
    arena_streams_enqueue_markers(&arena->streams, &arena->memory, NULL);
    if (!arena_streams_synchronize_unmarked(&arena->streams))
        arena->is_attribution_lost = true;
    while (!is_arena_complete(arena)) {
        if (monotonic_ns() >= deadline_ns || !arena_copy_top(&arena->memory, &top)) {
            arena->memory.device_memory = NULL;
            break;
        }
        sleep_briefly();
    }
    read_arena(pool, arena, true);
}

static void finish_retired_arenas(arena_pool *pool)
{
    for (size_t i = 0; i < ARENAS; i++)
        if (pool->arenas[i].is_retired)
            finish_arena(pool, pool->arenas + i);
}

/* Read the retired arena first: until its launches have accesses, the analysis holds back those of later launches. */
static void finish_pool(arena_pool *pool)
{
    finish_retired_arenas(pool);
    pthread_mutex_lock(&recorder_lock);
    if (pool->current)
        pool->current->is_retired = pool->current->launch_count;
    pool->current = NULL;
    pthread_mutex_unlock(&recorder_lock);
    finish_retired_arenas(pool);
}

static void record_unread_launches(void)
{
    pthread_mutex_lock(&recorder_lock);
    record_gap("last launches not read: another thread was still reading accesses after 5 s");
    pthread_mutex_unlock(&recorder_lock);
}

void pool_read(void)
{
    if (!reader_lock_acquire(FINISH_WAIT_LIMIT_NS)) {
        record_unread_launches();
        return;
    }
    for (size_t i = 0; i < pool_count; i++)
        if (pools[i]->context && !pools[i]->is_disabled)
            finish_pool(pools[i]);
    decode_wait();
    reader_lock_release();
}

/* Disable a pool whose arenas could not be read, because another thread held the reader lock for too long. The driver
 * frees the arenas with the context. */
static void disable_pool_of_context(CUcontext context)
{
    pthread_mutex_lock(&recorder_lock);
    arena_pool *pool = pool_find(context);
    if (pool) {
        pool->is_disabled = true;
        pool->context = NULL;
        pool->current = NULL;
        record_gap("context destroyed before its arenas were read");
    }
    pthread_mutex_unlock(&recorder_lock);
}

void pool_finish(CUcontext context)
{
    if (!reader_lock_acquire(FINISH_WAIT_LIMIT_NS)) {
        if (context)
            disable_pool_of_context(context);
        else
            record_unread_launches();
        return;
    }
    for (size_t i = pool_count; i-- > 0;) {
        arena_pool *pool = pools[i];
        if (!pool->context || (context && pool->context != context))
            continue;
        if (!pool->is_disabled) {
            finish_pool(pool);
            arena_memory_release(pool, !context);
        }
        pthread_mutex_lock(&recorder_lock);
        pool->is_disabled = true;
        if (context)
            pool->context = NULL;
        pthread_mutex_unlock(&recorder_lock);
    }
    decode_wait();
    reader_lock_release();
}

void pool_clear(void)
{
    reader_lock_reset();
    space_clear();
    decode_clear();
    pool_count = 0;
}
