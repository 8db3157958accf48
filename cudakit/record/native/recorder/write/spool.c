#define _GNU_SOURCE
#include "write/spool.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include "containers.h"

/* Sizes of a segment: if the disk is almost full, smaller segments are tried, down to the minimum. */
#define SEGMENT_BYTES ((size_t)4 << 20)
#define MIN_SEGMENT_BYTES ((size_t)64 << 10)
/* Number of bytes behind the last record whose pages are allocated ahead: by the decode thread, and by a thread that
 * writes a record to a page that is not allocated. One call for many pages is faster than a page fault for each. */
#define AHEAD_BYTES ((size_t)1 << 20)
#define AHEAD_BYTES_OF_WRITER ((size_t)64 << 10)
#define PAGE_BYTES ((size_t)4096)
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
/* After a failure, a new segment is tried once per this number of records: creating a file on a full disk is slow. */
#define FAILURES_PER_TRIAL 256
#define TEXT_LIMIT 65536 /* maximum length of a string in bytes; kernel names are shorter */

typedef struct {
    char magic[8];
    uint32_t version, record_bytes, clock, reserved;
    uint64_t end_offset;
} segment_header;

typedef struct __attribute__((packed)) {
    char tag[4];
    uint32_t item_count;
    uint64_t item_bytes;
} block_header;

typedef struct {
    char *text;
    uint32_t id;
} written_string;

static char directory[PATH_MAX - 64];
static char *segment; /* start of the mapped file; NULL if no segment is open */
static size_t end_offset, segment_bytes;
/* Protects the mapping of the segment while its pages are allocated, and ``allocated_bytes``, the number of bytes
 * whose pages are allocated. The lock order is recorder lock, then mapping lock. */
static pthread_mutex_t mapping_lock = PTHREAD_MUTEX_INITIALIZER;
static size_t allocated_bytes;
static bool allocation_is_refused; /* the system cannot allocate pages ahead */
static bool reader_is_gone;        /* the process that reads the trace was killed */
static unsigned segment_count;
static unsigned chain_number; /* > 0 if a program before exec wrote a trace under this process id */
static uint32_t string_count, stack_count;
static uint32_t segment_failures; /* number of failures to begin a segment, since the last success */
static written_string *strings;   /* copies of the written strings: two strings can have the same hash */
static size_t string_capacity, stored_string_count;
static hash_table string_numbers; /* index + 1 in ``strings``, by the key that find_string returns */
static uint64_t lost_record_count, reported_lost_record_count, written_record_count;
static int loss_errno;

void spool_open(const char *path)
{
    snprintf(directory, sizeof directory, "%s", path);
    reader_is_gone = false;
}

/* Replace the mapped segment of the spool by a new one; NULL: by none. */
static void set_segment(char *new_segment, size_t new_segment_bytes)
{
    pthread_mutex_lock(&mapping_lock);
    if (segment)
        munmap(segment, segment_bytes);
    segment = new_segment;
    segment_bytes = new_segment_bytes;
    end_offset = sizeof(segment_header);
    allocated_bytes = 0;
    pthread_mutex_unlock(&mapping_lock);
}

static void unmap_segment(void)
{
    set_segment(NULL, 0);
}

/* Allocate the pages of the next ``ahead_bytes`` bytes of the segment. The mapping lock is held. */
static void allocate_pages(size_t ahead_bytes)
{
    const size_t page_offset = __atomic_load_n(&end_offset, __ATOMIC_RELAXED) & ~(PAGE_BYTES - 1);
    const size_t advice_begin = page_offset > allocated_bytes ? page_offset : allocated_bytes;
    const size_t advice_end =
        page_offset + ahead_bytes < segment_bytes ? page_offset + ahead_bytes : segment_bytes;
    if (!segment || advice_begin >= advice_end || allocation_is_refused)
        return;
    if (!madvise(segment + advice_begin, advice_end - advice_begin, MADV_POPULATE_WRITE))
        __atomic_store_n(&allocated_bytes, advice_end, __ATOMIC_RELAXED);
    else if (errno == EINVAL) /* Linux before 5.14; the pages are then allocated when they are written */
        allocation_is_refused = true;
}

void spool_allocate_ahead(void)
{
    pthread_mutex_lock(&mapping_lock);
    allocate_pages(AHEAD_BYTES);
    pthread_mutex_unlock(&mapping_lock);
}

/* Allocate the pages of the next records, which end at ``end``, unless another thread is allocating pages. The
 * recorder lock is held. */
static void allocate_pages_of_records(size_t end)
{
    if (end <= __atomic_load_n(&allocated_bytes, __ATOMIC_RELAXED) || pthread_mutex_trylock(&mapping_lock))
        return;
    allocate_pages(AHEAD_BYTES_OF_WRITER);
    pthread_mutex_unlock(&mapping_lock);
}

static void forget_strings(void)
{
    for (size_t i = 0; i < stored_string_count; i++)
        free(strings[i].text);
    hash_table_clear(&string_numbers);
    stored_string_count = 0;
    string_count = 0;
}

