#define _GNU_SOURCE
#include "exact/arena_pool.h"

#include <time.h>
#include <unistd.h>

#include "recorder.h"

#define SLEEP_US 200

static pthread_mutex_t reader_mutex = PTHREAD_MUTEX_INITIALIZER;

int64_t monotonic_now_ns(void)
{
    struct timespec current_time;
    clock_gettime(CLOCK_MONOTONIC, &current_time);
    return (int64_t)current_time.tv_sec * 1000000000 + current_time.tv_nsec;
}

void sleep_briefly(void)
{
    usleep(SLEEP_US);
}

bool reader_lock_acquire(int64_t timeout_ns)
{
    const int64_t deadline_ns = timeout_ns ? monotonic_now_ns() + timeout_ns : 0;
    while (pthread_mutex_trylock(&reader_mutex)) {
        if (!deadline_ns || monotonic_now_ns() >= deadline_ns)
            return false;
        sleep_briefly();
    }
    this_thread.in_recorder_call = true;
    return true;
}

void reader_lock_release(void)
{
    this_thread.in_recorder_call = false;
    pthread_mutex_unlock(&reader_mutex);
}

void reader_lock_reset(void)
{
    reader_mutex = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}
