/* The device patch on the host: real threads, and warps of lanes that are coroutines. Built by on_host.py,
 * together with the arena decoder. */
#define _DEFAULT_SOURCE
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include "decode/pages.h"
#include "patch_on_host.h"

#define CK_PATCH int
#define CK_INLINE static inline
#define CK_NOINLINE static

#define ORDER __ATOMIC_RELAXED
#define AS(type, address) ((type *)(uintptr_t)(address))

CK_INLINE ck_u32 load(ck_u64 address)
{
    return __atomic_load_n(AS(ck_u32, address), ORDER);
}
CK_INLINE ck_u64 load64(ck_u64 address)
{
    return __atomic_load_n(AS(ck_u64, address), ORDER);
}
CK_INLINE ck_u32 load_coherent(ck_u64 address)
{
    return load(address);
}
CK_INLINE ck_u64 load_coherent64(ck_u64 address)
{
    return load64(address);
}
CK_INLINE void store(ck_u64 address, ck_u32 value)
{
    __atomic_store_n(AS(ck_u32, address), value, ORDER);
}
CK_INLINE void store64(ck_u64 address, ck_u64 value)
{
    __atomic_store_n(AS(ck_u64, address), value, ORDER);
}
CK_INLINE ck_entry load_entry(ck_u64 address)
{
    return (ck_entry){load64(address), load64(address + 8)};
}

static long atomic_calls;

CK_INLINE void count_atomic(void)
{
    __atomic_fetch_add(&atomic_calls, 1, ORDER);
}
CK_INLINE ck_u32 atomic_or(ck_u64 address, ck_u32 bits)
{
    count_atomic();
    return __atomic_fetch_or(AS(ck_u32, address), bits, ORDER);
}
CK_INLINE ck_u32 atomic_add(ck_u64 address, ck_u32 value)
{
    count_atomic();
    return __atomic_fetch_add(AS(ck_u32, address), value, ORDER);
}
CK_INLINE void set_bits(ck_u64 address, ck_u32 bits)
{
    atomic_or(address, bits);
}
CK_INLINE ck_u64 atomic_claim(ck_u64 address, ck_u64 value)
{
    ck_u64 current = 0;
    count_atomic();
    __atomic_compare_exchange_n(AS(ck_u64, address), &current, value, false, ORDER, ORDER);
    return current;
}

/* --- warps ------------------------------------------------------------------------------------------ */

/* A lane runs until it calls a warp function. When all lanes wait, those that wait at the same code location of the
 * program are resumed together, as if they had run in lockstep. Lanes with a different number of loop
 * iterations are kept apart, because nothing reconverges them. A thread outside a warp is a warp of one
 * lane. */
static __thread struct {
    ucontext_t lane[LANES], warp;
    const void *location[LANES]; /* code location at which the lane waits; NULL: finished */
    ck_u32 sent[LANES], received[LANES], iterations[LANES], resumed_lanes;
    int running_lane; /* the running lane, from 1; 0: no warp */
} warp;

static ck_u32 exchange(const void *location, ck_u32 value)
{
    if (!warp.running_lane)
        return 1;
    const int lane = warp.running_lane - 1;
    warp.location[lane] = location, warp.sent[lane] = value;
    swapcontext(&warp.lane[lane], &warp.warp);
    return warp.resumed_lanes;
}

/* Called at the start of each iteration of the search for a page. */
CK_INLINE ck_entry load_entry_coherent(ck_u64 address)
{
    if (warp.running_lane)
        warp.iterations[warp.running_lane - 1]++;
    return load_entry(address);
}

CK_INLINE ck_u32 lane_id(void)
{
    return warp.running_lane ? warp.running_lane - 1 : 0;
}

