/* The recorder as a profiler plugin of NCCL, by which NCCL reports the buffers of collectives.
 *
 * NCCL loads the library that NCCL_PROFILER_PLUGIN names when the first communicator is created. This is the file of
 * the recorder, which the process has already loaded, so both have the same state. The functions below return 0 in
 * every case, so that NCCL never changes its behavior. A handle that NCCL gets is not a pointer but an id with a tag,
 * so that NCCL may safely pass the handle of an object that no longer exists.
 *
 * A call of NCCL, such as ncclAllReduce, makes these events (version 5 and newer; older versions make only the last
 * three): CollApi or P2pApi when it is called; KernelLaunch around the launch of its kernel; Group around Coll or P2p
 * for each operation of the kernel. Group follows the launch on the same thread, or comes from a host function of the
 * stream. */
#define _GNU_SOURCE
#include "hooks/nccl_profiler.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "hooks/hooks.h"
#include "model/collectives.h"
#include "recorder.h"

#define PLUGIN_VARIABLE "NCCL_PROFILER_PLUGIN"
#define DEFAULT_PLUGIN "libnccl-profiler.so" /* the library that NCCL loads if the variable is not set */
#define MAX_PLUGIN_PATH 254                  /* NCCL truncates longer names */
#define EXPORTED __attribute__((visibility("default")))

/* Whether NCCL's communicators are recorded, and whether the recording of their operations is paused. Both
 * variables are read without the recorder lock. */
static bool is_enabled, is_paused;

/* --- handles ------------------------------------------------------------------------------------- */

enum tag { TAG_CALL = 1, TAG_LAUNCH, TAG_REPORT, TAG_GROUP_CALL };
#define TAG_BITS 3

static void *handle_of(uint64_t id, enum tag tag)
{
    return id ? (void *)(uintptr_t)(id << TAG_BITS | tag) : NULL;
}

/* Return the id of a handle, or 0 if the handle has another tag. */
static uint64_t id_of_handle(const void *handle, enum tag tag)
{
    uint64_t tagged_id = (uintptr_t)handle;
    return (tagged_id & ((1u << TAG_BITS) - 1)) == tag ? tagged_id >> TAG_BITS : 0;
}

/* Context of a communicator that is not recorded. If a context is NULL, NCCL treats the plugin as missing. */
#define NOT_RECORDED ((void *)(uintptr_t)UINT32_MAX)

/* Return the number of the communicator that has a context: the context is this number. */
static uint32_t communicator_number_of(const void *context)
{
    return (uint32_t)(uintptr_t)context;
}

static bool is_attached(void)
{
    return __atomic_load_n(&is_enabled, __ATOMIC_ACQUIRE);
}

static bool is_recording(void)
{
    return is_attached() && !__atomic_load_n(&is_paused, __ATOMIC_ACQUIRE);
}

/* --- functions and datatypes ---------------------------------------------------------------------- */

static uint8_t function_by_name(const char *name)
{
    static const char *const NAMES[] = {
        [COLLECTIVE_ALL_REDUCE] = "AllReduce",
        [COLLECTIVE_ALL_GATHER] = "AllGather",
        [COLLECTIVE_REDUCE_SCATTER] = "ReduceScatter",
        [COLLECTIVE_BROADCAST] = "Broadcast",
        [COLLECTIVE_REDUCE] = "Reduce",
        [COLLECTIVE_SEND] = "Send",
        [COLLECTIVE_RECEIVE] = "Recv",
    };
    for (uint8_t i = 1; name && i < sizeof NAMES / sizeof *NAMES; i++)
        if (!strcmp(name, NAMES[i]))
            return i;
    return COLLECTIVE_UNKNOWN;
}

/* Return COLLECTIVE_* for a function number of version 1 of the interface: a value of ncclFunc_t in NCCL 2.23. */
static uint8_t function_by_number(uint8_t nccl_number)
{
    static const uint8_t FUNCTIONS[] = {COLLECTIVE_BROADCAST,      COLLECTIVE_REDUCE,     COLLECTIVE_ALL_GATHER,
                                        COLLECTIVE_REDUCE_SCATTER, COLLECTIVE_ALL_REDUCE, COLLECTIVE_UNKNOWN,
                                        COLLECTIVE_SEND,           COLLECTIVE_RECEIVE};
    return nccl_number < sizeof FUNCTIONS ? FUNCTIONS[nccl_number] : COLLECTIVE_UNKNOWN;
}

static uint8_t datatype_by_number(unsigned nccl_number)
{
    return nccl_number < DATATYPE_FLOAT8_E5M2 ? (uint8_t)(nccl_number + 1) : DATATYPE_UNKNOWN;
}

