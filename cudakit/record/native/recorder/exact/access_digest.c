#include "exact/access_digest.h"

#include <stdlib.h>

#include "decode/byte_set_hash.h"
#include "model/allocations.h"
#include "patch/arena.h"
#include "recorder.h"

/* --- footprints ---------------------------------------------------------------------------------- */

/* Number of ranges at which joining stops. One range for reads and one for writes of each pointer remain in any case. */
#define SIMPLE_RANGE_COUNT 32

static int compare_ranges(const void *left, const void *right)
{
    const footprint_range *a = left, *b = right;
    if (a->is_write != b->is_write)
        return a->is_write ? 1 : -1;
    if (a->pointer_index != b->pointer_index)
        return a->pointer_index < b->pointer_index ? -1 : 1;
    return a->begin < b->begin ? -1 : a->begin > b->begin;
}

/* Ranges that are less than this number of bytes apart are joined when they are added. */
#define MIN_GAP_BYTES 256
/* Ranges of addresses that are further apart are not joined, because other allocations may be between the ranges. */
#define MAX_ADDRESS_GAP_BYTES 512

/* Join sorted ranges of the same pointer that are at most ``gap_bytes`` apart. */
static void join_ranges(footprint *accesses, uint64_t gap_bytes)
{
    size_t kept_count = 0;
    for (size_t i = 0; i < accesses->range_count; i++) {
        const footprint_range range = accesses->ranges[i];
        footprint_range *last = kept_count ? accesses->ranges + kept_count - 1 : NULL;
        const uint64_t gap_limit = range.pointer_index == NO_POINTER && gap_bytes > MAX_ADDRESS_GAP_BYTES
                                       ? MAX_ADDRESS_GAP_BYTES
                                       : gap_bytes;
        if (last && last->is_write == range.is_write && last->pointer_index == range.pointer_index &&
            range.begin <= last->end + gap_limit)
            last->end = range.end > last->end ? range.end : last->end;
        else
            accesses->ranges[kept_count++] = range;
    }
    accesses->range_count = kept_count;
}

/* Join ranges until at most ``range_count`` remain, or no more ranges can be joined. */
static void simplify_to(footprint *accesses, size_t range_count)
{
    qsort(accesses->ranges, accesses->range_count, sizeof *accesses->ranges, compare_ranges);
    join_ranges(accesses, 0);
    for (uint64_t gap_bytes = 256; accesses->range_count > range_count && gap_bytes <= UINT64_C(1) << 48;
         gap_bytes *= 4) {
        join_ranges(accesses, gap_bytes);
        accesses->has_gaps = true;
    }
}

/* Return the last added range if a new range begins in it or shortly behind it, so that both become one range; else NULL.
 * Most launches access bytes in ascending order. */
static footprint_range *extended_range(footprint *accesses, footprint_range range)
{
    footprint_range *last = accesses->range_count ? accesses->ranges + accesses->range_count - 1 : NULL;
    const bool is_extended = last && last->is_write == range.is_write &&
                             last->pointer_index == range.pointer_index && range.begin >= last->begin &&
                             range.begin <= last->end + MIN_GAP_BYTES;
    return is_extended ? last : NULL;
}

void footprint_add(footprint *accesses, footprint_range range)
{
    footprint_range *last = extended_range(accesses, range);
    if (last) {
        last->end = range.end > last->end ? range.end : last->end;
        return;
    }
    if (accesses->range_count == FOOTPRINT_CAPACITY)
        simplify_to(accesses, FOOTPRINT_CAPACITY / 2);
    if (accesses->range_count == FOOTPRINT_CAPACITY) { /* the ranges are too far apart to be joined */
        accesses->is_incomplete = true;
        return;
    }
    accesses->ranges[accesses->range_count++] = range;
}

bool footprint_is_contiguous(const footprint *accesses)
{
    bool is_contiguous = !accesses->has_gaps;
    for (size_t i = 0; is_contiguous && i < accesses->range_count; i++)
        is_contiguous = accesses->ranges[i].pointer_index != NO_POINTER && !accesses->ranges[i].begin;
    return is_contiguous;
}

void footprint_simplify(footprint *accesses)
{
    simplify_to(accesses, SIMPLE_RANGE_COUNT);
}

/* --- digests ------------------------------------------------------------------------------------- */

/* If a set has more pieces than this, the memory between the pieces counts as accessed when the set is compared with
 * the allocations that the launch reaches. */
#define MAX_PIECES_TO_FIND 65536

static int compare_addresses(const void *left, const void *right)
{
    const uint64_t a = ((const indexed_pointer *)left)->address, b = ((const indexed_pointer *)right)->address;
    return (a > b) - (a < b);
}

void digest_begin(access_digest *digest, const uint64_t *pointers, size_t pointer_count,
                  const reached_range *reached, size_t reached_count)
{
    digest->hash = 0;
    digest->range_count = digest->reached_index = digest->footprint.range_count = 0;
    digest->footprint.has_gaps = false;
    digest->is_inside = true;
    digest->footprint.is_incomplete = false;
    digest->reached = reached;
    digest->reached_count = reached_count;
    digest->pointer_count = pointer_count;
    for (size_t i = 0; i < pointer_count; i++)
        digest->pointers[i] = (indexed_pointer){pointers[i], (uint32_t)i};
    if (pointer_count > 1)
        qsort(digest->pointers, pointer_count, sizeof *digest->pointers, compare_addresses);
}

/* --- reached memory ------------------------------------------------------------------------------ */

