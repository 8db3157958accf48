#define _GNU_SOURCE
#include "write/spool.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "containers.h"

#define SEGMENT_BYTES ((size_t)4 << 20)
#define TEXT_LIMIT 65536 /* longer than any kernel name */

typedef struct {
    char magic[8];
    uint32_t version, record_bytes, clock, reserved;
    uint64_t end;
} header;

typedef struct __attribute__((packed)) {
    char tag[4];
    uint32_t items;
    uint64_t bytes;
} block;

static char directory[PATH_MAX - 64];
static char *segment; /* NULL: no open segment */
static size_t used;
static unsigned segments, chain; /* chain: incremented when this process id has already written a trace (exec) */
static uint32_t strings, stacks;
static table known_strings; /* by hash */
static uint64_t lost, written;
static int lost_because;

void spool_open(const char *path)
{
    snprintf(directory, sizeof directory, "%s", path);
}

static void drop_segment(void)
{
    if (segment)
        munmap(segment, SEGMENT_BYTES);
    segment = NULL;
}

void spool_close(void)
{
    drop_segment();
}

void spool_forked(void)
{
    drop_segment();
    table_clear(&known_strings);
    segments = chain = 0;
    strings = stacks = 0;
    lost = written = 0;
}

static char *map_file(const char *path)
{
    int file = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (file < 0)
        return NULL;
    /* Allocate the file now: a full disk is an error here, but would be SIGBUS in the user's program later. */
    int failed = posix_fallocate(file, 0, (off_t)SEGMENT_BYTES);
    void *mapped = MAP_FAILED;
    if (!failed)
        mapped = mmap(NULL, SEGMENT_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    int why = failed ? failed : errno;
    close(file);
    if (mapped == MAP_FAILED) {
        unlink(path);
        errno = why;
        return NULL;
    }
    return mapped;
}

/* Build the path of the next segment. After exec, a process finds the segments of the previous program under
 * its own process id. */
static void name_segment(char *path, size_t bytes)
{
    char name[32];
    do {
        snprintf(name, sizeof name, chain ? "%d.%u" : "%d", (int)getpid(), chain);
        snprintf(path, bytes, "%s/%s-%06u.trace", directory, name, segments);
    } while (!segments && !access(path, F_OK) && ++chain);
}

static int next_segment(void)
{
    char path[PATH_MAX], partial[PATH_MAX + sizeof ".new"];
    name_segment(path, sizeof path);
    snprintf(partial, sizeof partial, "%s.new", path);
    char *fresh = map_file(partial);
    if (!fresh)
        return -1;
    header head = {"cudakit", 1, sizeof(record), 1, 0, sizeof(header)};
    head.magic[7] = '\n';
    memcpy(fresh, &head, sizeof head);
    if (rename(partial, path)) {
        munmap(fresh, SEGMENT_BYTES);
        return -1;
    }
    drop_segment();
    segment = fresh;
    used = sizeof head;
    segments++;
    return 0;
}

/* Append a block so that a reader sees all of it or nothing. */
static int append(const char *tag, uint32_t items, const void *payload, size_t bytes)
{
    size_t needed = sizeof(block) + bytes;
    if ((!segment || used + needed > SEGMENT_BYTES) && next_segment())
        return -1;
    block head = {{tag[0], tag[1], tag[2], tag[3]}, items, bytes};
    memcpy(segment + used, &head, sizeof head);
    memcpy(segment + used + sizeof head, payload, bytes);
    used += needed;
    __atomic_store_n(&((header *)segment)->end, used, __ATOMIC_RELEASE);
    return 0;
}

void spool_records(const record *records, size_t count)
{
    if (append("rcds", (uint32_t)count, records, count * sizeof *records)) {
        lost += count;
        lost_because = errno;
    } else {
        written += count;
    }
}

static uint64_t hash_of(const char *text, size_t length)
{
    uint64_t hash = 0xcbf29ce484222325ull; /* FNV-1a */
    for (size_t i = 0; i < length; i++)
        hash = (hash ^ (uint8_t)text[i]) * 0x100000001b3ull;
    return hash ? hash : 1;
}

uint32_t spool_text(const char *text)
{
    static char payload[sizeof(uint32_t) + TEXT_LIMIT]; /* protected by the lock */
    uint32_t length = text ? (uint32_t)strnlen(text, TEXT_LIMIT) : 0;
    if (!length)
        return 0;
    uint64_t hash = hash_of(text, length);
    uint32_t number = table_get(&known_strings, hash);
    if (number)
        return number;
    memcpy(payload, &length, sizeof length);
    memcpy(payload + sizeof length, text, length);
    if (append("text", 1, payload, sizeof length + length))
        return 0;
    table_put(&known_strings, hash, ++strings);
    return strings;
}

uint32_t spool_stack(const spool_frame *frames, uint32_t depth)
{
    uint32_t payload[1 + 3 * 256];
    if (!depth || depth > 256)
        return 0;
    payload[0] = depth;
    memcpy(payload + 1, frames, depth * sizeof *frames);
    if (append("stak", 1, payload, sizeof(uint32_t) * (1 + 3 * depth)))
        return 0;
    return ++stacks;
}

uint64_t spool_lost(int *why)
{
    *why = lost_because;
    return lost;
}

uint64_t spool_written(void)
{
    return written;
}