void spool_forked(void)
{
    mapping_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    unmap_segment();
    forget_strings();
    segment_count = chain_number = segment_failures = 0;
    stack_count = 0;
    lost_record_count = reported_lost_record_count = written_record_count = 0;
}

/* Create and map a file. On failure return NULL and set ``error_number`` to the errno. */
static char *map_file(const char *path, size_t file_bytes, int *error_number)
{
    int descriptor = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    *error_number = descriptor < 0 ? errno : 0;
    if (descriptor < 0)
        return NULL;
    /* Allocate the disk space now: a full disk is an error here, but a SIGBUS in the user's program later. */
    *error_number = posix_fallocate(descriptor, 0, (off_t)file_bytes);
    void *mapped_file = MAP_FAILED;
    if (!*error_number) {
        mapped_file = mmap(NULL, file_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
        *error_number = mapped_file == MAP_FAILED ? errno : 0;
    }
    close(descriptor);
    if (*error_number)
        unlink(path);
    return *error_number ? NULL : mapped_file;
}

/* Build the path of the next segment. After exec, segments of the previous program exist under the same process id. */
static void name_segment(char *path, size_t path_bytes)
{
    char name[32];
    do {
        snprintf(name, sizeof name, chain_number ? "%d.%u" : "%d", (int)getpid(), chain_number);
        snprintf(path, path_bytes, "%s/%s-%06u.trace", directory, name, segment_count);
    } while (!segment_count && !access(path, F_OK) && ++chain_number);
}

/* Create and map the largest file that the disk has space for; on failure return NULL with errno set. */
static char *map_file_that_fits(const char *path, size_t *file_bytes)
{
    int error_number = ENOSPC;
    char *mapped_file = NULL;
    size_t attempted_bytes = SEGMENT_BYTES;
    for (; !mapped_file && attempted_bytes >= MIN_SEGMENT_BYTES &&
           (error_number == ENOSPC || error_number == EDQUOT || error_number == EFBIG);
         attempted_bytes /= 2) {
        mapped_file = map_file(path, attempted_bytes, &error_number);
        *file_bytes = attempted_bytes;
    }
    errno = error_number;
    return mapped_file;
}

/* Delete the directory after its reader was killed. It contains only files of cudakit. */
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

/* Open the file in which the reader expects the number of lost records. Return -1 if there is no such file. */
static int open_losses_file(void)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/losses", directory);
    return open(path, O_RDWR | O_CLOEXEC);
}

/* Return whether the reader still exists. If it was killed, delete the directory. */
static bool has_reader(void)
{
    int losses_fd = reader_is_gone ? -1 : open_losses_file();
    if (losses_fd >= 0 && !flock(losses_fd, LOCK_EX | LOCK_NB)) {
        reader_is_gone = true;
        unmap_segment();
        delete_directory();
    }
    if (losses_fd >= 0)
        close(losses_fd);
    return !reader_is_gone;
}

static uint64_t hash_of(const char *text, size_t length)
{
    uint64_t hash = 0xcbf29ce484222325ull; /* FNV-1a */
    for (size_t i = 0; i < length; i++)
        hash = (hash ^ (uint8_t)text[i]) * 0x100000001b3ull;
    return hash ? hash : 1;
}

/* Begin a new segment. Return 0, or -1 if there is no reader or no file can be created. */
static int begin_segment(void)
{
    char path[PATH_MAX], temporary_path[PATH_MAX + sizeof ".new"];
    name_segment(path, sizeof path);
    snprintf(temporary_path, sizeof temporary_path, "%s.new", path);
    size_t mapped_bytes = 0;
    if (!has_reader())
        return -1;
    if (segment_failures % FAILURES_PER_TRIAL) {
        segment_failures++;
        return -1;
    }
    char *new_segment = map_file_that_fits(temporary_path, &mapped_bytes);
    segment_failures = new_segment ? 0 : segment_failures + 1;
    if (!new_segment)
        return -1;
    segment_header header = {"cudakit", 1, sizeof(record), 1, 0, sizeof(segment_header)};
    header.magic[7] = '\n';
    memcpy(new_segment, &header, sizeof header);
    if (rename(temporary_path, path)) {
        munmap(new_segment, mapped_bytes);
        return -1;
    }
    set_segment(new_segment, mapped_bytes);
    segment_count++;
    return 0;
}

/* Append a block so that a reader sees all of it or nothing. Return 0, or -1 with errno set. */
static int append_block(const char *tag, uint32_t item_count, const void *payload, size_t payload_bytes)
{
    size_t block_bytes = sizeof(block_header) + payload_bytes;
    if ((!segment || end_offset + block_bytes > segment_bytes) && begin_segment())
        return -1;
    if (end_offset + block_bytes > segment_bytes) { /* the segment is small, because the disk is almost full */
        errno = ENOSPC;
        return -1;
    }
    allocate_pages_of_records(end_offset + block_bytes);
    block_header header = {{tag[0], tag[1], tag[2], tag[3]}, item_count, payload_bytes};
    memcpy(segment + end_offset, &header, sizeof header);
    memcpy(segment + end_offset + sizeof header, payload, payload_bytes);
    __atomic_store_n(&end_offset, end_offset + block_bytes, __ATOMIC_RELAXED);
    __atomic_store_n(&((segment_header *)segment)->end_offset, end_offset, __ATOMIC_RELEASE);
    return 0;
}

