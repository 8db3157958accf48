#define _GNU_SOURCE
#include "model/ranges.h"

#include <stdlib.h>
#include <string.h>

#include "containers.h"
#include "recorder.h"
#include "write/call_sites.h"
#include "write/spool.h"

#define MAX_NAME_BYTES 1024
/* Maximum number of distinct names. Names stay in memory until the process ends, and a program can create a new name at
 * each step. */
#define MAX_NAMES 65536
#define TOO_MANY_NAMES "(range with one of too many names)"
/* Maximum number of threads of one backward pass that get copies of ranges. Autograd has one thread for each device. */
#define MAX_THREADS_WITH_COPIES 64

/* Maximum number of open ranges of a thread that autograd's threads get copies of. Further open ranges are recorded
 * without copies. */
#define MAX_OPEN_RANGES 32

/* The open ranges of a thread, outermost first; ``range_count`` includes ranges beyond the array. */
typedef struct {
    struct {
        uint32_t name, domain; /* text ids */
        bool is_profiled;      /* whether the observer is told of its end */
    } ranges[MAX_OPEN_RANGES];
    uint32_t range_count;
} open_ranges;

static uint32_t name_count;        /* number of distinct names so far */
static uint64_t last_range_number; /* number of the latest range that range_start() began */

static hash_table profiled_range_numbers; /* numbers of the open ranges of the process that are profiled */

/* The threads of the current backward pass that have copies of ranges, and the copied ranges. */
static struct {
    uint64_t threads[MAX_THREADS_WITH_COPIES];
    size_t thread_count;
    uint32_t generation; /* incremented when the copied ranges of all threads end */
    open_ranges ranges;
} range_copies = {.generation = 1};

/* The open ranges of this thread, and the generation of the copies that it has. */
static __thread open_ranges this_thread_ranges;
static __thread uint32_t this_thread_copy_generation;

static const range_observer *observer;

struct backward_pass {
    call_site start_site;
    pthread_t thread;
    const open_ranges *ranges; /* open ranges of the thread, which is blocked in the pass */
    backward_pass *next_pass;
};

static backward_pass *active_passes;
static bool passes_are_ranges; /* whether each backward pass is also recorded as a range */

void ranges_set_observer(const range_observer *new_observer)
{
    observer = new_observer;
}

/* Return whether the observer is told of the begin and the end of ranges with this name. */
static bool is_observed(const char *name)
{
    return observer && observer->is_observed(name);
}

/* --- names -------------------------------------------------------------------------------------- */

/* Return the length up to which a name can be cut without cutting a UTF-8 character in two. */
static size_t cut_length(const char *name, size_t length)
{
    size_t cut_end = length;
    while (cut_end && ((uint8_t)name[cut_end] & 0xC0) == 0x80)
        cut_end--;
    return cut_end;
}

/* Return the text id of the name of a range, mark or domain. The recorder lock is held. */
static uint32_t name_id(const char *name)
{
    static char shortened_name[MAX_NAME_BYTES + 1]; /* protected by the recorder lock */
    size_t length = strnlen(name, sizeof shortened_name);
    if (length > MAX_NAME_BYTES) {
        memcpy(shortened_name, name, cut_length(name, MAX_NAME_BYTES));
        shortened_name[cut_length(name, MAX_NAME_BYTES)] = 0;
        name = shortened_name;
    }
    if (spool_has_text(name))
        return spool_text(name);
    if (name_count == MAX_NAMES)
        return spool_text(TOO_MANY_NAMES);
    name_count++;
    return spool_text(name);
}

/* --- records ------------------------------------------------------------------------------------ */

/* Record the begin of a range. ``number`` is the number from range_start(), or 0 for a range of a thread. The recorder
 * lock is held. */
static void write_range_begin(uint32_t name, uint32_t domain, uint64_t number, bool is_copy)
{
    record rec = record_begin(KIND_RANGE_PUSH, 0, 0, 0);
    rec.range_push.name = name;
    rec.range_push.domain = domain;
    rec.range_push.number = number;
    rec.range_push.is_copy = is_copy;
    record_append(&rec);
}

/* Record the end of a range: the range with this number, or for 0 the innermost range of the calling thread. The
 * recorder lock is held. */
static void write_range_end(uint32_t domain, uint64_t number)
{
    record rec = record_begin(KIND_RANGE_POP, 0, 0, 0);
    rec.range_pop.domain = domain;
    rec.range_pop.number = number;
    record_append(&rec);
}

