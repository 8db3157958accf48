#define _GNU_SOURCE
#include "exact/reader_lock.h"

#include <pthread.h>
#include <unistd.h>

#include "recorder.h"

#define SLEEP_US 200

static pthread_mutex_t reader_mutex = PTHREAD_MUTEX_INITIALIZER;

void sleep_briefly(void)
{
    usleep(SLEEP_US);
}

bool reader_lock_acquire(int64_t timeout_ns)
{
    const int64_t deadline_ns = timeout_ns ? monotonic_ns() + timeout_ns : 0;
    while (pthread_mutex_trylock(&reader_mutex)) {
        if (!deadline_ns || monotonic_ns() >= deadline_ns)
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
