#define _GNU_SOURCE
#include "profile/window.h"

#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "hooks/hooks.h"
#include "model/ranges.h"
#include "profile/activity.h"
#include "profile/callbacks.h"
#include "recorder.h"
#include "vendor/cupti_api.h"
#include "write/spool.h"

#define EXPORTED __attribute__((visibility("default")))
#define INJECTION_VARIABLE "CUDA_INJECTION64_PATH"
#define NOT_PROFILED "the process was not profiled: "
#define RANGE_BYTES 1024
#define ERROR_BYTES 1024
#define FLUSH_INTERVAL_NS 200000000ll /* completed records are written at this interval */
#define LOCK_TIMEOUT_S 1
#define THREAD_TIMEOUT_S 2

/* The options, as configured by profile_at_first_use() or profile_begin(). */
static char library_path[PATH_MAX], range_name[RANGE_BYTES];
static int64_t delay_ns, duration_ns;
static bool is_configured;

/* The state of the profile. A thread that changes the state holds ``window_lock``, also while it calls CUPTI.
 * Callbacks of CUPTI wait for this lock LOCK_TIMEOUT_S at most: its holder may be waiting for the callbacks. */
static pthread_mutex_t window_lock = PTHREAD_MUTEX_INITIALIZER;
static CUpti_SubscriberHandle subscriber; /* NULL before the profile begins and after it has ended */
static bool is_open;                      /* whether work and calls are recorded now; accessed atomically */
static bool is_paused;                    /* whether the profile waits for a call of cudaProfilerStart */
static int64_t begin_ns;                  /* time from which the delay counts */
static int64_t end_ns;                    /* time at which the profile ends; 0 if it is not determined */
static uint32_t generation;               /* number of times the window was opened; accessed atomically */
static int open_range_count; /* number of open ranges with the name in the options; accessed atomically */
static bool exit_handler_is_registered;

/* The timer thread, which flushes records, and opens and closes the window at the right times. */
static pthread_t timer_thread;
static bool has_timer_thread, timer_must_stop;
static pthread_mutex_t timer_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t timer_condition = PTHREAD_COND_INITIALIZER;

/* Take the window lock. Return false after a timeout. */
static bool lock_window(void)
{
    struct timespec deadline;
    clock_gettime(CLOCK_REALTIME, &deadline);
    deadline.tv_sec += LOCK_TIMEOUT_S;
    return !pthread_mutex_timedlock(&window_lock, &deadline);
}

/* --- open and close ----------------------------------------------------------------------------- */

/* Return the rank of this process in a job, or -1. torchrun, Open MPI, MPICH and Slurm set these variables. */
static int32_t rank_in_job(void)
{
    static const char *const VARIABLES[] = {"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"};
    for (size_t i = 0; i < sizeof VARIABLES / sizeof *VARIABLES; i++) {
        const char *rank_text = getenv(VARIABLES[i]);
        char *end = NULL;
        const long rank = rank_text ? strtol(rank_text, &end, 10) : -1;
        if (end && end != rank_text && !*end && rank >= 0 && rank <= INT32_MAX)
            return (int32_t)rank;
    }
    return -1;
}

static void record_window(bool opens)
{
    pthread_mutex_lock(&recorder_lock);
    record rec = record_begin(KIND_PROFILE_WINDOW, 0, 0, 0);
    rec.profile_window.is_open = opens;
    rec.profile_window.rank = rank_in_job();
    record_append(&rec);
    pthread_mutex_unlock(&recorder_lock);
}

static void record_failure(const char *failed_call, int result)
{
    char reason[ERROR_BYTES];
    library_describe_error(failed_call, result, reason, sizeof reason);
    pthread_mutex_lock(&recorder_lock);
    record_gap_detail("the profile could not begin: ", reason);
    pthread_mutex_unlock(&recorder_lock);
}