/* Return the reached allocation that contains an address, or NULL. */
static const reached_range *find_reached(access_digest *digest, uint64_t address)
{
    for (size_t i = 0; i < digest->reached_count; i++, digest->reached_index++) {
        if (digest->reached_index >= digest->reached_count)
            digest->reached_index = 0;
        const reached_range *reached = digest->reached + digest->reached_index;
        if (reached->lo <= address &&address < reached->hi)
            return reached;
    }
    return NULL;
}

/* Return whether the launch reaches a piece. If not, mark the allocations that have bytes of the piece as
 * contested (model/access_history.h). Takes the recorder lock. */
static bool piece_is_reached(access_digest *digest, uint64_t lo, uint64_t hi)
{
    const reached_range *reached;
    uint64_t address = lo;
    while (address < hi && (reached = find_reached(digest, address)))
        address = reached->hi; /* the next allocation may be adjacent */
    if (address >= hi)
        return true;
    pthread_mutex_lock(&recorder_lock);
    allocations_mark_contested(lo, hi);
    pthread_mutex_unlock(&recorder_lock);
    return false;
}

/* Return whether the launch reaches all bytes of several pieces. More than MAX_PIECES_TO_FIND pieces are treated
 * as one piece, with the bytes between them. If the launch does not reach all bytes, mark the allocations that
 * have bytes of the pieces as contested. Takes the recorder lock. */
static bool pieces_are_reached(access_digest *digest, uint64_t lo, uint64_t bytes, uint64_t stride, uint64_t count)
{
    const uint64_t hi = lo + (count - 1) * stride + bytes;
    const reached_range *reached = find_reached(digest, lo);
    bool are_reached = true;
    if (count == 1 || count > MAX_PIECES_TO_FIND || (reached && hi <= reached->hi))
        return piece_is_reached(digest, lo, hi);
    for (uint64_t i = 0; i < count; i++)
        are_reached = piece_is_reached(digest, lo + i * stride, lo + i * stride + bytes) && are_reached;
    return are_reached;
}

/* --- ranges ---------------------------------------------------------------------------------------- */

static uint64_t mix(uint64_t hash, uint64_t value)
{
    hash = (hash ^ value) * 0x9E3779B97F4A7C15ull;
    return hash ^ hash >> 29;
}

/* Return the number of pointers at or below an address. */
static size_t count_pointers_to(const access_digest *digest, uint64_t address)
{
    size_t low = 0, high = digest->pointer_count;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (digest->pointers[middle].address <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The kernel that accesses bytes, and the mode of the access. */
typedef struct {
    uint64_t hash; /* hash of mode and node */
    bool is_write;
} access_kind;

/* Add accessed pieces of memory. No pointer points into a piece, except to its first byte. Takes the recorder
 * lock. */
static void add_pieces(access_digest *digest, access_kind kind, uint64_t lo, uint64_t bytes, uint64_t stride,
                       uint64_t count)
{
    const size_t pointers_below = count_pointers_to(digest, lo);
    const indexed_pointer *pointer = pointers_below ? digest->pointers + pointers_below - 1 : NULL;
    const uint64_t pointer_kind = mix(kind.hash, pointer ? pointer->index + 1 : 0);
    const uint64_t begin = pointer ? lo - pointer->address : lo;
    const uint64_t hash = byte_set_hash(begin, bytes, stride, count);
    const reached_range *reached = find_reached(digest, lo);
    const bool are_reached = pieces_are_reached(digest, lo, bytes, stride, count);
    digest->hash = byte_set_hash_of_union(digest->hash, byte_set_hash_of_kind(hash, pointer_kind));
    digest->range_count++;
    digest->footprint.has_gaps = digest->footprint.has_gaps || (count > 1 && stride > bytes);
    footprint_add(&digest->footprint, (footprint_range){begin, begin + (count - 1) * stride + bytes,
                                                        pointer ? pointer->index : NO_POINTER, kind.is_write});
    digest->is_inside = digest->is_inside && are_reached &&
                        (!digest->pointer_count || (pointer && pointer->address >= reached->lo));
}

void digest_add(access_digest *digest, uint32_t node, uint32_t mode, uint64_t lo, uint64_t bytes, uint64_t stride,
                uint64_t count)
{
    const access_kind kind = {mix(mix(1, node), mode), mode != CK_READ};
    const uint64_t end = lo + (count - 1) * stride + bytes;
    uint64_t piece = 0,
             begin = lo; /* not yet added: piece number ``piece`` from ``begin`` on, and all later pieces */
    for (size_t next = count_pointers_to(digest, lo); piece < count; next++) {
        const bool has_pointer = next < digest->pointer_count && digest->pointers[next].address < end;
        const uint64_t limit = has_pointer ? digest->pointers[next].address : end;
        const uint64_t piece_end = lo + piece * stride + bytes;
        if (begin > lo + piece * stride) { /* a pointer divides this piece */
            add_pieces(digest, kind, begin, (piece_end < limit ? piece_end : limit) - begin, 0, 1);
            begin = limit;
            if (piece_end > limit)
                continue;
            piece++;
        }
        const uint64_t pieces_below = limit < lo + bytes ? 0 : count == 1 ? 1 : (limit - lo - bytes) / stride + 1;
        const uint64_t piece_limit = pieces_below < count ? pieces_below : count;
        if (piece_limit > piece)
            add_pieces(digest, kind, lo + piece * stride, bytes, piece_limit - piece > 1 ? stride : 0,
                       piece_limit - piece);
        piece = piece_limit > piece ? piece_limit : piece;
        begin = lo + piece * stride;
        if (piece < count && begin < limit) { /* the pointer is inside this piece */
            add_pieces(digest, kind, begin, limit - begin, 0, 1);
            begin = limit;
        }
    }
}
