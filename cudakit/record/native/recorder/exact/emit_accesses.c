#define _GNU_SOURCE
#include "exact/emit_accesses.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "decode/pages.h"
#include "decode/tensor_maps.h"
#include "decode/tma_boxes.h"
#include "exact/access_digest.h"
#include "exact/templates.h"
#include "model/kernels.h"
#include "recorder.h"
#include "write/spool.h"

/* The recorder lock is held while the buffered records are written. Launches wait meanwhile, so the buffer is small. */
#define BUFFERED_RECORDS 64
/* Maximum number of separate address intervals of a launch. If a launch has more intervals, those that are less than
 * COALESCE_GAP_BYTES apart are joined and marked as merged. */
#define MAX_SEPARATE_INTERVALS 16384
#define COALESCE_GAP_BYTES (64u << 10)
/* No allocation is below this address. Lower addresses are reported by instructions whose predicate is false. */
#define LOWEST_ADDRESS (64u << 10)

typedef struct {
    arena_copy *host_copy;
    const arena_launch *launches;
    uint32_t next_launch, launch_count; /* the launches before ``next_launch`` are written */
    const launch_arena *arena;
    size_t next_group;           /* index of the group of ``next_launch`` */
    uint32_t exact_launch_count; /* number of launches of this group so far whose accesses are exact */
    const tma_store_set *tma_stores;
    size_t next_tma_store;
    bool is_attribution_lost;
    uint64_t lost_launch_count,
        unknown_store_launch_count; /* lost_launch_count includes unknown_store_launch_count */
    size_t interval_count;          /* number of intervals of the current launch */
    size_t buffered_record_count;
} emitter;

static record record_buffer[BUFFERED_RECORDS]; /* protected by the reader lock */

static access_digest group_digest; /* accesses of the current group; protected by the reader lock */

static const uint8_t RECORD_MODE_OF[CK_MODES] = {
    [CK_READ] = MODE_READ,
    [CK_WRITE] = MODE_WRITE,
    [CK_ATOMIC] = MODE_READ | MODE_WRITE | MODE_ATOMIC,
};

static void write_buffered_records(emitter *writer)
{
    if (!writer->buffered_record_count)
        return;
    if (templates_are_enabled())
        spool_allocate_ahead(); /* so that no page is allocated while the recorder lock is held */
    pthread_mutex_lock(&recorder_lock);
    spool_records(record_buffer, writer->buffered_record_count);
    pthread_mutex_unlock(&recorder_lock);
    writer->buffered_record_count = 0;
}

static record *append_record(emitter *writer, const record *launch_record, uint16_t kind)
{
    if (writer->buffered_record_count == BUFFERED_RECORDS)
        write_buffered_records(writer);
    record *rec = record_buffer + writer->buffered_record_count++;
    *rec = *launch_record;
    rec->kind = kind;
    memset(rec->kind_fields, 0, sizeof rec->kind_fields);
    return rec;
}

static bool is_launch_lost(const emitter *writer, uint32_t launch)
{
    if (writer->is_attribution_lost)
        return true;
    return writer->host_copy->top.header.lost_launches &&
           writer->host_copy->lost_bits[launch / 32] >> (launch & 31) & 1;
}

/* Add a range of the current launch to the digest of its group. */
static void add_range_to_digest(emitter *writer, uint64_t lo, uint64_t bytes, uint64_t stride, uint64_t count,
                                uint32_t mode)
{
    if (templates_are_enabled() && writer->next_group < writer->arena->group_count)
        digest_add(&group_digest, writer->launches[writer->next_launch].template_record.access.node, mode, lo,
                   bytes, stride, count);
}

/* Append an access of the current launch. The caller sets ``mode`` and ``precision``. */
static record *append_access(emitter *writer, uint64_t lo, uint64_t bytes, uint64_t stride, uint64_t count)
{
    const record *launch_record = &writer->launches[writer->next_launch].template_record;
    record *rec = append_record(writer, launch_record, KIND_ACCESS);
    rec->access.lo = lo;
    rec->access.hi = lo + (count - 1) * stride + bytes;
    rec->access.stride_bytes = count > 1 ? (int64_t)stride : 0;
    rec->access.count = count > 1 ? count : 0;
    rec->access.node = launch_record->access.node;
    return rec;
}

