#include "decode/emit_accesses.h"

#include <string.h>

#include "decode/pages.h"
#include "recorder.h"
#include "write/spool.h"

#define BUFFERED_RECORDS 1024
/* Beyond this number of pieces per launch, pieces that are close are joined, and marked as a summary. */
#define MAX_PIECES 16384
#define COALESCE_GAP_BYTES (64u << 10)
/* No allocation is below: a predicated-off instruction may still report an address. */
#define LOWEST_ADDRESS (64u << 10)

typedef struct {
    arena_copy *copy;
    const arena_launch *launches;
    uint32_t next, count; /* launches before ``next`` are done */
    const tma_store_set *stores;
    size_t next_store;
    bool attribution_lost;
    uint64_t lost, unknown_stores; /* numbers of launches; of those, the ones whose stores are unknown */
    size_t pieces;                 /* of the current launch */
    size_t used;
} emitter;

static record rows[BUFFERED_RECORDS]; /* protected by the reader lock */

static const uint8_t MODE_OF[CK_MODES] = {
    [CK_READ] = MODE_READ,
    [CK_WRITE] = MODE_WRITE,
    [CK_ATOMIC] = MODE_READ | MODE_WRITE | MODE_ATOMIC,
};

static void flush(emitter *out)
{
    if (!out->used)
        return;
    pthread_mutex_lock(&recorder_lock);
    spool_records(rows, out->used);
    pthread_mutex_unlock(&recorder_lock);
    out->used = 0;
}

static record *append(emitter *out, const record *launch_record, uint16_t kind)
{
    if (out->used == BUFFERED_RECORDS)
        flush(out);
    record *row = rows + out->used++;
    *row = *launch_record;
    row->kind = kind;
    memset(row->own, 0, sizeof row->own);
    return row;
}

static bool is_lost(const emitter *out, uint32_t launch)
{
    if (out->attribution_lost)
        return true;
    return out->copy->top.header.lost && out->copy->lost[launch / 32] >> (launch & 31) & 1;
}

/* Append an access of the current launch; the caller sets mode and known. */
static record *append_access(emitter *out, uint64_t lo, uint64_t bytes, uint64_t stride, uint64_t count)
{
    const record *base = &out->launches[out->next].base;
    record *row = append(out, base, KIND_ACCESS);
    row->access.lo = lo;
    row->access.hi = lo + (count - 1) * stride + bytes;
    row->access.stride_bytes = count > 1 ? (int64_t)stride : 0;
    row->access.count = count > 1 ? count : 0;
    row->access.node = base->access.node;
    return row;
}

static void append_store_row(void *context, uint64_t lo, uint64_t bytes, uint64_t stride, uint64_t count)
{
    emitter *out = context;
    record *row = append_access(out, lo, bytes, stride, count);
    row->access.mode = out->stores->maps[out->next_store].mode;
    row->access.known = KNOWN_SUMMARY;
}

/* Append the stores of the current launch through tensor maps. */
static void emit_stores(emitter *out)
{
    const tma_store_set *stores = out->stores;
    for (; out->next_store < stores->count && stores->maps[out->next_store].launch <= out->next; out->next_store++)
        if (!out->attribution_lost && !stores->maps[out->next_store].is_load)
            tma_store_rows(stores->maps + out->next_store, append_store_row, out);
}

static void finish_launches(emitter *out, uint32_t before)
{
    for (; out->next < before; out->next++) {
        const arena_launch *launch = out->launches + out->next;
        if (!launch->base.kind)
            continue;
        bool lost = is_lost(out, out->next);
        out->lost += lost;
        emit_stores(out);
        record *row = append(out, &launch->base, KIND_ACCESSED);
        row->accessed.node = launch->base.access.node;
        row->accessed.exact = !lost && !launch->is_incomplete;
        out->pieces = 0;
    }
}

