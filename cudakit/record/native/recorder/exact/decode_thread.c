#define _GNU_SOURCE
#include "exact/decode_thread.h"

#include <pthread.h>
#include <signal.h>
#include <string.h>

#include "exact/templates.h"

static pthread_mutex_t job_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t job_changed = PTHREAD_COND_INITIALIZER;
/* job_mutex protects the variables below. */
static enum { JOB_FREE, JOB_ACQUIRED, JOB_SUBMITTED } job_state;
static bool has_thread;
static decode_job
    the_job; /* used by the decode thread while submitted, else by the thread that acquired the job */

static void set_state(int state)
{
    pthread_mutex_lock(&job_mutex);
    job_state = state;
    pthread_cond_broadcast(&job_changed);
    pthread_mutex_unlock(&job_mutex);
}

/* Convert the copy of a job, and clear its lists for the next one. */
static void run_job(decode_job *job)
{
    launch_arena *arena = &job->launches;
    const arena_launches launches = {arena->launches,    arena->launch_count,   arena->groups,
                                     arena->group_count, arena->reached_ranges, arena->pointers};
    emit_accesses(&job->copy, &launches, &arena->tma_stores, job->is_attribution_lost);
    if (arena->launch_count)
        memset(arena->launches, 0, arena->launch_count * sizeof *arena->launches);
    arena->launch_count = 0;
    arena->group_count = arena->tma_stores.map_count = arena->reached_range_count = arena->pointer_count = 0;
    set_state(JOB_FREE);
}

static void *thread_main(void *unused)
{
    (void)unused;
    for (;;) {
        pthread_mutex_lock(&job_mutex);
        while (job_state != JOB_SUBMITTED)
            pthread_cond_wait(&job_changed, &job_mutex);
        pthread_mutex_unlock(&job_mutex);
        run_job(&the_job);
    }
    return NULL;
}

/* Start the decode thread, which receives no signals of the program. Return false on failure. job_mutex is held. */
static bool start_thread(void)
{
    pthread_t thread;
    sigset_t all_signals, old_signals;
    sigfillset(&all_signals);
    pthread_sigmask(SIG_SETMASK, &all_signals, &old_signals);
    has_thread = !pthread_create(&thread, NULL, thread_main, NULL);
    pthread_sigmask(SIG_SETMASK, &old_signals, NULL);
    if (has_thread) {
        pthread_setname_np(thread, "cudakit-decode"); /* a new thread has the name of its creator */
        pthread_detach(thread);
    }
    return has_thread;
}

decode_job *decode_acquire(bool must_wait)
{
    pthread_mutex_lock(&job_mutex);
    while (job_state != JOB_FREE && must_wait)
        pthread_cond_wait(&job_changed, &job_mutex);
    const bool is_free = job_state == JOB_FREE;
    if (is_free)
        job_state = JOB_ACQUIRED;
    pthread_mutex_unlock(&job_mutex);
    return is_free ? &the_job : NULL;
}

void decode_submit(decode_job *job, bool must_wait)
{
    pthread_mutex_lock(&job_mutex);
    const bool use_thread = !must_wait && templates_are_enabled() && (has_thread || start_thread());
    pthread_mutex_unlock(&job_mutex);
    if (use_thread)
        set_state(JOB_SUBMITTED);
    else
        run_job(job);
}

void decode_wait(void)
{
    if (decode_acquire(true))
        set_state(JOB_FREE);
}

void decode_clear(void)
{
    job_mutex = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    job_changed = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    job_state = JOB_FREE;
    has_thread = false;
    memset(&the_job, 0, sizeof the_job); /* the decode thread may have been using the job during the fork */
}