static void append_store_row(void *context, uint64_t lo, uint64_t bytes, uint64_t stride, uint64_t count)
{
    emitter *writer = context;
    record *rec = append_access(writer, lo, bytes, stride, count);
    rec->access.mode = writer->tma_stores->maps[writer->next_tma_store].mode;
    rec->access.precision = PRECISION_SUMMARY;
    add_range_to_digest(writer, lo, bytes, stride, count, 16u + rec->access.mode);
}

/* Append the tensors that the current launch stores to through tensor maps. */
static void emit_stores(emitter *writer)
{
    const tma_store_set *tma_stores = writer->tma_stores;
    for (; writer->next_tma_store < tma_stores->map_count &&
           tma_stores->maps[writer->next_tma_store].launch <= writer->next_launch;
         writer->next_tma_store++)
        if (!writer->is_attribution_lost && !tma_stores->maps[writer->next_tma_store].is_load)
            tma_store_rows(tma_stores->maps + writer->next_tma_store, append_store_row, writer);
}

/* Begin the group ``next_group``, unless the arena has no more groups. */
static void begin_group(emitter *writer)
{
    writer->exact_launch_count = 0;
    if (writer->next_group >= writer->arena->group_count)
        return;
    const reached_memory *memory = &writer->arena->groups[writer->next_group].reached_memory;
    digest_begin(&group_digest, writer->arena->pointers + memory->first_pointer, memory->pointer_count,
                 writer->arena->reached_ranges + memory->first_range, memory->range_count);
}

/* Append the pointers of a group whose accesses become a template. */
static void append_pointers(emitter *writer, const launch_group *group)
{
    static record pointer_records[MAX_ACCESSES]; /* protected by the reader lock */
    const reached_memory *memory = &group->reached_memory;
    const record *launch_record = &writer->launches[writer->next_launch].template_record;
    const size_t record_count = kernels_write_pointers(writer->arena->pointers + memory->first_pointer,
                                                       memory->pointer_count, launch_record, pointer_records);
    for (size_t i = 0; i < record_count; i++)
        *append_record(writer, launch_record, KIND_TEMPLATE_POINTERS) = pointer_records[i];
}

/* Compare the accesses of the current group with the template of its signature. The current launch is the last one
 * of the group. Append a TEMPLATE record if the accesses become the template, or differ from it. The record
 * precedes the last ACCESSED record of the call, so that the analysis has the template before it continues with
 * later calls. */
static void compare_group_with_template(emitter *writer, bool is_exact)
{
    const launch_group *group = writer->arena->groups + writer->next_group;
    const record *launch_record = &writer->launches[writer->next_launch].template_record;
    if (writer->exact_launch_count + is_exact != group->expected_launch_count)
        return;
    footprint_simplify(&group_digest.footprint);
    pthread_mutex_lock(&recorder_lock);
    const template_result result = templates_compare(&group->signature, &group_digest);
    pthread_mutex_unlock(&recorder_lock);
    if (!result.new_template_id && result.check_result == TEMPLATE_CHECK_NONE)
        return;
    record *rec = append_record(writer, launch_record, KIND_TEMPLATE);
    rec->access_template.template_id = result.new_template_id;
    rec->access_template.check = result.check_result;
    if (result.new_template_id)
        append_pointers(writer, group);
}

/* Return whether no later launch of the current group has a record. */
static bool is_last_launch_of_group(const emitter *writer)
{
    const launch_group *group = writer->arena->groups + writer->next_group;
    uint32_t launch_index = writer->next_launch + 1;
    while (launch_index < group->first_launch_index + group->launch_index_count &&
           !writer->launches[launch_index].template_record.kind)
        launch_index++;
    return launch_index == group->first_launch_index + group->launch_index_count;
}

/* Begin the next group if the next launch is not in the current one. */
static void select_group(emitter *writer)
{
    const launch_arena *arena = writer->arena;
    while (writer->next_group < arena->group_count &&
           writer->next_launch >= arena->groups[writer->next_group].first_launch_index +
                                      arena->groups[writer->next_group].launch_index_count) {
        writer->next_group++;
        begin_group(writer);
    }
}

/* Write the stores and the ACCESSED records of the launches before index ``before``. */
static void finish_launches(emitter *writer, uint32_t before)
{
    for (; writer->next_launch < before; writer->next_launch++, select_group(writer)) {
        const arena_launch *launch = writer->launches + writer->next_launch;
        if (!launch->template_record.kind)
            continue;
        bool is_lost_launch = is_launch_lost(writer, writer->next_launch);
        writer->lost_launch_count += is_lost_launch;
        emit_stores(writer);
        const bool is_exact = !is_lost_launch && !launch->is_incomplete;
        if (writer->next_group < writer->arena->group_count && is_last_launch_of_group(writer))
            compare_group_with_template(writer, is_exact);
        record *rec = append_record(writer, &launch->template_record, KIND_ACCESSED);
        rec->accessed.node = launch->template_record.access.node;
        rec->accessed.exact = is_exact;
        writer->exact_launch_count += is_exact;
        writer->interval_count = 0;
    }
}