#define CALL_SITE __builtin_return_address(0)
#define OUT_OF_LINE __attribute__((noinline, noclone)) static
OUT_OF_LINE ck_u32 active_lanes(void)
{
    return exchange(CALL_SITE, 0);
}
OUT_OF_LINE ck_u32 active_lanes_with_same(bool value)
{
    exchange(CALL_SITE, value);
    ck_u32 lanes = 0;
    for (ck_u32 i = 0; i < LANES && warp.running_lane; i++)
        lanes |= (warp.resumed_lanes >> i & 1 && warp.received[i] == value) ? 1u << i : 0;
    return warp.running_lane ? lanes : 1;
}
OUT_OF_LINE ck_u32 from_left_lane(ck_u32 value)
{
    exchange(CALL_SITE, value);
    return warp.running_lane > 1 ? warp.received[warp.running_lane - 2] : value;
}
CK_INLINE ck_u32 lane_bit(void)
{
    return 1u << lane_id();
}
CK_INLINE bool is_leader(ck_u32 threads)
{
    return lane_id() == (ck_u32)__builtin_ctz(threads);
}
CK_INLINE bool has_left_lane(ck_u32 threads, ck_u32 self)
{
    return threads & self >> 1;
}
CK_INLINE ck_u32 lanes_until_next(ck_u32 head_lanes, ck_u32 self)
{
    const ck_u32 higher_lanes = 0u - self - self, next = head_lanes & higher_lanes;
    return higher_lanes & ((next & -next) - 1);
}
CK_INLINE ck_u32 popcount(ck_u32 word)
{
    return __builtin_popcount(word);
}
CK_INLINE ck_u32 wrapping_mask(ck_u32 position, ck_u32 width)
{
    return ((1u << (width & 31)) - 1) << (position & 31);
}
CK_INLINE ck_u32 clipped_mask(ck_u32 position, ck_u32 width)
{
    return (width < 32 ? (1u << width) - 1 : ~0u) << (position & 31);
}
CK_INLINE ck_u32 make_opaque(ck_u32 value)
{
    return value;
}
#define rematerialized(value) (value)
CK_INLINE ck_u64 make_u64(ck_u32 low, ck_u32 high)
{
    return (ck_u64)high << 32 | low;
}
#define reload(variable) (variable)

static ck_u64 current_grid_id;
void set_grid_id(ck_u64 number)
{
    current_grid_id = number;
}
CK_INLINE ck_u32 grid_id(void)
{
    return (ck_u32)current_grid_id;
}

#include "accesses.cu"

/* --- interface for the tests ------------------------------------------------------------------ */

typedef struct {
    ck_u64 userdata, address;
    ck_u32 count, bytes, flags, start_index;
} access_sequence;

static void *run_sequence(void *argument)
{
    const access_sequence *sequence = argument;
    for (ck_u32 i = 0; i < sequence->count; i++) {
        ck_u32 index = (i + sequence->start_index) % sequence->count;
        ck_u64 address = sequence->address + (ck_u64)index * sequence->bytes;
        ck_memory_access(sequence->userdata, 0, address, sequence->bytes, sequence->flags, NULL);
    }
    return NULL;
}

#define THREADS 8

