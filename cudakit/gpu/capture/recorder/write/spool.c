#define _GNU_SOURCE
#include "write/spool.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include "containers.h"

/* A smaller file is better than none on a disk that is almost full. */
#define SEGMENT_BYTES ((size_t)4 << 20)
#define MIN_SEGMENT_BYTES ((size_t)64 << 10)
/* Creating a file on a full disk takes far longer than a record should. */
#define FAILURES_PER_TRIAL 256
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
static size_t used, segment_bytes;
static bool abandoned;           /* the reader no longer exists */
static unsigned segments, chain; /* chain: incremented when this process id has already written a trace (exec) */
static uint32_t strings, stacks;
static uint32_t failures;   /* to begin a segment, since the last success */
static table known_strings; /* by hash */
static uint64_t lost, reported_lost, written;
static int lost_because;

void spool_open(const char *path)
{
    snprintf(directory, sizeof directory, "%s", path);
    abandoned = false;
}

static void drop_segment(void)
{
    if (segment)
        munmap(segment, segment_bytes);
    segment = NULL;
}

void spool_forked(void)
{
    drop_segment();
    table_clear(&known_strings);
    segments = chain = failures = 0;
    strings = stacks = 0;
    lost = reported_lost = written = 0;
}

/* Create and map a file; on failure return NULL and set ``why`` to the errno. */
static char *map_file(const char *path, size_t bytes, int *why)
{
    int file = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    *why = file < 0 ? errno : 0;
    if (file < 0)
        return NULL;
    /* Allocate the file now: a full disk is an error here, but would be SIGBUS in the user's program later. */
    *why = posix_fallocate(file, 0, (off_t)bytes);
    void *mapped = MAP_FAILED;
    if (!*why) {
        mapped = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        *why = mapped == MAP_FAILED ? errno : 0;
    }
    close(file);
    if (*why)
        unlink(path);
    return *why ? NULL : mapped;
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

static char *map_file_that_fits(const char *path, size_t *bytes)
{
    int why = ENOSPC;
    char *mapped = NULL;
    size_t wanted = SEGMENT_BYTES;
    for (; !mapped && wanted >= MIN_SEGMENT_BYTES && (why == ENOSPC || why == EDQUOT || why == EFBIG);
         wanted /= 2) {
        mapped = map_file(path, wanted, &why);
        *bytes = wanted;
    }
    errno = why;
    return mapped;
}

/* Delete the directory of a reader that no longer exists. All of its files are cudakit's. */
static void delete_directory(void)
{
    DIR *open_directory = opendir(directory);
    if (!open_directory)
        return;
    const int descriptor = dirfd(open_directory);
    for (struct dirent *entry; descriptor >= 0 && (entry = readdir(open_directory));)
        unlinkat(descriptor, entry->d_name, 0);
    closedir(open_directory);
    rmdir(directory);
}

/* Open the file in which a supervisor expects the losses; -1: there is no supervisor. */
static int open_losses(void)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/losses", directory);
    return open(path, O_RDWR | O_CLOEXEC);
}

static bool has_reader(void)
{
    int losses = abandoned ? -1 : open_losses();
    if (losses >= 0 && !flock(losses, LOCK_EX | LOCK_NB)) {
        abandoned = true;
        drop_segment();
        delete_directory();
    }
    if (losses >= 0)
        close(losses);
    return !abandoned;
}

static uint64_t hash_of(const char *text, size_t length)
{
    uint64_t hash = 0xcbf29ce484222325ull; /* FNV-1a */
    for (size_t i = 0; i < length; i++)
        hash = (hash ^ (uint8_t)text[i]) * 0x100000001b3ull;
    return hash ? hash : 1;
}

static int next_segment(void)
{
    char path[PATH_MAX], partial[PATH_MAX + sizeof ".new"];
    name_segment(path, sizeof path);
    snprintf(partial, sizeof partial, "%s.new", path);
    size_t bytes = 0;
    if (!has_reader())
        return -1;
    if (failures % FAILURES_PER_TRIAL) {
        failures++;
        return -1;
    }
    char *fresh = map_file_that_fits(partial, &bytes);
    failures = fresh ? 0 : failures + 1;
    if (!fresh)
        return -1;
    header head = {"cudakit", 1, sizeof(record), 1, 0, sizeof(header)};
    head.magic[7] = '\n';
    memcpy(fresh, &head, sizeof head);
    if (rename(partial, path)) {
        munmap(fresh, bytes);
        return -1;
    }
    drop_segment();
    segment = fresh;
    segment_bytes = bytes;
    used = sizeof head;
    segments++;
    return 0;
}

/* Append a block so that a reader sees all of it or nothing. */
static int append(const char *tag, uint32_t items, const void *payload, size_t bytes)
{
    size_t needed = sizeof(block) + bytes;
    if ((!segment || used + needed > segment_bytes) && next_segment())
        return -1;
    if (used + needed > segment_bytes) { /* a small segment, on a disk that is almost full */
        errno = ENOSPC;
        return -1;
    }
    block head = {{tag[0], tag[1], tag[2], tag[3]}, items, bytes};
    memcpy(segment + used, &head, sizeof head);
    memcpy(segment + used + sizeof head, payload, bytes);
    used += needed;
    __atomic_store_n(&((header *)segment)->end, used, __ATOMIC_RELEASE);
    return 0;
}

#define LOSS_SLOTS 256

/* Write the number of lost records to this process's slot of the file ``losses``, which needs no new disk space: when the
 * number has doubled, and at the end. */
static void report_loss(bool is_last)
{
    const uint64_t slot[3] = {(uint64_t)getpid(), lost, (uint64_t)lost_because};
    uint64_t owner = 1;
    if (lost == reported_lost || abandoned || (!is_last && lost < 2 * reported_lost))
        return;
    reported_lost = lost;
    int losses = open_losses();
    for (uint64_t i = 0; losses >= 0 && i < LOSS_SLOTS; i++) {
        const off_t at = (off_t)((slot[0] + i) % LOSS_SLOTS * sizeof slot);
        if (pread(losses, &owner, sizeof owner, at) == sizeof owner && (!owner || owner == slot[0]) &&
            pwrite(losses, slot, sizeof slot, at) == sizeof slot)
            break;
    }
    if (losses >= 0)
        close(losses);
}

void spool_close(void)
{
    report_loss(true);
    if (has_reader())
        drop_segment();
}

void spool_records(const record *records, size_t count)
{
    if (!append("rcds", (uint32_t)count, records, count * sizeof *records)) {
        written += count;
        return;
    }
    lost_because = failures > 1 ? lost_because : errno;
    lost += count;
    report_loss(false);
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

bool spool_has_text(const char *text)
{
    const size_t length = strnlen(text, TEXT_LIMIT);
    return !length || table_get(&known_strings, hash_of(text, length));
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