static bool can_coalesce_ranges(const record *rec, const access_range *range, uint64_t hi)
{
    return rec->access.mode == RECORD_MODE_OF[range->mode] && rec->kind == KIND_ACCESS &&
           range->lo >= rec->access.lo && range->lo < rec->access.hi + COALESCE_GAP_BYTES && hi > rec->access.hi;
}

static void emit_range(void *context, const access_range *range)
{
    emitter *writer = context;
    if (range->launch >= writer->launch_count || range->mode == CK_SYNC)
        return; /* accesses at system scope are to synchronization variables, not to data */
    finish_launches(writer, range->launch);
    uint64_t hi = range->lo + (range->count - 1) * range->stride + range->bytes;
    if (!writer->launches[range->launch].template_record.kind || writer->is_attribution_lost ||
        hi <= LOWEST_ADDRESS)
        return;
    add_range_to_digest(writer, range->lo, range->bytes, range->stride, range->count, range->mode);
    record *last_record = writer->buffered_record_count ? record_buffer + writer->buffered_record_count - 1 : NULL;
    if (++writer->interval_count > MAX_SEPARATE_INTERVALS && last_record &&
        can_coalesce_ranges(last_record, range, hi)) {
        last_record->access.hi = hi;
        last_record->access.precision = PRECISION_MERGED;
        last_record->access.stride_bytes = 0;
        last_record->access.count = 0;
        return;
    }
    record *rec = append_access(writer, range->lo, range->bytes, range->stride, range->count);
    rec->access.mode = RECORD_MODE_OF[range->mode];
    rec->access.precision = PRECISION_EXACT;
}

static void mark_launch_lost(void *context, uint32_t launch)
{
    emitter *writer = context;
    if (launch >= writer->launch_count)
        return;
    if (!writer->host_copy->top.header.lost_launches++)
        memset(writer->host_copy->lost_bits, 0, sizeof writer->host_copy->lost_bits);
    writer->host_copy->lost_bits[launch / 32] |= 1u << (launch & 31);
}

/* Mark each launch as lost that stores through tensor maps, but loads through every map among its parameters: it
 * stores through an unknown map, or through one that it also loads from. */
static void mark_unknown_stores_lost(emitter *writer)
{
    const tma_store *maps = writer->tma_stores->maps;
    for (size_t i = 0, next_group; i < writer->tma_stores->map_count; i = next_group) {
        bool has_store_map = false;
        for (next_group = i;
             next_group < writer->tma_stores->map_count && maps[next_group].launch == maps[i].launch; next_group++)
            has_store_map = has_store_map || !maps[next_group].is_load;
        if (!has_store_map)
            mark_launch_lost(writer, maps[i].launch);
        writer->unknown_store_launch_count += !has_store_map;
    }
}

/* Write the accesses of the launches in an arena, and compare them with templates. With ``attribution_lost``,
 * accesses cannot be attributed to launches, and all launches are lost. The caller holds the reader lock, but not
 * ``recorder_lock``.
 *
 * If some accesses of a launch are missing, the others are written, but its ACCESSED record is not exact. */
static void emit_accesses(arena_copy *copy, launch_arena *arena, bool attribution_lost)
{
    const ck_header *header = &copy->top.header;
    const size_t map_count = header->requested_maps < CK_MAX_MAPS ? header->requested_maps : CK_MAX_MAPS;
    const size_t box_count = header->requested_boxes < CK_MAX_BOXES ? header->requested_boxes : CK_MAX_BOXES;
    attribution_lost =
        !tma_stores_resolve(&arena->tma_stores, copy->maps, map_count, copy->boxes, box_count) || attribution_lost;
    emitter writer = {.host_copy = copy,
                      .launches = arena->launches,
                      .launch_count = arena->launch_count,
                      .arena = arena,
                      .tma_stores = &arena->tma_stores,
                      .is_attribution_lost = attribution_lost};
    begin_group(&writer);
    mark_unknown_stores_lost(&writer);
    page_set *pages = &copy->pages;
    if (!tma_boxes_expand(copy->maps, copy->top.header.requested_maps, copy->boxes,
                          copy->top.header.requested_boxes, pages, mark_launch_lost, &writer) ||
        !pages_to_ranges(pages->pages, pages->bitmaps, pages->page_count, emit_range, &writer))
        writer.is_attribution_lost = true;
    finish_launches(&writer, arena->launch_count);
    write_buffered_records(&writer);
    pthread_mutex_lock(&recorder_lock);
    if (writer.unknown_store_launch_count)
        record_gaps("launch with lost accesses: store through an unknown tensor map",
                    writer.unknown_store_launch_count);
    if (writer.lost_launch_count > writer.unknown_store_launch_count)
        record_gaps("launch with lost accesses: arena full",
                    writer.lost_launch_count - writer.unknown_store_launch_count);
    pthread_mutex_unlock(&recorder_lock);
}