/* Access the same memory in several threads, each starting at a different address. */
void touch_in_threads(ck_u64 userdata, ck_u64 address, ck_u32 count, ck_u32 bytes, ck_u32 flags)
{
    pthread_t thread[THREADS];
    access_sequence sequences[THREADS];
    for (ck_u32 i = 0; i < THREADS; i++) {
        sequences[i] = (access_sequence){userdata, address, count, bytes, flags, i % 4 * (count / 4)};
        pthread_create(&thread[i], NULL, run_sequence, &sequences[i]);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(thread[i], NULL);
}

static __thread const warp_access *current_access;

static void run_lane(void)
{
    const int lane = warp.running_lane - 1;
    const warp_access *accesses = current_access;
    if (accesses->copy)
        ck_copy_async(accesses->userdata, 0, accesses->address[lane], 0, accesses->bytes, accesses->zeros[lane]);
    else
        ck_memory_access(accesses->userdata, 0, accesses->address[lane], accesses->bytes, accesses->flags, NULL);
    warp.location[lane] = NULL;
}

static bool in_step(int lane, int other_lane)
{
    return warp.location[lane] == warp.location[other_lane] &&
           warp.iterations[lane] == warp.iterations[other_lane];
}

static void resume(ck_u32 lanes)
{
    for (int i = 0; i < LANES; i++)
        if (lanes >> i & 1) {
            warp.running_lane = i + 1;
            swapcontext(&warp.warp, &warp.lane[i]);
            warp.running_lane = 0;
        }
}

/* Make the accesses of all lanes of a warp with one instruction. */
void access_in_warp(const warp_access *accesses)
{
    enum { STACK = 1 << 16 };
    char *stacks = malloc(LANES * STACK);
    current_access = accesses;
    for (int i = 0; i < LANES; i++)
        if (accesses->lanes >> i & 1) {
            getcontext(&warp.lane[i]);
            warp.lane[i].uc_stack.ss_sp = stacks + i * STACK;
            warp.lane[i].uc_stack.ss_size = STACK;
            warp.lane[i].uc_link = &warp.warp;
            makecontext(&warp.lane[i], run_lane, 0);
            warp.location[i] = run_lane;
            warp.iterations[i] = 0;
        }
    resume(accesses->lanes);
    for (;;) {
        ck_u32 waiting = 0, in_lockstep = 0;
        for (int i = 0; i < LANES; i++)
            if (accesses->lanes >> i & 1 && warp.location[i]) {
                waiting |= 1u << i;
                if (in_step(i, __builtin_ctz(waiting)))
                    in_lockstep |= 1u << i;
            }
        if (!waiting)
            break;
        warp.resumed_lanes = in_lockstep;
        memcpy(warp.received, warp.sent, sizeof warp.received);
        resume(in_lockstep);
    }
    free(stacks);
}

/* Reserve address space: most of an arena is never touched. */
void *new_arena(ck_u32 entries_log2, ck_u32 pages)
{
    const size_t bytes = CK_ARENA_BYTES(entries_log2, pages);
    char *all = mmap(NULL, bytes + CK_ALIGNMENT, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    char *aligned = AS(char, ((ck_u64)all + CK_ALIGNMENT - 1) & ~(CK_ALIGNMENT - 1));
    munmap(all, aligned - all);
    munmap(aligned + bytes, all + CK_ALIGNMENT - aligned);
    *(ck_header *)aligned = (ck_header){
        .format = CK_FORMAT,
        .page_capacity = pages,
        .pages_offset = CK_PAGES_OFFSET(entries_log2),
        .chunks_offset = CK_CHUNKS_OFFSET(entries_log2),
    };
    return aligned;
}

void free_arena(void *arena, ck_u32 log2)
{
    munmap(arena, CK_ARENA_BYTES(log2, ((ck_header *)arena)->page_capacity));
}
ck_u64 userdata_of(void *arena, ck_u32 log2, ck_u32 launch)
{
    return CK_USERDATA(arena, log2, launch);
}
long atomic_count(void)
{
    return atomic_calls;
}
ck_u32 claimed_page_count(const ck_header *arena)
{
    return arena->requested_pages < arena->page_capacity ? arena->requested_pages : arena->page_capacity;
}
const char *pages_of(const char *arena, ck_u32 log2)
{
    return arena + CK_PAGES_OFFSET(log2);
}
const char *bitmap_in(const char *arena, ck_u32 log2, ck_u32 page)
{
    return arena + CK_BITMAP_OFFSET(log2, page);
}
const char *summary_in(const char *arena, ck_u32 log2, ck_u32 page)
{
    return arena + CK_SUMMARY_OFFSET(log2, page);
}
const char *maps_of(const char *arena, ck_u32 log2)
{
    return arena + CK_MAPS_OFFSET(log2);
}
const char *boxes_of(const char *arena, ck_u32 log2)
{
    return arena + CK_BOXES_OFFSET(log2);
}

typedef struct {
    access_range *ranges;
    size_t count, size;
} range_buffer;

static void append_range(void *context, const access_range *range)
{
    range_buffer *buffer = context;
    if (buffer->count < buffer->size)
        buffer->ranges[buffer->count] = *range;
    buffer->count++;
}

/* Return the number of ranges; write those that fit into ``size``. */
size_t read_ranges(const ck_page *pages, void *bitmaps, size_t count, access_range *ranges, size_t size)
{
    range_buffer buffer = {ranges, 0, size};
    return pages_to_ranges(pages, bitmaps, count, append_range, &buffer) ? buffer.count : (size_t)-1;
}