/* Return the number of open ranges that the array contains. */
static uint32_t count_stored_ranges(const open_ranges *thread_ranges)
{
    return thread_ranges->range_count < MAX_OPEN_RANGES ? thread_ranges->range_count : MAX_OPEN_RANGES;
}

/* Return the number of stored open ranges of a domain. */
static int count_open_in_domain(const open_ranges *thread_ranges, uint32_t domain)
{
    int depth = 0;
    for (uint32_t i = 0; i < count_stored_ranges(thread_ranges); i++)
        depth += thread_ranges->ranges[i].domain == domain;
    return depth;
}

int range_push(const char *name, const char *domain)
{
    open_ranges *thread_ranges = &this_thread_ranges;
    pthread_mutex_lock(&recorder_lock);
    uint32_t name_text_id = name_id(name), domain_text_id = name_id(domain);
    const bool is_profiled = is_observed(name) && thread_ranges->range_count < MAX_OPEN_RANGES;
    const int depth = count_open_in_domain(thread_ranges, domain_text_id);
    write_range_begin(name_text_id, domain_text_id, 0, false);
    if (thread_ranges->range_count < MAX_OPEN_RANGES) {
        thread_ranges->ranges[thread_ranges->range_count].name = name_text_id;
        thread_ranges->ranges[thread_ranges->range_count].domain = domain_text_id;
        thread_ranges->ranges[thread_ranges->range_count].is_profiled = is_profiled;
    }
    thread_ranges->range_count++;
    pthread_mutex_unlock(&recorder_lock);
    if (is_profiled)
        observer->began();
    return depth;
}

/* Remove the innermost open range of a domain, and set whether it is profiled. Return false if the domain has no open
 * range. */
static bool remove_innermost_range(open_ranges *thread_ranges, uint32_t domain, bool *is_profiled)
{
    *is_profiled = false;
    if (thread_ranges->range_count > MAX_OPEN_RANGES) {
        thread_ranges->range_count--;
        return true;
    }
    uint32_t i = thread_ranges->range_count;
    while (i && thread_ranges->ranges[i - 1].domain != domain)
        i--;
    if (!i)
        return false;
    *is_profiled = thread_ranges->ranges[i - 1].is_profiled;
    memmove(thread_ranges->ranges + i - 1, thread_ranges->ranges + i,
            (thread_ranges->range_count - i) * sizeof *thread_ranges->ranges);
    thread_ranges->range_count--;
    return true;
}

int range_pop(const char *domain)
{
    pthread_mutex_lock(&recorder_lock);
    const uint32_t domain_text_id = name_id(domain);
    bool is_profiled;
    const bool is_open = remove_innermost_range(&this_thread_ranges, domain_text_id, &is_profiled);
    const int depth = is_open ? count_open_in_domain(&this_thread_ranges, domain_text_id) : -1;
    if (is_open)
        write_range_end(domain_text_id, 0);
    pthread_mutex_unlock(&recorder_lock);
    if (is_profiled)
        observer->ended();
    return depth;
}

uint64_t range_start(const char *name, const char *domain)
{
    pthread_mutex_lock(&recorder_lock);
    const uint64_t number = ++last_range_number;
    const bool is_profiled = is_observed(name) && !hash_table_put(&profiled_range_numbers, number, 1);
    write_range_begin(name_id(name), name_id(domain), number, false);
    pthread_mutex_unlock(&recorder_lock);
    if (is_profiled)
        observer->began();
    return number;
}

void range_end(uint64_t number)
{
    pthread_mutex_lock(&recorder_lock);
    if (number && number <= last_range_number)
        write_range_end(0, number);
    const bool is_profiled = number && hash_table_remove(&profiled_range_numbers, number);
    pthread_mutex_unlock(&recorder_lock);
    if (is_profiled)
        observer->ended();
}

void range_mark(const char *name, const char *domain)
{
    pthread_mutex_lock(&recorder_lock);
    record rec = record_begin(KIND_MARK, 0, 0, 0);
    rec.mark.name = name_id(name);
    rec.mark.domain = name_id(domain);
    record_append(&rec);
    pthread_mutex_unlock(&recorder_lock);
}

/* --- backward passes ---------------------------------------------------------------------------- */

/* Autograd's threads work inside the ranges of the thread that started the backward pass: before the first record of
 * such a thread, write copies of these ranges for it. While several passes are active, it is unknown for which of them a
 * thread works. The recorder lock is held. */