static uint8_t datatype_by_name(const char *name)
{
    static const char *const NAMES[] = {"ncclInt8",    "ncclUint8",    "ncclInt32",      "ncclUint32",
                                        "ncclInt64",   "ncclUint64",   "ncclFloat16",    "ncclFloat32",
                                        "ncclFloat64", "ncclBfloat16", "ncclFloat8e4m3", "ncclFloat8e5m2"};
    for (unsigned i = 0; name && i < sizeof NAMES / sizeof *NAMES; i++)
        if (!strcmp(name, NAMES[i]))
            return datatype_by_number(i);
    return DATATYPE_UNKNOWN;
}

/* Return a point-to-point operation with its only buffer. */
static collective point_to_point_operation(uint8_t function, uint8_t datatype, const void *buffer, size_t count,
                                           int peer)
{
    const uint64_t address = (uintptr_t)buffer;
    const bool is_send = function == COLLECTIVE_SEND;
    return (collective){.function = function,
                        .datatype = datatype,
                        .send_address = is_send ? address : 0,
                        .receive_address = is_send ? 0 : address,
                        .element_count = count,
                        .root = peer};
}

/* Make the operation of a Coll event, or of a P2P event, of version 2 or newer of the interface. */
#define COLLECTIVE_OF(event) \
    ((collective){function_by_name((event)->coll.function), datatype_by_name((event)->coll.datatype), \
                  (uintptr_t)(event)->coll.send, (uintptr_t)(event)->coll.receive, (event)->coll.count, \
                  (event)->coll.root})
#define POINT_TO_POINT_OF(event) \
    point_to_point_operation(function_by_name((event)->p2p.function), datatype_by_name((event)->p2p.datatype), \
                             (event)->p2p.buffer, (event)->p2p.count, (event)->p2p.peer)

/* --- events -------------------------------------------------------------------------------------- */

/* The plan (model/collectives.h) whose buffers NCCL reports on this thread. NCCL reports all buffers of a plan
 * between the begin and the end of its Group event, on one thread. */
static __thread uint64_t reported_plan;

static void begin_report(const void *context, void **handle)
{
    reported_plan = collective_report_begin(communicator_number_of(context));
    *handle = handle_of(reported_plan, TAG_REPORT);
}

static int start_event_v1(void *context, void **handle, const void *descriptor)
{
    const nccl_event_v1 *event = descriptor;
    *handle = NULL;
    if (!is_recording() || !communicator_number_of(context))
        return 0;
    if (event->type == NCCL_GROUP) {
        begin_report(context, handle);
    } else if (event->type == NCCL_COLL) {
        const collective operation = {function_by_number(event->coll.function),
                                      datatype_by_number(event->coll.datatype),
                                      (uintptr_t)event->coll.send,
                                      (uintptr_t)event->coll.receive,
                                      event->coll.count,
                                      event->coll.root};
        communicator_set_hash_and_rank(communicator_number_of(context), event->coll.communicator_hash,
                                       event->rank);
        collective_add_to_plan(reported_plan, 0, &operation);
    } else if (event->type == NCCL_P2P) {
        const collective operation = point_to_point_operation(
            function_by_number(event->p2p.function), datatype_by_number(event->p2p.datatype), event->p2p.buffer,
            event->p2p.count, event->p2p.peer);
        communicator_set_hash_and_rank(communicator_number_of(context), event->p2p.communicator_hash, event->rank);
        collective_add_to_plan(reported_plan, 0, &operation);
    }
    return 0;
}

static int start_event_v2(void *context, void **handle, const void *descriptor)
{
    const nccl_event_v2 *event = descriptor;
    *handle = NULL;
    if (!is_recording() || !communicator_number_of(context))
        return 0;
    if (event->type == NCCL_GROUP) {
        begin_report(context, handle);
    } else if (event->type == NCCL_COLL) {
        const collective operation = COLLECTIVE_OF(event);
        communicator_set_hash_and_rank(communicator_number_of(context), event->coll.communicator_hash,
                                       event->rank);
        collective_add_to_plan(reported_plan, 0, &operation);
    } else if (event->type == NCCL_P2P) {
        const collective operation = POINT_TO_POINT_OF(event);
        communicator_set_hash_and_rank(communicator_number_of(context), event->p2p.communicator_hash, event->rank);
        collective_add_to_plan(reported_plan, 0, &operation);
    }
    return 0;
}