/* Start recording. The window lock is held. */
static void open_window(void)
{
    __atomic_fetch_add(&generation, 1, __ATOMIC_ACQ_REL);
    const char *failed_call = "cuptiActivityEnable";
    int result = activity_enable();
    if (!result) {
        failed_call = "cuptiEnableCallback";
        result = api_calls_enable(subscriber, true);
    }
    if (result) {
        activity_disable();
        record_failure(failed_call, result);
        is_paused = true;
        return;
    }
    __atomic_store_n(&is_open, true, __ATOMIC_RELEASE);
    nccl_pause(false);
    record_window(true);
    if (duration_ns && !end_ns)
        end_ns = monotonic_ns() + duration_ns;
}

/* Stop recording. The window lock is held. */
static void close_window(void)
{
    nccl_pause(true);
    record_window(false);
    api_calls_enable(subscriber, false);
    activity_disable();
    __atomic_store_n(&is_open, false, __ATOMIC_RELEASE);
}

/* Open or close the window, as the delay, the range and the calls of the program require. The window lock is held. */
static void update_window(void)
{
    if (!subscriber)
        return;
    const bool is_in_range = !*range_name || __atomic_load_n(&open_range_count, __ATOMIC_ACQUIRE) > 0;
    const bool must_open = !is_paused && is_in_range && monotonic_ns() >= begin_ns + delay_ns;
    if (must_open && !is_open)
        open_window();
    else if (!must_open && is_open)
        close_window();
}

static void update_window_now(void)
{
    if (lock_window()) {
        update_window();
        pthread_mutex_unlock(&window_lock);
    }
}

/* The process is profiled while a range with the name in the options is open. */
static bool window_is_range(const char *name)
{
    return *range_name && !strcmp(name, range_name);
}

static void window_range_began(void)
{
    if (__atomic_fetch_add(&open_range_count, 1, __ATOMIC_ACQ_REL) == 0)
        update_window_now();
}

static void window_range_ended(void)
{
    if (__atomic_fetch_sub(&open_range_count, 1, __ATOMIC_ACQ_REL) == 1)
        update_window_now();
}

static const range_observer OBSERVER = {window_is_range, window_range_began, window_range_ended};

/* Handle cudaProfilerStart and cudaProfilerStop. */
static void window_pause(bool pause)
{
    if (lock_window()) {
        is_paused = pause;
        update_window();
        pthread_mutex_unlock(&window_lock);
    }
}

/* --- the end ------------------------------------------------------------------------------------ */

/* Wait for the work of the context that is current to this thread, so that its records are complete. */
static void synchronize_context(void)
{
    int (*get_current)(CUcontext *) = NULL, (*synchronize)(void) = NULL;
    void *driver_library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    CUcontext context = NULL;
    if (driver_library) {
        *(void **)&get_current = dlsym(driver_library, "cuCtxGetCurrent");
        *(void **)&synchronize = dlsym(driver_library, "cuCtxSynchronize");
    }
    if (!get_current || !synchronize)
        return;
    this_thread.in_recorder_call = true;
    if (!get_current(&context) && context)
        synchronize();
    this_thread.in_recorder_call = false;
}

/* Stop all callbacks and records. Return the former subscriber, which the caller unsubscribes. The window lock is held.
 */
static CUpti_SubscriberHandle stop_recording(void)
{
    CUpti_SubscriberHandle old_subscriber = subscriber;
    if (!old_subscriber)
        return NULL;
    nccl_pause(true);
    if (is_open) {
        record_window(false);
        activity_disable();
        api_calls_enable(old_subscriber, false);
        __atomic_store_n(&is_open, false, __ATOMIC_RELEASE);
    }
    resources_enable(old_subscriber, false);
    subscriber = NULL;
    return old_subscriber;
}

/* Write all records and unsubscribe. If ``program_has_ended``, work without an end time is counted as lost;
 * otherwise, such work ends after the profile and is not part of the profile. CUPTI stays loaded: cuptiFinalize,
 * which detaches it from the process, crashed programs whose threads launched work meanwhile (CUDA 13.0). */
