/* Estimates how much space in an arena a launch needs.
 *
 * A launch that runs out of pages loses accesses and cannot be repeated. Therefore space is reserved before a launch:
 * the maximum that the same kernel has needed with the same number of threads. The number of threads alone is a bad
 * estimate: the foreach kernels of PyTorch access a thousand pages with few threads.
 */
#include "exact/space_estimates.h"

#include <string.h>

#include "containers.h"

#define MAX_SIGNATURES 65536
/* A typical thread of a kernel that streams memory reads and writes 32 bytes. */
#define THREADS_PER_PAGE (CK_BITMAP_BITS * 4 / 32 / 2)
/* Estimated number of pages for a new kernel: most kernels of training programs need fewer pages. */
#define MIN_UNKNOWN_PAGES 256

static hash_table signature_numbers; /* indices of ``known_space``, by signature */
static arena_space known_space[MAX_SIGNATURES];
static uint32_t known_space_count;
/* Number of pages and number of boxes of each launch, by launch index; protected by the reader lock */
static uint32_t launch_pages[CK_MAX_LAUNCHES], launch_boxes[CK_MAX_LAUNCHES];

uint64_t space_signature(const void *function, uint64_t threads)
{
    return ((uint64_t)(uintptr_t)function * 0x9E3779B97F4A7C15ull ^ threads * 0xD6E8FEB86659FD93ull) | 1;
}

arena_space space_estimate(uint64_t signature, uint64_t threads)
{
    uint32_t signature_number = hash_table_get(&signature_numbers, signature);
    if (signature_number)
        return known_space[signature_number];
    const uint64_t estimated_pages = threads / THREADS_PER_PAGE;
    return (arena_space){.pages = estimated_pages < MIN_UNKNOWN_PAGES ? MIN_UNKNOWN_PAGES : estimated_pages};
}

void space_count_used(uint32_t launches, const arena_copy *copy)
{
    const ck_header *header = &copy->top.header;
    const size_t box_count = header->requested_boxes < CK_MAX_BOXES ? header->requested_boxes : CK_MAX_BOXES;
    memset(launch_pages, 0, launches * sizeof *launch_pages);
    memset(launch_boxes, 0, launches * sizeof *launch_boxes);
    for (size_t i = 0; i < copy->pages.page_count; i++)
        launch_pages[CK_KEY_LAUNCH(copy->pages.pages[i].key)]++;
    for (size_t i = 0; i < box_count; i++)
        launch_boxes[copy->boxes[i].launch & (CK_MAX_LAUNCHES - 1)]++;
}

static void update_known_space(uint64_t signature, arena_space needed_space)
{
    if (!signature)
        return; /* the driver call that launched the kernel is not subscribed */
    uint32_t signature_number = hash_table_get(&signature_numbers, signature);
    if (!signature_number && known_space_count + 1 >= MAX_SIGNATURES)
        space_clear(); /* the signatures of launches that repeat are stored again */
    if (!signature_number && hash_table_put(&signature_numbers, signature, known_space_count + 1))
        return;
    if (!signature_number)
        known_space[signature_number = ++known_space_count] = (arena_space){0};
    if (known_space[signature_number].pages < needed_space.pages)
        known_space[signature_number].pages = needed_space.pages;
    if (known_space[signature_number].boxes < needed_space.boxes)
        known_space[signature_number].boxes = needed_space.boxes;
}

void space_store_needed(const launch_arena *arena, const arena_copy *copy)
{
    for (const launch_group *group = arena->groups; group < arena->groups + arena->group_count; group++) {
        arena_space needed_space = {0};
        bool is_lower_bound = false;
        for (uint32_t i = group->first_launch_index; i < group->first_launch_index + group->launch_index_count;
             i++) {
            needed_space.pages += launch_pages[i];
            needed_space.boxes += launch_boxes[i];
            is_lower_bound =
                is_lower_bound || (copy->top.header.lost_launches && copy->lost_bits[i / 32] >> (i & 31) & 1);
        }
        if (is_lower_bound) /* the launch lost accesses, so it needs more space than was counted */
            needed_space.pages *= 2, needed_space.boxes *= 2;
        update_known_space(group->space_signature, needed_space);
    }
}

void space_clear(void)
{
    hash_table_clear(&signature_numbers);
    known_space_count = 0;
}
