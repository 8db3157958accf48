/* The patch on the host: threads without neighbours in a warp. Built by on_host.py, together with what
 * reads an arena. */
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "arena.h"
#include "ranges.h"

#define CK_PATCH int
#define CK_INLINE static inline
#define CK_ASIDE static

#define ORDER __ATOMIC_RELAXED
#define AS(type, at) ((type *)(uintptr_t)(at))

CK_INLINE ck_u32 load(ck_u64 at) { return __atomic_load_n(AS(ck_u32, at), ORDER); }
CK_INLINE ck_u64 load64(ck_u64 at) { return __atomic_load_n(AS(ck_u64, at), ORDER); }
CK_INLINE ck_u32 load_shared_truth(ck_u64 at) { return load(at); }
CK_INLINE ck_u64 load_shared_truth64(ck_u64 at) { return load64(at); }
CK_INLINE void store(ck_u64 at, ck_u32 value) { __atomic_store_n(AS(ck_u32, at), value, ORDER); }
CK_INLINE void store64(ck_u64 at, ck_u64 value) { __atomic_store_n(AS(ck_u64, at), value, ORDER); }
CK_INLINE ck_entry load_entry(ck_u64 at) { return (ck_entry){load64(at), load64(at + 8)}; }

static long atomics;

CK_INLINE void count(void) { __atomic_fetch_add(&atomics, 1, ORDER); }
CK_INLINE ck_u32 atomic_or(ck_u64 at, ck_u32 bits)
{
    count();
    return __atomic_fetch_or(AS(ck_u32, at), bits, ORDER);
}
CK_INLINE ck_u32 atomic_add(ck_u64 at, ck_u32 value)
{
    count();
    return __atomic_fetch_add(AS(ck_u32, at), value, ORDER);
}
CK_INLINE ck_u64 atomic_swap_free(ck_u64 at, ck_u64 value)
{
    ck_u64 there = 0;
    count();
    __atomic_compare_exchange_n(AS(ck_u64, at), &there, value, false, ORDER, ORDER);
    return there;
}
CK_INLINE ck_u32 companions(ck_u64 value) { (void)value; return 1; }
CK_INLINE ck_u32 all_here(void) { return 1; }
CK_INLINE bool leads(ck_u32 threads) { return threads == 1; }
CK_INLINE ck_u64 of_leader(ck_u32 threads, ck_u64 value) { (void)threads; return value; }
CK_INLINE ck_u32 joined(ck_u32 threads, ck_u32 bits) { (void)threads; return bits; }

#include "accesses.cu"

/* --- for the tests ---------------------------------------------------------------------------------- */

typedef struct {
    ck_u64 userdata, address;
    ck_u32 count, bytes, flags, turn;
} stream;

static void *run(void *argument)
{
    const stream *all = argument;
    for (ck_u32 i = 0; i < all->count; i++) {
        ck_u32 at = (i + all->turn) % all->count;
        ck_u64 address = all->address + (ck_u64)at * all->bytes;
        ck_memory_access(all->userdata, 0, address, all->bytes, all->flags, NULL);
    }
    return NULL;
}

#define THREADS 8

/* Each of many threads touches all of the same memory, from another place on. */
void touch_together(ck_u64 userdata, ck_u64 address, ck_u32 count, ck_u32 bytes, ck_u32 flags)
{
    pthread_t thread[THREADS];
    stream all[THREADS];
    for (ck_u32 i = 0; i < THREADS; i++) {
        all[i] = (stream){userdata, address, count, bytes, flags, i % 4 * (count / 4)};
        pthread_create(&thread[i], NULL, run, &all[i]);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(thread[i], NULL);
}

void *new_arena(ck_u32 entries_log2, ck_u32 pages)
{
    size_t bytes = (CK_ARENA_BYTES(entries_log2, pages) + CK_ALIGNMENT - 1) & ~(CK_ALIGNMENT - 1);
    ck_header *header = aligned_alloc(CK_ALIGNMENT, bytes);
    memset(header, 0, CK_ARENA_BYTES(entries_log2, pages));
    header->form = CK_FORM;
    header->pages = pages;
    return header;
}

void drop_arena(void *arena) { free(arena); }
ck_u64 userdata_of(void *arena, ck_u32 log2, ck_u32 launch) { return CK_USERDATA(arena, log2, launch); }
long atomics_so_far(void) { return atomics; }
ck_u32 pages_taken(const ck_header *arena)
{
    return arena->cursor < arena->pages ? arena->cursor : arena->pages;
}
const char *pages_of(const char *arena, ck_u32 log2) { return arena + CK_PAGES_AT(log2); }
const char *bitmaps_in(const char *arena, ck_u32 log2) { return arena + CK_BITMAPS_AT(log2); }

typedef struct {
    access_range *room;
    size_t used, size;
} kept;

static void keep(void *to, const access_range *range)
{
    kept *into = to;
    if (into->used < into->size)
        into->room[into->used] = *range;
    into->used++;
}

/* Returns how many ranges there are; as many as there is room for are written. */
size_t read_ranges(const ck_page *pages, const void *bitmaps, size_t count, access_range *room, size_t size)
{
    kept into = {room, 0, size};
    return ranges_of(pages, bitmaps, count, keep, &into) ? into.used : (size_t)-1;
}
