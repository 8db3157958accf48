#include "telling.h"

#include <string.h>

#include "ranges.h"
#include "recorder.h"
#include "spool.h"

#define ROWS 1024
/* Beyond so many pieces of a launch, what lies close together is one piece, and said to be no more than that. */
#define MOST_PIECES 16384
#define CLOSE (64u << 10)
/* No memory is below: an instruction that is switched off may still name an address. */
#define LOWEST (64u << 10)

typedef struct {
    arena_copy *all;
    const record *launches;
    uint32_t next, count; /* launches up to ``next`` are told */
    const store_set *stores;
    size_t next_store;
    bool spoiled;
    uint64_t lost, unknown; /* launches; those of them whose stores are not known */
    size_t pieces; /* of the launch that is being told */
    record *rows;
    size_t used;
} teller;

static const uint8_t MODE_OF[CK_MODES] = {
    [CK_READ] = MODE_READ,
    [CK_WRITE] = MODE_WRITE,
    [CK_ATOMIC] = MODE_READ | MODE_WRITE | MODE_ATOMIC,
};

static void flush(teller *to)
{
    if (!to->used)
        return;
    pthread_mutex_lock(&recorder_lock);
    spool_records(to->rows, to->used);
    pthread_mutex_unlock(&recorder_lock);
    to->used = 0;
}

static record *append(teller *to, const record *like, uint16_t kind)
{
    if (to->used == ROWS)
        flush(to);
    record *row = to->rows + to->used++;
    *row = *like;
    row->kind = kind;
    memset(row->own, 0, sizeof row->own);
    return row;
}

static bool is_lost(const teller *to, uint32_t launch)
{
    if (to->spoiled)
        return true;
    return to->all->top.header.lost && to->all->lost[launch / 32] >> (launch & 31) & 1;
}

/* Write an access of the launch that is being told; what it does and how well that is known, the caller sets. */
static record *append_access(teller *to, uint64_t lo, uint64_t bytes, uint64_t stride, uint64_t count)
{
    const record *like = to->launches + to->next;
    record *row = append(to, like, KIND_ACCESS);
    row->access.lo = lo;
    row->access.hi = lo + (count - 1) * stride + bytes;
    row->access.stride_bytes = count > 1 ? (int64_t)stride : 0;
    row->access.count = count > 1 ? count : 0;
    row->access.node = like->access.node;
    return row;
}

static void write_row(void *of, uint64_t lo, uint64_t bytes, uint64_t stride, uint64_t count)
{
    record *row = append_access(of, lo, bytes, stride, count);
    row->access.mode = MODE_WRITE;
    row->access.known = KNOWN_SUMMARY;
}

/* What the launch that is being told stores through tensor maps. */
static void take_stores(teller *to, bool lost)
{
    const store_set *all = to->stores;
    for (; to->next_store < all->count && all->maps[to->next_store].launch <= to->next; to->next_store++)
        if (!lost && !all->maps[to->next_store].loaded)
            stores_rows(all->maps + to->next_store, write_row, to);
}

static void end_launches(teller *to, uint32_t before)
{
    for (; to->next < before; to->next++) {
        const record *like = to->launches + to->next;
        if (!like->kind)
            continue;
        bool lost = is_lost(to, to->next);
        to->lost += lost;
        take_stores(to, lost);
        record *row = append(to, like, KIND_ACCESSED);
        row->accessed.node = like->access.node;
        row->accessed.exact = !lost;
        to->pieces = 0;
    }
}

static bool joins(const record *row, const access_range *range, uint64_t hi)
{
    return row->access.mode == MODE_OF[range->mode] && row->kind == KIND_ACCESS &&
           range->lo >= row->access.lo && range->lo < row->access.hi + CLOSE && hi > row->access.hi;
}

static void take(void *of, const access_range *range)
{
    teller *to = of;
    if (range->launch >= to->count || range->mode == CK_SYNC)
        return; /* words by which processors signal each other are no data */
    end_launches(to, range->launch);
    const record *like = to->launches + range->launch;
    uint64_t hi = range->lo + (range->count - 1) * range->stride + range->bytes;
    if (!like->kind || is_lost(to, range->launch) || hi <= LOWEST)
        return;
    record *last = to->used ? to->rows + to->used - 1 : NULL;
    if (++to->pieces > MOST_PIECES && last && joins(last, range, hi)) {
        last->access.hi = hi;
        last->access.known = KNOWN_SUMMARY;
        last->access.stride_bytes = 0;
        last->access.count = 0;
        return;
    }
    record *row = append_access(to, range->lo, range->bytes, range->stride, range->count);
    row->access.mode = MODE_OF[range->mode];
    row->access.known = KNOWN_EXACT;
}

static void lose(void *of, uint32_t launch)
{
    teller *to = of;
    if (launch >= to->count)
        return;
    if (!to->all->top.header.lost++)
        memset(to->all->lost, 0, sizeof to->all->lost);
    to->all->lost[launch / 32] |= 1u << (launch & 31);
}

/* A launch that loads by all of its maps stores by one that is not among its parameters, or by one of them
 * too. */
static void lose_unknown_stores(teller *to)
{
    const store_map *maps = to->stores->maps;
    for (size_t i = 0, next; i < to->stores->count; i = next) {
        bool known = false;
        for (next = i; next < to->stores->count && maps[next].launch == maps[i].launch; next++)
            known = known || !maps[next].loaded;
        if (!known)
            lose(to, maps[i].launch);
        to->unknown += !known;
    }
}

void tell(arena_copy *all, const record *launches, uint32_t count, store_set *stores, bool spoiled)
{
    static record rows[ROWS]; /* one thread at a time reads */
    const ck_header *header = &all->top.header;
    const size_t maps = header->maps < CK_MAX_MAPS ? header->maps : CK_MAX_MAPS;
    const size_t boxes = header->boxes < CK_MAX_BOXES ? header->boxes : CK_MAX_BOXES;
    spoiled = !stores_settle(stores, all->maps, maps, all->boxes, boxes) || spoiled;
    teller to = {
        .all = all, .launches = launches, .count = count, .stores = stores, .spoiled = spoiled, .rows = rows};
    lose_unknown_stores(&to);
    page_set *pages = &all->pages;
    if (!boxes_expand(all->maps, all->top.header.maps, all->boxes, all->top.header.boxes, pages, lose, &to) ||
        !ranges_of(pages->pages, pages->bitmaps, pages->count, take, &to))
        to.spoiled = true;
    end_launches(&to, count);
    flush(&to);
    pthread_mutex_lock(&recorder_lock);
    if (to.unknown)
        record_gaps("a launch that stores by a tensor map which is not known", to.unknown);
    if (to.lost > to.unknown)
        record_gaps("a launch for whose accesses there was no room", to.lost - to.unknown);
    pthread_mutex_unlock(&recorder_lock);
}

void tell_nothing(const record *like)
{
    record made = *like;
    made.kind = KIND_ACCESSED;
    memset(made.own, 0, sizeof made.own);
    made.accessed.node = like->access.node;
    record_one(&made);
}