static void end_profile_now(bool program_has_ended)
{
    activity_flush();
    if (!lock_window())
        return;
    CUpti_SubscriberHandle old_subscriber = stop_recording();
    pthread_mutex_unlock(&window_lock);
    if (!old_subscriber)
        return;
    activity_flush_unfinished(program_has_ended);
    cupti.unsubscribe(old_subscriber);
}

/* --- the timer thread --------------------------------------------------------------------------- */

/* Wait until a time, but until the next flush at most. Return false if the thread must stop. */
static bool wait_until(int64_t wake_ns)
{
    const int64_t remaining_ns = wake_ns ? wake_ns - monotonic_ns() : FLUSH_INTERVAL_NS;
    const int64_t wait_ns = remaining_ns < 0                   ? 0
                            : remaining_ns < FLUSH_INTERVAL_NS ? remaining_ns
                                                               : FLUSH_INTERVAL_NS;
    struct timespec deadline;
    clock_gettime(CLOCK_REALTIME, &deadline);
    const int64_t deadline_ns = deadline.tv_nsec + wait_ns;
    deadline.tv_sec += deadline_ns / 1000000000;
    deadline.tv_nsec = deadline_ns % 1000000000;
    pthread_mutex_lock(&timer_lock);
    int result = 0;
    while (!timer_must_stop && result != ETIMEDOUT)
        result = pthread_cond_timedwait(&timer_condition, &timer_lock, &deadline);
    const bool must_continue = !timer_must_stop;
    pthread_mutex_unlock(&timer_lock);
    return must_continue;
}

/* Return the next time at which the window changes, or 0. The window lock is not held: the times change rarely. */
static int64_t next_change_ns(void)
{
    const int64_t open_ns = begin_ns + delay_ns;
    return delay_ns && !is_open && monotonic_ns() < open_ns ? open_ns : end_ns;
}

static void *run_timer(void *unused)
{
    (void)unused;
    while (wait_until(next_change_ns())) {
        if (end_ns && monotonic_ns() >= end_ns) {
            end_profile_now(false);
            return NULL;
        }
        update_window_now();
        activity_flush();
    }
    return NULL;
}

/* Start the timer thread, which blocks all signals: they belong to the threads of the program. */
static void start_timer(void)
{
    sigset_t all_signals, previous_signals;
    sigfillset(&all_signals);
    timer_must_stop = false;
    pthread_sigmask(SIG_SETMASK, &all_signals, &previous_signals);
    has_timer_thread = !pthread_create(&timer_thread, NULL, run_timer, NULL);
    pthread_sigmask(SIG_SETMASK, &previous_signals, NULL);
}

static void stop_timer(void)
{
    struct timespec deadline;
    if (!has_timer_thread)
        return;
    has_timer_thread = false;
    pthread_mutex_lock(&timer_lock);
    timer_must_stop = true;
    pthread_cond_signal(&timer_condition);
    pthread_mutex_unlock(&timer_lock);
    clock_gettime(CLOCK_REALTIME, &deadline);
    deadline.tv_sec += THREAD_TIMEOUT_S;
    if (pthread_timedjoin_np(timer_thread, NULL, &deadline))
        pthread_detach(timer_thread);
}

/* --- begin and end of the profile --------------------------------------------------------------- */

static void on_cupti_callback(void *unused, int domain, uint32_t cbid, const void *data)
{
    profiler_control control;
    (void)unused;
    switch (domain) {
    case CUPTI_DOMAIN_DRIVER:
    case CUPTI_DOMAIN_RUNTIME:
        control = api_calls_on_callback(domain, cbid, data, __atomic_load_n(&generation, __ATOMIC_ACQUIRE),
                                        __atomic_load_n(&is_open, __ATOMIC_ACQUIRE));
        if (control != PROFILER_UNCHANGED)
            window_pause(control == PROFILER_STOP);
        break;
    case CUPTI_DOMAIN_RESOURCE: resources_on_callback(cbid, data); break;
    }
}