#define LOSS_SLOTS 256

/* Write the number of lost records to this process's slot of the file ``losses``, which needs no new disk space. To
 * save time, this is done only when the number has doubled, and at the end (``is_last``). */
static void report_loss(bool is_last)
{
    const uint64_t slot_words[3] = {(uint64_t)getpid(), lost_record_count, (uint64_t)loss_errno};
    uint64_t slot_pid = 1;
    if (lost_record_count == reported_lost_record_count || reader_is_gone ||
        (!is_last && lost_record_count < 2 * reported_lost_record_count))
        return;
    reported_lost_record_count = lost_record_count;
    int losses_fd = open_losses_file();
    for (uint64_t i = 0; losses_fd >= 0 && i < LOSS_SLOTS; i++) {
        const off_t slot_offset = (off_t)((slot_words[0] + i) % LOSS_SLOTS * sizeof slot_words);
        if (pread(losses_fd, &slot_pid, sizeof slot_pid, slot_offset) == sizeof slot_pid &&
            (!slot_pid || slot_pid == slot_words[0]) &&
            pwrite(losses_fd, slot_words, sizeof slot_words, slot_offset) == sizeof slot_words)
            break;
    }
    if (losses_fd >= 0)
        close(losses_fd);
}

void spool_close(void)
{
    report_loss(true);
    if (has_reader())
        unmap_segment();
}

void spool_records(const record *records, size_t count)
{
    if (!append_block("rcds", (uint32_t)count, records, count * sizeof *records)) {
        written_record_count += count;
        return;
    }
    loss_errno = segment_failures > 1 ? loss_errno : errno;
    lost_record_count += count;
    report_loss(false);
}

/* Return the id of a written string, or 0 if it was not written. Set ``key`` to the key of the string: its hash or, if
 * other strings have this hash, the next free number. */
static uint32_t find_string(const char *text, size_t length, uint64_t *key)
{
    *key = hash_of(text, length);
    for (uint32_t number; (number = hash_table_get(&string_numbers, *key));) {
        const written_string *string = &strings[number - 1];
        if (!strncmp(string->text, text, length) && !string->text[length])
            return string->id;
        *key = *key + 1 ? *key + 1 : 1; /* key 0 means "no entry" */
    }
    return 0;
}

/* Store a string that was just written. If no memory is left, the string is not stored, and is written again at its
 * next use. */
static void store_string(const char *text, size_t length, uint64_t key, uint32_t id)
{
    written_string *new_strings =
        array_reserve(strings, &string_capacity, stored_string_count + 1, sizeof *strings, 1024);
    if (!new_strings)
        return;
    strings = new_strings;
    char *text_copy = strndup(text, length);
    if (!text_copy)
        return;
    strings[stored_string_count] = (written_string){text_copy, id};
    if (hash_table_put(&string_numbers, key, (uint32_t)stored_string_count + 1))
        free(text_copy);
    else
        stored_string_count++;
}

uint32_t spool_text(const char *text)
{
    static char payload[sizeof(uint32_t) + TEXT_LIMIT]; /* protected by the recorder lock */
    uint32_t length = text ? (uint32_t)strnlen(text, TEXT_LIMIT) : 0;
    if (!length)
        return 0;
    uint64_t key;
    uint32_t id = find_string(text, length, &key);
    if (id)
        return id;
    memcpy(payload, &length, sizeof length);
    memcpy(payload + sizeof length, text, length);
    if (append_block("text", 1, payload, sizeof length + length))
        return 0;
    store_string(text, length, key, ++string_count);
    return string_count;
}

bool spool_has_text(const char *text)
{
    const size_t length = strnlen(text, TEXT_LIMIT);
    uint64_t key;
    return !length || find_string(text, length, &key);
}

uint32_t spool_stack(const spool_frame *frames, uint32_t depth)
{
    uint32_t payload[1 + 3 * 256];
    if (!depth || depth > 256)
        return 0;
    payload[0] = depth;
    memcpy(payload + 1, frames, depth * sizeof *frames);
    if (append_block("stak", 1, payload, sizeof(uint32_t) * (1 + 3 * depth)))
        return 0;
    return ++stack_count;
}

void spool_notice(const char *kind, const char *line)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%d.%s", directory, (int)getpid(), kind);
    FILE *file = fopen(path, "ae");
    if (!file)
        return; /* the reader has ended */
    fprintf(file, "%s\n", line);
    fclose(file);
}

uint64_t spool_lost(int *error_number)
{
    *error_number = loss_errno;
    return lost_record_count;
}

uint64_t spool_written(void)
{
    return written_record_count;
}