static int start_event_v4(void *context, void **handle, const void *descriptor)
{
    const nccl_event_v4 *event = descriptor;
    *handle = NULL;
    if (!is_recording() || !communicator_number_of(context))
        return 0;
    if (event->type == NCCL_GROUP) {
        begin_report(context, handle);
    } else if (event->type == NCCL_COLL) {
        const collective operation = COLLECTIVE_OF(event);
        collective_add_to_plan(reported_plan, 0, &operation);
    } else if (event->type == NCCL_P2P) {
        const collective operation = POINT_TO_POINT_OF(event);
        collective_add_to_plan(reported_plan, 0, &operation);
    }
    return 0;
}

/* Record the call of a collective or point-to-point operation, and return the handle of its event. */
static void *record_call(const void *context, const nccl_event_v5 *event)
{
    const bool is_collective = event->type == NCCL_COLL_API;
    const collective operation = {
        .function = function_by_name(is_collective ? event->coll_api.function : event->p2p_api.function),
        .datatype = datatype_by_name(is_collective ? event->coll_api.datatype : event->p2p_api.datatype),
        .element_count = is_collective ? event->coll_api.count : event->p2p_api.count,
        .root = is_collective ? event->coll_api.root : -1};
    const bool is_captured = is_collective ? event->coll_api.is_captured : event->p2p_api.is_captured;
    return handle_of(
        collective_record_call(communicator_number_of(context), (uintptr_t)event->parent, &operation, is_captured),
        TAG_CALL);
}

static int start_event_v5(void *context, void **handle, const void *descriptor)
{
    static uint64_t group_call_count; /* number of groups of calls, which is the id of the last group */
    const nccl_event_v5 *event = descriptor;
    *handle = NULL;
    if (!is_recording() || !communicator_number_of(context))
        return 0;
    switch (event->type) {
    case NCCL_GROUP_API:
        *handle = handle_of(__atomic_add_fetch(&group_call_count, 1, __ATOMIC_RELAXED), TAG_GROUP_CALL);
        break;
    case NCCL_COLL_API:
    case NCCL_P2P_API: *handle = record_call(context, event); break;
    case NCCL_KERNEL_LAUNCH:
        *handle = handle_of(collective_launch_begin(communicator_number_of(context)), TAG_LAUNCH);
        break;
    case NCCL_GROUP: begin_report(context, handle); break;
    case NCCL_COLL: {
        const collective operation = COLLECTIVE_OF(event);
        collective_add_to_plan(reported_plan, id_of_handle(event->parent, TAG_CALL), &operation);
        break;
    }
    case NCCL_P2P: {
        const collective operation = POINT_TO_POINT_OF(event);
        collective_add_to_plan(reported_plan, id_of_handle(event->parent, TAG_CALL), &operation);
        break;
    }
    case NCCL_COPY_ENGINE_COLL: collective_count_unreported("NCCL performs it by copies"); break;
    }
    return 0;
}

static int stop_event(void *handle)
{
    const uint64_t plan_of_launch = id_of_handle(handle, TAG_LAUNCH),
                   plan_of_report = id_of_handle(handle, TAG_REPORT);
    if (plan_of_launch)
        collective_launch_end(plan_of_launch);
    if (plan_of_report) {
        reported_plan = 0;
        collective_report_end(plan_of_report);
    }
    return 0;
}

static int record_event_state(void *handle, int state, const void *arguments)
{
    (void)handle, (void)state, (void)arguments;
    return 0;
}

/* --- communicators ------------------------------------------------------------------------------- */

static void *open_communicator(const communicator_info *info, int *activation_mask, int event_mask)
{
    uint32_t communicator_number = is_attached() ? communicator_open(info) : 0;
    *activation_mask = communicator_number ? event_mask : 0;
    return communicator_number ? (void *)(uintptr_t)communicator_number : NOT_RECORDED;
}

#define EVENTS_WITHOUT_CALLS (NCCL_GROUP | NCCL_COLL | NCCL_P2P)
#define ALL_EVENTS \
    (EVENTS_WITHOUT_CALLS | NCCL_GROUP_API | NCCL_COLL_API | NCCL_P2P_API | NCCL_KERNEL_LAUNCH | \
     NCCL_COPY_ENGINE_COLL)

static int init_without_calls(void **context, int *activation_mask, int version)
{
    const communicator_info info = {.rank = -1, .profiler_version = version};
    *context = open_communicator(&info, activation_mask, EVENTS_WITHOUT_CALLS);
    return 0;
}

static int init_v1(void **context, int *activation_mask)
{
    return init_without_calls(context, activation_mask, 1);
}

static int init_v2(void **context, int *activation_mask)
{
    return init_without_calls(context, activation_mask, 2);
}

static int init_v3(void **context, int *activation_mask)
{
    return init_without_calls(context, activation_mask, 3);
}