/* Store the options. Returns false if a path or name is too long. */
static bool store_options(const profile_options *options)
{
    if (strlen(options->library_path) >= sizeof library_path || strlen(options->range_name) >= sizeof range_name)
        return false;
    snprintf(library_path, sizeof library_path, "%s", options->library_path);
    snprintf(range_name, sizeof range_name, "%s", options->range_name);
    delay_ns = (int64_t)(options->delay_s * 1e9);
    duration_ns = (int64_t)(options->duration_s * 1e9);
    is_paused = options->is_paused;
    is_configured = true;
    ranges_set_observer(&OBSERVER);
    nccl_pause(true);
    nccl_attach();
    return true;
}

/* Subscribe, and open the window if it begins now. The window lock is held. */
static bool subscribe(char *error, size_t error_bytes)
{
    CUpti_SubscriberHandle new_subscriber = library_subscribe(library_path, on_cupti_callback, error, error_bytes);
    if (!new_subscriber)
        return false;
    api_calls_find();
    const char *failed_call = "cuptiActivityRegisterCallbacks";
    int result = activity_prepare();
    if (!result) {
        failed_call = "cuptiEnableCallback";
        result = resources_enable(new_subscriber, true);
    }
    if (!result)
        result = api_calls_enable_control(new_subscriber);
    if (result) {
        library_describe_error(failed_call, result, error, error_bytes);
        cupti.unsubscribe(new_subscriber);
        return false;
    }
    subscriber = new_subscriber;
    begin_ns = monotonic_ns();
    end_ns = 0;
    update_window();
    return true;
}

/* Begin the profile with the stored options. */
static bool begin_configured_profile(char *error, size_t error_bytes)
{
    if (!lock_window()) {
        snprintf(error, error_bytes, "the profile is beginning in another thread");
        return false;
    }
    const bool must_subscribe = !subscriber;
    const bool has_begun = !must_subscribe || subscribe(error, error_bytes);
    pthread_mutex_unlock(&window_lock);
    if (!has_begun || !must_subscribe)
        return has_begun;
    /* Exit handlers run in reverse order. This one is registered after the library is loaded, so that it runs before
     * the exit handler of the library. */
    if (!exit_handler_is_registered)
        exit_handler_is_registered = !atexit(profile_end);
    start_timer();
    return true;
}

bool profile_begin(const profile_options *options, char *error, size_t error_bytes)
{
    if (store_options(options))
        return begin_configured_profile(error, error_bytes);
    snprintf(error, error_bytes, "a name in the options is too long");
    return false;
}

const char *profile_at_first_use(const profile_options *options)
{
    char path[PATH_MAX];
    Dl_info this_library;
    if (!dladdr((const void *)profile_at_first_use, &this_library) || !realpath(this_library.dli_fname, path))
        return NULL;
    const char *other_tool = getenv(INJECTION_VARIABLE);
    if (other_tool && *other_tool && strcmp(other_tool, path) != 0)
        return other_tool;
    if (store_options(options))
        setenv(INJECTION_VARIABLE, path, 1);
    return NULL;
}

/* Begin the profile. The driver calls this function at the first use of CUDA. The result is always success, because
 * CUDA works without a profile too. */
EXPORTED int InitializeInjection(void)
{
    char error[ERROR_BYTES] = "";
    if (!is_configured || begin_configured_profile(error, sizeof error))
        return 1;
    char message[ERROR_BYTES + sizeof NOT_PROFILED];
    snprintf(message, sizeof message, NOT_PROFILED "%s", error);
    spool_notice("unrecorded", message);
    return 1;
}

void profile_end(void)
{
    stop_timer();
    if (!subscriber)
        return;
    synchronize_context();
    end_profile_now(true);
}

void profile_cancel(void)
{
    profile_end();
    if (is_configured)
        unsetenv(INJECTION_VARIABLE);
    nccl_detach();
    is_configured = false;
}

void profile_forked(void)
{
    window_lock = timer_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    timer_condition = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    has_timer_thread = is_open = false;
    subscriber = NULL;
    open_range_count = 0;
    activity_forked();
    api_calls_forked();
    resources_forked();
}