static bool can_coalesce(const record *row, const access_range *range, uint64_t hi)
{
    return row->access.mode == MODE_OF[range->mode] && row->kind == KIND_ACCESS && range->lo >= row->access.lo &&
           range->lo < row->access.hi + COALESCE_GAP_BYTES && hi > row->access.hi;
}

static void emit_range(void *context, const access_range *range)
{
    emitter *out = context;
    if (range->launch >= out->count || range->mode == CK_SYNC)
        return; /* system-scope synchronisation variables, not data */
    finish_launches(out, range->launch);
    uint64_t hi = range->lo + (range->count - 1) * range->stride + range->bytes;
    if (!out->launches[range->launch].base.kind || out->attribution_lost || hi <= LOWEST_ADDRESS)
        return;
    record *last = out->used ? rows + out->used - 1 : NULL;
    if (++out->pieces > MAX_PIECES && last && can_coalesce(last, range, hi)) {
        last->access.hi = hi;
        last->access.known = KNOWN_MERGED;
        last->access.stride_bytes = 0;
        last->access.count = 0;
        return;
    }
    record *row = append_access(out, range->lo, range->bytes, range->stride, range->count);
    row->access.mode = MODE_OF[range->mode];
    row->access.known = KNOWN_EXACT;
}

static void mark_lost(void *context, uint32_t launch)
{
    emitter *out = context;
    if (launch >= out->count)
        return;
    if (!out->copy->top.header.lost++)
        memset(out->copy->lost, 0, sizeof out->copy->lost);
    out->copy->lost[launch / 32] |= 1u << (launch & 31);
}

/* A launch that loads through all of its tensor maps stores through an unknown map, or through one of them,
 * too. */
static void mark_unknown_stores_lost(emitter *out)
{
    const tma_store *maps = out->stores->maps;
    for (size_t i = 0, next; i < out->stores->count; i = next) {
        bool known = false;
        for (next = i; next < out->stores->count && maps[next].launch == maps[i].launch; next++)
            known = known || !maps[next].is_load;
        if (!known)
            mark_lost(out, maps[i].launch);
        out->unknown_stores += !known;
    }
}

void emit_accesses(arena_copy *copy, const arena_launch *launches, uint32_t count, tma_store_set *stores,
                   bool attribution_lost)
{
    const ck_header *header = &copy->top.header;
    const size_t maps = header->maps < CK_MAX_MAPS ? header->maps : CK_MAX_MAPS;
    const size_t boxes = header->boxes < CK_MAX_BOXES ? header->boxes : CK_MAX_BOXES;
    attribution_lost = !tma_stores_resolve(stores, copy->maps, maps, copy->boxes, boxes) || attribution_lost;
    emitter out = {.copy = copy,
                   .launches = launches,
                   .count = count,
                   .stores = stores,
                   .attribution_lost = attribution_lost};
    mark_unknown_stores_lost(&out);
    page_set *pages = &copy->pages;
    if (!tma_boxes_expand(copy->maps, copy->top.header.maps, copy->boxes, copy->top.header.boxes, pages, mark_lost,
                          &out) ||
        !pages_to_ranges(pages->pages, pages->bitmaps, pages->count, emit_range, &out))
        out.attribution_lost = true;
    finish_launches(&out, count);
    flush(&out);
    pthread_mutex_lock(&recorder_lock);
    if (out.unknown_stores)
        record_gaps("launch with lost accesses: store through an unknown tensor map", out.unknown_stores);
    if (out.lost > out.unknown_stores)
        record_gaps("launch with lost accesses: arena full", out.lost - out.unknown_stores);
    pthread_mutex_unlock(&recorder_lock);
}

void emit_unknown_accesses(const record *launch_record)
{
    record rec = *launch_record;
    rec.kind = KIND_ACCESSED;
    memset(rec.own, 0, sizeof rec.own);
    rec.accessed.node = launch_record->access.node;
    record_append(&rec);
}