static void copy_ranges_to_backward_thread(void)
{
    if (this_thread_copy_generation == range_copies.generation)
        return;
    if (!active_passes || active_passes->next_pass)
        return; /* the generation is not stored, because a pass may begin or end later */
    this_thread_copy_generation = range_copies.generation;
    if (!is_autograd_thread() || range_copies.thread_count == MAX_THREADS_WITH_COPIES)
        return;
    if (!range_copies.thread_count)
        range_copies.ranges = *active_passes->ranges;
    range_copies.threads[range_copies.thread_count++] = this_thread.id;
    for (uint32_t i = 0; i < count_stored_ranges(&range_copies.ranges); i++)
        write_range_begin(range_copies.ranges.ranges[i].name, range_copies.ranges.ranges[i].domain, 0, true);
}

/* Record the end of a copied range of another thread. The recorder lock is held. */
static void write_copy_end(uint64_t thread, uint32_t domain)
{
    record rec = record_begin(KIND_RANGE_POP, 0, 0, 0);
    rec.thread = thread;
    rec.range_pop.domain = domain;
    rec.range_pop.is_copy = true;
    record_append(&rec);
}

/* End all copies of ranges: the backward pass has ended, or a second backward pass begins. The recorder lock is held. */
static void end_copies(void)
{
    range_copies.generation++;
    for (size_t i = 0; i < range_copies.thread_count; i++)
        for (uint32_t j = count_stored_ranges(&range_copies.ranges); j-- > 0;)
            write_copy_end(range_copies.threads[i], range_copies.ranges.ranges[j].domain);
    range_copies.thread_count = 0;
}

void backward_record_ranges(void)
{
    passes_are_ranges = true;
}

/* Record the begin or the end of a pass that the calling thread started. The recorder lock is held. */
static void record_pass_range(uint16_t kind, const backward_pass *pass)
{
    if (!passes_are_ranges)
        return;
    const uint32_t site = pass->start_site.depth > 0 ? call_site_id(&pass->start_site) : 0;
    record rec = record_begin(kind, 0, 0, site);
    if (kind == KIND_RANGE_PUSH)
        rec.range_push.name = spool_text("backward pass");
    *(kind == KIND_RANGE_PUSH ? &rec.range_push.domain : &rec.range_pop.domain) = spool_text("cudakit");
    record_append(&rec);
}

/* Return whether a thread has not already started a backward pass, so that a new pass is not nested. */
static bool starts_new_pass(pthread_t thread)
{
    const backward_pass *innermost_pass = active_passes;
    while (innermost_pass && !pthread_equal(innermost_pass->thread, thread))
        innermost_pass = innermost_pass->next_pass;
    return !innermost_pass;
}

/* After a pass was added or removed: work of autograd's threads gets the stack and the ranges of the running pass. If
 * one pass is running, the thread that started it is blocked, so that the code objects of its frames are alive while
 * the recorder lock is held. The recorder lock is held. */
static void passes_changed(void)
{
    const bool is_certain = active_passes && !active_passes->next_pass;
    call_sites_set_autograd_site(is_certain ? &active_passes->start_site : NULL);
    record_prepare_with(active_passes ? copy_ranges_to_backward_thread : NULL);
}

backward_pass *backward_begin(void)
{
    backward_pass *new_pass = malloc(sizeof *new_pass);
    if (!new_pass)
        return NULL;
    call_site_read(&new_pass->start_site);
    new_pass->thread = pthread_self();
    new_pass->ranges = &this_thread_ranges;
    pthread_mutex_lock(&recorder_lock);
    bool is_new = starts_new_pass(new_pass->thread);
    if (is_new) {
        end_copies();
        new_pass->next_pass = active_passes;
        active_passes = new_pass;
        passes_changed();
        record_pass_range(KIND_RANGE_PUSH, new_pass);
    }
    pthread_mutex_unlock(&recorder_lock);
    if (is_new)
        return new_pass;
    free(new_pass);
    return NULL;
}

void backward_end(backward_pass *pass)
{
    if (!pass)
        return;
    pthread_mutex_lock(&recorder_lock);
    backward_pass **link = &active_passes;
    while (*link && *link != pass)
        link = &(*link)->next_pass;
    if (*link) { /* the child of a fork has no registered passes */
        *link = pass->next_pass;
        passes_changed();
        end_copies();
        record_pass_range(KIND_RANGE_POP, pass);
    }
    pthread_mutex_unlock(&recorder_lock);
    free(pass);
}

void ranges_clear(void)
{
    name_count = 0;
    hash_table_clear(&profiled_range_numbers);
    range_copies.thread_count = 0;
    range_copies.generation++;
    this_thread_ranges = (open_ranges){0};
    this_thread_copy_generation = 0;
    active_passes = NULL;
    passes_changed();
}