static int init_v4(void **context, int *activation_mask, const char *name, uint64_t hash, int node_count,
                   int rank_count, int rank, nccl_logger logger)
{
    const communicator_info info = {hash, name, rank, rank_count, 4};
    (void)node_count, (void)logger;
    *context = open_communicator(&info, activation_mask, EVENTS_WITHOUT_CALLS);
    return 0;
}

static int init_with_calls(void **context, int *activation_mask, const communicator_info *info)
{
    *context = open_communicator(info, activation_mask, ALL_EVENTS);
    return 0;
}

static int init_v5(void **context, uint64_t hash, int *activation_mask, const char *name, int node_count,
                   int rank_count, int rank, nccl_logger logger)
{
    const communicator_info info = {hash, name, rank, rank_count, 5};
    (void)node_count, (void)logger;
    return init_with_calls(context, activation_mask, &info);
}

static int init_v6(void **context, uint64_t hash, int *activation_mask, const char *name, int node_count,
                   int rank_count, int rank, nccl_logger logger)
{
    const communicator_info info = {hash, name, rank, rank_count, 6};
    (void)node_count, (void)logger;
    return init_with_calls(context, activation_mask, &info);
}

static int finalize(void *context)
{
    if (is_attached() && communicator_number_of(context))
        communicator_close(communicator_number_of(context));
    return 0;
}

#define NAME "cudakit"
EXPORTED const nccl_profiler_v1 ncclProfiler_v1 = {
    NAME, init_v1, start_event_v1, stop_event, record_event_state, finalize};
EXPORTED const nccl_profiler_v1 ncclProfiler_v2 = {
    NAME, init_v2, start_event_v2, stop_event, record_event_state, finalize};
EXPORTED const nccl_profiler_v1 ncclProfiler_v3 = {
    NAME, init_v3, start_event_v2, stop_event, record_event_state, finalize};
EXPORTED const nccl_profiler_v4 ncclProfiler_v4 = {
    NAME, init_v4, start_event_v4, stop_event, record_event_state, finalize};
EXPORTED const nccl_profiler_v5 ncclProfiler_v5 = {
    NAME, init_v5, start_event_v5, stop_event, record_event_state, finalize};
EXPORTED const nccl_profiler_v5 ncclProfiler_v6 = {
    NAME, init_v6, start_event_v5, stop_event, record_event_state, finalize};

/* --- attaching ----------------------------------------------------------------------------------- */

/* Return whether a directory of LD_LIBRARY_PATH has the plugin that NCCL would load without the variable. */
static bool has_default_plugin(void)
{
    char path[PATH_MAX];
    const char *remaining_directories = getenv("LD_LIBRARY_PATH");
    while (remaining_directories) {
        const char *colon = strchr(remaining_directories, ':');
        const int length = (int)(colon ? colon - remaining_directories : (ptrdiff_t)strlen(remaining_directories));
        snprintf(path, sizeof path, "%.*s/%s", length, remaining_directories, DEFAULT_PLUGIN);
        if (length && !access(path, R_OK))
            return true;
        remaining_directories = colon ? colon + 1 : NULL;
    }
    return false;
}

/* Set NCCL_PROFILER_PLUGIN so that NCCL loads this library. Return NULL, or the reason why NCCL will not load it. */
static const char *set_plugin_variable(void)
{
    char path[PATH_MAX];
    Dl_info this_library;
    const char *plugin = getenv(PLUGIN_VARIABLE);
    if (!dladdr((const void *)set_plugin_variable, &this_library) || !realpath(this_library.dli_fname, path))
        return "the path of the recorder is unknown";
    if (plugin && !strcmp(plugin, path))
        return NULL;
    if (plugin && *plugin)
        return PLUGIN_VARIABLE " names another plugin";
    if (has_default_plugin())
        return "LD_LIBRARY_PATH has another plugin, " DEFAULT_PLUGIN;
    if (strlen(path) > MAX_PLUGIN_PATH)
        return "the path of the recorder is longer than 254 characters";
    setenv(PLUGIN_VARIABLE, path, 1);
    return NULL;
}

void nccl_attach(void)
{
    collectives_set_refusal(set_plugin_variable());
    __atomic_store_n(&is_enabled, true, __ATOMIC_RELEASE);
}

void nccl_detach(void)
{
    __atomic_store_n(&is_enabled, false, __ATOMIC_RELEASE);
}

void nccl_pause(bool pause)
{
    /* The buffers of an operation whose launch was not recorded must not be assigned to a later launch. */
    if (!pause)
        collectives_discard_plans();
    __atomic_store_n(&is_paused, pause, __ATOMIC_RELEASE);
}
