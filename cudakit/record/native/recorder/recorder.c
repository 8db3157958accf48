/* The state that all parts of the recorder share, and the functions that begin and append records. */
#define _GNU_SOURCE
#include "recorder.h"

#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "write/spool.h"

__thread thread_state this_thread;
/* An adaptive mutex: waiting threads spin before they sleep, because the recorder lock is held for microseconds. */
pthread_mutex_t recorder_lock = PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP;

#define MAX_CONTEXTS 4096
#define MAX_DETAIL 256

static uint64_t last_seq;
static int16_t context_devices[MAX_CONTEXTS]; /* device of each context, by context id */

static bool uses_templates, patches_modules;
static void (*prepare_record)(void);

void templates_enable(void)
{
    uses_templates = true;
}

bool templates_are_enabled(void)
{
    return uses_templates;
}

void patching_enable(void)
{
    patches_modules = true;
}

bool patching_is_enabled(void)
{
    return patches_modules;
}

void record_prepare_with(void (*prepare)(void))
{
    prepare_record = prepare;
}

void set_context_device(uint32_t context, int device)
{
    if (context < MAX_CONTEXTS)
        context_devices[context] = (int16_t)device;
}

int context_device(uint32_t context)
{
    return context < MAX_CONTEXTS ? context_devices[context] : -1;
}

int64_t monotonic_ns(void)
{
    struct timespec current_time;
    clock_gettime(CLOCK_MONOTONIC, &current_time);
    return (int64_t)current_time.tv_sec * 1000000000 + current_time.tv_nsec;
}

record record_begin(uint16_t kind, uint32_t context, uint32_t stream, uint32_t site)
{
    return record_begin_at(monotonic_ns(), kind, context, stream, site);
}

record record_begin_at(int64_t time_ns, uint16_t kind, uint32_t context, uint32_t stream, uint32_t site)
{
    record rec;
    if (!this_thread.id)
        this_thread.id = (uint32_t)syscall(SYS_gettid);
    if (prepare_record)
        prepare_record();
    memset(&rec, 0, sizeof rec);
    rec.seq = ++last_seq;
    rec.time_ns = time_ns;
    rec.thread = this_thread.id;
    rec.kind = kind;
    rec.context = context;
    rec.stream = stream;
    rec.site = site;
    rec.device = context < MAX_CONTEXTS ? context_devices[context] : 0;
    return rec;
}

void record_append(const record *rec)
{
    spool_records(rec, 1);
}

void record_gaps(const char *reason, uint64_t count)
{
    record rec = record_begin(KIND_GAP, 0, 0, 0);
    rec.gap.reason = spool_text(reason);
    rec.gap.count = count;
    record_append(&rec);
}

void record_gap(const char *reason)
{
    record_gaps(reason, 1);
}

void record_gap_detail(const char *reason, const char *detail)
{
    char text[MAX_DETAIL];
    snprintf(text, sizeof text, "%s%s", reason, detail);
    record_gaps(text, 1);
}

static void append_delay(uint64_t seq, bool is_pending)
{
    record rec = record_begin(KIND_LAUNCH_DELAYED, 0, 0, 0);
    if (seq)
        rec.seq = seq;
    rec.launch_delay.pending = is_pending;
    this_thread.delayed_seq = is_pending ? rec.seq : 0;
    record_append(&rec);
}

void launch_begin_delay(void)
{
    if (this_thread.delayed_seq)
        return;
    pthread_mutex_lock(&recorder_lock);
    append_delay(0, true);
    pthread_mutex_unlock(&recorder_lock);
}

uint64_t launch_seq(uint64_t new_seq)
{
    return this_thread.delayed_seq ? this_thread.delayed_seq : new_seq;
}

void launch_end_delay(void)
{
    if (this_thread.delayed_seq)
        append_delay(this_thread.delayed_seq, false);
}

void record_append_and_unlock(const record *rec)
{
    record_append(rec);
    pthread_mutex_unlock(&recorder_lock);
}
