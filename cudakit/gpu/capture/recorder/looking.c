#define _GNU_SOURCE
#include "looking.h"

#include <time.h>
#include <unistd.h>

#include "recorder.h"

#define PAUSE_US 200

static pthread_mutex_t looking = PTHREAD_MUTEX_INITIALIZER;

int64_t looking_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

void looking_pause(void)
{
    usleep(PAUSE_US);
}

bool looking_begin(int64_t patience_ns)
{
    const int64_t until = patience_ns ? looking_now_ns() + patience_ns : 0;
    while (pthread_mutex_trylock(&looking)) {
        if (!until || looking_now_ns() >= until)
            return false;
        looking_pause();
    }
    this_thread.own_query = true;
    return true;
}

void looking_end(void)
{
    this_thread.own_query = false;
    pthread_mutex_unlock(&looking);
}

void looking_clear(void)
{
    looking = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}