void emit_unknown_accesses(const record *launch_record)
{
    record rec = *launch_record;
    rec.kind = KIND_ACCESSED;
    memset(rec.kind_fields, 0, sizeof rec.kind_fields);
    rec.accessed.node = launch_record->access.node;
    record_append(&rec);
}

/* --- the decode thread ----------------------------------------------------------------------------- */

static pthread_mutex_t job_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t job_changed = PTHREAD_COND_INITIALIZER;
/* job_mutex protects the variables below. */
static enum { JOB_FREE, JOB_ACQUIRED, JOB_SUBMITTED } job_state;
static bool has_thread;
static decode_job
    the_job; /* used by the decode thread while submitted, else by the thread that acquired the job */

static void set_state(int state)
{
    pthread_mutex_lock(&job_mutex);
    job_state = state;
    pthread_cond_broadcast(&job_changed);
    pthread_mutex_unlock(&job_mutex);
}

/* Convert the copy of a job, and clear its lists for the next one. */
static void run_job(decode_job *job)
{
    launch_arena *arena = &job->launches;
    emit_accesses(&job->copy, arena, job->is_attribution_lost);
    if (arena->launch_count)
        memset(arena->launches, 0, arena->launch_count * sizeof *arena->launches);
    arena->launch_count = 0;
    arena->group_count = arena->tma_stores.map_count = arena->reached_range_count = arena->pointer_count = 0;
    set_state(JOB_FREE);
}

static void *thread_main(void *unused)
{
    (void)unused;
    for (;;) {
        pthread_mutex_lock(&job_mutex);
        while (job_state != JOB_SUBMITTED)
            pthread_cond_wait(&job_changed, &job_mutex);
        pthread_mutex_unlock(&job_mutex);
        run_job(&the_job);
    }
    return NULL;
}

/* Start the decode thread, which receives no signals of the program. Return false on failure. job_mutex is held. */
static bool start_thread(void)
{
    pthread_t thread;
    sigset_t all_signals, old_signals;
    sigfillset(&all_signals);
    pthread_sigmask(SIG_SETMASK, &all_signals, &old_signals);
    has_thread = !pthread_create(&thread, NULL, thread_main, NULL);
    pthread_sigmask(SIG_SETMASK, &old_signals, NULL);
    if (has_thread) {
        pthread_setname_np(thread, "cudakit-decode"); /* a new thread has the name of its creator */
        pthread_detach(thread);
    }
    return has_thread;
}

decode_job *decode_acquire(bool must_wait)
{
    pthread_mutex_lock(&job_mutex);
    while (job_state != JOB_FREE && must_wait)
        pthread_cond_wait(&job_changed, &job_mutex);
    const bool is_free = job_state == JOB_FREE;
    if (is_free)
        job_state = JOB_ACQUIRED;
    pthread_mutex_unlock(&job_mutex);
    return is_free ? &the_job : NULL;
}

void decode_submit(decode_job *job, bool must_wait)
{
    pthread_mutex_lock(&job_mutex);
    const bool use_thread = !must_wait && templates_are_enabled() && (has_thread || start_thread());
    pthread_mutex_unlock(&job_mutex);
    if (use_thread)
        set_state(JOB_SUBMITTED);
    else
        run_job(job);
}

void decode_wait(void)
{
    if (decode_acquire(true))
        set_state(JOB_FREE);
}

void decode_clear(void)
{
    job_mutex = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    job_changed = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    job_state = JOB_FREE;
    has_thread = false;
    memset(&the_job, 0, sizeof the_job); /* the decode thread may have been using the job during the fork */
}
